"""The schema: its columns are the fields of the rows, and the docs page is generated from it."""

from __future__ import annotations

import enum
import subprocess
import sys
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from phaseprof.phases import Phase, Role, TagSource
from phaseprof.records import (
    Call,
    CallKind,
    EngineStep,
    Finish,
    ForwardPass,
    Kernel,
    Request,
    Sample,
    Slice,
    Warmup,
)
from phaseprof.schema import (
    CALLS,
    KERNELS,
    PASSES,
    REQUESTS,
    SAMPLES,
    SCHEMA_VERSION,
    SLICE_TYPE,
    STEPS,
    TABLES,
    TableSpec,
    markdown,
)

PAGE = Path(__file__).parents[2] / "docs" / "trace-schema.md"
#: Fields of a row that are not stored.
NOT_STORED = {
    ForwardPass: {"may_change"},
    Request: set(),
    EngineStep: set(),
    Kernel: {"thread_id"},
    Sample: set(),
    Call: set(),
}
STORED = [
    (ForwardPass, PASSES),
    (Request, REQUESTS),
    (EngineStep, STEPS),
    (Kernel, KERNELS),
    (Sample, SAMPLES),
    (Call, CALLS),
]


def test_the_docs_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown()


def test_the_module_prints_the_page() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phaseprof.schema"],
        capture_output=True,
        check=True,
        timeout=60,
        encoding="utf-8",
    )
    assert done.stdout == markdown()


def test_the_page_shows_every_column() -> None:
    page = markdown()
    for table in TABLES:
        part = page.partition(f"## {table.name}\n")[2].partition("\n## ")[0]
        shown = [line.split("`")[1] for line in part.splitlines() if line.startswith("| `")]
        assert shown == [column.name for column in table.columns]
        assert f"One row is {table.row}." in part


@pytest.mark.parametrize(
    "kind", [Phase, Role, TagSource, Warmup, Finish, CallKind], ids=lambda kind: kind.__name__
)
def test_the_page_shows_every_value(kind: type[enum.StrEnum]) -> None:
    listed = ", ".join(f"`{member.value}`" for member in kind)
    assert listed in markdown()


@pytest.mark.parametrize(("row", "spec"), STORED, ids=lambda value: getattr(value, "name", ""))
def test_the_columns_are_the_fields_of_the_row(row: type, spec: TableSpec) -> None:
    names = {field.name for field in fields(row)} - NOT_STORED[row]
    assert {column.name for column in spec.columns} == names
    assert NOT_STORED[row] <= {field.name for field in fields(row)}


@pytest.mark.parametrize(("row", "spec"), STORED, ids=lambda value: getattr(value, "name", ""))
def test_the_types_are_those_of_the_fields(row: type, spec: TableSpec) -> None:
    hints = typing.get_type_hints(row)
    for column in spec.columns:
        expected, nullable = arrow_type(hints[column.name])
        assert column.nullable is nullable, column.name
        if (spec.name, column.name) == ("kernels", "stream"):
            expected = pa.int32()
        assert column.type == expected, column.name


def arrow_type(hint: Any) -> tuple[pa.DataType, bool]:
    """The Arrow type of a type hint, and whether it may be null."""
    options = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        (inner,) = [option for option in options if option is not type(None)]
        return arrow_type(inner)[0], True
    if typing.get_origin(hint) is tuple:
        item = SLICE_TYPE if options[0] is Slice else arrow_type(options[0])[0]
        return pa.list_(pa.field("item", item, nullable=False)), False
    if hint is bool:
        return pa.bool_(), False
    if hint is int:
        return pa.int64(), False
    if hint is float:
        return pa.float64(), False
    assert issubclass(hint, str)
    return pa.string(), False


def test_a_slice_is_stored_whole() -> None:
    hints = typing.get_type_hints(Slice)
    stored = {field.name: (field.type, field.nullable) for field in SLICE_TYPE}
    expected = {name: arrow_type(hint) for name, hint in hints.items()}
    # These came later: null in older traces.
    for name in ("cached", "recomputed", "drafts"):
        expected[name] = (pa.int64(), True)
    assert stored == expected


def test_samples() -> None:
    """They have no row class: a collector makes Arrow rows of them."""
    assert {column.name: str(column.type) for column in SAMPLES.columns} == {
        "start_ns": "int64",
        "end_ns": "int64",
        "device": "string",
        "source": "string",
        "metric": "string",
        "value": "double",
    }


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.name)
def test_a_table_is_sound(spec: TableSpec) -> None:
    names = [column.name for column in spec.columns]
    assert len(set(names)) == len(names)
    # The reader adds the rank from the folder's name.
    assert "rank" not in names
    if spec.key:
        (key,) = [column for column in spec.columns if column.name == spec.key]
        assert not key.nullable
    for column in spec.columns:
        assert column.meaning.endswith("."), column.name
        if column.name.endswith(("_ns", "_tokens", "_bytes")):
            whole = column.type.value_type if pa.types.is_list(column.type) else column.type
            assert whole == pa.int64(), column.name


def test_the_arrow_schema_says_its_version() -> None:
    for spec in TABLES:
        assert spec.arrow.metadata == {b"phaseprof.schema": str(SCHEMA_VERSION).encode()}
        assert [field.nullable for field in spec.arrow] == [c.nullable for c in spec.columns]


def test_no_text_of_a_prompt_has_a_column() -> None:
    """Text columns hold names and labels alone; a new one is looked at before it gets in here."""
    text = {
        f"{spec.name}.{column.name}"
        for spec in TABLES
        for column in spec.columns
        if column.type == pa.string()
    }
    assert text == {
        "passes.model_id",
        "passes.role",
        "passes.phase",
        "passes.tag_source",
        "passes.dtype",
        "passes.warmup",
        "passes.error",
        "requests.request_id",
        "requests.model_id",
        "requests.finish",
        "requests.warmup",
        "requests.client_id",
        "steps.model_id",
        "kernels.name",
        "kernels.device",
        "kernels.source",
        "samples.device",
        "samples.source",
        "samples.metric",
        "calls.kind",
    }
