"""What importing a recording costs: whole processes of `phaseprof import` and of `json.load`, taking turns.

    python benchmarks/import_cost.py -o benchmarks/results/import_cost.json

Two files of the shape of an 80-layer model's recording are made: a recorded prefill of vLLM on eight B200, with its
Python stacks, one repeat behind the other, 48 MB and ten times that. Four ranks of the small one, in a folder, show
whether memory grows with ranks. For each: the time of both processes (their imports included, medians of the rounds),
the ratio, the peak of resident memory, and the bytes that a kernel takes in the trace.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The events of devices, calls and annotations of a recording. What a recording has besides is put around them.
RECORDED = Path(__file__).parents[1] / "tests" / "data" / "traces" / "vllm-b200-tp8-prefill.json.gz"
#: As the whole recording has them: operators and Python functions for each call of the runtime.
OPERATORS = 4
FUNCTIONS = 13
#: Events of an 80-layer model in 48 MB.
EVENTS = 178_812
#: Between the begins of two repeats, and between their ids.
APART_US = 200_000.0
IDS = 100_000


def make(path: Path, events: int, rank: int = 0) -> None:
    """Write a recording of so many events, laid out as kineto does."""
    with gzip.open(RECORDED, "rt", encoding="utf-8") as file:
        recorded = json.load(file)
    listed = list(_with_stacks(recorded.pop("traceEvents")))
    behind = {
        key: recorded.pop(key)
        for key in ("traceName", "displayTimeUnit", "baseTimeNanoseconds")
        if key in recorded
    }
    recorded["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 8}
    with path.open("w", encoding="utf-8") as out:
        out.write(json.dumps(recorded, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        for place, event in enumerate(_repeats(listed, events)):
            out.write((",\n" if place else "") + _layout(event))
        out.write("\n  ],\n" + json.dumps(behind, indent=2)[2:] + "\n")


def _with_stacks(listed: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events with operators and Python functions, as large as real ones."""
    for event in listed:
        yield event
        if not event["cat"].startswith("cuda_"):
            continue
        host = {key: event[key] for key in ("ph", "pid", "tid", "ts")}
        for number in range(OPERATORS):
            args = {
                "External id": number,
                "Record function id": 0,
                "Concrete Inputs": ["", "0", "0", "1", "1"],
                "Input type": ["c10::BFloat16", "Scalar", "Scalar", "Scalar", "Scalar"],
                "Input Strides": [[2880, 1], [], [], [], []],
                "Input Dims": [[888, 2880], [], [], [], []],
                "Ev Idx": number,
            }
            name = f"aten::operator_{number}"
            yield {"cat": "cpu_op", "name": name, **host, "dur": 8.5, "args": args}
        for number in range(FUNCTIONS):
            name = f"vllm/model_executor/layers/layer_{number}.py({number}): forward"
            args = {"Python parent id": number, "Python id": number + 1, "Ev Idx": number}
            yield {"cat": "python_function", "name": name, **host, "dur": 40.5, "args": args}


def _repeats(listed: list[dict[str, Any]], events: int) -> Iterator[dict[str, Any]]:
    for place in range(events):
        repeat, own = divmod(place, len(listed))
        event = dict(listed[own])
        event["ts"] = round(event["ts"] + repeat * APART_US, 3)
        if "id" in event:
            event["id"] += repeat * IDS
        args = event.get("args")
        if args and "correlation" in args:
            event["args"] = {**args, "correlation": args["correlation"] + repeat * IDS}
        yield event


def _layout(event: dict[str, Any]) -> str:
    args = event.pop("args", None)
    text = "  {\n    " + _fields(event)
    if args is not None:
        text += ',\n    "args": {\n      ' + _fields(args) + "\n    }"
    return text + "\n  }"


def _fields(values: dict[str, Any]) -> str:
    return ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())


def measured(command: list[str]) -> tuple[float, float]:
    """Seconds and megabytes (peak resident) of a process."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed")
    return time.perf_counter() - begun, used.ru_maxrss / 1e3


def compare(path: Path, rounds: int, *, load: Path | None) -> dict[str, Any]:
    """Both processes on a file or a folder; ``load`` None leaves json.load out."""
    imports: list[tuple[float, float]] = []
    loads: list[tuple[float, float]] = []
    kernels = {}
    for number in range(rounds):
        trace = path.with_name(f"{path.name}.trace")
        ours = [sys.executable, "-m", "phaseprof", "import", str(path), "-o", str(trace)]
        theirs = [sys.executable, "-c", f"import json; json.load(open({str(load)!r}))"]
        turns = [(imports, ours)] if load is None else [(imports, ours), (loads, theirs)]
        for results, command in turns if number % 2 else reversed(turns):
            results.append(measured(command))
        kernels = stored(trace)
        shutil.rmtree(trace)
    result: dict[str, Any] = {
        "import_s": round(statistics.median(seconds for seconds, _ in imports), 3),
        "import_peak_mb": round(max(peak for _, peak in imports)),
        **kernels,
    }
    if loads:
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(imports, loads, strict=True)]
        result |= {
            "json_load_s": round(statistics.median(seconds for seconds, _ in loads), 3),
            "json_load_peak_mb": round(max(peak for _, peak in loads)),
            "ratio": round(statistics.median(ratios), 3),
        }
    return result


def stored(trace: Path) -> dict[str, Any]:
    """Kernels in a trace, and what each takes on disk."""
    import pyarrow.parquet as pq

    parts = list((trace / "kernels").rglob("*.parquet"))
    rows = sum(pq.read_metadata(part).num_rows for part in parts)
    size = sum(part.stat().st_size for part in parts)
    return {"kernels": rows, "bytes_per_kernel": round(size / rows, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="rounds of the small file; the large one has 3 at most",
    )
    parser.add_argument("--small", action="store_true", help="leave the large file out")
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = folder / "small.json"
        make(small, EVENTS)
        result["small_mb"] = round(small.stat().st_size / 1e6, 1)
        result["small"] = compare(small, asked.rounds, load=small)
        ranks = folder / "ranks"
        ranks.mkdir()
        for rank in range(4):
            make(ranks / f"rank{rank}.json", EVENTS, rank)
        result["four_ranks"] = compare(ranks, 1, load=None)
        shutil.rmtree(ranks)
        if not asked.small:
            large = folder / "large.json"
            make(large, 10 * EVENTS)
            result["large_mb"] = round(large.stat().st_size / 1e6, 1)
            result["large"] = compare(large, min(asked.rounds, 3), load=large)
    text = json.dumps(result, indent=1)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
