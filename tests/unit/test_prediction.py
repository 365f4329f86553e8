"""What requests take: TTFT, TPOT, rates, memory and bounds, worked out by hand and monotone over random loads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_step_model import BARE, LINK, MODELS, ROOFS, RUNTIMES, machine, model

from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.steps.prediction import Load, predict
from phaseprof.analyzers.steps.restructured import tensor_parallel
from phaseprof.analyzers.steps.step_model import Runtime, step_time
from phaseprof.work.cost import AttentionCost, ModelCost, StateCost
from phaseprof.work.count import Rows

LOADS = st.builds(
    Load,
    batch=st.integers(1, 64),
    prompt_tokens=st.integers(1, 3000),
    new_tokens=st.integers(1, 300),
    pass_tokens=st.sampled_from([None, 512, 8192]),
)


def _decode_s(cost: ModelCost, past: int, batch: int) -> float:
    rows = (Rows(past, 1, batch),)
    return step_time(cost, (), rows, machine=machine(), logits_tokens=batch).step.seconds


def _prefill_s(cost: ModelCost, past: int, query: int, sequences: int) -> float:
    rows = (Rows(past, query, sequences),)
    return step_time(cost, rows, machine=machine(), logits_tokens=sequences).step.seconds


# --- times ----------------------------------------------------------------------------------------


def test_two_requests_of_three_new_tokens() -> None:
    cost = model()
    found = predict(cost, Load(2, 10, 3), machine())
    assert found.ttft.seconds == pytest.approx(_prefill_s(cost, 0, 10, 2))
    # Two steps, behind 10 and 11 tokens.
    tpot = (_decode_s(cost, 10, 2) + _decode_s(cost, 11, 2)) / 2
    assert found.tpot is not None
    assert found.tpot.seconds == pytest.approx(tpot)
    assert found.whole.seconds == pytest.approx(found.ttft.seconds + 2 * tpot)
    assert found.output_tokens_per_s.value == pytest.approx(6 / found.whole.seconds)
    assert found.output_tokens_per_s.low == pytest.approx(6 / found.whole.high)
    assert found.tokens_per_s_per_user is not None
    assert found.tokens_per_s_per_user.value == pytest.approx(1 / tpot)
    assert found.decode is not None
    assert (found.prefill.passes, found.decode.passes) == (1, 2)
    assert (found.prefill.tokens, found.decode.tokens) == (20, 2)


def test_one_new_token_has_no_tpot() -> None:
    found = predict(model(), Load(2, 10, 1), machine())
    assert found.tpot is None
    assert found.decode is None
    assert found.tokens_per_s_per_user is None
    assert found.whole == found.ttft


def test_many_steps_take_their_mean() -> None:
    """The time of a step is linear in the length of the cache here, so that its mean is that of the middle."""
    cost = model()
    found = predict(cost, Load(1, 100, 202), machine())
    every = [_decode_s(cost, past, 1) for past in range(100, 301)]
    assert found.tpot is not None
    assert found.tpot.seconds == pytest.approx(sum(every) / len(every), rel=1e-6)


def test_prompts_are_computed_in_passes_that_an_engine_would_make() -> None:
    cost = model()
    found = predict(cost, Load(5, 100, 1, pass_tokens=256), machine())
    # Two prompts a pass; the last one alone.
    seconds = 2 * _prefill_s(cost, 0, 100, 2) + _prefill_s(cost, 0, 100, 1)
    assert found.ttft.seconds == pytest.approx(seconds)
    found = predict(cost, Load(2, 600, 1, pass_tokens=256), machine())
    chunks = [(0, 256), (256, 256), (512, 88)]
    seconds = 2 * sum(_prefill_s(cost, past, query, 1) for past, query in chunks)
    assert found.ttft.seconds == pytest.approx(seconds)
    assert found.prefill.passes == 6


@settings(deadline=None, max_examples=25)
@given(cost=MODELS, load=LOADS, runtime=RUNTIMES)
def test_more_work_never_takes_less_time_or_memory(
    cost: ModelCost, load: Load, runtime: Runtime
) -> None:
    on = machine(runtime)
    now = predict(cost, load, on, 10**9)
    assert now.ttft.low <= now.ttft.seconds <= now.ttft.high
    for later in (
        replace(load, batch=load.batch + 1),
        replace(load, prompt_tokens=load.prompt_tokens + 1),
    ):
        then = predict(cost, later, on, 10**9)
        assert then.ttft.seconds >= now.ttft.seconds * (1 - 1e-9)
        assert then.whole.seconds >= now.whole.seconds * (1 - 1e-9)
        assert then.memory.needed >= now.memory.needed
        if now.tpot is not None and then.tpot is not None:
            assert then.tpot.seconds >= now.tpot.seconds * (1 - 1e-9)


# --- memory ---------------------------------------------------------------------------------------


def test_memory_by_hand() -> None:
    """Keys and values of 109 tokens (the last one is never computed), 2 layers of 128 bytes each."""
    cost = model()
    found = predict(cost, Load(3, 100, 10), machine(), 4_000_000_000).memory
    assert found.weights == cost.parameter_bytes
    assert found.kv_per_sequence == 109 * 2 * 128
    assert found.kv == 3 * 109 * 2 * 128
    # The widest product has 128 + 256 inputs and outputs; 300 tokens of it, twice; logits in 4 bytes.
    assert found.activations == 2 * 300 * 384 * 2 + 3 * 1000 * 4
    assert found.reserve == 120_000_000 + 1_000_000_000
    assert found.fits
    assert found.lacks == ""


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    cost = model()
    capacity = 1_100_000_000
    largest = predict(cost, Load(1, 10, 991), machine(), capacity).memory.largest_batch
    assert largest is not None
    assert largest > 100
    grown = predict(cost, Load(largest + 200, 10, 991), machine(), capacity).memory
    assert not grown.fits
    assert grown.lacks == "the weights fit, the KV cache of this batch does not"


def test_what_does_not_fit_is_said() -> None:
    cost = model()
    memory = predict(cost, Load(1, 10, 10), machine(), cost.parameter_bytes - 1).memory
    assert memory.lacks == "the weights alone do not fit"
    assert memory.largest_batch == 0
    memory = predict(cost, Load(1, 10, 10), machine(), cost.parameter_bytes + 10**6).memory
    assert memory.lacks == "the weights leave too little for activations and the reserve"
    assert predict(cost, Load(1, 10, 10), machine()).memory.fits is None


def test_windows_and_states_hold_what_they_hold() -> None:
    cost = replace(
        model(),
        attention=(AttentionCost(2, 8, 2, 16, 16, 32, 128),),
        states=(StateCost(3, 1000, 5000),),
    )
    memory = predict(cost, Load(2, 100, 10), machine(), 10**10).memory
    # A window of 32 tokens holds 31 between passes.
    assert memory.kv_per_sequence == 2 * 31 * 128 + 3 * 5000


# --- bounds ---------------------------------------------------------------------------------------


def test_decode_is_bound_by_bandwidth_and_prefill_by_compute() -> None:
    roofs = replace(ROOFS, bytes_per_s=5e10)
    cost = model(heads=8, dim=128, inner=4096)
    found = predict(cost, Load(4, 1000, 10), machine(roofs=roofs))
    assert found.decode is not None
    assert (found.prefill.bound, found.decode.bound) == (Bound.COMPUTE, Bound.BANDWIDTH)
    assert found.decode.explained == pytest.approx(1, abs=0.05)


def test_a_slow_host_is_overhead() -> None:
    slow = replace(BARE, ahead=True, launch_s=1.0)
    found = predict(model(), Load(4, 100, 10), machine(slow))
    assert found.decode is not None
    assert found.decode.bound is Bound.OVERHEAD
    assert found.decode.idle == pytest.approx(1, abs=0.01)


def test_slow_links_are_communication() -> None:
    link = replace(LINK, bytes_per_s=1e6)
    cost = tensor_parallel(model(), 4)
    found = predict(cost, Load(4, 100, 10), machine(ranks=4, link=link))
    assert found.prefill.bound is Bound.COMMUNICATION
    assert found.prefill.communication > 0.9


def test_ranks_share_the_weights_but_not_the_links() -> None:
    """Without links that cost anything four ranks decode nearly four times as fast; never faster than that."""
    free = replace(LINK, bytes_per_s=1e18, hop_s=0.0)
    cost = model(heads=8, kv_heads=4, inner=512)
    one = predict(cost, Load(1, 10, 10), machine()).tpot
    four = predict(tensor_parallel(cost, 4), Load(1, 10, 10), machine(ranks=4, link=free)).tpot
    assert one is not None
    assert four is not None
    assert one.seconds / 4 <= four.seconds < one.seconds / 3.5


def test_the_roofs_of_a_narrow_dtype_raise_prefill_only_where_it_is_used() -> None:
    cost, load = model(inner=4096), Load(4, 3000, 1)
    fast = replace(ROOFS, dtype="float8_e4m3fn", flops_per_s=2e12)
    wide = predict(cost, load, machine())
    narrow = predict(
        cost, load, replace(machine(roofs=fast), products="float8_e4m3fn", other_ceilings=ROOFS)
    )
    assert wide.prefill.floor_s / 2 < narrow.prefill.floor_s < wide.prefill.floor_s


@pytest.mark.parametrize(("past", "bound"), [(300, Bound.COMPUTE), (500, Bound.BANDWIDTH)])
def test_a_pass_whose_operations_have_different_roofs(past: int, bound: Bound) -> None:
    """Products compute for 17 ms, attention reads for 13 or 22, norms take 12: no roof of the pass explains half of
    it, those of its operations do."""
    cost = model(heads=8, kv_heads=8, dim=128, inner=4096)
    slow_norms = replace(BARE, kernel_s=2.4e-3, norm_kernels=1)
    on = machine(slow_norms, roofs=replace(ROOFS, bytes_per_s=5e10))
    decode = predict(cost, Load(256, past, 2), on).decode
    assert decode is not None
    assert decode.explained is not None
    assert decode.explained < 0.5 < decode.floor_s / decode.pass_time.seconds
    assert decode.bound is bound
