"""What layers reach and what their caches keep where the two differ: masks with a window, borrowed keys and values."""

from __future__ import annotations

from dataclasses import replace

from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.count import Rows, count
from phaseprof.work.kv import KvGroup, KvLayout

WINDOW = 4


def attention(layers: int, window: int | None, indices: tuple[int, ...]) -> AttentionCost:
    return AttentionCost(
        layers=layers,
        query_heads=2,
        kv_heads=1,
        qk_head_dim=4,
        v_head_dim=4,
        window_tokens=window,
        kv_bytes_per_token=16,
        layer_indices=indices,
    )


def model(*groups: AttentionCost) -> ModelCost:
    return ModelCost(
        linear_flops_per_token=0,
        head_flops_per_token=0,
        attention=groups,
        body_weight_bytes=0,
        head_weight_bytes=0,
        lookup_bytes_per_token=0,
        parameter_bytes=0,
        parameters=0,
        dtype="float16",
    )


def test_a_cache_that_keeps_what_the_mask_hides() -> None:
    """The pairs are those of the window, 2 x 2 x 8 FLOPs each; what is held and read is every token."""
    cost = model(replace(attention(1, WINDOW, (0,)), forgets=False))
    work = count(cost, [Rows(past=10, query=2, sequences=1)], logits_tokens=0, layout=None)
    assert work.flops == 2 * WINDOW * 32
    assert work.kv_read_bytes == 12 * 16
    assert work.kv_held_bytes == 12 * 16
    forgetful = count(
        model(attention(1, WINDOW, (0,))), [Rows(10, 2, 1)], logits_tokens=0, layout=None
    )
    assert forgetful.flops == work.flops
    assert forgetful.kv_read_bytes == (WINDOW - 1 + 2) * 16


def test_borrowed_keys_are_read_and_never_written() -> None:
    """One full and one sliding layer of their own, and two layers that borrow from each of them."""
    cost = model(
        attention(1, None, (0,)),
        attention(1, WINDOW, (1,)),
        replace(attention(2, None, (2, 4)), borrows=True),
        replace(attention(2, WINDOW, (3, 5)), borrows=True),
    )
    layout = KvLayout(
        (
            KvGroup((0,), 16, None, None, "float16"),
            KvGroup((1,), 16, WINDOW, None, "float16"),
        )
    )
    for known in (None, layout):
        work = count(cost, [Rows(past=10, query=2, sequences=3)], logits_tokens=0, layout=known)
        assert work.flops == 3 * 32 * 3 * (10 * 2 + 3 + 2 * WINDOW)
        assert work.kv_read_bytes == 3 * 16 * 3 * (12 + WINDOW - 1 + 2)
        assert work.kv_write_bytes == 3 * 16 * 2 * 2
        assert work.kv_held_bytes == 3 * 16 * (12 + WINDOW - 1)
        assert work.kv_allocated_bytes == work.kv_held_bytes
        assert work.cache_copy_bytes == 3 * 16 * 2 * (10 + WINDOW - 1)


def test_borrowed_keys_of_a_static_cache_are_read_with_its_empty_slots() -> None:
    cost = model(
        attention(1, None, (0,)),
        replace(attention(1, None, (1,)), borrows=True),
    )
    layout = KvLayout((KvGroup((0,), 16, None, 32, "float16"),))
    work = count(cost, [Rows(past=10, query=1, sequences=1)], logits_tokens=0, layout=layout)
    assert work.kv_read_bytes == 2 * 16 * 32
    assert work.kv_write_bytes == 16
    assert work.kv_allocated_bytes == 16 * 32


def test_the_json_form_keeps_both() -> None:
    cost = model(
        replace(attention(1, WINDOW, (0,)), forgets=False),
        replace(attention(1, None, (1,)), borrows=True),
    )
    assert ModelCost.from_json(cost.to_json()) == cost
