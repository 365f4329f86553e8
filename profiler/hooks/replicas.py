"""Know the replicas that `torch.nn.DataParallel` makes of a model for each of its passes.

A replica is a new object with a copy of the model's attributes and without parameters: by itself it would be a new
model, and one that has no weights. The method that makes it tells whose it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from phaseprof.hooks.patching import Patch

_METHOD = "_replicate_for_data_parallel"


class Replicas:
    """The replicas that live.

    Attributes:
        active: Set to False, the wrapper hands calls on.
    """

    def __init__(self) -> None:
        self._originals: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.active = True

    def original(self, model: Any) -> Any:
        """The model that a replica was made of; None if it is none."""
        if not self._originals:
            return None
        reference = self._originals.get(model)
        return None if reference is None else reference()

    def patch(self, owner: type) -> Patch:
        """Wrap the method that makes replicas.

        Raises:
            AttributeError: If this torch has none.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def _replicate_for_data_parallel(module: Any) -> Any:
                replica = original(module)
                if self.active:
                    self._originals[replica] = weakref.ref(module)
                return replica

            return _replicate_for_data_parallel

        return Patch(owner, _METHOD, make)
