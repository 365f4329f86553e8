"""What sampling costs: CPU time of its thread at the default rates, and the memory of a day of samples.

    python benchmarks/sampler_cost.py -o benchmarks/results/sampler_cost.json
    python benchmarks/sampler_cost.py --seconds 10 --hours 1

Each case is a process of its own. `nvml` and `gpm` read a stand-in for NVML (tests/support/nvml) whose answers come at
once: what is measured is phaseprof's own CPU time, and a real driver adds its own to that.

* thread: the collectors of a session for a minute of real time, into a real recorder. `sampler_share` is the CPU time
  of the sampling thread over the time that passed once the devices are open, `opening_ms` what it took until then (the
  first seconds, with its imports), `recorder_share` that of the thread that writes.
* a day: the same collectors on a simulated clock, as fast as they go. RSS is read after each simulated hour; its growth
  is from the first hour to the highest later one.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support" / "nvml"))

from nvml_standin import SCRIPT_VARIABLE, library

from phaseprof import __version__
from phaseprof.clock import Clock
from phaseprof.collectors import gpm, gpm_probe
from phaseprof.collectors.collection import Collection, collection
from phaseprof.collectors.sampling import PERIOD_NS, SampledCollector, SamplingTask
from phaseprof.errors import NotMeasured
from phaseprof.process import ProcessPlace, this_host
from phaseprof.recorder import Recorder
from phaseprof.records import Kernel, Sample
from phaseprof.schema import SCHEMA_VERSION
from phaseprof.trace.meta import CollectorCost, Device, ProcessMeta

OPENING_S = 5.0
HOUR_NS = 3600 * 10**9
#: How many turns of a simulated day lie between two flushes: a recorder flushes once a second or more often.
TURNS_A_FLUSH = 45

STATES = """
state prefill sm=0.92 occupancy=0.3 tensor=0.71 hmma=0.7 dram=0.25 fp32=0.1 integer=0.1 power=640 sm_clock=1755 \
memory_clock=2619 temperature=61 used_mib=70000
state decode sm=0.6 occupancy=0.2 tensor=0.08 hmma=0.08 dram=0.88 fp32=0.06 integer=0.05 power=480 sm_clock=1980 \
memory_clock=2619 temperature=58 used_mib=70000
run * prefill 80ms
run * decode 12ms times=20
repeat *
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement of the thread.

    Attributes:
        name: What it shows.
        collect: As `--collect` takes it.
        gpus: Devices that models run on.
    """

    name: str
    collect: str
    gpus: int


CASES = (
    Case("nvml, gpm and host, one GPU", "nvml,gpm,host", 1),
    Case("nvml, gpm and host, eight GPUs in one process", "nvml,gpm,host", 8),
    Case("nvml, one GPU", "nvml", 1),
    Case("gpm, one GPU", "gpm", 1),
    Case("host", "host", 1),
)


@dataclass(frozen=True)
class SetClock(Clock):
    """A simulated clock."""

    at: list[int] = field(default_factory=lambda: [0], kw_only=True)

    def now_unix_ns(self) -> int:
        return self.at[0]


class Sink:
    """Hands samples to a recorder, and counts them."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self.clock = clock
        self.recorder = recorder
        self.rows = 0
        self.notes: list[NotMeasured] = []

    def put_samples(self, rows: Sequence[Sample]) -> None:
        self.rows += len(rows)
        self.recorder.put_samples(rows)

    def put_kernels(self, rows: Sequence[Kernel]) -> None: ...

    def note(self, what: NotMeasured) -> None:
        if what not in self.notes:
            self.notes.append(what)

    def spent(self, cost: CollectorCost) -> None: ...

    def sampling_of(self, key: str) -> bool:
        return True


def uuid(number: int) -> str:
    return f"GPU-{number}{number}aaaaaa-0000-0000-0000-000000000000"


def device(number: int) -> Device:
    return Device(
        "NVIDIA H200", "cuda", number, 132, None, 143 * 10**9, f"h200-{number}", uuid(number)
    )


def script(gpus: int, clock: str) -> str:
    cards = [f'device {n} name="NVIDIA H200" uuid={uuid(n)}' for n in range(gpus)]
    return "\n".join([f"clock {clock}", "noise 0.02", *cards, STATES])


def make_recorder(trace: Path, clock: Clock) -> Recorder:
    meta = ProcessMeta(SCHEMA_VERSION, __version__, 0, os.getpid(), ("sampler_cost",), {}, 1)
    return Recorder(
        trace,
        place=ProcessPlace({}),
        host=this_host().token,
        clock=clock,
        meta=lambda: meta,
        note=lambda missing: None,
        passes_seen=lambda: 0,
    )


# The thread


def sampler_cpu_ns() -> int:
    """CPU time of the threads of the sampler that run now."""
    return sum(
        time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name.startswith("phaseprof-sampler") and thread.ident is not None
    )


def measure_thread(case: Case, seconds: float) -> dict[str, Any]:
    """A minute of the collectors of a session. The process of a case runs this alone."""
    clock = Clock.start()
    with tempfile.TemporaryDirectory() as folder:
        idle = make_recorder(Path(folder) / "idle", clock)
        idle.start()
        recorder = make_recorder(Path(folder) / "trace", clock)
        recorder.start()
        sink = Sink(recorder, clock)
        made: Collection = collection(case.collect)
        made.start(sink)
        begun = time.perf_counter()
        for number in range(case.gpus):
            made.device_seen(device(number))
        time.sleep(OPENING_S)
        opening, open_at = sampler_cpu_ns(), time.perf_counter()
        time.sleep(seconds)
        steady, steady_s = sampler_cpu_ns() - opening, time.perf_counter() - open_at
        made.stop()
        passed = time.perf_counter() - begun
        for each in (recorder, idle):
            each.close()
    return {
        "case": case.name,
        "collect": case.collect,
        "gpus": case.gpus,
        "seconds": round(passed, 1),
        "rows": sink.rows,
        "rows_per_s": round(sink.rows / passed, 1),
        "sampler_share": round(steady / 1e9 / steady_s, 5),
        "opening_ms": round(opening / 1e6, 1),
        "recorder_share": round((recorder.cpu_ns - idle.cpu_ns) / 1e9 / passed, 5),
        "not_measured": [f"{note.what}: {note.why}" for note in sink.notes],
    }


# A day


class LookHere:
    """GPM's look in this process, as its clock is simulated."""

    def __init__(self, device_uuid: str) -> None:
        self._uuid = device_uuid

    def answer(self) -> gpm_probe.Look:
        return gpm_probe.look(self._uuid)

    def end(self) -> None: ...


def measure_day(hours: float) -> dict[str, Any]:
    """The samples of `nvml` and `gpm` for so many simulated hours."""
    pynvml: Any = importlib.import_module("pynvml")
    vars(gpm)["Looking"] = LookHere
    vars(gpm_probe)["APART_S"] = 0.0
    # The bindings load the library when they are first used.
    pynvml.nvmlInit()
    set_time = pynvml.nvmlLib.standin_set_time_ns
    clock = SetClock(Clock.start().pair)
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder)
        recorder = make_recorder(trace, clock)
        recorder.start()
        sink = Sink(recorder, clock)
        tasks = [
            SamplingTask(each, device(0), sink)
            for each in collection("nvml,gpm")._collectors
            if isinstance(each, SampledCollector)
        ]
        rss = []
        begun, cpu = time.perf_counter(), time.thread_time()
        turns, now, next_hour = 0, 0, HOUR_NS
        for task in tasks:
            task.step(0)
        while now < hours * HOUR_NS:
            now += PERIOD_NS
            clock.at[0] = now
            set_time(ctypes.c_int64(now))
            for task in tasks:
                task.step(now)
            turns += 1
            if turns % TURNS_A_FLUSH == 0:
                recorder.sync()
            if now >= next_hour:
                next_hour += HOUR_NS
                rss.append(process.memory_info().rss)
        for task in tasks:
            task.end()
        spent = time.thread_time() - cpu
        parts = len(list(trace.rglob("part-*.parquet")))
        recorder.close()
        at_end = process.memory_info().rss
        stored = sum(file.stat().st_size for file in trace.rglob("part-*.parquet"))
        parts_at_end = len(list(trace.rglob("part-*.parquet")))
    return {
        "case": "a day of nvml and gpm, one GPU, simulated clock",
        "hours": hours,
        "turns": turns,
        "rows": sink.rows,
        "wall_s": round(time.perf_counter() - begun, 1),
        "sampler_us_per_turn": round(spent / turns * 1e6, 1),
        "rss_mb_by_hour": [round(each / 1e6, 1) for each in rss],
        "rss_growth_mb": round((max(rss) - rss[0]) / 1e6, 1) if rss else None,
        "rss_at_end_mb": round(at_end / 1e6, 1),
        "bytes_per_row": round(stored / max(sink.rows, 1), 2),
        "trace_mb": round(stored / 1e6, 1),
        "parts_before_the_end": parts,
        "parts": parts_at_end,
        "not_measured": [f"{note.what}: {note.why}" for note in sink.notes],
    }


# Cases in processes of their own


def run_case(name: str, gpus: int, clock: str, options: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nvml.script"
        file.write_text(script(gpus, clock))
        paths = [str(library().parent), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            SCRIPT_VARIABLE: str(file),
            "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path),
        }
        done = subprocess.run(
            [sys.executable, __file__, "--case", name, *options],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each case of the thread")
    parser.add_argument("--hours", type=float, default=24.0, help="that are simulated; 0: none")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case == "day":
        print(json.dumps(measure_day(options.hours)))
        return
    if options.case is not None:
        (case,) = (each for each in CASES if each.name == options.case)
        print(json.dumps(measure_thread(case, options.seconds)))
        return
    results = []
    for case in CASES:
        results.append(run_case(case.name, case.gpus, "real", ["--seconds", str(options.seconds)]))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    if options.hours:
        results.append(run_case("day", 1, "set", ["--hours", str(options.hours)]))
    result = {
        "command": "python " + " ".join(sys.argv),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "cases": results,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
