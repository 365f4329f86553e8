"""FLOPs and bytes of a pass: numbers worked out by hand, and pairs against enumeration."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.work.cost import (
    AttentionCost,
    CrossAttentionCost,
    ExpertsCost,
    ModelCost,
    StateCost,
)
from phaseprof.work.count import Rows, Source, Work, chunked_pairs, count, pairs
from phaseprof.work.kv import KvGroup, KvLayout

TOKENS = st.integers(min_value=0, max_value=40)
WINDOW = st.none() | st.integers(min_value=1, max_value=50)

# 3 full layers and 2 with a window of 4 tokens; 4 query heads on 2 KV heads, keys 8 and values 16 wide.
# One pair costs 2 * 4 * (8 + 16) = 192 FLOPs, one token 2 * (8 + 16) * 2 = 96 bytes in bfloat16.
FULL = AttentionCost(
    layers=3,
    query_heads=4,
    kv_heads=2,
    qk_head_dim=8,
    v_head_dim=16,
    window_tokens=None,
    kv_bytes_per_token=96,
)
SLIDING = replace(FULL, layers=2, window_tokens=4)
UNTIED = ModelCost(
    linear_flops_per_token=10_000,
    head_flops_per_token=2_000,
    attention=(FULL, SLIDING),
    body_weight_bytes=10_100,
    head_weight_bytes=2_000,
    lookup_bytes_per_token=20,
    parameter_bytes=14_100,
    parameters=7_050,
    dtype="bfloat16",
)
TIED = replace(UNTIED, parameter_bytes=12_100, tied_lookup_bytes_per_token=20)


def enumerated(past: int, query: int, window: int | None) -> int:
    """Every (query position, key position) that a causal mask with a window lets through, one by one."""
    reach = past + query + 1 if window is None else window
    return sum(
        1 for q in range(past, past + query) for k in range(past + query) if q - reach < k <= q
    )


@given(past=TOKENS, query=TOKENS, window=WINDOW)
def test_pairs_are_those_of_the_mask(past: int, query: int, window: int | None) -> None:
    assert pairs(past, query, window) == enumerated(past, query, window)


@given(past=TOKENS, first=TOKENS, second=TOKENS, window=WINDOW)
def test_chunks_of_a_prompt_have_the_pairs_of_the_whole(
    past: int, first: int, second: int, window: int | None
) -> None:
    whole = pairs(past, first + second, window)
    assert whole == pairs(past, first, window) + pairs(past + first, second, window)


def test_pairs_by_hand() -> None:
    assert pairs(0, 2048) == 2_098_176
    assert pairs(2048, 1) == 2049
    # Positions 2, 3, 4, 5 with a window of 4: 3 + 4 + 4 + 4.
    assert pairs(2, 4, 4) == 15


def test_prefill_by_hand() -> None:
    # Two rows of 6 tokens: 21 pairs a row in full layers, 1 + 2 + 3 + 4 + 4 + 4 = 18 in sliding ones.
    work = count(UNTIED, [Rows(past=0, query=6, sequences=2)], logits_tokens=2, layout=None)
    assert work == Work(
        flops=12 * 10_000 + 2 * 2_000 + 192 * (3 * 2 * 21 + 2 * 2 * 18),
        weight_bytes=10_100 + 2_000 + 12 * 20,
        kv_read_bytes=12 * 5 * 96,
        kv_write_bytes=12 * 5 * 96,
        # Full layers keep all 6 tokens of a row, sliding ones the 3 that the next query can see.
        kv_held_bytes=2 * 96 * (3 * 6 + 2 * 3),
        kv_allocated_bytes=2 * 96 * (3 * 6 + 2 * 3),
        cache_copy_bytes=0,
        context_tokens=12,
        attention_pairs=42,
    )


def test_decode_by_hand() -> None:
    # The token at position 10: 11 pairs in a full layer, 4 in a sliding one, which holds 3 tokens beside it.
    work = count(UNTIED, [Rows(past=10, query=1, sequences=4)], logits_tokens=4, layout=None)
    assert work == Work(
        flops=4 * (10_000 + 2_000 + 192 * (3 * 11 + 2 * 4)),
        weight_bytes=10_100 + 2_000 + 4 * 20,
        kv_read_bytes=4 * 96 * (3 * 11 + 2 * 4),
        kv_write_bytes=4 * 96 * 5,
        kv_held_bytes=4 * 96 * (3 * 11 + 2 * 3),
        kv_allocated_bytes=4 * 96 * (3 * 11 + 2 * 3),
        # What is held is read and written once more, as the new token is joined to it.
        cache_copy_bytes=4 * 96 * 2 * (3 * 10 + 2 * 3),
        context_tokens=44,
        attention_pairs=44,
    )


def test_rows_of_several_lengths_add_up() -> None:
    rows = [Rows(past=10, query=1, sequences=4), Rows(past=0, query=6, sequences=1)]
    together = count(UNTIED, rows, logits_tokens=5, layout=None)
    apart = [count(UNTIED, [row], logits_tokens=0, layout=None) for row in rows]
    assert together.flops == sum(work.flops for work in apart) + 5 * 2_000
    assert together.kv_read_bytes == sum(work.kv_read_bytes or 0 for work in apart)
    assert together.context_tokens == 44 + 6
    # Weights are read once for all rows.
    assert together.weight_bytes == 10_100 + 2_000 + 10 * 20


def test_a_chunk_without_logits_reads_no_head() -> None:
    work = count(UNTIED, [Rows(past=0, query=6, sequences=1)], logits_tokens=0, layout=None)
    assert work.weight_bytes == 10_100 + 6 * 20


def test_rows_of_a_tied_table_are_read_with_the_head() -> None:
    rows = [Rows(past=0, query=6, sequences=1)]
    assert count(TIED, rows, logits_tokens=1, layout=None).weight_bytes == TIED.parameter_bytes
    assert count(TIED, rows, logits_tokens=0, layout=None).weight_bytes == 10_100 + 6 * 20


def test_without_a_cache_attention_reads_what_the_pass_computes() -> None:
    rows = [Rows(past=0, query=9, sequences=2)]
    work = count(UNTIED, rows, logits_tokens=2, layout=None, cached=False)
    assert work.kv_read_bytes == 18 * 5 * 96
    assert work.kv_write_bytes == 0


def static(slots: int, window: int) -> KvLayout:
    return KvLayout(
        (
            KvGroup((0, 1, 2), 96, None, slots, "bfloat16"),
            KvGroup((3, 4), 96, window, window, "bfloat16"),
        )
    )


@pytest.mark.parametrize(
    ("past", "query", "full", "sliding"),
    [
        # Nothing cached: the full layers are cut to the query, the sliding ones have a mask and are not.
        (0, 3, 3, 4),
        (0, 1, 16, 4),
        (0, 7, 7, 7),
        (2, 1, 16, 4),
        (2, 3, 16, 5),
        (9, 1, 16, 4),
        (9, 3, 16, 6),
    ],
)
def test_static_layers_are_read_by_their_slots(
    past: int, query: int, full: int, sliding: int
) -> None:
    layout = static(slots=16, window=4)
    work = count(UNTIED, [Rows(past, query, 1)], logits_tokens=1, layout=layout)
    assert work.kv_read_bytes == 96 * (3 * full + 2 * sliding)
    assert work.kv_write_bytes == 96 * 5 * query


@pytest.mark.parametrize(
    ("past", "query", "held", "copied"),
    [
        (0, 3, 3, 0),
        (0, 7, 4, 0),
        (2, 1, 3, 0),
        # It fills up: its 2 tokens and the query are joined (2 read, 2 written), the last 4 are copied back.
        (2, 3, 4, 12),
        # Full: all 4 slots are moved along and copied back.
        (9, 1, 4, 16),
        # Full, several tokens: the 3 that stay in reach are joined with them, and 4 copied back.
        (9, 3, 4, 14),
    ],
)
def test_a_sliding_static_layer_moves_along(past: int, query: int, held: int, copied: int) -> None:
    layout = static(slots=16, window=4)
    work = count(UNTIED, [Rows(past, query, 1)], logits_tokens=1, layout=layout)
    assert work.kv_held_bytes == 96 * (3 * (past + query) + 2 * held)
    assert work.kv_allocated_bytes == 96 * (3 * 16 + 2 * 4)
    assert work.cache_copy_bytes == 96 * 2 * copied


def test_with_a_mask_a_static_prefill_reads_every_slot() -> None:
    layout = static(slots=16, window=4)
    work = count(UNTIED, [Rows(0, 3, 1)], logits_tokens=1, layout=layout, masked=True)
    assert work.kv_read_bytes == 96 * (3 * 16 + 2 * 4)


def test_the_cache_decides_what_is_held_and_the_model_what_is_attended() -> None:
    # A cache that keeps every token, under a model whose attention slides.
    layout = KvLayout((KvGroup((0, 1, 2, 3, 4), 200, None, None, "float32"),))
    work = count(UNTIED, [Rows(10, 1, 1)], logits_tokens=1, layout=layout)
    assert work.kv_read_bytes == 200 * 5 * 11
    assert work.flops == count(UNTIED, [Rows(10, 1, 1)], logits_tokens=1, layout=None).flops


def test_an_unknown_cache_leaves_kv_bytes_open() -> None:
    layout = KvLayout((), ("cache layers of class HQQQuantizedLayer",))
    work = count(UNTIED, [Rows(10, 1, 1)], logits_tokens=1, layout=layout)
    assert work.kv_read_bytes is None and work.kv_write_bytes is None
    assert work.flops > 0


EXPERTS = ExpertsCost(layers=3, experts=8, top_k=2, expert_flops_per_token=700, expert_bytes=1_000)
MOE = replace(UNTIED, experts=(EXPERTS,))


def test_each_token_is_sent_to_k_experts_and_reads_those_it_meets() -> None:
    one = count(MOE, [Rows(10, 1, 1)], logits_tokens=1, layout=None)
    plain = count(UNTIED, [Rows(10, 1, 1)], logits_tokens=1, layout=None)
    assert one.flops - plain.flops == 3 * 2 * 700
    assert one.weight_bytes - plain.weight_bytes == 3 * 2 * 1_000
    # Two tokens meet 8 (1 - (3/4)^2) = 3.5 of 8 experts, many tokens all of them.
    two = count(MOE, [Rows(10, 1, 2)], logits_tokens=2, layout=None)
    assert two.weight_bytes - count(
        UNTIED, [Rows(10, 1, 2)], logits_tokens=2, layout=None
    ).weight_bytes == round(3 * 3.5 * 1_000)
    many = count(MOE, [Rows(0, 500, 2)], logits_tokens=2, layout=None)
    assert (
        many.flops - count(UNTIED, [Rows(0, 500, 2)], logits_tokens=2, layout=None).flops
        == 1_000 * 3 * 2 * 700
    )
    assert many.weight_bytes == UNTIED.body_weight_bytes + 2_000 + 1_000 * 20 + 3 * 8 * 1_000


def test_a_state_is_read_and_written_whole_whatever_its_past() -> None:
    cost = replace(
        UNTIED, attention=(), states=(StateCost(layers=4, flops_per_token=300, state_bytes=5_000),)
    )
    first = count(cost, [Rows(0, 6, 2)], logits_tokens=2, layout=None)
    assert first.flops == 12 * (10_000 + 4 * 300) + 2 * 2_000
    assert (first.kv_read_bytes, first.kv_write_bytes) == (0, 2 * 4 * 5_000)
    for past in (6, 6_000):
        later = count(cost, [Rows(past, 1, 2)], logits_tokens=2, layout=None)
        assert (later.kv_read_bytes, later.kv_write_bytes) == (2 * 4 * 5_000, 2 * 4 * 5_000)
        assert later.kv_held_bytes == later.kv_allocated_bytes == 2 * 4 * 5_000
        assert later.cache_copy_bytes == 0
    # The real cache knows better than the weights.
    real = count(cost, [Rows(6, 1, 2)], logits_tokens=2, layout=KvLayout((), state_bytes=7_000))
    assert real.kv_read_bytes == 2 * 7_000


CROSS = CrossAttentionCost(
    layers=2,
    query_heads=4,
    qk_head_dim=8,
    v_head_dim=8,
    kv_flops_per_source_token=900,
    kv_weight_bytes=450,
    kv_bytes_per_source_token=64,
)


def test_every_query_attends_to_the_whole_source() -> None:
    cost = replace(UNTIED, cross=(CROSS,))
    rows = [Rows(0, 1, 2)]
    plain = count(UNTIED, rows, logits_tokens=2, layout=None)
    first = count(cost, rows, logits_tokens=2, layout=None, source=Source(7, True, False))
    # 7 pairs a row and layer of 2 * 4 * (8 + 8) = 128 FLOPs; the 14 source tokens are projected once.
    assert first.flops - plain.flops == 2 * (128 * 7 * 2 + 900 * 14)
    assert first.weight_bytes - plain.weight_bytes == 2 * 450
    assert (first.kv_write_bytes or 0) - (plain.kv_write_bytes or 0) == 2 * 64 * 14
    later = count(cost, rows, logits_tokens=2, layout=None, source=Source(7, False, False))
    assert later.flops - plain.flops == 2 * 128 * 7 * 2
    assert later.weight_bytes == plain.weight_bytes
    assert later.kv_write_bytes == plain.kv_write_bytes
    assert (later.kv_read_bytes or 0) - (plain.kv_read_bytes or 0) == 2 * 64 * 14
    assert (later.kv_held_bytes or 0) - (plain.kv_held_bytes or 0) == 2 * 64 * 14


def test_an_encoder_attends_in_both_directions_and_counts_where_it_runs() -> None:
    encoder = replace(
        UNTIED,
        attention=(replace(FULL, causal=False),),
        head_flops_per_token=0,
        head_weight_bytes=0,
    )
    alone = count(encoder, [Rows(0, 7, 2)], logits_tokens=0, layout=None, cached=False)
    assert alone.flops == 14 * 10_000 + 3 * 192 * 49 * 2
    cost = replace(UNTIED, cross=(CROSS,), encoder=encoder)
    rows = [Rows(0, 1, 2)]
    outside = count(cost, rows, logits_tokens=2, layout=None, source=Source(7, True, False))
    inside = count(cost, rows, logits_tokens=2, layout=None, source=Source(7, True, True))
    assert inside.flops - outside.flops == alone.flops
    assert inside.weight_bytes - outside.weight_bytes == alone.weight_bytes


@given(query=st.integers(1, 12), window=st.integers(1, 6))
def test_windows_to_both_sides_are_those_of_the_mask(query: int, window: int) -> None:
    group = replace(FULL, layers=1, causal=False, window_tokens=window)
    cost = replace(UNTIED, attention=(group,), linear_flops_per_token=0, row_flops=9)
    near = sum(1 for q in range(query) for k in range(query) if abs(q - k) < window)
    work = count(cost, [Rows(0, query, 3)], logits_tokens=0, layout=None, cached=False)
    assert work.flops == 3 * (192 * near + 9)


def test_latents_of_the_past_are_expanded_again() -> None:
    latent = replace(FULL, layers=5, expand_flops_per_token=60)
    cost = replace(UNTIED, attention=(latent,))
    plain = replace(UNTIED, attention=(replace(FULL, layers=5),))
    rows = [Rows(10, 3, 2)]
    more = count(cost, rows, logits_tokens=2, layout=None).flops
    assert more - count(plain, rows, logits_tokens=2, layout=None).flops == 5 * 60 * 10 * 2
    # Without a cache nothing was kept, and nothing is expanded twice.
    alone = [
        count(c, rows, logits_tokens=2, layout=None, cached=False).flops for c in (cost, plain)
    ]
    assert alone[0] == alone[1]


@given(past=TOKENS, query=TOKENS, chunk=st.integers(1, 12))
def test_chunked_attention_stays_in_its_chunk(past: int, query: int, chunk: int) -> None:
    brute = sum(
        1
        for q in range(past, past + query)
        for k in range(past + query)
        if k <= q and k // chunk == q // chunk
    )
    assert chunked_pairs(past, query, chunk) == brute


def test_a_cost_survives_json_with_all_its_parts() -> None:
    cost = replace(
        MOE,
        attention=(replace(FULL, layer_indices=(0, 2), chunk_tokens=8),),
        states=(StateCost(1, 2, 3, (1,)),),
        cross=(CROSS,),
        encoder=UNTIED,
        offloaded_bytes=9,
        counted=True,
        row_flops=-5,
    )
    assert ModelCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost


def test_a_model_that_is_not_covered_is_not_counted() -> None:
    unknown = replace(UNTIED, not_covered=("a mixture of experts (model.layers.*.mlp)",))
    with pytest.raises(ValueError, match="a mixture of experts"):
        count(unknown, [Rows(0, 6, 1)], logits_tokens=1, layout=None)


@given(past=TOKENS, query=st.integers(1, 40), sequences=st.integers(1, 8), window=WINDOW)
def test_a_longer_past_never_costs_less(
    past: int, query: int, sequences: int, window: int | None
) -> None:
    cost = replace(UNTIED, attention=(FULL, replace(SLIDING, window_tokens=window)))
    here = count(cost, [Rows(past, query, sequences)], logits_tokens=1, layout=None)
    later = count(cost, [Rows(past + 1, query, sequences)], logits_tokens=1, layout=None)
    assert later.flops > here.flops
    assert (later.kv_read_bytes or 0) > (here.kv_read_bytes or 0)


def test_rows_of_few_queries_attend_to_latents_as_they_are() -> None:
    """With r = 32 and d_rope = 4, 4 heads: a pair takes 2 * 4 * (2 * 32 + 4) = 544 FLOPs and nothing is expanded; with
    more query tokens, what is cached is expanded for 1000 FLOPs a token and a pair takes 192."""
    latent = replace(
        FULL,
        layers=1,
        expand_flops_per_token=1_000,
        absorbed_query_tokens=2,
        absorbed_flops_per_pair=544,
    )
    cost = replace(UNTIED, attention=(latent,))

    def flops(past: int, query: int) -> int:
        return count(cost, (Rows(past, query, 1),), logits_tokens=0, layout=None).flops

    assert flops(10, 1) == 10_000 + 11 * 544
    assert flops(10, 2) == 2 * 10_000 + (11 + 12) * 544
    assert flops(10, 3) == 3 * 10_000 + 10 * 1_000 + (11 + 12 + 13) * 192
    together = count(cost, (Rows(10, 1, 1), Rows(10, 3, 2)), logits_tokens=0, layout=None)
    assert together.flops == flops(10, 1) + 2 * flops(10, 3)


def test_a_rank_runs_its_share_of_the_experts() -> None:
    """2 of 8 experts are here, a token is sent to 4 of them, and as many tokens come from another engine."""
    experts = ExpertsCost(
        layers=3,
        experts=8,
        top_k=4,
        expert_flops_per_token=100,
        expert_bytes=50,
        held=2,
        sources=2,
    )
    cost = replace(UNTIED, attention=(replace(FULL, layers=1),), experts=(experts,))
    plain = replace(cost, experts=())
    rows = (Rows(0, 5, 1),)
    work = count(cost, rows, logits_tokens=0, layout=None)
    without = count(plain, rows, logits_tokens=0, layout=None)
    assert work.flops - without.flops == 3 * (5 * 2) * 4 * 100 * 2 // 8
    # Ten tokens miss an expert with a probability of a half each.
    assert work.weight_bytes - without.weight_bytes == 3 * round(2 * (1 - 0.5**10) * 50)
    everywhere = replace(experts, held=None, sources=1)
    assert everywhere.flops(5) == 5 * 4 * 100
