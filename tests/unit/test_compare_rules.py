"""Rules: their grammar, their aliases, and when a change breaches one."""

from __future__ import annotations

import math

import pytest

from phaseprof.analyzers.comparing.compare import delta
from phaseprof.analyzers.comparing.results import Better, Delta, Figure, Metric, Outcome, Unit
from phaseprof.analyzers.comparing.rules import Kind, judge, parse
from phaseprof.errors import UsageError

NOISELESS = 0.0


def figure(value: float | None, percent: float | None = 1.0) -> Figure:
    """A figure whose 95 % interval is 1.96 times so many percent of it, either way."""
    if value is None or percent is None:
        return Figure(value, lacking="nothing in it was repeated")
    return Figure(value, percent / 100, math.inf, 8, 100)


def of(path: str, a: Figure, b: Figure, unit: Unit = Unit.MS, why_not: str = "") -> Delta:
    group, _, name = path.partition(".")
    metric = Metric(path, unit, Better.LOWER, group, None, name)
    return delta(metric, a, b, NOISELESS, why_not)


@pytest.mark.parametrize(
    ("text", "path", "above", "kind", "limit"),
    [
        ("requests.tpot_ms.p50 > +5%", "requests.tpot_ms.p50", True, Kind.RELATIVE, 0.05),
        ("decode.tpot_ms.p50>+5 %", "requests.tpot_ms.p50", True, Kind.RELATIVE, 0.05),
        ("requests.ttft_ms.p99 > 200ms", "requests.ttft_ms.p99", True, Kind.VALUE, 200.0),
        ("ttft.p99 >= 1.5s", "requests.ttft_ms.p99", True, Kind.VALUE, 1500.0),
        ("decode.mbu < -3%", "decode.mbu", False, Kind.RELATIVE, -0.03),
        ("decode.mbu < -2pp", "decode.mbu", False, Kind.ABSOLUTE, -0.02),
        ("decode.mbu < 40%", "decode.mbu", False, Kind.VALUE, 0.4),
        ("itl > +500us", "requests.itl_ms.p50", True, Kind.ABSOLUTE, 0.5),
        ("decode.step_ms > 5ms", "decode.pass_ms.p50", True, Kind.VALUE, 5.0),
        ("decode.tokens_per_s < -5%", "decode.output_tokens_per_s", False, Kind.RELATIVE, -0.05),
        ("prefill.tokens_per_s < 900 tok/s", "prefill.prompt_tokens_per_s", False, Kind.VALUE, 900),
        ("by_batch.16.decode.pass_ms > +3%", "by_batch.16.decode.pass_ms.p50", True, Kind.RELATIVE, 0.03),
        ("decode.joules_per_token > 900 mJ/token", "decode.joules_per_token", True, Kind.VALUE, 0.9),
        ("decode.pass_ms.same_batch > +4%", "decode.pass_ms.same_batch", True, Kind.RELATIVE, 0.04),
        ("Decode.Kernels.gemm.ms_per_pass > 2ms", "decode.kernels.gemm.ms_per_pass", True, Kind.VALUE, 2),
    ],
)  # fmt: skip
def test_a_rule_is_read(text: str, path: str, above: bool, kind: Kind, limit: float) -> None:
    rule = parse(text)
    assert (rule.path, rule.above, rule.kind) == (path, above, kind)
    assert rule.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decode.tpot_ms.p50", "is no rule"),
        ("decode.tpot_ms.p50 == 5%", "is no rule"),
        ("decode.tpot_ms.p50 > five", "is no rule"),
        ("decode.tpot_ms.p50 > 5%", "is 5 % a change?"),
        ("decode.tpot_ms.p50 > 5", "the limit has no unit"),
        ("decode.tpot_ms.p50 > 5 W", "'W' does not fit"),
        ("decode.mbu < 3pp", "'pp' does not fit"),
        ("decode.mbu > 20ms", "'ms' does not fit"),
        ("decode.topt_ms.p50 > +5%", "there is no figure 'decode.topt_ms.p50'"),
        ("by_batch.4.requests.ttft_ms > +5%", "there is no figure"),
        ("by_batch.4.decode.pass_ms.same_batch > +5%", "there is no figure"),
    ],
)
def test_what_is_no_rule_is_a_usage_error(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(text)
    assert said in raised.value.message
    assert raised.value.remedy


def test_near_figures_are_named() -> None:
    with pytest.raises(UsageError) as raised:
        parse("decode.topt_ms.p50 > +5%")
    assert "decode.tpot_ms" in raised.value.remedy
    with pytest.raises(UsageError) as raised:
        parse("decode.ttft > 200ms")
    assert "requests.ttft_ms" in raised.value.remedy


@pytest.mark.parametrize(
    ("b", "outcome"),
    [
        # 1.96 times the root of two times 1 %: 2.77 % either way, in logarithms.
        (100.0, Outcome.KEPT),
        (104.9, Outcome.KEPT),
        (106.0, Outcome.NOT_CERTAIN),
        (107.9, Outcome.NOT_CERTAIN),
        (108.1, Outcome.BREACH),
        (90.0, Outcome.KEPT),
    ],
)
def test_a_breach_is_beyond_the_limit_and_beyond_the_noise(b: float, outcome: Outcome) -> None:
    found = of("requests.tpot_ms.p50", figure(100.0), figure(b))
    assert judge(parse("tpot > +5%"), [found], NOISELESS).outcome is outcome


@pytest.mark.parametrize(
    ("b", "outcome"), [(0.49, Outcome.KEPT), (0.48, Outcome.NOT_CERTAIN), (0.46, Outcome.BREACH)]
)
def test_a_fall_is_judged_as_a_rise_is(b: float, outcome: Outcome) -> None:
    found = of("decode.mbu", figure(0.50), figure(b), Unit.SHARE)
    assert judge(parse("decode.mbu < -3%"), [found], NOISELESS).outcome is outcome


@pytest.mark.parametrize(
    ("b", "outcome"), [(199.0, Outcome.KEPT), (203.0, Outcome.NOT_CERTAIN), (205.0, Outcome.BREACH)]
)
def test_a_value_is_that_of_the_second_trace(b: float, outcome: Outcome) -> None:
    # 1.96 %: 201.06 ms is the lower end of 205 ms, and 199.06 ms that of 203 ms.
    found = of("requests.ttft_ms.p99", figure(1.0), figure(b))
    assert judge(parse("ttft.p99 > 200ms"), [found], NOISELESS).outcome is outcome


@pytest.mark.parametrize(
    ("b", "outcome"), [(118.0, Outcome.KEPT), (122.0, Outcome.NOT_CERTAIN), (124.0, Outcome.BREACH)]
)
def test_a_difference_has_the_noise_of_both(b: float, outcome: Outcome) -> None:
    # 1.96 times the root of (1 ms)^2 + (1.2 ms)^2 is 3.1 ms.
    found = of("requests.ttft_ms.p50", figure(100.0), figure(b))
    assert judge(parse("ttft > +20ms"), [found], NOISELESS).outcome is outcome


def test_the_noise_of_runs_counts() -> None:
    found = of("requests.ttft_ms.p50", figure(100.0, 0.1), figure(205.0, 0.1))
    assert judge(parse("ttft > 200ms"), [found], 0.0).outcome is Outcome.BREACH
    assert judge(parse("ttft > 200ms"), [found], 0.02).outcome is Outcome.NOT_CERTAIN


def test_without_an_interval_nothing_is_a_breach() -> None:
    found = of("requests.ttft_ms.p99", figure(100.0, None), figure(300.0, None))
    judged = judge(parse("ttft.p99 > +5%"), [found], NOISELESS)
    assert judged.outcome is Outcome.NOT_CERTAIN
    assert "nothing in it was repeated" in judged.text
    assert judge(parse("ttft.p99 > +500%"), [found], NOISELESS).outcome is Outcome.KEPT


def test_what_is_missing_is_not_judged_and_never_kept() -> None:
    missing = of("requests.ttft_ms.p99", figure(100.0), Figure(None, lacking="it has no request"))
    judged = judge(parse("ttft.p99 > +5%"), [missing], NOISELESS)
    assert judged.outcome is Outcome.NOT_JUDGED
    assert judged.text == "The second trace lacks it: it has no request."
    nowhere = judge(parse("decode.joules_per_token > +5%"), [], NOISELESS)
    assert nowhere.outcome is Outcome.NOT_JUDGED


def test_what_does_not_compare_is_not_judged_by_its_change_and_is_by_its_value() -> None:
    found = of("requests.ttft_ms.p50", figure(100.0), figure(300.0), why_not="other prompts")
    judged = judge(parse("ttft > +5%"), [found], NOISELESS)
    assert (judged.outcome, judged.text) == (Outcome.NOT_JUDGED, "Other prompts.")
    assert judge(parse("ttft > 200ms"), [found], NOISELESS).outcome is Outcome.BREACH


def test_times_of_nothing_have_no_ratio() -> None:
    found = of("requests.queue_ms.p50", figure(0.0), figure(5.0))
    assert found.change is None
    assert judge(parse("queue > +5%"), [found], NOISELESS).outcome is Outcome.NOT_JUDGED
