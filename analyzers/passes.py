"""Sort the passes of a trace: whose they are, which of them count, and what lies between them. No loop over rows.

Steady state is what a phase is judged by: passes of the primary model that raised no error, were no warm-up and ran
without a costly collector. The first pass of a phase is cold and set aside, unless fewer than three others remain.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.columns import (
    as_float,
    column,
    first_request,
    int_column,
    next_of,
    summable,
)
from phaseprof.analyzers.results import SetAside
from phaseprof.analyzers.roofline import RoofTimes, roof_times
from phaseprof.phases import Phase, Role
from phaseprof.records import Warmup
from phaseprof.trace.meta import Ceilings

_WORK = ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes")
_SUMMED = (
    "sequences",
    "prefill_tokens",
    "decode_tokens",
    "padding_tokens",
    "recomputed_tokens",
    "cached_tokens",
    "logits_tokens",
    *_WORK,
    "span_ns",
    "known_span_ns",
    "gap_ns",
)
#: Columns that may be null: their non-null values are counted beside the sum.
_COUNTED = ("padding_tokens", "logits_tokens", "flops", "gap_ns")
_WARMUPS = tuple(Warmup)
_PHASES = {phase.value: phase for phase in Phase}


class Status(enum.IntEnum):
    """What a pass counts as. The first three are in the order of `Warmup`."""

    REQUESTED = 0
    FIRST = 1
    COMPILE = 2
    STEADY = 3
    PROFILED = 4
    ERROR = 5
    ELSEWHERE = 6

    @property
    def reason(self) -> str:
        """As `SetAside.reason` spells it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Group:
    """Sums over passes of one kind. A name that ends in ``_known`` is how many passes have the figure.

    Attributes:
        known_span_ns: Time of the passes whose work is known.
        gap_ns: Time from a pass's end to the begin of the next one of the same request on the same thread.
        spans_ns: The time of each pass.
        slowness: The time of each pass over its roof time; empty without roofs or work.
    """

    passes: int = 0
    sequences: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    padding_tokens_known: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    logits_tokens: int = 0
    logits_tokens_known: int = 0
    flops: int = 0
    flops_known: int = 0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    span_ns: int = 0
    known_span_ns: int = 0
    gap_ns: int = 0
    gap_ns_known: int = 0
    spans_ns: tuple[pa.Array, ...] = field(default=(), compare=False)
    slowness: tuple[pa.Array, ...] = field(default=(), compare=False)

    def __add__(self, other: Group) -> Group:
        return Group(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def moved_bytes(self) -> int:
        """Bytes that had to move: weights, and keys and values read and written."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes


@dataclass(frozen=True, slots=True)
class Primary:
    """The model that the report is about: the one with the most time.

    Attributes:
        model_id: Its id.
        roles: Roles of its passes that are reported.
        other_share: Share of the time of all passes that is not in these.
    """

    model_id: str
    roles: tuple[str, ...]
    other_share: float


@dataclass(frozen=True, slots=True)
class SortedPasses:
    """The passes of the primary model by what they count as.

    Attributes:
        steady: By phase and number of sequences.
        cold: First passes that count for want of others, by phase.
        set_aside: What does not count.
        profiled: Rows that ran under a collector: rank, pass_id, phase, sequences, span_ns.
        seen: All passes of a phase, whatever they count as.
        failed: Errors of the passes that raised, each class once.
        on_device: Whether times are those of device events.
    """

    steady: dict[tuple[Phase, int], Group]
    cold: dict[Phase, int]
    set_aside: tuple[SetAside, ...]
    profiled: pa.Table
    seen: dict[Phase, int]
    failed: tuple[str, ...]
    on_device: bool


def primary_model(passes: pa.Table) -> Primary:
    """Find the model that the time went to, by its target passes. ``passes`` must have rows."""
    flat = pa.table(
        {
            "model_id": column(passes, "model_id"),
            "role": column(passes, "role"),
            "host_ns": column(passes, "host_ns"),
        }
    )
    times = flat.group_by(["model_id", "role"]).aggregate([("host_ns", "sum")]).to_pylist()
    targets = [row for row in times if row["role"] == Role.TARGET] or times
    by_model: dict[str, int] = {}
    for row in targets:
        by_model[row["model_id"]] = by_model.get(row["model_id"], 0) + row["host_ns_sum"]
    # The id settles a tie, so that a report does not depend on the order of parts.
    model_id = max(sorted(by_model), key=by_model.__getitem__)
    roles = tuple(
        sorted({row["role"] for row in times if row["model_id"] == model_id} - {Role.DRAFT.value})
    ) or (Role.DRAFT.value,)
    whole = sum(row["host_ns_sum"] for row in times)
    own = sum(
        row["host_ns_sum"] for row in times if row["model_id"] == model_id and row["role"] in roles
    )
    return Primary(model_id, roles, 1 - own / whole if whole else 0.0)


def sort_passes(passes: pa.Table, primary: Primary, ceilings: Ceilings | None) -> SortedPasses:
    """Group the passes of the primary model by what they count as, phase and batch.

    Args:
        passes: The `passes` table.
        primary: Which model.
        ceilings: Roofs, for the time of each pass over its roof time.
    """
    status = _status(passes, primary)
    host_ns, device_ns = column(passes, "host_ns"), column(passes, "device_ns")
    span_ns = host_ns if device_ns.null_count == len(device_ns) else pc.coalesce(device_ns, host_ns)
    rows = passes.select(
        [name for name in _SUMMED if name not in ("span_ns", "known_span_ns", "gap_ns")]
    )
    rows = rows.append_column("status", status).append_column("span_ns", span_ns)
    rows = rows.append_column("phase", column(passes, "phase"))
    rows = _with_known_work(rows)
    rows = rows.append_column("gap_ns", _gaps(passes, status))
    rows = rows.append_column("slowness", _slowness(rows, ceilings))
    groups = _groups(summable(rows, _WORK))

    steady = {
        (phase, n): group for (kind, phase, n), group in groups.items() if kind is Status.STEADY
    }
    cold = _cold_phases(groups)
    for (kind, phase, n), group in groups.items():
        if kind is Status.FIRST and phase in cold:
            steady[phase, n] = steady.get((phase, n), Group()) + group
    profiled_mask = pc.equal(status, Status.PROFILED)
    profiled = pa.table(
        {
            "rank": int_column(passes, "rank").filter(profiled_mask),
            "pass_id": int_column(passes, "pass_id").filter(profiled_mask),
            "phase": column(passes, "phase").filter(profiled_mask),
            "sequences": int_column(passes, "sequences").filter(profiled_mask),
            "span_ns": span_ns.filter(profiled_mask),
        }
    )
    seen: dict[Phase, int] = {}
    for (_, phase, _), group in groups.items():
        seen[phase] = seen.get(phase, 0) + group.passes
    failed = column(passes, "error").filter(pc.equal(status, Status.ERROR)).unique()
    return SortedPasses(
        steady=steady,
        cold=cold,
        set_aside=_set_aside(groups, cold),
        profiled=profiled,
        seen=seen,
        failed=tuple(sorted(failed.to_pylist())),
        on_device=device_ns.null_count < len(device_ns),
    )


def _status(passes: pa.Table, primary: Primary) -> pa.Array:
    """The `Status` of each pass, as int8."""
    mine = pc.and_(
        pc.equal(column(passes, "model_id"), primary.model_id),
        pc.is_in(column(passes, "role"), value_set=pa.array(primary.roles, pa.string())),
    )
    warmup = column(passes, "warmup")
    kind = pc.index_in(warmup, value_set=pa.array(_WARMUPS, pa.string()))

    def code(status: Status) -> pa.Scalar:
        return pa.scalar(status.value, pa.int8())

    # A kind of warm-up that this version does not know is still a warm-up.
    warm = pc.if_else(
        pc.is_valid(warmup), pc.fill_null(kind, Status.REQUESTED.value), pa.scalar(None, pa.int32())
    )
    status = pc.if_else(column(passes, "profiled"), code(Status.PROFILED), code(Status.STEADY))
    status = pc.coalesce(pc.cast(warm, pa.int8()), status)
    status = pc.if_else(pc.is_valid(column(passes, "error")), code(Status.ERROR), status)
    return pc.if_else(mine, status, code(Status.ELSEWHERE))


def _with_known_work(rows: pa.Table) -> pa.Table:
    """Null the work of passes of which only a part is known, and add the time of the others."""
    span_ns = column(rows, "span_ns")
    columns = {name: column(rows, name) for name in _WORK}
    if any(values.null_count for values in columns.values()):
        known = pc.is_valid(columns[_WORK[0]])
        for name in _WORK[1:]:
            known = pc.and_(known, pc.is_valid(columns[name]))
        for name, values in columns.items():
            masked = pc.if_else(known, values, pa.scalar(None, values.type))
            rows = rows.set_column(rows.schema.get_field_index(name), name, masked)
        span_ns = pc.if_else(known, span_ns, 0)
    return rows.append_column("known_span_ns", span_ns)


def _slowness(rows: pa.Table, ceilings: Ceilings | None) -> pa.Array:
    """The time of each pass over its roof time; null where it is not known."""
    if ceilings is None or ceilings.flops_per_s <= 0 or ceilings.bytes_per_s <= 0:
        return pa.nulls(rows.num_rows, pa.float64())
    moved = pc.add(
        pc.add(column(rows, "weight_bytes"), column(rows, "kv_read_bytes")),
        column(rows, "kv_write_bytes"),
    )
    # Times at the roofs of one FLOP and of one byte turn the sums into a comparison of two columns.
    unit: RoofTimes = roof_times(flops=1e9, moved_bytes=1e9, ceilings=ceilings)
    floor_ns = pc.max_element_wise(
        pc.multiply(as_float(column(rows, "flops")), unit.compute_s),
        pc.multiply(as_float(moved), unit.memory_s),
    )
    floor_ns = pc.if_else(pc.greater(floor_ns, 0), floor_ns, pa.scalar(None, pa.float64()))
    return pc.divide(as_float(column(rows, "span_ns")), floor_ns)


def _gaps(passes: pa.Table, status: pa.Array) -> pa.Array:
    """Time from each pass's end to the next pass of the same request on the same thread; null where there is none.

    The next pass is the next of any model: between two passes of the target, a draft model's work is no gap. A gap
    next to a pass that compiled, failed or ran under a collector is not the run's own.
    """
    rank, thread = int_column(passes, "rank"), int_column(passes, "thread_id")
    start, end = int_column(passes, "start_ns"), int_column(passes, "end_ns")
    request = first_request(passes.column("slices"))
    quiet = pc.is_in(status, value_set=pa.array([Status.STEADY, Status.FIRST], pa.int8()))
    order = _order(rank, thread, start)
    if order is not None:
        rank, thread, start, end, request, quiet = (
            values.take(order) for values in (rank, thread, start, end, request, quiet)
        )
    together = pc.and_(quiet, next_of(quiet))
    for values in (rank, thread, request):
        together = pc.and_(together, pc.equal(values, next_of(values)))
    gap = pc.max_element_wise(pc.subtract(next_of(start), end), 0, skip_nulls=False)
    gap = pc.if_else(pc.fill_null(together, False), gap, pa.scalar(None, pa.int64()))
    return gap if order is None else gap.take(pc.sort_indices(order))


def _order(rank: pa.Array, thread: pa.Array, start: pa.Array) -> pa.Array | None:
    """The order by rank, thread and begin; None if the rows of a single thread are in order already."""
    if len(start) < 2:
        return None
    single = all(pc.min(values).as_py() == pc.max(values).as_py() for values in (rank, thread))
    if single and pc.all(pc.greater_equal(start.slice(1), start.slice(0, len(start) - 1))).as_py():
        return None
    keys = pa.table({"rank": rank, "thread": thread, "start": start})
    return pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])


def _groups(rows: pa.Table) -> dict[tuple[Status, Phase, int], Group]:
    """One pass over the rows: sums and lists by status, phase and number of sequences."""
    rows = rows.append_column("batch", column(rows, "sequences"))
    grouped = rows.group_by(["status", "phase", "batch"]).aggregate(
        [([], "count_all")]
        + [(name, "sum") for name in _SUMMED]
        + [(name, "count") for name in _COUNTED]
        + [("span_ns", "list"), ("slowness", "list")]
    )
    lists = {name: column(grouped, f"{name}_list") for name in ("span_ns", "slowness")}
    small = grouped.drop_columns([f"{name}_list" for name in lists])
    groups: dict[tuple[Status, Phase, int], Group] = {}
    for i, row in enumerate(small.to_pylist()):
        key = (Status(row["status"]), phase_named(row["phase"]), int(row["batch"]))
        if key[0] is Status.ELSEWHERE:
            continue
        group = Group(
            passes=row["count_all"],
            **{name: int(row[f"{name}_sum"] or 0) for name in _SUMMED},
            **{f"{name}_known": row[f"{name}_count"] for name in _COUNTED},
            spans_ns=(lists["span_ns"][i].values,),
            slowness=(lists["slowness"][i].values,),
        )
        groups[key] = groups.get(key, Group()) + group
    return groups


def phase_named(value: str) -> Phase:
    """The phase of a stored label; ``other`` for one that this version does not know."""
    return _PHASES.get(value, Phase.OTHER)


def _cold_phases(groups: dict[tuple[Status, Phase, int], Group]) -> dict[Phase, int]:
    """Phases whose first passes have to count because too few others remain, and how many these are."""
    steady: dict[Phase, int] = {}
    first: dict[Phase, int] = {}
    for (status, phase, _), group in groups.items():
        kept = {Status.STEADY: steady, Status.FIRST: first}.get(status)
        if kept is not None:
            kept[phase] = kept.get(phase, 0) + group.passes
    enough = thresholds.OTHERS_FOR_FIRST.value
    return {phase: n for phase, n in first.items() if steady.get(phase, 0) < enough}


def _set_aside(
    groups: dict[tuple[Status, Phase, int], Group], cold: dict[Phase, int]
) -> tuple[SetAside, ...]:
    passes: dict[Status, int] = {}
    span_ns: dict[Status, int] = {}
    for (status, phase, _), group in groups.items():
        if status is Status.STEADY or (status is Status.FIRST and phase in cold):
            continue
        passes[status] = passes.get(status, 0) + group.passes
        span_ns[status] = span_ns.get(status, 0) + group.span_ns
    return tuple(SetAside(s.reason, passes[s], span_ns[s] / 1e6) for s in sorted(passes))
