"""The efficiency model of one device: how long an operation takes, and within which interval."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from phaseprof.analyzers.efficiency.attention import attention_seconds, element_bytes
from phaseprof.analyzers.efficiency.estimate import Estimate, total
from phaseprof.analyzers.efficiency.gemm import gemm_seconds
from phaseprof.analyzers.efficiency.parameters import (
    AttentionFit,
    GemmFit,
    Hardware,
    Spread,
)
from phaseprof.analyzers.efficiency.plain import Plain
from phaseprof.analyzers.efficiency.size_classes import attention_spread, gemm_spread
from phaseprof.work.count import Rows
from phaseprof.work.ops import AttentionShape, GemmShape

#: Queries of a row up to which it is served like decode: a token, or some drafts to verify.
_DECODE_QUERIES = 16
#: Keys and values of less than this are kept in 8 bits or fewer.
_NARROW_BYTES = 1.5
#: Products of several groups (experts) and streams of bytes were not in the measured tables: what is assumed of them.
_ASSUMED_GROUPS = Spread(low=1 / 1.3, high=1.3, median_error=0.15, points=0)
_ASSUMED_STREAM = Spread(low=0.7, high=1.5, median_error=0.2, points=0)


class Basis(enum.StrEnum):
    """What the model of a device rests on."""

    FITTED = "fitted"
    SCALED = "scaled"
    ROOFLINE = "roofline"


@dataclass(frozen=True, slots=True)
class GemmModel:
    """Products of one dtype on the device; ``extra`` is what scaling adds to the spreads, by the same classes."""

    fit: GemmFit
    hardware: Hardware
    spreads: Mapping[str, Spread]
    extra: Mapping[str, Spread] | None = None


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """Attention of one phase and width of keys and values on the device; ``extra`` is what scaling adds."""

    fit: AttentionFit
    hardware: Hardware
    spreads: Mapping[str, Spread]
    extra: Spread | None = None


@dataclass(frozen=True, slots=True)
class EfficiencyModel:
    """How long operations take on one device. `efficiency_for` makes it.

    Attributes:
        basis: What it rests on.
        reference: The same for people; each `Estimate` carries it.
        dtype: In which products are multiplied where a call does not say.
        plain: The roofline of the device: what is used where nothing was fitted.
        gemms: By dtype (`table_dtype`); empty for a plain roofline.
        prefill, decode: By bytes of an element of keys and values, 2 and 1.
        known_spread: Relative half-width of the 90 % interval, from measured runs of this device; replaces the spreads.
    """

    basis: Basis
    reference: str
    dtype: str
    plain: Plain
    gemms: Mapping[str, GemmModel] = field(default_factory=dict)
    prefill: Mapping[int, AttentionModel] = field(default_factory=dict)
    decode: Mapping[int, AttentionModel] = field(default_factory=dict)
    known_spread: float | None = None

    def gemm(self, shape: GemmShape, dtype: str | None = None) -> Estimate:
        """One call of a product, with cold weights.

        Args:
            shape: Rows, columns, inner dimension; weights as they are stored, which may be narrower than ``dtype``.
            dtype: In which it is multiplied, as torch spells it; ``float8_block`` for 8-bit floats with scales for
                blocks of weights. A dtype that the device has no units for is multiplied in 16 bits.
        """
        wanted = dtype or self.dtype
        model = self.gemms.get(table_dtype(wanted))
        if model is None and is_narrow(wanted):
            model = self.gemms.get("bfloat16")
        if model is None:
            return self._estimate(self.plain.gemm_s(shape, wanted), self.plain.spread)
        seconds = gemm_seconds(shape, model.fit, model.hardware)
        spread = gemm_spread(model.spreads, shape.m, seconds)
        if model.extra is not None:
            spread = spread.wider(gemm_spread(model.extra, shape.m, seconds))
        if shape.groups > 1:
            spread = spread.wider(_ASSUMED_GROUPS)
        return self._estimate(seconds, spread)

    def attention(self, shape: AttentionShape, dtype: str | None = None) -> Estimate:
        """Attention of one layer, with keys and values from memory, and bringing new ones to the cache.

        Args:
            shape: Over the rows of a pass. Rows of few queries on a filled cache are served as decode.
            dtype: Of the queries; it matters for a plain roofline only. That of the keys and values is in the shape.
        """
        rows = [row for row in shape.rows if row.query and row.sequences]
        if not rows:
            return self._estimate(0.0, self.plain.spread)
        if not self.prefill or not self.decode:
            seconds = self.plain.attention_s(replace(shape, rows=tuple(rows)), dtype or self.dtype)
            return self._estimate(seconds, self.plain.spread)
        estimates = []
        for models, some in (
            (self.prefill, [row for row in rows if not _is_decode(row)]),
            (self.decode, [row for row in rows if _is_decode(row)]),
        ):
            if some:
                estimates.append(self._attention(replace(shape, rows=tuple(some)), models))
        return total(estimates)

    def streaming(self, moved_bytes: float) -> Estimate:
        """One call that reads and writes memory and hardly computes: a norm, a lookup, a state.

        No such call is in the measured tables; the sustained bandwidth of products is taken, and a wide interval.

        Args:
            moved_bytes: Read and written.
        """
        model = self.gemms.get("bfloat16")
        if model is None:
            return self._estimate(self.plain.streaming_s(moved_bytes), self.plain.spread)
        sustained = model.hardware.bytes_per_s * model.fit.bandwidth_share
        return self._estimate(model.fit.fixed_s + moved_bytes / sustained, _ASSUMED_STREAM)

    def calibrated(
        self,
        *,
        compute_factor: float = 1.0,
        memory_factor: float = 1.0,
        fixed_s: float | None = None,
        spread: float | None = None,
        reference: str | None = None,
    ) -> EfficiencyModel:
        """The model moved to what was measured on the device.

        Args:
            compute_factor: How much longer computing takes than this model has it.
            memory_factor: The same of moving bytes.
            fixed_s: What each call costs; None leaves what it is.
            spread: Relative half-width of the 90 % interval, for all sizes; None leaves the intervals.
            reference: What it rests on now, for people.

        Raises:
            ValueError: If a factor is not positive, or another figure is negative.
        """
        if compute_factor <= 0 or memory_factor <= 0:
            raise ValueError("factors are positive")
        if (fixed_s or 0) < 0 or (spread or 0) < 0:
            raise ValueError("fixed_s and spread are not negative")

        def slower(hardware: Hardware) -> Hardware:
            return replace(
                hardware,
                flops_per_s=hardware.flops_per_s / compute_factor,
                bytes_per_s=hardware.bytes_per_s / memory_factor,
            )

        def attention(model: AttentionModel) -> AttentionModel:
            fit = model.fit if fixed_s is None else replace(model.fit, fixed_s=fixed_s)
            return replace(model, fit=fit, hardware=slower(model.hardware))

        def gemm(model: GemmModel) -> GemmModel:
            fit = model.fit if fixed_s is None else replace(model.fit, fixed_s=fixed_s)
            return replace(model, fit=fit, hardware=slower(model.hardware))

        return replace(
            self,
            reference=self.reference if reference is None else reference,
            plain=self.plain.adapted(compute_factor, memory_factor, fixed_s),
            gemms={dtype: gemm(model) for dtype, model in self.gemms.items()},
            prefill={size: attention(model) for size, model in self.prefill.items()},
            decode={size: attention(model) for size, model in self.decode.items()},
            known_spread=self.known_spread if spread is None else spread,
        )

    def _attention(self, shape: AttentionShape, models: Mapping[int, AttentionModel]) -> Estimate:
        model = models[1 if element_bytes(shape) < _NARROW_BYTES else 2]
        seconds = attention_seconds(shape, model.fit, model.hardware)
        spread = attention_spread(model.spreads, seconds)
        if model.extra is not None:
            spread = spread.wider(model.extra)
        return self._estimate(seconds, spread)

    def _estimate(self, seconds: float, spread: Spread) -> Estimate:
        low, high = min(spread.low, 1.0), max(spread.high, 1.0)
        if self.known_spread is not None:
            low, high = 1 / (1 + self.known_spread), 1 + self.known_spread
        return Estimate(seconds, seconds * low, seconds * high, self.reference)


def table_dtype(dtype: str) -> str:
    """The dtype under which products of this one were fitted."""
    if dtype == "float16":
        return "bfloat16"
    if dtype.startswith("float8") and dtype != "float8_block":
        return "float8_e4m3fn"
    return "float8_e4m3fn" if dtype == "int8" else dtype


def is_narrow(dtype: str) -> bool:
    """Whether it has 8 bits."""
    return table_dtype(dtype).startswith("float8")


def _is_decode(row: Rows) -> bool:
    return row.past > 0 and row.query <= _DECODE_QUERIES
