"""Merging parts: which and when, and that at any moment the folder holds the last version of every row once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import forward_pass, request

from phaseprof.phases import Phase
from phaseprof.records import Finish, Kernel
from phaseprof.schema import KERNELS, TABLES
from phaseprof.trace import merging, parts
from phaseprof.trace.parts import Part, PartName, due, last_merges, options
from phaseprof.trace.reader import open_trace
from phaseprof.trace.writer import TraceWriter, to_arrow

MB = 2**20


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def small_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge three fresh parts, and two merged ones; two rows are a row group."""
    monkeypatch.setattr(parts, "MERGE_AFTER_PARTS", 3)
    monkeypatch.setattr(parts, "MERGE_AFTER_MERGED", 2)
    monkeypatch.setattr(parts, "KEEP_FRESH", 1)
    monkeypatch.setattr(merging, "ROW_GROUP", 2)


def laid(*kinds: tuple[int, int]) -> list[Part]:
    """Parts of some tiers and sizes in MB, one flush each."""
    return [
        Part(PartName(7, place, place), tier, size * MB) for place, (tier, size) in enumerate(kinds)
    ]


def names(trace: Path, table: str = "passes") -> list[str]:
    return sorted(file.name for file in (trace / table).rglob("*") if file.is_file())


def merge_all(writer: TraceWriter) -> int:
    """Do all that is due; how many steps that took."""
    steps = 0
    while writer.merge_step():
        steps += 1
    return steps


# Which, and when


@pytest.mark.parametrize(
    ("parts_there", "expected"),
    [
        ([], None),
        ([(0, 0)] * 65, None),
        ([(0, 0)] * 66, (0, 64)),
        ([(1, 0)] * 3 + [(0, 0)] * 66, (3, 67)),
        ([(1, 1)] * 16, (0, 16)),
        ([(1, 1)] * 15 + [(0, 0)] * 20, None),
        ([(2, 2)] + [(1, 1)] * 16 + [(0, 0)] * 2, (1, 17)),
        # Much in few parts.
        ([(1, 20)] * 2, (0, 2)),
        ([(0, 40)] * 3, None),
        ([(0, 40)] * 4, (0, 2)),
        # What is full is left alone, and so is what lies before it.
        ([(1, 32)] * 20, None),
        ([(2, 5)] * 9 + [(3, 32)] + [(2, 1)] * 16, (10, 26)),
    ],
)
def test_what_is_due(parts_there: list[tuple[int, int]], expected: tuple[int, int] | None) -> None:
    assert due(laid(*parts_there)) == expected


def test_a_day_leaves_some_dozens_of_parts_and_writes_each_row_a_few_times() -> None:
    """Three flushes in two seconds of 50 kB each, merged to a tenth of that."""
    there: list[Part] = []
    written = most = 0
    flushes = 130_000
    for number in range(flushes):
        there.append(Part(PartName(7, number, number), 0, 50_000))
        while (run := due(there)) is not None:
            begin, end = run
            merged = there[begin:end]
            tier = merged[0].tier
            assert {part.tier for part in merged} == {tier}
            size = sum(part.size_bytes for part in merged) // (1 if tier else 10)
            written += merged[-1].name.last - merged[0].name.first + 1
            there[begin:end] = [Part(merged[0].name.up_to(merged[-1].name), tier + 1, size)]
        most = max(most, len(there))
    assert most < 64 + 3 * 16 + flushes * 5_000 // parts.FULL_PART_BYTES
    assert written < 4 * flushes
    # Nothing is lost, and all is in order.
    assert [part.name.first for part in there] == [
        0,
        *(part.name.last + 1 for part in there[:-1]),
    ]


@pytest.mark.parametrize(
    ("parts_there", "stale", "expected"),
    [
        ([(0, 0)] * 3, (), [(0, 3)]),
        ([(0, 0)], (), []),
        ([(0, 0)], (0,), [(0, 1)]),
        # Short enough to be one part in the end.
        ([(1, 33), (1, 30), (0, 0)], (), [(0, 3)]),
        # A long run: only what is not full, or has rows that were replaced.
        ([(1, 33)] * 3 + [(1, 3), (0, 0)], (), [(3, 5)]),
        ([(1, 33)] * 3 + [(1, 3), (0, 0)], (1,), [(1, 2), (3, 5)]),
        ([(2, 3), (1, 2), (1, 33), (1, 33), (1, 3), (0, 0)], (), [(0, 2), (4, 6)]),
    ],
)
def test_what_is_merged_in_the_end(
    parts_there: list[tuple[int, int]], stale: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    there = laid(*parts_there)
    assert last_merges(there, [place in stale for place in range(len(there))]) == expected


# What is in the folder


def put(writer: TraceWriter, pass_id: int, version: int, *, last: bool) -> None:
    """A version of a pass and of a request with the same number; a pass carries its version as its thread."""
    writer.put_pass(forward_pass(pass_id, thread_id=version, may_change=not last))
    finish = Finish.STOP if last else None
    writer.put_request(request(f"r{pass_id}", output_tokens=version, finish=finish))


def stored(trace: Path) -> tuple[dict[int, int], dict[str, int]]:
    """The versions in a folder, by the reader; each row must be there once."""
    opened = open_trace(trace)
    assert opened.damage == ()
    passes = opened.passes.select(["pass_id", "thread_id"]).to_pylist()
    requests = opened.requests.select(["request_id", "output_tokens"]).to_pylist()
    found = {row["pass_id"]: row["thread_id"] for row in passes}
    found_requests = {row["request_id"]: row["output_tokens"] for row in requests}
    assert (len(found), len(found_requests)) == (len(passes), len(requests))
    assert list(found) == sorted(found)
    return found, found_requests


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 12)),
            st.tuples(st.just("flush"), st.just(0)),
            st.tuples(st.just("step"), st.integers(1, 9)),
        ),
        max_size=45,
    )
)
def test_a_kill_at_any_moment_loses_only_what_was_not_flushed(
    actions: list[tuple[str, int]], small_tiers: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows are put up to four times, with flushes and steps of merges in between; the folder is read after each."""
    trace = tmp_path_factory.mktemp("kill") / "trace"
    writer = TraceWriter(trace, rank=0, pid=7)
    versions: dict[int, int] = {}
    on_disk: dict[int, int] = {}
    for action, number in actions:
        if action == "put" and versions.get(number, 0) < 4:
            versions[number] = versions.get(number, 0) + 1
            put(writer, number, versions[number], last=versions[number] == 4)
        elif action == "flush":
            writer.flush()
            on_disk = dict(versions)
        elif action == "step":
            for _ in range(number):
                writer.merge_step()
        if action != "put":
            expected = {f"r{key}": version for key, version in on_disk.items()}
            assert stored(trace) == (on_disk, expected)
    writer.close()
    assert stored(trace)[0] == versions
    for table in ("passes", "requests"):
        assert len(names(trace, table)) == bool(versions)
        rows = [pq.ParquetFile(file).metadata.num_rows for file in (trace / table).rglob("*.pa*")]
        assert sum(rows) == len(versions)
    # Nothing is kept of rows that cannot change any more.
    for kept in writer._tables.values():
        assert not kept._stale
        assert len(kept._open_keys) <= sum(version < 4 for version in versions.values())


def test_a_kill_between_the_rename_and_the_deletion(small_tiers: None, trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    for version in range(1, 5):
        put(writer, version, 1, last=True)
        put(writer, 0, version, last=version == 4)
        writer.flush()
    before = trace.with_name("before")
    shutil.copytree(trace, before)
    merge_all(writer)
    assert names(trace) == ["part-7-000000-000002.parquet", "part-7-000003-000003.parquet"]
    for file in (before / "passes/rank=0").iterdir():
        shutil.copy(file, trace / "passes/rank=0")
    assert len(names(trace)) == 5
    assert stored(trace)[0] == {0: 4, 1: 1, 2: 1, 3: 1, 4: 1}


def test_an_unfinished_merge_is_not_seen(small_tiers: None, trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    for number in range(4):
        put(writer, number, 1, last=True)
        writer.flush()
    fresh = names(trace)
    while writer.merge_step() and names(trace) == fresh:
        hidden = [file.name for file in trace.iterdir() if file.is_file()]
        assert hidden == [".passes-rank=0-part-7-000000-000002.parquet.tmp"]
        assert stored(trace)[0] == dict.fromkeys(range(4), 1)
    assert names(trace)[0] == "part-7-000000-000002.parquet"


def test_flushes_go_on_during_a_merge(small_tiers: None, trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    for number in range(5):
        put(writer, number, 1, last=number > 0)
        writer.flush()
        writer.merge_step()
    # Pass 0 was taken already, and is written again.
    put(writer, 0, 2, last=True)
    writer.flush()
    assert stored(trace)[0] == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    merge_all(writer)
    assert stored(trace)[0] == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    writer.close()
    (part,) = (trace / "passes").rglob("*.parquet")
    assert sorted(pq.read_table(part, columns=["pass_id"])["pass_id"].to_pylist()) == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_full_part_is_left_alone(
    small_tiers: None, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    for number in range(4):
        writer.put_rows("kernels", kernels(2, begin=2 * number))
        writer.flush()
    merge_all(writer)
    full = trace / "kernels/rank=0/part-7-000000-000002.parquet"
    monkeypatch.setattr(parts, "FULL_PART_BYTES", full.stat().st_size)
    before = full.stat().st_ino
    for number in range(4, 12):
        writer.put_rows("kernels", kernels(2, begin=2 * number))
        writer.flush()
        merge_all(writer)
    writer.close()
    assert full.stat().st_ino == before
    rows = [
        row
        for name in names(trace, "kernels")
        for row in pq.read_table(full.with_name(name))["start_ns"].to_pylist()
    ]
    assert rows == list(range(24))


def kernels(count: int, begin: int = 0) -> pa.Table:
    return to_arrow(
        [Kernel(f"k{n}", "cpu", n, n + 1, "test") for n in range(begin, begin + count)],
        KERNELS.arrow,
    )


def test_row_groups_are_even_whatever_the_parts(trace: Path) -> None:
    """A merge holds a row group or two: groups neither grow nor split from merge to merge."""
    writer = TraceWriter(trace, rank=0, pid=7)
    sizes = (1, 40_000, 3, 20_000)
    for size in sizes:
        writer.put_rows("kernels", kernels(size))
        writer.flush()
    writer.close()
    (file,) = (trace / "kernels").rglob("*.parquet")
    with pq.ParquetFile(file) as part:
        groups = [part.metadata.row_group(i).num_rows for i in range(part.num_row_groups)]
    whole, rest = divmod(sum(sizes), parts.ROW_GROUP)
    assert groups == [parts.ROW_GROUP] * whole + [rest]


def test_rows_of_many_bytes_make_smaller_groups(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "ROW_GROUP_BYTES", 100_000)
    writer = TraceWriter(trace, rank=0, pid=7)
    for number in range(12):
        writer.put_request(request(f"r{number}", itl_ns=(1,) * 5000))
        writer.flush()
    writer.close()
    (file,) = (trace / "requests").rglob("*.parquet")
    with pq.ParquetFile(file) as part:
        # 40 kB each: three make a group.
        assert [part.metadata.row_group(i).num_rows for i in range(part.num_row_groups)] == [3] * 4


def test_a_lost_part_ends_the_merge_and_leaves_the_others(small_tiers: None, trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    for number in range(4):
        put(writer, number, 1, last=True)
        writer.flush()
    (trace / "passes/rank=0/part-7-000001-000001.parquet").unlink()
    with pytest.raises(OSError):
        merge_all(writer)
    assert names(trace) == [f"part-7-00000{n}-00000{n}.parquet" for n in (0, 2, 3)]
    assert not [file for file in trace.iterdir() if file.is_file()]


def test_a_process_that_moves_to_its_rank_gives_a_merge_up(small_tiers: None, trace: Path) -> None:
    writer = TraceWriter(trace, rank=0, pid=7)
    for number in range(4):
        put(writer, number, 1, last=True)
        writer.flush()
    writer.merge_step()
    writer.move_to(3)
    assert not [file for file in trace.iterdir() if file.is_file()]
    merge_all(writer)
    writer.close()
    assert names(trace) == ["part-7-000000-000003.parquet"]
    assert stored(trace)[0] == dict.fromkeys(range(4), 1)


def test_nothing_is_kept_of_what_has_ended(small_tiers: None, trace: Path) -> None:
    """Ten times the requests leave no more behind in the writer."""
    writer = TraceWriter(trace, rank=0, pid=7)
    kept = []
    for number in range(200):
        put(writer, number, 1, last=False)
        writer.flush()
        put(writer, number, 2, last=True)
        writer.flush()
        merge_all(writer)
        if number in (19, 199):
            kept.append(
                sum(
                    len(table._open_keys) + len(table._stale) + len(table._rows)
                    for table in writer._tables.values()
                )
            )
    assert kept[1] <= kept[0] + 4
    assert len(names(trace)) < 16


# How it is stored


@pytest.mark.parametrize("spec", TABLES, ids=lambda spec: spec.name)
def test_each_column_has_one_encoding(spec: Any) -> None:
    chosen = options(spec.arrow, spec.key)
    assert not set(chosen["use_dictionary"]) & set(chosen["column_encoding"])


def test_merged_parts_are_read_by_others(trace: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    polars = pytest.importorskip("polars")
    writer = TraceWriter(trace, rank=0, pid=7)
    for number in range(300):
        start = 1_700_000_000 * 10**9 + number * 20_000_123
        writer.put_pass(forward_pass(number, start_ns=start, phase=Phase.DECODE))
        writer.put_request(replace(request(f"p1.g{number}.r0"), itl_ns=(number, 2, -3)))
        writer.flush()
    writer.close()
    with duckdb.connect() as base:
        found = base.execute(
            f"select count(*), sum(pass_id), max(start_ns), any_value(phase), sum(slices[1].prompt) "
            f"from '{trace}/passes/**/*.parquet'"
        ).fetchall()
        assert found == [(300, 44_850, 1_700_000_000 * 10**9 + 299 * 20_000_123, "decode", 2700)]
        ids = base.execute(f"select request_id, itl_ns from '{trace}/requests/**/*.parquet'")
        expected = [(f"p1.g{number}.r0", [number, 2, -3]) for number in range(300)]
        assert ids.fetchall() == expected
    frame = polars.read_parquet(f"{trace}/requests/**/*.parquet")
    assert list(zip(frame["request_id"], frame["itl_ns"].to_list(), strict=True)) == expected
    assert polars.read_parquet(f"{trace}/passes/**/*.parquet")["pass_id"].sum() == 44_850
