"""Where batching stops paying on a CPU, beside what the roofs say: SmolLM2-135M in float32, as `profile` sweeps it.

    python benchmarks/cpu_sweep.py -o benchmarks/results/cpu_sweep.json

One run of `phaseprof profile` in a process of its own, over batch sizes from below to well above the ridge, and over
two lengths of prompt. From its trace come the medians with their intervals, the knee, and the ridge of the roofs that
`phaseprof calibrate` has measured; nothing is computed here but the ratio of the two. `--trace` keeps the trace, and
goes on with one that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from phaseprof.analyzers.results import Report
from phaseprof.analyzers.sweeping.sweep_results import Estimate, PhaseOfCell, Sweep
from phaseprof.api import load_report

BATCHES = "1,2,4,8,16,32"
PROMPTS = "16,64"


def measure(trace: Path, repeats: int, threads: int) -> Report:
    """Run the sweep into a trace, or what is left of it."""
    command = [
        *(sys.executable, "-m", "phaseprof", "profile", "--resume", "-o", str(trace)),
        *("--batch", BATCHES, "--prompt-tokens", PROMPTS, "--new-tokens", "16"),
        *("--repeats", str(repeats), "--threads", str(threads), "--dtype", "float32"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return load_report(trace)


def rounded(found: Estimate | None) -> dict[str, float] | None:
    """A median with its interval, in ms."""
    if found is None:
        return None
    plain = asdict(found)
    return {name: round(value, 4) for name, value in plain.items()}


def phase(found: PhaseOfCell | None) -> dict[str, Any] | None:
    """The figures of a phase of a cell."""
    if found is None:
        return None
    return {
        "ms": rounded(found.time_ms),
        "tokens_per_s": round(found.tokens_per_s, 2),
        "bound": found.bound,
        "explained": None if found.explained is None else round(found.explained, 3),
    }


def figures(report: Report, sweep: Sweep) -> dict[str, Any]:
    """What is kept of a sweep."""
    assert report.ceilings is not None
    series = []
    for each in sweep.decode:
        knee, roofs = each.knee, each.roofs
        ratio = None
        if knee is not None and knee.at and roofs is not None and roofs.ridge:
            ratio = round(knee.at / roofs.ridge, 3)
        series.append({**asdict(each), "knee_over_ridge": ratio})
    return {
        "device": None if report.facts.device is None else report.facts.device.name,
        "threads": None if report.facts.device is None else report.facts.device.threads,
        "dtype": report.facts.dtype,
        "roofs": {
            "gflops_per_s": round(report.ceilings.flops_per_s / 1e9, 1),
            "gb_per_s": round(report.ceilings.bytes_per_s / 1e9, 2),
            "source": report.ceilings.source,
        },
        "conclusion": sweep.conclusion,
        "decode": series,
        "prefill": None if sweep.prefill is None else asdict(sweep.prefill),
        "cells": [
            {
                "prompt_tokens": cell.prompt_tokens,
                "new_tokens": cell.new_tokens,
                "batch": cell.batch,
                "repeats": cell.repeats,
                "decode": phase(cell.decode),
                "prefill": phase(cell.prefill),
                "ttft_ms": rounded(cell.ttft_ms),
                "tpot_ms": rounded(cell.tpot_ms),
            }
            for cell in sweep.cells
        ],
        "outliers": [asdict(each) for each in sweep.outliers],
        "missing": sweep.missing,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="where to write the JSON")
    parser.add_argument("--trace", type=Path, help="where to keep the trace")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        trace = asked.trace or Path(folder, "sweep")
        report = measure(trace, asked.repeats, asked.threads)
    assert report.sweep is not None
    result = {
        "command": "python benchmarks/cpu_sweep.py -o benchmarks/results/cpu_sweep.json",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **figures(report, report.sweep),
    }
    text = json.dumps(result, indent=2, default=str)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
