"""See the steps of a vLLM worker: its model runner is given a `SchedulerOutput`, which says whose tokens it computes.

A step begins with `execute_model` and ends with it where there is nothing to sample (a pipeline stage that is not the
last, a pooling model of the V1 runner), else with `sample_tokens` or `pool`; where scheduling is asynchronous, its
tokens are known when somebody calls `get_output` of what that returned, perhaps on another thread.

Both runners are wrapped: V1 (``v1/worker/gpu_model_runner.py``, the CPU's inherits from it) and V2
(``v1/worker/gpu/model_runner.py``). What a step is told is kept as it came: the lists of a `SchedulerOutput` are made
anew for each step; the two dicts are copied. Dummy runs, warm-ups and steps of no token are none.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from phaseprof.devices import describe
from phaseprof.errors import NotMeasured
from phaseprof.evidence import PassWindow
from phaseprof.hooks.models import SeenModel
from phaseprof.hooks.state import Flags, ThreadFacts, ThreadState, begin_window
from phaseprof.timers import DeviceTimer, Span, timer_of
from phaseprof.vllm.events import (
    Sampled,
    StepFetched,
    StepLost,
    StepRan,
    StepSkipped,
    WorkerEvent,
)
from phaseprof.vllm.reading import WorkReader
from phaseprof.vllm.runners import RunnerBook, SeenRunner
from phaseprof.vllm.seams import Seam, missing_fields

_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"
_V2_OUTPUTS = "vllm.v1.worker.gpu.async_utils"
_WORKER = "vllm.v1.worker.gpu_worker"

_STEPS = "the steps of vLLM's workers: they run without labels"
_FETCHED = "the tokens of vLLM's steps under asynchronous scheduling, and when they were there"

#: What is read of a `SchedulerOutput`, of its requests, and of a `ModelRunnerOutput`.
_SCHEDULED = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "finished_req_ids",
)
_NEW = ("req_id", "prompt_token_ids", "num_computed_tokens", "sampling_params")
_CACHED = ("req_ids", "resumed_req_ids", "num_computed_tokens", "num_output_tokens")
_OUTPUT = ("req_ids", "sampled_token_ids")

_PROMPT = attrgetter("prompt_len")

#: Takes the fields in their order: the class itself would take them one by one, in Python.
_make_step: Callable[[tuple[Any, ...]], StepRan] = partial(tuple.__new__, StepRan)


_NONE_BEGUN: tuple[Sequence[int], Sequence[int] | None] = ((), None)


class _Open:
    """A step that has begun."""

    __slots__ = (
        "begun",
        "ended_ns",
        "executed_ns",
        "graph",
        "mark",
        "padded",
        "profiled",
        "sample_ns",
        "seen",
        "span",
        "start_ns",
        "step",
        "thread_id",
        "told",
        "warmup",
        "window",
    )

    def __init__(
        self, seen: SeenRunner, step: int, output: Any, thread_id: int, flags: Flags
    ) -> None:
        self.seen = seen
        self.step = step
        self.thread_id = thread_id
        self.warmup = flags.warmups > 0
        self.profiled = flags.profiled
        self.window = flags.window
        cached = output.scheduled_cached_reqs
        drafts = output.scheduled_spec_decode_tokens
        new = output.scheduled_new_reqs
        #: `StepRan` from `scheduled` to `finished`: one object, as most is only handed on.
        self.told: tuple[Any, ...] = (
            # A runner may take drafts out of these two, and in one process they are the scheduler's own.
            output.num_scheduled_tokens.copy(),
            dict(zip(drafts, map(len, drafts.values()), strict=True)) if drafts else None,
            new,
            cached.req_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            cached.resumed_req_ids,
            output.finished_req_ids,
        )
        #: `StepRan.prompts` and `StepRan.tokens`.
        self.begun = _begun(new) if new else _NONE_BEGUN
        self.start_ns = self.executed_ns = self.ended_ns = 0
        self.sample_ns: int | None = None
        self.mark: Any = None
        self.span: Span | None = None
        self.padded: int | None = None
        self.graph = False


class WorkerHook:
    """Observes model runners.

    Args:
        emit: Takes the events; must be quick and safe to call from any thread.
        state: Of the threads.
        flags: Of the session.
        on_model: Told of each model at first sight.
        note: Told of what cannot be measured.
        failed: Told of an exception in our own code.

    Attributes:
        active: Set to False, the wrappers that somebody else still holds hand calls on.
        own_ns: Our own time on the worker's thread, beyond the calls that are wrapped.
        steps: Steps seen.
        handed_over: Steps that were emitted.
    """

    def __init__(
        self,
        *,
        emit: Callable[[WorkerEvent], None],
        state: ThreadState,
        flags: Flags,
        on_model: Callable[[SeenModel], None],
        note: Callable[[NotMeasured], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._emit = emit
        self._state = state
        self._flags = flags
        self._failed = failed
        self._work = WorkReader(failed)
        self._runners = RunnerBook(
            describe=describe,
            make_timer=timer_of,
            read=self._work.read,
            on_new=on_model,
            note=note,
        )
        #: Steps whose output is awaited, by the identity of an output that lives.
        self._awaited: dict[int, tuple[int, int, weakref.ref[Any]]] = {}
        self.active = True
        self.own_ns = 0
        self.steps = 0
        self.handed_over = 0

    @property
    def setup_ns(self) -> int:
        """Time to read runners at first sight."""
        return self._runners.setup_ns

    def seams(self) -> tuple[Seam, ...]:
        """Where vLLM is wrapped, with what each seam relies on."""
        fetch = {"get_output": self._wrap_get_output}
        return (
            Seam(
                _V1,
                "GPUModelRunner",
                {"execute_model": self._wrap_execute, "sample_tokens": self._wrap_end},
                _STEPS,
                optional={
                    "_determine_batch_execution_and_padding": self._wrap_padding,
                    "_model_forward": self._wrap_forward,
                    "_dummy_run": self._wrap_dummy,
                },
                look=_look,
            ),
            Seam(_V1, "AsyncGPUModelRunnerOutput", fetch, _FETCHED),
            Seam(_V1, "AsyncGPUPoolingModelRunnerOutput", fetch, _FETCHED),
            Seam(
                _V2,
                "GPUModelRunner",
                {"execute_model": self._wrap_execute, "sample_tokens": self._wrap_end},
                _STEPS,
                optional={"pool": self._wrap_end},
                look=_look,
            ),
            Seam(_V2_OUTPUTS, "AsyncOutput", fetch, _FETCHED),
            Seam(_V2_OUTPUTS, "AsyncPoolingOutput", fetch, _FETCHED),
            Seam(
                _V2_OUTPUTS,
                "StepTimingCollector",
                {"forward_start": self._wrap_start},
                "the device time of the steps of vLLM's V2 runner",
            ),
            Seam(
                _WORKER,
                "Worker",
                {"compile_or_warm_up_model": self._wrap_warmup},
                "which steps of vLLM's V2 runner warm it up: they are taken for steps",
            ),
            *self._work.seams(),
        )

    def remove(self) -> None:
        """Hand every call on from now on, and resolve the device times that are open."""
        self.active = False
        self._work.remove()
        self._awaited.clear()
        for timer in self._runners.timers:
            timer.finish()
            if timer.failure is not None:
                self._failed("timing steps of vLLM on their device", timer.failure)

    # The wrappers

    def _wrap_execute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns
        state = self._state

        @functools.wraps(original)
        def execute_model(runner: Any, output: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(runner, output, *args, **kwargs)
            entered = clock()
            here = state.here
            # The models of transformers that vLLM may run are parts of the step, or of a dummy run.
            outer, here.in_pass = here.in_pass, True
            opened = self._begin(runner, output, args, kwargs, here)
            if opened is None:
                try:
                    return original(runner, output, *args, **kwargs)
                finally:
                    here.in_pass = outer
            here.step = opened
            if opened.window is not None:
                # What a collector takes is no cost of the hooks, and is counted apart.
                asked = clock()
                self._tell(opened, opened.window)
                entered += clock() - asked
            opened.start_ns = began = clock()
            try:
                result = original(runner, output, *args, **kwargs)
            except BaseException as error:
                opened.executed_ns = clock()
                here.in_pass = outer
                here.step = None
                self._broke(opened, error)
                raise
            opened.executed_ns = ended = clock()
            here.in_pass = outer
            here.step = None
            self._executed(runner, opened, result)
            self.own_ns += began - entered + clock() - ended
            return result

        return execute_model

    def _wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of `sample_tokens` and of `pool`."""
        clock = time.perf_counter_ns
        state, runners = self._state, self._runners.seen
        ends = "pool" if original.__name__ == "pool" else "sample"

        @functools.wraps(original)
        def end(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
            seen = runners.get(id(runner))
            opened: _Open | None = None if seen is None else seen.open
            if seen is None or opened is None or not self.active:
                return original(runner, *args, **kwargs)
            seen.open = None
            here = state.here
            outer, here.in_pass = here.in_pass, True
            opened.sample_ns = clock()
            try:
                result = original(runner, *args, **kwargs)
            except BaseException as error:
                opened.ended_ns = clock()
                self._broke(opened, error)
                raise
            finally:
                here.in_pass = outer
            opened.ended_ns = ended = clock()
            self._end(opened, result, ends)
            self.own_ns += clock() - ended
            return result

        return end

    def _wrap_get_output(self, original: Callable[..., Any]) -> Callable[..., Any]:
        awaited = self._awaited

        @functools.wraps(original)
        def get_output(output: Any, /, *args: Any, **kwargs: Any) -> Any:
            known = awaited.pop(id(output), None)
            if known is None or not self.active:
                return original(output, *args, **kwargs)
            runner, step, _ = known
            try:
                result = original(output, *args, **kwargs)
            except BaseException as error:
                now = time.perf_counter_ns()
                self._emit(StepFetched(runner, step, now, None, type(error).__name__))
                raise
            now = time.perf_counter_ns()
            try:
                sampled = _sampled(result)
            except Exception as failure:
                self._failed("reading the tokens of a step of vLLM", failure)
                sampled = None
            self._emit(StepFetched(runner, step, now, sampled, None))
            self.own_ns += time.perf_counter_ns() - now
            return result

        return get_output

    def _wrap_padding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        state = self._state

        @functools.wraps(original)
        def padding(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(runner, *args, **kwargs)
            opened: _Open | None = state.here.step
            if opened is not None:
                try:
                    opened.padded = result[1].num_tokens
                    opened.graph = result[0].name == "FULL"
                except Exception as failure:
                    self._failed("reading the padding of a step of vLLM", failure)
            return result

        return padding

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """V1: the inputs are on the device, the model is about to be called."""
        state = self._state

        @functools.wraps(original)
        def forward(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
            opened: _Open | None = state.here.step
            if opened is not None and opened.seen.timer is not None:
                self._mark(opened, opened.seen.timer)
            return original(runner, *args, **kwargs)

        return forward

    def _wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """V2: likewise. A replay of a graph is announced here as well."""
        state = self._state

        @functools.wraps(original)
        def start(collector: Any, /, *args: Any, **kwargs: Any) -> Any:
            opened: _Open | None = state.here.step
            if opened is not None and opened.seen.timer is not None:
                self._mark(opened, opened.seen.timer)
            return original(collector, *args, **kwargs)

        return start

    def _wrap_dummy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        state = self._state

        @functools.wraps(original)
        def dummy(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
            here = state.here
            outer, here.in_pass = here.in_pass, True
            try:
                return original(runner, *args, **kwargs)
            finally:
                here.in_pass = outer

        return dummy

    def _wrap_warmup(self, original: Callable[..., Any]) -> Callable[..., Any]:
        state = self._state

        @functools.wraps(original)
        def warm_up(worker: Any, /, *args: Any, **kwargs: Any) -> Any:
            here = state.here
            outer, here.warming = here.warming, True
            try:
                return original(worker, *args, **kwargs)
            finally:
                here.warming = outer

        return warm_up

    # What they do

    def _begin(
        self,
        runner: Any,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        here: ThreadFacts,
    ) -> _Open | None:
        """Take note of a step; None if it is none, or cannot be read."""
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]) or here.warming:
            return None
        try:
            if not output.total_num_scheduled_tokens:
                seen = self._runners.seen.get(id(runner))
                if seen is not None and output.finished_req_ids:
                    self._emit(StepSkipped(seen.number, output.finished_req_ids))
                return None
            seen = self._runners.seen.get(id(runner))
            if seen is None:
                before = self._runners.setup_ns
                seen = self._runners.find(runner)
                self.own_ns -= self._runners.setup_ns - before
            # Counted first: one that cannot be read is a step of the engine nevertheless.
            step = seen.steps
            seen.steps = step + 1
            self.steps += 1
            return _Open(seen, step, output, here.native_id, self._flags)
        except Exception as failure:
            self._failed("reading a step of vLLM", failure)
            return None

    def _executed(self, runner: Any, opened: _Open, result: Any) -> None:
        """`execute_model` has returned: the step goes on, or ends here."""
        seen = opened.seen
        if result is None:
            seen.open = opened
            if opened.padded is None:
                self._read_padding(runner, opened)
            return
        opened.ended_ns = opened.executed_ns
        if hasattr(result, "sampled_token_ids") or hasattr(result, "get_output"):
            self._end(opened, result, "pool")
            return
        self._read_padding(runner, opened)
        self._end(opened, None, "stage")

    def _read_padding(self, runner: Any, opened: _Open) -> None:
        """V2: what the runner keeps of the batch until it samples."""
        state = getattr(runner, "execute_model_state", None)
        batch = getattr(state, "input_batch", None)
        if batch is None:
            return
        opened.padded = getattr(batch, "num_tokens_after_padding", None)
        timing = getattr(getattr(runner, "step_timing", None), "_batch", None)
        opened.graph = bool(timing[0]) if timing else False

    def _end(self, opened: _Open, result: Any, ends: str) -> None:
        """The last call of a step has returned."""
        sampled = None
        awaited = False
        try:
            if opened.mark is not None and opened.seen.timer is not None:
                opened.span = opened.seen.timer.end(opened.mark)
            if result is not None:
                if hasattr(result, "get_output"):
                    awaited = True
                    self._await(opened, result)
                elif ends == "sample":
                    sampled = _sampled(result)
        except Exception as failure:
            self._failed("reading what a step of vLLM gave", failure)
        self._hand_over(opened, sampled, awaited, ends, None)

    def _broke(self, opened: _Open, error: BaseException) -> None:
        opened.seen.open = None
        opened.ended_ns = opened.ended_ns or opened.executed_ns
        self._hand_over(opened, None, False, "sample", type(error).__name__)

    def _hand_over(
        self, opened: _Open, sampled: Sampled | None, awaited: bool, ends: str, error: str | None
    ) -> None:
        seen = opened.seen
        self._emit(
            _make_step(
                (
                    seen.number,
                    opened.step,
                    seen.model_id,
                    opened.thread_id,
                    opened.start_ns,
                    opened.executed_ns,
                    opened.sample_ns,
                    opened.ended_ns,
                    opened.span,
                    *opened.told,
                    sampled,
                    awaited,
                    ends,
                    opened.padded,
                    opened.graph,
                    seen.compiled,
                    seen.encodes,
                    opened.warmup,
                    opened.profiled,
                    error,
                    *opened.begun,
                )
            )
        )
        self.handed_over += 1
        if opened.window is not None:
            opened.window.ended()

    def _tell(self, opened: _Open, window: PassWindow) -> None:
        """Tell a window that a step begins."""
        unfinished = opened.seen.open
        if unfinished is not None and unfinished.window is not None:
            # Nobody has called what ends the step before.
            unfinished.window.ended()
            unfinished.window = None
        scheduled, drafted = opened.told[:2]
        tokens = sum(scheduled.values())
        # Drafts that are verified make a step no wider than decoding does.
        drafts = sum(drafted.values()) if drafted else 0
        opened.profiled = begin_window(window, self._flags, tokens - drafts > len(scheduled))

    def _await(self, opened: _Open, output: Any) -> None:
        key, number, step = id(output), opened.seen.number, opened.step

        def gone(_: weakref.ref[Any]) -> None:
            # Runs before the address can be used again, so that an entry always is of an output that lives.
            if self._awaited.pop(key, None) is not None:
                self._emit(StepLost(number, step))

        self._awaited[key] = (number, step, weakref.ref(output, gone))

    def _mark(self, opened: _Open, timer: DeviceTimer) -> None:
        try:
            opened.mark = timer.begin()
        except Exception as failure:
            self._failed("timing a step of vLLM", failure)


def _begun(new: Sequence[Any]) -> tuple[Sequence[int], Sequence[int] | None]:
    """Lengths of what requests begin with: of the prompt, and (V2) of all that they have."""
    prompts = list(map(_PROMPT, new))
    if getattr(new[0], "prefill_token_ids", None) is None:
        return prompts, None
    return prompts, [len(one.prefill_token_ids) for one in new]


def _sampled(output: Any) -> Sampled | None:
    tokens = output.sampled_token_ids
    if not tokens:
        return None
    return Sampled(output.req_ids, list(map(len, tokens)), tokens)


def _look(module: Any) -> str | None:
    """What of the form of a runner's inputs and outputs is not as it is known."""
    scheduled = sys.modules.get("vllm.v1.core.sched.output")
    outputs = sys.modules.get("vllm.v1.outputs")
    if scheduled is None or outputs is None:
        return f"{module.__name__} does not use vllm.v1.core.sched.output and vllm.v1.outputs"
    return (
        missing_fields(getattr(scheduled, "SchedulerOutput", None), _SCHEDULED)
        or missing_fields(getattr(scheduled, "NewRequestData", None), _NEW)
        or missing_fields(getattr(scheduled, "CachedRequestData", None), _CACHED)
        or missing_fields(getattr(outputs, "ModelRunnerOutput", None), _OUTPUT)
    )
