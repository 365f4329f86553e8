"""Small Arrow helpers that the analyzers share: plain columns, names, groups, statistics. No loop over rows.

A reader may hand over chunked or dictionary-encoded columns; what is called a column here is plain and contiguous, and
what is called names stays a dictionary: a comparison then looks at each name once.

`pyarrow.array`, `pyarrow.scalar`, Python values as arguments of compute functions, `group_by` and `join` import pandas
where it is installed, which takes longer than to report on a million passes: the helpers here do without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.results import Percentiles
from phaseprof.trace.columns import to_column

_INT64_LIMIT = 2**63 - 1
#: Rows that are worked on at a time.
_ROWS = 32_768


def plain(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One contiguous array, dictionaries decoded."""
    if isinstance(values, pa.ChunkedArray):
        values = _combined(values)
    if pa.types.is_dictionary(values.type):
        values = pc.cast(values, values.type.value_type)
    return values


def parts(table: pa.Table) -> Iterator[pa.Table]:
    """The rows a part at a time: what is worked out for each of them then never fills the memory."""
    for begin in range(0, table.num_rows, _ROWS):
        yield table.slice(begin, _ROWS)


def column(table: pa.Table, name: str) -> pa.Array:
    """A column of a table as one contiguous array."""
    return plain(table.column(name))


def int_column(table: pa.Table, name: str) -> pa.Array:
    """As :func:`column`, as int64 (a partition column may be narrower, or a dictionary)."""
    return pc.cast(column(table, name), pa.int64())


def scalar(value: Any, kind: pa.DataType) -> pa.Scalar:
    """A scalar of one of the schema's types, or a null of any."""
    if value is None:
        return pa.nulls(1, kind)[0]
    return to_column([value], kind)[0]


def names(table: pa.Table, name: str) -> pa.DictionaryArray:
    """A column of names as one dictionary array."""
    values = table.column(name)
    if not pa.types.is_dictionary(values.type):
        return _combined(values).dictionary_encode()
    return _combined(values.unify_dictionaries())


def _combined(values: pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if values.num_chunks else pa.nulls(0, values.type)


def named(values: pa.DictionaryArray, *wanted: str) -> pa.BooleanArray:
    """Whether each value is one of some names; a null is none."""
    flags = pc.is_in(values.dictionary, value_set=to_column(wanted, pa.string()))
    return pc.fill_null(flags.take(values.indices), scalar(False, pa.bool_()))


def unsteady(requests: pa.Table) -> pa.BooleanArray:
    """Which requests are warm-up, or had a pass under a costly collector."""
    slowed = pc.fill_null(column(requests, "profiled"), scalar(False, pa.bool_()))
    return pc.or_(slowed, pc.is_valid(column(requests, "warmup")))


def counts(values: pa.DictionaryArray) -> dict[str, int]:
    """How often each name occurs."""
    known = values.dictionary.to_pylist()
    found = pc.value_counts(values.indices.drop_null())
    occurrences = zip(
        found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True
    )
    return {known[place]: count for place, count in occurrences}


def groups(key: pa.Array) -> tuple[pa.Array, Iterator[tuple[int, int, int]]]:
    """Sort rows by an integer key without nulls.

    Returns:
        The order of the rows, and for each value of the key where its rows lie in it: value, begin, length.
    """
    order = pc.sort_indices(key)
    runs = pc.run_end_encode(key.take(order))
    ends = runs.run_ends.to_pylist()
    return order, (
        (value, begin, end - begin)
        for value, begin, end in zip(runs.values.to_pylist(), [0, *ends], ends, strict=False)
    )


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


def nearest_ranks(values: pa.Array | pa.ChunkedArray, *shares: float) -> tuple[float, ...]:
    """Nearest-rank percentiles: of n values in order, nulls left out, the ceil(share x n)-th. Empty without any.

    The values are not sorted, which would take a multiple of their memory.
    """
    n = len(values) - values.null_count
    if n == 0:
        return ()
    # In whole percent, so that 0.9 x 10 is 9 and not a bit more.
    ranks = [max(-(-round(share * 100) * n // 100), 1) for share in shares]
    at = [(rank - 1) / max(n - 1, 1) for rank in ranks]
    found = pc.quantile(values, q=at, interpolation="nearest")
    return tuple(float(value) for value in found.to_pylist())


def percentiles_ms(values_ns: pa.Array | pa.ChunkedArray) -> Percentiles | None:
    """p50, p90 and p99 of times in ns, in ms; None without any."""
    found = nearest_ranks(values_ns, 0.50, 0.90, 0.99)
    if not found:
        return None
    p50, p90, p99 = (value / 1e6 for value in found)
    return Percentiles(count=len(values_ns) - values_ns.null_count, p50=p50, p90=p90, p99=p99)


def first_request(slices: pa.ChunkedArray) -> pa.Array:
    """A number for the request of each pass's first sequence; null where a pass has no slices.

    Only the offsets of the nested column and one of its children are touched.
    """
    if not slices.num_chunks:
        return to_column((), pa.int32())
    first = [_first_of_chunk(chunk) for chunk in slices.chunks]
    return pa.chunked_array(first).unify_dictionaries().combine_chunks().indices


def _first_of_chunk(chunk: pa.Array) -> pa.DictionaryArray:
    requests = chunk.values.field("request_id")
    filled = pc.greater(pc.list_value_length(chunk), scalar(0, pa.int32()))
    starts = chunk.offsets[: len(chunk)]
    found = requests.take(pc.if_else(filled, starts, scalar(None, starts.type)))
    return found if pa.types.is_dictionary(found.type) else found.dictionary_encode()


def next_of(values: pa.Array) -> pa.Array:
    """Each row's next value; the last row has null."""
    if len(values) == 0:
        return values
    return pa.concat_arrays([values.slice(1), pa.nulls(1, values.type)])
