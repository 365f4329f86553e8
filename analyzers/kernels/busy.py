"""How long a device worked, and for whom: unions of kernels, and the time of a device split among them.

Span, busy and gap are three figures: the span is the time of the pass, busy the time in which at least one kernel or
copy ran, the gap the rest. Kernels belong to the pass that launched them (`pass_id`), wherever they lie on the clock.

Kernels overlap, on several streams or on one. Where they do, each gets an equal part of the time (`split_time`), so
that the parts add up to the busy time of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, groups, int_column, scalar

_KEYS = ["rank", "pass_id"]
_I64, _F64 = pa.int64(), pa.float64()


@dataclass(frozen=True, slots=True)
class SplitTime:
    """The time of each kernel, in ns, as float64.

    Attributes:
        own: The time of its device that goes to it: all of it where it ran alone, an equal part where others ran too.
        alone: Of that, the time in which nothing ran that is not of its kind: see :func:`split_time`.
    """

    own: pa.Array
    alone: pa.Array


def on_device(kernels: pa.Table, device_kind: str) -> pa.Array:
    """Which rows of the `kernels` table are of the device that the figures are about.

    Args:
        kernels: The `kernels` table.
        device_kind: ``cpu`` takes operators on the CPU, ``cuda`` everything else; empty takes what is not on the CPU,
            and the CPU's rows only if there is nothing else.
    """
    on_cpu = pc.starts_with(column(kernels, "device"), "cpu")
    if not device_kind:
        device_kind = "cpu" if pc.all(on_cpu, min_count=0).as_py() else "cuda"
    return on_cpu if device_kind == "cpu" else pc.invert(on_cpu)


def busy_per_pass(kernels: pa.Table, *, device_kind: str) -> pa.Table:
    """The union of the kernels of each pass.

    Args:
        kernels: The `kernels` table. Rows without a pass are left out.
        device_kind: As :func:`on_device` takes it.

    Returns:
        A table of ``rank``, ``pass_id``, ``busy_ns``, and ``extent_ns``, from the begin of its first kernel to the end
        of its last; one row a pass that has kernels.
    """
    rows = pa.table(
        {
            "rank": int_column(kernels, "rank"),
            "pass_id": int_column(kernels, "pass_id"),
            "start": int_column(kernels, "start_ns"),
            "end": int_column(kernels, "end_ns"),
        }
    )
    wanted = on_device(kernels, device_kind)
    rows = rows.filter(pc.and_(wanted, pc.is_valid(rows["pass_id"])))
    if rows.num_rows == 0:
        empty = pa.nulls(0, _I64)
        return pa.table({"rank": empty, "pass_id": empty, "busy_ns": empty, "extent_ns": empty})
    rows = rows.sort_by([(name, "ascending") for name in (*_KEYS, "start")])
    return _union_per_group(rows)


def _union_per_group(rows: pa.Table) -> pa.Table:
    """The union length per (rank, pass_id) of intervals that are sorted by key and start.

    The groups are laid one after another on a common axis, far enough apart that none reaches into the next; then one
    running maximum of the ends tells how much of each interval is new.
    """
    start, end = column(rows, "start"), column(rows, "end")
    changes = pc.or_(_differs(column(rows, "rank")), _differs(column(rows, "pass_id")))
    group = pc.cumulative_sum(pc.cast(changes, _I64))
    first = pc.take(start, pc.indices_nonzero(changes))
    offset = pc.take(first, group_index := pc.subtract(group, 1))
    start, end = pc.subtract(start, offset), pc.subtract(end, offset)
    rows = rows.append_column("extent_ns", end)
    stride = pc.add(pc.max(end), 1)
    shift = pc.multiply(group_index, stride)
    start, end = pc.add(start, shift), pc.add(end, shift)
    covered = _previous(pc.cumulative_max(end))
    fresh = pc.max_element_wise(pc.subtract(end, pc.max_element_wise(start, covered)), 0)
    rows = rows.append_column("busy_ns", fresh)
    busy = rows.group_by(_KEYS).aggregate([("busy_ns", "sum"), ("extent_ns", "max")])
    return busy.rename_columns([*_KEYS, "busy_ns", "extent_ns"])


def split_time(device: pa.Array, start: pa.Array, end: pa.Array, of_kind: pa.Array) -> SplitTime:
    """Split the time of each device among the kernels that ran on it.

    Args:
        device: A number for the device of each kernel; overlap counts only on one device.
        start, end: Begin and end of each, int64 ns. One that ends before it begins took no time.
        of_kind: Which kernels `SplitTime.alone` is about (collectives): the time in which only such kernels ran is
            theirs alone. It is 0 for the others.
    """
    order, runs = groups(device)
    start, end, of_kind = (values.take(order) for values in (start, end, of_kind))
    end = pc.max_element_wise(start, end)
    found = [
        _split_one(*(values.slice(begin, length) for values in (start, end, of_kind)))
        for _, begin, length in runs
    ]
    back = pc.sort_indices(order)
    nothing = pa.nulls(0, _F64)
    return SplitTime(
        *(
            pa.concat_arrays([part[place] for part in found] or [nothing]).take(back)
            for place in (0, 1)
        )
    )


def _split_one(start: pa.Array, end: pa.Array, of_kind: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The same for one device, by one sweep over begins and ends.

    Between two neighbouring points the same kernels run: each gets the length over their number. The running sum of
    that, from a kernel's begin to its end, is its time.
    """
    count = len(start)
    one = pa.repeat(scalar(1, _I64), count)
    mine = pc.cast(of_kind, _I64)
    points = pa.concat_arrays([start, end])
    order = pc.sort_indices(points)
    running = _running(one, order)
    running_mine = _running(mine, order)
    points = points.take(order)
    length = pc.cast(pc.subtract(points.slice(1), points.slice(0, len(points) - 1)), _F64)
    # At one moment ends may be counted before begins: the length is 0 there, and so is the part.
    divisor = pc.cast(pc.max_element_wise(running, scalar(1, _I64)), _F64)
    part = pc.divide(length, divisor.slice(0, len(length)))
    part = pc.if_else(pc.greater(running, scalar(0, _I64)).slice(0, len(length)), part, 0.0)
    only = pc.equal(running, running_mine).slice(0, len(length))
    place = pc.sort_indices(order)
    begins, ends = place.slice(0, count), place.slice(count)
    own = _between(part, begins, ends)
    alone = _between(pc.if_else(only, part, 0.0), begins, ends)
    return own, pc.if_else(of_kind, alone, 0.0)


def _running(weight: pa.Array, order: pa.Array) -> pa.Array:
    """How many run after each point: ``weight`` is added at begins and taken off at ends."""
    return pc.cumulative_sum(pa.concat_arrays([weight, pc.negate(weight)]).take(order))


def _between(part: pa.Array, begins: pa.Array, ends: pa.Array) -> pa.Array:
    """The sum of the parts from point ``begins`` to point ``ends``."""
    zero = pa.repeat(scalar(0.0, _F64), 1)
    sums = pa.concat_arrays([zero, pc.cumulative_sum(part)])
    # A kernel of no length may have its end sorted before its begin; rounding may leave a hair below 0.
    return pc.max_element_wise(pc.subtract(sums.take(ends), sums.take(begins)), 0.0)


def _differs(values: pa.Array) -> pa.Array:
    """Whether each row differs from the one before; the first does."""
    same = pc.equal(values.slice(1), values.slice(0, len(values) - 1))
    return pa.concat_arrays([pa.repeat(scalar(True, pa.bool_()), 1), pc.invert(same)])


def _previous(values: pa.Array) -> pa.Array:
    return pa.concat_arrays([pa.nulls(1, values.type), values.slice(0, len(values) - 1)])
