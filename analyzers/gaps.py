"""The time between passes: from the end of one to the begin of the next that serves the same request."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import column, first_request, int_column, next_of, parts, scalar


def gaps_ns(passes: pa.Table, quiet: pa.Array) -> pa.Array:
    """Time from each pass's end to the next pass of the same request on the same thread; null where there is none.

    The next pass is the next of any model: between two passes of the target, a draft model's work is no gap. A gap
    next to a pass that is not ``quiet`` (it compiled, failed or ran under a collector) is not the run's own. What the
    host waits for the device after a call is time of that pass, and no gap.
    """
    order = _order(passes)
    if order is not None:
        columns = ["rank", "thread_id", "start_ns", "end_ns", "device_ns", "slices"]
        ordered = passes.select(columns).take(order)
        return _until_next(ordered, quiet.take(order)).take(pc.sort_indices(order))
    found = []
    begin = 0
    for rows in parts(passes):
        # One row more: the next of the last one.
        length = rows.num_rows
        more = passes.slice(begin, length + 1)
        found.append(_until_next(more, quiet.slice(begin, length + 1)).slice(0, length))
        begin += length
    return pa.concat_arrays(found)


def ends_ns(passes: pa.Table) -> pa.Array:
    """When each pass had ended, on the host and on the device, Unix ns.

    The call of a pass returns before a GPU has done its work: that ends no sooner than its device time after the begin
    of the call.
    """
    start, end = int_column(passes, "start_ns"), int_column(passes, "end_ns")
    return pc.max_element_wise(end, pc.add(start, column(passes, "device_ns")))


def _until_next(passes: pa.Table, quiet: pa.Array) -> pa.Array:
    """The gap of each pass to the next row; null in the last row."""
    together = pc.and_(quiet, next_of(quiet))
    request = first_request(passes.column("slices"))
    for values in (int_column(passes, "rank"), int_column(passes, "thread_id"), request):
        together = pc.and_(together, pc.equal(values, next_of(values)))
    start, end = int_column(passes, "start_ns"), ends_ns(passes)
    zero = scalar(0, pa.int64())
    gap = pc.max_element_wise(pc.subtract(next_of(start), end), zero, skip_nulls=False)
    together = pc.fill_null(together, scalar(False, pa.bool_()))
    return pc.if_else(together, gap, scalar(None, pa.int64()))


def _order(passes: pa.Table) -> pa.Array | None:
    """The order by rank, thread and begin; None if the rows of a single thread are in order already."""
    rank, thread, start = (passes.column(name) for name in ("rank", "thread_id", "start_ns"))
    if len(start) < 2:
        return None
    single = all(pc.min(values).as_py() == pc.max(values).as_py() for values in (rank, thread))
    if single and pc.all(pc.greater_equal(start[1:], start[:-1])).as_py():
        return None
    keys = pa.table({"rank": rank, "thread": thread, "start": start})
    return pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])
