"""What cannot be done to a run: what device, engine or model do not allow, each with its reason."""

from __future__ import annotations

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.steps.collectives import LINKS
from phaseprof.analyzers.what_if.after import graphs_apply
from phaseprof.analyzers.what_if.changes import (
    Batch,
    Change,
    Chunk,
    Graphs,
    Hardware,
    KvCache,
    KvHeads,
    Mla,
    OtherDevice,
    Setting,
    Speculate,
    TensorParallel,
    WeightFormat,
    Weights,
)
from phaseprof.analyzers.what_if.measured import Measured
from phaseprof.analyzers.what_if.results import Refused
from phaseprof.analyzers.what_if.work import (
    has_latents,
    has_roofs,
    kv_bits,
    kv_heads,
    query_heads,
    same_bits,
    weight_bits,
)
from phaseprof.analyzers.wording import number, percent
from phaseprof.phases import Phase

#: A format that saves less than this part of the bits is none that one would change to.
_FEWER_BITS = 0.1
#: Models of so few bits a weight are packed in 4.
_FOUR_BITS = 6.0
#: Gaps below this part of a step are not worth a change.
_GAPS = 0.03

_TIMELINE = "record a few passes with `--collect default,kernels`"


def refused(measured: Measured, change: Change, setting: Setting | None = None) -> Refused | None:
    """Why a change cannot be made; None if it can.

    Args:
        measured: The run.
        change: What is asked for.
        setting: What else is asked for: on another device another thing may be possible.
    """
    device = (setting.device if setting is not None else None) or measured.hardware
    found = _why(measured, change, device)
    if found is None:
        return None
    why, fix = found
    return Refused(change.title, why, fix)


def is_same(measured: Measured, change: Change) -> bool:
    """Whether a change asks for what the run has already."""
    cost = measured.cost
    decode = measured.step(Phase.DECODE) or measured.largest
    match change:
        case Weights(format=wanted):
            return _packed_as(weight_bits(cost), wanted)
        case KvCache(format=wanted):
            now = kv_bits(cost)
            return now is not None and same_bits(now, wanted.bits)
        case Batch(sequences=wanted):
            return wanted == decode.sequences
        case Speculate(speculation=wanted):
            return wanted.drafts == decode.drafts
        case Chunk(tokens=wanted):
            mixed = measured.step(Phase.MIXED)
            return mixed is not None and wanted == mixed.prefill_tokens
        case KvHeads(heads=wanted):
            return wanted == kv_heads(cost) and not has_latents(cost)
        case Mla():
            return has_latents(cost)
        case OtherDevice(hardware=wanted):
            return wanted.name == measured.hardware.name
        case TensorParallel(ranks=wanted):
            return wanted == measured.ranks
        case Graphs():
            return decode.graph_share >= thresholds.BY_GRAPHS.value
    return False


def _packed_as(bits: float, wanted: WeightFormat) -> bool:
    if wanted is WeightFormat.INT4:
        return bits < _FOUR_BITS
    return same_bits(bits, wanted.bits)


def _why(measured: Measured, change: Change, device: Hardware) -> tuple[str, str] | None:
    match change:
        case Weights(format=wanted):
            return _weights(measured, wanted, device)
        case KvCache():
            return _kv(measured, change, device)
        case Batch():
            return None
        case Graphs():
            return _graphs(measured, device)
        case Speculate():
            if measured.step(Phase.DECODE) is None:
                return "the run has no step of decode alone", ""
        case Chunk():
            if measured.step(Phase.MIXED) is None:
                return "no step of this run holds prefill beside decode: chunks act on those", ""
        case KvHeads(heads=heads):
            return _heads(measured, heads)
        case Mla():
            if not kv_heads(measured.cost) and not has_latents(measured.cost):
                return "the model keeps no keys and values", ""
        case OtherDevice(hardware=other):
            if not has_roofs(measured, other):
                known = ", ".join(sorted({*other.roofs, *other.sheet})) or "no dtype"
                return f"its roofs are known for {known}, not for {measured.dtype}", ""
        case TensorParallel(ranks=ranks):
            return _tensor_parallel(measured, ranks, device)
    return None


def _weights(measured: Measured, wanted: WeightFormat, device: Hardware) -> tuple[str, str] | None:
    bits = weight_bits(measured.cost)
    if _packed_as(bits, wanted):
        return f"the weights are stored in {number(round(bits, 1))} bits already", ""
    if wanted.bits > bits * (1 - _FEWER_BITS):
        return f"the weights take {number(round(bits, 1))} bits each already", ""
    if wanted is WeightFormat.FP8 and device.peak_gain(measured.dtype, "float8") is None:
        what = "a CPU" if device.kind == "cpu" else device.name
        return f"{what} has no FP8 matmul that is known of", ""
    return None


def _kv(measured: Measured, change: KvCache, device: Hardware) -> tuple[str, str] | None:
    now = kv_bits(measured.cost)
    if now is None:
        return "the bytes of this model's cache are not keys and values of a known width", ""
    if change.format.bits > now * (1 - _FEWER_BITS) and not same_bits(now, change.format.bits):
        return f"keys and values take {number(round(now, 1))} bits an element already", ""
    if same_bits(now, change.format.bits):
        return f"keys and values are stored in {number(round(now, 1))} bits already", ""
    if change.format.value == "fp8" and device.kind == "cpu":
        return "attention on a CPU takes no FP8 keys and values", ""
    return None


def _graphs(measured: Measured, device: Hardware) -> tuple[str, str] | None:
    step = next((each for each in measured.steps if graphs_apply(each)), None)
    if device.kind == "cpu":
        return "a CPU has no CUDA graphs", ""
    if step is None:
        return "the run has no step of decode alone, whose shapes repeat", ""
    if step.graph_share >= thresholds.BY_GRAPHS.value:
        return f"graphs launch {percent(step.graph_share)} of the kernels of decode already", ""
    if step.idle_s is None:
        return "the gaps between its kernels were not measured", _TIMELINE
    gaps = step.idle_s / step.step_s
    if gaps < _GAPS:
        idles = f"idles {percent(gaps)} of" if gaps else "never idles in"
        return f"the device {idles} a decode step", ""
    return None


def _heads(measured: Measured, heads: int) -> tuple[str, str] | None:
    now = kv_heads(measured.cost)
    if has_latents(measured.cost) or not now:
        return "the model has no heads of keys and values of its own", ""
    queries = query_heads(measured.cost)
    if heads > queries or queries % heads:
        return f"{heads} is no divisor of its {queries} query heads", ""
    return None


def _tensor_parallel(measured: Measured, ranks: int, device: Hardware) -> tuple[str, str] | None:
    if ranks == measured.ranks:
        return None
    if device.kind == "cpu":
        return "collectives between CPUs are not modelled", ""
    if device.board not in LINKS:
        return f"what connects several {device.name} is not known", ""
    cost = measured.cost
    heads = query_heads(cost) * measured.ranks if cost.attention else 0
    if heads and heads % ranks:
        return f"{heads} query heads cannot be shared out evenly over {ranks} ranks", ""
    return None
