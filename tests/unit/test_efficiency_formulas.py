"""The formulas of the efficiency model: against arithmetic by hand, and what must hold for any shape."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseprof.analyzers.efficiency import fitted
from phaseprof.analyzers.efficiency.attention import attention_seconds
from phaseprof.analyzers.efficiency.attention import moved_bytes as attention_bytes
from phaseprof.analyzers.efficiency.formulas import joined, waves
from phaseprof.analyzers.efficiency.gemm import gemm_seconds, moved_bytes
from phaseprof.analyzers.efficiency.parameters import AttentionFit, GemmFit, Hardware, Tile
from phaseprof.work.count import Reach, Rows
from phaseprof.work.ops import AttentionShape, GemmShape

SMALL = Hardware(units=4, flops_per_s=4e12, bytes_per_s=1e12, cache_bytes=0)
SUMS = GemmFit(
    tiles=(Tile(10, 10),),
    splits=(1,),
    element_bytes=2,
    compute_share=0.5,
    bandwidth_share=0.5,
    load_bytes_per_s=1e12,
    tile_s=1e-6,
    fixed_s=3e-6,
    overlap=1,
    tile_overlap=1,
    wave_rounding=1,
)
ATTENTION_SUMS = AttentionFit(
    compute_share={128: 0.5},
    bandwidth_share=0.5,
    cache_bytes_per_s=4e12,
    load_bytes_per_s=1e12,
    tile_s=1e-6,
    query_bytes_per_s=1e12,
    window_s=0,
    fixed_s=2e-6,
    overlap=1,
    tile_overlap=1,
    wave_rounding=1,
    split_s=1e-6,
    write_bytes_per_s=1e12,
    write_token_s=1e-9,
)
H100 = fitted.H100_SXM
GEMMS = [
    (model.fit, replace(gpu.hardware, flops_per_s=model.flops_per_s))
    for gpu in (fitted.H100_SXM, fitted.A100_SXM)
    for model in gpu.gemm.values()
]
ATTENTIONS = [model.fit for phase in (H100.prefill, H100.decode) for model in phase.values()]

sizes = st.integers(1, 65536)
gemm_models = st.sampled_from(GEMMS)


def product(m: int, n: int, k: int, fit: GemmFit, groups: int = 1) -> GemmShape:
    return GemmShape(m, n, k, round(n * k * fit.element_bytes), groups)


def attention(
    rows: tuple[Rows, ...], heads: int = 8, kv_heads: int = 2, window: int | None = None
) -> AttentionShape:
    return AttentionShape(rows, heads, kv_heads, 128, 128, window, kv_heads * 256 * 2)


def test_a_product_by_hand() -> None:
    # 6 tiles of 10 x 10 on 4 units are 2 waves. A tile computes 0.4 us, loads 0.04 us and costs 1 us besides; 101,200
    # bytes take 0.2024 us.
    seconds = gemm_seconds(GemmShape(20, 30, 1000, 60_000), SUMS, SMALL)
    assert seconds == pytest.approx(3e-6 + 2 * 1.44e-6 + 0.2024e-6)


def test_narrow_weights_move_fewer_bytes() -> None:
    whole = GemmShape(20, 30, 1000, 60_000)
    packed = GemmShape(20, 30, 1000, 15_000)
    assert moved_bytes(whole, SUMS) - moved_bytes(packed, SUMS) == 45_000
    # 0.09 us of bandwidth, and 15 bytes of 20 in each of 2 tiles' loads of 1000 columns.
    saved = gemm_seconds(whole, SUMS, SMALL) - gemm_seconds(packed, SUMS, SMALL)
    assert saved == pytest.approx(0.09e-6 + 2 * 0.015e-6)


def test_parts_of_the_inner_dimension_fill_idle_units() -> None:
    # One tile on four units: in four parts each computes a quarter; summing 4 x 100 partial results of 8 bytes.
    shape = GemmShape(10, 10, 100_000, 0)
    parts = replace(SUMS, splits=(1, 4), split_s=0.5e-6, reduce_bytes_per_s=1e12)
    memory_s = (10 * 100_000 * 2 + 10 * 10 * 2) / 5e11
    whole = 3e-6 + 1e-6 + 40e-6 + 2e-6 + memory_s
    assert gemm_seconds(shape, SUMS, SMALL) == pytest.approx(whole)
    quarter = 3e-6 + 1e-6 + 10e-6 + 0.5e-6 + memory_s + 0.5e-6 + 0.0032e-6
    assert gemm_seconds(shape, parts, SMALL) == pytest.approx(quarter)


def test_a_decode_attention_by_hand() -> None:
    # Two sequences of 1024 keys, two key-value heads: 4 tiles of 4 valid rows on 4 units. 8.5 blocks of 128 x 128 are
    # 71,303,168 FLOPs at 5e11 a unit, and 557,056 bytes; 2,105,344 bytes come from memory.
    seconds = attention_seconds(attention((Rows(1023, 1, 2),)), ATTENTION_SUMS, SMALL)
    tile_us = 1 + 0.002048 + 142.606336 + 0.557056
    assert seconds * 1e6 == pytest.approx(2 + tile_us + 4.210688 + 0.004096 + 0.002)


def test_few_tiles_share_the_keys_of_a_long_sequence() -> None:
    shape = attention((Rows(1023, 1, 1),), heads=4, kv_heads=1)
    # One tile, four units: its blocks in four parts.
    part_us = 1 + 0.002048 + (142.606336 + 0.557056) / 4 + 1
    memory_us = (1024 * 512 + 4 * 256 * 2) / 5e11 * 1e6
    written_us = 256 * 4 / 1e12 * 1e6 + 0.001
    assert attention_seconds(shape, ATTENTION_SUMS, SMALL) * 1e6 == pytest.approx(
        2 + part_us + memory_us + written_us
    )


def test_a_prefill_attends_to_half_of_the_square() -> None:
    # 4 heads that share keys: 32 positions a tile, 64 tiles of 2048 positions; a tile reaches (2048 + 32) / 2 keys.
    shape = attention((Rows(0, 2048, 1),), heads=4, kv_heads=1)
    blocks = 1040 / 128 + 0.5
    tile_s = 1e-6 + 128 * 256 * 2 / 1e12 + blocks * (128 * 128 * 512 / 5e11 + 128 * 512 / 1e12)
    memory_s = (2048 * 512 + 2048 * 4 * 512) / 5e11
    written_s = 2048 * 256 * 4 / 1e12 + 2048e-9
    assert attention_seconds(shape, ATTENTION_SUMS, SMALL) == pytest.approx(
        2e-6 + 16 * tile_s + memory_s + written_s
    )


def test_a_window_ends_the_growth() -> None:
    near, far = (
        attention_seconds(attention((Rows(past, 1, 4),), window=128), ATTENTION_SUMS, SMALL)
        for past in (1_000, 100_000)
    )
    assert near == far


def test_repeated_calls_find_small_caches_in_the_device() -> None:
    fit, gpu = H100.decode[2].fit, H100.hardware
    small, large = attention((Rows(2047, 1, 8),)), attention((Rows(65_535, 1, 16),))
    assert attention_seconds(small, fit, gpu, resident=True) < attention_seconds(small, fit, gpu)
    assert attention_seconds(large, fit, gpu, resident=True) == attention_seconds(large, fit, gpu)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(1, 500))
def test_overlapping_lies_between_the_longer_and_the_sum(a: float, b: float, p: float) -> None:
    together = joined(a, b, p)
    assert max(a, b) <= together <= (a + b) * (1 + 1e-9)


@given(st.integers(1, 10**7), st.integers(1, 400), st.floats(0, 1))
def test_waves_are_at_least_the_work_of_a_unit(tiles: int, units: int, rounding: float) -> None:
    found = waves(tiles, units, rounding)
    assert max(1, tiles / units) * (1 - 1e-12) <= found
    assert found <= math.ceil(tiles / units) * (1 + 1e-12)


@settings(deadline=None)
@given(gemm_models, sizes, sizes, sizes)
def test_products_are_finite_and_above_their_floor(
    model: tuple[GemmFit, Hardware], m: int, n: int, k: int
) -> None:
    fit, hardware = model
    shape = product(m, n, k, fit)
    seconds = gemm_seconds(shape, fit, hardware)
    assert math.isfinite(seconds)
    assert seconds > fit.fixed_s > 0
    assert seconds >= shape.flops / hardware.flops_per_s
    assert seconds >= moved_bytes(shape, fit) / hardware.bytes_per_s


@settings(deadline=None)
@given(gemm_models, sizes, sizes, sizes, st.integers(0, 4096))
def test_a_larger_product_is_never_faster(
    model: tuple[GemmFit, Hardware], m: int, n: int, k: int, more: int
) -> None:
    fit, hardware = model
    base = gemm_seconds(product(m, n, k, fit), fit, hardware) * (1 - 1e-9)
    assert gemm_seconds(product(m, n + more, k, fit), fit, hardware) >= base
    assert gemm_seconds(product(m, n, k + more, fit), fit, hardware) >= base
    by_rows = any(tile.to_rows < 2**31 for tile in fit.tiles)
    # Kernels that are picked by the rows alone are not always the fastest of the menu: that is seen in the measured
    # tables too. Where the fastest is picked, more rows are never faster.
    if not by_rows:
        assert gemm_seconds(product(m + more, n, k, fit), fit, hardware) >= base


@settings(deadline=None)
@given(gemm_models, sizes, sizes, sizes)
def test_products_gain_from_bandwidth_and_compute(
    model: tuple[GemmFit, Hardware], m: int, n: int, k: int
) -> None:
    fit, hardware = model
    shape = product(m, n, k, fit)
    base = gemm_seconds(shape, fit, hardware)
    wider = replace(hardware, bytes_per_s=2 * hardware.bytes_per_s)
    faster = replace(hardware, flops_per_s=2 * hardware.flops_per_s)
    assert base / 2 <= gemm_seconds(shape, fit, wider) <= base
    assert base / 2 <= gemm_seconds(shape, fit, faster) <= base


@settings(deadline=None)
@given(gemm_models, st.integers(1, 512), sizes, sizes, st.integers(2, 64))
def test_groups_in_one_call_cost_less_than_calls(
    model: tuple[GemmFit, Hardware], m: int, n: int, k: int, groups: int
) -> None:
    fit, hardware = model
    one = gemm_seconds(product(m, n, k, fit), fit, hardware)
    together = gemm_seconds(product(m, n, k, fit, groups), fit, hardware)
    assert one <= together <= one * groups * (1 + 1e-9)


@settings(deadline=None)
@given(
    st.sampled_from(ATTENTIONS),
    st.integers(0, 65536),
    st.integers(1, 65536),
    st.integers(1, 4096),
    st.sampled_from([(1, 1), (8, 1), (32, 8), (64, 8), (16, 16)]),
    st.sampled_from([None, 128, 4096]),
)
def test_attention_is_finite_monotone_and_above_its_floor(
    fit: AttentionFit,
    past: int,
    query: int,
    sequences: int,
    heads: tuple[int, int],
    window: int | None,
) -> None:
    gpu = H100.hardware
    shape = attention((Rows(past, query, sequences),), *heads, window)
    seconds = attention_seconds(shape, fit, gpu)
    assert math.isfinite(seconds)
    assert seconds >= attention_bytes(shape) / gpu.bytes_per_s
    pairs = Reach(window, None, True).pairs(past, query) * sequences
    assert seconds >= 4 * 128 * heads[0] * pairs / gpu.flops_per_s
    least = seconds * (1 - 1e-9)
    longer = attention((Rows(past + 777, query, sequences),), *heads, window)
    assert attention_seconds(longer, fit, gpu) >= least
    more = attention((Rows(past, query, sequences + 3),), *heads, window)
    assert attention_seconds(more, fit, gpu) >= least
    wider = replace(gpu, bytes_per_s=2 * gpu.bytes_per_s)
    assert attention_seconds(shape, fit, wider) <= seconds


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 65536), st.integers(1, 64)), min_size=2, max_size=5))
def test_rows_alike_count_as_one_group(lengths: list[tuple[int, int]]) -> None:
    fit, gpu = H100.decode[2].fit, H100.hardware
    past = lengths[0][0]
    apart = tuple(Rows(past, 1, sequences) for _, sequences in lengths)
    whole = (Rows(past, 1, sum(sequences for _, sequences in lengths)),)
    assert attention_seconds(attention(apart), fit, gpu) == pytest.approx(
        attention_seconds(attention(whole), fit, gpu)
    )
