"""Which efficiency model a device gets, what its intervals say, and how a measured run moves it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from phaseprof.analyzers.efficiency import fitted
from phaseprof.analyzers.efficiency.boards import BOARDS
from phaseprof.analyzers.efficiency.choosing import efficiency_for
from phaseprof.analyzers.efficiency.estimate import Estimate, total
from phaseprof.analyzers.efficiency.model import Basis, EfficiencyModel
from phaseprof.analyzers.efficiency.parameters import Spread
from phaseprof.analyzers.efficiency.size_classes import attention_spread, gemm_spread
from phaseprof.collectors.datasheet import DATASHEET, DatasheetRow
from phaseprof.trace.meta import Ceilings, Device
from phaseprof.work.count import Rows
from phaseprof.work.ops import AttentionShape, GemmShape

#: A projection of Llama-3.1-8B at decode and at prefill.
DECODE = GemmShape(1, 14336, 4096, 14336 * 4096 * 2)
PREFILL = GemmShape(8192, 8192, 8192, 8192 * 8192 * 2)
ATTENTION = AttentionShape((Rows(2047, 1, 8),), 32, 8, 128, 128, None, 4096)


def roofs(row: DatasheetRow, dtype: str = "bfloat16") -> Ceilings:
    return Ceilings(
        device_key="key",
        dtype=dtype,
        flops_per_s=row.tflops[dtype] * 1e12,
        bytes_per_s=row.tb_per_s * 1e12,
        source="datasheet",
        measured_ns=None,
        spread=None,
        reference=f"{row.board} datasheet, dense",
    )


def row_of(board: str) -> DatasheetRow:
    return next(row for row in DATASHEET if row.board == board)


def model_of(board: str) -> EfficiencyModel:
    return efficiency_for(roofs(row_of(board)))


def cpu(dtype: str = "float32") -> Ceilings:
    return Ceilings("key", dtype, 1e12, 1e11, "measured", 1, 0.02, "measured")


def width(estimate: Estimate) -> float:
    return estimate.high / estimate.low


def test_every_board_of_the_datasheet_has_a_model() -> None:
    assert {row.board for row in DATASHEET} == {board.board for board in BOARDS}
    for row in DATASHEET:
        board = next(board for board in BOARDS if board.board == row.board)
        assert board.name == row.name
        assert board.units == row.sms


def test_the_fitted_gpus_are_fitted_and_others_say_what_they_are_scaled_from() -> None:
    assert model_of("H100 SXM").basis is Basis.FITTED
    assert model_of("A100 SXM 80 GB").basis is Basis.FITTED
    h200 = model_of("H200 SXM")
    assert h200.basis is Basis.SCALED
    assert "scaled from H100 SXM" in h200.gemm(DECODE).reference
    assert "scaled from A100 SXM" in model_of("L40S").gemm(DECODE).reference
    assert "attention scaled from H100" in model_of("A100 SXM 80 GB").reference


@pytest.mark.parametrize("row", DATASHEET, ids=lambda row: row.board)
def test_no_board_is_faster_than_its_roofs(row: DatasheetRow) -> None:
    model = efficiency_for(roofs(row))
    decode, prefill = model.gemm(DECODE), model.gemm(PREFILL)
    assert decode.seconds > DECODE.weight_bytes / (row.tb_per_s * 1e12)
    assert prefill.seconds > PREFILL.flops / (row.tflops["bfloat16"] * 1e12)
    # Nor so slow that nobody would buy it.
    assert decode.seconds < 2 * DECODE.weight_bytes / (row.tb_per_s * 1e12) + 1e-5
    assert prefill.seconds < 2.6 * PREFILL.flops / (row.tflops["bfloat16"] * 1e12)
    for estimate in (decode, prefill, model.attention(ATTENTION)):
        assert 0 < estimate.low <= estimate.seconds <= estimate.high < math.inf


def test_scaling_widens_the_interval() -> None:
    for shape in (DECODE, PREFILL):
        fitted_width = width(model_of("H100 SXM").gemm(shape))
        same_chip = width(model_of("H200 SXM").gemm(shape))
        other_chip = width(model_of("B200 SXM").gemm(shape))
        assert 1 < fitted_width < same_chip < other_chip


def test_more_bandwidth_helps_decode_and_not_prefill() -> None:
    h100, h200 = model_of("H100 SXM"), model_of("H200 SXM")
    # 4.8 against 3.35 TB/s.
    gain = h100.gemm(DECODE).seconds / h200.gemm(DECODE).seconds
    assert 1.2 < gain < 4.8 / 3.35
    assert h100.gemm(PREFILL).seconds / h200.gemm(PREFILL).seconds == pytest.approx(1, abs=0.03)


def test_sustained_rates_of_others() -> None:
    # Largest sustained 16-bit products, as collected in stas00/ml-engineering (TFLOP/s).
    for board, sustained in (("H100 SXM", 794.5), ("A100 SXM 80 GB", 271), ("B200 SXM", 1745)):
        rate = PREFILL.flops / model_of(board).gemm(PREFILL).seconds / 1e12
        assert rate == pytest.approx(sustained, rel=0.1)


def test_a_measured_roof_is_what_a_large_product_reaches() -> None:
    row = row_of("H100 SXM")
    measured = replace(
        roofs(row), source="measured", flops_per_s=700e12, bytes_per_s=2.9e12, reference="measured"
    )
    device = Device("NVIDIA H100 80GB HBM3", "cuda", 0, 132, None, 80 * 2**30, "key")
    model = efficiency_for(measured, device)
    assert model.basis is Basis.FITTED
    large = model.gemm(PREFILL)
    assert PREFILL.flops / large.seconds == pytest.approx(700e12, rel=0.01)
    stream = model.streaming(1e10)
    assert 1e10 / stream.seconds == pytest.approx(2.9e12, rel=0.01)


def test_a_part_of_a_board_is_not_the_board() -> None:
    measured = replace(cpu("bfloat16"), flops_per_s=1e14)
    slice_of_it = Device("NVIDIA H100 80GB HBM3", "cuda", 0, 16, None, 10 * 2**30, "key")
    assert efficiency_for(measured, slice_of_it).basis is Basis.ROOFLINE


def test_narrow_floats_where_there_are_units_for_them() -> None:
    h100 = model_of("H100 SXM")
    packed = replace(PREFILL, weight_bytes=PREFILL.weight_bytes // 2)
    gain = h100.gemm(PREFILL).seconds / h100.gemm(packed, "float8_e4m3fn").seconds
    assert 1.2 < gain < 2
    assert h100.gemm(packed, "float8_block").seconds < h100.gemm(PREFILL).seconds
    # An A100 multiplies in 16 bits, and reads half of the bytes.
    a100 = model_of("A100 SXM 80 GB")
    eight = a100.gemm(replace(DECODE, weight_bytes=DECODE.weight_bytes // 2), "float8_e4m3fn")
    assert 1.4 < a100.gemm(DECODE).seconds / eight.seconds < 2
    assert a100.gemm(packed, "float8_e4m3fn").seconds == pytest.approx(
        a100.gemm(packed, "bfloat16").seconds
    )
    assert a100.gemm(DECODE, "float16") == a100.gemm(DECODE, "bfloat16")


def test_ceilings_of_narrow_floats_serve_both() -> None:
    row = row_of("H100 SXM")
    by_eight = efficiency_for(roofs(row, "float8_e4m3fn"))
    both = efficiency_for(roofs(row), more=[roofs(row, "float8_e4m3fn")])
    for dtype in ("bfloat16", "float8_e4m3fn"):
        assert by_eight.gemm(PREFILL, dtype).seconds == pytest.approx(
            both.gemm(PREFILL, dtype).seconds, rel=0.01
        )


def test_half_as_many_bytes_of_keys_take_less_time() -> None:
    model = model_of("H100 SXM")
    long = replace(ATTENTION, rows=(Rows(32_767, 1, 32),))
    halved = replace(long, kv_bytes_per_token=long.kv_bytes_per_token // 2)
    assert 1.4 < model.attention(long).seconds / model.attention(halved).seconds < 2.1


def test_rows_of_both_phases_are_two_calls() -> None:
    model = model_of("H100 SXM")
    prefill, decode = Rows(0, 512, 2), Rows(900, 1, 16)
    mixed = model.attention(replace(ATTENTION, rows=(prefill, decode)))
    apart = [model.attention(replace(ATTENTION, rows=(row,))) for row in (prefill, decode)]
    assert mixed == total(apart)
    assert model.attention(replace(ATTENTION, rows=())).seconds == 0


def test_experts_have_a_wider_interval_than_one_product() -> None:
    model = model_of("H100 SXM")
    one = GemmShape(32, 1536, 4096, 1536 * 4096 * 2)
    experts = replace(one, groups=64)
    assert width(model.gemm(experts)) > width(model.gemm(one))
    assert model.gemm(experts).seconds > 64 * one.weight_bytes / 3.35e12


def test_a_cpu_has_its_roofline_and_a_wide_interval() -> None:
    model = efficiency_for(cpu())
    assert model.basis is Basis.ROOFLINE
    # 2 m n k over 1e12, with a little of the memory's time; 1e11 bytes a second.
    square = GemmShape(1024, 1024, 1024, 1024 * 1024 * 4)
    assert model.gemm(square).seconds == pytest.approx(2 * 1024**3 / 1e12, rel=0.01)
    row = GemmShape(1, 4096, 4096, 4096 * 4096 * 4)
    assert model.gemm(row).seconds == pytest.approx(4 * (4096**2 + 2 * 4096) / 1e11, rel=0.01)
    assert width(model.gemm(row)) > 4
    assert "measured run" in model.gemm(row).reference
    # One token against 1000 keys, 4 heads of 64: 4 x 128 x 2 FLOPs a pair; the bytes take longer.
    shape = AttentionShape((Rows(999, 1, 1),), 4, 4, 64, 64, None, 4 * 128 * 4)
    moved = 1000 * 2048 + 4 * 128 * 2
    assert model.attention(shape).seconds == pytest.approx(moved / 1e11, rel=0.01)
    assert model.streaming(1e6).seconds == pytest.approx(1e-5)


def test_calibrating_moves_a_roofline() -> None:
    model = efficiency_for(cpu())
    moved = model.calibrated(
        compute_factor=2, memory_factor=1.5, fixed_s=1e-5, spread=0.2, reference="measured run"
    )
    square = GemmShape(4096, 4096, 4096, 4096 * 4096 * 4)
    compute_bound = moved.gemm(square)
    assert compute_bound.seconds == pytest.approx(2 * 2 * 4096**3 / 1e12 + 1e-5, rel=0.01)
    assert compute_bound.high / compute_bound.seconds == pytest.approx(1.2)
    assert compute_bound.seconds / compute_bound.low == pytest.approx(1.2)
    assert compute_bound.reference == "measured run"
    row = GemmShape(1, 4096, 4096, 4096 * 4096 * 4)
    assert moved.gemm(row).seconds == pytest.approx(1.5 * model.gemm(row).seconds + 1e-5, rel=1e-3)
    assert moved.streaming(1e6).seconds == pytest.approx(2.5e-5)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_calibrating_moves_a_fitted_gpu(factor: float) -> None:
    model = model_of("H100 SXM")
    moved = model.calibrated(compute_factor=factor, memory_factor=factor, fixed_s=0.0)
    long = replace(ATTENTION, rows=(Rows(131_071, 1, 64),))
    for before, after in (
        (model.gemm(PREFILL), moved.gemm(PREFILL)),
        (model.gemm(replace(DECODE, n=131_072, weight_bytes=2**30)), moved.gemm(
            replace(DECODE, n=131_072, weight_bytes=2**30))),
        (model.attention(long), moved.attention(long)),
    ):  # fmt: skip
        assert after.seconds / before.seconds == pytest.approx(factor, rel=0.03)
    if factor == 1.0:
        assert model.calibrated().gemm(PREFILL) == model.gemm(PREFILL)


@pytest.mark.parametrize(
    "wrong",
    [{"compute_factor": 0.0}, {"memory_factor": -1.0}, {"fixed_s": -1.0}, {"spread": -0.1}],
    ids=str,
)
def test_calibrating_refuses_what_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"positive|negative"):
        model_of("H100 SXM").calibrated(**wrong)  # type: ignore[arg-type]


def test_roofs_have_to_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        efficiency_for(replace(cpu(), bytes_per_s=0.0))


def test_intervals_add_up_and_repeat() -> None:
    one, two = Estimate(2.0, 1.0, 4.0, "a"), Estimate(3.0, 2.0, 6.0, "b")
    assert total([one, two, one]) == Estimate(7.0, 4.0, 14.0, "a; b")
    assert one.times(3) == Estimate(6.0, 3.0, 12.0, "a")


def test_spreads_of_two_sources_add_as_squares() -> None:
    both = Spread(math.exp(-0.3), math.exp(0.6), 0.3, 50).wider(
        Spread(math.exp(-0.4), math.exp(0.8), 0.4, 70)
    )
    assert math.log(both.low) == pytest.approx(-0.5)
    assert math.log(both.high) == pytest.approx(1.0)
    assert both.median_error == pytest.approx(0.5)
    # A source that only ever errs to one side takes nothing off the other.
    one_sided = Spread(1.1, 1.3, 0.1, 50).wider(Spread(0.9, 1.1, 0.1, 50))
    assert one_sided.low == pytest.approx(0.9)


def test_the_fitted_parameters_are_what_they_are_called() -> None:
    for gpu in (fitted.H100_SXM, fitted.A100_SXM):
        for gemm in gpu.gemm.values():
            assert 0.5 < gemm.fit.compute_share <= 1
            assert 0.7 < gemm.fit.bandwidth_share <= 1
            assert 0 < gemm.fit.fixed_s < 2e-5
        for attention in (*gpu.prefill.values(), *gpu.decode.values()):
            assert all(0 < share <= 1 for share in attention.fit.compute_share.values())
            assert 0.7 < attention.fit.bandwidth_share <= 1


def test_a_class_of_few_points_takes_the_interval_of_its_neighbour() -> None:
    def spread(high: float) -> Spread:
        return Spread(0.9, high, 0.05, 100)

    known = {"m < 16, 10-100 us": spread(1.2), "m < 16": spread(1.5), "all": spread(2.0)}
    assert gemm_spread(known, 1, 50e-6).high == 1.2
    assert gemm_spread(known, 15, 1.0).high == 1.2
    assert gemm_spread(known, 1, 1e-6).high == 1.2
    assert gemm_spread({"m < 16": spread(1.5), "all": spread(2.0)}, 1, 1e-6).high == 1.5
    assert gemm_spread(known, 16, 50e-6).high == 2.0
    assert attention_spread({"< 15 us": spread(1.1), "all": spread(2.0)}, 1e-5).high == 1.1
    assert attention_spread({"< 15 us": spread(1.1), "all": spread(2.0)}, 2e-5).high == 2.0
