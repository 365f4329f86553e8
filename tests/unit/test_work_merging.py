"""Rows that are merged count what they counted one by one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phaseprof.vllm.kv import BlockPool
from phaseprof.work.cost import AttentionCost, ExpertsCost, ModelCost, StateCost
from phaseprof.work.count import Rows, Work, count
from phaseprof.work.kv import KvGroup, KvLayout
from phaseprof.work.merging import merged
from phaseprof.work.paged import PagedPool

FULL = AttentionCost(
    layers=3,
    query_heads=4,
    kv_heads=2,
    qk_head_dim=8,
    v_head_dim=16,
    window_tokens=None,
    kv_bytes_per_token=96,
)
LATENT = replace(
    FULL,
    layers=1,
    expand_flops_per_token=1_000,
    absorbed_query_tokens=1,
    absorbed_flops_per_pair=544,
)
MODEL = ModelCost(
    linear_flops_per_token=10_000,
    head_flops_per_token=2_000,
    attention=(
        FULL,
        LATENT,
        replace(FULL, layers=2, window_tokens=16),
        replace(FULL, layers=1, window_tokens=40, borrows=True),
    ),
    body_weight_bytes=10_100,
    head_weight_bytes=2_000,
    lookup_bytes_per_token=20,
    parameter_bytes=14_100,
    parameters=7_050,
    dtype="bfloat16",
    experts=(ExpertsCost(2, 8, 2, 100, 50),),
    states=(StateCost(2, 70, 500),),
    row_flops=30,
)
LAYOUT = KvLayout(
    (
        KvGroup((0, 1, 2), 96, None, None, "bfloat16"),
        KvGroup((3,), 40, None, None, "bfloat16"),
        KvGroup((4, 5), 96, 16, None, "bfloat16"),
        KvGroup((6,), 96, 40, None, "bfloat16", forgets=False),
    ),
    state_bytes=900,
)
ROWS = st.lists(
    st.builds(
        Rows,
        past=st.integers(min_value=0, max_value=60),
        query=st.integers(min_value=1, max_value=3) | st.just(1),
        sequences=st.integers(min_value=1, max_value=2),
    ),
    min_size=8,
    max_size=30,
)


def work_of(rows: tuple[Rows, ...], model: ModelCost, pool: PagedPool | None) -> Work:
    layout = None if pool is None else pool.layout
    work = count(model, rows, logits_tokens=len(rows), layout=layout)
    return work if pool is None else pool.refine(work, rows)


@given(rows=ROWS)
def test_merged_rows_count_the_same(rows: list[Rows]) -> None:
    for pool in (None, PagedPool(LAYOUT, 1_000_000), BlockPool(LAYOUT, 1_000_000, (16,))):
        fewer = merged(rows, MODEL, None if pool is None else pool.layout)
        logits = len(rows)
        ours = count(MODEL, fewer, logits_tokens=logits, layout=pool.layout if pool else None)
        ours = ours if pool is None else pool.refine(ours, fewer)
        assert ours == work_of(tuple(rows), MODEL, pool)


def test_a_thousand_requests_are_two_rows() -> None:
    rows = [Rows(100 + 7 * n, 1, 1) for n in range(1000)]
    plain = replace(MODEL, attention=(FULL,))
    fewer = merged(rows, plain, None)
    assert len(fewer) == 2
    assert sum(r.sequences for r in fewer) == 1000
    assert sum(r.past * r.sequences for r in fewer) == sum(r.past for r in rows)


def test_what_begins_and_what_has_several_tokens_stays() -> None:
    rows = [Rows(0, 5, 1), Rows(0, 1, 1), Rows(9, 4, 1), *(Rows(20, 1, 1) for _ in range(8))]
    assert merged(rows, replace(MODEL, attention=(FULL,)), None) == (*rows[:3], Rows(20, 1, 8))


def test_few_rows_chunks_and_slots_stay() -> None:
    few = [Rows(n, 1, 1) for n in range(1, 5)]
    assert merged(few, MODEL, None) == tuple(few)
    many = [Rows(n, 1, 1) for n in range(1, 50)]
    chunked = replace(MODEL, attention=(replace(FULL, chunk_tokens=16),))
    assert merged(many, chunked, None) == tuple(many)
    static = KvLayout((KvGroup((0,), 96, None, 64, "bfloat16"),))
    assert merged(many, MODEL, static) == tuple(many)
