"""Open a trace: whole, half-written or damaged.

What can be read is read; each part that cannot be is named in `Trace.damage`. Rows that were written again (a pass
that a later one settled, a request that ended) are replaced by their last version.

`prof.trace` reads in the workload's process, so nothing here may import pandas: `pyarrow.array`, `pyarrow.scalar`,
`empty_table` and `group_by` do.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phaseprof.errors import TraceError
from phaseprof.schema import CALLS, PASSES, REQUESTS, SCHEMA_VERSION, STEPS, TABLES, TableSpec
from phaseprof.trace.columns import to_column
from phaseprof.trace.forms import Form, Lean, is_name
from phaseprof.trace.meta import ProcessMeta
from phaseprof.trace.parts import PartName
from phaseprof.trace.shown import trace_cell

_SHOW = "See `phaseprof report --help`; a trace is the folder given to -o, with passes/ and meta/ inside."

#: Row groups of the passes that a sample is read from: up to 65,000 rows.
_SAMPLED_GROUPS = 8
#: How often a folder is listed while its parts are being merged.
_LISTINGS = 5


@dataclass(frozen=True, slots=True)
class Trace:
    """The tables of a trace, with the rows that were written again replaced, and what could not be read.

    Attributes:
        path: The folder.
        passes, requests, steps, kernels, samples, calls: Arrow tables with the columns of `phaseprof.schema` and
            a column ``rank``; passes by their ids, so that those of a process are in order.
        metas: One a process.
        damage: Parts that could not be read, one sentence each.
        size_bytes: Size of the folder.
        sample: Some of the passes with all columns, evenly over the run, where `passes` was read without some; None
            where it has them.
    """

    path: Path
    passes: pa.Table
    requests: pa.Table
    kernels: pa.Table
    samples: pa.Table
    metas: tuple[ProcessMeta, ...]
    damage: tuple[str, ...]
    size_bytes: int
    steps: pa.Table = field(
        default_factory=lambda: Form.of(STEPS, frozenset(), lean=False).no_rows()
    )
    calls: pa.Table = field(
        default_factory=lambda: Form.of(CALLS, frozenset(), lean=False).no_rows()
    )
    sample: pa.Table | None = None

    @property
    def whole_passes(self) -> pa.Table:
        """Passes with all columns: every one, or those of the sample."""
        return self.passes if self.sample is None else self.sample

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = {spec.name: getattr(self, spec.name).num_rows for spec in TABLES}
        return trace_cell(str(self.path), self.metas, rows, self.damage)

    @property
    def cut_off(self) -> bool:
        """Whether rows may be missing: a process was killed or still runs, or a part could not be read."""
        return _cut_off(self.metas) or bool(self.damage)


def open_trace(path: str | Path, *, lean: Lean | None = None, since_ns: int | None = None) -> Trace:
    """Open the trace in a folder. A run that is still going may be opened: what was flushed is there.

    Args:
        path: The folder.
        lean: What is not needed of it. The columns that are read may then be dictionaries, and the whole numbers in
            slices narrower; None for every column as the schema has it.
        since_ns: What lies before this time (Unix ns) is not needed: whole row groups of it are not read. Requests that
            have not ended are read.

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
    unread: list[str] = []
    metas = tuple(_read_metas(folder / "meta", unread))
    tables = _read_tables(folder, lean, _cut_off(metas) or bool(unread), damage, since_ns)
    if lean is not None and damage and not _cut_off(metas):
        # It was cut off after all: read it again, with what that needs.
        damage.clear()
        tables = _read_tables(folder, lean, True, damage, since_ns)
    damage += unread
    if damage and not metas and not any(len(table) for table in tables.values()):
        raise TraceError(f"Nothing of the trace {folder} can be read: {damage[0]}", _SHOW)
    return Trace(
        path=folder,
        metas=metas,
        damage=tuple(damage),
        size_bytes=_size_bytes(folder),
        sample=None if lean is None else _read_sample(folder, since_ns),
        **tables,
    )


def _cut_off(metas: Sequence[ProcessMeta]) -> bool:
    return not metas or not all(meta.complete for meta in metas)


def _read_tables(
    folder: Path, lean: Lean | None, cut_off: bool, damage: list[str], since_ns: int | None
) -> dict[str, pa.Table]:
    omitted = frozenset[str]()
    if lean is not None:
        omitted = lean.without if cut_off else lean.without | lean.without_if_whole
    return {
        spec.name: _read_table(folder, Form.of(spec, omitted, lean is not None), damage, since_ns)
        for spec in TABLES
    }


def _size_bytes(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        # A run that goes on may delete what it has merged.
        with contextlib.suppress(OSError):
            size += file.stat().st_size if file.is_file() else 0
    return size


def _read_table(
    folder: Path, form: Form, damage: list[str], since_ns: int | None = None
) -> pa.Table:
    spec = form.spec
    for _ in range(_LISTINGS):
        found: list[str] = []
        try:
            tables = [
                rows
                for part, rank in _parts(folder / spec.name)
                for rows in _read_part(part, rank, form, part.relative_to(folder), found, since_ns)
            ]
        except _MergedAway:
            continue
        damage += found
        if not tables:
            return form.no_rows()
        rows = _last_rows(pa.concat_tables(tables), spec)
        if spec is PASSES and not _ascends(rows.column(spec.key)):
            # A pass that a later one settled lies behind that one.
            rows = rows.sort_by(spec.key)
        return rows
    damage.append(
        f"{spec.name} cannot be read: its parts are replaced faster than they can be read."
    )
    return form.no_rows()


class _MergedAway(Exception):
    """The run goes on, and a part was merged into another one since the folder was listed."""


def _read_part(
    part: Path, rank: int, form: Form, where: Path, damage: list[str], since_ns: int | None
) -> Iterator[pa.Table]:
    spec = form.spec
    try:
        # A part by its own path: a folder name must not be taken for a partition column here.
        with pq.ParquetFile(part) as file:
            schema = file.schema_arrow
            if (spec.key or "start_ns") not in schema.names:
                damage.append(f"{where} cannot be read: it is no part of {spec.name}.")
                return
            stored = [file.schema.column(place).path for place in range(len(file.schema))]
        rows = [form.conform(group, rank) for group in _row_groups(part, form, stored, since_ns)]
    except (OSError, pa.ArrowException, KeyError, ValueError, OverflowError) as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(part):
            raise _MergedAway from error
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        damage.append(f"{where} cannot be read: {reason}.")
        return
    if (version := _version(schema)) > SCHEMA_VERSION:
        damage.append(_newer(where, version))
    lacking = [c.name for c in spec.columns if not c.nullable and c.name not in schema.names]
    if lacking:
        damage.append(f"{where} lacks {', '.join(lacking)}: null in its rows.")
    yield from rows


def _read_sample(folder: Path, since_ns: int | None) -> pa.Table:
    """Some row groups of the passes, evenly over them; what cannot be read is named where all of them are. None for
    somebody who wants to know what happens now."""
    form = Form.of(PASSES, frozenset(), lean=False)
    if since_ns is not None:
        return form.no_rows()
    groups: list[tuple[Path, int, int]] = []
    for part, rank in _parts(folder / PASSES.name):
        with contextlib.suppress(OSError, pa.ArrowException), pq.ParquetFile(part) as file:
            groups += [(part, group, rank) for group in range(file.num_row_groups)]
    # One in so many, the last one among them: the first ones are warm-up.
    step = max(-(-len(groups) // _SAMPLED_GROUPS), 1)
    tables = []
    for part, group, rank in groups[::-1][::step]:
        with (
            contextlib.suppress(OSError, pa.ArrowException, KeyError, ValueError, OverflowError),
            pq.ParquetFile(part) as file,
        ):
            tables.append(form.conform(file.read_row_group(group), rank))
    if not tables:
        return form.no_rows()
    return _last_rows(pa.concat_tables(tables[::-1]), PASSES)


def _row_groups(
    part: Path, form: Form, stored: Sequence[str], since_ns: int | None
) -> Iterator[pa.Table]:
    """The rows of a part, group by group, so that what is read of a column is never there twice as a whole."""
    columns = [path for path in stored if form.wants(path)]
    names = [path for path in columns if form.lean and is_name(path)]
    with pq.ParquetFile(part, read_dictionary=names or None) as file:
        groups = [
            group
            for group in range(file.num_row_groups)
            if since_ns is None or _reaches(file.metadata.row_group(group), form.spec, since_ns)
        ]
        done = 0
        try:
            for group in groups:
                yield file.read_row_group(group, columns=columns)
                done += 1
            return
        except pa.ArrowNotImplementedError:
            # Names that are too many for a dictionary, inside of lists.
            pass
    with pq.ParquetFile(part) as file:
        for group in groups[done:]:
            yield file.read_row_group(group, columns=columns)


def _reaches(group: pq.RowGroupMetaData, spec: TableSpec, since_ns: int) -> bool:
    """Whether a row of a group may be of a time or later, by the statistics of its column; True where these are not
    there."""
    name = "finished_ns" if spec is REQUESTS else "start_ns"
    for place in range(group.num_columns):
        column = group.column(place)
        if column.path_in_schema == name:
            told = column.statistics
            if told is None or not told.has_min_max:
                return True
            return bool(told.max >= since_ns or (told.has_null_count and told.null_count))
    return True


def _ascends(keys: pa.ChunkedArray, *, strictly: bool = False) -> bool:
    before = pc.less if strictly else pc.less_equal
    return bool(pc.all(before(keys[:-1], keys[1:])).as_py() is not False)


def _version(schema: pa.Schema) -> int:
    """The schema version that a part was written with; this one if it does not say."""
    text = (schema.metadata or {}).get(b"phaseprof.schema", b"")
    return int(text) if text.isdigit() else SCHEMA_VERSION


def _newer(where: Path | str, version: int) -> str:
    return (
        f"{where} was written by a newer phaseprof (schema {version}, this one reads "
        f"{SCHEMA_VERSION}): columns may be missing."
    )


def _parts(folder: Path) -> list[tuple[Path, int]]:
    """The parts of a table with their ranks, in the order in which they were written."""
    found = []
    for rank, rank_folder in sorted(_ranks(folder)):
        named = [(PartName.parse(file.name), file) for file in rank_folder.glob("*.parquet")]
        ours = [(name, file) for name, file in named if name is not None]
        others = [file for name, file in named if name is None]
        whole = [
            (name, file)
            for name, file in ours
            if not any(wider.holds(name) and wider != name for wider, _ in ours)
        ]
        whole.sort(key=lambda item: (item[0].process, item[0].first))
        found += [(file, rank) for file in [*sorted(others), *(file for _, file in whole)]]
    return found


def _ranks(folder: Path) -> Iterator[tuple[int, Path]]:
    for rank_folder in folder.glob("rank=*"):
        text = rank_folder.name.removeprefix("rank=")
        if text.isdecimal():
            yield int(text), rank_folder


def _last_rows(rows: pa.Table, spec: TableSpec) -> pa.Table:
    """Keep the last row of each key. Keys are unique over processes."""
    if not spec.key:
        return rows
    keys = rows.column(spec.key)
    if _ascends(keys, strictly=True):
        return rows
    # Numbers in the order of appearance; sorted, the rows of a key lie together, the last one behind.
    codes = keys.combine_chunks().dictionary_encode().indices
    order = pc.sort_indices(codes)
    ordered = codes.take(order)
    again = pc.equal(ordered.slice(0, max(len(ordered) - 1, 0)), ordered.slice(1))
    replaced = order.slice(0, len(again)).filter(again)
    return rows if not len(replaced) else _without(rows, replaced)


def _without(rows: pa.Table, places: pa.Array) -> pa.Table:
    """Leave out the rows at some places; only batches with such rows are copied."""
    kept = []
    begin = 0
    gone = pc.is_in(to_column(range(len(rows)), pa.int64()), value_set=places.cast(pa.int64()))
    stay = pc.invert(gone)
    for batch in rows.to_batches():
        flags = stay.slice(begin, len(batch))
        begin += len(batch)
        kept.append(batch if pc.all(flags).as_py() else batch.filter(flags))
    return pa.Table.from_batches(kept, schema=rows.schema)


def _read_metas(folder: Path, damage: list[str]) -> Iterator[ProcessMeta]:
    for file in sorted(folder.glob("*.json")):
        where = f"meta/{file.name}"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["schema"] > SCHEMA_VERSION:
                damage.append(_newer(where, data["schema"]))
            yield ProcessMeta.from_json(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damage.append(f"{where} cannot be read: {type(error).__name__}: {error}.")
