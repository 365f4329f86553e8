"""Figures in words: the one way in which sentences spell numbers, units and shares.

Numbers have three significant digits, powers of ten are decimal (1 GB = 1e9 bytes), and a share never rounds to a
whole that it is not.
"""

from __future__ import annotations

from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings

_SMALL_NUMBERS = (
    "no one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
)


def number(value: float) -> str:
    """Three significant digits, thousands separated: ``0.54``, ``10.5``, ``3,350``."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.6f}".rstrip("0") if "e" in text and abs(value) >= 1e-6 else text


def percent(share: float) -> str:
    """A fraction as percent: ``55 %``, ``0.4 %``; ``over 99 %`` for what is nearly, but not, all."""
    value = share * 100
    if 99.5 <= value < 100 and value != 100:
        return "over 99 %"
    if value >= 0.95 or value == 0:
        return f"{value:.0f} %"
    return f"{value:.1g} %" if value >= 0.01 else "under 0.01 %"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits: ``6.02 s``, ``53.6 ms``, ``6.1 µs``."""
    if seconds >= 0.9995:
        return f"{number(seconds)} s"
    if seconds >= 0.9995e-3:
        return f"{number(seconds * 1e3)} ms"
    return f"{number(seconds * 1e6)} µs"


def data(size_bytes: float) -> str:
    """Bytes in the unit that suits: ``0.54 GB``, ``12.3 MB``."""
    if size_bytes >= 0.1e9:
        return f"{number(size_bytes / 1e9)} GB"
    if size_bytes >= 0.1e6:
        return f"{number(size_bytes / 1e6)} MB"
    return f"{number(size_bytes / 1e3)} kB"


def work(flops: float) -> str:
    """FLOPs in the unit that suits: ``0.138 TFLOP``, ``270 MFLOP``."""
    if flops >= 0.1e12:
        return f"{number(flops / 1e12)} TFLOP"
    if flops >= 0.1e9:
        return f"{number(flops / 1e9)} GFLOP"
    return f"{number(flops / 1e6)} MFLOP"


def flop_rate(flops_per_s: float) -> str:
    """FLOP/s, in TFLOP/s."""
    return f"{number(flops_per_s / 1e12)} TFLOP/s"


def byte_rate(bytes_per_s: float) -> str:
    """Bytes/s, in GB/s."""
    return f"{number(bytes_per_s / 1e9)} GB/s"


def count(amount: int, noun: str) -> str:
    """A number with its noun in the right number: ``1 pass``, ``504 passes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{amount:,} {noun if amount == 1 else plural}"


def in_words(amount: int) -> str:
    """A whole number as a sentence spells it: a word up to twelve."""
    return _SMALL_NUMBERS[amount] if 0 <= amount < len(_SMALL_NUMBERS) else f"{amount:,}"


def sentence(text: str) -> str:
    """The text with a capital first letter and a full stop."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def joined(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def pass_noun(phase: Phase) -> str:
    """What engineers call one pass of the phase: a step where tokens are generated, else a pass."""
    return "step" if phase in (Phase.DECODE, Phase.MIXED) else "pass"


def roof_origin(ceilings: Ceilings) -> str:
    """Where a roof comes from, as the end of a sentence: ``measured on this machine``."""
    return "measured on this machine" if ceilings.source == "measured" else "of the datasheet"
