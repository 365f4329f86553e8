"""Latencies of requests: time to first token, time per output token, inter-token latency.

A request's row is written when it ends. What a killed run left without a row is rebuilt from the slices of its passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import (
    column,
    int_column,
    next_of,
    percentiles_ms,
    plain,
    total,
)
from phaseprof.analyzers.results import RequestFigures
from phaseprof.records import Finish, Warmup

_SHAPE = pa.schema(
    [
        pa.field("prompt_tokens", pa.int64()),
        pa.field("output_tokens", pa.int64()),
        pa.field("ttft_ns", pa.int64()),
        pa.field("tpot_ns", pa.int64()),
        pa.field("finish", pa.string()),
        pa.field("warmup", pa.string()),
    ]
)
_ITL_SHAPE = pa.schema([pa.field("itl_ns", pa.int64()), pa.field("warmup", pa.string())])


@dataclass(frozen=True, slots=True)
class RequestAnalysis:
    """The figures, and what has to be said of them.

    Attributes:
        figures: The latencies.
        rebuilt: Requests that have no row and were rebuilt from their passes. Their time to first token begins with
            their first pass, for nothing tells when they arrived.
        only_warmup: All requests are warm-up; they are counted for want of others.
        set_aside: Warm-up requests that are not counted.
    """

    figures: RequestFigures
    rebuilt: int
    only_warmup: bool
    set_aside: int


def analyze_requests(
    requests: pa.Table, passes: pa.Table, model_id: str, *, cut_off: bool
) -> RequestAnalysis:
    """The latencies of a model's requests.

    Args:
        requests: The `requests` table.
        passes: The `passes` table.
        model_id: Whose requests.
        cut_off: Whether rows may be missing (a process was killed, a part could not be read). Only then are the
            slices of all passes read.
    """
    own = requests.filter(pc.equal(column(requests, "model_id"), model_id))
    rows = pa.table([column(own, name) for name in _SHAPE.names], schema=_SHAPE)
    found, found_itl = _SHAPE.empty_table(), _ITL_SHAPE.empty_table()
    if cut_off:
        found, found_itl = _rebuild(requests, passes, model_id)
        rows = pa.concat_tables([rows, found])
    steady = _steady(rows)
    only_warmup = steady.num_rows == 0 and rows.num_rows > 0
    counted = rows if only_warmup else steady
    if not only_warmup:
        own, found_itl = _steady(own), _steady(found_itl)
    itl_ns = pa.concat_arrays([pc.list_flatten(column(own, "itl_ns")), column(found_itl, "itl_ns")])
    finish = column(counted, "finish")
    return RequestAnalysis(
        figures=RequestFigures(
            count=counted.num_rows,
            unfinished=finish.null_count,
            aborted=total(pc.cast(pc.equal(finish, Finish.ABORT), pa.int64())),
            prompt_tokens=total(column(counted, "prompt_tokens")),
            output_tokens=total(column(counted, "output_tokens")),
            ttft_ms=percentiles_ms(column(counted, "ttft_ns")),
            tpot_ms=percentiles_ms(column(counted, "tpot_ns")),
            itl_ms=percentiles_ms(itl_ns),
        ),
        rebuilt=found.num_rows,
        only_warmup=only_warmup,
        set_aside=rows.num_rows - counted.num_rows,
    )


def _steady(rows: pa.Table) -> pa.Table:
    """The rows without a mark of warm-up."""
    return rows.filter(pc.is_null(column(rows, "warmup")))


def _rebuild(requests: pa.Table, passes: pa.Table, model_id: str) -> tuple[pa.Table, pa.Table]:
    """Requests without a row, from the slices of their passes, and their inter-token latencies.

    A pass that reaches the end of the prompt yields one token for each of the request's sequences in it. (Drafted
    tokens that a pass accepted are not in its slices, so that with speculation the output is a lower bound.)
    """
    steps = _steps_without_row(requests, passes, model_id)
    found = steps.group_by("request").aggregate(
        [
            ("start_ns", "min"),
            ("prompt", "max"),
            ("tokens", "sum"),
            ("sequences", "max"),
            ("token_ns", "min"),
            ("token_ns", "max"),
            ("requested", "max"),
        ]
    )
    first_ns, last_ns = column(found, "token_ns_min"), column(found, "token_ns_max")
    later = pc.subtract(pc.divide(column(found, "tokens_sum"), column(found, "sequences_max")), 1)
    later = pc.if_else(pc.greater(later, 0), later, pa.scalar(None, pa.int64()))
    rows = pa.table(
        [
            column(found, "prompt_max"),
            column(found, "tokens_sum"),
            pc.subtract(first_ns, column(found, "start_ns_min")),
            pc.divide(pc.subtract(last_ns, first_ns), later),
            pa.nulls(found.num_rows, pa.string()),
            _warmup(column(found, "requested_max")),
        ],
        schema=_SHAPE,
    )
    return rows, _rebuilt_itl(steps)


def _steps_without_row(requests: pa.Table, passes: pa.Table, model_id: str) -> pa.Table:
    """One row for each request without a row and each of its passes, by request and then by time.

    Columns: ``request`` (a number; each rank of a split model has its own), ``start_ns``, ``prompt``, ``tokens`` that
    it yields, ``sequences``, ``token_ns`` (its end if it yields a token, else null), ``requested`` (1 in a warm-up).
    """
    mine = pc.and_(
        pc.equal(column(passes, "model_id"), model_id), pc.is_null(column(passes, "error"))
    )
    lists = column(passes, "slices")
    pass_row, slices = pc.list_parent_indices(lists), pc.list_flatten(lists)
    # Numbers in place of names: they group and sort many times faster.
    name = plain(slices.field("request_id")).dictionary_encode()
    has_row = pc.is_in(name.dictionary, value_set=column(requests, "request_id").unique())
    wanted = pc.and_(mine.take(pass_row), pc.invert(has_row.take(name.indices)))
    pass_row = pass_row.filter(wanted)
    rank = column(passes, "rank").dictionary_encode()
    request = pc.add(
        pc.multiply(pc.cast(name.indices.filter(wanted), pa.int64()), len(rank.dictionary)),
        rank.indices.take(pass_row),
    )
    past, query, prompt = (
        plain(slices.field(part)).filter(wanted) for part in ("past", "query", "prompt")
    )
    order = pc.sort_indices(column(passes, "start_ns"))
    flat = pa.table(
        {
            # A request's passes in the order of time: one number sorts by both.
            "key": pc.add(
                pc.multiply(request, passes.num_rows), pc.sort_indices(order).take(pass_row)
            ),
            "token": pc.cast(pc.greater_equal(pc.add(past, query), prompt), pa.int64()),
            "prompt": prompt,
        }
    )
    steps = flat.group_by("key").aggregate(
        [("token", "sum"), ("token", "count"), ("prompt", "max")]
    )
    steps = steps.rename_columns(["key", "tokens", "sequences", "prompt"]).sort_by("key")
    return _with_times(steps, passes, order)


def _with_times(steps: pa.Table, passes: pa.Table, order: pa.Array) -> pa.Table:
    """Split the key of each step into request and pass, and add the times of the pass."""
    key = column(steps, "key")
    request = pc.divide(key, passes.num_rows)
    pass_row = order.take(pc.subtract(key, pc.multiply(request, passes.num_rows)))
    token_ns = pc.if_else(
        pc.greater(column(steps, "tokens"), 0),
        int_column(passes, "end_ns").take(pass_row),
        pa.scalar(None, pa.int64()),
    )
    # Only what the user called a warm-up makes a request one: a first or compiling pass may belong to one that counts.
    requested = pc.fill_null(pc.equal(column(passes, "warmup"), Warmup.REQUESTED), False)
    return (
        steps.append_column("request", request)
        .append_column("start_ns", int_column(passes, "start_ns").take(pass_row))
        .append_column("token_ns", token_ns)
        .append_column("requested", pc.cast(requested, pa.int64()).take(pass_row))
    )


def _rebuilt_itl(steps: pa.Table) -> pa.Table:
    """Times between the passes of a request that yielded a token, with the mark of their request."""
    rows = steps.filter(pc.is_valid(steps["token_ns"]))
    request, token_ns = column(rows, "request"), column(rows, "token_ns")
    same = pc.equal(request, next_of(request))
    gap = pc.if_else(same, pc.subtract(next_of(token_ns), token_ns), pa.scalar(None, pa.int64()))
    table = pa.table([gap, _warmup(column(rows, "requested"))], schema=_ITL_SHAPE)
    return table.filter(pc.is_valid(gap))


def _warmup(requested: pa.Array) -> pa.Array:
    """The mark of a requested warm-up where the flag is set, else null."""
    return pc.if_else(
        pc.greater(requested, 0), Warmup.REQUESTED.value, pa.scalar(None, pa.string())
    )
