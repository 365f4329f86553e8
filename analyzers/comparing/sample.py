"""What of a trace is compared: its report, and its figures unit by unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column, named, names, parts, scalar, unsteady
from phaseprof.analyzers.comparing.resampling import Draws
from phaseprof.analyzers.comparing.series import Distribution, Ratio
from phaseprof.analyzers.comparing.units import Units, by_start, cut
from phaseprof.analyzers.gaps import gaps_ns
from phaseprof.analyzers.passes import (
    Primary,
    Status,
    primary_model,
    sort_passes,
    statuses,
    with_known_work,
)
from phaseprof.analyzers.ranks import counted_once, groups_of
from phaseprof.analyzers.results import Report
from phaseprof.phases import Phase
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.reader import Trace

#: Batch sizes of a phase that are looked at one by one: the most frequent ones.
_BATCHES = 8


@dataclass(frozen=True, slots=True)
class PhaseSample:
    """The passes of one phase.

    Attributes:
        pass_ms: The time of a pass. between_ms: The time on the host between passes, per pass that has a next one.
        prompt_tokens_per_s, output_tokens_per_s: Over the time of the passes.
        flops_per_s, bytes_per_s: Over the time of the passes whose work is known.
        sequences: Mean batch.
        passes: Passes.
    """

    pass_ms: Distribution
    between_ms: Ratio
    prompt_tokens_per_s: Ratio
    output_tokens_per_s: Ratio
    flops_per_s: Ratio
    bytes_per_s: Ratio
    sequences: Ratio
    passes: int


@dataclass(frozen=True, slots=True)
class RequestSample:
    """The requests that count.

    Attributes:
        latencies: By name: ``ttft_ms``, ``tpot_ms``, ``itl_ms``, ``e2e_ms``, ``queue_ms``; only those that are there.
        count: Requests. prompt_tokens, output_tokens: Means of a request.
    """

    latencies: Mapping[str, Distribution]
    count: int
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One trace, ready to be compared.

    Attributes:
        report: Its report. metas: Its processes. units: How it was cut.
        phases: By phase value. by_batch: By batch size and phase value, where the report has several.
        requests: None without any. draws: Of its blocks.
    """

    report: Report
    metas: tuple[ProcessMeta, ...]
    model_id: str
    units: Units
    phases: Mapping[str, PhaseSample]
    by_batch: Mapping[int, Mapping[str, PhaseSample]]
    requests: RequestSample | None
    draws: Draws = field(repr=False)


def sample_of(trace: Trace, report: Report, side: int) -> Sample:
    """Read a trace.

    Args:
        trace: The trace, which has passes.
        report: Its report.
        side: Its number among those that are compared.
    """
    primary = primary_model(trace.passes)
    counted = counted_once(trace, groups_of(trace, primary.model_id))
    sorted_passes = sort_passes(counted.passes, primary, None)
    rows = by_start(_counted_passes(counted.passes, primary, sorted_passes.cold))
    requests = _counted_requests(counted.requests, primary.model_id)
    workload = report.facts.workload
    units = cut(rows, requests, workload)
    phases = {name: _phase(rows.filter(_is(rows, name)), units) for name in report.phases}
    by_batch: dict[int, dict[str, PhaseSample]] = {}
    if report.by_batch:
        batch = int_column(rows, "sequences")
        for name in report.phases:
            for n in _frequent(report, name):
                same = pc.and_(_is(rows, name), pc.equal(batch, scalar(n, pa.int64())))
                by_batch.setdefault(n, {})[name] = _phase(rows.filter(same), units)
    return Sample(
        report=report,
        metas=trace.metas,
        model_id=primary.model_id,
        units=units,
        phases=phases,
        by_batch=dict(sorted(by_batch.items())),
        requests=_requests(requests, units),
        draws=Draws(side),
    )


def _counted_passes(passes: pa.Table, primary: Primary, cold: Mapping[Phase, int]) -> pa.Table:
    """The passes that the report's figures are made of, with their time as ``span_ns`` and the gap behind them."""
    status = pa.concat_arrays([statuses(rows, primary) for rows in parts(passes)])
    steady = pc.equal(status, scalar(Status.STEADY.value, pa.int32()))
    first = pc.equal(status, scalar(Status.FIRST.value, pa.int32()))
    of_cold = named(names(passes, "phase"), *(phase.value for phase in cold))
    rows = passes.append_column("gap_ns", gaps_ns(passes, pc.or_(steady, first)))
    rows = rows.append_column(
        "span_ns", pc.coalesce(column(rows, "device_ns"), column(rows, "host_ns"))
    )
    return with_known_work(rows.filter(pc.or_(steady, pc.and_(first, of_cold))))


def _frequent(report: Report, phase: str) -> list[int]:
    """The batch sizes with the most passes of a phase."""
    passes = {n: of[phase].passes for n, of in report.by_batch.items() if phase in of}
    return sorted(sorted(passes, key=lambda n: (-passes[n], n))[:_BATCHES])


def _is(rows: pa.Table, phase: str) -> pa.Array:
    # A phase that this version does not know is one of the others.
    known = [p.value for p in Phase if p is not Phase.OTHER]
    labels = names(rows, "phase")
    return pc.invert(named(labels, *known)) if phase == Phase.OTHER else named(labels, phase)


def _phase(rows: pa.Table, units: Units) -> PhaseSample:
    own = units.slices(int_column(rows, "start_ns"))

    def sums(values: pa.Array) -> tuple[float, ...]:
        return tuple(float(pc.sum(values.slice(i, j - i)).as_py() or 0) for i, j in own)

    span = column(rows, "span_ns")
    time, known_time = sums(span), sums(column(rows, "known_span_ns"))
    moved = [
        sum(each)
        for each in zip(
            *(
                sums(column(rows, name))
                for name in ("weight_bytes", "kv_read_bytes", "kv_write_bytes")
            ),
            strict=True,
        )
    ]
    gap = column(rows, "gap_ns")
    gaps = sums(pc.cast(pc.is_valid(gap), pa.int64()))
    number = tuple(float(j - i) for i, j in own)
    return PhaseSample(
        pass_ms=Distribution.of(span, own),
        between_ms=Ratio(sums(gap), gaps, 1e-6),
        prompt_tokens_per_s=Ratio(sums(column(rows, "prefill_tokens")), time, 1e9),
        output_tokens_per_s=Ratio(sums(column(rows, "decode_tokens")), time, 1e9),
        flops_per_s=Ratio(sums(column(rows, "flops")), known_time, 1e9),
        bytes_per_s=Ratio(tuple(moved), known_time, 1e9),
        sequences=Ratio(sums(column(rows, "sequences")), number),
        passes=rows.num_rows,
    )


def _counted_requests(requests: pa.Table, model_id: str) -> pa.Table:
    """The model's requests by their arrival; all of them where none is steady, as in the report."""
    own = requests.filter(named(names(requests, "model_id"), model_id))
    steady = own.filter(pc.invert(unsteady(own)))
    rows = steady if steady.num_rows else own
    return rows.take(pc.sort_indices(int_column(rows, "arrival_ns")))


def _requests(rows: pa.Table, units: Units) -> RequestSample | None:
    n = rows.num_rows
    if n == 0:
        return None
    arrival = int_column(rows, "arrival_ns")
    own = units.slices(arrival)
    columns = {
        "ttft_ms": column(rows, "ttft_ns"),
        "tpot_ms": column(rows, "tpot_ns"),
        "e2e_ms": pc.subtract(column(rows, "finished_ns"), arrival),
        "queue_ms": column(rows, "queue_ns"),
    }
    latencies = {name: Distribution.of(values, own) for name, values in columns.items()}
    lists = rows.column("itl_ns").combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    offsets = [(lists.offsets[i].as_py(), lists.offsets[j].as_py()) for i, j in own]
    first = lists.offsets[0].as_py()
    flat = lists.flatten()
    latencies["itl_ms"] = Distribution.of(flat, [(i - first, j - first) for i, j in offsets])
    return RequestSample(
        latencies={name: found for name, found in latencies.items() if found.count},
        count=n,
        prompt_tokens=_mean(rows, "prompt_tokens"),
        output_tokens=_mean(rows, "output_tokens"),
    )


def _mean(rows: pa.Table, name: str) -> float:
    return float(pc.mean(column(rows, name)).as_py() or 0.0)
