"""The tables of a trace as CSV files. Lists become JSON, since a cell of CSV holds no list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import csv

from phaseprof.trace.reader import Trace

_ROWS = 32_768


def write_csv(trace: Trace, folder: Path) -> list[str]:
    """Write ``passes.csv``, ``requests.csv`` and so on; tables without rows are left out.

    Args:
        trace: A trace, read whole.
        folder: Where to; it exists.

    Returns:
        The names of the files.
    """
    written = []
    for name in ("passes", "requests", "steps", "kernels", "samples", "calls"):
        table: pa.Table = getattr(trace, name)
        if table.num_rows == 0:
            continue
        flat = _flat(table.slice(0, 0)).schema
        with csv.CSVWriter(folder / f"{name}.csv", flat) as writer:
            for begin in range(0, table.num_rows, _ROWS):
                writer.write_table(_flat(table.slice(begin, _ROWS)))
        written.append(f"{name}.csv")
    return written


def _flat(table: pa.Table) -> pa.Table:
    for place, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            texts = pa.array(_texts(table.column(place)), pa.string())
            table = table.set_column(place, field.name, texts)
        elif pa.types.is_dictionary(field.type):
            table = table.set_column(
                place, field.name, table.column(place).cast(field.type.value_type)
            )
    return table


def _texts(column: pa.ChunkedArray) -> Iterator[str | None]:
    for value in column.to_pylist():
        yield None if value is None else json.dumps(value)
