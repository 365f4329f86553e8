"""The Arrow helpers of the analyzers, against plain Python over the same values."""

from __future__ import annotations

import math
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.analyzers.columns import (
    counts,
    first_request,
    groups,
    named,
    names,
    nearest_ranks,
    scalar,
)

TEXT = st.sampled_from(["a", "b", "c", None])


def table(chunks: list[list[str | None]], kind: pa.DataType) -> pa.Table:
    """A column of names in chunks, each with a dictionary of its own where that is the type."""
    parts = [pa.array(chunk, pa.string()) for chunk in chunks]
    if pa.types.is_dictionary(kind):
        parts = [part.dictionary_encode() for part in parts]
    return pa.table({"x": pa.chunked_array(parts, kind)})


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
@given(chunks=st.lists(st.lists(TEXT, max_size=6), max_size=4))
def test_names(kind: pa.DataType, chunks: list[list[str | None]]) -> None:
    flat = [value for chunk in chunks for value in chunk]
    found = names(table(chunks, kind), "x")
    assert found.to_pylist() == flat
    assert named(found, "a", "c").to_pylist() == [value in ("a", "c") for value in flat]
    assert counts(found) == Counter(value for value in flat if value is not None)


@given(st.lists(st.integers(-3, 3), max_size=20))
def test_groups_hold_each_row_once_and_in_order(keys: list[int]) -> None:
    order, runs = groups(pa.array(keys, pa.int64()))
    rows = order.to_pylist()
    found = {key: rows[begin : begin + length] for key, begin, length in runs}
    assert found == {
        key: [row for row, value in enumerate(keys) if value == key] for key in set(keys)
    }


@given(
    st.lists(st.lists(st.one_of(st.none(), st.integers(-(2**62), 2**62)), max_size=9), min_size=1),
    st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_nearest_ranks(chunks: list[list[int | None]], share: float) -> None:
    values = pa.chunked_array([pa.array(chunk, pa.int64()) for chunk in chunks])
    known = sorted(value for chunk in chunks for value in chunk if value is not None)
    place = max(math.ceil(round(share * 100) * len(known) / 100), 1) - 1
    assert nearest_ranks(values, share) == ((float(known[place]),) if known else ())


@pytest.mark.parametrize("encoded", [False, True])
def test_the_first_request_of_a_pass(encoded: bool) -> None:
    """Two chunks whose dictionaries begin with different names, passes without slices, and a slice of the column."""
    chunks = []
    for lists in ([["b", "a"], [], ["a"]], [["a"], None, ["b", "c"], ["c"]]):
        items = pa.array([name for one in lists for name in one or []], pa.string())
        structs = pa.StructArray.from_arrays(
            [items.dictionary_encode() if encoded else items], ["request_id"]
        )
        ends, mask = [0], [one is None for one in lists]
        for one in lists:
            ends.append(ends[-1] + len(one or []))
        offsets = pa.array(ends, pa.int32())
        chunks.append(pa.ListArray.from_arrays(offsets, structs, mask=pa.array(mask)))
    column = pa.chunked_array(chunks)
    expected = ["b", None, "a", "a", None, "b", "c"]
    for begin in range(8):
        found = first_request(column.slice(begin)).to_pylist()
        wanted = expected[begin:]
        assert [one is None for one in found] == [one is None for one in wanted]
        for i, number in enumerate(found):
            assert [number == other for other in found] == [wanted[i] == w for w in wanted]


@pytest.mark.parametrize(
    ("value", "kind"), [(3, pa.int32()), ("x", pa.string()), (True, pa.bool_()), (None, pa.int64())]
)
def test_scalars(value: object, kind: pa.DataType) -> None:
    assert scalar(value, kind).equals(pa.scalar(value, kind))
