"""The operations of a pass add up to the figures of the pass, by numbers worked out by hand and over random models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phaseprof.work.cost import (
    AttentionCost,
    ExpertsCost,
    MatmulCost,
    ModelCost,
    StateCost,
)
from phaseprof.work.count import Rows, count
from phaseprof.work.ops import GemmShape, Op, OpKind, ops_of

#: Two layers of width 8: one head of 8, an MLP of 16, five words, untied.
TINY = ModelCost(
    linear_flops_per_token=2 * 2 * (4 * 64 + 3 * 128),
    head_flops_per_token=2 * 8 * 5,
    attention=(AttentionCost(2, 1, 1, 8, 8, None, 32),),
    body_weight_bytes=2 * 2 * (4 * 64 + 3 * 128) + 5 * 16,
    head_weight_bytes=80,
    lookup_bytes_per_token=16,
    parameter_bytes=2800,
    parameters=1400,
    dtype="bfloat16",
    matmuls=(
        MatmulCost("qkv", 6, 8, 8, 128),
        MatmulCost("o", 2, 8, 8, 128),
        MatmulCost("gate_up", 4, 8, 16, 256),
        MatmulCost("down", 2, 16, 8, 256),
        MatmulCost("lm_head", 1, 8, 5, 80),
    ),
    hidden_size=8,
    norms=5,
)


def _of(ops: tuple[Op, ...], kind: OpKind) -> Op:
    (found,) = [op for op in ops if op.kind is kind]
    return found


def test_a_decode_step_by_hand() -> None:
    """Three sequences behind ten tokens each."""
    ops = ops_of(TINY, (), (Rows(past=10, query=1, sequences=3),), logits_tokens=3)
    qkv = _of(ops, OpKind.QKV)
    assert (qkv.calls, qkv.flops, qkv.weight_bytes) == (6, 6 * 2 * 3 * 64, 6 * 128)
    assert qkv.gemm == GemmShape(m=3, n=8, k=8, weight_bytes=128)
    attention = _of(ops, OpKind.ATTENTION_DECODE)
    # 11 keys for each query, 2 x 16 FLOPs a pair; 11 tokens read and one written, 32 bytes each.
    assert attention.flops == 2 * 3 * 11 * 32
    assert attention.kv_bytes == 2 * 3 * 12 * 32
    assert _of(ops, OpKind.LM_HEAD).flops == 3 * 80
    # Norms have no FLOPs of their own; the five weights of the body that are no matrix are what is left.
    assert _of(ops, OpKind.NORM).flops == 0
    assert _of(ops, OpKind.OTHER) == Op(OpKind.OTHER, 1, 0, 80, 0)


def test_prefill_and_decode_of_a_mixed_pass_stand_apart() -> None:
    ops = ops_of(TINY, (Rows(4, 3, 1),), (Rows(10, 1, 2),), logits_tokens=3)
    # 3 queries behind 4 tokens meet 5 + 6 + 7 keys.
    assert _of(ops, OpKind.ATTENTION_PREFILL).flops == 2 * 18 * 32
    assert _of(ops, OpKind.ATTENTION_DECODE).flops == 2 * 2 * 11 * 32
    # The matrices meet the tokens of both.
    gemm = _of(ops, OpKind.QKV).gemm
    assert gemm is not None
    assert gemm.m == 5


def test_without_logits_there_is_no_head() -> None:
    ops = ops_of(TINY, (Rows(0, 4, 1),), logits_tokens=0)
    assert all(op.kind is not OpKind.LM_HEAD for op in ops)


def test_experts_are_groups_of_the_tokens_that_they_share() -> None:
    """Each of 64 tokens goes to 2 of 8 experts: all are met, 16 tokens each."""
    cost = ModelCost(
        linear_flops_per_token=0,
        head_flops_per_token=0,
        attention=(AttentionCost(4, 1, 1, 8, 8, None, 32),),
        body_weight_bytes=0,
        head_weight_bytes=0,
        lookup_bytes_per_token=0,
        parameter_bytes=0,
        parameters=0,
        dtype="bfloat16",
        experts=(ExpertsCost(4, 8, 2, 2 * 3 * 8 * 16, 768),),
        hidden_size=8,
    )
    op = _of(ops_of(cost, (Rows(0, 64, 1),), logits_tokens=0), OpKind.EXPERTS)
    assert op.gemm == GemmShape(m=16, n=48, k=8, weight_bytes=768, groups=8)
    assert op.flops == 4 * op.gemm.flops


_ROWS = st.builds(
    Rows, past=st.integers(0, 40), query=st.integers(1, 20), sequences=st.integers(1, 4)
)
_COSTS = st.builds(
    ModelCost,
    linear_flops_per_token=st.integers(0, 9999),
    head_flops_per_token=st.integers(0, 999),
    attention=st.lists(
        st.builds(
            AttentionCost,
            layers=st.integers(1, 5),
            query_heads=st.integers(1, 4),
            kv_heads=st.just(1),
            qk_head_dim=st.integers(1, 9),
            v_head_dim=st.integers(1, 9),
            window_tokens=st.none() | st.integers(1, 30),
            kv_bytes_per_token=st.integers(0, 99),
            expand_flops_per_token=st.integers(0, 9),
            absorbed_query_tokens=st.integers(0, 2),
            absorbed_flops_per_pair=st.integers(1, 99),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    body_weight_bytes=st.integers(0, 9999),
    head_weight_bytes=st.integers(0, 999),
    lookup_bytes_per_token=st.integers(10, 20),
    parameter_bytes=st.just(0),
    parameters=st.just(0),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    tied_lookup_bytes_per_token=st.sampled_from([0, 10]),
    experts=st.lists(
        st.builds(
            ExpertsCost,
            layers=st.integers(1, 3),
            experts=st.just(8),
            top_k=st.integers(1, 3),
            expert_flops_per_token=st.integers(1, 99),
            expert_bytes=st.integers(1, 99),
        ),
        max_size=2,
    ).map(tuple),
    states=st.lists(
        st.builds(StateCost, st.integers(1, 3), st.integers(0, 9), st.integers(0, 99)), max_size=2
    ).map(tuple),
    matmuls=st.lists(
        st.builds(
            MatmulCost,
            st.sampled_from(["qkv", "o", "down", "lm_head"]),
            st.integers(1, 3),
            st.integers(1, 9),
            st.integers(1, 9),
            st.integers(1, 99),
        ),
        max_size=3,
    ).map(tuple),
    hidden_size=st.integers(0, 9),
    norms=st.integers(0, 3),
)


@given(_COSTS, st.lists(_ROWS, max_size=3), st.lists(_ROWS, max_size=3), st.integers(0, 5))
def test_operations_add_up_to_the_pass(
    cost: ModelCost, prefill: list[Rows], decode: list[Rows], logits: int
) -> None:
    if not prefill and not decode:
        return
    ops = ops_of(cost, prefill, decode, logits_tokens=logits)
    work = count(cost, [*prefill, *decode], logits_tokens=logits, layout=None)
    assert sum(op.flops for op in ops) == work.flops
    assert sum(op.weight_bytes for op in ops) == work.weight_bytes
    kv = None if work.kv_read_bytes is None else work.kv_read_bytes + (work.kv_write_bytes or 0)
    assert kv is None or sum(op.kv_bytes or 0 for op in ops) == kv


@given(_COSTS)
def test_costs_are_stored_whole(cost: ModelCost) -> None:
    assert ModelCost.from_json(cost.to_json()) == cost
