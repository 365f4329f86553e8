"""Phases solved from slow samples, against runs whose counters are known: right where sure, and sure where it can be.

`scripted.drawn` says what a run is drawn from. A larger run of the same draws is in docs/counters.md.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Ran, Script, drawn, engine_loop, generate_loop, solved_for
from traces import MS

from phaseprof.metrics import Metric
from phaseprof.phases import Phase

VALUES = {"prefill": 0.92, "decode": 0.35, "mixed": 0.7}
PHASES = ("prefill", "decode", "mixed")


def test_where_it_is_sure_the_truth_is_within_five_points() -> None:
    sure = wrong = covered = plain = plain_sure = 0
    for seed in range(30):
        draw = drawn(seed)
        solution = solved_for(draw.script.passes, draw.windows)
        for name in {ran.phase for ran in draw.script.passes}:
            figure, truth = solution.figure(Metric.SM_ACTIVE, Phase(name)), draw.script.truth(name)
            enough = draw.plain and solution.seconds(Phase(name)) >= 2 and figure.windows >= 40
            plain += enough
            if figure.sure is not None:
                assert figure.error is not None and figure.error <= 0.05
                sure += 1
                plain_sure += enough
                wrong += abs(figure.sure - truth) > 0.05
                covered += abs(figure.sure - truth) <= figure.error

    assert sure >= 35
    assert wrong <= sure // 100
    # 95 % intervals: a loss of one in twenty is what they promise.
    assert covered >= 0.93 * sure
    # Nothing stands in the way of these: a tool that is never sure would be of no use.
    assert plain >= 10 and plain_sure >= 0.9 * plain


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    decode_ms=st.floats(3, 60),
    prefill_ms=st.floats(15, 200),
    prefill=st.floats(0, 1),
    decode=st.floats(0, 1),
    offset_ms=st.floats(-4, 4),
    pause_ms=st.sampled_from([0.0, 100.0]),
)
def test_without_noise_what_is_sure_is_right(
    seed: int,
    decode_ms: float,
    prefill_ms: float,
    prefill: float,
    decode: float,
    offset_ms: float,
    pause_ms: float,
) -> None:
    random = Random(seed)
    script = Script(
        generate_loop(
            random,
            seconds=8,
            decode_ms=decode_ms,
            prefill_ms=prefill_ms,
            new=12,
            pause_ms=pause_ms,
            values={"prefill": prefill, "decode": decode},
        )
    )

    solution = solved_for(script.passes, script.sampled(random, offset=offset_ms * MS))

    for name in ("prefill", "decode"):
        figure = solution.figure(Metric.SM_ACTIVE, Phase(name))
        if figure.sure is not None:
            assert abs(figure.sure - script.truth(name)) <= 0.05


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_decode_of_12_ms_and_prefill_of_80_are_told_apart_in_20_s(noise: float) -> None:
    random = Random(11)
    script = Script(generate_loop(random, values=VALUES, within=0.02), between=0.1)

    solution = solved_for(script.passes, script.sampled(random, noise=noise, offset=2 * MS))

    for name in ("prefill", "decode"):
        figure = solution.figure(Metric.SM_ACTIVE, Phase(name))
        assert figure.sure == pytest.approx(script.truth(name), abs=0.05), figure


def test_three_phases_of_a_serving_engine_are_told_apart() -> None:
    random = Random(12)
    script = Script(engine_loop(random, seconds=60, values=VALUES))

    solution = solved_for(script.passes, script.sampled(random, noise=0.02, jitter=0.5 * MS))

    for name in PHASES:
        figure = solution.figure(Metric.SM_ACTIVE, Phase(name))
        assert figure.sure == pytest.approx(script.truth(name), abs=0.05), figure


@pytest.mark.parametrize("seed", range(6))
def test_hardly_any_prefill_in_the_windows_is_not_enough(seed: int) -> None:
    """The trap: one or two prefills in 20 s can be fitted to anything, with small residuals."""
    random = Random(seed)
    script = Script(generate_loop(random, new=1_200, prefill_ms=20, values=VALUES))

    solution = solved_for(script.passes, script.sampled(random, noise=0.03))

    assert solution.figure(Metric.SM_ACTIVE, Phase.PREFILL).sure is None
    decode = solution.figure(Metric.SM_ACTIVE, Phase.DECODE)
    assert decode.sure == pytest.approx(script.truth("decode"), abs=0.05)


def test_phases_that_share_every_window_alike_are_not_told_apart() -> None:
    """3 ms of each in turn: every window is half and half, whatever the phases do."""
    passes = [
        Ran(at * MS, (at + 3) * MS, "prefill" if at % 6 == 0 else "decode", 0.9 - 0.1 * (at % 6))
        for at in range(0, 20_000, 3)
    ]
    script = Script(passes)

    solution = solved_for(passes, script.sampled(Random(3), noise=0.02, jitter=1 * MS))

    for phase in (Phase.PREFILL, Phase.DECODE):
        figure = solution.figure(Metric.SM_ACTIVE, phase)
        assert figure.sure is None
        assert figure.reason == (
            "it shares its windows with other work in the same proportion throughout"
        )


@pytest.mark.parametrize("apart_ms", [-4, 15])
def test_clocks_that_are_apart_are_seen_and_taken_back(apart_ms: int) -> None:
    random = Random(5)
    script = Script(generate_loop(random, new=6, decode_ms=10, values=VALUES))

    solution = solved_for(script.passes, script.sampled(random, noise=0.01, offset=apart_ms * MS))

    figure = solution.figure(Metric.SM_ACTIVE, Phase.PREFILL)
    assert figure.sure == pytest.approx(script.truth("prefill"), abs=0.02)


def test_long_prefills_that_do_more_than_short_ones_do_not_stand_for_all() -> None:
    """Least squares follows the windows that hold most of a phase: those of its long passes."""
    random = Random(8)
    passes: list[Ran] = []
    at = 0.0
    for i in range(160):
        long = i % 2 == 0
        end = at + (150 if long else 15) * MS
        passes.append(Ran(at, end, "prefill", 0.9 if long else 0.3))
        for _ in range(6):
            passes.append(Ran(end, end + 10 * MS, "decode", 0.2))
            end += 10 * MS
        at = end
    script = Script(passes)

    solution = solved_for(passes, script.sampled(random, noise=0.01))

    figure = solution.figure(Metric.SM_ACTIVE, Phase.PREFILL)
    assert figure.value is not None and figure.error is not None
    assert abs(figure.value - script.truth("prefill")) <= figure.error
    assert figure.sure is not None
