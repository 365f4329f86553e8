"""The reader: whole, half-written, damaged, older and newer traces, and what other tools read of the same folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import forward_pass, request

from phaseprof.errors import TraceError
from phaseprof.phases import Phase
from phaseprof.records import Finish, Kernel
from phaseprof.schema import KERNELS, SCHEMA_VERSION, TABLES
from phaseprof.trace import reader as reading
from phaseprof.trace.forms import Lean
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.reader import open_trace
from phaseprof.trace.writer import TraceWriter, to_arrow

FIRST = "passes/rank=0/part-7-000000-000000.parquet"
SECOND = "passes/rank=0/part-7-000001-000001.parquet"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def meta(**changes: Any) -> ProcessMeta:
    base = ProcessMeta(
        schema=SCHEMA_VERSION,
        phaseprof="0.1",
        rank=0,
        pid=7,
        command=("python", "x.py"),
        versions={"torch": "2"},
        started_ns=1,
    )
    return replace(base, **changes)


def write(
    trace: Path, *groups: list[int], rank: int = 0, pid: int = 7, close: bool = False
) -> TraceWriter:
    """Passes of one process, one part for each group of ids, and its meta."""
    writer = TraceWriter(trace, rank=rank, pid=pid)
    writer.write_meta(meta(rank=rank, pid=pid))
    for group in groups:
        for pass_id in group:
            writer.put_pass(forward_pass(pass_id))
        writer.flush()
    if close:
        writer.close()
    return writer


def pass_ids(trace: Path) -> list[int]:
    return list(open_trace(trace).passes.column("pass_id").to_pylist())


def rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a part again with other columns."""
    with pq.ParquetFile(file) as part:
        rows = part.read()
    pq.write_table(change(rows), file)


# What is whole


def test_a_trace_comes_back(trace: Path) -> None:
    writer = write(trace, [0, 1], [2])
    writer.put_request(request())
    writer.put_rows("kernels", to_arrow([Kernel("mm", "cpu", 1, 2, "x")], KERNELS.arrow))
    writer.close()
    opened = open_trace(trace)
    assert opened.path == trace
    assert opened.damage == ()
    assert opened.metas == (meta(),)
    assert opened.passes.num_rows == 3
    first = opened.passes.slice(0, 1).to_pylist()[0]
    row = forward_pass(0)
    slices = first.pop("slices")
    (one,) = slices
    assert [one.pop(name) for name in ("cached", "recomputed", "drafts", "accepted")] == [0] * 4
    assert one == {"request_id": "p1.g1.r0", "phase": "decode", "query": 1, "past": 9, "prompt": 9}
    assert first.pop("rank") == 0
    assert first == {name: getattr(row, name) for name in first}
    assert opened.requests.column("itl_ns").to_pylist() == [[10_000_000, 10_000_000]]
    assert opened.kernels.column("name").to_pylist() == ["mm"]
    assert opened.samples.num_rows == 0


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.name)
def test_every_table_has_the_columns_of_the_schema_and_the_rank(spec: Any, trace: Path) -> None:
    write(trace, [0])
    table = getattr(open_trace(trace), spec.name)
    assert table.column_names == [*(column.name for column in spec.columns), "rank"]
    assert [field.type for field in table.schema] == [*(c.type for c in spec.columns), pa.int32()]


def test_a_path_may_be_text(trace: Path) -> None:
    write(trace, [0])
    assert open_trace(str(trace)).passes.num_rows == 1


def test_the_size_is_that_of_all_files(trace: Path) -> None:
    write(trace, [0])
    (trace / "notes.txt").write_text("12345")
    sizes = [file.stat().st_size for file in trace.rglob("*") if file.is_file()]
    assert open_trace(trace).size_bytes == sum(sizes)


def test_a_trace_without_a_pass_is_a_trace(trace: Path) -> None:
    write(trace)
    opened = open_trace(trace)
    assert (opened.passes.num_rows, opened.damage, len(opened.metas)) == (0, (), 1)


def test_ranks(trace: Path) -> None:
    """Ranks come from the folders, in the order of numbers."""
    for rank in (10, 2, 0):
        write(trace, [100 * rank, 100 * rank + 1], rank=rank, pid=rank + 5)
    opened = open_trace(trace)
    assert opened.passes.column("rank").to_pylist() == [0, 0, 2, 2, 10, 10]
    assert opened.passes.column("pass_id").to_pylist() == [0, 1, 200, 201, 1000, 1001]
    assert {(m.rank, m.pid) for m in opened.metas} == {(0, 5), (2, 7), (10, 15)}


def test_two_processes_of_one_rank(trace: Path) -> None:
    """Their parts have the same numbers, and neither replaces the other's."""
    write(trace, [0], [1], pid=7)
    write(trace, [10], [11], pid=70, close=True)
    assert pass_ids(trace) == [0, 1, 10, 11]
    assert len(open_trace(trace).metas) == 2


def test_folders_that_are_no_ranks_are_passed_over(trace: Path) -> None:
    write(trace, [0])
    for name in ("rank=", "rank=x", "other"):
        shutil.copytree(trace / "passes/rank=0", trace / "passes" / name)
    assert pass_ids(trace) == [0]


# Rows that were put again


def test_the_last_row_of_a_key_counts_while_the_run_goes_on(trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    writer.put_pass(forward_pass(0, phase=Phase.EXTEND, may_change=True))
    writer.put_pass(forward_pass(1))
    for name in ("r0", "r1"):
        writer.put_request(request(name, finish=None, finished_ns=None))
    writer.flush()
    writer.put_pass(forward_pass(0, phase=Phase.PREFILL))
    writer.put_request(request("r0", finish=Finish.STOP))
    writer.flush()
    opened = open_trace(trace)
    assert opened.passes.column("pass_id").to_pylist() == [0, 1]
    assert opened.passes.column("phase").to_pylist() == ["prefill", "decode"]
    requests = opened.requests.select(["request_id", "finish"]).to_pylist()
    assert {row["request_id"]: row["finish"] for row in requests} == {"r0": "stop", "r1": None}
    assert len(requests) == 2


def test_passes_are_in_order_after_a_merge(trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    writer.put_pass(forward_pass(0, phase=Phase.EXTEND, may_change=True))
    writer.put_pass(forward_pass(1))
    writer.flush()
    writer.put_pass(forward_pass(0))
    writer.close()
    assert pass_ids(trace) == [0, 1]


def test_the_wider_part_counts_after_a_killed_merge(trace: Path) -> None:
    """A kill between the rename and the deletion leaves the merged part and what it was made of."""
    write(trace, [0], [1])
    left = {name: (trace / name).read_bytes() for name in (FIRST, SECOND)}
    shutil.rmtree(trace)
    writer = write(trace, [0], [1])
    writer.close()
    for name, content in left.items():
        (trace / name).write_bytes(content)
    # A row that counts twice would show: kernels and the order of rows have no key to hide it.
    assert pass_ids(trace) == [0, 1]
    shutil.copytree(trace / "passes", trace / "kernels")
    for file in (trace / "kernels/rank=0").glob("*.parquet"):
        pq.write_table(to_arrow([Kernel(file.name, "cpu", 1, 2, "x")], KERNELS.arrow), file)
    assert open_trace(trace).kernels.column("name").to_pylist() == ["part-7-000000-000001.parquet"]


def test_a_part_that_spans_others_of_another_process_hides_none(trace: Path) -> None:
    write(trace, [0], [1], close=True, pid=7)
    write(trace, [10], pid=8)
    assert pass_ids(trace) == [0, 1, 10]


def test_temporary_files_are_passed_over(trace: Path) -> None:
    write(trace, [0])
    folder = trace / "passes/rank=0"
    (folder / ".part-7-000001-000001.parquet.tmp").write_bytes(b"PAR1 half a par")
    (trace / ".passes-rank=0-part-7-000001-000001.parquet.tmp").write_bytes(b"PAR1 half a par")
    (trace / "meta/.rank-0-pid-7.json.7.tmp").write_text('{"schema": 1, "ha')
    opened = open_trace(trace)
    assert (opened.damage, opened.passes.num_rows, len(opened.metas)) == ((), 1, 1)


def test_parts_that_are_merged_while_they_are_read(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run merges between the reader's look at the folder and its reading: it looks again."""
    writer = write(trace, [0], [1])
    list_parts = reading._parts

    def merged_meanwhile(folder: Path) -> list[tuple[Path, int]]:
        listed = list_parts(folder)
        writer.close()
        return listed

    monkeypatch.setattr(reading, "_parts", merged_meanwhile)
    opened = open_trace(trace)
    assert opened.damage == ()
    assert opened.passes.column("pass_id").to_pylist() == [0, 1]


# No trace


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="There is no trace at") as caught:
        open_trace(tmp_path / "nowhere")
    assert "-o" in caught.value.remedy


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(TraceError, match=r"x\.parquet is a file") as caught:
        open_trace(tmp_path / "x.parquet")
    assert caught.value.remedy


def test_a_folder_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(TraceError, match="holds no trace: neither meta/ nor passes/") as caught:
        open_trace(tmp_path)
    assert caught.value.remedy


def test_a_trace_of_which_nothing_can_be_read(trace: Path) -> None:
    write(trace, [0])
    (trace / FIRST).write_bytes(b"")
    (trace / "meta/rank-0-pid-7.json").write_text("{")
    with pytest.raises(TraceError, match="Nothing of the trace") as caught:
        open_trace(trace)
    assert FIRST in caught.value.message


def test_a_trace_of_which_only_the_meta_can_be_read(trace: Path) -> None:
    """It still says what ran, and that it was cut off."""
    write(trace, [0])
    (trace / FIRST).write_bytes(b"")
    opened = open_trace(trace)
    assert (opened.passes.num_rows, len(opened.metas), len(opened.damage)) == (0, 1, 1)


# Damage: it is named, and the rest is read


def damaged(trace: Path) -> str:
    """The one sentence of damage of a trace of which the second part is whole."""
    opened = open_trace(trace)
    assert opened.passes.column("pass_id").to_pylist() == [1]
    assert len(opened.metas) == 1
    (sentence,) = opened.damage
    assert "\n" not in sentence and sentence.endswith(".") and not sentence.endswith("..")
    return sentence


@pytest.mark.parametrize("kept", [0, 3, 4, 200, -1], ids=lambda kept: f"{kept} bytes")
def test_a_truncated_part(trace: Path, kept: int) -> None:
    write(trace, [0], [1])
    content = (trace / FIRST).read_bytes()
    (trace / FIRST).write_bytes(content[:kept])
    assert damaged(trace).startswith(f"{FIRST} cannot be read: ")


def test_a_part_with_rubbish_inside(trace: Path) -> None:
    """Its footer is whole, so that only reading the columns shows it."""
    write(trace, [0], [1])
    content = bytearray((trace / FIRST).read_bytes())
    content[4:300] = b"\xff" * 296
    (trace / FIRST).write_bytes(content)
    assert damaged(trace).startswith(f"{FIRST} cannot be read: ")


def test_a_file_of_another_kind(trace: Path) -> None:
    write(trace, [0], [1])
    (trace / FIRST).write_text("a,b\n1,2\n")
    assert damaged(trace).startswith(f"{FIRST} cannot be read: ")


def test_a_folder_in_the_place_of_a_part(trace: Path) -> None:
    write(trace, [0], [1])
    (trace / FIRST).unlink()
    (trace / FIRST).mkdir()
    assert damaged(trace).startswith(f"{FIRST} cannot be read: ")


def test_a_link_that_leads_nowhere(trace: Path) -> None:
    write(trace, [0], [1])
    (trace / FIRST).unlink()
    (trace / FIRST).symlink_to(trace / "gone")
    assert damaged(trace).startswith(f"{FIRST} cannot be read: ")


def test_a_table_of_somebody_else(trace: Path) -> None:
    write(trace, [0], [1])
    pq.write_table(pa.table({"a": [1, 2]}), trace / FIRST)
    assert damaged(trace) == f"{FIRST} cannot be read: it is no part of passes."


def test_a_column_of_another_type(trace: Path) -> None:
    write(trace, [0], [1])
    rewrite(trace / FIRST, lambda rows: rows.set_column(6, "start_ns", pa.array(["noon"])))
    assert damaged(trace).startswith(f"{FIRST} cannot be read: ")


def test_a_column_that_is_there_twice(trace: Path) -> None:
    write(trace, [0], [1])
    rewrite(trace / FIRST, lambda rows: rows.append_column("step", rows.column("step")))
    assert damaged(trace).startswith(f"{FIRST} cannot be read: ")


def test_a_table_under_a_name_of_its_own_is_read(trace: Path) -> None:
    """Somebody merged the parts by hand."""
    write(trace, [0], [1])
    (trace / FIRST).rename(trace / "passes/rank=0/all.parquet")
    assert pass_ids(trace) == [0, 1]


def test_a_narrower_integer_type_is_widened(trace: Path) -> None:
    write(trace, [0], [1])
    rewrite(
        trace / FIRST, lambda rows: rows.set_column(1, "step", rows.column("step").cast("int8"))
    )
    assert pass_ids(trace) == [0, 1]
    assert open_trace(trace).damage == ()


# Older and newer traces


def test_a_column_that_an_older_trace_lacks(trace: Path) -> None:
    """Where the column may be null it is null, and nothing is wrong."""
    write(trace, [0], [1])
    rewrite(trace / FIRST, lambda rows: rows.drop_columns(["flops"]))
    opened = open_trace(trace)
    assert opened.damage == ()
    assert opened.passes.column("flops").to_pylist() == [None, 269_000_000]


def test_fields_of_slices_that_an_older_trace_lacks(trace: Path) -> None:
    """Slices once told less: null in the rows of then, also where they are read lean, and nothing is wrong."""
    write(trace, [0], [1])
    old = ("request_id", "phase", "query", "past", "prompt")

    def shorten(rows: pa.Table) -> pa.Table:
        lists = rows.column("slices").combine_chunks()
        fields = [field for field in lists.type.value_type if field.name in old]
        parts = [lists.values.field(field.name) for field in fields]
        shorter = pa.ListArray.from_arrays(
            lists.offsets, pa.StructArray.from_arrays(parts, fields=fields)
        )
        return rows.set_column(rows.column_names.index("slices"), "slices", shorter)

    rewrite(trace / FIRST, shorten)
    whole = {"request_id": "p1.g1.r0", "phase": "decode", "query": 1, "prompt": 9}
    names = ("cached", "recomputed", "drafts", "accepted")
    for lean in (None, Lean(without=frozenset())):
        opened = open_trace(trace, lean=lean)
        assert opened.damage == ()
        assert opened.passes.column("slices").to_pylist() == [
            [{**whole, "past": 9, **dict.fromkeys(names)}],
            [{**whole, "past": 10, **dict.fromkeys(names, 0)}],
        ]


def test_a_column_that_must_not_be_missing(trace: Path) -> None:
    write(trace, [0], [1])
    rewrite(trace / FIRST, lambda rows: rows.drop_columns(["flops", "host_ns", "compiled"]))
    opened = open_trace(trace)
    assert opened.damage == (f"{FIRST} lacks host_ns, compiled: null in its rows.",)
    assert opened.passes.column("pass_id").to_pylist() == [0, 1]
    assert opened.passes.column("host_ns").to_pylist() == [None, 900_000]
    assert opened.passes.schema.field("host_ns").nullable


def test_a_part_of_a_newer_schema(trace: Path) -> None:
    write(trace, [0], [1])
    newer = SCHEMA_VERSION + 1

    def change(rows: pa.Table) -> pa.Table:
        rows = rows.append_column("mood", pa.array(["good"]))
        return rows.replace_schema_metadata({"phaseprof.schema": str(newer)})

    rewrite(trace / FIRST, change)
    opened = open_trace(trace)
    assert opened.damage == (
        f"{FIRST} was written by a newer phaseprof (schema {newer}, this one reads {SCHEMA_VERSION}): "
        "columns may be missing.",
    )
    assert opened.passes.column("pass_id").to_pylist() == [0, 1]
    assert "mood" not in opened.passes.column_names


def test_a_new_column_of_the_same_schema_is_left_out(trace: Path) -> None:
    write(trace, [0], [1])
    rewrite(trace / FIRST, lambda rows: rows.append_column("mood", pa.array(["good"])))
    assert open_trace(trace).damage == ()
    assert pass_ids(trace) == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"schema": 1, "phasepr',
        "[]",
        '"text"',
        "null",
        '{"schema": 1}',
        '{"schema": "one"}',
        '{"schema": 1, "command": null}',
        '{"schema": 1, "phaseprof": "0", "rank": 0, "pid": 1, "command": [], "versions": {},'
        ' "started_ns": 1, "models": [[]]}',
        b"\xff\xfe",
    ],
    ids=str,
)
def test_a_damaged_meta(trace: Path, text: str | bytes) -> None:
    write(trace, [0], pid=8)
    content = text if isinstance(text, bytes) else text.encode()
    (trace / "meta/rank-0-pid-7.json").write_bytes(content)
    opened = open_trace(trace)
    (sentence,) = opened.damage
    assert sentence.startswith("meta/rank-0-pid-7.json cannot be read: ")
    assert [m.pid for m in opened.metas] == [8]
    assert opened.passes.num_rows == 1


def test_a_meta_of_a_newer_schema(trace: Path) -> None:
    write(trace, [0])
    file = trace / "meta/rank-0-pid-7.json"
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "schema": SCHEMA_VERSION + 1, "mood": "good"}))
    opened = open_trace(trace)
    (sentence,) = opened.damage
    assert sentence.startswith("meta/rank-0-pid-7.json was written by a newer phaseprof")
    assert [m.schema for m in opened.metas] == [SCHEMA_VERSION + 1]
    assert opened.passes.num_rows == 1


def test_a_trace_without_its_metas(trace: Path) -> None:
    write(trace, [0])
    shutil.rmtree(trace / "meta")
    opened = open_trace(trace)
    assert (opened.metas, opened.damage, opened.passes.num_rows) == ((), (), 1)


# Other tools


@pytest.fixture
def busy_trace(trace: Path) -> Path:
    """Two processes, one of which ended and one of which still runs, and requests."""
    write(trace, [0, 1], [2], close=True)
    running = write(trace, [10], [11], pid=8)
    for number in range(2):
        running.put_request(request(f"r{number}"))
    running.flush()
    return trace


def test_duckdb_reads_the_folder(busy_trace: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as base:
        query = f"from '{busy_trace}/passes/**/*.parquet'"
        found = base.execute(f"select pass_id, rank, phase, slices[1].past {query} order by 1")
        assert found.fetchall() == [(n, 0, "decode", 9 + n) for n in (0, 1, 2, 10, 11)]
        latencies = base.execute(
            f"select request_id, itl_ns from '{busy_trace}/requests/*/*.parquet' order by 1"
        )
        assert latencies.fetchall() == [(f"r{n}", [10_000_000, 10_000_000]) for n in range(2)]


def test_pandas_reads_the_folder(busy_trace: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(busy_trace / "passes")
    assert sorted(frame["pass_id"]) == [0, 1, 2, 10, 11]
    assert set(frame["rank"].astype(int)) == {0}
    assert frame["device_ns"].isna().all()
    assert frame["slices"].iloc[0][0]["prompt"] == 9


def test_polars_reads_the_folder(busy_trace: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(f"{busy_trace}/passes/**/*.parquet")
    assert sorted(frame["pass_id"]) == [0, 1, 2, 10, 11]
    assert frame.schema["slices"] == polars.List(
        polars.Struct(
            {
                "request_id": polars.String,
                "phase": polars.String,
                "query": polars.Int64,
                "past": polars.Int64,
                "prompt": polars.Int64,
                "cached": polars.Int64,
                "recomputed": polars.Int64,
                "drafts": polars.Int64,
                "accepted": polars.Int64,
            }
        )
    )
    scanned = polars.scan_parquet(f"{busy_trace}/passes", hive_partitioning=True).collect()
    assert scanned["rank"].to_list() == [0] * 5


def test_reading_imports_no_pandas(trace: Path) -> None:
    """`prof.trace` runs in the workload's process."""
    pytest.importorskip("pandas")
    writer = TraceWriter(trace, rank=0, pid=7)
    for phase, may_change in ((Phase.EXTEND, True), (Phase.DECODE, False)):
        writer.put_pass(forward_pass(0, phase=phase, may_change=may_change))
        writer.flush()
    code = (
        "import json, sys; from phaseprof.trace.reader import open_trace;"
        f"rows = open_trace({str(trace)!r}).passes.num_rows;"
        "print(json.dumps([rows, 'pandas' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [1, False]
