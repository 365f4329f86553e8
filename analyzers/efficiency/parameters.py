"""What the formulas of the efficiency model need to know of a device and of its kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU, as far as the formulas know it.

    Attributes:
        units: Streaming multiprocessors (compute units, for AMD).
        flops_per_s: Dense peak of matrix multiplication, of the dtype that is multiplied in.
        bytes_per_s: Peak memory bandwidth.
        cache_bytes: Size of the last cache before the memory; 0 if it is not known.
    """

    units: int
    flops_per_s: float
    bytes_per_s: float
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A shape in which a kernel cuts the result.

    Attributes:
        rows, columns: Its size, in elements of the result.
        from_rows, to_rows: The kernel is used for matrices of so many rows, both included.
    """

    rows: int
    columns: int
    from_rows: int = 1
    to_rows: int = 2**31


@dataclass(frozen=True, slots=True)
class GemmFit:
    """Parameters of matrix products of one dtype. Times are in seconds.

    Attributes:
        tiles: Shapes of tiles that the library chooses from.
        splits: Into how many parts the inner dimension may be cut.
        element_bytes: Of an element of both inputs. The result has two bytes an element.
        compute_share: Sustained rate over the dense peak.
        bandwidth_share: Sustained over peak bandwidth.
        load_bytes_per_s: What one multiprocessor loads from the cache, at most.
        tile_s: Beginning and end of a tile: filling the pipeline, writing the result.
        fixed_s: Cost of the call.
        overlap: Exponent of the norm that joins computing and memory: 1 is one after the other, infinity is all at
            once.
        tile_overlap: The same, of computing and loading within a tile.
        wave_rounding: 1 if the last wave of tiles takes as long as a full one, 0 if the work is shared out evenly.
        split_s: What cutting the inner dimension costs.
        reduce_bytes_per_s: How fast partial results are summed.
        quantize_row_s: Time of a row's quantization to the input dtype; 0 where inputs come as they are.
        quantize_per_s: Elements that are quantized in a second; 0 likewise.
    """

    tiles: tuple[Tile, ...]
    splits: tuple[int, ...]
    element_bytes: float
    compute_share: float
    bandwidth_share: float
    load_bytes_per_s: float
    tile_s: float
    fixed_s: float
    overlap: float
    tile_overlap: float
    wave_rounding: float
    split_s: float = 0.0
    reduce_bytes_per_s: float = 0.0
    quantize_row_s: float = 0.0
    quantize_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """Parameters of fused attention (FlashAttention) of one phase and one width of keys and values.

    Attributes:
        compute_share: Sustained rate over the dense 16-bit peak, by head dimension.
        bandwidth_share: Sustained over peak bandwidth.
        cache_bytes_per_s: Bandwidth of keys and values that lie in the cache of the device.
        load_bytes_per_s: What one multiprocessor loads from the cache, at most.
        tile_s: Beginning and end of a tile of queries.
        query_bytes_per_s: How fast one multiprocessor reads queries and writes results.
        window_s: What a sliding window adds to a tile.
        fixed_s: Cost of the call.
        overlap, tile_overlap, wave_rounding: As in `GemmFit`.
        split_s: What cutting the keys among multiprocessors costs.
        write_bytes_per_s: How fast new keys and values are brought into the paged cache.
        write_token_s: What each token adds to that.
    """

    compute_share: Mapping[int, float]
    bandwidth_share: float
    cache_bytes_per_s: float
    load_bytes_per_s: float
    tile_s: float
    query_bytes_per_s: float
    window_s: float
    fixed_s: float
    overlap: float
    tile_overlap: float
    wave_rounding: float
    split_s: float
    write_bytes_per_s: float
    write_token_s: float


@dataclass(frozen=True, slots=True)
class Spread:
    """How measured times of one size class lie about the model, on shapes that the fit did not see.

    Attributes:
        low, high: Measured over modelled time, at 5 and at 95 % of the points, and 2 % beyond.
        median_error: Median of the absolute relative error.
        points: How many points there were.
    """

    low: float
    high: float
    median_error: float
    points: int

    def wider(self, other: Spread) -> Spread:
        """With the errors of another source on top: the logarithms of both add as squares."""
        return Spread(
            low=math.exp(-math.hypot(_below(self.low), _below(other.low))),
            high=math.exp(math.hypot(_above(self.high), _above(other.high))),
            median_error=math.hypot(self.median_error, other.median_error),
            points=min(self.points, other.points),
        )


def _below(ratio: float) -> float:
    return max(-math.log(ratio), 0.0)


def _above(ratio: float) -> float:
    return max(math.log(ratio), 0.0)


@dataclass(frozen=True, slots=True)
class FittedGemm:
    """Products of one dtype on one GPU.

    Attributes:
        fit: The parameters.
        flops_per_s: The dense peak that the shares are of.
        spreads: By size class.
    """

    fit: GemmFit
    flops_per_s: float
    spreads: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class FittedAttention:
    """Attention of one phase with keys and values of one width, as `FittedGemm`; the peak is the 16-bit one."""

    fit: AttentionFit
    spreads: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class FittedGpu:
    """All that was fitted to measurements of one GPU.

    Attributes:
        board: What people call it.
        hardware: With the dense 16-bit peak.
        gemm: By dtype, as torch spells it; ``float8_block`` has scales for blocks of 128 x 128 weights.
        prefill, decode: By bytes of an element of keys and values, 2 and 1; empty if none was measured.
        source: Where the measurements are from.
    """

    board: str
    hardware: Hardware
    gemm: Mapping[str, FittedGemm]
    prefill: Mapping[int, FittedAttention]
    decode: Mapping[int, FittedAttention]
    source: str
