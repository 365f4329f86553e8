"""How long a CPU worked: the outermost operators that torch.profiler saw.

On a CPU there are no kernels to look at. What comes nearest is the time inside operators: between them the host runs
Python, and the cores wait. An operator that another one called lies inside it and is dropped, so what is left can be
laid side by side, and its union is the busy time.

Limits. Dispatch inside an operator counts as busy, so small operators look a little busier than their arithmetic; the
profiler adds about a microsecond to each. Code that torch.compile generated runs outside operators: a window in which
it ran has no busy figure. Windows are short: the profiler keeps every event in memory until they end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.errors import NotMeasured

if TYPE_CHECKING:
    from torch.profiler import profile

_BUSY = "the busy time of the CPU"
#: `at::RecordScope::FUNCTION`: an operator, not an annotation that a user or a library placed.
_OPERATOR_SCOPE = 0
#: How torch.profiler names a call of code that the inductor backend of torch.compile generated.
_COMPILED_CALL = "CompiledFxGraph"
#: One above the level of the "USDT:" lines, the highest that torch 2.13's kineto prints.
_QUIET_LEVEL = "6"


@dataclass(frozen=True, slots=True)
class OperatorEvent:
    """One operator that no other operator called.

    Attributes:
        name: As torch names it: ``aten::mm``.
        start_ns: Begin, Unix ns.
        end_ns: End, Unix ns.
        thread_id: Native id of the host thread that called it.
    """

    name: str
    start_ns: int
    end_ns: int
    thread_id: int


@dataclass(slots=True)
class OperatorRecording:
    """What a window holds; filled when the window ends.

    Attributes:
        events: The outermost operators of all threads, by begin.
        not_measured: Why there are none, if something prevented it; None otherwise.
    """

    events: tuple[OperatorEvent, ...] = ()
    not_measured: NotMeasured | None = None


@contextlib.contextmanager
def record_operators() -> Iterator[OperatorRecording]:
    """Record the operators that run inside the block, on any thread (on this one only, before torch 2.7).

    Nothing of it raises into the block. If another torch.profiler session is running, this one steps aside; if one is
    started inside the block, that one keeps its events and this one has none. The first window of a process takes
    about a second to start, later ones a millisecond.
    """
    recording = OperatorRecording()
    session = _start(recording)
    try:
        yield recording
    finally:
        if session is not None:
            _stop(session, recording)


def busy_ns(events: Iterable[OperatorEvent], start_ns: int, end_ns: int) -> int:
    """Time in ``[start_ns, end_ns)`` in which at least one of the events ran, in ns; an overlap counts once."""
    spans = sorted(
        (max(event.start_ns, start_ns), min(event.end_ns, end_ns))
        for event in events
        if event.start_ns < end_ns and event.end_ns > start_ns
    )
    busy, covered_to = 0, start_ns
    for begin, end in spans:
        if end > covered_to:
            busy += end - max(begin, covered_to)
            covered_to = end
    return busy


def outermost(events: Iterable[OperatorEvent]) -> tuple[OperatorEvent, ...]:
    """The events that lie in no other event of their thread, by begin.

    An event that begins inside another belongs to it even if it seems to end later: that is the clock's last digit.
    """
    kept: list[OperatorEvent] = []
    covered_to: dict[int, int] = {}
    for event in sorted(events, key=lambda event: (event.start_ns, -event.end_ns)):
        if event.start_ns >= covered_to.get(event.thread_id, event.start_ns):
            kept.append(event)
            covered_to[event.thread_id] = event.end_ns
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class _Session:
    """A running profiler. `all_threads` tells it from another's session when it ends."""

    profiler: profile
    all_threads: bool


def _start(recording: OperatorRecording) -> _Session | None:
    try:
        if _another_session_runs():
            recording.not_measured = NotMeasured(
                _BUSY,
                "another torch.profiler session is running, and there can be one in a process",
                "End it, or leave torch.profiler out of the script while phaseprof runs.",
            )
            return None
        from torch.profiler import ProfilerActivity, profile

        config = _all_threads_config()
        profiler = profile(activities=[ProfilerActivity.CPU], experimental_config=config)
        with _quiet_kineto():
            profiler.start()
        return _Session(profiler, all_threads=config is not None)
    except Exception as error:
        recording.not_measured = NotMeasured(_BUSY, f"torch.profiler did not start: {error}")
        return None


def _stop(session: _Session, recording: OperatorRecording) -> None:
    try:
        if _replaced(session):
            # Ending ours would end theirs.
            recording.not_measured = NotMeasured(
                _BUSY,
                "another torch.profiler session was started inside the window and took over",
                "Leave torch.profiler out of the script while phaseprof runs.",
            )
            return
        session.profiler.stop()
        inner = session.profiler.profiler
        results = inner.kineto_results if inner is not None else None
        raw = results.events() if results is not None else []
        if any(_COMPILED_CALL in event.name() for event in raw):
            recording.not_measured = NotMeasured(
                _BUSY,
                "code of torch.compile ran, and what it computes lies outside operators",
                "Run without torch.compile to see the busy time.",
            )
            return
        recording.events = outermost(_operators(raw))
    except Exception as error:
        recording.not_measured = NotMeasured(_BUSY, f"torch.profiler did not end: {error}")


def _operators(raw: Iterable[Any]) -> Iterator[OperatorEvent]:
    """The operators among kineto's events. Its times are Unix ns; its resource id is the native thread id."""
    for event in raw:
        if event.scope() != _OPERATOR_SCOPE or event.is_async():
            continue
        name = event.name()
        namespace, separator, _ = name.partition("::")
        # torch.compile marks its regions in the scope of operators; their names are sentences.
        if not separator or not namespace.isidentifier():
            continue
        yield OperatorEvent(name, event.start_ns(), event.end_ns(), event.device_resource_id())


def _all_threads_config() -> Any:
    """The switch that makes a session see every thread; None where torch does not have it."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def _another_session_runs() -> bool:
    """Whether a profiler is on: torch knows of one in this thread, or Python started one in any."""
    import torch

    of_thread = torch._C._autograd._profiler_enabled()
    return bool(of_thread or torch.autograd.profiler._is_profiler_enabled)


def _replaced(session: _Session) -> bool:
    """Whether another session began after ours: torch then drops ours without a word."""
    import torch

    if not torch.autograd.profiler._is_profiler_enabled:
        return True
    # A session over all threads does not count as one of this thread.
    return session.all_threads and bool(torch._C._autograd._profiler_enabled())


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep kineto's log lines ("USDT: … profiler_start") out of the user's terminal, without touching stderr.

    kineto reads its log level once, when the first session of the process starts. A level that the user set stands.
    Where kineto was already started (an earlier session, or a CUDA build that starts it on import), nothing changes.
    """
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = _QUIET_LEVEL
    try:
        yield
    finally:
        os.environ.pop("KINETO_LOG_LEVEL", None)
