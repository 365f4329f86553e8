"""The passes of a trace over time, for a drawing that is zoomed: levels of ever shorter bins, and the passes too.

A drawing of a million passes cannot show each of them before it is zoomed far in. So the run is cut into bins of equal
length; a bin holds how much of it passes of each phase took. Each level has bins of a quarter of the length of the one
before, and below the last one come the passes, if there are not too many. Counters are cut the same way: a bin has the
mean over time, the least and the greatest value.

Passes stand where their device had them (`device_time.placed`). Times are us from the begin of the first pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column, names, scalar
from phaseprof.analyzers.counters.device_time import placed
from phaseprof.analyzers.passes import Primary, phase_named, statuses
from phaseprof.analyzers.viewing.tracks import (
    COARSEST_BINS,
    FACTOR,
    CounterTrack,
    Windows,
    edges_of,
    running,
    sampled_tracks,
    track_of,
    view,
)
from phaseprof.phases import Phase
from phaseprof.trace.columns import to_column

#: Passes of one lane that are so few that a drawing can show each at any zoom: they need no levels.
FEW_PASSES = 600
#: Passes in view that a drawing may show one by one where the bins of the last level are too long for it.
ONE_BY_ONE = 16_000
#: Bins of the last level for each pass: more would show no more.
_BINS_PER_PASS = 8
#: Passes of a trace beyond which they are not kept one by one: the shortest bins are the last level then.
MOST_PASSES = 1_250_000
#: Bins of the last level, of all lanes together.
_FINEST_BINS = 32_768
#: Ranks that are shown.
_MOST_LANES = 8
#: Rows of the table that stands for the drawing. The bins of each level can be shared out to them.
_STRETCHES = 16

_I64, _F64 = pa.int64(), pa.float64()
_US = 1_000


@dataclass(frozen=True, slots=True)
class Level:
    """One lane in bins of equal length.

    Attributes:
        bin_us: Their length; not a whole number of us.
        busy_us: By phase, the time of its passes in each bin. Where passes overlap, the sum exceeds the bin.
        begun: Passes that began in each bin.
    """

    bin_us: float
    busy_us: tuple[tuple[Phase, tuple[int, ...]], ...]
    begun: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Each pass of a lane by its begin, as int64 arrays of one length.

    Attributes:
        start_us, span_us: Where it ran.
        phase: Index into `Timeline.phases`. status: A `phaseprof.analyzers.passes.Status`.
        step, sequences, prefill_tokens, decode_tokens: As in the table `passes`.
    """

    start_us: pa.Array
    span_us: pa.Array
    phase: pa.Array
    status: pa.Array
    step: pa.Array
    sequences: pa.Array
    prefill_tokens: pa.Array
    decode_tokens: pa.Array


@dataclass(frozen=True, slots=True)
class Lane:
    """The passes of one rank.

    Attributes:
        rank: Which. passes: How many.
        levels: From few long bins to many short ones; empty where the passes are few enough without.
        rows: The passes; None where the trace has too many.
    """

    rank: int
    passes: int
    levels: tuple[Level, ...]
    rows: LaneRows | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """One of the equal parts of the run that a table shows in place of a drawing, all lanes together.

    Attributes:
        begin_ms, end_ms: From the begin of the run.
        passes: Passes that began in it.
        busy_ms: By phase, time of its passes.
        prefill_tokens_per_s, decode_tokens_per_s: None where the run has none of them.
    """

    begin_ms: float
    end_ms: float
    passes: int
    busy_ms: tuple[tuple[Phase, float], ...]
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The run over time.

    Attributes:
        start_ns: Begin of the first pass, Unix ns. span_us: From there to the end of the last one.
        passes: All that are shown.
        phases: The phases that occur, in the order of the codes in `LaneRows`.
        lanes: By rank. left_out: Ranks that are not shown.
        counters: Tokens a second, then what was sampled.
        left_out_counters: Counters for which there is no room, as metric and device.
        stretches: A few equal parts of the run.
    """

    start_ns: int
    span_us: int
    passes: int
    phases: tuple[Phase, ...]
    lanes: tuple[Lane, ...]
    left_out: tuple[int, ...]
    counters: tuple[CounterTrack, ...]
    left_out_counters: tuple[str, ...]
    stretches: tuple[Stretch, ...]


def timeline(
    passes: pa.Table, samples: pa.Table, primary: Primary, devices: dict[str, str]
) -> Timeline:
    """The run over time.

    Args:
        passes: The `passes` table; of ranks that make each pass together one alone. It must have rows.
        samples: The `samples` table.
        primary: The model that the report is about; passes of others are shown as such.
        devices: Names of devices by what `samples.device` calls them.
    """
    ranks = sorted(pc.unique(int_column(passes, "rank")).to_pylist())
    shown = ranks[:_MOST_LANES]
    found = [_placed(passes, rank, primary) for rank in shown]
    start_us = min(each.start_us[0].as_py() for each in found)
    end_us = max(pc.max(pc.add(each.start_us, each.span_us)).as_py() for each in found)
    span_us = max(end_us - start_us, 1)
    first = scalar(start_us, _I64)
    placed_rows = [_moved(each, first) for each in found]
    total = sum(len(each.step) for each in placed_rows)
    phases = _phases_of(placed_rows)
    bins = max(_FINEST_BINS // len(shown), COARSEST_BINS)
    lanes = tuple(
        Lane(
            rank=rank,
            passes=len(each.step),
            levels=_all_levels(each, phases, span_us, bins),
            rows=_coded(each, phases)
            if total <= MOST_PASSES or len(each.step) <= FEW_PASSES
            else None,
        )
        for rank, each in zip(shown, placed_rows, strict=True)
    )
    sampled, left_out = sampled_tracks(samples, start_us, span_us, devices)
    counted = tuple(_throughput(placed_rows, span_us))
    return Timeline(
        start_ns=start_us * _US,
        span_us=span_us,
        passes=total,
        phases=phases,
        lanes=lanes,
        left_out=tuple(ranks[_MOST_LANES:]),
        counters=(*counted, *sampled),
        left_out_counters=left_out,
        stretches=tuple(_stretches(placed_rows, phases, span_us, counted)),
    )


# --- the passes -----------------------------------------------------------------------------------

#: While rows are worked on, `LaneRows.phase` is an index into this.
_ALL_PHASES = tuple(Phase)


def _placed(passes: pa.Table, rank: int, primary: Primary) -> LaneRows:
    """The passes of a rank by their begin, in us since 1970."""
    mine = passes.filter(pc.equal(int_column(passes, "rank"), scalar(rank, _I64)))
    status = statuses(mine, primary)
    order = pc.sort_indices(column(mine, "start_ns"))
    rows = mine.select(
        [
            *("start_ns", "end_ns", "host_ns", "device_ns", "phase", "step"),
            *("sequences", "prefill_tokens", "decode_tokens"),
        ]
    ).take(order)
    start_ns, end_ns = column(rows, "start_ns"), column(rows, "end_ns")
    device_ns = column(rows, "device_ns")
    if device_ns.null_count < len(device_ns):
        # Whatever thread made the call: passes of a rank share its device.
        where = placed(start_ns.to_pylist(), end_ns.to_pylist(), device_ns.to_pylist())
        start_ns = to_column([begin for begin, _ in where], _I64)
        end_ns = to_column([end for _, end in where], _I64)
    labels = names(rows, "phase")
    codes = [_ALL_PHASES.index(phase_named(label)) for label in labels.dictionary.to_pylist()]
    unit = scalar(_US, _I64)
    start_us = pc.divide(start_ns, unit)
    return LaneRows(
        start_us=start_us,
        span_us=pc.max_element_wise(
            pc.subtract(pc.divide(end_ns, unit), start_us), scalar(0, _I64)
        ),
        phase=to_column(codes, _I64).take(labels.indices),
        status=pc.cast(status, _I64).take(order),
        step=column(rows, "step"),
        sequences=column(rows, "sequences"),
        prefill_tokens=column(rows, "prefill_tokens"),
        decode_tokens=column(rows, "decode_tokens"),
    )


def _moved(rows: LaneRows, first: pa.Scalar) -> LaneRows:
    """The rows with times from that moment on, and by their begin, which placing may have moved."""
    start_us = pc.subtract(rows.start_us, first)
    order = pc.sort_indices(start_us)
    return LaneRows(
        start_us.take(order),
        *(getattr(rows, name).take(order) for name in LaneRows.__slots__[1:]),
    )


def _phases_of(lanes: Sequence[LaneRows]) -> tuple[Phase, ...]:
    seen = {code for rows in lanes for code in pc.unique(rows.phase).to_pylist()}
    return tuple(_ALL_PHASES[code] for code in sorted(seen))


def _coded(rows: LaneRows, phases: Sequence[Phase]) -> LaneRows:
    """The rows with their phases as indices into those that occur."""
    codes = [phases.index(phase) if phase in phases else 0 for phase in _ALL_PHASES]
    return LaneRows(
        rows.start_us,
        rows.span_us,
        to_column(codes, _I64).take(rows.phase),
        *(getattr(rows, name) for name in LaneRows.__slots__[3:]),
    )


def _all_levels(
    rows: LaneRows, phases: Sequence[Phase], span_us: int, bins: int
) -> tuple[Level, ...]:
    if len(rows.step) <= FEW_PASSES:
        return ()
    while bins > COARSEST_BINS and bins // FACTOR >= _BINS_PER_PASS * len(rows.step):
        bins //= FACTOR
    return tuple(_levels(rows, phases, span_us, bins))


def _levels(rows: LaneRows, phases: Sequence[Phase], span_us: int, bins: int) -> Iterator[Level]:
    """The bins of a lane, the longest ones first."""
    edges = edges_of(span_us, bins)
    begun = _differences([bisect_left(view(rows.start_us), edge) for edge in edges])
    busy = []
    for phase in phases:
        mine = pc.equal(rows.phase, scalar(_ALL_PHASES.index(phase), _I64))
        start_us = rows.start_us.filter(mine)
        end_us = pc.add(start_us, rows.span_us.filter(mine))
        busy.append((phase, _differences(_time_before(start_us, end_us, edges))))
    found = []
    while True:
        found.append(
            Level(span_us / bins, tuple((phase, tuple(each)) for phase, each in busy), tuple(begun))
        )
        if bins <= COARSEST_BINS:
            break
        bins //= FACTOR
        begun = _joined(begun)
        busy = [(phase, _joined(each)) for phase, each in busy]
    yield from reversed(found)


def _stretches(
    lanes: Sequence[LaneRows],
    phases: Sequence[Phase],
    span_us: int,
    counted: Sequence[CounterTrack],
) -> Iterator[Stretch]:
    edges = edges_of(span_us, _STRETCHES)
    lists = [next(_levels(rows, phases, span_us, _STRETCHES)) for rows in lanes]
    rates = {track.metric: track.levels[0].mean for track in counted}
    for place, (early, late) in enumerate(pairwise(edges)):
        yield Stretch(
            begin_ms=early / 1e3,
            end_ms=min(late, span_us) / 1e3,
            passes=sum(level.begun[place] for level in lists),
            busy_ms=tuple(
                (phase, sum(level.busy_us[at][1][place] for level in lists) / 1e3)
                for at, phase in enumerate(phases)
            ),
            prefill_tokens_per_s=_mean_of(rates.get("prefill_tokens_per_s"), place),
            decode_tokens_per_s=_mean_of(rates.get("decode_tokens_per_s"), place),
        )


def _mean_of(bins: Sequence[float | None] | None, stretch: int) -> float | None:
    """The mean over the bins of a stretch, which are of one length."""
    if bins is None:
        return None
    begin, end = (len(bins) * place // _STRETCHES for place in (stretch, stretch + 1))
    known = [each for each in bins[begin:end] if each is not None]
    return sum(known) / len(known) if known else None


def _time_before(start_us: pa.Array, end_us: pa.Array, edges: Sequence[int]) -> list[int]:
    """How much of some stretches, which may overlap, lies before each edge.

    Of those that began before an edge e, the sum of e - begin; of those that have ended, less e - end.
    """
    starts, begun_us = view(start_us), running(start_us)
    ordered = end_us.take(pc.sort_indices(end_us))
    ends, ended_us = view(ordered), running(ordered)
    found = []
    for edge in edges:
        begun, ended = bisect_left(starts, edge), bisect_left(ends, edge)
        found.append(edge * (begun - ended) - begun_us[begun] + ended_us[ended])
    return found


def _differences(sums: Sequence[int]) -> list[int]:
    return [late - early for early, late in pairwise(sums)]


def _joined(values: Sequence[int]) -> list[int]:
    return [sum(values[place : place + FACTOR]) for place in range(0, len(values), FACTOR)]


def _throughput(lanes: Sequence[LaneRows], span_us: int) -> Iterator[CounterTrack]:
    """Tokens a second of all lanes, each pass's tokens spread over its time."""
    start_us = pa.concat_arrays([rows.start_us for rows in lanes])
    order = pc.sort_indices(start_us)
    length_us = pc.max_element_wise(
        pa.concat_arrays([rows.span_us for rows in lanes]), scalar(1, _I64)
    )
    end_us = pc.add(start_us, length_us).take(order)
    for name in ("prefill_tokens", "decode_tokens"):
        tokens = pa.concat_arrays([getattr(rows, name) for rows in lanes])
        if not pc.any(pc.greater(tokens, scalar(0, _I64)), min_count=0).as_py():
            continue
        rate = pc.divide(
            pc.multiply(pc.cast(tokens, _F64), scalar(1e6, _F64)), pc.cast(length_us, _F64)
        )
        windows = Windows.of(start_us.take(order), end_us, rate.take(order))
        track = track_of(f"{name}_per_s", "", "passes", windows, span_us, over_all=True)
        if track is not None:
            yield track
