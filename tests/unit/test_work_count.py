"""FLOPs and bytes of a pass: numbers worked out by hand, and pairs against enumeration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.count import Rows, Work, count, pairs
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
