"""What sets prefill and decode apart, said of constructed runs that show it and of such that show the opposite."""

from __future__ import annotations

from traces import Timeline

from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.two_phases import Fact, Topic


def _facts(timeline: Timeline) -> dict[Topic, Fact]:
    return {fact.topic: fact for fact in build_report(timeline.trace()).two_phases}


def _batches(decode_ms: dict[int, float], prefill_ms: dict[int, float]) -> Timeline:
    timeline = Timeline()
    for batch, ms in prefill_ms.items():
        for _ in range(6):
            timeline.add(
                "prefill", ms, tokens=100 * batch, sequences=batch, prefill_tokens=100 * batch
            )
            timeline.add(
                "decode", decode_ms[batch], tokens=batch, sequences=batch, gflop=0.1, gb=0.2
            )
    return timeline


def test_decode_batches_and_prefill_does_not() -> None:
    facts = _facts(_batches({1: 10, 8: 16}, {1: 100, 8: 800}))
    decode = facts[Topic.DECODE_BATCHES]
    assert decode.holds
    assert "a step of 8 sequences took 1.6 times as long as one of 1" in decode.text
    assert "rose 5-fold" in decode.text
    assert "100 % of the bytes at batch 1" in decode.text
    prefill = facts[Topic.PREFILL_BATCHES]
    assert prefill.holds
    assert "1,000 prompt tokens/s at batch 1, 1,000 at batch 8" in prefill.text


def test_the_opposite_is_said_as_such() -> None:
    facts = _facts(_batches({1: 10, 8: 60}, {1: 100, 8: 200}))
    decode = facts[Topic.DECODE_BATCHES]
    assert not decode.holds
    assert "rose 1.33-fold, of 8 that are possible" in decode.text
    prefill = facts[Topic.PREFILL_BATCHES]
    assert not prefill.holds
    assert "One prompt of 100 tokens does not fill the device" in prefill.text


def test_one_batch_says_nothing_of_batches() -> None:
    facts = _facts(_batches({4: 10}, {4: 100}))
    assert Topic.DECODE_BATCHES not in facts
    assert Topic.PREFILL_BATCHES not in facts


def test_verify_steps_compute_more_for_a_byte() -> None:
    """Two sequences with three drafts each: four tokens a sequence, 0.8 GFLOP for 0.2 GB."""
    timeline = Timeline()
    for _ in range(6):
        timeline.add("decode", 10, tokens=8, sequences=2, draft_tokens=6, gflop=0.8, gb=0.2)
    fact = _facts(timeline)[Topic.SPECULATION]
    assert "6 verify steps computed 4 tokens a sequence" in fact.text
    assert "4 FLOPs a byte, where one token a sequence has 1" in fact.text


def test_short_work_is_overhead_bound() -> None:
    """0.01 GB take 0.1 ms; the step takes 10, of which the device works 0.5."""
    timeline = Timeline()
    for number in range(8):
        timeline.add("decode", 10, gflop=0.001, gb=0.01, busy=0.05, profiled=number >= 4)
    fact = _facts(timeline)[Topic.SHORT_WORK]
    assert "needs 100 µs at the roofs and takes 10 ms" in fact.text


def test_runs_without_decode_say_so() -> None:
    for phase, words in (
        ("encode", "an encoder computes all tokens of its input at once"),
        ("other", "neither prefill nor decode"),
        ("prefill", "each request ended with the token that its prefill yields"),
    ):
        timeline = Timeline()
        for _ in range(5):
            timeline.add(phase, 10)
        timeline.request("r0", output_tokens=1)
        assert words in _facts(timeline)[Topic.ONE_PHASE].text


def test_a_recording_without_requests_may_have_missed_decode() -> None:
    timeline = Timeline()
    timeline.add("prefill", 10)
    assert Topic.ONE_PHASE not in _facts(timeline)


def test_a_usual_run_has_two_phases() -> None:
    timeline = Timeline()
    timeline.add("prefill", 10)
    timeline.add("decode", 10)
    assert Topic.ONE_PHASE not in _facts(timeline)
