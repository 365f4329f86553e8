"""See every forward pass of a transformers model: one wrapper on the class that all of them inherit.

`PreTrainedModel.__call__` is set for the time of the session and taken away after it. So models that exist, that are
made later, copied or loaded are all seen, no model carries a hook, and a call inside a pass costs a look at a flag. The
wrapper hands the call on as it came; what it fails at is noted, and the pass runs unobserved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from phaseprof.events import RawPass
from phaseprof.hooks.dynamo import Dynamo
from phaseprof.hooks.models import ModelBook
from phaseprof.hooks.observer import Observe, OwnCost, make_observer
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.state import CacheBook, Flags, ThreadState


class ForwardHook:
    """Observes the outermost calls of transformers models. torch must be imported.

    Args:
        emit: Takes the events; must be quick and safe to call from any thread.
        models: Knows the models.
        caches: Knows the caches.
        state: Of the threads.
        flags: Of the session.
        failed: Told of an exception in our own code.

    Attributes:
        cost: What it took.
        active: Set to False, the wrappers that somebody else still holds hand calls on.
    """

    def __init__(
        self,
        *,
        emit: Callable[[RawPass], None],
        models: ModelBook,
        caches: CacheBook,
        state: ThreadState,
        flags: Flags,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._state = state
        self._dynamo = Dynamo()
        self._bare_call: Callable[..., Any] = sys.modules["torch"].nn.Module.__call__
        self.cost = OwnCost()
        self.active = True
        self._observe: Observe = make_observer(
            emit=emit,
            models=models,
            caches=caches,
            flags=flags,
            failed=failed,
            cost=self.cost,
            set_callback=self._dynamo.set_callback,
        )
        self._dynamo.skip(self._observe)

    def patch_class(self, owner: type) -> Patch:
        """Wrap the calls of a class and of those that inherit from it."""
        state, observe, is_tracing = self._state, self._observe, self._dynamo.is_tracing

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:
                here = state.here
                if here.in_pass or is_tracing() or not self.active:
                    return original(module, *args, **kwargs)
                return observe(original, module, args, kwargs, False, here)

            self._dynamo.skip(__call__)
            return __call__

        return Patch(owner, "__call__", make)

    def patch_compiled_call(self, owner: type) -> Patch:
        """Wrap `get_compiled_call`, by which generate compiles its decode steps and keeps them on the model.

        What is kept must not hold our wrapper, and may be older than the session: so the call that is compiled is the
        bare one, and it is observed from outside.
        """
        state, observe, bare = self._state, self._observe, self._bare_call

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_compiled_call(model: Any, /, *args: Any, **kwargs: Any) -> Any:
                if not self.active:
                    return original(model, *args, **kwargs)
                # An attribute of the instance is what `self.__call__` finds first.
                model.__dict__["__call__"] = partial(bare, model)
                try:
                    compiled = original(model, *args, **kwargs)
                finally:
                    del model.__dict__["__call__"]

                def call(*args: Any, **kwargs: Any) -> Any:
                    here = state.here
                    if here.in_pass or not self.active:
                        return compiled(*args, **kwargs)

                    def run(_: Any, *args: Any, **kwargs: Any) -> Any:
                        return compiled(*args, **kwargs)

                    return observe(run, model, args, kwargs, True, here)

                return call

            return get_compiled_call

        return Patch(owner, "get_compiled_call", make)

    def patch_compiled_module(self, owner: type, pretrained: type) -> Patch:
        """Wrap the calls of `torch.compile(model)`, which may hold the model's call from before the session."""
        state, observe, is_tracing = self._state, self._observe, self._dynamo.is_tracing

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __call__(compiled: Any, /, *args: Any, **kwargs: Any) -> Any:
                model = compiled._orig_mod
                here = state.here
                if (
                    here.in_pass
                    or is_tracing()
                    or not self.active
                    or not isinstance(model, pretrained)
                ):
                    return original(compiled, *args, **kwargs)

                def run(_: Any, *args: Any, **kwargs: Any) -> Any:
                    return original(compiled, *args, **kwargs)

                return observe(run, model, args, kwargs, True, here)

            self._dynamo.skip(__call__)
            return __call__

        return Patch(owner, "__call__", make)
