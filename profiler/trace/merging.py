"""Merge parts of a table into one, a little at a time: between two steps fresh parts can be written."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from phaseprof.schema import TableSpec
from phaseprof.trace.parts import ROW_GROUP, ROW_GROUP_BYTES, Part, PartName, options


class Merge:
    """Merges parts that follow one another. Memory holds a row group or two, however large they are.

    Args:
        spec: Their table.
        folder: Where they lie.
        parts: The parts.
        temporary: Where the merged part is written; the caller renames it.
        replaced: The keys of a part whose rows later parts have again: they are left out.
    """

    def __init__(
        self,
        spec: TableSpec,
        folder: Path,
        parts: Sequence[Part],
        temporary: Path,
        replaced: Callable[[PartName], Collection[Hashable]],
    ) -> None:
        self.parts = tuple(parts)
        self.name = parts[0].name.up_to(parts[-1].name)
        self.temporary = temporary
        self._spec = spec
        self._schema = spec.arrow
        self._folder = folder
        self._replaced = replaced
        self._left = deque(part.name for part in parts)
        self._source: Any = None
        self._part = parts[0].name
        self._group = 0
        self._rows: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None

    def step(self) -> bool:
        """Take one more row group. False once all are taken and the merged part is whole.

        Raises:
            OSError, pyarrow.ArrowException: If a part cannot be read or the merged one not be written; `abort` then.
        """
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                str(self.temporary), self._schema, **options(self._schema, self._spec.key)
            )
        if self._source is None and not self._left:
            self._write(all_rows=True)
            self._writer.close()
            return False
        if self._source is None:
            self._part = self._left.popleft()
            self._source = _open(self._folder / str(self._part))
            self._group = 0
        if self._group < self._source.num_row_groups:
            # One column after the other: several at once would each need their buffers.
            rows = self._source.read_row_group(self._group, use_threads=False)
            self._rows.append(self._current(rows))
            self._group += 1
            self._write(all_rows=False)
        if self._group >= self._source.num_row_groups:
            self._source.close()
            self._source = None
        return True

    def abort(self) -> None:
        """Leave the parts as they are."""
        with contextlib.suppress(OSError, pa.ArrowException):
            if self._source is not None:
                self._source.close()
        with contextlib.suppress(OSError, pa.ArrowException):
            if self._writer is not None:
                self._writer.close()
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)

    def _current(self, rows: pa.Table) -> pa.Table:
        """Leave out rows that a later part has again."""
        replaced = self._replaced(self._part)
        if replaced:
            keys = rows.column(self._spec.key).to_pylist()
            rows = _keep(rows, [key not in replaced for key in keys])
        return with_schema(rows, self._schema)

    def _write(self, *, all_rows: bool) -> None:
        assert self._writer is not None
        waiting = sum(len(rows) for rows in self._rows)
        heavy = sum(rows.nbytes for rows in self._rows) >= ROW_GROUP_BYTES
        if waiting < ROW_GROUP and not heavy and not (all_rows and waiting):
            return
        rows = pa.concat_tables(self._rows)
        whole = len(rows)
        if not all_rows and whole >= ROW_GROUP:
            whole -= whole % ROW_GROUP
        self._writer.write_table(rows.slice(0, whole), row_group_size=ROW_GROUP)
        self._rows = [rows.slice(whole)] if whole < len(rows) else []


def _open(part: Path) -> Any:
    """A part to be read row group by row group, with memory from the system's allocator: Arrow's own, which
    `ParquetFile` always uses, would keep a multiple of what a merge needs."""
    try:
        reader = pq.core.ParquetReader(memory_pool=pa.system_memory_pool())
        reader.open(str(part), use_memory_map=False)
    except (AttributeError, TypeError):
        # Not a public name; other versions of pyarrow may have another.
        return pq.ParquetFile(str(part))
    return reader


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


def with_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows with exactly this schema."""
    return rows if rows.schema.equals(schema) else rows.cast(schema)
