"""False alarms and misses of `compare`, on a few of the simulated pairs that benchmarks/compare_calibration.py has."""

from __future__ import annotations

from compare_calibration import Noise, run_case


def test_the_same_thing_never_breaks_a_rule_of_ten_percent() -> None:
    found = run_case("calls", 8, 12)
    assert (found.pairs, found.breaches) == (12, 0)
    # Four noisy cases out of a hundred are expected outside; half of them would be a broken interval.
    assert found.missed["prefill.pass_ms.p50"] <= 5
    assert found.missed["decode.pass_ms.p50"] <= 5


def test_a_server_that_never_pauses_raises_no_alarm() -> None:
    found = run_case("server", 32, 3)
    assert found.breaches == 0


def test_eight_percent_in_decode_are_found_in_quiet_runs() -> None:
    quiet = Noise(run=0.005, drift=0.01, passes=0.03)
    found = run_case("calls", 16, 6, decode=1.08, noise=quiet)
    assert found.worse["decode.pass_ms.p50"] >= 4
    assert found.worse["prefill.pass_ms.p50"] == 0
    assert found.better["decode.pass_ms.p50"] == 0
