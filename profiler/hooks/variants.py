"""Notice that a model runs with other adapters than at its last pass.

What a pass computes depends on the adapters of PEFT that are active, merged or disabled, which a user may change
between two passes. Each such state of a model counts as a model of its own. PEFT sets all wrappers of a model alike, so
that one of each class is looked at, in about a microsecond a pass, for models with adapters alone. Adapters that come
to a model that was seen without are told by the method that puts them in.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phaseprof.hooks.patching import Patch
from phaseprof.work.adapters import is_wrapper


@dataclass(frozen=True, slots=True)
class _Watched:
    """One wrapper, where it stands and what it runs."""

    wrapper: weakref.ref[Any]
    parent: weakref.ref[Any]
    name: str
    state: tuple[object, ...]

    def holds(self) -> bool:
        wrapper, parent = self.wrapper(), self.parent()
        if wrapper is None or parent is None or parent._modules.get(self.name) is not wrapper:
            return False
        return _state(wrapper) == self.state


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The adapters of a model as they were at one moment. It keeps no module alive.

    Attributes:
        active: Names of the adapters that ran.
    """

    active: tuple[str, ...]
    _watched: tuple[_Watched, ...]

    @classmethod
    def of(cls, model: Any) -> AdapterState | None:
        """The state of a model now; None for a model without adapters."""
        if "peft" not in sys.modules:
            return None
        watched: dict[type, _Watched] = {}
        active: dict[str, None] = {}
        for parent in model.modules():
            for name, child in parent._modules.items():
                if child is None or type(child) in watched or not is_wrapper(child):
                    continue
                state = _state(child)
                watched[type(child)] = _Watched(
                    weakref.ref(child), weakref.ref(parent), name, state
                )
                if not child.disable_adapters:
                    active.update(dict.fromkeys(child.active_adapters))
        return cls(tuple(active), tuple(watched.values())) if watched else None

    def holds(self) -> bool:
        """Whether the model is still in this state."""
        return all(watched.holds() for watched in self._watched)


def patch_injection(owner: type, changed: Callable[[Any], None]) -> Patch:
    """Wrap the method of PEFT that puts adapters into a model.

    Args:
        owner: ``peft.tuners.tuners_utils.BaseTuner``.
        changed: Told of the model; must not raise.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def inject_adapter(tuner: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(tuner, model, *args, **kwargs)
            finally:
                changed(model)

        return inject_adapter

    return Patch(owner, "inject_adapter", make)


def _state(wrapper: Any) -> tuple[object, ...]:
    ranks = getattr(wrapper, "r", None)
    return (
        tuple(wrapper.active_adapters),
        bool(wrapper.disable_adapters),
        tuple(getattr(wrapper, "merged_adapters", ())),
        tuple(ranks.items()) if isinstance(ranks, dict) else (),
    )
