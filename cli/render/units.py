"""Figures as people read them: scaled, rounded to what is known, never computed.

Every function takes None for "not known" and answers with a dash, so that a missing figure can never look like zero.
A positive value never rounds to zero either: it becomes ``<`` the smallest value shown.
"""

from __future__ import annotations

import math

#: Stands for a figure that is not known.
DASH = "\N{EN DASH}"


def rate(value: float | None) -> str:
    """A rate or ratio (tokens/s, TFLOP/s, GB/s, FLOP/byte) to three significant digits, two below 0.1.

    ``682``, ``18.7``, ``1.40``, ``0.158``, ``0.0053``, ``12,300``.
    """
    if value is None:
        return DASH
    if value == 0:
        return "0"
    if abs(value) < 0.0001:
        return "<0.0001"
    return _significant(value, 2 if abs(value) < 0.1 else 3)


def count(value: int | None) -> str:
    """A count: exact with separators up to a million, then in millions: ``4,096``, ``1.23 M``."""
    if value is None:
        return DASH
    for limit, scale, suffix in ((1e6, 1.0, ""), (1e9, 1e6, " M"), (math.inf, 1e9, " G")):
        if abs(value) < limit:
            return f"{value:,}" if scale == 1.0 else _significant(value / scale, 3) + suffix
    raise AssertionError("unreachable: the last limit is infinite")


def counted(value: int, noun: str) -> str:
    """A count with its noun: ``1 request``, ``4,096 requests``, ``2 passes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count(value)} {noun if value == 1 else plural}"


def mean(value: float | None) -> str:
    """A mean of counts: ``16`` when it is whole, else ``12.3``."""
    if value is None:
        return DASH
    rounded = round(value, 1)
    return f"{rounded:,.0f}" if rounded == int(rounded) else f"{rounded:,.1f}"


def percent(fraction: float | None) -> str:
    """A fraction as percent: ``60 %``; below one percent ``0.4 %``, ``0.01 %``; nearly all is ``>99 %``."""
    if fraction is None:
        return DASH
    value = 100.0 * fraction
    if value == 0:
        return "0 %"
    if abs(value) < 0.01:
        return "<0.01 %"
    if 99.5 <= value < 100:
        return ">99 %"
    # 0.96 % would round to "1.0 %": what reads as one percent or more has no decimals.
    if abs(value) >= 0.95:
        return f"{value:,.0f} %"
    return f"{value:.1f} %" if abs(value) >= 0.095 else f"{value:.2f} %"


def duration(ms: float | None) -> str:
    """A stretch of time, from ms: ``6 µs``, ``53.6 ms``, ``752 ms``, ``6.0 s``, ``2 min 5 s``, ``1 h 3 min``."""
    if ms is None:
        return DASH
    if ms == 0:
        return "0 ms"
    if ms < 1e-3:
        return "<1 µs"
    if ms < 0.9995:
        return f"{_significant(ms * 1e3, 2 if ms < 0.1 else 3)} µs"
    if ms < 999.5:
        return f"{_significant(ms, 3)} ms"
    seconds = ms / 1e3
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, rest_min = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {rest_min} min"


def latency(ms: float | None) -> str:
    """A latency, from ms, in ms up to ten seconds, so that percentiles of one row compare at a glance: ``1,254 ms``."""
    if ms is not None and 999.5 <= ms < 9_999.5:
        return f"{ms:,.0f} ms"
    return duration(ms)


def microseconds(us: float | None) -> str:
    """A stretch of time, from µs; see :func:`duration`."""
    return DASH if us is None else duration(us / 1e3)


def size(n_bytes: int | None) -> str:
    """A number of bytes in decimal units: ``512 B``, ``4.1 kB``, ``41 kB``, ``540 MB``."""
    if n_bytes is None:
        return DASH
    if n_bytes < 1000:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for suffix in ("kB", "MB", "GB", "TB"):
        value /= 1e3
        if value < 999.5 or suffix == "TB":
            return f"{_significant(value, 2 if value < 99.5 else 3)} {suffix}"
    raise AssertionError("unreachable: the last unit takes every value")


def tick(exponent: int) -> str:
    """The label of a power of ten on an axis: ``0.01``, ``1``, ``1,000``, ``1e-6``."""
    if exponent < -4:
        return f"1e{exponent}"
    return f"{10**exponent:,}" if exponent >= 0 else f"{10.0**exponent:.{-exponent}f}"


def _significant(value: float, digits: int) -> str:
    """Round to that many significant digits, with thousands separators and without an exponent."""
    exponent = math.floor(math.log10(abs(value)))
    if float(f"{value:.{digits - 1}e}") >= 10.0 ** (exponent + 1):
        exponent += 1  # 99.96 rounds up to 100: one decimal fewer
    decimals = max(digits - 1 - exponent, 0)
    return f"{round(value, digits - 1 - exponent) if decimals == 0 else value:,.{decimals}f}"
