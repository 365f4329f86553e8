"""How far apart ranks are in steps that correspond. No loop over rows.

Steps correspond if they have the same number within the model and the same restart of the workers, and ranks are
compared if all their corresponding steps have the same phase, sequences and tokens: they ran the same program on
inputs of the same shape. A rank that was killed, or still runs, may have fewer of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column, percentiles_ms, total
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.results import Laggard, Parallelism, Skew
from phaseprof.process import process_code
from phaseprof.trace.columns import to_column
from phaseprof.trace.meta import ProcessMeta

_SAME = ("phase", "sequences", "prefill_tokens", "decode_tokens")
#: Restarts above, steps below.
_STEP_BITS = 40


@dataclass(frozen=True, slots=True)
class Steps:
    """The passes of the primary model in one rank, by restart and step.

    Attributes:
        rank: Which.
        key: Restart and number of each step, ascending.
        shape: Phase, sequences and tokens of each.
        start_ns: When each began on its host's monotonic clock; on the Unix axis where `clock` is empty.
        span_ns: How long each took.
        steady: Whether its time counts: no warm-up, no error, no costly collector.
        clock: Names the clock of `start_ns`; empty if it is not known, or not the same in all processes of the rank.
        whole: Whether all processes of the rank have ended.
    """

    rank: int
    key: pa.Array
    shape: tuple[pa.Array, ...]
    start_ns: pa.Array
    span_ns: pa.Array
    steady: pa.Array
    clock: str
    whole: bool

    def at(self, places: pa.Array) -> Steps:
        """Some of the steps."""
        return Steps(
            self.rank,
            self.key.take(places),
            tuple(values.take(places) for values in self.shape),
            self.start_ns.take(places),
            self.span_ns.take(places),
            self.steady.take(places),
            self.clock,
            self.whole,
        )


def steps_by_rank(
    passes: pa.Table, metas: Sequence[ProcessMeta], primary: Primary
) -> dict[int, Steps]:
    """The steps of each rank; none for a rank in which several processes ran the model at once."""
    mine = pc.and_(
        pc.equal(column(passes, "model_id"), _text(primary.model_id)),
        pc.is_in(column(passes, "role"), value_set=to_column(primary.roles, pa.string())),
    )
    own = passes.filter(mine)
    rank = int_column(own, "rank")
    found: dict[int, Steps] = {}
    for number in sorted(rank.unique().to_pylist()):
        rows = own.filter(pc.equal(rank, _int(number)))
        steps = _steps(number, rows, [meta for meta in metas if meta.rank == number])
        if steps is not None:
            found[number] = steps
    return found


def _steps(rank: int, rows: pa.Table, metas: Sequence[ProcessMeta]) -> Steps | None:
    pass_id = int_column(rows, "pass_id")
    code = pc.bit_wise_and(pc.shift_right(pass_id, _int(32)), _int(0x3FFFFF))
    codes = code.unique().to_pylist()
    by_code = {process_code(meta.pid, meta.host_token): meta for meta in metas}
    if len(codes) == 1 and len(metas) == 1:
        by_code = {codes[0]: metas[0]}
    processes = {each: by_code.get(each) for each in codes}
    restarts = [
        0 if meta is None or meta.restart is None else meta.restart for meta in processes.values()
    ]
    if len(set(restarts)) < len(restarts):
        return None
    restart = _by_process(code, dict(zip(codes, restarts, strict=True)))
    clocks = {
        "" if meta is None or meta.host is None or not meta.clock else meta.host.clock
        for meta in processes.values()
    }
    start_ns = int_column(rows, "start_ns")
    if "" not in clocks:
        offsets = {each: _offset_ns(meta) for each, meta in processes.items()}
        start_ns = pc.subtract(start_ns, _by_process(code, offsets))
    key = pc.bit_wise_or(pc.shift_left(restart, _int(_STEP_BITS)), int_column(rows, "step"))
    steady = pc.and_(
        pc.and_(pc.is_null(column(rows, "warmup")), pc.is_null(column(rows, "error"))),
        pc.invert(column(rows, "profiled")),
    )
    steps = Steps(
        rank=rank,
        key=key,
        shape=tuple(column(rows, name) for name in _SAME),
        start_ns=start_ns,
        span_ns=pc.coalesce(int_column(rows, "device_ns"), int_column(rows, "host_ns")),
        steady=steady,
        clock=clocks.pop() if len(clocks) == 1 else "",
        whole=all(meta is not None and meta.complete for meta in processes.values()),
    )
    return steps.at(pc.sort_indices(key))


def _offset_ns(meta: ProcessMeta | None) -> int:
    """What the process added to its monotonic clock to get Unix ns."""
    return 0 if meta is None else meta.clock[0].unix_ns - meta.clock[0].monotonic_ns


def _by_process(code: pa.Array, values: Mapping[int, int]) -> pa.Array:
    """Each row's value, from that of its process."""
    place = pc.index_in(code, value_set=to_column(list(values), pa.int64()))
    return to_column(list(values.values()), pa.int64()).take(place)


def measure_skew(kind: Parallelism, ranks: Sequence[Steps]) -> Skew | None:
    """Compare ranks step by step; None if they did not run the same sequence, or if no common step is steady.

    Args:
        kind: How they work together. Ranks of a tensor-parallel model wait for each other inside of every pass, so
            that the one that begins last holds up the others each time; data-parallel ones do not, and what counts
            is whose passes take longest in all.
        ranks: Two or more.
    """
    together = _corresponding(ranks)
    if together is None or len(together[0].key) == 0:
        return None
    spans = [steps.span_ns for steps in together]
    clocks = {steps.clock for steps in together}
    one_clock = len(clocks) == 1 and "" not in clocks
    starts = [steps.start_ns for steps in together]
    # All end together: where the clocks do not compare, the shortest pass tells which one began last.
    late = starts if one_clock else [pc.negate(values) for values in spans]
    start_ms = percentiles_ms(_spread(starts)) if one_clock else None
    duration_ms = percentiles_ms(_spread(spans))
    assert duration_ms is not None
    return Skew(
        kind=kind,
        ranks=tuple(steps.rank for steps in together),
        steps=len(together[0].key),
        start_ms=start_ms,
        duration_ms=duration_ms,
        by_start=kind is Parallelism.TENSOR and one_clock,
        laggard=(
            _slowest(together) if kind is Parallelism.DATA else _last_to_begin(together, late)
        ),
    )


def _corresponding(ranks: Sequence[Steps]) -> list[Steps] | None:
    """The steady steps that all have, side by side; None if the sequences differ."""
    longest = max(ranks, key=lambda steps: len(steps.key))
    cut_off = not all(steps.whole for steps in ranks)
    common = longest.key
    for steps in ranks:
        if not steps.key.equals(common):
            common = common.filter(pc.is_in(common, value_set=steps.key))
    if not cut_off and any(len(steps.key) != len(common) for steps in ranks):
        return None
    together = [
        steps if steps.key.equals(common) else steps.at(pc.index_in(common, value_set=steps.key))
        for steps in ranks
    ]
    first = together[0]
    for steps in together[1:]:
        if any(not a.equals(b) for a, b in zip(steps.shape, first.shape, strict=True)):
            return None
    steady = first.steady
    for steps in together[1:]:
        steady = pc.and_(steady, steps.steady)
    places = pc.indices_nonzero(steady)
    return [steps.at(places) for steps in together]


def _spread(values: Sequence[pa.Array]) -> pa.Array:
    return pc.subtract(pc.max_element_wise(*values), pc.min_element_wise(*values))


def _last_to_begin(ranks: Sequence[Steps], late: Sequence[pa.Array]) -> Laggard:
    """The rank that costs the most by beginning last: in each such step, what it is behind the one before it."""
    last, before = pc.max_element_wise(*late[:2]), pc.min_element_wise(*late[:2])
    for values in late[2:]:
        before = pc.max_element_wise(before, pc.min_element_wise(last, values))
        last = pc.max_element_wise(last, values)
    behind = pc.subtract(last, before)
    costs = []
    for steps, values in zip(ranks, late, strict=True):
        alone = _only(values, last, behind)
        costs.append((total(behind.filter(alone)), -steps.rank, alone))
    lost_ns, negative, alone = max(costs, key=lambda cost: cost[:2])
    whole_ns = total(pc.max_element_wise(*(steps.span_ns for steps in ranks)))
    return _laggard(-negative, alone, lost_ns, whole_ns)


def _slowest(ranks: Sequence[Steps]) -> Laggard:
    """The rank whose passes take longest in all: what it is behind the next one in the end."""
    totals = sorted(((total(steps.span_ns), -steps.rank) for steps in ranks), reverse=True)
    (whole_ns, negative), (next_ns, _) = totals[:2]
    spans = {steps.rank: steps.span_ns for steps in ranks}
    own = spans.pop(-negative)
    behind = pc.subtract(own, pc.max_element_wise(*spans.values()))
    return _laggard(-negative, pc.greater(behind, _int(0)), whole_ns - next_ns, whole_ns)


def _only(values: pa.Array, last: pa.Array, behind: pa.Array) -> pa.Array:
    """Where these are the last. Where two are last together neither costs anything, and it counts for neither."""
    return pc.and_(pc.greater(behind, _int(0)), pc.equal(values, last))


def _laggard(rank: int, alone: pa.Array, lost_ns: int, whole_ns: int) -> Laggard:
    return Laggard(
        rank=rank,
        last_share=total(pc.cast(alone, pa.int64())) / len(alone),
        lost_ms=lost_ns / 1e6,
        lost_share=lost_ns / whole_ns if whole_ns else 0.0,
    )


def _int(value: int) -> pa.Scalar:
    return to_column([value], pa.int64())[0]


def _text(value: str) -> pa.Scalar:
    return to_column([value], pa.string())[0]
