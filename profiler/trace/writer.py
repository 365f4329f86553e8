"""Write a trace while the workload runs: small parts often, merged into large ones.

A part is written under a temporary name in the trace's folder and renamed into its table's, so that a reader never sees
half of one and a SIGKILL loses only what was not flushed yet. Its name says which parts it stands for::

    TRACE/passes/rank=0/part-<host>-<pid>-<first>-<last>.parquet

A freshly flushed part has first = last. Once enough of them lie there they are merged into one that spans their
numbers (`phaseprof.trace.parts` says which and when); a reader that finds both (a kill between the rename and the
deletion) takes the wider one. A merge goes on in small steps beside the flushes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Hashable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from phaseprof.errors import TraceError
from phaseprof.records import Call, EngineStep, ForwardPass, Kernel, Request, Sample
from phaseprof.schema import TABLES, TableSpec
from phaseprof.trace.columns import to_column
from phaseprof.trace.merging import Merge, with_schema
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.parts import (
    FRESH_OPTIONS,
    ROW_GROUP,
    Part,
    PartName,
    due,
    last_merges,
    options,
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
        packed: No workload waits, and parts are large: they are compressed at once, and not merged.

    Raises:
        TraceError: If the folder cannot be made or written.
    """

    def __init__(
        self, path: Path, *, rank: int, pid: int, host: str = "", packed: bool = False
    ) -> None:
        self.path = path
        self.rank = rank
        self.pid = pid
        self.host = host
        try:
            (path / "meta").mkdir(parents=True, exist_ok=True)
            self._tables = {
                spec.name: _TableWriter(path, spec, rank, pid, host, packed=packed)
                for spec in TABLES
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

    def put_step(self, row: EngineStep) -> None:
        """Add a step of an engine's scheduler; each is put once."""
        self._tables["steps"].put((row.engine, row.step), row)

    def put_rows(self, table: str, rows: pa.Table) -> None:
        """Add Arrow rows to a table without keys (kernels, samples, calls)."""
        self._tables[table].put_arrow(rows)

    @property
    def pending_rows(self) -> int:
        """Rows that are not on disk yet."""
        return sum(table.pending_rows for table in self._tables.values())

    def flush(self) -> None:
        """Write what is pending as one part a table. A merge may then be due: see `merge_step`.

        Raises:
            OSError: If it cannot be written.
        """
        for table in self._tables.values():
            table.flush()

    def merge_step(self) -> bool:
        """Go on with the merges that are due, by some milliseconds. False if there is nothing to do.

        Raises:
            OSError: If it cannot be written, or a part has gone.
        """
        return any(table.merge_step() for table in self._tables.values())

    def write_meta(self, meta: ProcessMeta) -> None:
        """Write the meta file, whole or not at all.

        Raises:
            OSError: If it cannot be written.
        """
        write_json(self.meta_path, meta.to_json())

    def close(self) -> None:
        """Flush, and merge what this process wrote: into one part a table, of a very long run into a few.

        Raises:
            OSError: If it cannot be written.
        """
        for table in self._tables.values():
            table.flush()
            table.close()


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

    def __init__(
        self, trace: Path, spec: TableSpec, rank: int, pid: int, host: str, *, packed: bool
    ) -> None:
        self._trace = trace
        self._packed = packed
        self._folder = trace / spec.name / f"rank={rank}"
        self._spec = spec
        self._schema = spec.arrow
        self._pid = pid
        self._host = host
        self._number = 0
        self._merged_up_to = 0
        self._rows: dict[Hashable, Any] = {}
        self._arrow: list[pa.Table] = []
        #: What lies in the folder, in order.
        self._parts: list[Part] = []
        self._merge: Merge | None = None
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
        self._arrow.append(with_schema(rows, self._schema))

    def flush(self) -> None:
        if not self._rows and not self._arrow:
            return
        tables = list(self._arrow)
        if self._rows:
            tables.append(to_arrow(self._rows.values(), self._schema))
        name = PartName(self._pid, self._number, self._number, self._host)
        self._make_folder()
        self._parts.append(Part(name, 0, self._write(pa.concat_tables(tables), name)))
        self._remember(name)
        self._rows.clear()
        self._arrow.clear()
        self._number += 1

    def merge_step(self) -> bool:
        if self._merge is None:
            run = due(self._parts)
            if run is None:
                return False
            self._merge = self._begin_merge(*run)
        self._go_on(self._merge)
        return True

    def close(self) -> None:
        self._abort_merge()
        if self._packed:
            return
        stale = [bool(self._replaced(part.name)) for part in self._parts]
        # From the back, so that the places before stay what they are.
        for begin, end in reversed(last_merges(self._parts, stale)):
            self._merge = self._begin_merge(begin, end)
            while self._merge is not None:
                self._go_on(self._merge)

    def move_to(self, rank: int) -> None:
        self._abort_merge()
        before, self._folder = self._folder, self._folder.with_name(f"rank={rank}")
        if not self._parts:
            return
        self._make_folder()
        for part in self._parts:
            (before / str(part.name)).rename(self._folder / str(part.name))
        # Another process of that rank may have parts there.
        with contextlib.suppress(OSError):
            before.rmdir()

    def _make_folder(self) -> None:
        # Without its parents: a trace that was deleted or unmounted while the run goes on is not made again.
        self._folder.parent.mkdir(exist_ok=True)
        self._folder.mkdir(exist_ok=True)

    def _remember(self, name: PartName) -> None:
        if not self._spec.key:
            return
        for key, row in self._rows.items():
            before = self._open_keys.pop(key, None)
            if before is not None:
                oldest, _ = self._stale.get(key, (before, 0))
                self._stale[key] = (oldest, name.last)
            if row.may_change:
                self._open_keys[key] = name.last

    def _replaced(self, part: PartName) -> Collection[Hashable]:
        """Keys of which a part may have rows that a later one has again."""
        return {key for key, (oldest, last) in self._stale.items() if oldest <= part.last < last}

    def _begin_merge(self, begin: int, end: int) -> Merge:
        parts = self._parts[begin:end]
        temporary = self._temporary(parts[0].name.up_to(parts[-1].name))
        # What is written again while the merge goes on is left out by the next one.
        self._merged_up_to = self._number
        return Merge(self._spec, self._folder, parts, temporary, self._replaced)

    def _go_on(self, merge: Merge) -> None:
        try:
            if merge.step():
                return
            size = merge.temporary.stat().st_size
            self._rename(merge.temporary, merge.name)
        except BaseException:
            self._abort_merge()
            raise
        self._merge = None
        # Arrow keeps what a merge has read with for later; the workload needs it now.
        pa.default_memory_pool().release_unused()
        begin = self._parts.index(merge.parts[0])
        tier = max(part.tier for part in merge.parts) + 1
        self._parts[begin : begin + len(merge.parts)] = [Part(merge.name, tier, size)]
        self._forget_stale(merge.name)
        for part in merge.parts:
            if part.name != merge.name:
                (self._folder / str(part.name)).unlink(missing_ok=True)

    def _abort_merge(self) -> None:
        if self._merge is not None:
            self._merge.abort()
            self._merge = None

    def _forget_stale(self, merged: PartName) -> None:
        """The rows that were replaced are gone from a merged part, but for those replaced while it was made."""
        for key, (oldest, last) in list(self._stale.items()):
            if oldest < merged.first or last >= self._merged_up_to:
                continue
            if last <= merged.last + 1:
                del self._stale[key]
            elif oldest <= merged.last:
                self._stale[key] = (merged.last + 1, last)

    def _write(self, table: pa.Table, name: PartName) -> int:
        """Write a fresh part; its size in bytes."""
        temporary = self._temporary(name)
        form = options(self._schema, self._spec.key) if self._packed else FRESH_OPTIONS
        try:
            pq.write_table(table, str(temporary), row_group_size=ROW_GROUP, **form)
            size = temporary.stat().st_size
            self._rename(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        return size

    def _rename(self, temporary: Path, name: PartName) -> None:
        temporary.replace(self._folder / str(name))

    def _temporary(self, name: PartName) -> Path:
        # Not beside the parts: polars takes every file in the folder of a table, hidden or not.
        return self._trace / f".{self._spec.name}-{self._folder.name}-{name}.tmp"


def to_arrow(
    rows: Iterable[ForwardPass | Request | EngineStep | Kernel | Sample | Call], schema: pa.Schema
) -> pa.Table:
    """Rows of one kind as an Arrow table; tuples of dataclasses become lists of structs."""
    listed = list(rows)
    built = [to_column(list(map(attrgetter(field.name), listed)), field.type) for field in schema]
    return pa.Table.from_arrays(built, schema=schema)
