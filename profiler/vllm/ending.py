"""End the recording of vLLM's processes while they still can: at the start of their shutdown.

A process of vLLM that has left its loop takes seconds to shut down, and its parent does not always wait for it: an
engine core has 5 s, which two workers that end use up, and that of a server has none unless it was started with
``--shutdown-timeout``. So what was recorded is written whole before anything else is torn down, and a parent that would
kill its engine at once tells it to end, as it would have done, and then waits until that is written: some tenths of a
second.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from phaseprof.process import this_host
from phaseprof.vllm.seams import Seam

_CORE = "vllm.v1.engine.core"
_WORKER = "vllm.v1.executor.multiproc_executor"
_UTILS = "vllm.v1.engine.utils"

_END = "the end of vLLM's processes, where they are killed while they shut down"

#: A parent that gives its engine at least so long need not be slowed down.
_ENOUGH_S = 2.0
#: How long it waits at most. A step that is under way ends first.
_WAIT_S = 3.0
#: An engine core that was told to end and has not begun to after so long waits for a worker.
_HANGS_S = 1.0
_LOOK_S = 0.02
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EndHook:
    """Sees processes of vLLM begin to shut down.

    Args:
        trace: The trace's folder.
        end: Ends the session of this process.
        failed: Told of an exception in our own code.

    Attributes:
        active: Set to False, the wrappers that somebody else still holds hand calls on.
    """

    def __init__(
        self,
        *,
        trace: Path,
        end: Callable[[], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._trace = trace
        self._end_session = end
        self._failed = failed
        #: Seconds that the engine core of this process gives its requests when it is told to end.
        self._given_s: float | None = None
        self.active = True

    def seams(self) -> tuple[Seam, ...]:
        """Where vLLM is wrapped."""
        return (
            Seam(_CORE, "EngineCore", {"shutdown": self._wrap_core}, _END),
            Seam(_CORE, "EngineCoreProc", {"_handle_shutdown": self._wrap_told}, _END),
            Seam(_WORKER, "WorkerProc", {"shutdown": self._wrap_worker}, _END),
            Seam(_UTILS, "CoreEngineProcManager", {"shutdown": self._wrap_manager}, _END),
            Seam(_UTILS, "SignalCallback", {"_run": self._wrap_run}, _END),
        )

    def remove(self) -> None:
        """Hand every call on from now on."""
        self.active = False

    def _wrap_core(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def shutdown(core: Any, /, *args: Any, **kwargs: Any) -> Any:
            kind = getattr(sys.modules.get(_CORE), "EngineCoreProc", None)
            # One that runs in its client's process may be followed by another.
            if self.active and isinstance(kind, type) and isinstance(core, kind):
                self._end()
            return original(core, *args, **kwargs)

        return shutdown

    def _wrap_told(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Called before each step. Once it is told to end, an engine core drops its requests, unless it was given time
        for them; all is over then but one more step of no token."""

        @functools.wraps(original)
        def handle_shutdown(core: Any, /) -> Any:
            goes_on = original(core)
            if self._given_s is None or core.shutdown_state:
                try:
                    self._given_s = core.vllm_config.shutdown_timeout
                    told = self.active and core.shutdown_state and not self._given_s
                except Exception as failure:
                    self._failed("reading how vLLM's engine ends", failure)
                    told = False
                if told:
                    self._end()
            return goes_on

        return handle_shutdown

    def _wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A thread of an engine core, which wakes it when a signal has told it to end. At a terminal its workers get
        the signal as well, and one that was in a step does not answer: the core then waits for it until it is
        killed."""

        @functools.wraps(original)
        def run(callback: Any, /) -> Any:
            result = original(callback)
            if self.active and self._given_s == 0 and not callback._stopped:
                self._end_soon()
            return result

        return run

    def _end_soon(self) -> None:
        until = time.monotonic() + _HANGS_S
        while self.active and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if self.active:
            self._end()

    def _wrap_worker(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def shutdown(worker: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                self._end()
            return original(worker, *args, **kwargs)

        return shutdown

    def _wrap_manager(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def shutdown(manager: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                try:
                    timeout = kwargs.get("timeout", args[0] if args else None)
                    # Without one vLLM waits 5 s.
                    if timeout is not None and timeout < _ENOUGH_S and manager._finalizer.alive:
                        self._end_engines(manager.processes)
                except Exception as failure:
                    self._failed("ending the recording of vLLM's engine", failure)
            return original(manager, *args, **kwargs)

        return shutdown

    def _end(self) -> None:
        """End the session of this process."""
        try:
            with _signals_wait():
                self._end_session()
        except Exception as failure:
            self._failed("ending the recording of a process of vLLM", failure)

    def _end_engines(self, processes: Iterable[Any]) -> None:
        """Tell engine cores to end, as vLLM is about to; wait until they and their workers have written the end."""
        host = this_host().token
        alive = [process for process in processes if process.is_alive()]
        pids = {process.pid for process in alive}.union(*(_below(each.pid) for each in alive))
        until = time.monotonic() + _WAIT_S
        for process in alive:
            process.terminate()
        # Once it has ended nobody kills its workers.
        while (
            _unfinished(self._trace, host, pids)
            and any(process.is_alive() for process in alive)
            and time.monotonic() < until
        ):
            time.sleep(_LOOK_S)


def _below(pid: int) -> set[int]:
    """All processes below one: vLLM kills them with it."""
    # vLLM's own dependency, for the same purpose.
    import psutil

    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def _unfinished(trace: Path, host: str, pids: set[int]) -> bool:
    """Whether one of these processes of a host is recorded and has not written its end."""
    for pid in pids:
        for file in (trace / "meta").glob(f"*-host-{host}-pid-{pid}.json"):
            # It may be renamed meanwhile, when the rank of the process becomes known.
            with contextlib.suppress(OSError, ValueError):
                if not json.loads(file.read_bytes())["complete"]:
                    return True
    return False


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals that ask the process to end take effect afterwards. An engine core that shuts down does not handle them
    any more, and may get a second one from its parent, or from the terminal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, lambda which, frame: came.append(which))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for which in dict.fromkeys(came):
            os.kill(os.getpid(), which)
