"""Runs made to be compared: calls with a known noise, whose phases take a known time."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from traces import MS, Timeline

from phaseprof.analyzers.comparing.compare import compare
from phaseprof.analyzers.comparing.results import Comparison
from phaseprof.analyzers.comparing.sample import Sample, sample_of
from phaseprof.analyzers.report import build_report
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.writer import meta_path, write_json


def run(
    seed: int,
    *,
    prefill: float = 1.0,
    decode: float = 1.0,
    repeats: int = 8,
    noise: float = 0.005,
    prompt: int = 512,
    steps: int = 30,
    batches: tuple[int, ...] = (1,),
    profiled: bool = False,
    **facts: Any,
) -> Timeline:
    """Calls of a prefill of 100 ms and decode steps of 4 ms, times a factor each; 1 ms lies between passes.

    Args:
        seed: Of the noise.
        prefill, decode: How many times as long a pass takes.
        repeats: Calls of each batch size.
        noise: Standard deviation of a pass and of a call.
        prompt: Tokens of each prompt. steps: Decode steps of a call.
        batches: A call of each in every round; a step of batch n takes n / 4 ms longer.
        profiled: Two passes of each phase under a profiler at the end.
        **facts: Columns of all requests.
    """
    chance = random.Random(seed)
    timeline = Timeline(gap_ns=MS)
    for number in range(repeats):
        for batch in batches:
            level = 1 + chance.gauss(0, noise)
            name, begin = f"r{number}b{batch}", timeline.now_ns

            def ms(base: float, level: float = level) -> float:
                return base * level * (1 + chance.gauss(0, noise))

            timeline.add(
                "prefill",
                ms(100 * prefill),
                gflop=60,
                gb=0.2,
                tokens=prompt * batch,
                sequences=batch,
                request=name,
            )
            ends = [timeline.now_ns - timeline.gap_ns]
            for step in range(steps):
                timeline.add(
                    "decode",
                    ms((4 + (batch - 1) / 4) * decode),
                    gflop=0.1,
                    gb=0.22,
                    weights=0.9,
                    tokens=batch,
                    sequences=batch,
                    request=name,
                    past=prompt + step,
                    prompt=prompt,
                )
                ends.append(timeline.now_ns - timeline.gap_ns)
            gaps = [b - a for a, b in pairwise(ends)]
            for row in range(batch):
                columns: dict[str, Any] = {
                    "arrival_ns": begin,
                    "first_token_ns": ends[0],
                    "finished_ns": ends[-1],
                    "ttft_ns": ends[0] - begin,
                    "tpot_ns": sum(gaps) // len(gaps) if gaps else None,
                    "itl_ns": gaps,
                    "prompt_tokens": prompt,
                    "output_tokens": steps + 1,
                    "profiled": False,
                }
                timeline.request(f"{name}.{row}", **{**columns, **facts})
    if profiled:
        for base, phase in ((100 * prefill, "prefill"), (4 * decode, "decode")):
            for _ in range(2):
                timeline.add(phase, base, gflop=60, gb=0.2, busy=0.8, request="looked")
    return timeline


def sample(timeline: Timeline, *metas: ProcessMeta, name: str = "base", side: int = 0) -> Sample:
    """A run as it is compared, under a name."""
    trace = timeline.trace(*metas)
    report = build_report(trace)
    facts = replace(report.facts, trace_path=name)
    return sample_of(trace, replace(report, facts=facts), side)


def quietly(a: Sample, b: Sample, **options: Any) -> Comparison:
    """Two samples against each other, on a machine whose runs differ by 2 %."""
    return compare(a, b, **{"run_noise": 0.02, **options})


def compared(a: Timeline, b: Timeline, *metas: ProcessMeta, **options: Any) -> Comparison:
    """Two runs against each other; `metas` are those of the second one."""
    return quietly(sample(a), sample(b, *metas, name="new", side=1), **options)


def written(timeline: Timeline, folder: Path, *metas: ProcessMeta) -> Path:
    """A run as a trace on disk."""
    trace = timeline.trace(*metas)
    for name in ("passes", "requests", "kernels"):
        rows = getattr(trace, name).drop_columns(["rank"])
        place = folder / name / "rank=0"
        place.mkdir(parents=True)
        pq.write_table(rows, place / "part-1-000000-000000.parquet")
    (folder / "meta").mkdir()
    for meta in trace.metas:
        write_json(meta_path(folder, meta.rank, meta.pid), meta.to_json())
    return folder
