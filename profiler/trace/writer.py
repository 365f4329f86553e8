"""Write a trace while the workload runs: small parts often, merged into large ones.

A part is written under a temporary name in the trace's folder and renamed into its table's, so that a reader never sees
half of one and a SIGKILL loses only what was not flushed yet. Its name says which parts it stands for::

    TRACE/passes/rank=0/part-<host>-<pid>-<first>-<last>.parquet

A freshly flushed part has first = last. Once enough of them lie there they are merged into one that spans their
numbers; a reader that finds both (a kill between the rename and the deletion) takes the wider one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from phaseprof.errors import TraceError
from phaseprof.records import ForwardPass, Kernel, Request
from phaseprof.schema import KERNELS, PASSES, REQUESTS, SAMPLES, TableSpec
from phaseprof.trace.columns import to_column
from phaseprof.trace.meta import ProcessMeta

#: Parts of one table that may lie unmerged. With a flush every half second that is a merge every half minute, and a
#: run of a day leaves some dozens of files if it is killed, one a table if it ends.
MERGE_AFTER_PARTS = 64
#: Parts of this size are left alone by later merges (unless smaller ones lie before them), so that a long run does not
#: rewrite itself.
FULL_PART_BYTES = 64 * 2**20

_PART = re.compile(
    r"part-(?:(?P<host>[0-9a-f]{6})-)?(?P<pid>\d+)-(?P<first>\d+)-(?P<last>\d+)\.parquet"
)


@dataclass(frozen=True, slots=True)
class PartName:
    """The name of a part: its process and the numbers of the flushes that it holds.

    Attributes:
        pid: Process id.
        first, last: Numbers of the first and the last flush inside.
        host: `Host.token` of the process's host: hosts that share a folder have the same process ids. Empty in a
            trace that was written without it.
    """

    pid: int
    first: int
    last: int
    host: str = ""

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """Read a file name; None if it is not one of a part."""
        match = _PART.fullmatch(name)
        if match is None:
            return None
        pid, first, last = (int(match[name]) for name in ("pid", "first", "last"))
        return cls(pid, first, last, match["host"] or "")

    def __str__(self) -> str:
        process = f"{self.host}-{self.pid}" if self.host else f"{self.pid}"
        return f"part-{process}-{self.first:06d}-{self.last:06d}.parquet"

    @property
    def process(self) -> tuple[str, int]:
        """The process that wrote it: host and process id."""
        return self.host, self.pid

    def holds(self, other: PartName) -> bool:
        """Whether all of another part is in this one."""
        return (
            self.process == other.process and self.first <= other.first and other.last <= self.last
        )


class TraceWriter:
    """Writes the tables and the meta file of one process.

    Rows with the key of a row that was put before replace it, whether that one has been flushed or not. Not
    thread-safe: one thread owns it.

    Args:
        path: The trace's folder; made if missing.
        rank: Rank of the process.
        pid: Its process id.
        host: `Host.token` of its host.

    Raises:
        TraceError: If the folder cannot be made or written.
    """

    def __init__(self, path: Path, *, rank: int, pid: int, host: str = "") -> None:
        self.path = path
        self.rank = rank
        self.pid = pid
        self.host = host
        try:
            (path / "meta").mkdir(parents=True, exist_ok=True)
            self._tables = {
                spec.name: _TableWriter(path, spec, rank, pid, host)
                for spec in (PASSES, REQUESTS, KERNELS, SAMPLES)
            }
        except OSError as error:
            raise TraceError(
                f"The trace cannot be written to {path}: {error.strerror or error}.",
                "Choose another folder with -o.",
            ) from error

    @property
    def meta_path(self) -> Path:
        """The meta file of this process."""
        return meta_path(self.path, self.rank, self.pid, self.host)

    def move_to(self, rank: int) -> None:
        """The process turns out to have another rank: what it has written moves to the folders of that one.

        Raises:
            OSError: If it cannot be moved.
        """
        before = self.meta_path
        self.rank = rank
        if before.exists():
            before.rename(self.meta_path)
        for table in self._tables.values():
            table.move_to(rank)

    def put_pass(self, row: ForwardPass) -> None:
        """Add a pass, or replace the one with its id."""
        self._tables["passes"].put(row.pass_id, row)

    def put_request(self, row: Request) -> None:
        """Add a request, or replace the one with its id."""
        self._tables["requests"].put(row.request_id, row)

    def put_rows(self, table: str, rows: pa.Table) -> None:
        """Add Arrow rows to a table without keys (kernels, samples)."""
        self._tables[table].put_arrow(rows)

    @property
    def pending_rows(self) -> int:
        """Rows that are not on disk yet."""
        return sum(table.pending_rows for table in self._tables.values())

    def flush(self) -> None:
        """Write what is pending as one part a table.

        Raises:
            OSError: If it cannot be written.
        """
        for table in self._tables.values():
            table.flush()

    def write_meta(self, meta: ProcessMeta) -> None:
        """Write the meta file, whole or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        write_json(self.meta_path, meta.to_json())

    def close(self) -> None:
        """Flush, and merge what this process wrote into one part a table.

        Raises:
            OSError: If it cannot be written.
        """
        for table in self._tables.values():
            table.flush()
            table.merge()


def meta_path(trace: Path, rank: int, pid: int, host: str = "") -> Path:
    """Where the meta file of a process lies. `host` is the token of its host, empty in a trace written without it."""
    where = f"-host-{host}" if host else ""
    return trace / "meta" / f"rank-{rank}{where}-pid-{pid}.json"


def write_json(path: Path, data: Any) -> None:
    """Write JSON under a temporary name and rename it.

    Raises:
        OSError: If it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class _TableWriter:
    """One table of one process."""

    def __init__(self, trace: Path, spec: TableSpec, rank: int, pid: int, host: str) -> None:
        self._trace = trace
        self._folder = trace / spec.name / f"rank={rank}"
        self._spec = spec
        self._schema = spec.arrow
        self._pid = pid
        self._host = host
        self._number = 0
        self._rows: dict[Hashable, Any] = {}
        self._arrow: list[pa.Table] = []
        #: What lies in the folder, in order.
        self._parts: list[PartName] = []
        #: Keys that were flushed and may still change, and the flush that their row lies in.
        self._open_keys: dict[Hashable, int] = {}
        #: Keys with rows that a later flush replaced: the oldest flush with such a row, and the one with the last row.
        self._stale: dict[Hashable, tuple[int, int]] = {}

    @property
    def pending_rows(self) -> int:
        return len(self._rows) + sum(len(table) for table in self._arrow)

    def put(self, key: Hashable, row: Any) -> None:
        self._rows[key] = row

    def put_arrow(self, rows: pa.Table) -> None:
        self._arrow.append(_with_schema(rows, self._schema))

    def flush(self) -> None:
        if not self._rows and not self._arrow:
            return
        tables = list(self._arrow)
        if self._rows:
            tables.append(to_arrow(self._rows.values(), self._schema))
        name = PartName(self._pid, self._number, self._number, self._host)
        self._make_folder()
        self._write(pa.concat_tables(tables), name)
        self._remember(name)
        self._rows.clear()
        self._arrow.clear()
        self._number += 1
        small = [place for place, part in enumerate(self._parts) if not self._is_full(part)]
        if len(small) >= MERGE_AFTER_PARTS:
            self.merge(small[0])

    def move_to(self, rank: int) -> None:
        before, self._folder = self._folder, self._folder.with_name(f"rank={rank}")
        if not self._parts:
            return
        self._make_folder()
        for part in self._parts:
            (before / str(part)).rename(self._folder / str(part))
        # Another process of that rank may have parts there.
        with contextlib.suppress(OSError):
            before.rmdir()

    def _make_folder(self) -> None:
        # Without its parents: a trace that was deleted or unmounted while the run goes on is not made again.
        self._folder.parent.mkdir(exist_ok=True)
        self._folder.mkdir(exist_ok=True)

    def _remember(self, name: PartName) -> None:
        self._parts.append(name)
        if not self._spec.key:
            return
        for key, row in self._rows.items():
            before = self._open_keys.pop(key, None)
            if before is not None:
                oldest, _ = self._stale.get(key, (before, 0))
                self._stale[key] = (oldest, name.last)
            if row.may_change:
                self._open_keys[key] = name.last

    def merge(self, begin: int = 0) -> None:
        """Merge the parts from the one at ``begin`` on, row group by row group, so that memory does not grow with the
        run. None between them is left out, full or not: a name stands for all flushes from its first to its last.
        """
        parts = self._parts[begin:]
        if len(parts) < 2:
            return
        name = PartName(self._pid, parts[0].first, parts[-1].last, self._host)
        temporary = self._temporary(name)
        try:
            with pq.ParquetWriter(temporary, self._schema, **_PARQUET) as writer:
                batch: list[pa.Table] = []
                for part in parts:
                    with pq.ParquetFile(self._folder / str(part)) as source:
                        for group in range(source.num_row_groups):
                            batch.append(self._current(source.read_row_group(group), part))
                            if sum(len(table) for table in batch) >= _ROW_GROUP:
                                writer.write_table(pa.concat_tables(batch))
                                batch.clear()
                if batch:
                    writer.write_table(pa.concat_tables(batch))
            self._rename(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._parts[begin:] = [name]
        self._stale = {key: span for key, span in self._stale.items() if span[0] < name.first}
        for part in parts:
            (self._folder / str(part)).unlink(missing_ok=True)

    def _current(self, rows: pa.Table, part: PartName) -> pa.Table:
        """Leave out rows that a later part has again."""
        if self._stale:
            keys = rows.column(self._spec.key).to_pylist()
            current = [self._stale.get(key, (0, -1))[1] <= part.last for key in keys]
            if not all(current):
                rows = _keep(rows, current)
        return _with_schema(rows, self._schema)

    def _is_full(self, part: PartName) -> bool:
        with contextlib.suppress(OSError):
            return (self._folder / str(part)).stat().st_size >= FULL_PART_BYTES
        return False

    def _write(self, table: pa.Table, name: PartName) -> None:
        temporary = self._temporary(name)
        try:
            pq.write_table(table, temporary, **_QUICK)
            self._rename(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _rename(self, temporary: Path, name: PartName) -> None:
        temporary.replace(self._folder / str(name))

    def _temporary(self, name: PartName) -> Path:
        # Not beside the parts: polars takes every file in the folder of a table, hidden or not.
        return self._trace / f".{self._spec.name}-{self._folder.name}-{name}.tmp"


_ROW_GROUP = 32_768
_PARQUET: dict[str, Any] = {"compression": "zstd", "write_statistics": True}
#: A fresh part is written beside the workload and merged soon: half the CPU time counts, its size does not.
_QUICK: dict[str, Any] = {
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": False,
}


def _keep(rows: pa.Table, flags: Sequence[bool]) -> pa.Table:
    """The flagged rows, run by run. `filter` would import pyarrow.compute: 0.2 s of the workload's time."""
    runs = []
    begin = 0
    for flag, run in groupby(flags):
        length = sum(1 for _ in run)
        if flag:
            runs.append(rows.slice(begin, length))
        begin += length
    return pa.concat_tables(runs) if runs else rows.slice(0, 0)


def _with_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    return rows if rows.schema.equals(schema) else rows.cast(schema)


def to_arrow(rows: Iterable[ForwardPass | Request | Kernel], schema: pa.Schema) -> pa.Table:
    """Rows of one kind as an Arrow table; tuples of dataclasses become lists of structs."""
    listed = list(rows)
    columns = [
        to_column([getattr(row, field.name) for row in listed], field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
