"""The writer: parts and their names, rows that are put again, and writes that fail. Merges: `test_merging`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import engine_step, forward_pass, request

from phaseprof.errors import TraceError
from phaseprof.phases import Phase
from phaseprof.records import Call, CallKind, Finish, Kernel
from phaseprof.schema import KERNELS, PASSES, TABLES
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.parts import PartName
from phaseprof.trace.reader import open_trace
from phaseprof.trace.writer import TraceWriter, to_arrow, write_json

META = ProcessMeta(
    schema=1, phaseprof="0", rank=0, pid=7, command=("x",), versions={}, started_ns=1
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def writer(trace: Path) -> TraceWriter:
    return TraceWriter(trace, rank=0, pid=7)


def names(trace: Path) -> list[str]:
    """Every file of the trace, relative to it, hidden ones too."""
    return sorted(str(file.relative_to(trace)) for file in trace.rglob("*") if file.is_file())


def ids(file: Path) -> list[int]:
    """The pass ids in one part, in its order."""
    with pq.ParquetFile(file) as part:
        return list(part.read(columns=["pass_id"]).column(0).to_pylist())


def column(trace: Path, name: str, table: str = "passes") -> list[Any]:
    """A column of a table over all of its parts, part after part."""
    values: list[Any] = []
    for file in sorted((trace / table).rglob("*.parquet")):
        with pq.ParquetFile(file) as part:
            values += part.read().column(name).to_pylist()
    return values


def flush_passes(writer: TraceWriter, *pass_ids: int, **changes: Any) -> None:
    for pass_id in pass_ids:
        writer.put_pass(forward_pass(pass_id, **changes))
    writer.flush()


# Parts


def test_the_name_of_a_part() -> None:
    name = PartName(7, 3, 66)
    assert str(name) == "part-7-000003-000066.parquet"
    assert PartName.parse(str(name)) == name
    assert PartName.parse("part-7-1234567-1234567.parquet") == PartName(7, 1234567, 1234567)


def test_the_name_of_a_part_tells_hosts_apart() -> None:
    here, there = PartName(7, 3, 66, "8f5cc7"), PartName(7, 3, 66, "00beef")
    assert str(here) == "part-8f5cc7-7-000003-000066.parquet"
    assert PartName.parse(str(here)) == here
    # A token of digits alone is not taken for a process id, nor a process id of six digits for a token.
    assert PartName.parse("part-123456-7-000003-000066.parquet") == PartName(7, 3, 66, "123456")
    assert PartName.parse("part-123456-000003-000066.parquet") == PartName(123456, 3, 66)
    assert here.holds(PartName(7, 4, 5, "8f5cc7"))
    assert not there.holds(here) and not PartName(7, 3, 66).holds(here)


@pytest.mark.parametrize(
    "name",
    [
        ".part-7-000003-000066.parquet.tmp",
        ".part-7-000003-000066.parquet",
        "part-7-000003.parquet",
        "part-0.parquet",
        "part-7-000003-000066.parquet.gz",
        "part-x-000003-000066.parquet",
    ],
)
def test_other_names_are_no_parts(name: str) -> None:
    assert PartName.parse(name) is None


@pytest.mark.parametrize(
    ("one", "other", "holds"),
    [
        ((7, 0, 9), (7, 0, 9), True),
        ((7, 0, 9), (7, 3, 3), True),
        ((7, 0, 9), (7, 9, 10), False),
        ((7, 1, 9), (7, 0, 1), False),
        ((7, 0, 9), (8, 3, 3), False),
    ],
)
def test_what_a_part_holds(
    one: tuple[int, int, int], other: tuple[int, int, int], holds: bool
) -> None:
    assert PartName(*one).holds(PartName(*other)) is holds


def test_a_new_trace_has_no_tables_yet(writer: TraceWriter, trace: Path) -> None:
    writer.flush()
    assert names(trace) == []
    assert [path.name for path in trace.iterdir()] == ["meta"]


def test_each_flush_is_a_part(writer: TraceWriter, trace: Path) -> None:
    flush_passes(writer, 0, 1)
    flush_passes(writer, 2)
    writer.flush()
    writer.put_request(request())
    writer.flush()
    assert names(trace) == [
        "passes/rank=0/part-7-000000-000000.parquet",
        "passes/rank=0/part-7-000001-000001.parquet",
        "requests/rank=0/part-7-000000-000000.parquet",
    ]
    assert ids(trace / "passes/rank=0/part-7-000000-000000.parquet") == [0, 1]
    assert ids(trace / "passes/rank=0/part-7-000001-000001.parquet") == [2]


def test_a_part_has_the_schema_of_its_table(writer: TraceWriter, trace: Path) -> None:
    flush_passes(writer, 0)
    (file,) = trace.rglob("*.parquet")
    with pq.ParquetFile(file) as part:
        assert part.schema_arrow.equals(PASSES.arrow)
        assert part.schema_arrow.metadata[b"phaseprof.schema"] == b"1"


def test_values_reach_the_disk(writer: TraceWriter, trace: Path) -> None:
    row = forward_pass(3, device_ns=77, error="KeyError", accepted_tokens=None)
    writer.put_pass(row)
    writer.put_request(request(finish=None, finished_ns=None, tpot_ns=None, itl_ns=()))
    writer.close()
    (stored,) = _rows(trace, "passes")
    slices = stored.pop("slices")
    told = {"cached": 0, "recomputed": 0, "drafts": 0, "accepted": 0}
    assert slices == [
        {"request_id": "p1.g1.r0", "phase": "decode", "query": 1, "past": 12, "prompt": 9, **told}
    ]
    assert stored == {name: getattr(row, name) for name in stored}
    (stored,) = _rows(trace, "requests")
    assert (stored["finish"], stored["itl_ns"], stored["ttft_ns"]) == (None, [], 20_000_000)


def _rows(trace: Path, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in sorted((trace / table).rglob("*.parquet")):
        with pq.ParquetFile(file) as part:
            rows += part.read().to_pylist()
    return rows


def test_pending_rows(writer: TraceWriter) -> None:
    writer.put_pass(forward_pass(0))
    writer.put_pass(forward_pass(0))
    writer.put_request(request())
    writer.put_rows("kernels", kernels(3))
    assert writer.pending_rows == 5
    writer.flush()
    assert writer.pending_rows == 0


def kernels(count: int, begin: int = 0) -> pa.Table:
    return to_arrow(
        [Kernel(f"k{n}", "cpu", n, n + 1, "test") for n in range(begin, begin + count)],
        KERNELS.arrow,
    )


def test_tables_without_keys_keep_every_row(writer: TraceWriter, trace: Path) -> None:
    writer.put_rows("kernels", kernels(2))
    writer.put_rows("kernels", kernels(2))
    writer.flush()
    writer.put_rows("kernels", kernels(1, begin=2))
    writer.close()
    assert names(trace) == ["kernels/rank=0/part-7-000000-000001.parquet"]
    assert column(trace, "name", "kernels") == ["k0", "k1", "k0", "k1", "k2"]


# Rows that are put again


def test_a_row_put_again_before_the_flush_replaces_the_first(
    writer: TraceWriter, trace: Path
) -> None:
    writer.put_pass(forward_pass(0, phase=Phase.EXTEND, may_change=True))
    writer.put_pass(forward_pass(1))
    writer.put_pass(forward_pass(0))
    writer.flush()
    assert column(trace, "pass_id") == [0, 1]
    assert column(trace, "phase") == ["decode", "decode"]


def test_a_row_put_again_after_the_flush_is_once_in_the_end(
    writer: TraceWriter, trace: Path
) -> None:
    flush_passes(writer, 0, 1, phase=Phase.EXTEND, may_change=True)
    flush_passes(writer, 2)
    flush_passes(writer, 1)
    assert column(trace, "pass_id") == [0, 1, 2, 1]
    writer.close()
    assert names(trace) == ["passes/rank=0/part-7-000000-000002.parquet"]
    assert column(trace, "pass_id") == [0, 2, 1]
    assert column(trace, "phase") == ["extend", "decode", "decode"]


def test_a_row_that_changes_twice(writer: TraceWriter, trace: Path) -> None:
    running = request(finish=None, finished_ns=None, output_tokens=0)
    for tokens in range(3):
        writer.put_request(replace(running, output_tokens=tokens))
        writer.flush()
    writer.put_request(replace(running, output_tokens=3, finish=Finish.STOP))
    writer.close()
    assert column(trace, "output_tokens", "requests") == [3]
    assert column(trace, "finish", "requests") == ["stop"]


# The end


def test_close_leaves_one_part_a_table(writer: TraceWriter, trace: Path) -> None:
    for pass_id in range(5):
        writer.put_pass(forward_pass(pass_id))
        writer.put_request(request(f"r{pass_id}"))
        writer.flush()
    writer.close()
    assert names(trace) == [
        "passes/rank=0/part-7-000000-000004.parquet",
        "requests/rank=0/part-7-000000-000004.parquet",
    ]
    assert column(trace, "pass_id") == [0, 1, 2, 3, 4]
    assert column(trace, "request_id", "requests") == ["r0", "r1", "r2", "r3", "r4"]
    before = names(trace)
    writer.close()
    assert names(trace) == before


def test_a_long_run_is_one_small_file(writer: TraceWriter, trace: Path) -> None:
    """8,000 passes with a flush every 500: one file, and at most 60 bytes a pass."""
    for pass_id in range(8_000):
        writer.put_pass(forward_pass(pass_id))
        if pass_id % 500 == 499:
            writer.flush()
    writer.close()
    (file,) = trace.rglob("*.parquet")
    assert ids(file) == list(range(8_000))
    assert file.stat().st_size <= 60 * 8_000
    with pq.ParquetFile(file) as part:
        assert part.num_row_groups == 1


# Folders and failures


def test_a_trace_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot be written") as caught:
        TraceWriter(tmp_path / "file", rank=0, pid=7)
    assert "-o" in caught.value.remedy
    assert (tmp_path / "file").read_text() == ""


def test_a_vanished_trace_is_not_made_again(writer: TraceWriter, trace: Path) -> None:
    flush_passes(writer, 0)
    shutil.rmtree(trace)
    writer.put_pass(forward_pass(1))
    writer.put_request(request())
    for write in (writer.flush, writer.close, lambda: writer.write_meta(META)):
        with pytest.raises(OSError):
            write()
        assert not trace.exists()


def test_a_trace_that_vanishes_before_the_first_flush(writer: TraceWriter, trace: Path) -> None:
    shutil.rmtree(trace)
    writer.flush()
    writer.put_pass(forward_pass(0))
    with pytest.raises(OSError):
        writer.flush()
    assert not trace.exists()
    assert writer.pending_rows == 1


def test_a_lost_part_fails_the_merge_and_leaves_the_others(
    writer: TraceWriter, trace: Path
) -> None:
    for pass_id in range(3):
        flush_passes(writer, pass_id)
    (trace / "passes/rank=0/part-7-000001-000001.parquet").unlink()
    with pytest.raises(OSError):
        writer.close()
    assert names(trace) == [
        "passes/rank=0/part-7-000000-000000.parquet",
        "passes/rank=0/part-7-000002-000002.parquet",
    ]


#: Runs in a process of its own, since a limit of file sizes is one of the process. Like a disk that is full, it makes
#: a write fail in the middle.
LIMITED = """
import json, resource, sys
from pathlib import Path
sys.path.insert(0, {helpers!r})
from rows import forward_pass
from phaseprof.records import Kernel
from phaseprof.schema import KERNELS
from phaseprof.trace.writer import TraceWriter, to_arrow

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def attempt(write):
    try:
        write()
    except OSError as error:
        return error.__class__.__name__
    return None

trace = Path({trace!r})
writer = TraceWriter(trace, rank=0, pid=7)
told = {{}}
{body}
print(json.dumps(told))
"""


def limited(trace: Path, body: str) -> dict[str, Any]:
    code = LIMITED.format(helpers=str(Path(__file__).parent), trace=str(trace), body=body)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_failed_flush_leaves_nothing_and_loses_nothing(trace: Path) -> None:
    told = limited(
        trace,
        """
writer.put_pass(forward_pass(0))
limit(100)
told["failed"] = attempt(writer.flush)
told["files"] = [str(f) for f in trace.rglob("*") if f.is_file()]
told["pending"] = writer.pending_rows
limit(-1)
told["again"] = attempt(writer.flush)
""",
    )
    assert told["failed"] is not None
    assert told["files"] == []
    assert told["pending"] == 1
    assert told["again"] is None
    assert column(trace, "pass_id") == [0]


def test_a_part_that_cannot_be_put_in_place(writer: TraceWriter, trace: Path) -> None:
    """Something lies at its place: the temporary file goes, and the row waits."""
    place = trace / "passes/rank=0/part-7-000000-000000.parquet"
    place.mkdir(parents=True)
    writer.put_pass(forward_pass(0))
    with pytest.raises(OSError):
        writer.flush()
    assert names(trace) == []
    place.rmdir()
    writer.flush()
    assert column(trace, "pass_id") == [0]


def test_a_failed_merge_leaves_the_parts_as_they_were(trace: Path) -> None:
    """Each part fits below the limit, all of them together do not."""
    told = limited(
        trace,
        """
import random
chance = random.Random(1)
def noise():
    # What cannot be compressed: a merged part is as large as its parts.
    return to_arrow([Kernel(chance.randbytes(16).hex(), "cpu", chance.getrandbits(60), 1, "x")
                     for _ in range(400)], KERNELS.arrow)
for _ in range(4):
    writer.put_rows("kernels", noise())
    writer.flush()
before = sorted(str(f) for f in trace.rglob("*") if f.is_file())
limit(max(Path(f).stat().st_size for f in before) + 1000)
told["failed"] = attempt(writer.close)
told["same"] = sorted(str(f) for f in trace.rglob("*") if f.is_file()) == before
limit(-1)
told["again"] = attempt(writer.close)
""",
    )
    assert told["failed"] is not None
    assert told["same"] is True
    assert told["again"] is None
    assert names(trace) == ["kernels/rank=0/part-7-000000-000003.parquet"]
    assert len(column(trace, "name", "kernels")) == 1600


def test_a_failed_meta_leaves_the_one_before(trace: Path) -> None:
    told = limited(
        trace,
        """
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.writer import write_json
path = trace / "meta" / "x.json"
write_json(path, {"first": True})
limit(100)
told["failed"] = attempt(lambda: write_json(path, {"text": "x" * 10000}))
""",
    )
    assert told["failed"] is not None
    assert names(trace) == ["meta/x.json"]
    assert json.loads((trace / "meta/x.json").read_text()) == {"first": True}


def test_the_meta_file_is_replaced(writer: TraceWriter, trace: Path) -> None:
    writer.write_meta(META)
    writer.write_meta(replace(META, complete=True))
    assert names(trace) == ["meta/rank-0-pid-7.json"]
    assert writer.meta_path == trace / "meta/rank-0-pid-7.json"
    assert json.loads(writer.meta_path.read_text())["complete"] is True


def test_json_of_anything(tmp_path: Path) -> None:
    """What JSON has no form for is stored as its text."""
    write_json(tmp_path / "x.json", {"path": tmp_path, "ends": "\udcff é"})
    read = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert read == {"path": str(tmp_path), "ends": "\udcff é"}


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.name)
def test_every_table_can_be_written(spec: Any, writer: TraceWriter, trace: Path) -> None:
    rows = {
        "passes": lambda: writer.put_pass(forward_pass()),
        "requests": lambda: writer.put_request(request()),
        "steps": lambda: writer.put_step(engine_step()),
        "kernels": lambda: writer.put_rows("kernels", kernels(1)),
        "samples": lambda: writer.put_rows(
            "samples",
            pa.table(
                [[1], [2], ["cpu"], ["test"], ["watts"], [3.5]],
                schema=spec.arrow.remove_metadata(),
            ),
        ),
        "calls": lambda: writer.put_rows(
            "calls", to_arrow([Call(CallKind.COUNTED, 9, 3, 1, 0, 5, 7)], spec.arrow)
        ),
    }
    rows[spec.name]()
    writer.close()
    (file,) = trace.rglob("*.parquet")
    assert file.parent == trace / spec.name / "rank=0"


# The rank, when it becomes known late


def test_what_was_written_moves_to_the_rank_that_becomes_known(trace: Path) -> None:
    """Two workers of one job write as rank 0 until the second one joins its process group."""
    first = TraceWriter(trace, rank=0, pid=7, host="8f5cc7")
    second = TraceWriter(trace, rank=0, pid=8, host="8f5cc7")
    for number, writer in ((0, first), (100, second)):
        writer.put_pass(forward_pass(number))
        writer.flush()
        write_json(writer.meta_path, {"schema": 1})
    second.move_to(1)
    second.put_pass(forward_pass(101))
    second.flush()
    assert names(trace) == [
        "meta/rank-0-host-8f5cc7-pid-7.json",
        "meta/rank-1-host-8f5cc7-pid-8.json",
        "passes/rank=0/part-8f5cc7-7-000000-000000.parquet",
        "passes/rank=1/part-8f5cc7-8-000000-000000.parquet",
        "passes/rank=1/part-8f5cc7-8-000001-000001.parquet",
    ]
    first.move_to(1)
    second.close()
    assert not (trace / "passes/rank=0").exists()
    passes = open_trace(trace).passes
    assert passes.column("pass_id").to_pylist() == [0, 100, 101]
    assert passes.column("rank").to_pylist() == [1, 1, 1]


def test_a_process_without_rows_yet_moves_as_well(trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7, host="8f5cc7")
    writer.move_to(3)
    writer.put_pass(forward_pass(0))
    writer.close()
    assert names(trace) == ["passes/rank=3/part-8f5cc7-7-000000-000000.parquet"]


def test_hosts_that_share_a_folder_keep_their_rows(trace: Path) -> None:
    """The same rank and the same process id in two containers: neither knows of the other."""
    for number, host in ((0, "8f5cc7"), (1 << 32, "00beef")):
        writer = TraceWriter(trace, rank=0, pid=1, host=host)
        for step in range(3):
            writer.put_pass(forward_pass(number + step))
            writer.flush()
        writer.close()
    assert len(names(trace)) == 2
    assert open_trace(trace).passes.num_rows == 6
