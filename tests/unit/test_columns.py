"""Arrow columns built from buffers: what goes in comes out, for every type of the schema."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.phases import Phase
from phaseprof.records import Slice
from phaseprof.schema import KERNELS, SLICE_TYPE, TABLES
from phaseprof.trace.columns import to_column
from phaseprof.trace.writer import to_arrow

SLICES = pa.list_(pa.field("item", SLICE_TYPE, nullable=False))
INTEGERS = pa.list_(pa.field("item", pa.int64(), nullable=False))

int64 = st.integers(-(2**63), 2**63 - 1)
int32 = st.integers(-(2**31), 2**31 - 1)
text = st.text(max_size=12)
slices = st.builds(
    Slice,
    text,
    st.sampled_from(Phase),
    *[int64] * 6,
    accepted=st.none() | int64,
)

#: Each type, and values of it that are no nulls.
TYPES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): int64,
    pa.int32(): int32,
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): text,
    INTEGERS: st.lists(int64, max_size=4).map(tuple),
    SLICES: st.lists(slices, max_size=3).map(tuple),
    SLICE_TYPE: slices,
}
NULLABLE = [kind for kind in TYPES if not pa.types.is_nested(kind)]


def plain(value: Any) -> Any:
    """A value as `to_pylist` gives it."""
    if isinstance(value, Slice):
        return value._asdict()
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def check(values: list[Any], kind: pa.DataType) -> None:
    column = to_column(values, kind)
    assert column.type == kind
    assert column.null_count == values.count(None)
    assert column.to_pylist() == [plain(value) for value in values]
    pa.Table.from_arrays([column], ["column"]).validate(full=True)


def test_every_type_of_the_schema_is_tried() -> None:
    assert {column.type for table in TABLES for column in table.columns} <= set(TYPES)


@pytest.mark.parametrize("kind", TYPES, ids=str)
@given(data=st.data())
def test_values_come_back(kind: pa.DataType, data: st.DataObject) -> None:
    check(data.draw(st.lists(TYPES[kind], max_size=20)), kind)


@pytest.mark.parametrize("kind", NULLABLE, ids=str)
@given(data=st.data())
def test_values_and_nulls_come_back(kind: pa.DataType, data: st.DataObject) -> None:
    check(data.draw(st.lists(st.none() | TYPES[kind], max_size=20)), kind)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2**63 - 1, -(2**63), -1, 0, None], pa.int64()),
        ([2**31 - 1, -(2**31), None], pa.int32()),
        ([float("inf"), -0.0, 5e-324, None], pa.float64()),
        # Nine flags: the second byte of the bitmap begins.
        ([True] * 8 + [False, True, None], pa.bool_()),
        ([None] * 9, pa.bool_()),
        (["", "é", "漢字", "🂡", "a\x00b", None], pa.string()),
        ([(), (1,), (), (-(2**63), 2)], INTEGERS),
        ([(), ()], SLICES),
        ([(1, 2), None, (), None, (3,)], INTEGERS),
    ],
    ids=str,
)
def test_the_edges_come_back(values: list[Any], kind: pa.DataType) -> None:
    check(values, kind)


def test_nan_comes_back() -> None:
    (value,) = to_column([float("nan")], pa.float64()).to_pylist()
    assert value != value


def test_enums_are_stored_by_value() -> None:
    assert to_column([Phase.MIXED, None], pa.string()).to_pylist() == ["mixed", None]


def test_text_that_is_no_unicode_is_replaced() -> None:
    """The name of a file may hold bytes that are no text: Python shows them as lone surrogates."""
    assert to_column(["a\udcffb"], pa.string()).to_pylist() == ["a?b"]


@pytest.mark.parametrize(
    ("value", "kind"), [(2**63, pa.int64()), (-(2**63) - 1, pa.int64()), (2**31, pa.int32())]
)
def test_an_integer_that_does_not_fit_is_refused(value: int, kind: pa.DataType) -> None:
    with pytest.raises(OverflowError):
        to_column([value], kind)


def test_a_fraction_is_no_integer() -> None:
    with pytest.raises(TypeError):
        to_column([1.5], pa.int64())


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="uint8"):
        to_column([1], pa.uint8())


def test_a_list_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="uint8"):
        to_column([[1]], pa.list_(pa.uint8()))


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.name)
def test_no_rows_are_a_table_too(spec: Any) -> None:
    table = to_arrow([], spec.arrow)
    table.validate(full=True)
    assert table.schema.equals(spec.arrow, check_metadata=True)
    assert len(table) == 0


class Colour(enum.StrEnum):
    """Any enum of text."""

    RED = "red"


@dataclass(frozen=True)
class Anything:
    """A row is read by attribute, whatever its class."""

    pass_id: int | None
    name: str
    device: str
    stream: int | None
    start_ns: int
    end_ns: int
    source: str
    launched_ns: int | None


def test_rows_become_a_table() -> None:
    rows = [
        Anything(None, "mm", Colour.RED, 3, 5, 7, "torch", 4),
        Anything(1, "", "x", None, 0, 0, "", None),
    ]
    table = to_arrow(iter(rows), KERNELS.arrow)  # type: ignore[arg-type]
    table.validate(full=True)
    assert table.to_pylist() == [
        {
            "pass_id": None,
            "name": "mm",
            "device": "red",
            "stream": 3,
            "start_ns": 5,
            "end_ns": 7,
            "source": "torch",
            "launched_ns": 4,
        },
        {
            "pass_id": 1,
            "name": "",
            "device": "x",
            "stream": None,
            "start_ns": 0,
            "end_ns": 0,
            "source": "",
            "launched_ns": None,
        },
    ]


def test_pandas_stays_out() -> None:
    """pandas is installed here, and neither building nor writing a table may import it."""
    pytest.importorskip("pandas")
    code = """
import json, sys, tempfile
from pathlib import Path
from rows import forward_pass
from phaseprof.records import Kernel
from phaseprof.schema import KERNELS
from phaseprof.trace.writer import TraceWriter, to_arrow

with tempfile.TemporaryDirectory() as folder:
    writer = TraceWriter(Path(folder) / "trace", rank=0, pid=1)
    for may_change in (True, False):
        writer.put_pass(forward_pass(0, may_change=may_change))
        writer.put_rows("kernels", to_arrow([Kernel("mm", "cpu", 1, 2, "x")], KERNELS.arrow))
        writer.flush()
    writer.close()
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    loaded = set(json.loads(done.stdout))
    assert "pyarrow.parquet" in loaded
    assert loaded.isdisjoint({"pandas", "torch"})
