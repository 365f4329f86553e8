"""One process samples a device: between processes, when one is killed, after a fork, and on odd file systems."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phaseprof.sampled import SampledDevices

_HOLDER = """
import sys
from pathlib import Path
from phaseprof.sampled import SampledDevices
held = SampledDevices(Path(sys.argv[1]))
for line in sys.stdin:
    if line.strip() == "release":
        held.release()
        print("released", flush=True)
    else:
        print(held.take(line.strip()), flush=True)
"""


class Other:
    """Another process that takes devices of the same trace."""

    def __init__(self, trace: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(trace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def other_process(trace: Path) -> Iterator[Other]:
    other = Other(trace)
    try:
        yield other
    finally:
        other.process.communicate()


def test_the_first_process_that_asks_samples_a_device_until_it_lets_go(tmp_path: Path) -> None:
    mine = SampledDevices(tmp_path)
    with other_process(tmp_path) as other:
        assert other.say("GPU-1") == "True"
        assert not mine.take("GPU-1")
        assert mine.take("GPU-2")
        assert other.say("GPU-2") == "False"
        assert other.say("release") == "released"
        assert mine.take("GPU-1") and mine.take("GPU-1")
    mine.release()
    assert list((tmp_path / "meta").iterdir()) == []


def test_a_process_that_is_killed_leaves_its_devices_to_others(tmp_path: Path) -> None:
    mine = SampledDevices(tmp_path)
    with other_process(tmp_path) as other:
        assert other.say("GPU-1") == "True"
        assert not mine.take("GPU-1")
        os.kill(other.process.pid, signal.SIGKILL)
        other.process.wait()
        assert mine.take("GPU-1")
    mine.release()


def test_a_forked_child_neither_samples_nor_keeps_the_device_from_others(tmp_path: Path) -> None:
    """Its copy of the open file would hold the lock for as long as it lives."""
    mine = SampledDevices(tmp_path)
    assert mine.take("GPU-1")
    report, result = os.pipe()
    go_on, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mine.forget()
            taken = SampledDevices(tmp_path).take("GPU-1")
            os.write(result, b"taken" if taken else b"not mine")
            os.read(go_on, 1)
        finally:
            os._exit(0)
    try:
        assert os.read(report, 100) == b"not mine"
        with other_process(tmp_path) as other:
            assert other.say("GPU-1") == "False"
            mine.release()
            # The child lives on.
            assert other.say("GPU-1") == "True"
    finally:
        os.write(tell, b".")
        os.waitpid(child, 0)
        for file in (report, result, go_on, tell):
            os.close(file)


def test_a_file_that_its_holder_has_just_taken_away_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our open and our lock the holder lets go: our lock is on a file that no one else will find."""
    first, second, third = (SampledDevices(tmp_path) for _ in range(3))
    assert first.take("GPU-1")
    real = fcntl.flock

    def lock(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.release()
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    assert second.take("GPU-1")
    assert not third.take("GPU-1")
    second.release()
    assert third.take("GPU-1")
    third.release()


def test_long_and_odd_keys_have_files_of_their_own(tmp_path: Path) -> None:
    mine, other = SampledDevices(tmp_path), SampledDevices(tmp_path)
    keys = ["cpu|" + "x" * 400 + "|1", "cpu|" + "x" * 400 + "|2", "a/b", "a|b"]
    assert all(mine.take(key) for key in keys)
    assert not any(other.take(key) for key in keys)
    mine.release()
    assert all(other.take(key) for key in keys)
    other.release()


def test_a_trace_that_cannot_be_written_is_not_sampled(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    assert not SampledDevices(tmp_path / "trace").take("GPU-1")


def test_a_file_system_without_locks_lets_every_process_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", lock)
    mine = SampledDevices(tmp_path)
    assert mine.take("GPU-1") and mine.take("GPU-1")
    before = len(os.listdir("/proc/self/fd"))
    assert mine.take("GPU-1")
    assert len(os.listdir("/proc/self/fd")) == before
    mine.release()
