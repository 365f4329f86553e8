"""Open a trace: whole, half-written or damaged.

What can be read is read; each part that cannot be is named in `Trace.damage`. Rows that were written again (a pass
that a later one settled, a request that ended) are replaced by their last version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phaseprof.errors import TraceError
from phaseprof.schema import KERNELS, PASSES, REQUESTS, SAMPLES, SCHEMA_VERSION, TableSpec
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.writer import PartName

_SHOW = "See `phaseprof report --help`; a trace is the folder given to -o, with passes/ and meta/ inside."


@dataclass(frozen=True, slots=True)
class Trace:
    """The tables of a trace, with the rows that were written again replaced, and what could not be read.

    Attributes:
        path: The folder.
        passes, requests, kernels, samples: Arrow tables with the columns of `phaseprof.schema` and a column ``rank``.
        metas: One a process.
        damage: Parts that could not be read, one sentence each.
        size_bytes: Size of the folder.
    """

    path: Path
    passes: pa.Table
    requests: pa.Table
    kernels: pa.Table
    samples: pa.Table
    metas: tuple[ProcessMeta, ...]
    damage: tuple[str, ...]
    size_bytes: int


def open_trace(path: str | Path) -> Trace:
    """Open the trace in a folder. A run that is still going may be opened: what was flushed is there.

    Raises:
        TraceError: If there is no trace, or nothing of it can be read.
    """
    folder = Path(path)
    if not folder.exists():
        raise TraceError(f"There is no trace at {folder}.", _SHOW)
    if not folder.is_dir():
        raise TraceError(f"{folder} is a file, and a trace is a folder.", _SHOW)
    if not (folder / "meta").is_dir() and not (folder / PASSES.name).is_dir():
        raise TraceError(f"{folder} holds no trace: neither meta/ nor passes/ is there.", _SHOW)

    damage: list[str] = []
    tables = {
        spec.name: _read_table(folder, spec, damage)
        for spec in (PASSES, REQUESTS, KERNELS, SAMPLES)
    }
    metas = tuple(_read_metas(folder / "meta", damage))
    if damage and not metas and not any(len(table) for table in tables.values()):
        raise TraceError(f"Nothing of the trace {folder} can be read: {damage[0]}", _SHOW)
    return Trace(
        path=folder,
        metas=metas,
        damage=tuple(damage),
        size_bytes=sum(file.stat().st_size for file in _files(folder)),
        **tables,
    )


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


def _read_table(folder: Path, spec: TableSpec, damage: list[str]) -> pa.Table:
    schema = spec.arrow.append(pa.field("rank", pa.int32(), nullable=False))
    tables = []
    for part, rank in _parts(folder / spec.name):
        try:
            # A part by its own path: a folder name must not be taken for a partition column here.
            rows = pq.ParquetFile(part).read()
            tables.append(_conform(rows, rank, schema))
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            damage.append(f"{part.relative_to(folder)} cannot be read: {reason}.")
    if not tables:
        return schema.empty_table()
    return _last_rows(pa.concat_tables(tables), spec)


def _parts(folder: Path) -> list[tuple[Path, int]]:
    """The parts of a table with their ranks, in the order in which they were written."""
    found = []
    for rank_folder in sorted(folder.glob("rank=*")):
        text = rank_folder.name.removeprefix("rank=")
        if not text.isdecimal():
            continue
        named = [(PartName.parse(file.name), file) for file in rank_folder.glob("*.parquet")]
        ours = [(name, file) for name, file in named if name is not None]
        others = [file for name, file in named if name is None]
        whole = [
            (name, file)
            for name, file in ours
            if not any(wider.holds(name) and wider != name for wider, _ in ours)
        ]
        whole.sort(key=lambda item: (item[0].pid, item[0].first))
        found += [(file, int(text)) for file in [*sorted(others), *(file for _, file in whole)]]
    return found


def _conform(rows: pa.Table, rank: int, schema: pa.Schema) -> pa.Table:
    """Bring the rows of any version to this version's columns: a missing one becomes null, a newer one is dropped."""
    columns = []
    for field in schema:
        if field.name == "rank":
            columns.append(pa.repeat(pa.scalar(rank, pa.int32()), len(rows)))
        elif field.name in rows.column_names:
            columns.append(rows.column(field.name).cast(field.type))
        else:
            columns.append(pa.nulls(len(rows), field.type))
    nullable = pa.schema([field.with_nullable(True) for field in schema])
    return pa.Table.from_arrays(columns, schema=nullable)


def _last_rows(rows: pa.Table, spec: TableSpec) -> pa.Table:
    """Keep the last row of each key. Keys are unique over processes."""
    if not spec.key or pc.count_distinct(rows.column(spec.key)).as_py() == len(rows):
        return rows
    numbered = pa.table(
        {"key": rows.column(spec.key), "row": pa.array(range(len(rows)), pa.int64())}
    )
    last = numbered.group_by("key").aggregate([("row", "max")]).column("row_max")
    return rows.take(last.take(pc.sort_indices(last)))


def _read_metas(folder: Path, damage: list[str]) -> Iterator[ProcessMeta]:
    for file in sorted(folder.glob("*.json")):
        where = f"meta/{file.name}"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["schema"] > SCHEMA_VERSION:
                damage.append(
                    f"{where} was written by a newer phaseprof (schema {data['schema']}, this one reads "
                    f"{SCHEMA_VERSION}): columns may be missing."
                )
            yield ProcessMeta.from_json(data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            damage.append(f"{where} cannot be read: {type(error).__name__}: {error}.")
