"""See vLLM's scheduler: which requests come and go, what each step is made of, and when its tokens are handed over.

All forms of the engine's loop (one step after the other, asynchronous scheduling, the queue of batches of a pipeline)
come by the same two calls: `schedule` says what is run, and `update_from_output` is given that very object again with
what came out. Between the two several other steps may be scheduled. They run in the engine core's process; of a
multiprocess engine the workers are elsewhere, and only count the same steps.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from phaseprof.errors import NotMeasured
from phaseprof.hooks.state import Flags
from phaseprof.process import say_rank
from phaseprof.vllm.core_events import (
    CoreEvent,
    EngineSeen,
    RequestAdded,
    RequestEnd,
    RequestPreempted,
    RequestsDropped,
    SchedulerGone,
    StepScheduled,
    StepUpdated,
)
from phaseprof.vllm.names import model_id_of
from phaseprof.vllm.seams import Seam, missing_fields

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_CORE = "vllm.v1.engine.core"
_FRONTEND = "vllm.v1.engine.output_processor"

_REQUESTS = "the requests of vLLM's engines and the steps of their schedulers"
_CLIENTS = "the ids under which clients sent their requests to vLLM"
_TEXT = "which requests of vLLM ended with a stop string: they look as if they were aborted"

#: What is read of a `SchedulerOutput`, of its requests, and of an `EngineCoreOutput`.
_SCHEDULED = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
)
_COMPUTED = ("num_computed_tokens",)
_GIVEN = ("request_id", "new_token_ids", "finish_reason")

#: Ids of clients whose request the scheduler was not given yet. More can only be left over from requests that failed.
_MAX_KNOWN = 65_536


class _Engine:
    """A scheduler that was seen."""

    __slots__ = ("number", "open", "preempted", "ref", "steps")

    def __init__(self, number: int, ref: weakref.ref[Any]) -> None:
        self.number = number
        self.ref = ref
        #: Steps so far that had a token.
        self.steps = 0
        #: The steps whose output has not come, by the identity of what was scheduled.
        self.open: dict[int, int] = {}
        #: Requests that were preempted since the last step.
        self.preempted = 0


class CoreHook:
    """Observes schedulers.

    Args:
        emit: Takes the events; must be quick and safe to call from any thread.
        flags: Of the session.
        note: Told of what cannot be measured.
        failed: Told of an exception in our own code.

    Attributes:
        active: Whether it observes; else every call passes through.
        own_ns: Time in the hooks on the engine's thread.
    """

    def __init__(
        self,
        *,
        emit: Callable[[CoreEvent], None],
        flags: Flags,
        note: Callable[[NotMeasured], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._emit = emit
        self._flags = flags
        self._note = note
        self._failed = failed
        self._engines: dict[int, _Engine] = {}
        self._count = 0
        self._numbers: Counter[str] = Counter()
        #: The client's id of requests that are on their way to the scheduler.
        self._clients: dict[str, str] = {}
        #: Requests that the frontend in this process is about to end, having found a stop string.
        self._by_text: set[str] = set()
        self.active = True
        self.own_ns = 0

    def seams(self) -> tuple[Seam, ...]:
        """Where vLLM is wrapped, with what each seam relies on."""
        return (
            Seam(
                _SCHEDULER,
                "Scheduler",
                {
                    "schedule": self._wrap_schedule,
                    "update_from_output": self._wrap_update,
                    "add_request": self._wrap_add,
                    "finish_requests": self._wrap_finish,
                },
                _REQUESTS,
                optional={"_preempt_request": self._wrap_preempt},
                look=_look,
            ),
            Seam(
                _CORE,
                "EngineCore",
                {"preprocess_add_request": self._wrap_preprocess},
                _CLIENTS,
            ),
            Seam(
                _FRONTEND,
                "OutputProcessor",
                {"process_outputs": self._wrap_frontend},
                _TEXT,
            ),
        )

    def remove(self) -> None:
        """Hand every call on from now on."""
        self.active = False
        self._clients.clear()
        self._by_text.clear()

    # The wrappers

    def _wrap_schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        @functools.wraps(original)
        def schedule(scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(scheduler, *args, **kwargs)
            began = clock()
            output = original(scheduler, *args, **kwargs)
            ended = clock()
            try:
                if output.total_num_scheduled_tokens:
                    self._scheduled(scheduler, output, began, ended)
            except Exception as failure:
                self._failed("reading what vLLM's scheduler decided", failure)
            self.own_ns += clock() - ended
            return output

        return schedule

    def _wrap_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        @functools.wraps(original)
        def update_from_output(scheduler: Any, output: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(scheduler, output, *args, **kwargs)
            began = clock()
            result = original(scheduler, output, *args, **kwargs)
            ended = clock()
            try:
                self._updated(scheduler, output, result, began, ended)
            except Exception as failure:
                self._failed("reading what vLLM's scheduler hands over", failure)
            self.own_ns += clock() - ended
            return result

        return update_from_output

    def _wrap_add(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_request(scheduler: Any, request: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(scheduler, request, *args, **kwargs)
            began = time.perf_counter_ns()
            try:
                # Before the call, which may end a session whose input has ended.
                self._added(self._engine(scheduler), scheduler, request, began)
            except Exception as failure:
                self._failed("reading a request of vLLM", failure)
            self.own_ns += time.perf_counter_ns() - began
            return original(scheduler, request, *args, **kwargs)

        return add_request

    def _wrap_finish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def finish_requests(scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(scheduler, *args, **kwargs)
            if not self.active:
                return result
            began = time.perf_counter_ns()
            try:
                # Those that had not ended before.
                ids = [request.request_id for request in result or ()]
                if ids:
                    by_text = frozenset(self._by_text.intersection(ids))
                    self._by_text -= by_text
                    engine = self._engine(scheduler)
                    self._emit(RequestsDropped(engine.number, began, ids, by_text))
            except Exception as failure:
                self._failed("reading which requests of vLLM were ended", failure)
            self.own_ns += time.perf_counter_ns() - began
            return result

        return finish_requests

    def _wrap_preempt(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def preempt(scheduler: Any, request: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(scheduler, request, *args, **kwargs)
            if self.active:
                try:
                    engine = self._engine(scheduler)
                    engine.preempted += 1
                    self._emit(RequestPreempted(engine.number, request.request_id))
                except Exception as failure:
                    self._failed("reading a preemption of vLLM", failure)
            return result

        return preempt

    def _wrap_preprocess(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The last to see what the frontend sent; on a thread of its own in a process of its own."""

        @functools.wraps(original)
        def preprocess(core: Any, request: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                try:
                    client = getattr(request, "external_req_id", None)
                    if client is not None and len(self._clients) < _MAX_KNOWN:
                        self._clients[request.request_id] = client
                except Exception as failure:
                    self._failed("reading the client's id of a request of vLLM", failure)
            return original(core, request, *args, **kwargs)

        return preprocess

    def _wrap_frontend(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def process_outputs(processor: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(processor, *args, **kwargs)
            # Of an engine in another process nobody here would ask for them.
            if self.active and self._engines:
                ids = getattr(result, "reqs_to_abort", None)
                if ids:
                    self._by_text.update(ids)
            return result

        return process_outputs

    # What they do

    def _engine(self, scheduler: Any) -> _Engine:
        engine = self._engines.get(id(scheduler))
        return self._see(scheduler) if engine is None else engine

    def _see(self, scheduler: Any) -> _Engine:
        self._count += 1
        number, key = self._count, id(scheduler)

        def gone(_: weakref.ref[Any]) -> None:
            # Runs before the address can be used again, so that an entry always is of a scheduler that lives.
            self._engines.pop(key, None)
            if self.active:
                self._emit(SchedulerGone(number, time.perf_counter_ns()))

        engine = self._engines[key] = _Engine(number, weakref.ref(scheduler, gone))
        config = scheduler.vllm_config
        parallel = config.parallel_config
        # Its first worker's, so that what the two write lies together.
        say_rank(int(parallel.data_parallel_index) * int(parallel.world_size))
        self._emit(EngineSeen(number, model_id_of(config.model_config, self._numbers)))
        now = time.perf_counter_ns()
        for request in scheduler.requests.values():
            self._emit(_request(number, request, None, now, turn=False, late=True))
        return engine

    def _added(self, engine: _Engine, scheduler: Any, request: Any, at_ns: int) -> None:
        known = request.request_id in scheduler.requests
        client = self._clients.pop(request.request_id, None)
        if known and not request.resumable:
            return  # It says that the input of a session has ended.
        self._emit(_request(engine.number, request, client, at_ns, turn=known, late=False))

    def _scheduled(self, scheduler: Any, output: Any, start_ns: int, end_ns: int) -> None:
        engine = self._engine(scheduler)
        step = engine.steps
        engine.steps += 1
        engine.open[id(output)] = step
        preempted, engine.preempted = engine.preempted, 0
        running, waiting = scheduler.get_request_counts()
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        self._emit(
            StepScheduled(
                engine.number,
                step,
                start_ns,
                end_ns,
                running,
                waiting,
                preempted,
                output.total_num_scheduled_tokens,
                _usage(scheduler),
                # A runner in this process may take drafts out of it.
                output.num_scheduled_tokens.copy(),
                new,
                [each.prompt_len for each in new] if new else (),
                cached.req_ids,
                cached.num_computed_tokens,
                cached.resumed_req_ids,
                self._flags.warmups > 0,
                self._flags.profiled,
            )
        )

    def _updated(
        self, scheduler: Any, output: Any, result: Any, start_ns: int, end_ns: int
    ) -> None:
        engine = self._engine(scheduler)
        step = engine.open.pop(id(output), None)
        requests: list[str] = []
        counts: list[int] = []
        ended: list[RequestEnd] = []
        for outputs in result.values():
            for each in outputs.outputs:
                requests.append(each.request_id)
                counts.append(len(each.new_token_ids))
                if each.finish_reason is not None:
                    left = scheduler.requests.get(each.request_id)
                    over = left is None or left.is_finished()
                    ended.append(RequestEnd(each.request_id, each.finish_reason.name, over))
        if step is not None or requests:
            self._emit(StepUpdated(engine.number, step, start_ns, end_ns, requests, counts, ended))


def _look(module: Any) -> str | None:
    """What of the form of a scheduler's inputs and outputs is not as it is known."""
    scheduled = sys.modules.get("vllm.v1.core.sched.output")
    outputs = sys.modules.get("vllm.v1.engine")
    if scheduled is None or outputs is None:
        return f"{module.__name__} does not use vllm.v1.core.sched.output and vllm.v1.engine"
    known = getattr(getattr(outputs, "EngineCoreOutput", None), "__struct_fields__", ())
    lacking = [name for name in _GIVEN if name not in known]
    if lacking:
        return f"EngineCoreOutput has no {lacking[0]}"
    if not callable(getattr(module.Scheduler, "get_request_counts", None)):
        return "Scheduler has no get_request_counts"
    return (
        missing_fields(getattr(scheduled, "SchedulerOutput", None), _SCHEDULED)
        or missing_fields(getattr(scheduled, "NewRequestData", None), ("req_id", *_COMPUTED))
        or missing_fields(
            getattr(scheduled, "CachedRequestData", None),
            ("req_ids", "resumed_req_ids", *_COMPUTED),
        )
    )


def _request(
    engine: int, request: Any, client: str | None, at_ns: int, *, turn: bool, late: bool
) -> RequestAdded:
    sampling = request.sampling_params
    return RequestAdded(
        engine,
        request.request_id,
        client,
        request.arrival_time,
        at_ns,
        request.num_prompt_tokens,
        turn,
        bool(request.resumable),
        bool(getattr(sampling, "stop", None)),
        request.num_output_tokens,
        late,
    )


def _usage(scheduler: Any) -> float | None:
    get = getattr(scheduler, "get_kv_cache_usage", None)
    return float(get()) if get is not None else None
