"""Reading a trace without what a report has no use for: the same rows and the same report, in less memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import engine_step, forward_pass, request

from phaseprof.analyzers import columns
from phaseprof.analyzers.goodput import parse_objectives
from phaseprof.analyzers.lean import ENGINE_LEAN, LEAN
from phaseprof.analyzers.report import build_report
from phaseprof.phases import Phase
from phaseprof.records import Slice, Warmup
from phaseprof.schema import SCHEMA_VERSION
from phaseprof.trace.forms import Lean
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.reader import open_trace
from phaseprof.trace.writer import TraceWriter

META = ProcessMeta(
    schema=SCHEMA_VERSION,
    phaseprof="0.1",
    rank=0,
    pid=7,
    command=("python", "x.py"),
    versions={},
    started_ns=1,
)
WITHOUT = Lean(
    without=frozenset({"passes.flops", "passes.slices.phase", "requests.queue_ns"}),
    without_if_whole=frozenset({"passes.slices.past", "passes.dtype"}),
)
NAME = pa.dictionary(pa.int32(), pa.string())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def write(trace: Path, *, complete: bool = True, engine: bool = False) -> TraceWriter:
    """Two requests of three passes each and a warm-up; a row that was put again lies in two parts."""
    writer = TraceWriter(trace, rank=0, pid=7)
    writer.write_meta(replace(META, complete=complete))
    for number in range(7):
        past = 0 if number % 3 == 0 else 8 + number % 3
        writer.put_pass(
            forward_pass(
                number,
                phase=Phase.DECODE if past else Phase.PREFILL,
                warmup=Warmup.REQUESTED if number == 6 else None,
                slices=(Slice(f"r{number // 3}", Phase.DECODE, 1, past, 9),),
                may_change=number == 2,
            )
        )
        if number == 2:
            writer.flush()
            writer.put_pass(forward_pass(2, slices=(Slice("r0", Phase.DECODE, 1, 10, 9),)))
        if engine:
            writer.put_step(engine_step(number))
        writer.flush()
    writer.put_request(request("r0"))
    writer.flush()
    return writer


def values(table: pa.Table) -> list[dict[str, Any]]:
    """Rows in the order of their ids."""
    rows: list[dict[str, Any]] = table.to_pylist()
    return sorted(rows, key=lambda row: str(row.get("pass_id", row.get("request_id"))))


def without(rows: list[dict[str, Any]], column: str, field: str = "") -> list[dict[str, Any]]:
    for row in rows:
        for part in row[column] if field else [row]:
            del part[field or column]
    return rows


def test_rows_are_the_same_but_for_what_is_left_out(trace: Path) -> None:
    write(trace)
    whole, lean = open_trace(trace), open_trace(trace, lean=WITHOUT)
    expected = without(without(values(whole.passes), "flops"), "dtype")
    expected = without(without(expected, "slices", "phase"), "slices", "past")
    assert values(lean.passes) == expected
    assert values(lean.requests) == without(values(whole.requests), "queue_ns")
    assert not lean.cut_off
    assert len(expected) == 7


def test_a_trace_that_was_cut_off_keeps_what_that_needs(trace: Path) -> None:
    write(trace, complete=False)
    whole, lean = open_trace(trace), open_trace(trace, lean=WITHOUT)
    assert values(lean.passes) == without(without(values(whole.passes), "flops"), "slices", "phase")
    assert lean.cut_off


def test_a_lost_part_is_a_cut(trace: Path) -> None:
    write(trace)
    broken = trace / "requests/rank=0/part-7-000000-000000.parquet"
    broken.write_bytes(broken.read_bytes()[:100])
    lean = open_trace(trace, lean=WITHOUT)
    assert lean.cut_off
    assert len(lean.damage) == 1
    assert {"past", "query"} <= set(lean.passes.column("slices")[0].as_py()[0])


def test_names_are_dictionaries(trace: Path) -> None:
    write(trace)
    schema = open_trace(trace, lean=WITHOUT).passes.schema
    assert [schema.field(name).type for name in ("model_id", "phase", "warmup")] == [NAME] * 3
    slices = schema.field("slices").type.value_type
    assert [(part.name, part.type) for part in slices] == [
        ("request_id", NAME),
        *((name, pa.int32()) for name in ("query", "prompt", "cached", "recomputed", "drafts")),
        ("accepted", pa.int32()),
    ]


def test_no_rows_have_the_same_form(trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    writer.write_meta(META)
    none = open_trace(trace, lean=WITHOUT).passes
    writer.put_pass(forward_pass(0))
    writer.flush()
    assert none.num_rows == 0
    assert none.schema.types == open_trace(trace, lean=WITHOUT).passes.schema.types


def test_more_names_than_a_dictionary_takes(trace: Path) -> None:
    """Parquet gives a dictionary up above 1 MiB, in the middle of a row group."""
    writer = TraceWriter(trace, rank=0, pid=7)
    writer.write_meta(META)
    ids = [f"{'request' * 40}.{number}" for number in range(8000)]
    for number, name in enumerate(ids):
        writer.put_pass(forward_pass(number, slices=(Slice(name, Phase.DECODE, 1, 1, 1),)))
        if number == 4000:
            writer.flush()
    writer.close()
    (part,) = (trace / "passes").rglob("*.parquet")
    with pq.ParquetFile(part) as file:
        paths = [file.schema.column(i).path for i in range(len(file.schema))]
        place = paths.index("slices.list.element.request_id")
        assert "PLAIN" in file.metadata.row_group(0).column(place).encodings
    slices = open_trace(trace, lean=LEAN).passes.column("slices").to_pylist()
    assert [one["request_id"] for (one,) in slices] == ids


def test_a_part_of_another_version_takes_the_form(trace: Path) -> None:
    """Plain strings, a column that is missing, one that is new, and a list whose items have another name."""
    write(trace)
    part = trace / "passes/rank=0/part-7-000000-000000.parquet"
    with pq.ParquetFile(part) as file:
        rows = file.read().drop_columns(["thread_id"]).append_column("new", pa.array([1]))
    pq.write_table(rows, part, use_compliant_nested_type=False)
    lean = open_trace(trace, lean=WITHOUT)
    first = lean.passes.slice(0, 1).to_pylist()[0]
    assert (first["phase"], first["thread_id"]) == ("prefill", None)
    assert first["slices"][0]["request_id"] == "r0"
    assert "new" not in first


@pytest.mark.parametrize("complete", [True, False])
def test_the_report_is_the_same(trace: Path, complete: bool) -> None:
    write(trace, complete=complete).close()
    whole, lean = open_trace(trace), open_trace(trace, lean=LEAN)
    assert lean.passes.nbytes < whole.passes.nbytes
    assert build_report(lean) == build_report(whole)


def test_the_report_of_an_engine_is_the_same(trace: Path) -> None:
    write(trace, engine=True).close()
    objectives = parse_objectives("ttft=20ms,tpot=9ms,e2e=1s,queue=1ms")
    whole = build_report(open_trace(trace), objectives=objectives)
    assert None not in (whole.engine, whole.interference, whole.goodput)
    opened = open_trace(trace, lean=ENGINE_LEAN)
    assert build_report(opened, objectives=objectives) == whole


def test_the_report_does_not_depend_on_how_many_rows_are_worked_on_at_a_time(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(trace)
    opened = open_trace(trace, lean=LEAN)
    whole = build_report(opened)
    assert whole.phases["decode"].between_ms is not None
    for rows in (1, 2, 3):
        monkeypatch.setattr(columns, "_ROWS", rows)
        assert build_report(opened) == whole


def test_a_report_imports_no_pandas(trace: Path) -> None:
    """It takes longer to import than a million passes take to report on."""
    pytest.importorskip("pandas")
    write(trace, engine=True).close()
    code = (
        "import json, sys\n"
        "from phaseprof.analyzers.lean import ENGINE_LEAN\n"
        "from phaseprof.analyzers.report import build_report\n"
        "from phaseprof.trace.reader import open_trace\n"
        f"report = build_report(open_trace({str(trace)!r}, lean=ENGINE_LEAN))\n"
        "assert report.engine and report.interference\n"
        "print(json.dumps([report.phases['decode'].passes, 'pandas' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [4, False]
