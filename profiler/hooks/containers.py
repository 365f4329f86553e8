"""Which model a call belongs to when the outer model's own call was gone around.

`model.forward(...)`, or a class whose `__call__` does not hand on to the one of its parents, runs no `__call__` that is
hooked: the first hooked call is that of the part inside (`LlamaModel` in `LlamaForCausalLM`), which would be taken for
the model. The frames of the thread tell: the outer model's `forward` is among them.
"""

from __future__ import annotations

import sys
from typing import Any

#: A part is called by the forward of its model, a few decorators in between; a user's modules may stand around it.
_MAX_FRAMES = 40


def is_bare(model: Any) -> bool:
    """Whether a transformers model is what others put a head on: a call of it may be a part of theirs."""
    return getattr(model, "base_model", None) is model


def running_container(model: Any, pretrained: type) -> Any:
    """The outermost transformers model that contains `model` and whose `forward` is running on this thread, or None.

    Args:
        model: The model that is called.
        pretrained: The class of transformers models.
    """
    found: Any = None
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
        if frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            if isinstance(owner, pretrained) and owner is not found and owner is not model:
                found = owner
    if found is not None and any(part is model for part in found.modules()):
        return found
    return None


def holds(module: Any, pretrained: type) -> bool:
    """Whether a module has a transformers model in it: as a part, or in a list or a dict of its own that torch does not
    know of."""
    for part in module.modules():
        if isinstance(part, pretrained):
            return True
        for value in tuple(vars(part).values()):
            items = value.values() if isinstance(value, dict) else value
            inside = tuple(items) if isinstance(value, dict | list | tuple) else (value,)
            if any(isinstance(item, pretrained) for item in inside):
                return True
    return False
