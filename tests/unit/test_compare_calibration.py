"""False alarms and misses of `compare`, on a few of the simulated pairs that benchmarks/compare_calibration.py has."""

from __future__ import annotations

from compare_calibration import Noise, run_case, sample, server

from phaseprof.analyzers.comparing.compare import compare


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


def test_a_server_that_decodes_slower_is_found_at_equal_batch_sizes() -> None:
    quiet = Noise(run=0.005, drift=0.01, passes=0.03)
    a, b = (sample(server(str(n), 48, quiet, 1 + 0.15 * n), n) for n in (0, 1))
    found = compare(a, b, run_noise=0.02)
    assert found.verdict[0] == "Decode is slower, prefill is unchanged."
    same = found.delta("decode.pass_ms.same_batch")
    assert same is not None and same.low is not None and same.high is not None
    assert same.low < 0.15 < same.high
    # All prefills are of one request: there is no other batch size to set them apart from.
    assert found.delta("prefill.pass_ms.same_batch") is None
