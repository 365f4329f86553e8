"""The hot path: what runs around every pass on the workload's thread.

Between two passes the processor's caches are full of the model's own work, so that each line here is paid several times
over: a pass is read in straight-line code with everything it needs in closure cells, and nothing is derived from it
(`phaseprof.settling` does that on another thread). The common case is a decode step; what is rare calls a function.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from phaseprof.events import RawPass
from phaseprof.hooks.dynamo import graphs_compiled
from phaseprof.hooks.inputs import (
    cache_of,
    cache_of_output,
    encoded_tokens,
    first_position,
    logits_positions,
    mask_of,
    past_length,
    source_is_new,
    source_of,
    token_shape,
)
from phaseprof.hooks.models import ModelBook, SeenModel
from phaseprof.hooks.state import CacheBook, CacheTrack, Flags, ThreadFacts, begin_window
from phaseprof.work.kv import KvLayout, read_layout

#: (original call, module, its arguments, whether the call is compiled, facts of the thread) -> what the call returns.
Observe = Callable[
    [Callable[..., Any], Any, tuple[Any, ...], dict[str, Any], bool, ThreadFacts], Any
]

#: Nothing compiles in less; a longer pass of a module that is not compiled as a whole may have compiled a part.
_COMPILE_NS = 100_000_000


class OwnCost:
    """Our own time on the workload's threads. Summed without a lock: figures, not counts.

    Attributes:
        passes: Passes seen.
        lost: Passes that we failed at.
        sampled, sampled_ns: Passes whose own cost was taken, and its sum.
    """

    __slots__ = ("lost", "passes", "sampled", "sampled_ns")

    def __init__(self) -> None:
        self.passes = 0
        self.lost = 0
        self.sampled = 0
        self.sampled_ns = 0

    @property
    def hook_ns(self) -> int:
        """Own time of all passes, by the mean of those that were sampled."""
        return self.sampled_ns * self.passes // self.sampled if self.sampled else 0


def make_observer(
    *,
    emit: Callable[[RawPass], None],
    models: ModelBook,
    caches: CacheBook,
    flags: Flags,
    failed: Callable[[str, Exception], None],
    cost: OwnCost,
    set_callback: Callable[[Any], Any],
) -> Observe:
    """Make the function that runs a pass and hands over what was seen of it.

    What the call raises is raised on; what fails of ours is told to `failed`, and the pass goes unobserved.

    Args:
        emit: Takes the fields of a `PassSeen`.
        models: Knows the models.
        caches: Knows the caches.
        flags: Of the session.
        failed: Told of an exception in our own code.
        cost: Takes our own cost.
        set_callback: Dynamo's frame callback of this thread; it is off while our code runs.
    """
    now = time.perf_counter_ns
    seen_models = models.seen
    tracks = caches.tracks
    graphs = graphs_compiled()

    def observe(
        original: Callable[..., Any],
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled: bool,
        here: ThreadFacts,
    ) -> Any:
        nonlocal graphs
        # Our own cost is taken on every eighth pass: two readings of the clock are a tenth of it.
        sampled = not cost.passes & 7
        entered = now() if sampled else 0
        compiler = set_callback(None)
        known = False
        window = None
        try:
            generation = here.generation
            found = seen_models.get(id(module))
            if found is None:
                # What a model takes at first sight is no cost of a pass, and is counted apart.
                setup_ns = models.setup_ns
                found = models.find(module, generation)
                entered += models.setup_ns - setup_ns
            model = found
            ids = args[0] if args else kwargs.get("input_ids")
            shape: tuple[int, ...] = () if ids is None or model.encoder_decoder else ids.shape
            if len(shape) == 2:
                rows, query = shape
            else:
                rows, query, ids = token_shape(args, kwargs)
            given = kwargs.get("cache")
            if given is None:
                given = cache_of(kwargs)
            track = None
            past: int | None = 0
            if given is not None:
                track = tracks.get(id(given))
                if track is None:
                    track = caches.add(given)
                keys = None if track is None or track.growing is None else track.growing.keys
                held: tuple[int, ...] = () if keys is None else keys.shape
                if len(held) == 4:
                    past = held[2]
                else:
                    past = past_length(given)
                    if past is None:
                        past = first_position(kwargs)
                    if past is None and track is not None:
                        past = track.end
            own = module.__dict__
            source_new = model.encoder_decoder and source_is_new(given)
            fed = mask = None
            unread = False
            if generation is None:
                if query > 1 and not model.encoder:
                    mask, unread = mask_of(kwargs, rows, (past or 0) + query)
            elif rows > 1 and generation.end_ids and ids is not None:
                # The loop makes new ids for each step: these stay as they are until they are read.
                fed = ids if ids.device.type == "cpu" else None
            elif query > 1 and generation.number < 0 and not model.encoder:
                mask, unread = mask_of(kwargs, rows, (past or 0) + query)
            logits = 0
            if model.has_head:
                # One position, whether it is the only one or the last one, is what most passes ask for.
                logits = rows
                if query > 1:
                    logits *= logits_positions(kwargs.get("logits_to_keep"), query)
            aside = model.aside
            if kwargs.get("labels") is not None or (own["training"] and _records_gradients()):
                aside = "training"
            elif track is not None and track.packed:
                aside = "packed"
            if compiler is not None or own.get("_compiled_call_impl") or "forward" in own:
                compiled = compiled or compiler is not None or _compiles_itself(own)
            graphs_before = graphs_compiled() if compiled else -1
            profiled = flags.profiled
            window = flags.window
            if window is not None:
                # What a collector takes is no cost of the hooks, and is counted apart.
                asked = now()
                profiled = begin_window(window, flags, query > 1)
                entered += now() - asked
            mark = None if model.timer is None else model.timer.begin()
            known = True
        except Exception as failure:
            failed("reading the inputs of a pass", failure)
        here.in_pass = True
        if compiler is not None:
            set_callback(compiler)
        output = error = None
        started = now()
        try:
            output = original(module, *args, **kwargs)
            return output
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            ended = now()
            if compiler is not None:
                set_callback(None)
            here.in_pass = False
            if known:
                try:
                    span = None if model.timer is None else model.timer.end(mark)
                    layout = source = None
                    if model.encoder:
                        rows, query = encoded_tokens(output) or (rows, query)
                    elif model.encoder_decoder:
                        source = source_of(kwargs, output, new=source_new)
                    if given is None and output is not None:
                        given = cache_of_output(output)
                        if given is not None:
                            track = caches.find(given) or caches.add(given)
                    if track is not None and error is None:
                        track.end = (past or 0) + query
                        if not track.layout_read:
                            track.layout_read = True
                            track.growing = _growing_layer(track)
                            layout = _layout(model, track)
                    compiling = False
                    if compiled:
                        compiling = graphs_compiled() != graphs_before
                    elif ended - started > _COMPILE_NS:
                        seen = graphs_compiled()
                        compiling = seen != graphs
                        graphs = seen
                    # In the order of PassSeen; the tuple is named on the other thread.
                    emit(
                        (
                            model.model_id,
                            0 if generation is None else generation.number,
                            here.native_id,
                            started,
                            ended,
                            span,
                            rows,
                            query,
                            past,
                            0 if track is None else track.number,
                            mask,
                            unread,
                            fed,
                            logits,
                            layout,
                            model.encoder,
                            aside,
                            flags.warmups > 0,
                            compiled,
                            compiling,
                            profiled,
                            here.override,
                            error,
                            source,
                        )
                    )
                except Exception as failure:
                    cost.lost += 1
                    failed("recording a pass", failure)
            else:
                cost.lost += 1
            if window is not None:
                asked = now()
                window.ended()
                entered += now() - asked
            if compiler is not None:
                set_callback(compiler)
            cost.passes += 1
            if sampled:
                cost.sampled += 1
                cost.sampled_ns += started - entered + now() - ended

    return observe


def _layout(model: SeenModel, track: CacheTrack) -> KvLayout | None:
    """The layout of a new cache; of caches that grow, one for each kind and model is enough."""
    cache = track.ref()
    if cache is None:
        return None
    # Caches of one class differ: with the model's config they slide, without it they do not.
    layers = tuple(type(layer).__name__ for layer in getattr(cache, "layers", ()))
    kind = (type(cache).__name__, layers)
    known = model.layouts.get(kind)
    if known is None or known.of_one_cache:
        known = read_layout(cache)
        if known is not None:
            model.layouts[kind] = known
    return known


def _growing_layer(track: CacheTrack) -> Any:
    """The first layer of a cache, if its length can be read from its keys without a call; else None."""
    layers = getattr(track.ref(), "layers", None)
    return layers[0] if layers and type(layers[0]).__name__ == "DynamicLayer" else None


def _compiles_itself(own: dict[str, Any]) -> bool:
    """By the module's own attributes: `model.compile()`, or `model.forward = torch.compile(...)`."""
    return own.get("_compiled_call_impl") is not None or (
        "forward" in own and hasattr(own["forward"], "_torchdynamo_orig_callable")
    )


def _records_gradients() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())
