"""What a sweep over sizes yields: the figures of each cell, how they change from cell to cell, and what follows."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phaseprof.analyzers.results import Bound, Roof


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median of repeats, and how sure it is.

    Attributes:
        median: Of all repeats; none is left out.
        low, high: The interval of the median, from two of the repeats in order.
        coverage: The probability that it holds the true median: at least 0.9 from five repeats on; with fewer it is
            their range, and the probability is smaller.
        mad: Median absolute deviation of the repeats from the median.
        repeats: How many.
    """

    median: float
    low: float
    high: float
    coverage: float
    mad: float
    repeats: int

    @property
    def spread(self) -> float:
        """Half the interval over the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    @property
    def scatter(self) -> float:
        """How far repeats usually are from the median, over the median: 1.4826 MAD, which outliers do not move."""
        return 1.4826 * self.mad / self.median if self.median else 0.0


class Oddity(enum.StrEnum):
    """What was odd about a repeat that lies far from the others."""

    #: Something was compiled in it.
    COMPILED = "compiled"
    #: It was the first one of its cell, and no warm-up came before it.
    FIRST = "first"
    #: The device's clock was lower than in the others.
    THROTTLED = "throttled"
    #: One pass took most of the excess.
    ONE_PASS = "one pass"
    #: All of its passes took longer.
    THROUGHOUT = "throughout"
    #: Some of its passes took longer.
    SOME_PASSES = "some passes"


@dataclass(frozen=True, slots=True)
class Outlier:
    """A repeat that lies far from the others of its cell. It stays in the median.

    Attributes:
        prompt_tokens, new_tokens, batch: The cell.
        repeat: Its number, from 0.
        figure: ``decode step`` or ``prefill``.
        value_ms, median_ms: The repeat, and the median of all.
        oddity: What was odd.
        detail: The same in words.
    """

    prompt_tokens: int
    new_tokens: int
    batch: int
    repeat: int
    figure: str
    value_ms: float
    median_ms: float
    oddity: Oddity
    detail: str

    @property
    def times(self) -> float:
        """The repeat over the median."""
        return self.value_ms / self.median_ms


@dataclass(frozen=True, slots=True)
class PhaseOfCell:
    """One phase of a cell.

    Attributes:
        time_ms: Of a decode step of the whole batch, from its begin to the begin of the next one; of prefill, the
            passes that compute the prompts of a call.
        tokens_per_s: Tokens of the phase over that time.
        bound: Its class, by the verdict over its passes. explained: Share of their time that the nearer roof explains.
        nearest_roof: Which roof that is.
        tokens: Tokens that the time is of: the batch, or all prompts of a call.
        flops: FLOPs of these tokens; None if not known.
        gain: Of decode: its tokens/s over those of the smallest batch of its length. even_gain: The batches likewise:
            what the gain would be if a step always took as long.
    """

    time_ms: Estimate
    tokens_per_s: float
    bound: Bound
    explained: float | None
    nearest_roof: Roof | None
    tokens: int
    flops: float | None = None
    gain: float | None = None
    even_gain: float | None = None


@dataclass(frozen=True, slots=True)
class CellFigures:
    """One cell: a size of prompt, output and batch.

    Attributes:
        prompt_tokens, new_tokens, batch: The cell.
        planned: Repeats that were asked for. repeats: Those that are whole in the trace.
        decode: None where nothing was decoded by the whole batch.
        prefill: None where no prompt was computed.
        ttft_ms: Median over the requests of a call. tpot_ms: Likewise; None for outputs of one token.
    """

    prompt_tokens: int
    new_tokens: int
    batch: int
    planned: int
    repeats: int
    decode: PhaseOfCell | None
    prefill: PhaseOfCell | None
    ttft_ms: Estimate | None
    tpot_ms: Estimate | None


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the class changes from one cell to the next.

    Attributes:
        before, after: The classes.
        low, high: The batch (or tokens) of the last cell of the one and of the first of the other.
    """

    before: Bound
    after: Bound
    low: int
    high: int


class Place(enum.StrEnum):
    """Where a knee lies."""

    #: Between the smallest and the largest size that was run.
    INSIDE = "inside"
    #: Above all of them: it is extrapolated.
    BEYOND = "beyond"
    #: Below all of them.
    BELOW = "below"
    #: The time does not grow with the size, as far as the repeats can tell.
    NOWHERE = "nowhere"
    #: The repeats leave it open.
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Knee:
    """Where the time of a pass turns from its fixed cost to the cost of what is added.

    Attributes:
        place: Where it lies. at: The batch or tokens; None where there is none.
        low, high: Its 90 % interval, by resampling the repeats; None for an end that is open.
        fixed_ms: The cost of a pass whatever its size. each_ms: The cost of each further sequence (or token).
        misfit: The largest error of the line fixed + size x each at a cell, as a share of the cell's time.
        by_line: ``at`` is fixed over each; else the line misses the cells, and it is where the time of a pass, against
            the smallest, says the same.
        begin: The smallest size on the line. aside: Where that is the second one, how much longer the smallest takes
            than the line says, as a share of that (negative: it is quicker); None where the line has all sizes.
    """

    place: Place
    at: float | None
    low: float | None
    high: float | None
    fixed_ms: float
    each_ms: float
    misfit: float
    by_line: bool
    begin: float
    aside: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeRoofs:
    """What the roofs say of a decode step of any batch.

    Attributes:
        context_tokens: Tokens in the cache of each sequence.
        weights_ms: Time to read the weights once.
        kv_ms: Time to read and write the keys, values and states of one sequence.
        compute_ms: Time to compute one sequence's token.
        ridge: The batch from which computing takes longer than reading; None: it never does.
        knee: The batch at which what each sequence adds has grown to the reading of the weights, whether it adds
            computing or KV.
    """

    context_tokens: int
    weights_ms: float
    kv_ms: float
    compute_ms: float
    ridge: float | None
    knee: float


@dataclass(frozen=True, slots=True)
class DecodeSeries:
    """Decode against batch at one length.

    Attributes:
        prompt_tokens, new_tokens: The length.
        batches: Those that were run, ascending.
        knee: None with too few of them.
        roofs: None without work or roofs.
        bounds: The class at each of them. turns: Where it changes.
        gain: Tokens/s at the largest batch over those at the smallest. slowdown: Time of a step likewise.
    """

    prompt_tokens: int
    new_tokens: int
    batches: tuple[int, ...]
    knee: Knee | None
    roofs: DecodeRoofs | None
    bounds: tuple[Bound, ...]
    turns: tuple[Turn, ...]
    gain: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class PrefillSeries:
    """Prefill against the tokens of its passes, over all lengths and batches.

    Attributes:
        tokens: Those that were run, ascending.
        knee: In tokens; None with too few sizes.
        ridge: Tokens from which computing takes longer than reading the weights, at the roofs; None if it never does,
            or is not known.
        turns: Where the class changes, by tokens.
        best_tokens_per_s: The highest rate. best_tokens: At how many tokens.
        rate_flops: FLOP/s of what is added; None if FLOPs are not known.
    """

    tokens: tuple[int, ...]
    knee: Knee | None
    ridge: float | None
    turns: tuple[Turn, ...]
    best_tokens_per_s: float
    best_tokens: int
    rate_flops: float | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep over sizes.

    Attributes:
        cells: By length, and by batch within.
        decode: One a length.
        prefill: None where no prompt was computed.
        outliers: Repeats far from the others, the farthest first.
        conclusion: Where batching stops helping and why, and what prefill does: a sentence each.
        missing: What would have to be run to say more.
    """

    cells: tuple[CellFigures, ...]
    decode: tuple[DecodeSeries, ...]
    prefill: PrefillSeries | None
    outliers: tuple[Outlier, ...]
    conclusion: tuple[str, ...]
    missing: tuple[str, ...]
