"""The timeline as the page's script reads it: a directory of columns, and the columns themselves as one text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import scalar
from phaseprof.analyzers.passes import Status
from phaseprof.analyzers.viewing.timeline import (
    ONE_BY_ONE,
    Lane,
    LaneRows,
    Level,
    Timeline,
)
from phaseprof.analyzers.viewing.tracks import CounterTrack
from phaseprof.cli.render import units
from phaseprof.cli.render.html.packing import Column, Packer

#: Names of counters for people, and how their values are shown: factor and unit.
COUNTERS: dict[str, tuple[str, float, str]] = {
    "prefill_tokens_per_s": ("prompt tokens/s", 1.0, ""),
    "decode_tokens_per_s": ("output tokens/s", 1.0, ""),
    "sm_active_share": ("SM active", 100.0, "%"),
    "tensor_active_share": ("tensor cores active", 100.0, "%"),
    "dram_active_share": ("DRAM active", 100.0, "%"),
    "power_w": ("power", 1.0, "W"),
    "sm_clock_hz": ("SM clock", 1e-6, "MHz"),
    "dram_read_bytes_per_s": ("DRAM read", 1e-9, "GB/s"),
    "dram_write_bytes_per_s": ("DRAM written", 1e-9, "GB/s"),
    "memory_used_bytes": ("device memory", 1e-9, "GB"),
    "temperature_c": ("temperature", 1.0, "°C"),
    "host_cpu_share": ("host CPU, all cores", 100.0, "%"),
    "process_cpu_cores": ("process CPU", 1.0, "cores"),
    "process_memory_bytes": ("process memory", 1e-9, "GB"),
}
#: What a `Status` means, for people; empty for passes that count.
_STATUS = {
    Status.REQUESTED: "warm-up",
    Status.FIRST: "first of its phase",
    Status.COMPILE: "compiling",
    Status.STEADY: "",
    Status.PROFILED: "under a profiler",
    Status.ERROR: "failed",
    Status.ELSEWHERE: "another model",
}
#: Of a bin that a phase fills; shares are stored in a byte.
_FULL = 255


@dataclass(frozen=True, slots=True)
class TimelineData:
    """What goes into the page.

    Attributes:
        directory: Plain lists and dicts, to be written as JSON.
        columns: The packed columns.
    """

    directory: dict[str, Any]
    columns: str


def timeline_data(timeline: Timeline) -> TimelineData:
    """Pack a timeline."""
    packer = Packer()
    directory = {
        "spanUs": timeline.span_us,
        "oneByOne": ONE_BY_ONE,
        "phases": [phase.value for phase in timeline.phases],
        "status": [_STATUS[status] for status in Status],
        "steady": Status.STEADY.value,
        "lanes": [_lane(lane, packer) for lane in timeline.lanes],
        "counters": [_counter(track, packer) for track in timeline.counters],
    }
    return TimelineData(directory, packer.text())


def _lane(lane: Lane, packer: Packer) -> dict[str, Any]:
    return {
        "rank": lane.rank,
        "passes": lane.passes,
        "levels": [_level(level, packer) for level in lane.levels],
        "rows": None if lane.rows is None else _rows(lane.rows, packer),
    }


def _level(level: Level, packer: Packer) -> dict[str, Any]:
    shares = []
    for _, busy in level.busy_us:
        filled = [
            # What is there never rounds to nothing.
            max(min(round(us / level.bin_us * _FULL), _FULL), 1) if us else 0
            for us in busy
        ]
        shares.append(_entry(packer.whole(filled)))
    return {
        "bins": len(level.begun),
        "shares": shares,
        "begun": _entry(packer.whole(level.begun)),
    }


def _rows(rows: LaneRows, packer: Packer) -> dict[str, Any]:
    """A pass begins where the one before it ended, and a gap: gaps are small numbers."""
    ends = pc.add(rows.start_us, rows.span_us)
    zero = pa.concat_arrays([pa.repeat(scalar(0, pa.int64()), 1), ends.slice(0, len(ends) - 1)])
    gaps = pc.subtract(rows.start_us, zero)
    steps = pa.concat_arrays([rows.step.slice(0, 1), pc.subtract(rows.step[1:], rows.step[:-1])])
    return {
        "gap": _entry(packer.numbers(gaps, signed=True)),
        "span": _entry(packer.numbers(rows.span_us)),
        "phase": _entry(packer.numbers(rows.phase)),
        "status": _entry(packer.numbers(rows.status)),
        "step": _entry(packer.numbers(steps, signed=True, summed=True)),
        "sequences": _entry(packer.numbers(rows.sequences)),
        "prefill": _entry(packer.numbers(rows.prefill_tokens)),
        "decode": _entry(packer.numbers(rows.decode_tokens)),
    }


def _counter(track: CounterTrack, packer: Packer) -> dict[str, Any]:
    name, scale, unit = counter_words(track.metric)
    least, greatest = track.least, track.greatest
    levels = []
    for level in track.levels:
        columns = {
            "mean": level.mean,
            # Where a bin holds one value, all three are the same.
            "least": level.least if level.least != level.mean else None,
            "greatest": level.greatest if level.greatest != level.mean else None,
        }
        levels.append(
            {
                "bins": len(level.mean),
                **{
                    key: None
                    if values is None
                    else _entry(packer.quantised(values, least, greatest))
                    for key, values in columns.items()
                },
            }
        )
    return {
        "name": name,
        # That the host is a CPU goes without saying.
        "device": "" if track.device == "cpu" else track.device,
        "unit": unit,
        "least": least * scale,
        "greatest": greatest * scale,
        "top": units.rate(max(greatest * scale, 0.0)),
        "levels": levels,
    }


def counter_words(metric: str) -> tuple[str, float, str]:
    """Name, factor and unit of a counter; of one that is not known its own name."""
    return COUNTERS.get(metric, (metric, 1.0, ""))


def _entry(column: Column) -> dict[str, Any]:
    return asdict(column)
