"""See every forward pass of a transformers model: one wrapper on the class that all of them inherit.

`PreTrainedModel.__call__` is set for the time of the session and taken away after it. So models that exist, that are
made later, copied or loaded are all seen, no model carries a hook, and a call inside a pass costs a look at a flag. The
wrapper hands the call on as it came; what it fails at is noted, and the pass runs unobserved.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from phaseprof.events import RawPass
from phaseprof.hooks.dynamo import Dynamo
from phaseprof.hooks.models import ModelBook
from phaseprof.hooks.observer import Observe, OwnCost, make_observer
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.state import CacheBook, Flags, ThreadState

#: How far up the frames that Dynamo traces a model is looked for around a part of it.
_TRACED_FRAMES = 24
#: The hooks that live, for `_tell_inlined`.
_hooks: weakref.WeakSet[ForwardHook] = weakref.WeakSet()


def _tell_inlined(context: Any) -> None:
    """Run by Dynamo while it traces: nothing of it stays in the graph. It takes only a function of a module."""
    for hook in tuple(_hooks):
        if hook.active:
            hook.inlined(context)


class ForwardHook:
    """Observes the outermost calls of transformers models. torch must be imported.

    Args:
        emit: Takes the events; must be quick and safe to call from any thread.
        models: Knows the models.
        caches: Knows the caches.
        state: Of the threads.
        flags: Of the session.
        failed: Told of an exception in our own code.
        on_inlined: Told of the class of a model whose call was compiled into a larger graph.

    Attributes:
        cost: What it took.
        active: Set to False, the wrappers that somebody else still holds hand calls on.
        kinds: The classes whose calls are hooked.
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
        on_inlined: Callable[[str], None],
    ) -> None:
        self._state = state
        self._failed = failed
        self._on_inlined = on_inlined
        self._dynamo = Dynamo()
        _hooks.add(self)
        self.cost = OwnCost()
        self.active = True
        self.kinds: tuple[type, ...] = ()
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

    def patch_class(
        self, owner: type, name: str = "__call__", *, only: Callable[[Any], bool] | None = None
    ) -> Patch:
        """Wrap the calls of a class and of those that inherit from it.

        Args:
            owner: The class.
            name: The method: ``forward`` for models that are not called otherwise.
            only: Asked of a module whether its calls are to be observed; None for all.
        """
        state, observe, is_tracing = self._state, self._observe, self._dynamo.is_tracing
        at_trace = self._dynamo.at_trace

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:
                here = state.here
                if here.in_pass or not self.active:
                    return original(module, *args, **kwargs)
                if is_tracing():
                    if at_trace is not None:
                        at_trace(_tell_inlined)
                    return original(module, *args, **kwargs)
                return observe(original, module, args, kwargs, False, here)

            def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
                # Asked first, so that no graph depends on what this thread is in the middle of.
                if is_tracing():
                    return original(module, *args, **kwargs)
                here = state.here
                if here.in_pass or not self.active or (only is not None and not only(module)):
                    return original(module, *args, **kwargs)
                return observe(original, module, args, kwargs, False, here)

            wrapper = __call__ if name == "__call__" and only is None else forward
            self._dynamo.skip(wrapper)
            return wrapper

        return Patch(owner, name, make)

    def patch_compiled_module(self, owner: type) -> Patch:
        """Wrap the calls of what `torch.compile(model)` gives, which may hold the model's call from before the session.

        Args:
            owner: `torch._dynamo.eval_frame.OptimizedModule`.
        """
        state, observe, is_tracing = self._state, self._observe, self._dynamo.is_tracing

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __call__(compiled: Any, /, *args: Any, **kwargs: Any) -> Any:
                model = compiled._orig_mod
                here = state.here
                if (
                    here.in_pass
                    or is_tracing()
                    or not self.active
                    or not isinstance(model, self.kinds)
                ):
                    return original(compiled, *args, **kwargs)

                def run(_: Any, *args: Any, **kwargs: Any) -> Any:
                    return original(compiled, *args, **kwargs)

                return observe(run, model, args, kwargs, True, here)

            self._dynamo.skip(__call__)
            return __call__

        return Patch(owner, "__call__", make)

    def around(self, call: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """A compiled call of a model, observed from outside.

        Args:
            call: Takes what the model takes.
            model: Whose call it is.
        """
        state, observe, is_tracing = self._state, self._observe, self._dynamo.is_tracing

        def run(_: Any, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        def observed(*args: Any, **kwargs: Any) -> Any:
            if is_tracing():
                return call(*args, **kwargs)
            here = state.here
            if here.in_pass or not self.active:
                return call(*args, **kwargs)
            return observe(run, model, args, kwargs, True, here)

        self._dynamo.skip(run)
        self._dynamo.skip(observed)
        return observed

    def inlined(self, context: Any) -> None:
        """Look at a call that is being compiled into somebody's graph.

        Args:
            context: A `ComptimeContext` of Dynamo, in the frame of our wrapper.
        """
        try:
            for level in range(1, _TRACED_FRAMES):
                # The call of a part, in that of its model.
                with contextlib.suppress(Exception):
                    caller = context.get_local("module", stacklevel=level).python_type()
                    if issubclass(caller, self.kinds):
                        return
            self._on_inlined(context.get_local("module").python_type().__name__)
        except Exception as failure:
            self._failed("looking at a call that is compiled", failure)
