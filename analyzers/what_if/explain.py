"""The arithmetic of an outcome as lines, and what has to be known to believe it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phaseprof.analyzers.what_if import speculation
from phaseprof.analyzers.what_if.after import StepAfter
from phaseprof.analyzers.what_if.changes import LATENTS, Setting
from phaseprof.analyzers.what_if.conversions import (
    CONVERT_S,
    CONVERT_SHARE,
    NARROW_PEAK,
    QUANTIZE_BYTES,
    QUANTIZE_S,
    UNPACKED_ON_CPU,
    Case,
    reached_peak,
)
from phaseprof.analyzers.what_if.measured import Measured, Part
from phaseprof.analyzers.what_if.results import Term, Unit
from phaseprof.analyzers.what_if.work import (
    Factors,
    changed,
    dtype_there,
    factors,
    narrow_peak,
    roofs_of,
)
from phaseprof.analyzers.wording import byte_rate, flop_rate, number, percent
from phaseprof.phases import Phase

#: Times within this part of a step are the same.
_ROUNDING = 1e-9
#: Phases below this part of the time are left out of the arithmetic, but for the two that latencies come from.
_MINOR, _MAIN = 0.02, (Phase.PREFILL, Phase.DECODE)


def terms(
    measured: Measured, setting: Setting, steps: Sequence[StepAfter], yielded: float
) -> Iterator[Term]:
    """The lines, phase by phase, then those of requests.

    Args:
        measured: The run as it was.
        setting: What is different.
        steps: Its steps as they likely are then. yielded: Tokens of a decode step and sequence.
    """
    whole = sum(step.step_s * step.passes for step in measured.steps)
    for after in steps:
        step = after.step
        same = step.step_s == after.step_s and step.device_s == after.device_s
        minor = step.step_s * step.passes < _MINOR * whole and step.phase not in _MAIN
        if step.parts and not minor and not same:
            yield from _of_step(measured, setting, after)
    decode = measured.step(Phase.DECODE)
    if setting.speculation is not None and decode is not None:
        chance = speculation.acceptance(measured, setting, 0)
        drafts = setting.speculation.drafts
        yield Term(
            "tokens a step",
            "",
            1 + decode.accepted,
            yielded,
            Unit.TOKENS,
            f"(1 - a^(k+1)) / (1 - a) with a = {number(chance)}, k = {drafts}",
        )
        yield Term(
            "drafting a step",
            "",
            0.0,
            speculation.draft_s(measured, setting, 0),
            Unit.SECONDS,
            f"{drafts} drafts, each at a part of a decode step",
        )


def _of_step(measured: Measured, setting: Setting, after: StepAfter) -> Iterator[Term]:
    step, name = after.step, after.step.phase.value
    by = factors(measured, setting, step)
    then = changed(step.parts, by)
    roofs = roofs_of(measured, setting)
    yield Term(
        "weights read",
        name,
        _weights(step.parts),
        _weights(then),
        Unit.BYTES,
        _weights_formula(setting, by, on_cpu=measured.hardware.kind == "cpu"),
    )
    yield Term(
        "keys and values", name, _kv(step.parts), _kv(then), Unit.BYTES, _kv_formula(setting, by)
    )
    yield Term(
        "FLOPs",
        name,
        sum(part.flops for part in step.parts),
        sum(part.flops for part in then),
        Unit.FLOPS,
        _flops_formula(by),
    )
    on_cpu = (setting.device or measured.hardware).kind == "cpu"
    joined = (
        "FLOPs / peak + bytes / bandwidth" if on_cpu else "max(FLOPs / peak, bytes / bandwidth)"
    )
    reached = reached_peak(measured, setting, by.narrow_peak, Case.LIKELY)
    peak = f", {number(reached)}x for matrices" if reached != 1 else ""
    yield Term(
        "at the roofs (M)",
        name,
        after.roofs_before.floor_s,
        after.roofs.floor_s,
        Unit.SECONDS,
        f"sum over parts of {joined}, at {flop_rate(roofs.flops_per_s)}{peak} and "
        f"{byte_rate(roofs.bytes_per_s)}",
    )
    if after.converting_s:
        yield Term(
            "conversions (C)",
            name,
            0.0,
            after.converting_s,
            Unit.SECONDS,
            _conversion_formula(setting, by),
        )
    more = " + C" if after.converting_s else ""
    yield Term(
        "device at work (B)",
        name,
        step.device_s,
        after.device_s,
        Unit.SECONDS,
        f"B + g (M' - M){more}, g = {number(after.follows)}",
    )
    if step.comm_s or after.comm_s:
        yield Term(
            "exposed collectives",
            name,
            step.comm_s,
            after.comm_s,
            Unit.SECONDS,
            "2 all-reduces a layer: latency + bytes / bandwidth",
        )
    if step.idle_s is not None and after.idle_s is not None:
        formula = _idle_formula(setting, after, after.idle_s - step.idle_s)
        yield Term("device idle", name, step.idle_s, after.idle_s, Unit.SECONDS, formula)
    yield Term("step", name, step.step_s, after.step_s, Unit.SECONDS, _step_formula(setting, after))


def _idle_formula(setting: Setting, after: StepAfter, change_s: float) -> str:
    if setting.graphs and change_s < 0:
        return "under graphs: 1 µs between kernels, and a tenth of the idle time"
    if change_s > _ROUNDING * after.step_s:
        return f"the host sets the pace: {percent(after.seen)} of what the device saves is seen"
    if change_s < -_ROUNDING * after.step_s:
        return "a part of what the device takes longer falls into it"
    return "stays: the host takes as long"


def _conversion_formula(setting: Setting, by: Factors) -> str:
    found = []
    if by.narrow_peak > 1:
        each = f"{number(QUANTIZE_S[0] * 1e6)} µs a product and {number(QUANTIZE_BYTES[0])} bytes an element"
        found.append(f"inputs to 8 bits: {each}")
    if setting.kv is not None:
        each = f"{number(CONVERT_S[0] * 1e6)} µs a layer and {percent(CONVERT_SHARE[0])} of their old time"
        found.append(f"keys and values: {each}")
    return "; ".join(found)


def _step_formula(setting: Setting, after: StepAfter) -> str:
    if after.step.idle_s is None:
        return f"step + h (B' - B), h = {number(after.seen)}: idle time was not measured"
    return "device + idle + collectives" if after.comm_s else "device + idle"


def _weights(parts: tuple[Part, ...]) -> float:
    return sum(part.weight_bytes for part in parts)


def _kv(parts: tuple[Part, ...]) -> float:
    return sum(part.kv_bytes for part in parts)


def _weights_formula(setting: Setting, by: Factors, *, on_cpu: bool) -> str:
    found = []
    if setting.weights is not None:
        found.append(
            f"matrices x {number(by.weights)} ({number(setting.weights.bits)} bits a weight), head as it is"
        )
        if on_cpu:
            found.append(
                f"{percent(UNPACKED_ON_CPU[0])} of the time saved, the rest goes to unpacking"
            )
    elif by.dtype != 1:
        found.append(f"x {number(by.dtype)} in 16 bits")
    if by.experts != by.weights:
        found.append(f"experts reached x {number(by.experts / by.weights)}")
    if by.ranks != 1:
        found.append(f"/ {number(by.ranks)} ranks")
    return "; ".join(found) or "read once a step, whatever it computes"


def _kv_formula(setting: Setting, by: Factors) -> str:
    found = []
    if by.sequences != 1:
        found.append(f"x {number(by.sequences)} sequences")
    if setting.kv is not None:
        found.append(f"{number(setting.kv.bits)} bits an element")
    elif by.dtype != 1:
        found.append("in 16 bits")
    if setting.kv_heads == LATENTS:
        found.append("latents of 4.5 head widths")
    elif setting.kv_heads is not None:
        found.append(f"{setting.kv_heads} heads")
    if by.kv != 1:
        found[-1] += f" (x {number(by.kv)})"
    if by.kv_ranks != 1:
        found.append(f"/ {number(by.kv_ranks)} ranks")
    return "; ".join(found) or "each sequence reads its own, once a step"


def _flops_formula(by: Factors) -> str:
    found = []
    if by.tokens != 1:
        found.append(f"x {number(by.tokens)} tokens")
    if by.attention_flops != 1:
        found.append(f"attention x {number(by.attention_flops)}")
    if by.ranks != 1:
        found.append(f"/ {number(by.ranks)} ranks")
    return "; ".join(found) or "2 for each multiply-add"


def notes(measured: Measured, setting: Setting) -> Iterator[str]:
    """What has to be known, one sentence each."""
    if setting.weights is not None:
        yield from _of_weights(measured, setting)
    if setting.kv is not None:
        yield "It needs an attention kernel that takes such keys and values."
    if setting.sequences is not None:
        yield "It needs that many requests at once; a single one does not gain."
    if setting.graphs:
        yield (
            "transformers: torch.compile in mode reduce-overhead with a static cache; vLLM: without --enforce-eager."
        )
    if setting.speculation is not None:
        yield from _of_speculation(measured, setting)
    if setting.kv_heads is not None:
        yield "It is another model, trained that way: only its keys and values are worked out here."
    if setting.device is not None:
        yield from _of_device(measured, setting)
    if setting.ranks is not None and setting.ranks != measured.ranks:
        yield f"It takes {setting.ranks} devices: the figures are those of all together."


def _of_weights(measured: Measured, setting: Setting) -> Iterator[str]:
    peak = narrow_peak(measured, setting)
    if peak > 1:
        yield (
            f"Both operands in 8 bits, of a {number(peak)}x peak of which products reach about "
            f"{percent(NARROW_PEAK[0])}; attention and output head stay."
        )
    elif measured.hardware.kind == "cpu":
        yield "Weights alone, unpacked as they are multiplied: few CPU kernels do so without losing what they save."
    else:
        yield f"Weights alone, unpacked as they are multiplied in {measured.dtype}: steps that compute gain nothing."


def _of_speculation(measured: Measured, setting: Setting) -> Iterator[str]:
    wanted = setting.speculation
    assert wanted is not None
    known = speculation.measured_acceptance(measured)
    if wanted.acceptance is None and known is None:
        yield (
            "Acceptance was not measured: 0.7 is assumed (0.5 to 0.85), and 5 % of a step to draft a token (0 to 10 %)."
        )
    elif wanted.acceptance is None and known is not None:
        yield f"Acceptance as measured: {number(known)} a draft (±0.05 for another text or number of drafts)."
    elif wanted.draft_cost is None and known is None:
        yield "To draft a token is assumed to take 5 % of a step (0 to 10 %)."


def _of_device(measured: Measured, setting: Setting) -> Iterator[str]:
    device = setting.device
    assert device is not None
    if device.kind != measured.hardware.kind:
        yield (
            "Kernels of another kind of device: a step is taken to need 1.6 times its time at the roofs there "
            "(1.1 to 3)."
        )
    elif measured.dtype in measured.hardware.sheet and measured.dtype in device.sheet:
        yield "By the ratio of both datasheets: what is reached of them here is taken to be reached there."
    else:
        yield "Its roofs are those of the datasheet, which no kernel sustains."
    if dtype_there(measured, setting) != measured.dtype:
        yield f"It is taken to run in {dtype_there(measured, setting)} there: roofs for {measured.dtype} are not known."
    yield "The host is taken to be as fast."
