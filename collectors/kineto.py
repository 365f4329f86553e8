"""One torch.profiler session over all threads of the process: begun, ended, and stepped aside for others'.

There can be one session in a process. Whoever else asks for one gets it: ours ends before theirs begins, with what it
has seen. torch would let both begin, and then drop ours without a word, or end theirs with ours.

Nothing here waits for a device. torch.profiler's own `stop` does, so it is told that there is none; what a device has
not finished by then is lost to the session, and the caller chooses the moment.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseprof.hooks.patching import Patch

if TYPE_CHECKING:
    from torch.profiler import profile

#: One above the level of the "USDT:" lines, the highest that torch 2.13's kineto prints.
_QUIET_LEVEL = "6"

#: Variables by which the profilers of NVIDIA and AMD get into a process, and what they are called.
_INJECTED = (
    ("NSYS_PROFILING_SESSION_ID", "Nsight Systems"),
    ("CUDA_INJECTION64_PATH", "a profiler that CUDA_INJECTION64_PATH names"),
    ("NV_COMPUTE_PROFILER_PERFWORKS_DIR", "Nsight Compute"),
    ("ROCP_TOOL_LIB", "rocprof"),
    ("ROCPROFILER_REGISTER_TOOL", "rocprofv3"),
)
#: Libraries that such a profiler has loaded, as they show in the process's memory map.
_LOADED = (
    ("libToolsInjection", "Nsight Systems"),
    ("libnsys", "Nsight Systems"),
    ("libcuda-injection", "Nsight Compute"),
    ("librocprofiler-sdk-tool", "rocprofv3"),
)


@dataclass(frozen=True, slots=True)
class KinetoSession:
    """A running session.

    Attributes:
        profiler: torch's.
        all_threads: It sees every thread, and can be ended on any; before torch 2.7 it sees the one that began it.
    """

    profiler: profile
    all_threads: bool


class Refused(Exception):
    """A session cannot begin, or has nothing to give. Its text is a clause without capital and full stop."""


def start(*, cuda: bool) -> KinetoSession:
    """Begin a session. The first one of a process takes a second or two, later ones a millisecond.

    Args:
        cuda: Record what the host launches and what CUDA devices run, too.

    Raises:
        Refused: If another session runs, or torch cannot.
    """
    if another_runs():
        raise Refused(
            "another torch.profiler session is running, and there can be one in a process"
        )
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    try:
        config = _all_threads_config()
        profiler = profile(activities=activities, experimental_config=config)
        with _quiet_kineto(), _starting:
            profiler.start()
    except Exception as error:
        raise Refused(f"torch.profiler did not start: {error}") from error
    return KinetoSession(profiler, all_threads=config is not None)


def stop(session: KinetoSession) -> Any:
    """End a session; gives kineto's results.

    Raises:
        Refused: If it was taken over, or torch fails.
    """
    if _replaced(session):
        # Ending ours would end theirs.
        raise Refused(
            "another torch.profiler session was started inside of the window and took over"
        )
    try:
        inner = session.profiler.profiler
        if inner is not None:
            # Else it would synchronize the device.
            inner.use_device = None
        session.profiler.stop()
    except Exception as error:
        raise Refused(f"torch.profiler did not end: {error}") from error
    results = inner.kineto_results if inner is not None else None
    if results is None:
        raise Refused("torch.profiler gave no results")
    return results


class Neighbours:
    """Knows the torch.profiler sessions of others, from the moment on at which they are prepared.

    Args:
        begins: Called before another session begins, on its thread: time to end ours. Must not raise.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        #: Sessions that are prepared or run; one that is dropped without an end leaves by itself.
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches: list[Patch] = []

    @property
    def running(self) -> bool:
        """Whether a session of somebody else is prepared or runs."""
        return len(self._sessions) > 0

    def watch(self) -> None:
        """Begin to look. torch must be imported. Does nothing the second time."""
        if self._patches:
            return
        import torch.autograd.profiler as theirs

        if hasattr(theirs.profile, "_prepare_trace"):
            self._patches.append(Patch(theirs.profile, "_prepare_trace", self._wrap_prepare))
            self._patches.append(Patch(theirs.profile, "__exit__", self._wrap_exit))

    def unwatch(self) -> None:
        """Take the hooks off."""
        for patch in self._patches:
            patch.remove()
        self._patches = []
        self._begins = _nothing

    def _wrap_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _prepare_trace(profiler: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not _starting.here:
                self._sessions.add(profiler)
                self._begins()
            return original(profiler, *args, **kwargs)

        return _prepare_trace

    def _wrap_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(profiler: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(profiler, *args, **kwargs)
            finally:
                self._sessions.discard(profiler)

        return __exit__


def _nothing() -> None:
    """After the end of a watch, for wrappers that somebody else still holds."""


class Teardown:
    """Keeps kineto from tearing CUPTI down after a session, while there are more to come.

    A second session after a teardown is slow to start, and crashes where CUDA graphs are replayed on some versions of
    CUDA 11 and 12; torch forbids it for the graphs that inductor makes, but does not know those of others. What the
    user has set stands.
    """

    _VARIABLE = "TEARDOWN_CUPTI"

    def __init__(self) -> None:
        self._forbidden = False

    def forbid(self) -> None:
        """Forbid it, if nobody has said anything of it."""
        if self._VARIABLE not in os.environ:
            os.environ[self._VARIABLE] = "0"
            self._forbidden = True

    def restore(self) -> None:
        """Take back what `forbid` has set."""
        if self._forbidden:
            os.environ.pop(self._VARIABLE, None)
            self._forbidden = False


class _Starting(threading.local):
    """Tells our own sessions from others'.

    Attributes:
        here: This thread begins one of ours.
    """

    here = False

    def __enter__(self) -> None:
        self.here = True

    def __exit__(self, *raised: object) -> None:
        self.here = False


_starting = _Starting()


def another_runs() -> bool:
    """Whether a profiler is on: torch knows of one in this thread, or Python started one in any."""
    import torch

    of_thread = torch._C._autograd._profiler_enabled()
    return bool(of_thread or torch.autograd.profiler._is_profiler_enabled)


def other_subscriber() -> str | None:
    """The profiler of a vendor that has got into this process, by its name: the driver's tracing has one subscriber."""
    for variable, name in _INJECTED:
        if os.environ.get(variable):
            return name
    with contextlib.suppress(OSError):
        mapped = Path("/proc/self/maps").read_text()
        for library, name in _LOADED:
            if library in mapped:
                return name
    return None


def _all_threads_config() -> Any:
    """The switch that makes a session see every thread; None where torch does not have it."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def _replaced(session: KinetoSession) -> bool:
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
