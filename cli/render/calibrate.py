"""What `phaseprof calibrate` shows: the roofs per dtype, how sure they are, and where they are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from phaseprof.cli.render import units
from phaseprof.cli.render.layout import fold
from phaseprof.trace.meta import Ceilings, Device

_HEADER = ("", "TFLOP/s", "GB/s", "spread", "measured")


def render(
    device: Device,
    ceilings: Sequence[Ceilings],
    *,
    cache: str,
    now_ns: int,
    noisy_spread: float,
    width: int = 100,
) -> str:
    """Lay the ceilings of a device out as text, without a line break at the end.

    Args:
        device: Whose they are.
        ceilings: Measured ones, one per dtype.
        cache: Where they are kept.
        now_ns: Unix ns, for their age.
        noisy_spread: From which spread on a figure deserves a warning.
        width: Columns.
    """
    rows = [_HEADER, *(_row(entry, now_ns) for entry in ceilings)]
    lines = [*fold(_head(device), width, hang=2, apart=" · "), "", *_table(rows), ""]
    for entry in ceilings:
        lines += _indented(entry.reference, width)
    lines += _indented(f"Cached in {cache}", width)
    noisy = [entry for entry in ceilings if (entry.spread or 0.0) > noisy_spread]
    if noisy:
        names = " and ".join(entry.dtype for entry in noisy)
        lines += [
            "",
            *_indented(
                f"The repeats for {names} lay far apart: something else ran, or the clock moved. Repeat with --force "
                "when the machine is quiet; a roof that is too low makes every share of it too high.",
                width,
            ),
        ]
    return "\n".join(lines)


def to_json(device: Device, ceilings: Sequence[Ceilings], *, cache: str) -> str:
    """The same as one JSON document."""
    document = {
        "schema": 1,
        "device": asdict(device),
        "ceilings": [asdict(entry) for entry in ceilings],
        "cache": cache,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _head(device: Device) -> str:
    parts = [device.name]
    if device.kind == "cpu":
        parts.append(f"{_counted(device.cores, 'core')}, {_counted(device.threads, 'thread')}")
    else:
        parts.append(f"{device.kind}:{device.index}, {_counted(device.cores, 'SM')}")
    if device.memory_bytes is not None:
        parts.append(units.size(device.memory_bytes))
    return " · ".join(parts)


def _counted(number: int | None, noun: str) -> str:
    return f"{units.count(number)} {noun}" + ("" if number == 1 else "s")


def _row(entry: Ceilings, now_ns: int) -> tuple[str, ...]:
    spread = units.DASH if entry.spread is None else f"±{units.percent(entry.spread)}"
    return (
        entry.dtype,
        units.rate(entry.flops_per_s / 1e12),
        units.rate(entry.bytes_per_s / 1e9),
        spread,
        _age(entry.measured_ns, now_ns),
    )


def _age(measured_ns: int | None, now_ns: int) -> str:
    if measured_ns is None:
        return units.DASH
    seconds = max(now_ns - measured_ns, 0) / 1e9
    for limit, scale, noun in ((60, 1, ""), (5_400, 60, "min"), (129_600, 3_600, "h")):
        if seconds < limit:
            return f"{round(seconds / scale)} {noun} ago" if noun else "just now"
    return f"{round(seconds / 86_400)} days ago"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first column to the left, figures to the right, the last column to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = []
    for first, *figures, last in rows:
        middle = "   ".join(
            figure.rjust(width) for figure, width in zip(figures, widths[1:-1], strict=True)
        )
        lines.append(f"  {first.ljust(widths[0])}   {middle}   {last}".rstrip())
    return lines


def _indented(text: str, width: int) -> list[str]:
    return [f"  {line}" for line in fold(text, width - 2, hang=2)]
