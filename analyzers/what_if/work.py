"""The work of a step under another setting, and its time at the roofs.

Each part of a step changes in its own way. With r times the tokens, b times the sequences, weights of w times the bits,
keys and values of c times the bits, and each layer split over n times the ranks:

    part           FLOPs    weight bytes            KV bytes
    matrices       r / n    w / n
    output head    r / n    1 / n
    experts        r / n    w / n, those reached
    attention      r / n                            b c / n, as far as there are heads to split
    states         r / n                            b / n
    tables                  r

Speculation multiplies the tokens of a step and not its sequences: weights, keys and values are read once for all of
its drafts.
Formats with 8 bits for both operands raise the peak of matrices and experts; weights alone do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phaseprof.analyzers.what_if.changes import LATENTS, Hardware, Setting, WeightFormat
from phaseprof.analyzers.what_if.measured import (
    Measured,
    Part,
    PartKind,
    PhaseStep,
    expert_bytes,
)
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import AttentionCost, ModelCost

#: Bits of the dtypes that weights, keys and values are stored in.
_BITS = {
    "float64": 64.0,
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "float8_e4m3fn": 8.0,
    "float8_e5m2": 8.0,
    "int8": 8.0,
}
#: Formats within so much of each other are the same.
_SAME_BITS = 0.06
#: Latents of a token and layer over the width of a head: 4 of compressed keys and values, 1/2 of positions; and what
#: attention to them computes over what it does with heads of their own (DeepSeek-V2, arXiv 2405.04434, section 2.1).
LATENT_WIDTH, POSITION_WIDTH = 4.0, 0.5


@dataclass(frozen=True, slots=True)
class Factors:
    """How the parts of a step change, as the module says.

    Attributes:
        tokens: r. sequences: b.
        weights: w of the matrices, the head not counted. experts: That of experts, with how many are reached.
        kv: c, with the heads.
        attention_flops: What attention computes more for each token.
        ranks: n. kv_ranks: n as far as keys and values can be split.
        narrow_peak: The peak of matrices and experts over that of the model's dtype.
        dtype: Bytes of whatever else is stored in the dtype of the model, over those of now: a float32 model on a
            device of which only 16-bit roofs are known runs in 16 bits.
    """

    tokens: float = 1.0
    sequences: float = 1.0
    weights: float = 1.0
    experts: float = 1.0
    kv: float = 1.0
    attention_flops: float = 1.0
    ranks: float = 1.0
    kv_ranks: float = 1.0
    narrow_peak: float = 1.0
    dtype: float = 1.0


def weight_bits(cost: ModelCost) -> float:
    """Bits of a weight as it is stored now."""
    packed = cost.bits_per_weight
    if packed is not None:
        return packed
    dtype = cost.stored[0][0] if cost.stored else cost.dtype
    return _BITS.get(dtype, _BITS.get(cost.dtype, 16.0))


def kv_bits(cost: ModelCost) -> float | None:
    """Bits of an element of keys and values now, by what a token adds to the cache; None where there are none."""
    elements = taken = 0
    for group in cost.attention:
        if group.borrows or _latent(group):
            continue
        elements += group.layers * group.kv_heads * (group.qk_head_dim + group.v_head_dim)
        taken += group.layers * group.kv_bytes_per_token
    if not elements or not taken:
        return None
    return 8 * taken / elements


def kv_heads(cost: ModelCost) -> int:
    """Heads of keys and values of most layers; 0 without attention that keeps any."""
    groups = [group for group in cost.attention if not _latent(group)]
    return max(groups, key=lambda group: group.layers).kv_heads if groups else 0


def query_heads(cost: ModelCost) -> int:
    """Query heads of most layers."""
    return max(cost.attention, key=lambda group: group.layers).query_heads


def same_bits(one: float, other: float) -> bool:
    """Whether two formats take the same bytes."""
    return abs(one - other) <= _SAME_BITS * max(one, other)


def _latent(group: AttentionCost) -> bool:
    return bool(group.expand_flops_per_token or group.absorbed_query_tokens)


def has_latents(cost: ModelCost) -> bool:
    """Whether the model keeps latents already."""
    return any(_latent(group) for group in cost.attention)


def factors(measured: Measured, setting: Setting, step: PhaseStep) -> Factors:
    """How the parts of a step change under a setting.

    Args:
        measured: The run.
        setting: What is different.
        step: One of its steps.
    """
    cost = measured.cost
    sequences = batch_factor(measured, setting, step)
    tokens = token_factor(measured, setting, step) * sequences
    if step.phase is Phase.MIXED and step.tokens:
        tokens = _mixed_tokens(measured, setting, step, sequences)
    dtype = _BITS[dtype_there(measured, setting)] / _BITS.get(measured.dtype, 16.0)
    if dtype_there(measured, setting) == measured.dtype:
        dtype = 1.0
    weights = dtype
    if setting.weights is not None:
        weights = setting.weights.bits / weight_bits(cost)
    kv, scored = _kv_factors(measured, setting, dtype)
    if step.phase not in (Phase.DECODE, Phase.MIXED):
        # Prefill expands latents, and attends with heads of their own as before.
        scored = 1.0
    ranks = 1.0 if setting.ranks is None else setting.ranks / measured.ranks
    reached = 1.0
    if cost.experts and step.tokens:
        before = expert_bytes(cost, step.tokens)
        reached = expert_bytes(cost, step.tokens * tokens) / before if before else 1.0
    return Factors(
        tokens=tokens,
        sequences=sequences,
        weights=weights,
        experts=weights * reached,
        kv=kv,
        attention_flops=scored,
        ranks=ranks,
        kv_ranks=_split(cost, setting, ranks),
        narrow_peak=narrow_peak(measured, setting),
        dtype=dtype,
    )


def batch_factor(measured: Measured, setting: Setting, step: PhaseStep) -> float:
    """How many times the sequences of a step: of prefill only where it runs as many at once as decode does."""
    decode = measured.step(Phase.DECODE) or measured.step(Phase.MIXED) or measured.largest
    if setting.sequences is None:
        return 1.0
    if step.phase is not Phase.DECODE and step.phase is not Phase.MIXED:
        together = step.sequences >= decode.sequences / 2 and decode is not step
        alone = decode is step
        if not together and not alone:
            return 1.0
        if together and _continuous(measured):
            return 1.0
    return setting.sequences / decode.sequences


def _continuous(measured: Measured) -> bool:
    """Whether requests come and go one by one, so that a larger batch of decode is no larger batch of prompts."""
    return measured.engine.startswith("vllm") or measured.step(Phase.MIXED) is not None


def token_factor(measured: Measured, setting: Setting, step: PhaseStep) -> float:
    """How many times the tokens of each sequence: drafts are verified beside the token that is decoded anyhow."""
    wanted = setting.speculation
    if wanted is None or step.phase is not Phase.DECODE:
        return 1.0
    return (wanted.drafts + 1) / (step.drafts + 1)


def _mixed_tokens(measured: Measured, setting: Setting, step: PhaseStep, sequences: float) -> float:
    prefill, decode = step.prefill_tokens, step.decode_tokens
    if setting.chunk_tokens is not None:
        prefill = chunk_after(measured, setting, step)
    drafts = setting.speculation
    if drafts is not None:
        plain = measured.step(Phase.DECODE)
        decode *= (drafts.drafts + 1) / ((plain.drafts if plain else 0.0) + 1)
    return (prefill + decode * sequences) / step.tokens


def chunk_after(measured: Measured, setting: Setting, step: PhaseStep) -> float:
    """Prefill tokens of a mixed step with chunks of the setting: no more than a prompt has."""
    wanted = float(setting.chunk_tokens or step.prefill_tokens)
    longest = max(measured.prompt_tokens, step.prefill_tokens)
    return min(wanted, longest)


def _kv_factors(measured: Measured, setting: Setting, dtype: float) -> tuple[float, float]:
    """Bytes of keys and values, and FLOPs of attention, over those of now."""
    cost = measured.cost
    size, scored = dtype, 1.0
    if setting.kv is not None:
        size = setting.kv.bits / (kv_bits(cost) or setting.kv.bits)
    heads = kv_heads(cost)
    if setting.kv_heads == LATENTS and heads:
        size *= (LATENT_WIDTH + POSITION_WIDTH) / (2 * heads)
        scored = (2 * LATENT_WIDTH + POSITION_WIDTH) / 2
    elif setting.kv_heads is not None and heads:
        size *= setting.kv_heads / heads
    return size, scored


def _split(cost: ModelCost, setting: Setting, ranks: float) -> float:
    """Heads of keys and values are split as far as there are any; beyond, and of latents, ranks hold copies."""
    if has_latents(cost) or setting.kv_heads == LATENTS:
        return 1.0
    return min(ranks, float(max(setting.kv_heads or kv_heads(cost), 1)))


def narrow_peak(measured: Measured, setting: Setting) -> float:
    """The peak of products with both operands in 8 bits over that of the model's dtype; 1 where the device has none,
    and for weights alone."""
    narrow = {WeightFormat.FP8: "float8", WeightFormat.INT8: "int8"}
    wanted = None if setting.weights is None else narrow.get(setting.weights)
    device = setting.device or measured.hardware
    if wanted is None or device.kind == "cpu":
        return 1.0
    gain = device.peak_gain(dtype_there(measured, setting), wanted)
    return max(gain, 1.0) if gain is not None else 1.0


def dtype_there(measured: Measured, setting: Setting) -> str:
    """The dtype that the model computes in: of another device bfloat16, where that does not know float32."""
    device = setting.device
    wide = measured.dtype == "float32"
    if device is None or not wide or device.has(measured.dtype) or not device.has("bfloat16"):
        return measured.dtype
    return "bfloat16"


def changed(parts: tuple[Part, ...], by: Factors) -> tuple[Part, ...]:
    """The parts of a step under other factors."""
    return tuple(_changed(part, by) for part in parts)


def _changed(part: Part, by: Factors) -> Part:
    flops = part.flops * by.tokens / by.ranks
    if part.kind is PartKind.TABLES:
        return replace(part, flops=flops, weight_bytes=part.weight_bytes * by.tokens * by.dtype)
    if part.kind is PartKind.ATTENTION:
        kv = part.kv_bytes * by.sequences * by.kv / by.kv_ranks
        return replace(part, flops=flops * by.attention_flops, kv_bytes=kv)
    if part.kind is PartKind.STATES:
        return replace(
            part, flops=flops, kv_bytes=part.kv_bytes * by.sequences * by.dtype / by.ranks
        )
    lighter = {PartKind.MATRICES: by.weights, PartKind.EXPERTS: by.experts}.get(part.kind, by.dtype)
    return replace(part, flops=flops, weight_bytes=part.weight_bytes * lighter / by.ranks)


@dataclass(frozen=True, slots=True)
class RoofTime:
    """A step at the roofs.

    Attributes:
        floor_s: Sum over the parts of the longer of compute_s and memory_s; on a CPU of both.
        compute_s, memory_s: Of all parts.
    """

    floor_s: float
    compute_s: float
    memory_s: float


def at_roofs(
    parts: tuple[Part, ...], roofs: Ceilings, peak: float = 1.0, *, on_cpu: bool = False
) -> RoofTime:
    """The time of parts at the roofs, one after the other.

    Args:
        parts: Of a step.
        roofs: Of the device, for the model's dtype.
        peak: The peak of matrices and experts over that of the dtype.
        on_cpu: Reading and computing take turns, as they do on cores that do both.
    """
    floor = compute = memory = 0.0
    for part in parts:
        narrow = part.kind in (PartKind.MATRICES, PartKind.EXPERTS)
        computing = part.flops / (roofs.flops_per_s * (peak if narrow else 1.0))
        reading = (part.weight_bytes + part.kv_bytes) / roofs.bytes_per_s
        floor += computing + reading if on_cpu else max(computing, reading)
        compute += computing
        memory += reading
    return RoofTime(floor, compute, memory)


def roofs_of(measured: Measured, setting: Setting) -> Ceilings:
    """The roofs that a setting runs under.

    Of another device these are the present roofs times the ratio of the two datasheets, where both have one: what a
    matmul or a read sustains here of its datasheet, it is taken to sustain there. Else they are what is known of it.

    Raises:
        KeyError: If no roof of the other device is known for the dtype.
    """
    now = measured.basis.ceilings
    assert now is not None
    other = setting.device
    if other is None or other.name == measured.hardware.name:
        return now
    dtype = dtype_there(measured, setting)
    here, there = measured.hardware.sheet.get(dtype), other.sheet.get(dtype)
    if here is None or there is None or dtype != measured.dtype:
        return other.roofs.get(dtype) or other.sheet[dtype]
    return replace(
        now,
        device_key=there.device_key,
        flops_per_s=now.flops_per_s * there.flops_per_s / here.flops_per_s,
        bytes_per_s=now.bytes_per_s * there.bytes_per_s / here.bytes_per_s,
        reference=f"{there.reference}, over {here.reference}",
    )


def has_roofs(measured: Measured, device: Hardware) -> bool:
    """Whether a device's roofs are known for the dtype that the model would compute in."""
    return device.has(dtype_there(measured, Setting(device=device)))
