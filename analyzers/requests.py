"""Latencies of requests: time to first token, time per output token, inter-token latency.

A request's row is written when it ends. What a killed run left without a row is rebuilt from the slices of its passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import (
    column,
    counts,
    int_column,
    named,
    names,
    next_of,
    percentiles_ms,
    plain,
    scalar,
    total,
)
from phaseprof.analyzers.gaps import ends_ns
from phaseprof.analyzers.results import RequestFigures
from phaseprof.records import Finish, Warmup
from phaseprof.trace.columns import to_column

_SHAPE = pa.schema(
    [
        pa.field("prompt_tokens", pa.int64()),
        pa.field("output_tokens", pa.int64()),
        pa.field("ttft_ns", pa.int64()),
        pa.field("tpot_ns", pa.int64()),
        pa.field("itl_ns", pa.list_(pa.int64())),
        pa.field("finish", pa.string()),
        pa.field("warm", pa.bool_()),
        pa.field("slowed", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class RequestAnalysis:
    """The figures, and what has to be said of them.

    Attributes:
        figures: The latencies.
        rebuilt: Requests that have no row and were rebuilt from their passes. Their time to first token begins with
            their first pass, for nothing tells when they arrived.
        unsteady: Why none of the requests is steady, so that all are counted for want of others: "were warm-up",
            "ran under a collector". Empty if some are steady.
        set_aside: Requests that are not counted: warm-up, or a collector slowed one of their passes.
        counted: One row each of the requests that are: ``ttft_ns``, ``tpot_ns``, ``itl_ns`` and what else the figures
            are made from.
    """

    figures: RequestFigures
    rebuilt: int
    unsteady: str
    set_aside: int
    counted: pa.Table = field(repr=False, compare=False)


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
    rows = _recorded(requests, passes, model_id)
    rebuilt = 0
    if cut_off:
        found = _rebuild(requests, passes, model_id)
        rebuilt = found.num_rows
        rows = pa.concat_tables([rows, found])
    quick = _without(rows, "slowed")
    counted = _without(quick, "warm")
    unsteady = ""
    if counted.num_rows == 0 and rows.num_rows > 0:
        counted = quick if quick.num_rows else rows
        unsteady = "were warm-up" if quick.num_rows else "ran under a collector"
        if rows.num_rows > quick.num_rows > 0:
            unsteady += " or ran under a collector"
    finish = names(counted, "finish")
    return RequestAnalysis(
        figures=RequestFigures(
            count=counted.num_rows,
            unfinished=finish.null_count,
            aborted=counts(finish).get(Finish.ABORT, 0),
            prompt_tokens=total(column(counted, "prompt_tokens")),
            output_tokens=total(column(counted, "output_tokens")),
            ttft_ms=percentiles_ms(column(counted, "ttft_ns")),
            tpot_ms=percentiles_ms(column(counted, "tpot_ns")),
            itl_ms=percentiles_ms(_flat(counted.column("itl_ns"))),
        ),
        rebuilt=rebuilt,
        unsteady=unsteady,
        set_aside=rows.num_rows - counted.num_rows,
        counted=counted,
    )


def _flat(lists: pa.ChunkedArray) -> pa.ChunkedArray:
    """What is in the lists; nothing is copied."""
    return pa.chunked_array([chunk.flatten() for chunk in lists.chunks], lists.type.value_type)


def _without(rows: pa.Table, flag: str) -> pa.Table:
    """The rows without those that are flagged; nothing is copied where none is."""
    flags = column(rows, flag)
    return rows.filter(pc.invert(flags)) if pc.any(flags).as_py() else rows


def _recorded(requests: pa.Table, passes: pa.Table, model_id: str) -> pa.Table:
    """The rows of the model's requests. A request is slowed if one of its passes ran under a collector."""
    mine = named(names(requests, "model_id"), model_id)
    own = requests if pc.all(mine).as_py() else requests.filter(mine)
    columns = [
        *(own.column(name) for name in ("prompt_tokens", "output_tokens", "ttft_ns", "tpot_ns")),
        own.column("itl_ns").cast(pa.list_(pa.int64())),
        plain(own.column("finish")),
        own.column("warmup").is_valid(),
        pc.is_in(own.column("request_id"), value_set=_slowed(passes)),
    ]
    return pa.table(columns, schema=_SHAPE)


def _slowed(passes: pa.Table) -> pa.Array:
    """The requests of the passes that ran under a collector."""
    found = [to_column((), pa.string())]
    for batch in passes.select(["profiled", "slices"]).to_batches():
        if pc.any(batch.column("profiled")).as_py():
            lists = batch.column("slices").filter(batch.column("profiled"))
            found.append(plain(pc.list_flatten(lists).field("request_id")).unique())
    return pa.concat_arrays(found).unique()


def _rebuild(requests: pa.Table, passes: pa.Table, model_id: str) -> pa.Table:
    """Requests without a row, from the slices of their passes.

    A pass that reaches the end of the prompt yields one token for each of the request's sequences in it. (Drafted
    tokens that a pass accepted are not in its slices, so that with speculation the output is a lower bound.)
    """
    slices = _slices_without_row(requests, passes, model_id)
    if slices.num_rows == 0:
        return pa.table([to_column((), field.type) for field in _SHAPE], schema=_SHAPE)
    steps = _steps(slices, passes)
    found = steps.group_by("request").aggregate(
        [
            ("start_ns", "min"),
            ("prompt", "max"),
            ("tokens", "sum"),
            ("sequences", "max"),
            ("token_ns", "min"),
            ("token_ns", "max"),
            ("gap_ns", "list"),
            ("warm", "max"),
            ("slowed", "max"),
        ]
    )
    first_ns, last_ns = column(found, "token_ns_min"), column(found, "token_ns_max")
    later = pc.subtract(pc.divide(column(found, "tokens_sum"), column(found, "sequences_max")), 1)
    later = pc.if_else(pc.greater(later, 0), later, pa.scalar(None, pa.int64()))
    columns = [
        column(found, "prompt_max"),
        column(found, "tokens_sum"),
        pc.subtract(first_ns, column(found, "start_ns_min")),
        pc.divide(pc.subtract(last_ns, first_ns), later),
        column(found, "gap_ns_list"),
        pa.nulls(found.num_rows, pa.string()),
        column(found, "warm_max"),
        column(found, "slowed_max"),
    ]
    return pa.table(columns, schema=_SHAPE)


def _slices_without_row(requests: pa.Table, passes: pa.Table, model_id: str) -> pa.Table:
    """The slices of requests without a row: ``request`` (a name), ``pass_row``, ``past``, ``query``, ``prompt``.

    Nearly all of the slices are of requests that have a row, so they are looked at part by part, and name by name.
    """
    rows = passes.select(["model_id", "error", "slices"])
    batches = [batch for batch in rows.to_batches() if batch.num_rows]
    named_by = [_requests_of(batch) for batch in batches]
    all_names = pa.concat_arrays([to_column((), pa.string()), *(n.dictionary for n in named_by)])
    lacking = pc.invert(pc.is_in(all_names, value_set=column(requests, "request_id")))
    found = [pa.table([to_column((), field.type) for field in _SLICES], schema=_SLICES)]
    first_name = first_row = 0
    for batch, ids in zip(batches, named_by, strict=True):
        lacks = lacking.slice(first_name, len(ids.dictionary))
        if pc.any(lacks).as_py():
            found.append(_wanted_slices(batch, ids, lacks.take(ids.indices), first_row, model_id))
        first_name += len(ids.dictionary)
        first_row += batch.num_rows
    return pa.concat_tables(found)


_SLICES = pa.schema(
    [
        pa.field("request", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("pass_row", "past", "query", "prompt")),
    ]
)


def _requests_of(batch: pa.RecordBatch) -> pa.DictionaryArray:
    ids = pc.list_flatten(batch.column("slices")).field("request_id")
    return ids if pa.types.is_dictionary(ids.type) else ids.dictionary_encode()


def _wanted_slices(
    batch: pa.RecordBatch, ids: pa.DictionaryArray, lacks: pa.Array, first_row: int, model_id: str
) -> pa.Table:
    """Those slices of a part that are of the model, of a pass without error, and whose request lacks a row."""
    table = pa.Table.from_batches([batch])
    mine = pc.and_(
        named(names(table, "model_id"), model_id), pc.invert(pc.is_valid(batch.column("error")))
    )
    lists = batch.column("slices")
    pass_row, slices = pc.list_parent_indices(lists), pc.list_flatten(lists)
    wanted = pc.and_(mine.take(pass_row), lacks)
    return pa.table(
        [
            plain(ids.filter(wanted)),
            pc.add(pc.cast(pass_row.filter(wanted), pa.int64()), scalar(first_row, pa.int64())),
            *(
                pc.cast(slices.field(part).filter(wanted), pa.int64())
                for part in ("past", "query", "prompt")
            ),
        ],
        schema=_SLICES,
    )


def _steps(slices: pa.Table, passes: pa.Table) -> pa.Table:
    """One row for each request and each of its passes, by request and then by time.

    Columns: ``request`` (a number; each rank of a split model has its own), ``start_ns``, ``prompt``, ``tokens`` that
    it yields, ``sequences``, ``token_ns`` (its end if it yields a token, else null), ``gap_ns`` (time until the
    next token), ``warm`` and ``slowed``.
    """
    pass_row = column(slices, "pass_row")
    rank = column(passes, "rank").dictionary_encode()
    # Numbers in place of names: they group and sort many times faster.
    request = pc.add(
        pc.multiply(pc.cast(names(slices, "request").indices, pa.int64()), len(rank.dictionary)),
        rank.indices.take(pass_row),
    )
    past, query, prompt = (column(slices, part) for part in ("past", "query", "prompt"))
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
        ends_ns(passes).take(pass_row),
        pa.scalar(None, pa.int64()),
    )
    # Only what the user called a warm-up makes a request one: a first or compiling pass may belong to one that counts.
    warm = named(names(passes, "warmup"), Warmup.REQUESTED)
    return (
        steps.append_column("request", request)
        .append_column("start_ns", int_column(passes, "start_ns").take(pass_row))
        .append_column("token_ns", token_ns)
        .append_column("gap_ns", _until_next_token(request, token_ns))
        .append_column("warm", warm.take(pass_row))
        .append_column("slowed", column(passes, "profiled").take(pass_row))
    )


def _until_next_token(request: pa.Array, token_ns: pa.Array) -> pa.Array:
    """Time from each token of a request to its next; null for its last one, and where a pass yields none."""
    yields = pc.is_valid(token_ns)
    tokens, owners = token_ns.filter(yields), request.filter(yields)
    same = pc.equal(owners, next_of(owners))
    gap = pc.if_else(same, pc.subtract(next_of(tokens), tokens), pa.scalar(None, pa.int64()))
    return pc.replace_with_mask(token_ns, yields, gap)
