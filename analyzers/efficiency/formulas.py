"""Formulas that products and attention share."""

from __future__ import annotations

import math


def joined(one: float, other: float, overlap: float) -> float:
    """How long two things take that overlap in part: the p-norm of their times.

    Never less than the longer one, never more than their sum.

    Args:
        one, other: Seconds, not negative.
        overlap: The exponent: 1 adds them, a large one takes the longer.
    """
    longer, shorter = (one, other) if one >= other else (other, one)
    if shorter <= 0:
        return longer
    return float(longer * (1 + (shorter / longer) ** overlap) ** (1 / overlap))


def waves(tiles: float, units: int, rounding: float) -> float:
    """How many tiles the busiest unit works on, one after the other.

    Args:
        tiles: In all.
        units: That work at once.
        rounding: 1 if the last wave takes as long as a full one (each tile is one unit's), 0 if its work is shared
            out evenly.
    """
    each = tiles / units
    if each <= 1:
        return 1.0
    return rounding * math.ceil(each) + (1 - rounding) * each
