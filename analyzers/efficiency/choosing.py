"""Which efficiency model a device has: the fitted one, one scaled from it, or a plain roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from phaseprof.analyzers.efficiency import fitted
from phaseprof.analyzers.efficiency.boards import Board, find_board
from phaseprof.analyzers.efficiency.gemm import gemm_seconds
from phaseprof.analyzers.efficiency.model import (
    AttentionModel,
    Basis,
    EfficiencyModel,
    GemmModel,
    is_narrow,
    table_dtype,
)
from phaseprof.analyzers.efficiency.parameters import (
    FittedAttention,
    FittedGpu,
    GemmFit,
    Hardware,
    Spread,
)
from phaseprof.analyzers.efficiency.plain import Plain
from phaseprof.analyzers.efficiency.size_classes import ALL
from phaseprof.trace.meta import Ceilings, Device
from phaseprof.work.ops import GemmShape

#: The same chip with other memory or clocks: nothing was measured of it, but the kernels and their tiles are the same.
_SAME_CHIP = {ALL: Spread(low=1 / 1.1, high=1.1, median_error=0.05, points=0)}
#: Rows and columns of the largest product by which `phaseprof calibrate` measures a GPU.
_CALIBRATED = 8192
#: Largest 16-bit product over the dense peak of the H100, as collected in stas00/ml-engineering.
_H100_SUSTAINED = 794.5 / 989


def efficiency_for(
    ceilings: Ceilings, device: Device | None = None, *, more: Sequence[Ceilings] = ()
) -> EfficiencyModel:
    """The model of a device.

    Args:
        ceilings: Its roofs for the dtype that the model computes in, measured or from the datasheet.
        device: The device; None where there is only its datasheet, which says what board it is.
        more: Roofs for further dtypes. Without those of 8-bit floats, twice the 16-bit peak is taken for boards that
            multiply them.

    Returns:
        The fitted model for an H100 SXM and an A100 SXM 80 GB; for other GPUs in `BOARDS` one that is scaled from them,
        with a wider interval; for everything else a plain roofline, whose interval a measured run narrows
        (`EfficiencyModel.calibrated`).

    Raises:
        ValueError: If a roof is not positive.
    """
    roofs = {table_dtype(each.dtype): each for each in (*more, ceilings)}
    if any(each.flops_per_s <= 0 or each.bytes_per_s <= 0 for each in roofs.values()):
        raise ValueError("roofs are positive")
    plain = Plain(
        flops_per_s={each.dtype: each.flops_per_s for each in (*more, ceilings)},
        dtype=ceilings.dtype,
        bytes_per_s=ceilings.bytes_per_s,
    )
    board = find_board(device, ceilings)
    wide = next((roofs[name] for name in ("bfloat16",) if name in roofs), None)
    if wide is None and is_narrow(ceilings.dtype):
        wide = replace(ceilings, dtype="bfloat16", flops_per_s=ceilings.flops_per_s / 2)
    if board is None or wide is None:
        return EfficiencyModel(
            basis=Basis.ROOFLINE,
            reference=f"plain roofline ({ceilings.source}); a measured run narrows it",
            dtype=ceilings.dtype,
            plain=plain,
        )
    roofs.setdefault("bfloat16", wide)
    gemms = {name: _gemm(board, name, roofs) for name in _tables(board)}
    hardware = gemms["bfloat16"].hardware
    gpu = board.nearest if board.nearest.prefill else fitted.H100_SXM
    extra = _extra(board, gpu)
    every = None if extra is None else extra[ALL]
    return EfficiencyModel(
        basis=Basis.FITTED if board.measured else Basis.SCALED,
        reference=_reference(board),
        dtype=ceilings.dtype,
        plain=plain,
        gemms=gemms,
        prefill=_attention(gpu.prefill, hardware, board, every),
        decode=_attention(gpu.decode, hardware, board, every),
    )


def _tables(board: Board) -> list[str]:
    """Dtypes that the board has units for, and that were fitted."""
    tables = list(fitted.H100_SXM.gemm)
    return [name for name in tables if board.narrow or not is_narrow(name)]


def _gemm(board: Board, name: str, roofs: Mapping[str, Ceilings]) -> GemmModel:
    gpu = board.nearest if name in board.nearest.gemm else fitted.H100_SXM
    known = gpu.gemm[name]
    fit = known.fit
    if board.sustained is not None:
        fit = replace(fit, compute_share=fit.compute_share * board.sustained / _H100_SUSTAINED)
    return GemmModel(
        fit=fit,
        hardware=_hardware(board, fit, _roof(name, roofs)),
        spreads=known.spreads,
        extra=_extra(board, gpu),
    )


def _extra(board: Board, gpu: FittedGpu) -> Mapping[str, Spread] | None:
    """What taking the parameters of a GPU for a board adds to their spreads."""
    if gpu is not board.nearest:
        return fitted.SCALED
    if board.measured:
        return None
    return _SAME_CHIP if board.same_chip else fitted.SCALED


def _roof(name: str, roofs: Mapping[str, Ceilings]) -> Ceilings:
    """Of the dtype itself, of the other 8-bit ones, or by twice the 16-bit peak."""
    for other in (name, "float8_e4m3fn", "float8_block") if is_narrow(name) else (name,):
        if other in roofs:
            return roofs[other]
    return replace(roofs["bfloat16"], flops_per_s=2 * roofs["bfloat16"].flops_per_s)


def _hardware(board: Board, fit: GemmFit, roof: Ceilings) -> Hardware:
    """The board with peaks that the shares of the fit are of.

    A measured roof is what a large product sustains, not the peak: the peak is then such that the model gives the
    measured rate for the product that it was measured with. The same holds for the bandwidth.
    """
    hardware = Hardware(
        units=board.units,
        flops_per_s=roof.flops_per_s,
        bytes_per_s=roof.bytes_per_s,
        cache_bytes=board.cache_bytes,
    )
    if roof.source != "measured":
        return hardware
    bytes_per_s = roof.bytes_per_s / fit.bandwidth_share
    size = _CALIBRATED
    shape = GemmShape(size, size, size, round(size * size * fit.element_bytes))
    peak = roof.flops_per_s / fit.compute_share
    for _ in range(3):
        hardware = replace(hardware, flops_per_s=peak, bytes_per_s=bytes_per_s)
        modelled = shape.flops / gemm_seconds(shape, fit, hardware)
        peak *= roof.flops_per_s / modelled
    return replace(hardware, flops_per_s=peak)


def _attention(
    known: Mapping[int, FittedAttention], hardware: Hardware, board: Board, extra: Spread | None
) -> dict[int, AttentionModel]:
    models = {}
    for size, each in known.items():
        fit = each.fit
        if board.sustained is not None:
            moved = board.sustained / _H100_SUSTAINED
            shares = {width: share * moved for width, share in fit.compute_share.items()}
            fit = replace(fit, compute_share=shares)
        models[size] = AttentionModel(fit, hardware, each.spreads, extra)
    return models


def _reference(board: Board) -> str:
    gpu: FittedGpu = board.nearest
    if not board.measured:
        return f"scaled from {gpu.board} ({gpu.source}) to {board.board}"
    if gpu.prefill:
        return f"fitted to {gpu.board}: {gpu.source}"
    return f"fitted to {gpu.board}: {gpu.source}; attention scaled from {fitted.H100_SXM.board}"
