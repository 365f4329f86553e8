"""The host beside the device: how busy its cores are, and what this process takes of them and of its memory.

From the clocks of the process and from ``/proc``. It tells a device that waits for Python from one that waits for
nothing: a decode step that is bound by overhead keeps one core at 100 %.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from phaseprof.collectors.base import Availability
from phaseprof.collectors.sampling import (
    AGAIN_NS,
    PERIOD_NS,
    CannotSample,
    SampledCollector,
)
from phaseprof.evidence import EvidenceSink
from phaseprof.metrics import Metric
from phaseprof.process import this_host
from phaseprof.records import Sample

#: The kernel counts the CPU time of a machine in hundredths of a second: shorter windows would be mostly rounding.
HOST_PERIOD_NS = 4 * PERIOD_NS
#: `samples.device` of what is of the host.
HOST = "cpu"
#: On a machine with hundreds of cores the kernel takes a millisecond to write the file. It is read no more often than
#: costs this share of a core.
_STAT_SHARE = 0.001


def host_collector() -> SampledCollector:
    """The collector `host`."""
    return SampledCollector(
        "host",
        "CPU use and memory of the host",
        lambda device, sink: HostSampler(sink),
        probe,
        watches=lambda device: True,
        of_process=True,
        period_ns=HOST_PERIOD_NS,
    )


def probe(proc: Path = Path("/proc")) -> Availability:
    """Whether the kernel tells what is asked of it."""
    try:
        machine_ticks((proc / "stat").read_bytes())
        resident_bytes((proc / "self" / "statm").read_bytes())
    except (OSError, ValueError) as error:
        return Availability(False, f"{proc} cannot be read ({error})")
    return Availability(True, "CPU share of the machine, CPU time and memory of each process")


def machine_ticks(stat: bytes) -> tuple[int, int]:
    """Ticks that the cores of a machine were busy, and all that passed on them, from the text of ``/proc/stat``.

    Idle and waiting for I/O is not busy. What guests took is in ``user`` and ``nice`` already (proc_stat(5)).

    Raises:
        ValueError: If it is not such a text.
    """
    head, *fields = stat.partition(b"\n")[0].split()
    if head != b"cpu" or len(fields) < 5:
        raise ValueError("no line of all cores")
    ticks = [int(field) for field in fields[:8]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def resident_bytes(statm: bytes) -> int:
    """Resident memory of a process in bytes, from the text of its ``statm``, which counts pages.

    Raises:
        ValueError: If it is not such a text.
    """
    fields = statm.split()
    if len(fields) < 2:
        raise ValueError("no resident pages")
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


class HostSampler:
    """Reads the machine, if no other process of the run does, and this process.

    Args:
        sink: Says who reads the machine, and what time it is.
        proc: Where the kernel tells it.

    Raises:
        CannotSample: If it does not.
    """

    def __init__(self, sink: EvidenceSink, proc: Path = Path("/proc")) -> None:
        self._sink = sink
        self._source = f"host.p{os.getpid()}"
        self._machine = f"host-{this_host().clock}"
        self._files: list[int] = []
        try:
            for path in (proc / "stat", proc / "self" / "statm"):
                self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise CannotSample(f"{error.filename} cannot be read: {error.strerror}") from error
        self._at_ns = sink.clock.now_unix_ns()
        self._cpu_ns = time.process_time_ns()
        #: Begin and ticks of the machine's window; None while another process reads it, or before the first reading.
        self._window: tuple[int, int, int] | None = None
        self._ask_at_ns = self._at_ns
        self._rest_until_ns = self._at_ns

    def sample(self) -> Sequence[Sample]:
        """CPU time and memory of the process since the last reading, and from time to time the machine's.

        Raises:
            CannotSample: If the kernel does not tell them any more.
        """
        try:
            return [*self._of_machine(), *self._of_process()]
        except (OSError, ValueError) as error:
            raise CannotSample(f"/proc cannot be read any more ({error})") from error

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            with contextlib.suppress(OSError):
                os.close(file)
        self._files = []

    def _of_process(self) -> list[Sample]:
        now, cpu = self._sink.clock.now_unix_ns(), time.process_time_ns()
        memory = resident_bytes(os.pread(self._files[1], 256, 0))
        begin, self._at_ns = self._at_ns, now
        used, self._cpu_ns = cpu - self._cpu_ns, cpu
        if now <= begin:
            return []
        return [
            Sample(begin, now, HOST, self._source, Metric.PROCESS_CPU, used / (now - begin)),
            Sample(begin, now, HOST, self._source, Metric.PROCESS_MEMORY, float(memory)),
        ]

    def _of_machine(self) -> list[Sample]:
        now = self._sink.clock.now_unix_ns()
        if now < self._rest_until_ns or not self._is_ours(now):
            return []
        began = time.thread_time_ns()
        busy, all_ticks = machine_ticks(os.pread(self._files[0], 4096, 0))
        self._rest_until_ns = now + int((time.thread_time_ns() - began) / _STAT_SHARE)
        last, self._window = self._window, (now, busy, all_ticks)
        if last is None or all_ticks <= last[2]:
            return []
        share = max(busy - last[1], 0) / (all_ticks - last[2])
        return [Sample(last[0], now, HOST, "host", Metric.HOST_CPU, share)]

    def _is_ours(self, now: int) -> bool:
        """Whether this process reads the machine; another one that does may end."""
        if self._window is None and now >= self._ask_at_ns:
            if self._sink.sampling_of(self._machine):
                self._ask_at_ns = now
                return True
            self._ask_at_ns = now + AGAIN_NS
        return self._window is not None
