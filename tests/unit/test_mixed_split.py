"""The split of mixed steps, on constructed steps whose parts are known."""

from __future__ import annotations

import math
import random

import pytest

from phaseprof.analyzers.steps.mixed_split import MixedSplit, split_mixed, split_step
from phaseprof.analyzers.steps.pass_rows import PassRows
from phaseprof.analyzers.steps.step_fit import StepFit, fit_steps
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import AttentionCost, MatmulCost, ModelCost
from phaseprof.work.count import Rows

#: A device of 100 TFLOP/s and 1 TB/s, and a model of 2 GB: 2 ms to read, and 50 tokens are worth a millisecond.
ROOFS = Ceilings("key", "bfloat16", 100e12, 1e12, "measured", 0, 0.0, "")
COST = ModelCost(
    linear_flops_per_token=2 * 10**9,
    head_flops_per_token=0,
    attention=(AttentionCost(1, 32, 8, 128, 128, None, 40_000),),
    body_weight_bytes=2 * 10**9,
    head_weight_bytes=0,
    lookup_bytes_per_token=0,
    parameter_bytes=2 * 10**9,
    parameters=10**9,
    dtype="bfloat16",
    matmuls=(MatmulCost("qkv", 1, 10**4, 10**5, 2 * 10**9),),
)


def _step(prefill: tuple[Rows, ...], decode: tuple[Rows, ...], ms: float) -> PassRows:
    prompts = tuple(200 for _ in prefill)
    return PassRows(prefill, decode, 1, round(ms * 1e6), None, None, None, prompts)


class World:
    """A machine with laws of its own: what it says of a step is not what the work model says.

    Products reach a part of the peak that grows with the rows, and glide from reading to computing; attention has
    rates of its own; each step has a fixed cost and noise.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        uniform = self.random.uniform
        self.fixed_ms = uniform(0.0, 3.0)
        self.read_ms = 2.0 / uniform(0.6, 0.95)
        self.token_ms = 0.02 / uniform(0.4, 0.9)
        self.power = uniform(2.0, 6.0)
        self.key_ms = 4e-5 / uniform(0.3, 0.9)
        self.pair_ms = 1.6e-7 / uniform(0.2, 0.8)
        self.noise = uniform(0.005, 0.03)

    def products_ms(self, tokens: int) -> float:
        return float(
            (self.read_ms**self.power + (self.token_ms * tokens) ** self.power) ** (1 / self.power)
        )

    def decode_ms(self, rows: tuple[Rows, ...]) -> float:
        return self.key_ms * sum((row.past + 1) * row.sequences for row in rows)

    def prefill_ms(self, rows: tuple[Rows, ...]) -> float:
        return self.pair_ms * sum(
            (row.query * row.past + row.query**2 / 2) * row.sequences for row in rows
        )

    def step(
        self, prefill: tuple[Rows, ...], decode: tuple[Rows, ...]
    ) -> tuple[PassRows, float, float]:
        """A step, and what of its time is decode's: by tokens, and by the mean of what it adds and what it would take
        alone."""
        p = sum(row.query * row.sequences for row in prefill)
        d = sum(row.sequences for row in decode)
        products = self.products_ms(p + d)
        own = self.decode_ms(decode)
        factor = math.exp(self.random.gauss(0, self.noise))
        whole = (self.fixed_ms + products + own + self.prefill_ms(prefill)) * factor
        by_tokens = (own + products * d / (p + d) + self.fixed_ms / 2) * factor
        added = (own + products - self.products_ms(p)) * factor
        alone = (own + self.products_ms(d) + self.fixed_ms) * factor
        return _step(prefill, decode, whole), by_tokens, (added + alone) / 2


def _run(world: World) -> tuple[dict[Phase, list[PassRows]], list[tuple[PassRows, float, float]]]:
    """Sixty steps of a server: decode that grows, prompts that come in chunks."""
    choice, between = world.random.choice, world.random.randint
    chunk = choice([128, 256, 512, 1024])
    rows: dict[Phase, list[PassRows]] = {Phase.DECODE: [], Phase.MIXED: [], Phase.PREFILL: []}
    mixed = []
    for _ in range(60):
        decode = tuple(Rows(between(50, 4000), 1, 1) for _ in range(between(1, 48)))
        prefill = (Rows(choice([0, chunk]), chunk, 1),)
        kind = choice([Phase.DECODE, Phase.DECODE, Phase.MIXED, Phase.MIXED, Phase.PREFILL])
        if kind is Phase.MIXED:
            step = world.step(prefill, decode)
            mixed.append(step)
            rows[kind].append(step[0])
        elif kind is Phase.DECODE:
            rows[kind].append(world.step((), decode)[0])
        else:
            rows[kind].append(world.step(prefill, ())[0])
    return rows, mixed


def test_the_truth_is_inside_of_the_interval() -> None:
    """Steps of 60 machines: decode's part by tokens (with half of the fixed cost), and by the mean of both orders."""
    inside = total = narrow = 0
    for seed in range(60):
        rows, mixed = _run(World(seed))
        fit = fit_steps([each for found in rows.values() for each in found], COST, ROOFS)
        assert fit is not None
        for step, by_tokens, by_orders in mixed:
            part = split_step(fit, step)
            for truth in (by_tokens, by_orders):
                inside += part.low_s * 1e3 <= truth <= part.high_s * 1e3
                total += 1
            narrow += part.high_s - part.low_s < step.span_ns / 1e9 * 0.6
    assert total > 1000
    assert inside / total >= 0.90
    # An interval of everything would hold every truth.
    assert narrow > total / 4


def test_without_roofs_tokens_and_pairs_tell() -> None:
    inside = total = 0
    for seed in range(20):
        rows, mixed = _run(World(seed))
        fit = fit_steps([each for found in rows.values() for each in found], None, None)
        assert fit is not None
        assert not fit.by_roofs
        for step, by_tokens, _ in mixed:
            part = split_step(fit, step)
            inside += part.low_s * 1e3 <= by_tokens <= part.high_s * 1e3
            total += 1
    assert inside / total >= 0.90


def _exact(prefill: tuple[Rows, ...], decode: tuple[Rows, ...]) -> PassRows:
    """1 ms, 10 us a token, 1 us for each key of decode: no noise."""
    tokens = sum(row.query * row.sequences for row in (*prefill, *decode))
    keys = sum((row.past + row.query) * row.sequences for row in decode)
    return _step(prefill, decode, 1 + 0.01 * tokens + 0.001 * keys)


def _exact_run() -> dict[Phase, list[PassRows]]:
    return {
        Phase.DECODE: [_exact((), (Rows(100 * n, 1, n),)) for n in range(1, 13)],
        Phase.PREFILL: [_exact((Rows(0, 50 * n, 1),), ()) for n in range(1, 13)],
        Phase.MIXED: [_exact((Rows(0, 200, 1),), (Rows(999, 1, 2),)) for _ in range(4)],
    }


def test_a_fit_finds_the_law_that_was_put_in() -> None:
    fit = fit_steps([each for found in _exact_run().values() for each in found], None, None)
    assert fit is not None
    assert fit.fixed_s == pytest.approx(1e-3, rel=1e-6)
    assert fit.coefficients == pytest.approx((1e-5, 0.0, 1e-6), abs=1e-12)
    assert fit.time_s((Rows(0, 10, 1),), ()) == pytest.approx(1.1e-3, rel=1e-6)
    assert fit.time_s((), ()) == 0.0


def test_a_split_by_hand() -> None:
    """A step of 1 + 2.02 + 2 ms: decode alone takes 1 + 0.02 + 2, and adds 2.02 to prefill."""
    found = split_mixed(_exact_run(), None, None)
    assert isinstance(found, MixedSplit)
    assert found.step_ms == pytest.approx(5.02)
    assert found.decode_ms == pytest.approx((3.02 + 2.02) / 2, rel=1e-6)
    slack = found.error * 5.02 / 2
    assert found.decode_low_ms == pytest.approx(2.02 - slack, rel=1e-6)
    assert found.decode_high_ms == pytest.approx(3.02 + slack, rel=1e-6)
    assert found.prefill_ms + found.decode_ms == found.step_ms


def test_smaller_chunks_shorten_steps_and_lengthen_prompts() -> None:
    """200 tokens in chunks of 100 are two steps of 1 + 1.02 + 2 ms, where one of 5.02 was."""
    found = split_mixed(_exact_run(), None, None)
    assert found is not None
    half, whole = (
        next(chunk for chunk in found.chunks if chunk.chunk_tokens == size) for size in (100, 200)
    )
    assert (whole.present, half.present) == (True, False)
    assert whole.itl_ms == pytest.approx(5.02, rel=1e-6)
    assert half.itl_ms == pytest.approx(4.02, rel=1e-6)
    assert whole.ttft_ms == pytest.approx(5.02, rel=1e-6)
    assert half.ttft_ms == pytest.approx(8.04, rel=1e-6)
    # A prompt of one chunk has no use for larger ones.
    assert max(chunk.chunk_tokens for chunk in found.chunks) == 200


def test_too_few_mixed_steps_are_not_split() -> None:
    run = _exact_run()
    run[Phase.MIXED] = run[Phase.MIXED][:2]
    assert split_mixed(run, None, None) is None


def test_one_step_over_and_over_still_gives_an_interval() -> None:
    """Nothing tells prefill from decode: anything may be true."""
    run = {Phase.MIXED: [_exact((Rows(0, 200, 1),), (Rows(999, 1, 2),))] * 9}
    found = split_mixed(run, None, None)
    assert found is not None
    assert found.decode_low_ms <= 2.02
    assert found.decode_high_ms >= 3.02


def test_a_fit_is_none_without_passes() -> None:
    assert fit_steps([], COST, ROOFS) is None
    assert isinstance(fit_steps(_exact_run()[Phase.DECODE], COST, ROOFS), StepFit)
