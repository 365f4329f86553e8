"""Read from the scheduler of transformers' continuous batching what each of its steps computes, for whom.

A manager thread packs tokens of many requests into one row and calls the model; no call announces a prompt. But the
scheduler knows all of it before the model runs. Five seams, all class attributes for the time of the session:

- `ContinuousBatchProcessor._generation_step`: a step runs the model. Who is in it, and where each request stands.
- `ContinuousBatchProcessor.update_batch`: the scheduler takes the tokens. Who got one, and who ended. With asynchronous
  batching these are the tokens of the step before the last.
- `Scheduler.add_waiting_request`: a request came in, or comes back after it was preempted.
- `Scheduler.clear_cancelled_requests`, `ContinuousBatchProcessor._handle_request_error`: a request is given up.

Where a step replays a CUDA graph, or one function around the model is compiled, no call of the model is seen: then the
step stands for the pass, and `ModelRunner.compute_batch` (from 5.10 on) tells its time. Token ids are never read.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from phaseprof.engine_events import (
    EngineEvent,
    EngineGone,
    RequestDropped,
    RequestQueued,
    StepBegan,
    StepEnded,
    StepTaken,
)
from phaseprof.errors import NotMeasured
from phaseprof.hooks.dynamo import graphs_compiled
from phaseprof.hooks.models import ModelBook, SeenModel
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.state import CacheBook, Flags, ThreadState
from phaseprof.work.paged import PagedPool, read_pool

#: What is told where a version of the library does it otherwise.
SEEN_ON = "5.0, 5.10, 5.17, 5.22 and 5.24"
LABELS = "prefill and decode under continuous batching"

_PROCESSOR = ("_generation_step", "update_batch", "_handle_request_error")
_SCHEDULER = ("add_waiting_request", "clear_cancelled_requests")


class _Engine:
    """One scheduler, as the hook knows it.

    Attributes:
        number: Its number in the process.
        known: Ids of requests that were announced and have not ended.
        outstanding: Steps whose tokens have not been taken: the batch and the number of each.
        model: The model, from the first step on.
        cache: Number of its cache; 0 before the first step.
        pool: Its cache, until it was handed over.
    """

    __slots__ = ("cache", "known", "model", "number", "outstanding", "pool")

    def __init__(self, number: int) -> None:
        self.number = number
        self.known: set[str] = set()
        self.outstanding: deque[tuple[Any, int]] = deque(maxlen=4)
        self.model: SeenModel | None = None
        self.cache = 0
        self.pool: PagedPool | None = None


class _Open:
    """A step that runs.

    Attributes:
        step: Its number.
        model: The model.
        graph: It replays or captures a CUDA graph.
        compiled: A function around the model is compiled.
        graphs: Graphs that Dynamo had compiled, and that the processor had captured, before it.
        begin_ns, end_ns, span: Times of the computation, where `compute_batch` told them.
        captured: A CUDA graph was captured.
    """

    __slots__ = (
        "begin_ns",
        "captured",
        "compiled",
        "end_ns",
        "graph",
        "graphs",
        "model",
        "span",
        "step",
    )

    def __init__(self, step: int, model: SeenModel, *, graph: bool, compiled: bool) -> None:
        self.step = step
        self.model = model
        self.graph = graph
        self.compiled = compiled
        self.graphs = graphs_compiled() if compiled else 0
        self.begin_ns = self.end_ns = 0
        self.span: Any = None
        self.captured = False


class _Thread(threading.local):
    open: _Open | None = None


class ContinuousHook:
    """Observes continuous batching.

    Args:
        emit: Takes the events.
        models: Knows the models.
        caches: Knows the caches.
        state: Of the threads.
        flags: Of the session.
        failed: Told of an exception in our own code.
        note: Told of what cannot be measured.

    Attributes:
        active: Set to False, the wrappers that somebody else still holds hand calls on.
        own_ns: Our own time on the manager's thread.
        steps: Steps seen.
    """

    def __init__(
        self,
        *,
        emit: Callable[[EngineEvent], None],
        models: ModelBook,
        caches: CacheBook,
        state: ThreadState,
        flags: Flags,
        failed: Callable[[str, Exception], None],
        note: Callable[[NotMeasured], None],
    ) -> None:
        self._emit = emit
        self._models = models
        self._caches = caches
        self._state = state
        self._flags = flags
        self._failed = failed
        self._note = note
        self._engines: dict[int, tuple[weakref.ref[Any], _Engine]] = {}
        self._numbers = itertools.count(1)
        self._steps = itertools.count(1)
        self._local = _Thread()
        self._finished: Any = None
        self.active = True
        self.own_ns = 0
        self.steps = 0

    def patches(self, module: Any) -> list[Patch]:
        """Wrap the seams that `transformers.generation.continuous_batching.continuous_api` shows.

        If one is missing, none is wrapped, which one is noted, and the passes stay without labels.
        """
        seams = [
            (getattr(module, owner, None), owner, names)
            for owner, names in (
                ("ContinuousBatchProcessor", _PROCESSOR),
                ("Scheduler", _SCHEDULER),
            )
        ]
        missing = [f"{o}.{n}" for found, o, names in seams for n in names if not hasattr(found, n)]
        self._finished = getattr(getattr(module, "RequestStatus", None), "FINISHED", None)
        if self._finished is None:
            missing.append("RequestStatus.FINISHED")
        if missing:
            self._note(unknown_version(f"it has no {missing[0]}"))
            return []
        makers = {
            "_generation_step": self._wrap_step,
            "update_batch": self._wrap_update,
            "_handle_request_error": self._wrap_error,
            "add_waiting_request": self._wrap_waiting,
            "clear_cancelled_requests": self._wrap_cancelled,
        }
        patches = [Patch(found, name, makers[name]) for found, _, names in seams for name in names]
        processor, runner = module.ContinuousBatchProcessor, getattr(module, "ModelRunner", None)
        if hasattr(processor, "warmup"):
            patches.append(Patch(processor, "warmup", self._wrap_warmup))
        if hasattr(runner, "compute_batch"):
            patches.append(Patch(runner, "compute_batch", self._wrap_compute))
        if hasattr(runner, "_capture_graph"):
            patches.append(Patch(runner, "_capture_graph", self._wrap_capture))
        return patches

    # The wrappers

    def _wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _generation_step(processor: Any, model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(processor, model, *args, **kwargs)
            # What a model takes at first sight is no cost of a step, and is counted apart.
            entered = time.perf_counter_ns() - self._models.setup_ns
            opened = self._begin(processor, model)
            entered += self._models.setup_ns
            here = self._state.here
            outer = here.in_pass
            if opened is not None and opened.graph:
                # What runs under capture is no pass, and what is replayed calls no model.
                here.in_pass = True
            self._local.open = opened
            error: str | None = None
            began = time.perf_counter_ns()
            self.own_ns += began - entered
            try:
                return original(processor, model, *args, **kwargs)
            except BaseException as raised:
                error = type(raised).__name__
                raise
            finally:
                ended = time.perf_counter_ns()
                here.in_pass = outer
                self._local.open = None
                if opened is not None:
                    self._end(processor, opened, began, ended, error)
                self.own_ns += time.perf_counter_ns() - ended

        return _generation_step

    def _wrap_compute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compute_batch(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
            opened = self._local.open
            if opened is None or not (opened.graph or opened.compiled):
                return original(runner, *args, **kwargs)
            mark = self._mark(runner, opened)
            opened.begin_ns = time.perf_counter_ns()
            result = original(runner, *args, **kwargs)
            opened.end_ns = time.perf_counter_ns()
            if mark is not None:
                self._span(runner, opened, mark)
            return result

        return compute_batch

    def _wrap_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _capture_graph(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
            opened = self._local.open
            if opened is not None:
                opened.captured = True
            return original(runner, *args, **kwargs)

        return _capture_graph

    def _wrap_warmup(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def warmup(processor: Any, model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(processor, model, *args, **kwargs)
            here = self._state.here
            outer = here.in_pass
            opened = self._begin_dummy(processor, model)
            if opened is not None and opened.graph:
                here.in_pass = True
            began = time.perf_counter_ns()
            try:
                return original(processor, model, *args, **kwargs)
            finally:
                here.in_pass = outer
                if opened is not None:
                    self._end(processor, opened, began, time.perf_counter_ns(), None)

        return warmup

    def _wrap_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update_batch(processor: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(processor, *args, **kwargs)
            entered = time.perf_counter_ns()
            before = self._standing(processor)
            self.own_ns += time.perf_counter_ns() - entered
            try:
                return original(processor, *args, **kwargs)
            finally:
                if before is not None:
                    taken = time.perf_counter_ns()
                    self._taken(processor, *before, taken)
                    self.own_ns += time.perf_counter_ns() - taken

        return update_batch

    def _wrap_waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_waiting_request(scheduler: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                try:
                    self._announce(self._engine(scheduler), state)
                except Exception as failure:
                    self._failed("reading a request of continuous batching", failure)
            return original(scheduler, state, *args, **kwargs)

        return add_waiting_request

    def _wrap_cancelled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clear_cancelled_requests(scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active or not getattr(scheduler, "_requests_to_cancel", True):
                return original(scheduler, *args, **kwargs)
            asked = self._asked(scheduler)
            result = original(scheduler, *args, **kwargs)
            self._drop(scheduler, asked)
            return result

        return clear_cancelled_requests

    def _wrap_error(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _handle_request_error(
            processor: Any, error: Any, state: Any, /, *args: Any, **kwargs: Any
        ) -> Any:
            if self.active:
                try:
                    self._announce(self._engine(processor.scheduler), state)
                    self._drop(processor.scheduler, (state.request_id,))
                except Exception as failure:
                    self._failed("reading a request of continuous batching", failure)
            return original(processor, error, state, *args, **kwargs)

        return _handle_request_error

    # What they read

    def _begin(self, processor: Any, model: Any) -> _Open | None:
        try:
            engine = self._engine(processor.scheduler)
            seen = self._meet(engine, processor, model)
            modern = hasattr(processor, "inputs_and_outputs")
            batch = _batch(processor)
            known = engine.known
            requests = []
            for entry in batch:
                if modern:
                    state = entry.state
                    query = entry.query_length
                else:
                    state = entry
                    query = len(state.tokens_to_process)
                name = state.request_id
                if name not in known:
                    self._announce(engine, state)
                # The offset was moved past the query when the batch was prepared.
                requests.append((name, query, state.position_offset - query))
            step = next(self._steps)
            opened = _Open(step, seen, graph=_replays(processor), compiled=_compiles(processor))
            if opened.graph and not modern:
                opened.graphs = len(processor._graphs)
            slots, logits = _sizes(processor, modern, len(batch))
            engine.outstanding.append((batch, step))
            pool, engine.pool = engine.pool, None
            self.steps += 1
            self._emit(
                StepBegan(
                    engine=engine.number,
                    step=step,
                    thread_id=self._state.here.native_id,
                    model_id=seen.model_id,
                    cache=engine.cache,
                    requests=tuple(requests),
                    slots=slots,
                    logits=logits,
                    graph=opened.graph,
                    dummy=False,
                    pool=pool,
                )
            )
            return opened
        except Exception as failure:
            self._misread(failure)
            return None

    def _begin_dummy(self, processor: Any, model: Any) -> _Open | None:
        try:
            engine = self._engine(processor.scheduler)
            seen = self._meet(engine, processor, model)
            runner = processor.model_runner
            graph = bool(runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode)
            opened = _Open(next(self._steps), seen, graph=graph, compiled=False)
            self._emit(
                StepBegan(
                    engine=engine.number,
                    step=opened.step,
                    thread_id=self._state.here.native_id,
                    model_id=seen.model_id,
                    cache=engine.cache,
                    requests=(),
                    slots=None,
                    logits=None,
                    graph=graph,
                    dummy=True,
                    pool=None,
                )
            )
            return opened
        except Exception as failure:
            self._misread(failure)
            return None

    def _end(
        self, processor: Any, opened: _Open, began: int, ended: int, error: str | None
    ) -> None:
        try:
            compiling = opened.captured
            if opened.compiled:
                compiling |= graphs_compiled() != opened.graphs
            elif opened.graph and not hasattr(processor, "inputs_and_outputs"):
                compiling |= len(processor._graphs) != opened.graphs
            self._emit(
                StepEnded(
                    step=opened.step,
                    start_ns=opened.begin_ns or began,
                    end_ns=opened.end_ns or ended,
                    span=opened.span,
                    compiled=opened.compiled,
                    compiling=compiling,
                    warmup=self._flags.warmups > 0,
                    profiled=self._flags.profiled,
                    error=error,
                )
            )
        except Exception as failure:
            self._misread(failure)

    def _standing(self, processor: Any) -> tuple[Any, list[Any], list[int], list[bool]] | None:
        """The batch whose tokens are about to be taken, and where its requests stand."""
        try:
            batch = _batch(processor)
            modern = hasattr(processor, "inputs_and_outputs")
            states = [entry.state if modern else entry for entry in batch]
            lengths = [len(s.initial_tokens) + len(s.generated_tokens) for s in states]
            finished = self._finished
            return batch, states, lengths, [s.status is finished for s in states]
        except Exception as failure:
            self._misread(failure)
            return None

    def _taken(
        self,
        processor: Any,
        batch: Any,
        states: list[Any],
        lengths: list[int],
        over: list[bool],
        now: int,
    ) -> None:
        try:
            engine = self._engine(processor.scheduler)
            step = 0
            while engine.outstanding and not step:
                found, number = engine.outstanding.popleft()
                step = number if found is batch else 0
            if not step:
                return
            finished = self._finished
            # Prompt and output together: a preempted request counts its earlier output among its prompt.
            tokens = tuple(
                len(s.initial_tokens) + len(s.generated_tokens) - length
                for s, length in zip(states, lengths, strict=True)
            )
            ended = tuple(
                s.status is finished and not was for s, was in zip(states, over, strict=True)
            )
            if True in ended:
                engine.known.difference_update(
                    s.request_id for s, end in zip(states, ended, strict=True) if end
                )
            self._emit(StepTaken(engine.number, step, now, tokens, ended))
        except Exception as failure:
            self._misread(failure)

    def _announce(self, engine: _Engine, state: Any) -> None:
        """Hand over a request at first sight. One that was preempted comes with its output as a part of its prompt."""
        name = state.request_id
        if name in engine.known:
            return
        engine.known.add(name)
        limit = state.max_new_tokens
        prompt = len(state.initial_tokens)
        true = state._true_initial_tokens
        self._emit(
            RequestQueued(
                engine=engine.number,
                request=name,
                # Seconds of the clock that we read as well.
                arrival_ns=int(state.created_time * 1e9),
                prompt=min(true, prompt) if true else prompt,
                generated=len(state.generated_tokens) + (prompt - true if true else 0),
                max_output=limit if isinstance(limit, int) else None,
                children=state.num_children,
            )
        )

    def _asked(self, scheduler: Any) -> tuple[str, ...]:
        try:
            return tuple(
                name
                for name in tuple(scheduler._requests_to_cancel)
                if name in scheduler.active_requests or name in scheduler.waiting_requests
            )
        except Exception as failure:
            self._failed("reading a request of continuous batching", failure)
            return ()

    def _drop(self, scheduler: Any, names: tuple[str, ...]) -> None:
        try:
            engine = self._engine(scheduler)
            now = time.perf_counter_ns()
            for name in names:
                engine.known.discard(name)
                self._emit(RequestDropped(engine.number, name, now))
        except Exception as failure:
            self._failed("reading a request of continuous batching", failure)

    def _engine(self, scheduler: Any) -> _Engine:
        entry = self._engines.get(id(scheduler))
        if entry is not None:
            return entry[1]
        key = id(scheduler)
        engine = _Engine(next(self._numbers))

        def gone(_: weakref.ref[Any]) -> None:
            self._engines.pop(key, None)
            self._emit(EngineGone(engine.number, time.perf_counter_ns()))

        self._engines[key] = (weakref.ref(scheduler, gone), engine)
        return engine

    def _meet(self, engine: _Engine, processor: Any, model: Any) -> SeenModel:
        """The model of an engine; its cache is read at first sight."""
        seen = engine.model
        if seen is not None and engine.cache:
            return seen
        seen = engine.model = self._models.find(model, None)
        cache = processor.cache
        track = self._caches.find(cache) or self._caches.add(cache)
        pool = read_pool(cache)
        seen.layouts[(type(cache).__name__, ())] = pool.layout
        if track is not None:
            engine.cache = track.number
            track.layout_read = True
        if not pool.layout.covered:
            self._note(
                NotMeasured("KV bytes under continuous batching", pool.layout.not_covered[0])
            )
        engine.pool = pool
        return seen

    def _mark(self, runner: Any, opened: _Open) -> Any:
        timer = opened.model.timer
        if timer is None:
            return None
        try:
            with _on_stream(runner):
                return timer.begin()
        except Exception as failure:
            self._failed("timing a step of continuous batching", failure)
            return None

    def _span(self, runner: Any, opened: _Open, mark: Any) -> None:
        timer = opened.model.timer
        assert timer is not None
        try:
            with _on_stream(runner):
                opened.span = timer.end(mark)
        except Exception as failure:
            self._failed("timing a step of continuous batching", failure)

    def _misread(self, failure: Exception) -> None:
        self._note(unknown_version(f"its scheduler reads differently ({failure})"))
        self._failed("reading a step of continuous batching", failure)


def unknown_version(why: str) -> NotMeasured:
    """What is said where the scheduler of this transformers could not be read."""
    version = getattr(sys.modules.get("transformers"), "__version__", "of an unknown version")
    return NotMeasured(
        LABELS,
        f"transformers {version}: {why}; it was seen to work on {SEEN_ON}",
        "use one of these versions, or call generate without continuous batching",
    )


def _io(processor: Any) -> Any:
    """The buffers of the batch that is prepared or taken; asynchronous batching has two pairs of them."""
    ios = processor.inputs_and_outputs
    pairs = getattr(ios, "io_pairs", None)
    return ios if pairs is None else pairs[ios.current_pair].host_io


def _batch(processor: Any) -> Any:
    """The requests in a step: from 5.10 on with their query lengths, before that the requests themselves."""
    if hasattr(processor, "inputs_and_outputs"):
        return _io(processor).requests_in_batch
    return processor.requests_in_batch


def _replays(processor: Any) -> bool:
    """Whether steps may be CUDA graphs."""
    runner = getattr(processor, "model_runner", None)
    if runner is None:
        return getattr(processor, "_graphs", None) is not None
    if not (runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode):
        return False
    block_table = bool(getattr(_io(processor), "use_block_table", False))
    return bool(runner.use_cuda_graph_decode if block_table else runner.use_cuda_graph_varlen)


def _compiles(processor: Any) -> bool:
    """Whether a function around the model is compiled."""
    runner = getattr(processor, "model_runner", None)
    if runner is None:
        return getattr(processor, "compile_config", None) is not None
    return (
        getattr(runner, "_compiled_varlen", None) is not None
        or getattr(runner, "_compiled_decode", None) is not None
    )


def _sizes(processor: Any, modern: bool, requests: int) -> tuple[int | None, int | None]:
    """Slots of the packed row, and positions for which the head is computed: used where the model is not seen."""
    if not modern:
        return None, None
    io = _io(processor)
    slots = getattr(io, "num_q_tokens", None)
    padded = bool(getattr(processor.model_runner, "pad_inputs", False))
    limit = getattr(io, "max_requests_per_batch", None)
    if not padded or slots is None or limit is None:
        return slots, requests
    return slots, min(slots, limit)


def _on_stream(runner: Any) -> Any:
    """The stream on which a runner computes."""
    return sys.modules["torch"].cuda.stream(runner.inputs_and_outputs.compute_stream)
