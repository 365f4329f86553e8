"""See every forward pass of a transformers model: one wrapper on the class that all of them inherit.

`PreTrainedModel.__call__` is set for the time of the session and taken away after it. So models that exist, that are
made later, copied or loaded are all seen, no model carries a hook, and a call inside a pass costs a look at a flag. The
wrapper hands the call on as it came; what it fails at is noted, and the pass runs unobserved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from phaseprof.events import Event, PassSeen
from phaseprof.hooks.dynamo import Dynamo, graphs_compiled
from phaseprof.hooks.inputs import (
    cache_of,
    cache_of_output,
    logits_positions,
    mask_of,
    past_length,
    token_shape,
)
from phaseprof.hooks.models import ModelBook, SeenModel
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.state import CacheBook, CacheTrack, Flags, ThreadState
from phaseprof.timers import Span
from phaseprof.work.kv import read_layout


class ForwardHook:
    """Observes the outermost calls of transformers models.

    Args:
        emit: Takes the events; must be quick and safe to call from any thread.
        models: Knows the models.
        caches: Knows the caches.
        state: Of the threads.
        flags: Of the session.
        failed: Told of an exception in our own code.
    """

    def __init__(
        self,
        *,
        emit: Callable[[Event], None],
        models: ModelBook,
        caches: CacheBook,
        state: ThreadState,
        flags: Flags,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._emit = emit
        self._models = models
        self._caches = caches
        self._state = state
        self._flags = flags
        self._failed = failed
        #: Time in our own code on the workload's threads, and passes; summed without a lock: a figure, not a count.
        self.own_ns = 0
        self.passes = 0
        self.active = True
        self._bare_call: Callable[..., Any] = sys.modules["torch"].nn.Module.__call__

    def patch_class(self, owner: type) -> Patch:
        """Wrap the calls of a class and of those that inherit from it."""
        state = self._state
        dynamo = Dynamo()
        is_tracing = dynamo.is_tracing
        observe = partial(self._observe, dynamo.set_callback, False)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:
                if is_tracing() or state.in_pass or not self.active:
                    return original(module, *args, **kwargs)
                return observe(original, module, args, kwargs)

            dynamo.skip(__call__)
            return __call__

        dynamo.skip(self._observe)
        return Patch(owner, "__call__", make)

    def patch_compiled_call(self, owner: type) -> Patch:
        """Wrap `get_compiled_call`, by which generate compiles its decode steps and keeps them on the model.

        What is kept must not hold our wrapper, and may be older than the session: so the call that is compiled is the
        bare one, and it is observed from outside.
        """
        observe = partial(self._observe, Dynamo().set_callback, True)
        bare = self._bare_call

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
                    if self._state.in_pass or not self.active:
                        return compiled(*args, **kwargs)
                    return observe(lambda _, *a, **k: compiled(*a, **k), model, args, kwargs)

                return call

            return get_compiled_call

        return Patch(owner, "get_compiled_call", make)

    def patch_compiled_module(self, owner: type, pretrained: type) -> Patch:
        """Wrap the calls of `torch.compile(model)`, which may hold the model's call from before the session."""
        state = self._state
        dynamo = Dynamo()
        is_tracing = dynamo.is_tracing
        observe = partial(self._observe, dynamo.set_callback, True)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __call__(compiled: Any, /, *args: Any, **kwargs: Any) -> Any:
                model = compiled._orig_mod
                if (
                    is_tracing()
                    or state.in_pass
                    or not self.active
                    or not isinstance(model, pretrained)
                ):
                    return original(compiled, *args, **kwargs)
                return observe(lambda _, *a, **k: original(compiled, *a, **k), model, args, kwargs)

            dynamo.skip(__call__)
            return __call__

        return Patch(owner, "__call__", make)

    def _observe(
        self,
        set_callback: Callable[[Any], Any],
        compiled: bool,
        original: Callable[..., Any],
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        entered = time.perf_counter_ns()
        compiler = set_callback(None)
        state, models = self._state, self._models
        setup_ns = models.setup_ns
        call = self._begin(module, args, kwargs, compiled or compiler is not None)
        # What a model takes at first sight is no cost of a pass, and is counted apart.
        entered += models.setup_ns - setup_ns
        state.in_pass = True
        if compiler is not None:
            set_callback(compiler)
        start = time.perf_counter_ns()
        try:
            output = original(module, *args, **kwargs)
        except BaseException as raised:
            end = time.perf_counter_ns()
            set_callback(None)
            state.in_pass = False
            self._end(call, start, end, None, type(raised).__name__)
            set_callback(compiler)
            self.own_ns += (start - entered) + (time.perf_counter_ns() - end)
            raise
        end = time.perf_counter_ns()
        if compiler is not None:
            set_callback(None)
        state.in_pass = False
        self._end(call, start, end, output, None)
        if compiler is not None:
            set_callback(compiler)
        self.own_ns += (start - entered) + (time.perf_counter_ns() - end)
        return output

    def _begin(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool
    ) -> _Call | None:
        """Read what a pass is about to compute; None if that fails, and the pass goes unobserved."""
        try:
            return self._read(module, args, kwargs, compiled)
        except Exception as failure:
            self._failed("reading the inputs of a pass", failure)
            return None

    def _read(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool
    ) -> _Call:
        state = self._state
        generation = state.generation
        model = self._models.find(module, generation.model if generation is not None else None)
        rows, query, ids = token_shape(args, kwargs)
        cache = cache_of(kwargs)
        track = None
        past: int | None = 0
        if cache is not None:
            track = self._caches.find(cache) or self._caches.add(cache)
            past = past_length(cache)
            if past is None and track is not None:
                past = track.end
        mask, unread = None, False
        if generation is None and query > 1 and not model.encoder:
            mask, unread = mask_of(kwargs, rows, (past or 0) + query)
        fed = None
        if generation is not None and generation.end_ids and ids is not None and rows > 1:
            # The loop makes new ids for each step, so that these stay as they are until they are read.
            fed = ids if ids.device.type == "cpu" else None
        return _Call(
            model=model,
            generation=generation.number if generation is not None else 0,
            rows=rows,
            query=query,
            past=past,
            track=track,
            had_cache=cache is not None,
            mask=mask,
            mask_unread=unread,
            fed=fed,
            logits=logits_positions(kwargs, query) * rows if model.has_head else 0,
            training=(module.training and _records_gradients()) or kwargs.get("labels") is not None,
            compiled=compiled or _is_compiled(module),
            compiles=graphs_compiled(),
            mark=model.timer.begin() if model.timer is not None else None,
        )

    def _end(
        self, call: _Call | None, start: int, end: int, output: Any, error: str | None
    ) -> None:
        if call is None:
            return
        self.passes += 1
        try:
            timer = call.model.timer
            span = timer.end(call.mark) if timer is not None else None
            track = call.track
            if not call.had_cache and output is not None:
                cache = cache_of_output(output)
                track = self._track_new(cache)
            layout = None
            if track is not None and error is None:
                track.end = (call.past or 0) + call.query
                if not track.layout_read:
                    track.layout_read = True
                    layout = self._layout(call.model, track)
            self._emit(call.seen(self._state, self._flags, start, end, span, track, layout, error))
        except Exception as failure:
            self._failed("recording a pass", failure)

    def _track_new(self, cache: Any) -> CacheTrack | None:
        """A cache that the model made and returned."""
        if cache is None:
            return None
        return self._caches.find(cache) or self._caches.add(cache)

    def _layout(self, model: SeenModel, track: CacheTrack) -> Any:
        """The layout of a new cache; of caches that grow, one per model is enough."""
        cache = track.ref()
        if cache is None:
            return None
        # Caches of one class differ: with the model's config they slide, without it they do not.
        layers = tuple(type(layer).__name__ for layer in getattr(cache, "layers", ()))
        kind = (type(cache).__name__, layers)
        known = model.layouts.get(kind)
        if known is None or any(group.allocated_tokens is not None for group in known.groups):
            known = read_layout(cache)
            if known is not None:
                model.layouts[kind] = known
        return known


class _Call:
    """What is known of a pass before it runs."""

    __slots__ = (
        "compiled",
        "compiles",
        "fed",
        "generation",
        "had_cache",
        "logits",
        "mark",
        "mask",
        "mask_unread",
        "model",
        "past",
        "query",
        "rows",
        "track",
        "training",
    )

    def __init__(
        self,
        *,
        model: SeenModel,
        generation: int,
        rows: int,
        query: int,
        past: int | None,
        track: CacheTrack | None,
        had_cache: bool,
        mask: Any,
        mask_unread: bool,
        fed: Any,
        logits: int,
        training: bool,
        compiled: bool,
        compiles: int,
        mark: Any,
    ) -> None:
        self.model = model
        self.generation = generation
        self.rows = rows
        self.query = query
        self.past = past
        self.track = track
        self.had_cache = had_cache
        self.mask = mask
        self.mask_unread = mask_unread
        self.fed = fed
        self.logits = logits
        self.training = training
        self.compiled = compiled
        self.compiles = compiles
        self.mark = mark

    def seen(
        self,
        state: ThreadState,
        flags: Flags,
        start: int,
        end: int,
        span: Span | None,
        track: CacheTrack | None,
        layout: Any,
        error: str | None,
    ) -> PassSeen:
        """The event, once the pass has run."""
        return PassSeen(
            self.model.model_id,
            self.generation,
            state.native_id,
            start,
            end,
            span,
            self.rows,
            self.query,
            self.past,
            track.number if track is not None else 0,
            self.mask,
            self.mask_unread,
            self.fed,
            self.logits,
            layout,
            self.model.encoder,
            self.training,
            flags.warmups > 0,
            self.compiled,
            graphs_compiled() != self.compiles,
            flags.profiled,
            state.override,
            error,
        )


def _records_gradients() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


def _is_compiled(module: Any) -> bool:
    """`model.compile()`, or `model.forward = torch.compile(...)`."""
    if module._compiled_call_impl is not None:
        return True
    forward = module.__dict__.get("forward")
    return forward is not None and hasattr(forward, "_torchdynamo_orig_callable")
