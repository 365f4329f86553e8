"""How long a pass of given rows takes, fitted to the passes of a run.

The time of a pass is modelled as

    time = fixed + a products + b attention of prefill + c attention of decode

where the last three are times at the roofs (products: all matrices, each at its own roof; see `op_roofline`), and the
four coefficients are fitted to the passes of the run by least squares of the relative error, none of them negative.
`fixed` is what a pass takes whatever it computes; a coefficient is how far such work stays below its roof here. Without
roofs or the model's structure tokens, query x key pairs and keys in reach stand in the place of the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, product

from phaseprof.analyzers.roofline import roof_times
from phaseprof.analyzers.steps.linear import solve
from phaseprof.analyzers.steps.pass_rows import PassRows
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows, pairs
from phaseprof.work.ops import OpKind, ops_of

#: Passes that a fit needs at least for each coefficient.
_PASSES_EACH = 3
#: Below this a fit is not better known: repeats of a run differ by as much.
_LEAST_ERROR = 0.03
#: The part of the errors that an interval leaves out.
_OUTSIDE = 0.10

Features = tuple[float, ...]
#: What a pass of prefill rows and decode rows is made of.
Meter = Callable[[Sequence[Rows], Sequence[Rows]], Features]


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted model of the time of a pass.

    Attributes:
        fixed_s: What each pass takes.
        coefficients: Of products, attention of prefill, attention of decode.
        error: Relative error that 90 % of the passes stay within.
        passes: Passes that it was fitted to.
        by_roofs: Whether the features are times at the roofs; else counts.
        meter: What gives the features.
    """

    fixed_s: float
    coefficients: Features
    error: float
    passes: int
    by_roofs: bool
    meter: Meter

    def time_s(self, prefill: Sequence[Rows], decode: Sequence[Rows]) -> float:
        """The time of a pass of these rows; 0 without any."""
        if not prefill and not decode:
            return 0.0
        features = self.meter(prefill, decode)
        return self.fixed_s + sum(
            coefficient * feature
            for coefficient, feature in zip(self.coefficients, features, strict=True)
        )


def fit_steps(
    passes: Iterable[PassRows], cost: ModelCost | None, ceilings: Ceilings | None
) -> StepFit | None:
    """Fit the model to passes of any phases; None if there are too few.

    Args:
        passes: Passes with their times.
        cost, ceilings: For the times at the roofs; None leaves these out.
    """
    at_roofs = _at_roofs(cost, ceilings)
    meter = at_roofs or _counts
    timed = [each for each in passes if each.span_ns > 0 and (each.prefill or each.decode)]
    rows = [(1.0, *meter(each.prefill, each.decode)) for each in timed]
    seconds = [each.span_ns / 1e9 for each in timed]
    best = _least_squares(rows, seconds)
    if best is None or len(timed) < _PASSES_EACH * sum(value > 0 for value in best):
        return None
    modelled = [_dot(best, row) for row in rows]
    errors = sorted(abs(m - s) / s for m, s in zip(modelled, seconds, strict=True))
    place = min(round(len(errors) * (1 - _OUTSIDE)), len(errors) - 1)
    return StepFit(
        fixed_s=best[0],
        coefficients=best[1:],
        error=max(errors[place], _LEAST_ERROR),
        passes=len(timed),
        by_roofs=at_roofs is not None,
        meter=meter,
    )


def _counts(prefill: Sequence[Rows], decode: Sequence[Rows]) -> Features:
    tokens = sum(row.query * row.sequences for row in (*prefill, *decode))
    scored = sum(pairs(row.past, row.query) * row.sequences for row in prefill)
    reached = sum((row.past + row.query) * row.sequences for row in decode)
    return float(tokens), float(scored), float(reached)


def _at_roofs(cost: ModelCost | None, ceilings: Ceilings | None) -> Meter | None:
    if cost is None or not cost.covered or ceilings is None:
        return None
    if ceilings.flops_per_s <= 0 or ceilings.bytes_per_s <= 0:
        return None

    def meter(prefill: Sequence[Rows], decode: Sequence[Rows]) -> Features:
        sequences = sum(row.sequences for row in (*prefill, *decode))
        times = {"products": 0.0, "prefill": 0.0, "decode": 0.0}
        for op in ops_of(cost, prefill, decode, logits_tokens=sequences):
            at = {OpKind.ATTENTION_PREFILL: "prefill", OpKind.ATTENTION_DECODE: "decode"}
            moved = op.weight_bytes + (op.kv_bytes or 0)
            floor_s = roof_times(flops=op.flops, moved_bytes=moved, ceilings=ceilings).floor_s
            times[at.get(op.kind, "products")] += floor_s
        return times["products"], times["prefill"], times["decode"]

    return meter


def _least_squares(rows: Sequence[Features], seconds: Sequence[float]) -> Features | None:
    """The coefficients, none negative, with the least sum of squared relative errors.

    Of all choices of features each is solved by itself, and the best one without a negative coefficient is taken: with
    four features these are fifteen.
    """
    if not rows:
        return None
    scaled = [tuple(x / s for x in row) for row, s in zip(rows, seconds, strict=True)]
    # Features of very different size would make the sums inexact.
    largest = [max(abs(row[i]) for row in scaled) or 1.0 for i in range(len(scaled[0]))]
    scaled = [tuple(x / w for x, w in zip(row, largest, strict=True)) for row in scaled]
    best: Features | None = None
    least = float("inf")
    for chosen in product((True, False), repeat=len(largest)):
        columns = list(compress(range(len(largest)), chosen))
        found = _solve(scaled, columns)
        if found is None or min(found) < 0:
            continue
        whole = [0.0] * len(largest)
        for column, value in zip(columns, found, strict=True):
            whole[column] = value
        left = sum((_dot(whole, row) - 1) ** 2 for row in scaled)
        # A feature more has to earn its place.
        if left < least * (1 - 1e-9):
            best, least = tuple(whole), left
    if best is None:
        return None
    return tuple(value / w for value, w in zip(best, largest, strict=True))


def _solve(rows: Sequence[Features], columns: Sequence[int]) -> list[float] | None:
    """Least squares of ones by some columns: normal equations by elimination; None if they do not tell them apart."""
    if not columns:
        return None
    matrix = [[sum(row[i] * row[j] for row in rows) for j in columns] for i in columns]
    right = [sum(row[i] for row in rows) for i in columns]
    return solve(matrix, right, least_pivot=1e-9 * len(rows))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
