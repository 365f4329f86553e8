"""The time of a pass is the sum of its operations, collectives and host; by hand, and monotone over random models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseprof.analyzers.efficiency.estimate import Estimate
from phaseprof.analyzers.steps.collectives import LINKS, Link, all_gather, all_reduce
from phaseprof.analyzers.steps.step_model import CPU, EAGER, GRAPHS, Machine, Runtime, step_time
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import AttentionCost, MatmulCost, ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.ops import AttentionShape, GemmShape, OpKind

#: Round numbers: 1 TFLOP/s, 1 GB/s.
ROOFS = Ceilings("key", "bfloat16", 1e12, 1e9, "datasheet", None, None, "round numbers")
LINK = Link("line", 1e9, 1e-6, False, "round numbers")
#: Nothing but what the device does.
BARE = Runtime("bare", 0, 0, 0, 0, 1.0, 0.0, 0.0, 0.0, False)


@dataclass(frozen=True)
class AtRoofs:
    """Every operation at its roof, within a fifth."""

    flops_per_s: float = 1e12
    bytes_per_s: float = 1e9

    def gemm(self, shape: GemmShape, dtype: str) -> Estimate:
        moved = shape.weight_bytes * shape.groups
        return self._at(shape.flops, moved, f"product in {dtype}")

    def attention(self, shape: AttentionShape, dtype: str) -> Estimate:
        flops = moved = 0
        for row in shape.rows:
            heads = shape.query_heads * (shape.qk_head_dim + shape.v_head_dim)
            flops += 2 * heads * row.query * (row.past + row.query) * row.sequences
            moved += (row.past + row.query) * row.sequences * shape.kv_bytes_per_token
        return self._at(flops, moved, "attention")

    def _at(self, flops: float, moved: float, reference: str) -> Estimate:
        seconds = max(flops / self.flops_per_s, moved / self.bytes_per_s)
        return Estimate(seconds, 0.8 * seconds, 1.2 * seconds, reference)


def machine(
    runtime: Runtime = BARE, *, ranks: int = 1, link: Link | None = None, roofs: Ceilings = ROOFS
) -> Machine:
    """A machine of round numbers."""
    return Machine(
        AtRoofs(roofs.flops_per_s, roofs.bytes_per_s),
        roofs,
        runtime,
        "bfloat16",
        "bfloat16",
        ranks=ranks,
        link=link,
    )


def model(
    *, layers: int = 2, heads: int = 8, kv_heads: int = 2, dim: int = 16, inner: int = 256
) -> ModelCost:
    """A decoder without biases, untied, of 1000 words."""
    hidden, words = heads * dim, 1000
    matmuls = (
        MatmulCost("qkv", layers, hidden, heads * dim, 2 * hidden * heads * dim),
        MatmulCost("qkv", 2 * layers, hidden, kv_heads * dim, 2 * hidden * kv_heads * dim),
        MatmulCost("o", layers, heads * dim, hidden, 2 * hidden * heads * dim),
        MatmulCost("gate_up", 2 * layers, hidden, inner, 2 * hidden * inner),
        MatmulCost("down", layers, inner, hidden, 2 * hidden * inner),
        MatmulCost("lm_head", 1, hidden, words, 2 * hidden * words),
    )
    body = sum(m.count * m.inputs * m.outputs for m in matmuls[:-1])
    return ModelCost(
        linear_flops_per_token=2 * body,
        head_flops_per_token=2 * hidden * words,
        attention=(AttentionCost(layers, heads, kv_heads, dim, dim, None, 4 * kv_heads * dim),),
        body_weight_bytes=2 * body,
        head_weight_bytes=2 * hidden * words,
        lookup_bytes_per_token=2 * hidden,
        parameter_bytes=2 * (body + 2 * hidden * words),
        parameters=body + 2 * hidden * words,
        dtype="bfloat16",
        matmuls=matmuls,
        hidden_size=hidden,
        norms=2 * layers + 1,
    )


MODELS = st.builds(
    model,
    layers=st.integers(1, 4),
    heads=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([8, 32]),
    inner=st.sampled_from([64, 512]),
)
RUNTIMES = st.sampled_from([BARE, GRAPHS, EAGER, CPU])


def decode(cost: ModelCost, batch: int, past: int, on: Machine) -> Estimate:
    return step_time(cost, (), (Rows(past, 1, batch),), machine=on, logits_tokens=batch).step


# --- by hand --------------------------------------------------------------------------------------


def test_a_decode_step_by_hand() -> None:
    """At 1 GB/s every product of few rows waits for its weights, and activations move at 80 % of the roof."""
    cost = model()
    step = step_time(cost, (), (Rows(99, 1, 1),), machine=machine(), logits_tokens=1)
    hidden = 128
    layer = hidden * 128 + 2 * hidden * 32 + 128 * hidden + 3 * hidden * 256
    weights = 2 * (2 * layer + hidden * 1000)
    kv = 2 * 100 * 4 * 2 * 16
    row = 2 * hidden
    # Embedding: a row in, a row out. Norms: four times the hidden state. Rotary: heads in and out. Activation: three.
    moved = 2 * row + 5 * 4 * row + 2 * 2 * 2 * (8 + 2) * 16 + 2 * 3 * 2 * 256
    assert step.device.seconds == pytest.approx((weights + kv + moved / 0.8) / 1e9)
    assert step.step == replace(step.device, reference=step.step.reference)
    # The floor has weights and cache, as `count` has them: activations may stay in a cache.
    known = count(cost, (Rows(99, 1, 1),), logits_tokens=1, layout=None)
    assert known.kv_read_bytes is not None
    assert known.kv_write_bytes is not None
    floor = known.weight_bytes + known.kv_read_bytes + known.kv_write_bytes
    assert step.floor_s == pytest.approx(floor / 1e9)
    assert (step.flops, step.moved_bytes) == (known.flops, floor)


def test_intervals_are_added_as_if_all_errors_had_one_sign() -> None:
    step = step_time(model(), (), (Rows(99, 1, 1),), machine=machine(), logits_tokens=1)
    assert step.device.low == pytest.approx(sum(term.time.low for term in step.terms))
    assert step.device.high == pytest.approx(sum(term.time.high for term in step.terms))


def test_a_host_that_runs_ahead_hides_behind_the_device_or_the_device_behind_it() -> None:
    slow_host = replace(BARE, ahead=True, launch_s=1.0)
    step = step_time(model(), (), (Rows(99, 1, 1),), machine=machine(slow_host), logits_tokens=1)
    # Six kinds of products, 14 of them and the head, attention, five norms and so on.
    assert step.launches == sum(term.launches for term in step.terms)
    assert step.step.seconds == step.host.seconds == step.launches
    fast_host = replace(BARE, ahead=True, launch_s=1e-12)
    step = step_time(model(), (), (Rows(99, 1, 1),), machine=machine(fast_host), logits_tokens=1)
    assert step.step.seconds == step.device.seconds


def test_launches_of_a_layer_by_hand() -> None:
    """transformers launches 40 kernels a layer of a Llama: 7 products, attention, 18 for two norms, 12 for the rotary
    embedding and the cache, 2 for the activation function."""
    on = machine(EAGER)
    one = step_time(model(layers=1), (), (Rows(9, 1, 1),), machine=on, logits_tokens=1)
    two = step_time(model(layers=2), (), (Rows(9, 1, 1),), machine=on, logits_tokens=1)
    assert two.launches - one.launches == 40


def test_dtypes_go_to_the_efficiency_model() -> None:
    on = replace(machine(), products="float8_e4m3fn")
    step = step_time(model(), (), (Rows(9, 1, 1),), machine=on, logits_tokens=1)
    said = {term.kind: term.time.reference for term in step.terms if term.gemm is not None}
    assert said[OpKind.QKV] == "product in float8_e4m3fn"
    assert said[OpKind.LM_HEAD] == "product in bfloat16"


# --- collectives ----------------------------------------------------------------------------------


def test_an_all_reduce_by_hand() -> None:
    """Four ranks in a ring: six steps, and one and a half times the bytes at 80 % of the bandwidth."""
    found = all_reduce(8_000_000, 4, LINK)
    assert found.seconds == pytest.approx(6e-6 + 1.5 * 8e6 / 0.8e9)
    assert found.low < found.seconds < found.high
    assert all_reduce(8_000_000, 1, LINK).seconds == 0
    gathered = all_gather(8_000_000, 4, LINK)
    assert gathered.seconds == pytest.approx(3e-6 + 0.75 * 8e6 / 0.8e9)


def test_a_few_bytes_go_in_one_shot_where_all_pairs_are_connected() -> None:
    link = LINKS["H100 SXM"]
    small, large = all_reduce(8192, 8, link), all_reduce(2**28, 8, link)
    assert small.seconds < 14 * link.hop_s
    # An all-reduce of 256 MB moves 1.75 times as much, at 270 to 430 GB/s.
    assert 1.75 * 2**28 / 430e9 < large.seconds < 1.75 * 2**28 / 270e9


def test_a_layer_has_two_all_reduces_and_the_embedding_one() -> None:
    on = machine(ranks=4, link=LINK)
    step = step_time(model(layers=3), (), (Rows(9, 1, 5),), machine=on, logits_tokens=5)
    reduced, gathered = (term for term in step.terms if term.kind is OpKind.COLLECTIVE)
    assert reduced.calls == 7
    assert reduced.time.seconds == pytest.approx(7 * all_reduce(5 * 128 * 2, 4, LINK).seconds)
    assert gathered.calls == 1
    assert step.communication_s == reduced.time.seconds + gathered.time.seconds


@given(size=st.integers(1, 2**32), ranks=st.integers(2, 16), name=st.sampled_from(sorted(LINKS)))
def test_collectives_are_monotone_in_bytes_and_ranks(size: int, ranks: int, name: str) -> None:
    link = LINKS[name]
    for collective in (all_reduce, all_gather):
        now = collective(size, ranks, link)
        assert now.low <= now.seconds <= now.high
        assert collective(size + 4096, ranks, link).seconds >= now.seconds
        assert collective(size, ranks + 1, link).seconds >= now.seconds
        faster = replace(link, bytes_per_s=2 * link.bytes_per_s)
        assert collective(size, ranks, faster).seconds <= now.seconds


# --- monotone -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(cost=MODELS, batch=st.integers(1, 600), past=st.integers(0, 5000), runtime=RUNTIMES)
def test_more_sequences_or_a_longer_cache_never_make_a_step_faster(
    cost: ModelCost, batch: int, past: int, runtime: Runtime
) -> None:
    on = machine(runtime)
    now = decode(cost, batch, past, on)
    assert 0 < now.low <= now.seconds <= now.high
    for later in (decode(cost, batch + 1, past, on), decode(cost, batch, past + 1, on)):
        assert later.seconds >= now.seconds
        assert later.high >= now.high


@settings(deadline=None, max_examples=40)
@given(
    cost=MODELS,
    batch=st.integers(1, 600),
    past=st.integers(0, 5000),
    runtime=RUNTIMES,
    compute=st.floats(1, 4),
    memory=st.floats(1, 4),
)
def test_higher_roofs_never_make_a_step_slower(
    cost: ModelCost, batch: int, past: int, runtime: Runtime, compute: float, memory: float
) -> None:
    higher = replace(ROOFS, flops_per_s=compute * 1e12, bytes_per_s=memory * 1e9)
    now = decode(cost, batch, past, machine(runtime))
    then = decode(cost, batch, past, machine(runtime, roofs=higher))
    assert then.seconds <= now.seconds * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(cost=MODELS, batch=st.integers(1, 64), past=st.integers(0, 5000), runtime=RUNTIMES)
def test_no_step_beats_its_floor(cost: ModelCost, batch: int, past: int, runtime: Runtime) -> None:
    step = step_time(
        cost, (), (Rows(past, 1, batch),), machine=machine(runtime), logits_tokens=batch
    )
    assert step.step.seconds >= step.floor_s * (1 - 1e-9)
