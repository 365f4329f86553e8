"""Small Arrow helpers that the analyzers share: plain columns, statistics, interval sums. No loop over rows.

A reader may hand over chunked or dictionary-encoded columns; everything here works on plain contiguous arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.results import Percentiles

_INT64_LIMIT = 2**63 - 1


def plain(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One contiguous array, dictionaries decoded."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = pc.cast(values, values.type.value_type)
    return values


def column(table: pa.Table, name: str) -> pa.Array:
    """A column of a table as one contiguous array."""
    return plain(table.column(name))


def int_column(table: pa.Table, name: str) -> pa.Array:
    """As :func:`column`, as int64 (a partition column may be narrower, or a dictionary)."""
    return pc.cast(column(table, name), pa.int64())


def as_float(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """As float64; whole numbers above 2**53 (a prefill of 9 PFLOP) lose their last digits instead of failing."""
    return pc.cast(values, pa.float64(), safe=False)


def total(values: pa.Array) -> int:
    """The sum of an integer array, 0 if it is empty or all null."""
    result = pc.sum(_summable(values)).as_py()
    return 0 if result is None else int(result)


def summable(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """The table with those of its integer columns as float64 whose int64 sum could overflow.

    Seconds of prefill at a petaFLOP/s and a million passes leave the range of int64; float64 keeps 15 digits of the
    sum, which is more than any figure shows.
    """
    for name in names:
        values = table.column(name)
        safe = _summable(values)
        if safe is not values:
            table = table.set_column(table.schema.get_field_index(name), name, safe)
    return table


def _summable(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if not pa.types.is_integer(values.type) or len(values) == values.null_count:
        return values
    largest = pc.max(pc.abs(values)).as_py()
    return as_float(values) if largest * len(values) > _INT64_LIMIT else values


def nearest_rank(ordered: pa.Array, share: float) -> float:
    """The nearest-rank percentile of a sorted, non-empty array without nulls: its ceil(share x n)-th value."""
    n = len(ordered)
    # In whole percent, so that 0.9 x 10 is 9 and not a bit more.
    rank = -(-round(share * 100) * n // 100)
    return float(ordered[max(rank, 1) - 1].as_py())


def ordered(values: pa.Array) -> pa.Array:
    """The values in ascending order, without nulls."""
    values = values.drop_null()
    return values.take(pc.sort_indices(values))


def percentiles_ms(values_ns: pa.Array) -> Percentiles | None:
    """p50, p90 and p99 of times in ns, in ms; None without any."""
    values = ordered(values_ns)
    if len(values) == 0:
        return None
    return Percentiles(
        count=len(values),
        p50=nearest_rank(values, 0.50) / 1e6,
        p90=nearest_rank(values, 0.90) / 1e6,
        p99=nearest_rank(values, 0.99) / 1e6,
    )


def first_request(slices: pa.ChunkedArray) -> pa.Array:
    """A number for the request of each pass's first sequence; null where a pass has no slices.

    Only the offsets of the nested column and one of its children are touched.
    """
    chunks = [_first_of_chunk(chunk) for chunk in slices.chunks]
    if not chunks:
        return pa.array([], pa.int32())
    return pa.chunked_array(chunks).combine_chunks().dictionary_encode().indices


def _first_of_chunk(chunk: pa.Array) -> pa.Array:
    requests = plain(chunk.values.field("request_id"))
    starts = chunk.offsets[:-1]
    filled = pc.greater(pc.fill_null(pc.list_value_length(chunk), 0), 0)
    return requests.take(pc.if_else(filled, starts, pa.scalar(None, starts.type)))


def next_of(values: pa.Array) -> pa.Array:
    """Each row's next value; the last row has null."""
    if len(values) == 0:
        return values
    return pa.concat_arrays([values.slice(1), pa.nulls(1, values.type)])
