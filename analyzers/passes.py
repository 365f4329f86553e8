"""Sort the passes of a trace: whose they are, which of them count, and what lies between them. No loop over rows.

Steady state is what a phase is judged by: passes of the primary model that raised no error, were no warm-up and ran
without a costly collector. The first pass of a phase is cold and set aside, unless fewer than three others remain.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.columns import (
    as_float,
    column,
    counts,
    groups,
    int_column,
    named,
    names,
    parts,
    scalar,
    summable,
    total,
)
from phaseprof.analyzers.gaps import gaps_ns
from phaseprof.analyzers.results import SetAside
from phaseprof.analyzers.roofline import RoofTimes, roof_times
from phaseprof.phases import Phase, Role, TagSource
from phaseprof.records import Warmup
from phaseprof.trace.columns import to_column
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
#: Those of them that a trace holds; the others are worked out, all but the gap for a part of the rows at a time.
_READ = tuple(name for name in _SUMMED if name not in ("span_ns", "known_span_ns"))
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
        profiled: Rows that ran under a profiler of kernels: rank, pass_id, phase, sequences, span_ns.
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
    times: dict[tuple[str, str], int] = {}
    for rows in parts(passes):
        for pair, ns in _times(rows):
            times[pair] = times.get(pair, 0) + ns
    targets = {pair: ns for pair, ns in times.items() if pair[1] == Role.TARGET} or times
    by_model: dict[str, int] = {}
    for (name, _), ns in targets.items():
        by_model[name] = by_model.get(name, 0) + ns
    # The id settles a tie, so that a report does not depend on the order of parts.
    model_id = max(sorted(by_model), key=by_model.__getitem__)
    roles = tuple(
        sorted({role for name, role in times if name == model_id} - {Role.DRAFT.value})
    ) or (Role.DRAFT.value,)
    whole = sum(times.values())
    own = sum(ns for (name, role), ns in times.items() if name == model_id and role in roles)
    return Primary(model_id, roles, 1 - own / whole if whole else 0.0)


def _times(passes: pa.Table) -> Iterator[tuple[tuple[str, str], int]]:
    """The time of each model and role."""
    models, roles = names(passes, "model_id"), names(passes, "role")
    width = len(roles.dictionary)
    key = pc.add(
        pc.multiply(pc.cast(models.indices, pa.int64()), scalar(width, pa.int64())),
        pc.cast(roles.indices, pa.int64()),
    )
    order, runs = groups(key)
    span_ns = _span_ns(passes).take(order)
    for value, begin, length in runs:
        pair = models.dictionary[value // width].as_py(), roles.dictionary[value % width].as_py()
        yield pair, total(span_ns.slice(begin, length))


def sort_passes(passes: pa.Table, primary: Primary, ceilings: Ceilings | None) -> SortedPasses:
    """Group the passes of the primary model by what they count as, phase and batch.

    Args:
        passes: The `passes` table.
        primary: Which model.
        ceilings: Roofs, for the time of each pass over its roof time.
    """
    status = pa.concat_arrays([statuses(rows, primary) for rows in parts(passes)])
    device_ns = passes.column("device_ns")
    on_device = device_ns.null_count < len(device_ns)
    marked = passes.append_column("status", status)
    quiet = pc.is_in(status, value_set=to_column([Status.STEADY, Status.FIRST], pa.int32()))
    marked = marked.append_column("gap_ns", gaps_ns(passes, quiet))
    sorted_: dict[tuple[Status, Phase, int], Group] = {}
    for rows in parts(marked):
        for key, group in _groups(rows, ceilings):
            sorted_[key] = sorted_.get(key, Group()) + group

    steady = {
        (phase, n): group for (kind, phase, n), group in sorted_.items() if kind is Status.STEADY
    }
    cold = _cold_phases(sorted_)
    for (kind, phase, n), group in sorted_.items():
        if kind is Status.FIRST and phase in cold:
            steady[phase, n] = steady.get((phase, n), Group()) + group
    seen: dict[Phase, int] = {}
    for (_, phase, _), group in sorted_.items():
        seen[phase] = seen.get(phase, 0) + group.passes
    failed = names(
        passes.select(["error"]).filter(pc.equal(status, _code(Status.ERROR))), "error"
    ).unique()
    return SortedPasses(
        steady=steady,
        cold=cold,
        set_aside=_set_aside(sorted_, cold),
        profiled=_profiled(passes, status),
        seen=seen,
        failed=tuple(sorted(failed.to_pylist())),
        on_device=on_device,
    )


def steady_passes(passes: pa.Table, primary: Primary) -> pa.Table:
    """The rows of the primary model that steady-state figures come from, with their time as `span_ns`; of a phase with
    no others, its first passes."""
    if passes.num_rows == 0:
        return passes.append_column("span_ns", _span_ns(passes))
    status = pa.concat_arrays([statuses(rows, primary) for rows in parts(passes)])
    steady = passes.filter(pc.equal(status, _code(Status.STEADY)))
    first = passes.filter(pc.equal(status, _code(Status.FIRST)))
    missing = set(counts(names(first, "phase"))) - set(counts(names(steady, "phase")))
    if missing:
        steady = pa.concat_tables([steady, first.filter(named(names(first, "phase"), *missing))])
    return steady.append_column("span_ns", _span_ns(steady))


def _profiled(passes: pa.Table, status: pa.Array) -> pa.Table:
    """The rows that ran under a collector: those that are flagged. Of a recording of another profiler all passes did,
    and none is."""
    columns = ["rank", "pass_id", "phase", "sequences", "host_ns", "device_ns"]
    imported = pc.and_(
        named(names(passes, "tag_source"), TagSource.ANNOTATION, TagSource.INFERRED),
        pc.is_in(status, value_set=to_column([Status.STEADY, Status.FIRST], pa.int32())),
    )
    flagged = pc.equal(status, _code(Status.PROFILED))
    wanted = flagged if pc.any(flagged).as_py() else imported
    found = passes.select(columns).filter(wanted)
    return pa.table(
        {
            "rank": int_column(found, "rank"),
            "pass_id": int_column(found, "pass_id"),
            "phase": column(found, "phase"),
            "sequences": int_column(found, "sequences"),
            "span_ns": _span_ns(found),
        }
    )


def _span_ns(rows: pa.Table) -> pa.Array:
    """The time of each pass: between its device events where there are any, else on the host.

    The call of a pass on a GPU may return long before the device has done the work, or wait for the pass before; the
    events of two passes of a stream never overlap.
    """
    return pc.coalesce(column(rows, "device_ns"), column(rows, "host_ns"))


def _code(status: Status) -> pa.Scalar:
    return scalar(status.value, pa.int32())


def statuses(passes: pa.Table, primary: Primary) -> pa.Array:
    """The `Status` of each pass, as int32.

    Args:
        passes: Rows of the `passes` table.
        primary: The model that the report is about; passes of others are elsewhere.
    """
    mine = pc.and_(
        named(names(passes, "model_id"), primary.model_id),
        named(names(passes, "role"), *primary.roles),
    )
    warmup = names(passes, "warmup")
    # A kind of warm-up that this version does not know is still a warm-up.
    kinds = pc.fill_null(
        pc.index_in(warmup.dictionary, value_set=to_column(_WARMUPS, pa.string())),
        _code(Status.REQUESTED),
    )
    status = pc.if_else(column(passes, "profiled"), _code(Status.PROFILED), _code(Status.STEADY))
    status = pc.coalesce(kinds.take(warmup.indices), status)
    status = pc.if_else(passes.column("error").is_valid(), _code(Status.ERROR), status)
    status = pc.if_else(mine, status, _code(Status.ELSEWHERE))
    return status.combine_chunks() if isinstance(status, pa.ChunkedArray) else status


def with_known_work(rows: pa.Table) -> pa.Table:
    """Null the work of passes of which only a part is known, and add the time of the others."""
    span_ns = column(rows, "span_ns")
    columns = {name: column(rows, name) for name in _WORK}
    if any(values.null_count for values in columns.values()):
        known = pc.is_valid(columns[_WORK[0]])
        for name in _WORK[1:]:
            known = pc.and_(known, pc.is_valid(columns[name]))
        for name, values in columns.items():
            masked = pc.if_else(known, values, scalar(None, values.type))
            rows = rows.set_column(rows.schema.get_field_index(name), name, masked)
        span_ns = pc.if_else(known, span_ns, scalar(0, pa.int64()))
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
        pc.multiply(as_float(column(rows, "flops")), scalar(unit.compute_s, pa.float64())),
        pc.multiply(as_float(moved), scalar(unit.memory_s, pa.float64())),
    )
    positive = pc.greater(floor_ns, scalar(0.0, pa.float64()))
    floor_ns = pc.if_else(positive, floor_ns, scalar(None, pa.float64()))
    return pc.divide(as_float(column(rows, "span_ns")), floor_ns)


def _groups(
    passes: pa.Table, ceilings: Ceilings | None
) -> Iterator[tuple[tuple[Status, Phase, int], Group]]:
    """Sums and lists of some passes by status, phase and number of sequences. A key may come again."""
    own = pc.not_equal(passes.column("status"), _code(Status.ELSEWHERE))
    rows = passes.select([*_READ, "status", "phase", "host_ns", "device_ns"]).filter(own)
    rows = with_known_work(rows.append_column("span_ns", _span_ns(rows)))
    rows = rows.append_column("slowness", _slowness(rows, ceilings))
    labels = names(rows, "phase")
    phases = [phase_named(value) for value in labels.dictionary.to_pylist()]
    code = pc.add(
        pc.multiply(pc.cast(labels.indices, pa.int64()), scalar(len(Status), pa.int64())),
        pc.cast(column(rows, "status"), pa.int64()),
    )
    batch = column(rows, "sequences")
    width = len(phases) * len(Status)
    order, runs = groups(pc.add(pc.multiply(batch, scalar(width, pa.int64())), code))
    rows = summable(rows.select([*_SUMMED, "slowness"]), _WORK)
    values = {name: column(rows, name).take(order) for name in rows.column_names}
    for value, begin, length in runs:
        n, rest = divmod(value, width)
        phase, status = phases[rest // len(Status)], Status(rest % len(Status))
        part = {name: found.slice(begin, length) for name, found in values.items()}
        figures: dict[str, Any] = {name: int(pc.sum(part[name]).as_py() or 0) for name in _SUMMED}
        figures |= {f"{name}_known": length - part[name].null_count for name in _COUNTED}
        lists: dict[str, Any] = {
            "spans_ns": (part["span_ns"],),
            "slowness": (part["slowness"],),
        }
        yield (status, phase, n), Group(passes=length, **figures, **lists)


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
