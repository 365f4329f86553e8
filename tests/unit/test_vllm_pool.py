"""What a block pool of vLLM holds and allocates, by hand."""

from __future__ import annotations

from dataclasses import replace

from phaseprof.vllm.kv import BlockPool
from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.count import Rows, Work, count
from phaseprof.work.kv import KvGroup, KvLayout

FULL = KvGroup((0, 3), 100, None, None, "bfloat16")
SLIDING = KvGroup((1, 2), 100, 8, None, "bfloat16")
#: The hybrid allocator is off: the cache keeps what attention leaves out.
KEEPING = replace(SLIDING, forgets=False)

ATTENTION = AttentionCost(
    layers=4,
    query_heads=2,
    kv_heads=1,
    qk_head_dim=8,
    v_head_dim=8,
    window_tokens=None,
    kv_bytes_per_token=32,
)
MODEL = ModelCost(
    linear_flops_per_token=1_000,
    head_flops_per_token=0,
    attention=(ATTENTION,),
    body_weight_bytes=0,
    head_weight_bytes=0,
    lookup_bytes_per_token=0,
    parameter_bytes=0,
    parameters=0,
    dtype="bfloat16",
)


def work_of(layout: KvLayout, *rows: Rows) -> Work:
    pool = BlockPool(layout, 12_345, (16,))
    return pool.refine(count(MODEL, rows, logits_tokens=0, layout=layout), rows)


def test_a_sliding_layer_reads_its_window_and_holds_what_it_read() -> None:
    work = work_of(KvLayout((FULL, SLIDING)), Rows(20, 1, 1), Rows(0, 10, 1))
    # The first sees 7 tokens and itself; the second computes all of its tokens in one step.
    sliding, full = 2 * 100 * (7 + 1 + 10), 2 * 100 * (21 + 10)
    assert work.kv_read_bytes == sliding + full
    assert work.kv_held_bytes == sliding + full
    assert work.kv_write_bytes == 4 * 100 * 11
    assert (work.kv_allocated_bytes, work.cache_copy_bytes) == (12_345, 0)


def test_without_the_hybrid_allocator_a_window_is_read_and_everything_held() -> None:
    work = work_of(KvLayout((KEEPING,)), Rows(20, 1, 1))
    assert work.kv_read_bytes == 2 * 100 * 8
    assert work.kv_held_bytes == 2 * 100 * 21


def test_a_state_is_held_by_each_request() -> None:
    work = work_of(KvLayout((), state_bytes=500), Rows(20, 1, 1), Rows(0, 10, 1))
    # The second begins with an empty one.
    assert (work.kv_read_bytes, work.kv_write_bytes) == (500, 1_000)
    assert (work.kv_held_bytes, work.kv_allocated_bytes) == (1_000, 12_345)


def test_what_is_not_known_stays_open() -> None:
    pool = BlockPool(KvLayout((), ("a cache of another kind",)), None)
    rows = (Rows(0, 4, 1),)
    work = pool.refine(count(MODEL, rows, logits_tokens=0, layout=pool.layout), rows)
    assert (work.kv_read_bytes, work.kv_held_bytes, work.kv_allocated_bytes) == (None, None, None)
    assert pool.holds


def test_an_encoder_has_no_pool() -> None:
    assert not BlockPool(KvLayout(()), None).holds
