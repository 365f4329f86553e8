"""What a long run costs: memory, disk and time of the recorder, and of `phaseprof report` on its trace.

    python benchmarks/trace_scale.py -o benchmarks/results/trace_scale.json
    python benchmarks/trace_scale.py --only "1 M passes" --scale 0.1

Each case is a process of its own that emits what the hooks of a run of `generate` emit (the same tuples, in the same
order, with times that jitter) into a real recorder, and then `phaseprof report` on the trace, as a process of its own:

* emit: what a row costs the workload's thread, its tuple included: the median over blocks of 200 rows;
* RSS: how much the resident memory of the process grows from the first twentieth of the run to its highest, and what
  the end (the last merge) adds;
* CPU: of the recorder's thread, for each pass;
* bytes: of the tables on disk, for each pass, and the number of parts before the end and after it;
* report: wall time and peak RSS of the process.

The cases are paced, so that the recorder keeps up; one is not, and shows what is shed. The case of a day puts its
passes straight into the settler and flushes every few of them, since it cannot last a day.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from phaseprof import __version__
from phaseprof.clock import Clock
from phaseprof.errors import NotMeasured
from phaseprof.events import (
    CacheGone,
    GenerationBegan,
    GenerationEnded,
    ModelSeen,
    PassSeen,
    PromptKnown,
)
from phaseprof.process import ProcessPlace, this_host
from phaseprof.recorder import Recorder
from phaseprof.schema import SCHEMA_VERSION
from phaseprof.settling.settler import Settler
from phaseprof.trace.meta import Ceilings, Device, ModelMeta, ProcessMeta
from phaseprof.trace.writer import TraceWriter
from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.kv import KvGroup, KvLayout

BLOCK = 200
#: A paced case waits for the recorder, where the machine is too busy for the pace.
MOST_WAITING = 10_000
#: Fields behind `error` have defaults.
LATER_FIELDS = tuple(
    PassSeen._field_defaults[name]
    for name in PassSeen._fields[PassSeen._fields.index("error") + 1 :]
)

#: SmolLM2-135M in float32.
COST = ModelCost(
    linear_flops_per_token=212_336_640,
    head_flops_per_token=56_623_104,
    attention=(AttentionCost(30, 9, 3, 64, 64, None, 1536, tuple(range(30))),),
    body_weight_bytes=424_812_288,
    head_weight_bytes=113_246_208,
    lookup_bytes_per_token=2304,
    parameter_bytes=538_060_800,
    parameters=134_515_200,
    dtype="float32",
    tied_lookup_bytes_per_token=2304,
)
LAYOUT = KvLayout((KvGroup(tuple(range(30)), 1536, None, None, "float32"),))
DEVICE = Device("Stand-in CPU", "cpu", 0, 2, 2, 8 * 10**9, "stand-in")
MODEL = ModelMeta(
    "m0",
    "SmolLM2-135M",
    "LlamaForCausalLM",
    "transformers",
    "stand-in",
    COST,
    "sdpa",
    "DynamicCache",
)
ROOFS = Ceilings("stand-in", "float32", 1e11, 2e10, "measured", 1, 0.02, "stand-in")


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Attributes:
        name: What it shows.
        passes: How many.
        batch: Sequences of each generate call.
        steps: Passes of each call: one prefill, the others decode.
        rate: Passes a second; 0 as fast as they can be made.
        killed: The process kills itself at the end, in the middle of a call.
        flush_every: Passes between two flushes, without a recorder's thread; 0 with one.
    """

    name: str
    passes: int
    batch: int = 1
    steps: int = 128
    rate: int = 5000
    killed: bool = False
    flush_every: int = 0


CASES = (
    Case("1 M passes", 1_000_000),
    Case("1 M passes, batch 8", 1_000_000, batch=8, rate=2500),
    Case("1 M passes, batch 8, killed", 1_000_000, batch=8, rate=2500, killed=True),
    Case("1 M requests of one pass", 1_000_000, steps=1, rate=2500),
    Case("200 k passes, not paced", 200_000, rate=0),
    Case("20 k flushes of 20 passes", 400_000, flush_every=20),
)


# The process that records


class Run:
    """Makes the events of a run of generate calls, one after another.

    Attributes:
        handed_over: Passes emitted so far.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._random = random.Random(1)
        self._ns = time.perf_counter_ns()
        self.handed_over = 0

    def blocks(self) -> Iterator[list[Any]]:
        """The events in blocks; a tuple stands for the arguments of a pass."""
        block: list[Any] = [ModelSeen("m0", COST, "float32")]
        for call in itertools.count(1):
            block += self._call(call)
            while len(block) >= BLOCK:
                yield block[:BLOCK]
                block = block[BLOCK:]

    def _call(self, call: int) -> Iterator[Any]:
        case, prompt = self._case, self._random.randrange(16, 2048)
        self._ns += 200_000
        yield GenerationBegan(call, 0, "m0", self._ns)
        yield PromptKnown(
            generation=call,
            prompt=prompt,
            rows=case.batch,
            sequences_per_request=1,
            mask=None,
            end_ids=(),
            max_output=case.steps,
            speculative=False,
        )
        for step in range(case.steps):
            self._ns += self._random.randrange(300_000, 400_000)
            ended = self._ns + int(self._random.gauss(18e6, 4e5)) + (0 if step else 40_000 * prompt)
            query, past = (prompt, 0) if step == 0 else (1, prompt + step - 1)
            yield (call, self._ns, ended, query, past, LAYOUT if step == 0 else None)
            self._ns = ended
        yield CacheGone(call, self._ns)
        yield GenerationEnded(call, self._ns, None)


def emit_block(emit: Any, block: list[Any], rows: int) -> int:
    """Emit a block as the observer does, making the tuple of a pass; ns."""
    begun = time.perf_counter_ns()
    for event in block:
        if type(event) is tuple:
            call, started, ended, query, past, layout = event
            # In the order of PassSeen.
            emit(
                (
                    "m0", call, 4242, started, ended, None, rows, query, past, call, None, False, None,
                    rows, layout, False, None, False, False, False, False, None, None, *LATER_FIELDS,
                )
            )  # fmt: skip
        else:
            emit(event)
    return time.perf_counter_ns() - begun


def meta_of(case: Case, clock: Clock) -> ProcessMeta:
    """The meta of this process, as it is while it runs."""
    return ProcessMeta(
        schema=SCHEMA_VERSION,
        phaseprof=__version__,
        rank=0,
        pid=os.getpid(),
        command=("python", "serve.py"),
        versions={"transformers": "5"},
        started_ns=clock.now_unix_ns(),
        devices=(DEVICE,),
        models=(MODEL,),
        ceilings=(ROOFS,),
        hooks=("transformers 5",),
        host=this_host(),
        workload={"case": case.name},
    )


def record(case: Case, trace: Path) -> dict[str, Any]:
    """Record a case in this process."""
    clock = Clock.start()
    meta = meta_of(case, clock)
    run = Run(case)
    notes: list[NotMeasured] = []
    recorder = Recorder(
        trace,
        place=ProcessPlace(),
        host=this_host().token,
        clock=clock,
        meta=lambda: meta,
        note=notes.append,
        passes_seen=lambda: run.handed_over,
    )
    recorder.start()
    memory = psutil.Process().memory_info
    emit_ns, rss = [], []
    warm = 0
    begun = time.perf_counter()
    for block in run.blocks():
        emit_ns.append(emit_block(recorder.emit, block, case.batch) / len(block))
        run.handed_over += sum(type(event) is tuple for event in block)
        if len(emit_ns) % 20 == 0:
            rss.append(memory().rss)
            if not warm and run.handed_over >= case.passes // 20:
                warm = len(rss)
        if run.handed_over >= case.passes:
            break
        if case.rate:
            time.sleep(max(run.handed_over / case.rate - (time.perf_counter() - begun), 0))
            while len(recorder._queue) > MOST_WAITING:
                time.sleep(0.05)
    recorder.sync(60)
    parts = count_parts(trace)
    if case.killed:
        report: dict[str, Any] = {"parts": parts}
    else:
        before = memory().rss
        closing = time.perf_counter()
        recorder.close()
        report = {
            "parts_before_end": parts,
            "end_s": time.perf_counter() - closing,
            "end_mb": (peak_rss() - before) / 1e6,
            "cpu_us_per_pass": recorder.cpu_ns / 1e3 / run.handed_over,
        }
        TraceWriter(trace, rank=0, pid=os.getpid(), host=this_host().token).write_meta(
            replace(meta, ended_ns=clock.now_unix_ns(), complete=True, not_measured=tuple(notes))
        )
    seconds = time.perf_counter() - begun
    report |= {
        "passes": run.handed_over,
        "passes_per_s": run.handed_over / seconds,
        "emit_us_p50": statistics.median(emit_ns) / 1e3,
        "emit_us_p99": sorted(emit_ns)[len(emit_ns) * 99 // 100] / 1e3,
        "rss_warm_mb": rss[warm - 1] / 1e6,
        "rss_growth_mb": (max(rss[warm:]) - rss[warm - 1]) / 1e6,
        "notes": [note.what for note in notes],
    }
    return report


def settle(case: Case, trace: Path) -> dict[str, Any]:
    """Settle and write a case in this thread, with a flush every few passes: the parts of a day in minutes."""
    clock = Clock.start()
    writer = TraceWriter(trace, rank=0, pid=os.getpid())
    settler = Settler(writer, offset_ns=clock.offset_ns, process="p1", first_pass_id=0)
    memory = psutil.Process().memory_info
    rss, flush_ms, most = [], [], 0
    passes = flushed = 0

    def take(event: Any) -> None:
        settler.handle(PassSeen._make(event) if type(event) is tuple else event)

    run = Run(case)
    begun = time.thread_time()
    for block in run.blocks():
        for event in block:
            emit_block(take, [event], case.batch)
            passes += type(event) is tuple
            if passes - flushed >= case.flush_every:
                flushed = passes
                entered = time.thread_time()
                writer.flush()
                while writer.merge_step():
                    pass
                flush_ms.append((time.thread_time() - entered) * 1e3)
                if len(flush_ms) % 200 == 0:
                    rss.append(memory().rss)
                    most = max(most, count_parts(trace))
        if passes >= case.passes:
            break
    cpu = time.thread_time() - begun
    result = {} if case.killed else close(writer, meta_of(case, clock))
    flush_ms.sort()
    return result | {
        "passes": passes,
        "flushes": len(flush_ms),
        "flush_ms_p50": statistics.median(flush_ms),
        "flush_ms_mean": statistics.mean(flush_ms),
        "flush_ms_max": flush_ms[-1],
        "most_parts": most,
        "cpu_us_per_pass": cpu * 1e6 / passes,
        "rss_growth_mb": (max(rss) - rss[len(rss) // 20]) / 1e6,
    }


def close(writer: TraceWriter, meta: ProcessMeta) -> dict[str, Any]:
    """End a trace."""
    before = psutil.Process().memory_info().rss
    closing = time.perf_counter()
    writer.close()
    writer.write_meta(replace(meta, complete=True))
    return {
        "end_s": time.perf_counter() - closing,
        "end_mb": max(peak_rss() - before, 0) / 1e6,
    }


def count_parts(trace: Path) -> int:
    """Parts of all tables."""
    return sum(1 for _ in trace.glob("*/rank=*/*.parquet"))


def peak_rss() -> int:
    """The highest resident memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The process that measures


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Record a case and report on its trace, each in a process of its own."""
    trace = folder / "trace"
    command = [sys.executable, __file__, "--child", json.dumps(asdict(case)), "-o", str(trace)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{case.name}: the process that records failed ({done.returncode})")
    result: dict[str, Any] = json.loads(done.stdout)
    sizes = {
        table: sum(file.stat().st_size for file in (trace / table).rglob("*.parquet"))
        for table in ("passes", "requests")
    }
    result["passes_bytes_per_pass"] = sizes["passes"] / result["passes"]
    result["requests_bytes_per_pass"] = sizes["requests"] / result["passes"]
    result["bytes_per_pass"] = sum(sizes.values()) / result["passes"]
    result["parts"] = count_parts(trace)
    result |= report_on(trace)
    shutil.rmtree(trace)
    return result


def report_on(trace: Path) -> dict[str, Any]:
    """Run `phaseprof report` on a trace."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "phaseprof", "report", str(trace)], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the report failed with {process.returncode}")
    return {
        "report_s": time.perf_counter() - begun,
        "report_cpu_s": used.ru_utime + used.ru_stime,
        "report_mb": used.ru_maxrss * 1024 / 1e6,
    }


def child(case: Case, trace: Path) -> None:
    """The process that records."""
    result = settle(case, trace) if case.flush_every else record(case, trace)
    print(json.dumps(result), flush=True)
    if case.killed:
        os.kill(os.getpid(), signal.SIGKILL)


COLUMNS = (
    ("emit_us_p50", "emit us", "{:.2f}"),
    ("rss_growth_mb", "RSS +MB", "{:.1f}"),
    ("end_mb", "end +MB", "{:.1f}"),
    ("cpu_us_per_pass", "CPU us", "{:.1f}"),
    ("bytes_per_pass", "bytes", "{:.1f}"),
    ("parts", "parts", "{}"),
    ("end_s", "end s", "{:.2f}"),
    ("report_s", "report s", "{:.2f}"),
    ("report_mb", "report MB", "{:.0f}"),
)


def line(name: str, result: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [form.format(result[key]) if key in result else "-" for key, _, form in COLUMNS]
    return f"{name:32}" + "".join(f"{cell:>11}" for cell in cells)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the passes of each case")
    parser.add_argument("--only", action="append", help="a case by its name; may be repeated")
    parser.add_argument("--folder", type=Path, help="where the traces lie for a while")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.child:
        child(Case(**json.loads(options.child)), options.output)
        return
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "cases": {},
    }
    print(f"{'':32}" + "".join(f"{title:>11}" for _, title, _ in COLUMNS), file=sys.stderr)
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        scaled = replace(case, passes=int(case.passes * options.scale))
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = measure(scaled, Path(folder))
        result["cases"][case.name] = asdict(scaled) | found
        print(line(case.name, found), file=sys.stderr, flush=True)
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
