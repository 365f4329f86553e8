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
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from phaseprof.engine_events import EngineEvent
from phaseprof.errors import NotMeasured
from phaseprof.hooks.models import ModelBook
from phaseprof.hooks.patching import Patch
from phaseprof.hooks.schedulers import OpenStep, SchedulerReader, unknown_version
from phaseprof.hooks.state import CacheBook, Flags, ThreadState

_PROCESSOR = ("_generation_step", "update_batch", "_handle_request_error")
_SCHEDULER = ("add_waiting_request", "clear_cancelled_requests")


class _Thread(threading.local):
    open: OpenStep | None = None


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
        self._models = models
        self._state = state
        self._failed = failed
        self._note = note
        self._reader = SchedulerReader(
            emit=emit,
            models=models,
            caches=caches,
            state=state,
            flags=flags,
            failed=failed,
            note=note,
        )
        self._local = _Thread()
        self.active = True
        self.own_ns = 0

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
        self._reader.finished = getattr(getattr(module, "RequestStatus", None), "FINISHED", None)
        if self._reader.finished is None:
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
        targets = [(found, name, makers[name]) for found, _, names in seams for name in names]
        # These are not in 5.0, which runs the model inside `_generation_step`.
        runner = getattr(module, "ModelRunner", None)
        targets += [
            (owner, name, make)
            for owner, name, make in (
                (module.ContinuousBatchProcessor, "warmup", self._wrap_warmup),
                (runner, "compute_batch", self._wrap_compute),
                (runner, "_capture_graph", self._wrap_capture),
            )
            if hasattr(owner, name)
        ]
        patches: list[Patch] = []
        try:
            for owner, name, make in targets:
                patches.append(Patch(owner, name, make))
        except Exception as failure:
            for patch in patches:
                patch.remove()
            self._note(unknown_version(f"a hook could not be set ({failure})"))
            return []
        return patches

    # The wrappers

    def _wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _generation_step(processor: Any, model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(processor, model, *args, **kwargs)
            # What a model takes at first sight is no cost of a step, and is counted apart.
            entered = time.perf_counter_ns() - self._models.setup_ns
            opened = self._reader.begin(processor, model)
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
                    self._reader.end(processor, opened, began, ended, error)
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
            opened = self._reader.begin_warmup(processor, model)
            if opened is not None and opened.graph:
                here.in_pass = True
            began = time.perf_counter_ns()
            try:
                return original(processor, model, *args, **kwargs)
            finally:
                here.in_pass = outer
                if opened is not None:
                    self._reader.end(processor, opened, began, time.perf_counter_ns(), None)

        return warmup

    def _wrap_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update_batch(processor: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(processor, *args, **kwargs)
            entered = time.perf_counter_ns()
            before = self._reader.standing(processor)
            self.own_ns += time.perf_counter_ns() - entered
            try:
                return original(processor, *args, **kwargs)
            finally:
                if before is not None:
                    taken = time.perf_counter_ns()
                    self._reader.taken(processor, *before, taken)
                    self.own_ns += time.perf_counter_ns() - taken

        return update_batch

    def _wrap_waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_waiting_request(scheduler: Any, state: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                self._reader.waits(scheduler, state)
            return original(scheduler, state, *args, **kwargs)

        return add_waiting_request

    def _wrap_cancelled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clear_cancelled_requests(scheduler: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.active or not getattr(scheduler, "_requests_to_cancel", True):
                return original(scheduler, *args, **kwargs)
            asked = self._reader.asked(scheduler)
            result = original(scheduler, *args, **kwargs)
            self._reader.drop(scheduler, asked)
            return result

        return clear_cancelled_requests

    def _wrap_error(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _handle_request_error(
            processor: Any, error: Any, state: Any, /, *args: Any, **kwargs: Any
        ) -> Any:
            if self.active:
                self._reader.fails(processor.scheduler, state)
            return original(processor, error, state, *args, **kwargs)

        return _handle_request_error

    def _mark(self, runner: Any, opened: OpenStep) -> Any:
        timer = opened.model.timer
        if timer is None:
            return None
        try:
            with _on_stream(runner):
                return timer.begin()
        except Exception as failure:
            self._failed("timing a step of continuous batching", failure)
            return None

    def _span(self, runner: Any, opened: OpenStep, mark: Any) -> None:
        timer = opened.model.timer
        assert timer is not None
        try:
            with _on_stream(runner):
                opened.span = timer.end(mark)
        except Exception as failure:
            self._failed("timing a step of continuous batching", failure)


def _on_stream(runner: Any) -> Any:
    """The stream on which a runner computes."""
    return sys.modules["torch"].cuda.stream(runner.inputs_and_outputs.compute_stream)
