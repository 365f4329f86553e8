"""Block bootstrap, blocks and units: against closed forms, tables and runs whose spread is known."""

from __future__ import annotations

import math
import random
import statistics

import pyarrow as pa
import pytest
from traces import MS, START_NS, Timeline

from phaseprof.analyzers.comparing.resampling import (
    Draws,
    block_length,
    half_width,
    inflation,
    ranges,
    t95,
)
from phaseprof.analyzers.comparing.series import Distribution, Ratio, SameBatch
from phaseprof.analyzers.comparing.units import UnitKind, by_start, cut


def autoregression(chance: random.Random, n: int, likeness: float) -> list[float]:
    value, found = chance.gauss(0, 1), []
    for _ in range(n):
        value = likeness * value + math.sqrt(1 - likeness**2) * chance.gauss(0, 1)
        found.append(value)
    return found


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706), (2, 4.303), (5, 2.571), (5.9, 2.571), (10, 2.228), (30, 2.042)],
)
def test_quantiles_of_t_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert t95(freedom) == pytest.approx(quantile, abs=0.0006)


def test_many_degrees_of_freedom_come_near_to_the_normal_distribution() -> None:
    assert t95(60) == pytest.approx(2.000, abs=0.002)
    assert t95(120) == pytest.approx(1.980, abs=0.002)
    assert t95(math.inf) == pytest.approx(1.960, abs=0.001)
    assert t95(0.5) == math.inf


def test_half_widths_add_as_the_sides_of_a_right_angle() -> None:
    assert half_width((0.03 / 1.95996, math.inf), (0.04 / 1.95996, math.inf)) == pytest.approx(0.05)
    # A part of one block more than none dominates: it keeps its 12.7 standard errors.
    assert half_width((0.01, 1.0), (0.001, math.inf)) == pytest.approx(0.127, rel=0.01)
    assert half_width((0.0, 3.0)) == 0.0


def test_blocks_have_about_the_same_length() -> None:
    assert ranges(10, 4) == [(0, 5), (5, 10)]
    assert ranges(7, 1) == [(n, n + 1) for n in range(7)]
    assert ranges(3, 8) == [(0, 3)]


def test_independent_units_stay_short_blocks_and_drifting_ones_become_long() -> None:
    chance = random.Random(5)
    short = [block_length(autoregression(chance, 256, 0.0)) for _ in range(20)]
    long = [block_length(autoregression(chance, 256, 0.95)) for _ in range(20)]
    assert statistics.median(short) <= 4
    assert statistics.median(long) >= 16
    assert max(long) <= 256 // 8


def test_the_spread_of_a_mean_is_that_of_the_textbook() -> None:
    chance = random.Random(1)
    values = [100 + chance.gauss(0, 2) for _ in range(256)]
    spread = Ratio(tuple(values), (1.0,) * 256).spread(Draws(0))
    assert spread is not None
    # 2 % over the square root of 256, and correlation can only widen it.
    assert 0.9 * 0.02 / 16 <= spread.error <= 1.6 * 0.02 / 16
    assert spread.units == 256


def test_correlation_widens_it_by_as_much_as_it_should() -> None:
    chance = random.Random(3)
    wide = []
    for side in range(12):
        series = autoregression(chance, 256, 0.8)
        values = tuple(100 * math.exp(0.02 * each) for each in series)
        spread = Ratio(values, (1.0,) * 256).spread(Draws(side))
        assert spread is not None
        wide.append(spread.error)
    # Of an autoregression the mean varies (1 + 0.8) / (1 - 0.8) = 9 times as much: three times the standard error.
    truth = 3 * 0.02 / 16
    assert 0.7 * truth <= statistics.median(wide) <= 1.5 * truth


def test_few_blocks_are_taken_to_be_alike() -> None:
    flat = [1.0, -1.0, 1.0, -1.0]
    assert inflation(flat) >= 1.0
    assert inflation([-3.0, -1.0, 1.0, 3.0]) > inflation(flat)
    assert inflation([0.0, 0.0]) == 1.0
    many = autoregression(random.Random(2), 400, 0.0)
    assert inflation(many) == pytest.approx(1.0, abs=0.25)


def test_the_same_run_is_drawn_alike_and_two_runs_are_not() -> None:
    assert Draws(0).of(8) == Draws(0).of(8)
    assert Draws(0).of(8) != Draws(1).of(8)
    for draw in Draws(0).of(8):
        assert sum(draw) == len(draw) == 8


def test_one_unit_has_no_spread() -> None:
    assert Ratio((5.0,), (1.0,)).spread(Draws(0)) is None
    assert Ratio((0.0, 0.0), (0.0, 0.0)).value is None


def test_percentiles_are_nearest_ranks_and_know_what_they_rest_on() -> None:
    values = pa.array([n * MS for n in range(1, 101)] + [None], pa.int64())
    found = Distribution.of(values, [(0, 50), (50, 101)])
    assert (found.p50, found.p90, found.p99, found.count) == (50.0, 90.0, 99.0, 100)
    assert found.mean.value == pytest.approx(50.5)
    # Three values have to lie beyond: of a p99, of three hundred.
    assert [found.needed(share) for share in (0.50, 0.90, 0.99)] == [6, 30, 300]
    assert found.spread(0.99, Draws(0)) is None
    assert found.spread(0.90, Draws(0)) is not None


def test_the_spread_of_a_median_is_that_of_the_textbook() -> None:
    chance = random.Random(4)
    values = pa.array([round(MS * (100 + chance.gauss(0, 5))) for _ in range(2048)], pa.int64())
    found = Distribution.of(values, [(n * 16, n * 16 + 16) for n in range(128)])
    spread = found.spread(0.50, Draws(0))
    assert spread is not None
    # sqrt(pi / 2) times the standard error of the mean, for a normal distribution.
    truth = math.sqrt(math.pi / 2) * 0.05 / math.sqrt(2048)
    assert 0.8 * truth <= spread.error <= 1.7 * truth


def test_a_median_of_few_values_has_the_spread_of_their_mean() -> None:
    values = pa.array([10 * MS, 11 * MS, 12 * MS], pa.int64())
    found = Distribution.of(values, [(0, 1), (1, 2), (2, 3)])
    assert found.spread(0.50, Draws(0)) == found.mean.spread(Draws(0))


def test_means_at_equal_batch_sizes_weigh_each_size_the_same() -> None:
    fast, slow = Ratio((10.0, 10.0), (10.0, 10.0)), Ratio((40.0, 40.0), (10.0, 10.0))
    assert SameBatch((fast, slow), (0.5, 0.5)).value == pytest.approx(2.0)
    assert SameBatch((fast, slow), (1.0, 0.0)).value == pytest.approx(1.0)
    spread = SameBatch((fast, slow), (0.5, 0.5)).spread(Draws(0))
    assert spread is not None and spread.error == 0.0
    assert SameBatch((fast, Ratio((0.0, 0.0), (0.0, 0.0))), (0.5, 0.5)).value is None


def calls(n: int, *, batch: int = 1) -> Timeline:
    """Calls one after another, with a pause between them."""
    timeline = Timeline()
    for number in range(n):
        begin = timeline.now_ns
        timeline.add("prefill", 10, request=f"r{number}")
        timeline.add("decode", 5, request=f"r{number}", past=1)
        for row in range(batch):
            timeline.request(f"r{number}.{row}", arrival_ns=begin, finished_ns=timeline.now_ns)
        timeline.now_ns += 3 * MS
    return timeline


def test_a_call_with_its_batch_is_one_repeat() -> None:
    trace = calls(5, batch=4).trace()
    units = cut(trace.passes, trace.requests, {})
    assert (units.kind, units.repeats, len(units.starts_ns)) == (UnitKind.REPEATS, 5, 5)
    begins = trace.passes.column("start_ns").combine_chunks()
    assert units.slices(begins) == [(2 * n, 2 * n + 2) for n in range(5)]


def test_a_round_over_batch_sizes_is_one_unit() -> None:
    trace = calls(9).trace()
    units = cut(trace.passes, trace.requests, {"batch": [1, 4, 16]})
    assert (len(units.starts_ns), units.repeats) == (3, 9)


def test_thousands_of_calls_are_joined() -> None:
    timeline = Timeline()
    for number in range(1_000):
        timeline.request(
            f"r{number}",
            arrival_ns=START_NS + number * 10 * MS,
            finished_ns=START_NS + number * 10 * MS + 9 * MS,
        )
    timeline.add("decode", 5)
    trace = timeline.trace()
    units = cut(trace.passes, trace.requests, {})
    assert (len(units.starts_ns), units.repeats) == (128, 1_000)
    assert list(units.starts_ns) == sorted(set(units.starts_ns))


def test_a_server_that_never_pauses_is_cut_into_stretches_of_time() -> None:
    timeline = Timeline()
    for number in range(64):
        timeline.add("decode", 5)
        # Each arrives long before the one before it ends.
        timeline.request(
            f"r{number}",
            arrival_ns=START_NS + number * 5 * MS,
            finished_ns=START_NS + number * 5 * MS + 50 * MS,
        )
    trace = timeline.trace()
    units = cut(trace.passes, trace.requests, {})
    assert (units.kind, units.repeats, len(units.starts_ns)) == (UnitKind.STRETCHES, 1, 16)
    begins = trace.passes.column("start_ns").combine_chunks()
    assert {j - i for i, j in units.slices(begins)} == {4}


def test_without_requests_passes_are_cut_and_without_passes_nothing_is() -> None:
    timeline = Timeline()
    for _ in range(40):
        timeline.add("decode", 5)
    trace = timeline.trace()
    units = cut(trace.passes, trace.requests, {})
    assert (units.kind, units.repeats, len(units.starts_ns)) == (UnitKind.STRETCHES, 0, 10)
    none = trace.passes.slice(0, 0)
    assert len(cut(none, trace.requests, {}).starts_ns) == 1


def test_passes_come_by_their_begin() -> None:
    trace = calls(3).trace()
    backwards = trace.passes.take(pa.array(range(trace.passes.num_rows - 1, -1, -1)))
    assert by_start(backwards).column("pass_id").to_pylist() == list(range(6))
    assert by_start(trace.passes) is trace.passes
