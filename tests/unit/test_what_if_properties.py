"""Identities of what-if, for any run: no change changes nothing, changes commute, and physics gives the direction."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from what_if_runs import (
    A100,
    H100,
    H200,
    decode_step,
    gpu,
    mixed_step,
    on_cpu,
    prefill_step,
    roofs,
    run,
)

from phaseprof.analyzers.what_if.apply import evaluate
from phaseprof.analyzers.what_if.changes import (
    Batch,
    Change,
    Chunk,
    Graphs,
    Hardware,
    KvCache,
    KvFormat,
    KvHeads,
    Mla,
    OtherDevice,
    Setting,
    Speculate,
    Speculation,
    TensorParallel,
    WeightFormat,
    Weights,
    together,
)
from phaseprof.analyzers.what_if.measured import Measured
from phaseprof.analyzers.what_if.ranking import asked
from phaseprof.analyzers.what_if.results import Interval, Outcome

times = st.floats(1.0, 100.0)
shares = st.floats(0.0, 0.95)


@st.composite
def runs(draw: st.DrawFn) -> Measured:
    """Runs near their roofs and far from them, with and without a timeline, mixed steps and drafts."""
    sequences = float(draw(st.integers(1, 64)))
    decode = decode_step(
        draw(times),
        sequences=sequences,
        context=draw(st.floats(1.0, 20_000.0)),
        idle=draw(st.one_of(st.none(), shares)),
        comm_s=0.0,
        between_s=draw(st.floats(0.0, 1e-3)),
    )
    if draw(st.booleans()):
        drafts = float(draw(st.integers(1, 6)))
        decode = replace(decode, drafts=drafts, accepted=drafts * draw(st.floats(0.0, 1.0)))
    steps = [decode, prefill_step(draw(times))]
    if draw(st.booleans()):
        steps.append(mixed_step(draw(times), chunk=draw(st.floats(8.0, 4000.0))))
    make = on_cpu if draw(st.booleans()) else run
    measured = make(*steps, ttft_ms=draw(times), tpot_ms=draw(times))
    return replace(measured, queue_ms=draw(st.floats(0.0, 100.0)), draft_s=draw(st.floats(0, 1e-3)))


def figures(outcome: Outcome) -> list[Interval | None]:
    return [outcome.ttft_ms, outcome.tpot_ms, outcome.tokens_per_s, outcome.gain]


@given(runs())
def test_no_change_predicts_the_measured_figures_exactly(measured: Measured) -> None:
    same = evaluate(measured, Setting())
    assert measured.ttft_ms is not None and measured.tpot_ms is not None
    assert same.ttft_ms == Interval.exact(measured.ttft_ms)
    assert same.tpot_ms == Interval.exact(measured.tpot_ms)
    assert same.gain == Interval.exact(1.0)
    assert same.bound == next(s.bound for s in measured.steps if s.phase == same.phase)


@given(runs())
def test_what_the_run_has_already_is_no_change(measured: Measured) -> None:
    decode = next(step for step in measured.steps if step.phase == "decode")
    same: list[Change] = [
        Batch(round(decode.sequences)),
        Speculate(Speculation(round(decode.drafts))),
        OtherDevice(measured.hardware),
        TensorParallel(measured.ranks),
        KvHeads(8),
    ]
    for change in same:
        outcome = evaluate(measured, change.to(Setting()))
        assert outcome.ttft_ms == Interval.exact(measured.ttft_ms or 0.0)
        assert outcome.tpot_ms is not None and measured.tpot_ms is not None
        assert outcome.tpot_ms == Interval.exact(measured.tpot_ms)
        (said,) = asked(measured, [change]).outcomes
        assert said.cannot == "that is what the run has"
        assert said.gain == Interval.exact(1.0)


CHANGES: list[Change] = [
    Weights(WeightFormat.FP8),
    KvCache(KvFormat.FP8),
    Batch(48),
    Graphs(),
    Speculate(Speculation(3, 0.6)),
    Chunk(256),
    KvHeads(2),
    OtherDevice(gpu("NVIDIA H200", H200, 141e9, "H200 SXM")),
    TensorParallel(2),
]


@given(runs(), st.permutations(CHANGES), st.integers(2, len(CHANGES)))
def test_changes_of_different_things_commute(
    measured: Measured, changes: list[Change], number: int
) -> None:
    some = changes[:number]
    forth, back = together(some), together(reversed(some))
    assert forth == back
    assert figures(evaluate(measured, forth)) == figures(evaluate(measured, back))


def test_every_order_of_three_changes_makes_one_setting() -> None:
    three: list[Change] = [Weights(WeightFormat.INT4), KvCache(KvFormat.INT8), Batch(8)]
    assert len({repr(together(order)) for order in permutations(three)}) == 1


def test_of_two_changes_of_one_thing_the_last_counts() -> None:
    assert together([Batch(8), Batch(16)]) == together([Batch(16)])
    assert together([KvHeads(2), Mla()]) == together([Mla()])


@given(runs(), st.sampled_from([Batch(8), Graphs(), TensorParallel(2), Speculate(Speculation(2))]))
def test_fewer_bytes_are_never_slower(measured: Measured, other: Change) -> None:
    """Of weights alone (8 to 4 bits), and of keys and values by their heads; alone and beside another change."""
    base = other.to(Setting())
    eight, four = (replace(base, weights=form) for form in (WeightFormat.INT8, WeightFormat.INT4))
    by_weights = [evaluate(measured, setting) for setting in (base, eight, four)]
    by_heads = [evaluate(measured, replace(base, kv_heads=heads)) for heads in (8, 4, 2, 1)]
    for chain in (by_weights, by_heads):
        tpot = [outcome.tpot_ms.value for outcome in chain if outcome.tpot_ms is not None]
        rate = [outcome.tokens_per_s.value for outcome in chain]
        assert tpot == pytest.approx(sorted(tpot, reverse=True), rel=1e-9)
        assert rate == pytest.approx(sorted(rate), rel=1e-9)


@given(
    runs(),
    st.lists(st.floats(0.1, 20.0), min_size=2, max_size=4),
    st.floats(50.0, 5000.0),
    st.booleans(),
)
def test_higher_roofs_are_never_slower(
    measured: Measured, bandwidths: list[float], tflops: float, packed: bool
) -> None:
    base = Setting(weights=WeightFormat.INT8 if packed else None)
    found = []
    for place, bandwidth in enumerate(sorted(bandwidths)):
        sheet = {"bfloat16": roofs("bfloat16", tflops * (1 + place), bandwidth)}
        device = Hardware("another", "cuda", None, sheet, sheet)
        found.append(evaluate(measured, replace(base, device=device)))
    tpot = [outcome.tpot_ms.value for outcome in found if outcome.tpot_ms is not None]
    ttft = [outcome.ttft_ms.value for outcome in found if outcome.ttft_ms is not None]
    assert tpot == pytest.approx(sorted(tpot, reverse=True), rel=1e-9)
    assert ttft == pytest.approx(sorted(ttft, reverse=True), rel=1e-9)


@given(runs(), st.integers(1, 8), st.lists(st.floats(0.0, 0.99), min_size=2, max_size=5))
def test_more_accepted_drafts_are_never_slower(
    measured: Measured, drafts: int, chances: list[float]
) -> None:
    found = [
        evaluate(measured, Setting(speculation=Speculation(drafts, chance)))
        for chance in sorted(chances)
    ]
    if any(step.drafts == drafts for step in measured.steps):
        return
    tpot = [outcome.tpot_ms.value for outcome in found if outcome.tpot_ms is not None]
    assert tpot == pytest.approx(sorted(tpot, reverse=True), rel=1e-9)


@given(runs(), st.lists(st.integers(1, 512), min_size=2, max_size=5))
def test_a_larger_batch_takes_no_less_a_step_and_yields_no_less(
    measured: Measured, batches: list[int]
) -> None:
    decode_alone = replace(
        measured, steps=tuple(step for step in measured.steps if step.phase == "decode")
    )
    found = [
        evaluate(decode_alone, Setting(sequences=sequences)) for sequences in sorted(set(batches))
    ]
    tpot = [outcome.tpot_ms.value for outcome in found if outcome.tpot_ms is not None]
    rate = [outcome.tokens_per_s.value for outcome in found]
    memory = [outcome.memory_bytes for outcome in found if outcome.memory_bytes is not None]
    assert tpot == pytest.approx(sorted(tpot), rel=1e-9)
    assert rate == pytest.approx(sorted(rate), rel=1e-6)
    assert memory == sorted(memory)


@given(runs(), st.sampled_from(CHANGES), st.sampled_from(CHANGES))
def test_an_interval_holds_its_value_and_nothing_is_negative(
    measured: Measured, one: Change, other: Change
) -> None:
    outcome = evaluate(measured, together([one, other]))
    for found in figures(outcome):
        assert found is not None
        assert 0 <= found.low <= found.value <= found.high


@given(runs())
def test_graphs_remove_no_more_than_the_measured_gaps(measured: Measured) -> None:
    decode = next(step for step in measured.steps if step.phase == "decode")
    outcome = evaluate(measured, Setting(graphs=True))
    assert outcome.tpot_ms is not None and measured.tpot_ms is not None
    gaps_ms = 1e3 * (decode.idle_s or 0.0) / (1 + decode.accepted)
    assert measured.tpot_ms - outcome.tpot_ms.low <= gaps_ms * (1 + 1e-9) + 1e-12
    assert outcome.ttft_ms == Interval.exact(measured.ttft_ms or 0.0)


def test_a_slower_device_is_slower_and_back_again_it_is_the_same() -> None:
    measured = run()
    slower = evaluate(measured, Setting(device=gpu("A100", A100, board="A100 SXM 80 GB")))
    assert slower.tpot_ms is not None and measured.tpot_ms is not None
    assert slower.tpot_ms.low >= measured.tpot_ms
    assert slower.tpot_ms.value > 1.4 * measured.tpot_ms
    back = evaluate(measured, Setting(device=gpu("NVIDIA H100 80GB HBM3", H100)))
    assert back.tpot_ms == Interval.exact(measured.tpot_ms)
