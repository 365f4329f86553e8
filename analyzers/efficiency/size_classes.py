"""Size classes: errors are stated, and intervals chosen, by how large an operation is."""

from __future__ import annotations

import math
from collections.abc import Mapping

from phaseprof.analyzers.efficiency.parameters import Spread

#: The last row count of each band, and its name.
_ROW_BANDS = (
    (15, "m < 16"),
    (64, "m 16-64"),
    (256, "m 65-256"),
    (1024, "m 257-1024"),
    (math.inf, "m > 1024"),
)
#: The bound of each band of modelled time, in microseconds, and its name.
_GEMM_TIMES = ((10, "< 10 us"), (100, "10-100 us"), (math.inf, "> 100 us"))
_ATTENTION_TIMES = (
    (15, "< 15 us"),
    (50, "15-50 us"),
    (500, "50-500 us"),
    (math.inf, "> 500 us"),
)

#: The class of everything: for sizes of which there were too few points.
ALL = "all"


def row_band(rows: int) -> str:
    """Band of the rows of a product."""
    return next(name for last, name in _ROW_BANDS if rows <= last)


def gemm_class(rows: int, seconds: float) -> str:
    """Class of a product: its rows and its modelled time."""
    band = next(name for bound, name in _GEMM_TIMES if seconds * 1e6 < bound)
    return f"{row_band(rows)}, {band}"


def attention_class(seconds: float) -> str:
    """Class of an attention: its modelled time."""
    return next(name for bound, name in _ATTENTION_TIMES if seconds * 1e6 < bound)


def gemm_spread(spreads: Mapping[str, Spread], rows: int, seconds: float) -> Spread:
    """The spread of the class. Where it had too few points, that of the next shorter times, or the next longer ones, of
    the same rows; else of the rows alone, or of everything."""
    names = [name for _, name in _GEMM_TIMES]
    own = next(i for i, (bound, _) in enumerate(_GEMM_TIMES) if seconds * 1e6 < bound)
    nearest = [*reversed(names[: own + 1]), *names[own + 1 :]]
    band = row_band(rows)
    for name in (*(f"{band}, {time}" for time in nearest), band):
        if name in spreads:
            return spreads[name]
    return spreads[ALL]


def attention_spread(spreads: Mapping[str, Spread], seconds: float) -> Spread:
    """The spread of the class, or of everything where it had too few points."""
    return spreads.get(attention_class(seconds), spreads[ALL])
