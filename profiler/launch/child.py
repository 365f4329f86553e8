"""Run a command as if it stood where phaseprof stands: its streams, its terminal, its signals, its exit code.

The command stays in phaseprof's process group, so the terminal treats both alike: Ctrl-C and Ctrl-Z reach both, and
phaseprof must not hand Ctrl-C on or the command would get it twice. A signal sent to phaseprof alone (by a supervisor,
by ``kill PID``) must be handed on. Nothing in a signal says which of the two it was, so a *witness* tells: a process of
the same group that does nothing but note the signals it gets. What it got as well was sent to the group.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from phaseprof.launch.command import Command, CommandNotFoundError, CommandNotRunnableError

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
)

# The kernel walks a group's members in a few microseconds; the rest is for a machine that is busy.
_WITNESS_WAIT_S = 0.05
_SAME_SIGNAL_S = 0.25


def run_child(command: Command, environment: Mapping[str, str]) -> int:
    """Run a command to its end. Call it from the main thread.

    Returns:
        The command's exit code, or 128 + N if signal N ended it.

    Raises:
        CommandNotFoundError, CommandNotRunnableError: It could not be executed.
    """
    # A signal that was ignored when we began (nohup, a background job) stays ignored, in us and in the command.
    watched = tuple(s for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN)
    with _Witness(watched) as witness, _wake_up(watched) as own_signals:
        process = _spawn(command, environment)
        while (code := process.poll()) is None:
            select.select([own_signals], [], [])
            for number in _drain(own_signals):
                if number in watched and not witness.got(number):
                    process.send_signal(number)
    return code if code >= 0 else 128 - code


def _spawn(command: Command, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    argv = list(command.argv)
    try:
        try:
            # close_fds=False: descriptors beyond 2 that we were given (`3>log`, `<(…)`) are the command's too. Our own
            # are closed by the exec.
            return subprocess.Popen(
                argv, executable=command.executable, env=environment, close_fds=False
            )
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            # A script without a first line that names its interpreter: shells and execvp run it with sh.
            return subprocess.Popen(
                ["/bin/sh", command.executable, *argv[1:]], env=environment, close_fds=False
            )
    except FileNotFoundError as error:
        raise CommandNotFoundError(
            f"{command.name}: it, or the interpreter that its first line names, does not exist.",
            "Check the path and the first line of the command.",
        ) from error
    except OSError as error:
        raise CommandNotRunnableError(
            f"{command.name} cannot be executed: {os.strerror(error.errno or 0)}.",
            "Name its interpreter before it, or check its permissions.",
        ) from error


class _Witness:
    """A forked process in our group whose only work is to tell which signals it got."""

    def __init__(self, watched: tuple[signal.Signals, ...]) -> None:
        self._watched = watched
        self._seen: dict[int, float] = {}

    def __enter__(self) -> _Witness:
        self._signals, signals_end = os.pipe()
        life, self._life = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _bear_witness(self._watched, signals_end, life)
        os.close(signals_end)
        os.close(life)
        # Until its first byte it may not have its handlers yet.
        os.read(self._signals, 1)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._life)
        os.close(self._signals)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def got(self, number: int) -> bool:
        """Whether the signal that we have just got has reached the witness too."""
        now = time.monotonic()
        deadline = now + _WITNESS_WAIT_S
        while True:
            # A sighting counts for one signal of ours, and only for one of the same moment.
            if self._seen.pop(number, 0.0) > now - _SAME_SIGNAL_S:
                return True
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._signals], [], [], left)[0]:
                return False
            sighted = os.read(self._signals, 256)
            if not sighted:
                return False
            for seen in sighted:
                self._seen[seen] = time.monotonic()


def _bear_witness(watched: tuple[signal.Signals, ...], signals_end: int, life: int) -> None:
    """The witness: a byte a signal into `signals_end`, until nobody holds the other end of `life`."""
    try:
        os.set_blocking(signals_end, False)
        signal.set_wakeup_fd(signals_end, warn_on_full_buffer=False)
        for number in watched:
            signal.signal(number, _do_nothing)
        # Whoever reads our standard output must not wait for the witness.
        low, high = sorted((signals_end, life))
        os.closerange(0, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, os.sysconf("SC_OPEN_MAX"))
        os.write(signals_end, b"\0")
        while os.read(life, 1):
            pass
    finally:
        os._exit(0)


@contextmanager
def _wake_up(watched: tuple[signal.Signals, ...]) -> Iterator[int]:
    """A descriptor that yields a byte for each signal that we get, the end of a child included."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    before_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # Handlers, not SIG_IGN: an exec resets the former to the default, which is what the command must find.
    before = {number: signal.signal(number, _do_nothing) for number in (*watched, signal.SIGCHLD)}
    try:
        yield reading
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(before_fd)
        os.close(reading)
        os.close(writing)


def _drain(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 256)
    except BlockingIOError:
        return b""


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor tells; a handler must exist all the same."""
