"""The cost of a model survives the trace: as JSON, with and without the fields that came later."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phaseprof.work.cost import AttentionCost, MatmulCost, ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.kv import KvGroup, KvLayout, with_layout
from phaseprof.work.ops import OpKind, ops_of

SIZE = st.integers(min_value=0, max_value=2**40)
ATTENTION = st.builds(
    AttentionCost,
    layers=SIZE,
    query_heads=SIZE,
    kv_heads=SIZE,
    qk_head_dim=SIZE,
    v_head_dim=SIZE,
    window_tokens=st.none() | SIZE,
    kv_bytes_per_token=SIZE,
    layer_indices=st.lists(st.integers(0, 90)).map(tuple),
)
MATMUL = st.builds(
    MatmulCost,
    role=st.sampled_from(["qkv", "down", "lm_head"]),
    count=SIZE,
    inputs=SIZE,
    outputs=SIZE,
    weight_bytes=SIZE,
)
COST = st.builds(
    ModelCost,
    linear_flops_per_token=SIZE,
    head_flops_per_token=SIZE,
    attention=st.lists(ATTENTION, max_size=3).map(tuple),
    body_weight_bytes=SIZE,
    head_weight_bytes=SIZE,
    lookup_bytes_per_token=SIZE,
    parameter_bytes=SIZE,
    parameters=SIZE,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    not_covered=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    tied_lookup_bytes_per_token=SIZE,
    matmuls=st.lists(MATMUL, max_size=3).map(tuple),
    hidden_size=SIZE,
    norms=SIZE,
)


@given(COST)
def test_json_gives_back_the_same_cost(cost: ModelCost) -> None:
    assert ModelCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost


def test_a_trace_from_before_the_newer_fields_is_read() -> None:
    cost = two_groups(layer_indices=False)
    data = cost.to_json()
    del data["tied_lookup_bytes_per_token"], data["not_covered"]
    del data["matmuls"], data["hidden_size"], data["norms"]
    for group in data["attention"]:
        del group["layer_indices"]
    assert ModelCost.from_json(data) == cost


def test_without_recorded_matrices_their_work_is_one_operation_without_a_shape() -> None:
    cost = ModelCost(1000, 200, (), 500, 100, 0, 600, 300, "bfloat16")
    rows = (Rows(0, 4, 1),)
    ops = ops_of(cost, rows, logits_tokens=1)
    (rest,) = [op for op in ops if op.flops]
    assert (rest.kind, rest.flops, rest.weight_bytes, rest.gemm) == (
        OpKind.OTHER,
        4 * 1000 + 200,
        600,
        None,
    )
    assert rest.flops == count(cost, rows, logits_tokens=1, layout=None).flops


def two_groups(*, layer_indices: bool) -> ModelCost:
    full = AttentionCost(2, 4, 2, 8, 8, None, 64, (0, 3) if layer_indices else ())
    sliding = AttentionCost(2, 4, 2, 8, 8, 16, 64, (1, 2) if layer_indices else ())
    return ModelCost(1, 1, (full, sliding), 1, 1, 1, 1, 1, "bfloat16")


def kv_bytes(cost: ModelCost) -> list[tuple[tuple[int, ...], int, int]]:
    return [(g.layer_indices, g.layers, g.kv_bytes_per_token) for g in cost.attention]


def test_a_real_cache_replaces_the_bytes_of_each_layer() -> None:
    layout = KvLayout(
        (
            KvGroup((0, 3), 128, None, None, "float32"),
            KvGroup((1,), 32, 16, None, "bfloat16"),
            KvGroup((2,), 16, 16, None, "float8_e4m3fn"),
        )
    )
    changed = with_layout(two_groups(layer_indices=True), layout)
    assert kv_bytes(changed) == [((0, 3), 2, 128), ((1,), 1, 32), ((2,), 1, 16)]
    assert changed.attention[1].window_tokens == 16


def test_without_layer_numbers_only_a_common_figure_is_taken() -> None:
    cost = two_groups(layer_indices=False)
    same = KvLayout((KvGroup((0, 1, 2, 3), 128, None, None, "float32"),))
    assert kv_bytes(with_layout(cost, same)) == [((), 2, 128), ((), 2, 128)]
    mixed = KvLayout(
        (KvGroup((0, 1), 128, None, None, "float32"), KvGroup((2, 3), 64, None, None, "bfloat16"))
    )
    assert with_layout(cost, mixed) == cost


def test_a_cache_that_does_not_fit_changes_nothing() -> None:
    cost = two_groups(layer_indices=True)
    short = KvLayout((KvGroup((0, 1), 128, None, None, "float32"),))
    unknown = KvLayout((), ("a cache of class PagedAttentionCache",))
    assert with_layout(cost, short) == cost
    assert with_layout(cost, unknown) == cost
    not_covered = replace(cost, attention=(), not_covered=("an encoder-decoder model",))
    assert with_layout(not_covered, short) == not_covered
