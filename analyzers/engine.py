"""What a serving engine does besides running the model, and how much it has to do over time. No loop over rows.

Steps may overlap: under asynchronous scheduling the next one is decided while one executes, and in a pipeline several
execute at once. So overhead is not the sum of its parts, but the time in which no step executes though a request is
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import (
    as_float,
    column,
    groups,
    int_column,
    named,
    names,
    nearest_ranks,
    next_of,
    percentiles_ms,
    scalar,
    total,
    unsteady,
)
from phaseprof.analyzers.passes import Primary
from phaseprof.analyzers.serving import EngineFigures, Load
from phaseprof.trace.columns import to_column

#: Stretches that the run is divided into.
_STRETCHES = 24


def engine_figures(
    steps: pa.Table, passes: pa.Table, requests: pa.Table, primary: Primary
) -> EngineFigures | None:
    """The figures of the engines that served a model; None if there were none.

    Args:
        steps: The `steps` table.
        passes: The `passes` table, to see which steps are warm-up or ran under a collector.
        requests: The `requests` table.
        primary: Which model.
    """
    own = steps.filter(named(names(steps, "model_id"), primary.model_id))
    if own.num_rows == 0:
        return None
    served = requests.filter(named(names(requests, "model_id"), primary.model_id))
    quiet = own.filter(pc.invert(_disturbed(own, passes, primary)))
    counted = quiet if quiet.num_rows else own
    times = [_times(*each) for each in _engines(counted, served)]
    busy_ns = sum(each.busy_ns for each in times)
    steady = served.filter(pc.invert(unsteady(served)))
    usage = nearest_ranks(column(counted, "kv_usage"), 0.5, 1.0)
    running = nearest_ranks(column(counted, "running"), 0.5, 1.0)
    waiting = nearest_ranks(column(counted, "waiting"), 0.5, 1.0)
    schedule_ms = percentiles_ms(column(counted, "schedule_ns"))
    assert schedule_ms is not None
    return EngineFigures(
        engines=len(times),
        steps=counted.num_rows,
        busy_ms=busy_ns / 1e6,
        overhead_share=sum(each.overhead_ns for each in times) / busy_ns if busy_ns else 0.0,
        schedule_ms=schedule_ms,
        update_ms=percentiles_ms(column(counted, "update_ns")),
        execute_ms=percentiles_ms(column(counted, "execute_ns")),
        between_ms=percentiles_ms(pa.concat_arrays([each.between_ns for each in times])),
        queue_ms=percentiles_ms(column(steady if steady.num_rows else served, "queue_ns")),
        running_p50=int(running[0]),
        running_max=int(running[1]),
        waiting_p50=int(waiting[0]),
        waiting_max=int(waiting[1]),
        kv_usage_p50=usage[0] if usage else None,
        kv_usage_max=usage[1] if usage else None,
        preemptions=total(column(own, "preempted")),
        over_time=tuple(_over_time(counted)),
    )


def step_keys(rank: pa.Array, step: pa.Array) -> pa.Array:
    """One number for a step of an engine, from its rank and its own number."""
    return pc.add(pc.multiply(rank, scalar(1 << 40, pa.int64())), step)


def _disturbed(steps: pa.Table, passes: pa.Table, primary: Primary) -> pa.Array:
    """Which steps were a warm-up, or ran under a costly collector, as their passes say."""
    mine = passes.select(["rank", "step", "model_id", "role", "warmup", "profiled"]).filter(
        pc.and_(
            named(names(passes, "model_id"), primary.model_id),
            named(names(passes, "role"), *primary.roles),
        )
    )
    odd = pc.or_(column(mine, "profiled"), pc.is_valid(column(mine, "warmup")))
    keys = step_keys(int_column(mine, "rank"), int_column(mine, "step")).filter(odd)
    return pc.is_in(step_keys(int_column(steps, "rank"), int_column(steps, "step")), value_set=keys)


def _engines(steps: pa.Table, requests: pa.Table) -> Iterator[tuple[pa.Table, pa.Table]]:
    """The steps of each engine in order, with the requests of its rank."""
    rank = int_column(steps, "rank")
    width = scalar(1 << 20, pa.int64())
    order, runs = groups(pc.add(pc.multiply(rank, width), int_column(steps, "engine")))
    ranks = int_column(requests, "rank")
    for key, begin, length in runs:
        own = steps.take(order.slice(begin, length)).sort_by("start_ns")
        yield own, requests.filter(pc.equal(ranks, scalar(key >> 20, pa.int64())))


@dataclass(frozen=True, slots=True)
class _Times:
    """Where the time of an engine went.

    Attributes:
        busy_ns: There was a request to serve.
        overhead_ns: That of it in which no step executed.
        between_ns: From the end of each step to the begin of the next, where a request was there all the time; else
            null.
    """

    busy_ns: int
    overhead_ns: int
    between_ns: pa.Array


def _times(steps: pa.Table, requests: pa.Table) -> _Times:
    start = column(steps, "start_ns")
    begin = pc.add(start, column(steps, "schedule_ns"))
    done = pc.add(begin, pc.fill_null(column(steps, "execute_ns"), scalar(0, pa.int64())))
    end = pc.add(done, pc.fill_null(column(steps, "update_ns"), scalar(0, pa.int64())))
    zero, none = scalar(0, pa.int64()), scalar(None, pa.int64())
    # Up to where some step before has executed, and before the next executes nothing did.
    reach = pc.cumulative_max(done)
    bare = pc.max_element_wise(pc.subtract(next_of(begin), reach), zero, skip_nulls=False)
    present = pc.greater(_present(end, requests), zero)
    between = pc.subtract(next_of(start), end)
    # Steps that overlap have nothing between them; those that were left out would count as time between.
    follows = pc.equal(pc.subtract(next_of(column(steps, "step")), column(steps, "step")), _ONE)
    apart = pc.and_(follows, pc.greater(between, zero))
    idle = pc.if_else(pc.and_(apart, pc.invert(present)), between, zero)
    bare = pc.if_else(pc.fill_null(follows, scalar(False, pa.bool_())), bare, zero)
    overhead = total(bare) - total(idle)
    lead = total(column(steps, "schedule_ns").slice(0, 1)) + total(
        column(steps, "update_ns").slice(max(steps.num_rows - 1, 0))
    )
    executing = _union_ns(begin, done)
    overhead += lead
    return _Times(
        busy_ns=executing + overhead,
        overhead_ns=overhead,
        between_ns=pc.if_else(pc.and_(apart, present), between, none),
    )


_ONE = scalar(1, pa.int64())


def _union_ns(begin: pa.Array, end: pa.Array) -> int:
    """The time that intervals cover together; they are in the order of their begins."""
    reach = pc.cumulative_max(end)
    before = pa.concat_arrays([begin.slice(0, 1), reach.slice(0, max(len(reach) - 1, 0))])
    gain = pc.subtract(end, pc.max_element_wise(begin, before))
    return total(pc.max_element_wise(gain, scalar(0, pa.int64())))


def _present(times: pa.Array, requests: pa.Table) -> pa.Array:
    """How many requests are there at each time: arrived, and not ended yet."""
    arrivals = column(requests, "arrival_ns")
    ends = column(requests, "finished_ns").drop_null()
    moments = pa.concat_arrays([times, ends, arrivals])
    # At the same moment: who ends, then who asks, then who comes.
    kinds = to_column([1] * len(times) + [0] * len(ends) + [2] * len(arrivals), pa.int64())
    changes = to_column([0] * len(times) + [-1] * len(ends) + [1] * len(arrivals), pa.int64())
    order = pc.sort_indices(
        pa.table([moments, kinds], names=["moment", "kind"]),
        sort_keys=[("moment", "ascending"), ("kind", "ascending")],
    )
    counts = pc.cumulative_sum(changes.take(order))
    # Back to the order in which they were asked.
    return counts.take(pc.sort_indices(order)).slice(0, len(times))


def _over_time(steps: pa.Table) -> Iterator[Load]:
    """The load in stretches of equal length; those without a step are left out."""
    start = column(steps, "start_ns")
    first, last = pc.min(start).as_py(), pc.max(start).as_py()
    length = max((last - first) // _STRETCHES + 1, 1)
    stretch = pc.divide(pc.subtract(start, scalar(first, pa.int64())), scalar(length, pa.int64()))
    order, runs = groups(stretch)
    values = {
        name: as_float(column(steps, name)).take(order)
        for name in ("running", "waiting", "kv_usage")
    }
    for number, begin, count in runs:
        means = {name: pc.mean(found.slice(begin, count)).as_py() for name, found in values.items()}
        yield Load(number * length / 1e6, means["running"], means["waiting"], means["kv_usage"])
