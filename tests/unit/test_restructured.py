"""Models cut among ranks, with other dtypes and fused products: sums that must hold, and shapes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_step_model import MODELS, machine, model

from phaseprof.analyzers.steps.restructured import (
    absorbed,
    fused,
    tensor_parallel,
    with_kv_bytes,
    with_weight_bits,
)
from phaseprof.analyzers.steps.step_model import step_time
from phaseprof.errors import UsageError
from phaseprof.work.cost import AttentionCost, ExpertsCost, MatmulCost, ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.ops import OpKind


def _bytes(cost: ModelCost) -> int:
    return count(cost, (Rows(10, 1, 3),), logits_tokens=3, layout=None).weight_bytes


def test_four_ranks_by_hand() -> None:
    """8 query and 2 key-value heads of 16: each of 4 ranks has 2 query heads, and a copy of one key-value head."""
    part = tensor_parallel(model(), 4)
    shapes = {(m.role, m.count, m.inputs, m.outputs) for m in part.matmuls}
    assert shapes == {
        ("qkv", 2, 128, 32),
        ("qkv", 4, 128, 16),
        ("o", 2, 32, 128),
        ("gate_up", 4, 128, 64),
        ("down", 2, 64, 128),
        ("lm_head", 1, 128, 250),
    }
    (attention,) = part.attention
    assert (attention.query_heads, attention.kv_heads) == (2, 1)
    # 2 bytes x (key + value) x 16, of one head.
    assert attention.kv_bytes_per_token == 64
    layer = 128 * 32 + 2 * 128 * 16 + 32 * 128 + 3 * 128 * 64
    assert part.linear_flops_per_token == 2 * 2 * layer
    assert part.body_weight_bytes == 2 * 2 * layer
    assert part.head_weight_bytes == 2 * 128 * 250
    # Embedding and head, cut by the vocabulary.
    assert part.parameter_bytes == 2 * 2 * layer + 2 * 2 * 128 * 250


def test_fused_projections_of_a_rank_are_cut_like_single_ones() -> None:
    one = tensor_parallel(fused(model()), 4)
    other = fused(tensor_parallel(model(), 4))
    assert sorted(one.matmuls, key=repr) == sorted(other.matmuls, key=repr)


@settings(deadline=None)
@given(cost=MODELS, ranks=st.sampled_from([1, 2, 4]))
def test_ranks_that_share_all_heads_add_up_to_the_model(cost: ModelCost, ranks: int) -> None:
    part = tensor_parallel(cost, ranks)
    # With copies of key-value heads there is more to do than before, never less.
    assert ranks * part.linear_flops_per_token >= cost.linear_flops_per_token
    assert ranks * part.parameter_bytes >= cost.parameter_bytes
    if cost.attention[0].kv_heads >= ranks:
        assert ranks * part.linear_flops_per_token == cost.linear_flops_per_token
        assert ranks * part.body_weight_bytes == cost.body_weight_bytes
        assert ranks * part.parameter_bytes == cost.parameter_bytes


def test_experts_are_cut_by_their_inner_width() -> None:
    cost = replace(model(), experts=(ExpertsCost(2, 8, 2, 6 * 128 * 64, 6 * 128 * 64),))
    cost = replace(cost, parameter_bytes=cost.parameter_bytes + 2 * 8 * 6 * 128 * 64)
    part = tensor_parallel(cost, 2)
    assert part.experts[0].expert_bytes == 3 * 128 * 64
    assert part.experts[0].expert_flops_per_token == 3 * 128 * 64
    assert 2 * part.parameter_bytes == cost.parameter_bytes


def test_latents_stand_on_every_rank() -> None:
    cost = model()
    matmuls = (*cost.matmuls, MatmulCost("latent", 2, 128, 48, 2 * 128 * 48))
    matmuls += (MatmulCost("latent", 2, 48, 512, 2 * 48 * 512),)
    cost = replace(
        cost,
        matmuls=matmuls,
        attention=(replace(cost.attention[0], expand_flops_per_token=2 * 48 * 512),),
    )
    part = tensor_parallel(cost, 2)
    down, up = (matrix for matrix in part.matmuls if matrix.role == "latent")
    assert (down.inputs, down.outputs) == (128, 48)
    assert (up.inputs, up.outputs) == (48, 256)
    assert part.attention[0].kv_bytes_per_token == cost.attention[0].kv_bytes_per_token
    assert part.attention[0].expand_flops_per_token == 48 * 512


def test_latents_are_attended_to_as_they_are() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64 and 128, latents of 512 and 64 beside them; 2 x 128 x (2 x 512 + 64) FLOPs a
    pair, on one key-value head."""
    latent = AttentionCost(
        2, 128, 128, 192, 128, None, 2 * 576, expand_flops_per_token=2 * 128 * 512 * 256
    )
    cost = replace(model(), attention=(latent,))
    (found,) = absorbed(cost).attention
    assert found.absorbed_query_tokens == 1
    assert found.absorbed_flops_per_pair == 2 * 128 * (2 * 512 + 64)
    assert absorbed(model()) == model()
    assert absorbed(absorbed(cost)) == absorbed(cost)
    for ranks, kv_bytes in ((1, 2.0), (4, 1.0)):
        part = tensor_parallel(with_kv_bytes(absorbed(cost), kv_bytes), ranks)
        rows = (Rows(99, 1, 3),)
        step = step_time(part, (), rows, machine=machine(), logits_tokens=3)
        (shape,) = [term.attention for term in step.terms if term.attention is not None]
        assert (shape.query_heads, shape.kv_heads) == (128 // ranks, 1)
        assert (shape.qk_head_dim, shape.v_head_dim) == (576, 512)
        assert all(term.kind is not OpKind.LATENT for term in step.terms)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(UsageError, match="8 query heads cannot be shared out evenly among 3"):
        tensor_parallel(model(), 3)
    with pytest.raises(UsageError, match="neither is a multiple"):
        tensor_parallel(model(heads=6, kv_heads=3), 2)
    with pytest.raises(UsageError, match="not known one by one"):
        tensor_parallel(replace(model(), matmuls=()), 2)


def test_narrow_keys_and_values() -> None:
    assert with_kv_bytes(model(), 1.0).attention[0].kv_bytes_per_token == 64
    assert with_kv_bytes(model(), 2.0) == model()


@given(cost=MODELS)
def test_narrow_weights(cost: ModelCost) -> None:
    """Half the bytes of all but the head; four bits take a quarter and a 64th, for the scales."""
    half = with_weight_bits(cost, 8, grouped=False)
    assert 2 * half.body_weight_bytes == cost.body_weight_bytes
    assert half.head_weight_bytes == cost.head_weight_bytes
    assert cost.parameter_bytes - half.parameter_bytes == half.body_weight_bytes
    quarter = with_weight_bits(cost, 4, grouped=True)
    assert quarter.body_weight_bytes == pytest.approx(cost.body_weight_bytes * 4.125 / 16)
    assert (half.linear_flops_per_token, _bytes(half) < _bytes(cost)) == (
        cost.linear_flops_per_token,
        True,
    )


@given(cost=MODELS)
def test_fusing_changes_no_sum(cost: ModelCost) -> None:
    merged = fused(cost)
    layers = cost.attention[0].layers
    assert {m.role: m.count for m in merged.matmuls} == {
        "qkv": layers,
        "o": layers,
        "gate_up": layers,
        "down": layers,
        "lm_head": 1,
    }
    for figure in ("flops", "weight"):
        before, after = (
            sum(
                m.count * (m.inputs * m.outputs if figure == "flops" else m.weight_bytes)
                for m in each.matmuls
            )
            for each in (cost, merged)
        )
        assert before == after
    assert fused(merged) == merged
