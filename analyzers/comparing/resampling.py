"""Block bootstrap: how far a figure of a run would have moved, had its stretches of time come out otherwise.

Passes of one request are alike, and a machine drifts: the parts of a run that can be taken as independent are stretches
of it, not passes. A run is cut into units (`phaseprof.analyzers.comparing.units`), units that follow each other are
joined to blocks until blocks tell nothing of each other any more, and whole blocks are drawn with replacement (Künsch
1989; Carlstein 1986 for blocks that do not overlap). The standard error of what is drawn is widened by what correlation
neighbouring blocks still show, or may have where they are few, and goes into an interval of Student's t with one degree
of freedom less than there are blocks: few blocks give a wide interval.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import mul

#: Draws. The standard error that they give is itself good to 1 / sqrt(2 x draws), 3.5 %.
DRAWS = 400
#: The draws are the same in every run, so that a comparison says the same of the same traces.
_SEED = 20_240_229
#: Blocks that have to remain where units are joined: fewer leave no figure of a spread to choose by.
LEAST_BLOCKS = 8
#: What is expected of the correlation of neighbouring blocks, and how many blocks that counts for.
_PRIOR, _PRIOR_BLOCKS = 0.6, 8
#: The most that it is taken to be.
_MOST_ALIKE = 0.85
#: Below two there is no spread at all.
_TWO = 2

#: Two-sided 95 % quantiles of Student's t by degrees of freedom (any table of it).
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_Z95 = 1.95996

#: How often each block was drawn.
Draw = Sequence[int]


@dataclass(frozen=True, slots=True)
class Spread:
    """How sure the logarithm of a figure is within its run.

    Attributes:
        error: Standard error of the logarithm: 0.02 is two percent of the figure.
        blocks: Blocks that it rests on.
        units: Units that the blocks are made of.
    """

    error: float
    blocks: int
    units: int

    @property
    def freedom(self) -> float:
        """Degrees of freedom."""
        return float(self.blocks - 1)


@dataclass(slots=True)
class Draws:
    """The draws for each number of blocks, made once and used for all figures of a run.

    Attributes:
        side: Number of the trace: two traces must not be drawn alike.
    """

    side: int
    _made: dict[int, list[Draw]] = field(default_factory=dict)

    def of(self, blocks: int) -> list[Draw]:
        """Draws of as many blocks as there are, with replacement."""
        if blocks not in self._made:
            chance = random.Random(f"{_SEED}:{self.side}:{blocks}")
            self._made[blocks] = [_draw(chance, blocks) for _ in range(DRAWS)]
        return self._made[blocks]


def _draw(chance: random.Random, blocks: int) -> Draw:
    times = [0] * blocks
    for block in chance.choices(range(blocks), k=blocks):
        times[block] += 1
    return times


def weighted(times: Draw, values: Sequence[float]) -> float:
    """The sum of what each block has, as often as it was drawn."""
    total: float = sum(map(mul, times, values))
    return total


def spread(
    draws: Draws,
    influence: Sequence[float],
    drawn: Callable[[Sequence[tuple[int, int]]], Callable[[Draw], float | None]],
) -> Spread | None:
    """The standard error of the logarithm of a figure.

    Args:
        draws: Of the run.
        influence: How far each unit moves the figure, in the order of time; sums to about 0.
        drawn: Given the blocks as ranges of units (begin, end), a function from a draw of blocks to the figure; None
            where the draw has no such figure.

    Returns:
        None with fewer than two units, and where most draws have no figure.
    """
    units = len(influence)
    if units < _TWO:
        return None
    blocks = ranges(units, block_length(influence))
    of_draw = drawn(blocks)
    found = [of_draw(draw) for draw in draws.of(len(blocks))]
    logs = [math.log(value) for value in found if value is not None and value > 0]
    if len(logs) < 0.9 * len(found):
        return None
    mean = math.fsum(logs) / len(logs)
    variance = math.fsum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    # A draw of n blocks varies by (n - 1) / n of what the mean of n new ones would.
    variance *= len(blocks) / (len(blocks) - 1)
    variance *= inflation([math.fsum(influence[begin:end]) for begin, end in blocks])
    return Spread(math.sqrt(variance), len(blocks), units)


def inflation(sums: Sequence[float]) -> float:
    """How much more the mean of blocks varies than that of independent ones: ``(1 + r) / (1 - r)`` for a correlation
    ``r`` of neighbours.

    Few blocks hardly show their correlation, and machines drift: what is found (its bias taken off, Kendall 1954) is
    weighed against 0.6, as if eight more blocks had shown that.
    """
    n = len(sums)
    mean = math.fsum(sums) / n
    off = [value - mean for value in sums]
    whole = math.fsum(value * value for value in off)
    if not whole:
        return 1.0
    found = math.fsum(a * b for a, b in pairwise(off)) / whole
    found = min(found + (1 + 3 * found) / n, 1.0)
    r = (n * found + _PRIOR_BLOCKS * _PRIOR) / (n + _PRIOR_BLOCKS)
    r = min(max(r, 0.0), _MOST_ALIKE)
    return (1 + r) / (1 - r)


def block_length(influence: Sequence[float]) -> int:
    """Units to a block: of 1, 2, 4, … the one that shows the most spread, as long as eight blocks remain.

    Where units are independent, every length shows the same; where neighbours are alike, a longer one shows more until
    the blocks are longer than what their units share (Flyvbjerg and Petersen 1989). Taking the largest errs to the
    wide side.
    """
    best, widest = 1, 0.0
    length = 1
    while length == 1 or len(influence) // length >= LEAST_BLOCKS:
        sums = [math.fsum(influence[begin:end]) for begin, end in ranges(len(influence), length)]
        mean = math.fsum(sums) / len(sums)
        found = math.fsum((value - mean) ** 2 for value in sums) * len(sums) / (len(sums) - 1)
        # Longer blocks have to show clearly more: their own spread is less well known.
        if found > widest * (1.0 if length == 1 else 1.1):
            best, widest = length, found
        length *= 2
    return best


def ranges(units: int, length: int) -> list[tuple[int, int]]:
    """Blocks of about so many units, none of them much shorter than the others."""
    blocks = max(units // length, 1)
    edges = [units * number // blocks for number in range(blocks + 1)]
    return list(pairwise(edges))


def t95(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t. Degrees of freedom between whole ones are rounded down."""
    if freedom < 1:
        return math.inf
    if freedom <= len(_T95):
        return _T95[math.floor(freedom) - 1]
    # Between 30 degrees and infinity it is nearly linear in 1 / freedom.
    share = len(_T95) / freedom
    return _Z95 + (_T95[-1] - _Z95) * share


def half_width(*spreads: tuple[float, float]) -> float:
    """Half of the 95 % interval of a sum of independent parts, each given as standard error and degrees of freedom
    (infinite where the error is known).

    The half widths of the parts are added as the sides of a right angle are (MOVER, Zou and Donner 2008): a part that
    rests on few blocks then keeps its wide interval beside one that is well known, which it would not with degrees of
    freedom for all of them together.
    """
    return math.hypot(*(t95(freedom) * error for error, freedom in spreads if error))
