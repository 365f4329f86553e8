"""Counters of a recording as rows of `samples`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa

from phaseprof.collectors.files.nsys_metrics import SampleRow
from phaseprof.schema import SAMPLES
from phaseprof.trace.columns import to_column

#: Rows that are held before they are handed on.
_ROWS = 1 << 16


def write_samples(
    rows: Iterable[SampleRow],
    *,
    source: str,
    device_uuid: Callable[[int], str],
    write: Callable[[pa.Table], None],
) -> None:
    """Hand on the rows, some thousands at a time.

    Args:
        rows: With times on the axis of the trace.
        source: What the rows come from: ``nsys``.
        device_uuid: Gives what `samples.device` holds of a device, by its number.
        write: Takes rows of the `samples` table.
    """
    held: list[SampleRow] = []
    for row in rows:
        held.append(row)
        if len(held) == _ROWS:
            write(_table(held, source, device_uuid))
            held = []
    if held:
        write(_table(held, source, device_uuid))


def _table(rows: list[SampleRow], source: str, device_uuid: Callable[[int], str]) -> pa.Table:
    uuids = {number: device_uuid(number) for number in {row.device for row in rows}}
    values: dict[str, Sequence[Any]] = {
        "start_ns": [row.start_ns for row in rows],
        "end_ns": [row.end_ns for row in rows],
        "device": [uuids[row.device] for row in rows],
        "source": [source] * len(rows),
        "metric": [row.metric.value for row in rows],
        "value": [row.value for row in rows],
    }
    return pa.Table.from_arrays(
        [to_column(values[column.name], column.type) for column in SAMPLES.arrow],
        schema=SAMPLES.arrow,
    )
