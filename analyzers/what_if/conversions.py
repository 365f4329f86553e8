"""What narrow formats cost beside the bytes that they save: quantizing inputs, converting keys and values, unpacking.

Products of two operands in 8 bits quantize their input first, in a kernel of its own, and do not reach their peak as
products in 16 bits do theirs. Attention converts keys and values of 8 bits as it reads them. Both cost a fixed time
each, which is why narrow formats gain least where operations are short. The constants are chosen so that measured
pairs of operations (vLLM on an H100, `benchmarks/what_if_changes.py`) lie within the interval in nine of ten cases.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from phaseprof.analyzers.what_if.changes import Setting, WeightFormat
from phaseprof.analyzers.what_if.measured import Measured, PartKind, PhaseStep
from phaseprof.analyzers.what_if.work import Factors, roofs_of
from phaseprof.work.ops import OpKind


class Case(enum.Enum):
    """How what is not known is taken to be. Constants in threes are in this order."""

    LIKELY = 0
    BEST = 1
    WORST = 2


#: Time of a product to quantize its input: fixed, and bytes moved for each of its elements.
QUANTIZE_S, QUANTIZE_BYTES = (5e-6, 2e-6, 12e-6), (6.0, 3.0, 14.0)
#: The part of the higher peak of 8 bits that products gain.
NARROW_PEAK = (0.75, 1.0, 0.5)
#: Time of attention in a layer to convert keys and values: fixed, and a part of the time of their bytes as they were.
CONVERT_S, CONVERT_SHARE = (6e-6, 1.5e-6, 14e-6), (0.10, 0.0, 0.30)
#: Products of weights alone in fewer bits unpack them: their computing takes so many times as long.
UNPACK = (1.0, 1.0, 1.2)
#: On a CPU unpacking takes a part of what reading less saves: what is left of that.
UNPACKED_ON_CPU = (0.7, 1.0, 0.0)
#: Products of a layer, where they were not recorded one by one: qkv, o, gate and up, down.
_PRODUCTS = 4
#: Products that stay in 16 bits.
_WIDE = (OpKind.LM_HEAD.value, OpKind.ROUTER.value)


def reached_peak(measured: Measured, setting: Setting, gain: float, case: Case) -> float:
    """The peak of matrices over that of the model's dtype, as far as products reach it.

    Args:
        measured: The run. setting: What is different.
        gain: What the datasheet says.
        case: How it is taken to be.
    """
    if setting.weights is None:
        return 1.0
    if gain > 1:
        return max(gain * NARROW_PEAK[case.value], 1.0)
    return 1 / UNPACK[case.value] if measured.hardware.kind != "cpu" else 1.0


def as_read(measured: Measured, setting: Setting, by: Factors, case: Case) -> Factors:
    """The factors of a step's work as its time feels them: on a CPU, unpacking weights takes back a part of what
    reading fewer bytes saves.

    Args:
        measured: The run. setting: What is different.
        by: The factors by bytes alone.
        case: How what is not known is taken to be.
    """
    device = setting.device or measured.hardware
    if device.kind != "cpu" or setting.weights is None or by.weights >= 1:
        return by
    weights = 1 - UNPACKED_ON_CPU[case.value] * (1 - by.weights)
    return replace(by, weights=weights, experts=by.experts / by.weights * weights)


def conversion_s(
    measured: Measured, setting: Setting, step: PhaseStep, by: Factors, case: Case
) -> float:
    """Time of a step in conversions that were not there before.

    Args:
        measured: The run. setting: What is different.
        step: One of its steps. by: How its work changes.
        case: How what is not known is taken to be.
    """
    device = setting.device or measured.hardware
    if device.kind == "cpu" or not step.parts:
        return 0.0
    found = 0.0
    roofs = roofs_of(measured, setting)
    if by.narrow_peak > 1 and setting.weights is not WeightFormat.INT4:
        calls, elements = products(measured)
        moved = QUANTIZE_BYTES[case.value] * elements * step.tokens * by.tokens / by.ranks
        found += calls * QUANTIZE_S[case.value] + moved / roofs.bytes_per_s
    if setting.kv is not None:
        layers = sum(group.layers for group in measured.cost.attention)
        before = step.of(PartKind.ATTENTION).kv_bytes * by.sequences / roofs.bytes_per_s
        found += layers * CONVERT_S[case.value]
        found += CONVERT_SHARE[case.value] * before / by.kv_ranks
    return found


def products(measured: Measured) -> tuple[int, float]:
    """Products of a step that would be quantized, and the elements that all of them take in for each token."""
    cost = measured.cost
    narrow = [matrix for matrix in cost.matmuls if matrix.role not in _WIDE]
    if narrow:
        calls = sum(matrix.count for matrix in narrow)
        return calls, float(sum(matrix.count * matrix.inputs for matrix in narrow))
    layers = sum(group.layers for group in cost.attention)
    width = cost.hidden_size or max(
        (group.query_heads * group.qk_head_dim for group in cost.attention), default=0
    )
    return layers * _PRODUCTS, float(layers * _PRODUCTS * width)
