"""The step model fitted to a user's own passes: a few factors, so that two batch sizes tell what a third would take.

The model's parts of a pass keep their shape, and each kind of part gets one factor:

    time = sum over parts of factor x part

On a GPU a part is what the efficiency model says: products of few rows, products of many rows, attention, what only
moves data, and the host. On a CPU no efficiency model holds, and parts are times at the roofs, which add up there:
weights read for one row (a kernel of its own in every BLAS), weights read for several rows, FLOPs of these, attention,
moved activations, and a fixed cost for each operator.

Passes seldom tell all factors apart: at one batch size reading and launching look alike. So the logarithm of each
factor has a prior (where it is likely to lie, and how sure that is), and the fit weighs passes against priors: maximum
a posteriori, by Gauss-Newton (Gelman et al., "Bayesian Data Analysis", ch. 4: the normal approximation at the mode).
Its covariance gives the interval: what the measured passes leave open stays open. Passes of the same rows count by
their median, and what fits badly counts less (Huber, 1964), so that a few disturbed passes do no harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from phaseprof.analyzers.efficiency.estimate import Estimate
from phaseprof.analyzers.steps.linear import solve
from phaseprof.analyzers.steps.pass_rows import PassRows
from phaseprof.analyzers.steps.step_model import Machine, StepTime, step_time
from phaseprof.errors import PhaseprofError
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows
from phaseprof.work.ops import OpKind

#: From so many rows on a product is one of many rows: most of its time is computing, on any device.
_MANY_ROWS = 256
#: Relative error of the median of repeated passes.
_PASS_ERROR = 0.03
#: What the form of the model misses between batch sizes, relative. On a CPU a library's kernels for two, four and eight
#: rows differ by a fifth, in no order.
_SHAPE_ERROR, _CPU_SHAPE_ERROR = 0.08, 0.13
#: Beyond so many errors a pass counts less.
_HUBER = 1.5
_90_PERCENT = 1.645
_ROUNDS = 60
_CLOSE = 1e-9

_ATTENTION = frozenset({OpKind.ATTENTION_PREFILL, OpKind.ATTENTION_DECODE, OpKind.STATE})


@dataclass(frozen=True, slots=True)
class _Part:
    """A kind of part, and the prior of its factor.

    Attributes:
        name: For people.
        likely: Where the factor probably lies.
        spread: Standard deviation of its logarithm.
    """

    name: str
    likely: float
    spread: float


#: On a GPU: factors on what the efficiency model says.
_ON_GPU = (
    _Part("products of few rows", 1.0, 0.25),
    _Part("products of many rows", 1.0, 0.20),
    _Part("attention", 1.0, 0.35),
    _Part("moved activations and collectives", 1.0, 0.5),
    _Part("host", 1.0, 0.5),
)
#: On a CPU: factors on times at the roofs. One row is seldom read as fast as memory delivers, and packing weights for
#: several rows moves them once more.
_ON_CPU = (
    _Part("weights, one row", 1.6, 0.5),
    _Part("weights, several rows", 2.0, 0.5),
    _Part("FLOPs of products", 1.3, 0.3),
    _Part("attention", 2.0, 0.7),
    _Part("moved activations", 1.5, 0.6),
    _Part("operators", 1.0, 0.6),
)


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """A pass and what it took.

    Attributes:
        prefill, decode: Its rows.
        logits_tokens: Positions for which the head was computed.
        seconds: Its time.
    """

    prefill: tuple[Rows, ...]
    decode: tuple[Rows, ...]
    logits_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Factor:
    """A fitted factor.

    Attributes:
        name: Of which part.
        value: Most likely.
        low, high: Its 90 % interval.
        told: How much of what was open before the passes tell: 0 nothing, 1 all of it.
    """

    name: str
    value: float
    low: float
    high: float
    told: float


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The step model of one run.

    Attributes:
        cost: What one rank holds.
        machine: What it ran on.
        factors: Of each kind of part.
        passes: Measured passes that it was fitted to.
        kinds: Different rows among them.
        error: Largest relative error on the medians of these.
        covariance: Of the logarithms of the factors.
    """

    cost: ModelCost
    machine: Machine
    factors: tuple[Factor, ...]
    passes: int
    kinds: int
    error: float
    covariance: tuple[tuple[float, ...], ...]

    def time(
        self, prefill: Sequence[Rows], decode: Sequence[Rows], *, logits_tokens: int
    ) -> Estimate:
        """The time of a pass of these rows.

        Raises:
            ValueError: If there are no rows.
        """
        parts = self._parts(prefill, decode, logits_tokens)
        logs = [math.log(factor.value) for factor in self.factors]
        seconds, slopes = _modelled(parts, logs, self.machine)
        shape = _SHAPE_ERROR if self.machine.runtime.overlaps else _CPU_SHAPE_ERROR
        variance = shape**2 + sum(
            slopes[i] * slopes[j] * self.covariance[i][j]
            for i in range(len(slopes))
            for j in range(len(slopes))
        )
        spread = math.exp(_90_PERCENT * math.sqrt(variance))
        noun = "pass" if self.passes == 1 else "passes"
        return Estimate(
            seconds,
            seconds / spread,
            seconds * spread,
            f"fitted to {self.passes:,} measured {noun}",
        )

    def _parts(
        self, prefill: Sequence[Rows], decode: Sequence[Rows], logits_tokens: int
    ) -> list[float]:
        step = step_time(
            self.cost, prefill, decode, machine=self.machine, logits_tokens=logits_tokens
        )
        return _parts_of(step, self.machine)


def calibrate(measured: Iterable[MeasuredPass], cost: ModelCost, machine: Machine) -> Calibrated:
    """Fit the factors.

    Args:
        measured: Steady passes of any phases. One is enough for an answer; different batch sizes tell more.
        cost: What one rank holds.
        machine: What they ran on.

    Raises:
        PhaseprofError: If there is no pass with a time.
        ValueError: If the model is not covered.
    """
    kinds: dict[tuple[tuple[Rows, ...], tuple[Rows, ...], int], list[float]] = {}
    for each in measured:
        if each.seconds > 0 and (each.prefill or each.decode):
            key = each.prefill, each.decode, each.logits_tokens
            kinds.setdefault(key, []).append(each.seconds)
    if not kinds:
        raise PhaseprofError(
            "There is no measured pass to fit the step model to.", "Record a run with passes."
        )
    rows = [
        _parts_of(step_time(cost, p, d, machine=machine, logits_tokens=logits), machine)
        for p, d, logits in kinds
    ]
    seconds = [median(times) for times in kinds.values()]
    weights = [_weight(len(times), len(kinds)) for times in kinds.values()]
    names = _names(machine)
    logs = _fit(rows, seconds, weights, names, machine)
    covariance = _covariance(rows, seconds, weights, names, machine, logs)
    return Calibrated(
        cost=cost,
        machine=machine,
        factors=tuple(
            _factor(part, log, covariance[i][i])
            for i, (part, log) in enumerate(zip(names, logs, strict=True))
        ),
        passes=sum(len(times) for times in kinds.values()),
        kinds=len(kinds),
        error=max(
            abs(_modelled(row, logs, machine)[0] / time - 1)
            for row, time in zip(rows, seconds, strict=True)
        ),
        covariance=tuple(tuple(row) for row in covariance),
    )


def measured_passes(rows: Iterable[PassRows]) -> list[MeasuredPass]:
    """Recorded passes (`pass_rows.rows_of_phases`) as measured ones."""
    return [
        MeasuredPass(each.prefill, each.decode, each.logits_tokens, each.span_ns / 1e9)
        for each in rows
    ]


def _weight(repeats: int, kinds: int) -> float:
    """1 / variance of a median. Lengths of the cache that differ by a token are hardly different passes: many kinds of
    a repeat or two count like few of many."""
    return min(repeats, 3) / (_PASS_ERROR**2 * max(kinds / 8, 1.0))


def _names(machine: Machine) -> tuple[_Part, ...]:
    return _ON_GPU if machine.runtime.overlaps else _ON_CPU


def _parts_of(step: StepTime, machine: Machine) -> list[float]:
    if machine.runtime.overlaps:
        return _gpu_parts(step)
    return _cpu_parts(step, machine)


def _gpu_parts(step: StepTime) -> list[float]:
    few = many = attention = moved = 0.0
    for term in step.terms:
        if term.kind in _ATTENTION:
            attention += term.time.seconds
        elif term.gemm is None:
            moved += term.time.seconds
        elif term.gemm.m < _MANY_ROWS:
            few += term.time.seconds
        else:
            many += term.time.seconds
    return [few, many, attention, moved, step.host.seconds]


def _cpu_parts(step: StepTime, machine: Machine) -> list[float]:
    one = several = computing = attention = moved = 0.0
    for term in step.terms:
        roofs = machine.roofs(term.kind)
        read_s = term.moved_bytes / roofs.bytes_per_s
        compute_s = term.flops / roofs.flops_per_s
        if term.kind in _ATTENTION:
            attention += read_s + compute_s
        elif term.gemm is None:
            moved += term.time.seconds
        elif term.gemm.m == 1:
            # Its FLOPs hide behind the weights.
            one += read_s
        else:
            several += read_s
            computing += compute_s
    return [one, several, computing, attention, moved, step.host.seconds]


def _modelled(
    parts: Sequence[float], logs: Sequence[float], machine: Machine
) -> tuple[float, list[float]]:
    """Seconds, and the derivatives of their logarithm by those of the factors."""
    times = [part * math.exp(log) for part, log in zip(parts, logs, strict=True)]
    if machine.runtime.ahead:
        # The host runs ahead of the device: the slower one decides.
        device, host = times[:-1], times[-1]
        times = [*device, 0.0] if sum(device) >= host else [0.0] * len(device) + [host]
    seconds = sum(times)
    return seconds, [time / seconds for time in times]


def _fit(
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    weights: Sequence[float],
    names: Sequence[_Part],
    machine: Machine,
) -> list[float]:
    logs = [math.log(part.likely) for part in names]
    for _ in range(_ROUNDS):
        matrix, right = _normal(rows, seconds, weights, names, machine, logs)
        change = _solve(matrix, right)
        # A long step leaves where the model is nearly linear.
        longest = max(abs(each) for each in change)
        scale = min(1.0, 0.5 / longest) if longest else 1.0
        logs = [log + scale * each for log, each in zip(logs, change, strict=True)]
        if longest < _CLOSE:
            break
    return logs


def _normal(
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    weights: Sequence[float],
    names: Sequence[_Part],
    machine: Machine,
    logs: Sequence[float],
) -> tuple[list[list[float]], list[float]]:
    """The normal equations of a step: of the passes, and of the priors."""
    size = len(names)
    matrix = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for i, part in enumerate(names):
        matrix[i][i] = 1 / part.spread**2
        right[i] = (math.log(part.likely) - logs[i]) / part.spread**2
    for row, time, weight in zip(rows, seconds, weights, strict=True):
        modelled, slopes = _modelled(row, logs, machine)
        off = math.log(time / modelled)
        errors = abs(off) * math.sqrt(weight)
        heard = weight * min(1.0, _HUBER / errors) if errors else weight
        for i in range(size):
            right[i] += heard * slopes[i] * off
            for j in range(size):
                matrix[i][j] += heard * slopes[i] * slopes[j]
    return matrix, right


def _covariance(
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    weights: Sequence[float],
    names: Sequence[_Part],
    machine: Machine,
    logs: Sequence[float],
) -> list[list[float]]:
    matrix, _ = _normal(rows, seconds, weights, names, machine, logs)
    size = len(names)
    columns = [_solve(matrix, [float(i == j) for i in range(size)]) for j in range(size)]
    return [[columns[j][i] for j in range(size)] for i in range(size)]


def _factor(part: _Part, log: float, variance: float) -> Factor:
    spread = math.exp(_90_PERCENT * math.sqrt(variance))
    value = math.exp(log)
    told = 1 - math.sqrt(variance) / part.spread
    return Factor(part.name, value, value / spread, value * spread, max(told, 0.0))


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    found = solve(matrix, right)
    assert found is not None, "priors make the matrix positive definite"
    return found
