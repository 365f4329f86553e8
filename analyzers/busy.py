"""How long the device worked during profiled passes: the union of their kernels.

Span, busy and gap are three figures: the span is the time of the pass, busy the time in which at least one kernel or
copy ran, the gap the rest. Kernels belong to the pass that launched them (`pass_id`), wherever they lie on the clock.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, int_column

_KEYS = ["rank", "pass_id"]


def busy_per_pass(kernels: pa.Table, *, device_kind: str) -> pa.Table:
    """The union of the kernels of each pass.

    Args:
        kernels: The `kernels` table. Rows without a pass are left out.
        device_kind: ``cpu`` takes operators on the CPU, ``cuda`` everything else; empty takes what is not on the CPU,
            and the CPU's rows only if there is nothing else.

    Returns:
        A table of ``rank``, ``pass_id``, ``busy_ns``; one row a pass that has kernels.
    """
    rows = pa.table(
        {
            "rank": int_column(kernels, "rank"),
            "pass_id": int_column(kernels, "pass_id"),
            "start": int_column(kernels, "start_ns"),
            "end": int_column(kernels, "end_ns"),
        }
    )
    on_cpu = pc.starts_with(column(kernels, "device"), "cpu")
    if not device_kind:
        device_kind = "cpu" if pc.all(on_cpu, min_count=0).as_py() else "cuda"
    wanted = on_cpu if device_kind == "cpu" else pc.invert(on_cpu)
    rows = rows.filter(pc.and_(wanted, pc.is_valid(rows["pass_id"])))
    if rows.num_rows == 0:
        empty = pa.array([], pa.int64())
        return pa.table({"rank": empty, "pass_id": empty, "busy_ns": empty})
    rows = rows.sort_by([(name, "ascending") for name in (*_KEYS, "start")])
    return _union_per_group(rows)


def _union_per_group(rows: pa.Table) -> pa.Table:
    """The union length per (rank, pass_id) of intervals that are sorted by key and start.

    The groups are laid one after another on a common axis, far enough apart that none reaches into the next; then one
    running maximum of the ends tells how much of each interval is new.
    """
    start, end = column(rows, "start"), column(rows, "end")
    changes = pc.or_(_differs(column(rows, "rank")), _differs(column(rows, "pass_id")))
    group = pc.cumulative_sum(pc.cast(changes, pa.int64()))
    first = pc.take(start, pc.indices_nonzero(changes))
    offset = pc.take(first, group_index := pc.subtract(group, 1))
    start, end = pc.subtract(start, offset), pc.subtract(end, offset)
    stride = pc.add(pc.max(end), 1)
    shift = pc.multiply(group_index, stride)
    start, end = pc.add(start, shift), pc.add(end, shift)
    covered = _previous(pc.cumulative_max(end))
    fresh = pc.max_element_wise(pc.subtract(end, pc.max_element_wise(start, covered)), 0)
    rows = rows.append_column("busy_ns", fresh)
    busy = rows.group_by(_KEYS).aggregate([("busy_ns", "sum")])
    return busy.rename_columns([*_KEYS, "busy_ns"])


def _differs(values: pa.Array) -> pa.Array:
    """Whether each row differs from the one before; the first does."""
    same = pc.equal(values.slice(1), values.slice(0, len(values) - 1))
    return pa.concat_arrays([pa.array([True]), pc.invert(same)])


def _previous(values: pa.Array) -> pa.Array:
    return pa.concat_arrays([pa.nulls(1, values.type), values.slice(0, len(values) - 1)])
