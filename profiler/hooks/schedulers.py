"""Read from a scheduler of transformers' continuous batching who is in a step, and what the step gave them.

Two forms of it are known. From 5.10 on a batch is a list of requests with their query lengths, held by buffers of which
asynchronous batching has two pairs; in 5.0 it is a list of the requests themselves. Lengths and ids are read, and no
token.
"""

from __future__ import annotations

import itertools
import sys
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
from phaseprof.evidence import PassWindow
from phaseprof.hooks.dynamo import graphs_compiled
from phaseprof.hooks.models import ModelBook, SeenModel
from phaseprof.hooks.state import CacheBook, Flags, ThreadState, begin_window
from phaseprof.work.paged import PagedPool, read_pool

#: What is told where a version of the library does it otherwise.
SEEN_ON = "5.0, 5.10, 5.17, 5.22 and 5.24"
LABELS = "prefill and decode under continuous batching"


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


class OpenStep:
    """A step that runs.

    Attributes:
        step: Its number.
        model: The model.
        graph: It replays or captures a CUDA graph.
        compiled: A function around the model is compiled.
        graphs: Graphs that Dynamo had compiled, and that the processor had captured, before it.
        begin_ns, end_ns, span: Times of the computation, where `compute_batch` told them.
        captured: A CUDA graph was captured.
        window: Is told of its end; None for most sessions.
        profiled: A costly collector runs during it.
    """

    __slots__ = (
        "begin_ns",
        "captured",
        "compiled",
        "end_ns",
        "graph",
        "graphs",
        "model",
        "profiled",
        "span",
        "step",
        "window",
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
        self.window: PassWindow | None = None
        self.profiled = False


class SchedulerReader:
    """Reads schedulers and hands over what was read. Nothing that it fails at is raised.

    Args:
        emit: Takes the events.
        models: Knows the models.
        caches: Knows the caches.
        state: Of the threads.
        flags: Of the session.
        failed: Told of an exception in our own code.
        note: Told of what cannot be measured.

    Attributes:
        finished: The status of a request that has ended by itself.
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
        self.finished: Any = None

    def begin(self, processor: Any, model: Any) -> OpenStep | None:
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
            opened = OpenStep(step, seen, graph=_replays(processor), compiled=_compiles(processor))
            if opened.graph and not modern:
                opened.graphs = len(processor._graphs)
            slots, logits = _sizes(processor, modern, len(batch))
            engine.outstanding.append((batch, step))
            pool, engine.pool = engine.pool, None
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
            opened.profiled = self._flags.profiled
            window = opened.window = self._flags.window
            if window is not None:
                # The model's own pass lies inside, and is told of as well.
                wide = any(query > 1 for _, query, _ in requests)
                opened.profiled = begin_window(window, self._flags, wide)
            return opened
        except Exception as failure:
            self._misread(failure)
            return None

    def begin_warmup(self, processor: Any, model: Any) -> OpenStep | None:
        try:
            engine = self._engine(processor.scheduler)
            seen = self._meet(engine, processor, model)
            runner = processor.model_runner
            graph = bool(runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode)
            opened = OpenStep(next(self._steps), seen, graph=graph, compiled=False)
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

    def end(
        self, processor: Any, opened: OpenStep, began: int, ended: int, error: str | None
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
                    profiled=opened.profiled,
                    error=error,
                )
            )
        except Exception as failure:
            self._misread(failure)
        if opened.window is not None:
            opened.window.ended()

    def standing(self, processor: Any) -> tuple[Any, list[Any], list[int], list[bool]] | None:
        """The batch whose tokens are about to be taken, and where its requests stand."""
        try:
            batch = _batch(processor)
            modern = hasattr(processor, "inputs_and_outputs")
            states = [entry.state if modern else entry for entry in batch]
            lengths = [len(s.initial_tokens) + len(s.generated_tokens) for s in states]
            finished = self.finished
            return batch, states, lengths, [s.status is finished for s in states]
        except Exception as failure:
            self._misread(failure)
            return None

    def taken(
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
            step = next((number for found, number in engine.outstanding if found is batch), 0)
            if not step:
                # It was begun before the session.
                return
            while engine.outstanding[0][1] <= step:
                engine.outstanding.popleft()
                if not engine.outstanding:
                    break
            finished = self.finished
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

    def waits(self, scheduler: Any, state: Any) -> None:
        """A request is queued: a new one, or one that was preempted."""
        try:
            self._announce(self._engine(scheduler), state)
        except Exception as failure:
            self._failed("reading a request of continuous batching", failure)

    def fails(self, scheduler: Any, state: Any) -> None:
        """A request is given up for an error."""
        try:
            self._announce(self._engine(scheduler), state)
            self.drop(scheduler, (state.request_id,))
        except Exception as failure:
            self._failed("reading a request of continuous batching", failure)

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

    def asked(self, scheduler: Any) -> tuple[str, ...]:
        try:
            return tuple(
                name
                for name in tuple(scheduler._requests_to_cancel)
                if name in scheduler.active_requests or name in scheduler.waiting_requests
            )
        except Exception as failure:
            self._failed("reading a request of continuous batching", failure)
            return ()

    def drop(self, scheduler: Any, names: tuple[str, ...]) -> None:
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
