"""What a run does at the moment: the last seconds of a trace that still grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import (
    column,
    int_column,
    named,
    names,
    percentiles_ms,
    scalar,
    total,
)
from phaseprof.analyzers.passes import primary_model
from phaseprof.analyzers.ranks import counted_once, groups_of
from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Percentiles, PhaseFigures, RunFacts
from phaseprof.errors import EmptyRunError
from phaseprof.trace.meta import Ceilings
from phaseprof.trace.reader import Trace

#: Stretches of the course of the throughput.
_STRETCHES = 30


@dataclass(frozen=True, slots=True)
class LiveView:
    """The last seconds of a run.

    Attributes:
        facts: What is profiled; None before the first pass.
        ended: Every process has written its end.
        window_s: The seconds that the figures are of.
        idle_s: Time since the last pass ended.
        phases: The phases that ran.
        prompt_tokens_per_s, output_tokens_per_s: Over the window, idle time included.
        course: Output tokens/s in equal stretches of the window, the last one now.
        finished: Requests that ended in the window. open: Requests that have not ended.
        ttft_ms, tpot_ms: Of those that ended; None without any.
        running, waiting: Requests after the scheduler's last decision; None without a scheduler.
        kv_usage: Share of the KV cache in use then; None if it is not known.
        damage: What could not be read.
    """

    facts: RunFacts | None
    ended: bool
    window_s: float
    idle_s: float | None
    phases: tuple[PhaseFigures, ...] = ()
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    course: tuple[float, ...] = ()
    finished: int = 0
    open: int = 0
    ttft_ms: Percentiles | None = None
    tpot_ms: Percentiles | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    damage: tuple[str, ...] = ()


def live_view(
    trace: Trace, now_ns: int, window_ns: int, ceilings: Ceilings | None = None
) -> LiveView:
    """The view of a moment.

    Args:
        trace: The trace, of which at least the window was read.
        now_ns: The moment, Unix ns.
        window_ns: How far back.
        ceilings: Roofs, if the trace has none.
    """
    since_ns = now_ns - window_ns
    passes, requests = trace.passes, trace.requests
    if passes.num_rows:
        # Ranks that make a pass together count it once, and a model that drafts for it not at all.
        primary = primary_model(passes)
        counted = counted_once(trace, groups_of(trace, primary.model_id))
        passes, requests = counted.passes, counted.requests
        mine = named(names(passes, "model_id"), primary.model_id)
        passes = passes.filter(pc.and_(mine, named(names(passes, "role"), *primary.roles)))
    passes = _ended_since(passes, "end_ns", since_ns)
    ended = bool(trace.metas) and all(meta.complete for meta in trace.metas)
    finished = _ended_since(requests, "finished_ns", since_ns)
    prompts, outputs = _tokens(passes)
    last = _last_step(trace.steps)
    view = LiveView(
        facts=None,
        ended=ended,
        window_s=window_ns / 1e9,
        idle_s=_idle_s(trace.passes, now_ns),
        prompt_tokens_per_s=prompts / (window_ns / 1e9),
        output_tokens_per_s=outputs / (window_ns / 1e9),
        course=tuple(_course(passes, since_ns, window_ns)),
        finished=finished.num_rows,
        open=requests.column("finished_ns").null_count,
        ttft_ms=percentiles_ms(column(finished, "ttft_ns")),
        tpot_ms=percentiles_ms(column(finished, "tpot_ns")),
        running=last.get("running"),
        waiting=last.get("waiting"),
        kv_usage=last.get("kv_usage"),
        damage=trace.damage,
    )
    recent = replace(
        trace,
        passes=_ended_since(trace.passes, "end_ns", since_ns),
        requests=_ended_since(trace.requests, "finished_ns", since_ns),
    )
    try:
        report = build_report(recent, ceilings=ceilings)
    except EmptyRunError:
        return view
    return replace(view, facts=report.facts, phases=tuple(report.phases.values()))


def _ended_since(table: pa.Table, name: str, since_ns: int) -> pa.Table:
    return table.filter(
        pc.fill_null(
            pc.greater_equal(int_column(table, name), scalar(since_ns, pa.int64())),
            scalar(False, pa.bool_()),
        )
    )


def _last_step(steps: pa.Table) -> Mapping[str, Any]:
    """The scheduler's last decision; empty without a scheduler."""
    if steps.num_rows == 0:
        return {}
    begins = int_column(steps, "start_ns")
    place = pc.index(begins, pc.max(begins)).as_py()
    row: Mapping[str, Any] = steps.slice(place, 1).to_pylist()[0]
    return row


def _tokens(passes: pa.Table) -> tuple[int, int]:
    """Prompt tokens and tokens of decode that were computed, drafts not counted."""
    decode = total(column(passes, "decode_tokens")) - total(column(passes, "draft_tokens"))
    return total(column(passes, "prefill_tokens")), decode


def _idle_s(passes: pa.Table, now_ns: int) -> float | None:
    if passes.num_rows == 0:
        return None
    last_ns = pc.max(int_column(passes, "end_ns")).as_py()
    return float(max(now_ns - last_ns, 0) / 1e9)


def _course(passes: pa.Table, since_ns: int, window_ns: int) -> Sequence[float]:
    """Tokens of decode by stretch, each pass where it ended."""
    ends = int_column(passes, "end_ns").to_pylist()
    tokens = int_column(passes, "decode_tokens").to_pylist()
    sums = [0] * _STRETCHES
    for end_ns, number in zip(ends, tokens, strict=True):
        place = (end_ns - since_ns) * _STRETCHES // window_ns
        sums[min(max(place, 0), _STRETCHES - 1)] += number
    return [number / (window_ns / 1e9 / _STRETCHES) for number in sums]
