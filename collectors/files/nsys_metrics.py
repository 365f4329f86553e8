"""Counters that Nsight Systems sampled on the devices, as rows of `samples`.

A row says what the counter was from its time on until the next row of the same device: so the windows of one device
follow one another. Values of a name that ends in ``[Throughput %]`` are percent of the counter's peak. Older versions
keep them as JSON in ``GENERIC_EVENTS``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from phaseprof.collectors.files.nsys_database import Database
from phaseprof.collectors.files.nsys_gpus import Gpus
from phaseprof.errors import NotMeasured
from phaseprof.metrics import Metric, is_possible

#: Shares, by the name without its unit.
_SHARES = {
    "SMs Active": Metric.SM_ACTIVE,
    "SM Active": Metric.SM_ACTIVE,
    "Tensor Active": Metric.TENSOR_ACTIVE,
    "Compute Warps in Flight": Metric.SM_OCCUPANCY,
    "DRAM Bandwidth": Metric.DRAM_ACTIVE,
}
#: Shares of the memory's peak, which become bytes where that is known.
_MEMORY = {
    "DRAM Read Bandwidth": Metric.DRAM_READ,
    "DRAM Read Throughput": Metric.DRAM_READ,
    "DRAM Write Bandwidth": Metric.DRAM_WRITE,
    "DRAM Write Throughput": Metric.DRAM_WRITE,
}
#: Versions write numbers as text in JSON, too.
_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")
_CLOCKS = {"GPC Clock Frequency": Metric.SM_CLOCK}


class SampleRow(NamedTuple):
    """One value of a counter. Times are the file's."""

    start_ns: int
    end_ns: int
    device: int
    metric: Metric
    value: float


@dataclass(slots=True)
class Sampled:
    """What became of the counters.

    Attributes:
        rows: How many were handed on.
        impossible: Values that the counter cannot have.
        last: Windows whose end is not known: the last one of each device.
        unmapped: How many values each name had that is none of ours.
        without_peak: Bytes could not be told of this many: the memory's peak is not in the file.
    """

    rows: int = 0
    impossible: int = 0
    last: int = 0
    unmapped: Counter[str] = field(default_factory=Counter)
    without_peak: int = 0

    def lacking(self) -> Iterator[NotMeasured]:
        """What has to be said of them."""
        if self.unmapped:
            named = sorted(self.unmapped)
            shown = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
            yield NotMeasured(
                f"counters of Nsight Systems ({shown})",
                "phaseprof has no counter of the same meaning and unit",
            )
        if self.without_peak:
            yield NotMeasured(
                "bytes a second of the device's memory",
                "the recording has shares of a peak that it does not name",
            )
        if self.impossible:
            yield NotMeasured(
                "all values of the counters",
                f"{self.impossible:,} are none that the counter can have",
            )


def read_samples(database: Database, gpus: Gpus, sampled: Sampled) -> Iterator[SampleRow]:
    """The counters of all devices, window by window.

    Args:
        database: The export.
        gpus: Its devices.
        sampled: Is filled on the way.
    """
    open_at: dict[int, tuple[int, dict[str, float]]] = {}
    for timestamp, type_id, name, value in _values(database):
        before = open_at.get(type_id)
        if before is None or timestamp < before[0]:
            open_at[type_id] = (timestamp, {name: value})
        elif timestamp == before[0]:
            before[1][name] = value
        else:
            yield from _window(type_id, before, timestamp, gpus, sampled)
            open_at[type_id] = (timestamp, {name: value})
    sampled.last += len(open_at)


def _window(
    type_id: int,
    opened: tuple[int, dict[str, float]],
    end_ns: int,
    gpus: Gpus,
    sampled: Sampled,
) -> Iterator[SampleRow]:
    start_ns, values = opened
    device, gpu = gpus.of_metrics(type_id)
    peak = None if gpu is None else gpu.bandwidth_bytes_per_s
    found: list[tuple[Metric, float]] = []
    memory: dict[Metric, float] = {}
    for name, value in values.items():
        plain, _, unit = name.partition(" [")
        if plain in _SHARES and unit in ("", "Throughput %]"):
            found.append((_SHARES[plain], value / 100))
        elif plain in _MEMORY and unit in ("", "Throughput %]"):
            memory[_MEMORY[plain]] = value / 100
        elif plain in _CLOCKS and unit == "MHz]":
            found.append((_CLOCKS[plain], value * 1e6))
        else:
            sampled.unmapped[name] += 1
    if len(memory) == 2:
        # Both are of the same peak, so that their sum is the share of it that was in use.
        found.append((Metric.DRAM_ACTIVE, sum(memory.values())))
    for metric, share in memory.items():
        if peak is None:
            sampled.without_peak += 1
        else:
            found.append((metric, share * peak))
    for metric, value in found:
        if is_possible(metric, value):
            sampled.rows += 1
            yield SampleRow(start_ns, end_ns, device, metric, value)
        else:
            sampled.impossible += 1


def _values(database: Database) -> Iterator[tuple[int, int, str, float]]:
    names: dict[tuple[int, int], str] = {}
    for type_id, metric_id, name in database.rows(
        "TARGET_INFO_GPU_METRICS",
        ("typeId", "metricId", "metricName"),
        needs=("metricId", "metricName"),
    ):
        if isinstance(metric_id, int) and isinstance(name, str):
            names[type_id if isinstance(type_id, int) else -1, metric_id] = name
    for timestamp, type_id, metric_id, value in database.rows(
        "GPU_METRICS",
        ("timestamp", "typeId", "metricId", "value"),
        needs=("timestamp", "typeId", "metricId", "value"),
    ):
        if (
            isinstance(timestamp, int)
            and isinstance(type_id, int)
            and isinstance(value, int | float)
        ):
            named = names.get((type_id, metric_id)) or names.get((-1, metric_id))
            yield timestamp, type_id, named or f"metric {metric_id}", float(value)
    yield from _generic(database)


def _generic(database: Database) -> Iterator[tuple[int, int, str, float]]:
    """Counters of versions before they had tables: JSON by name, of the types whose source is named so."""
    sources = set()
    for source, data in database.rows(
        "GENERIC_EVENT_SOURCES", ("sourceId", "data"), needs=("sourceId", "data")
    ):
        if _object(data).get("Name") == "GpuMetrics":
            sources.add(source)
    types = {
        type_id
        for type_id, source in database.rows(
            "GENERIC_EVENT_TYPES", ("typeId", "sourceId"), needs=("typeId", "sourceId")
        )
        if source in sources and isinstance(type_id, int)
    }
    if not types:
        return
    for raw, timestamp, type_id, data in database.rows(
        "GENERIC_EVENTS", ("rawTimestamp", "timestamp", "typeId", "data"), needs=("typeId", "data")
    ):
        at = timestamp if isinstance(timestamp, int) else raw
        if type_id not in types or not isinstance(at, int):
            continue
        for name, value in _object(data).items():
            if isinstance(value, str) and _NUMBER.fullmatch(value):
                value = float(value)
            if isinstance(value, int | float):
                yield at, type_id, name, float(value)


def _object(data: object) -> dict[str, object]:
    if not isinstance(data, str):
        return {}
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
