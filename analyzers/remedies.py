"""What to try first, by class and phase: levers that act on the thing that takes the time.

A lever follows from the physics of its class. Bytes of weights are shared by the sequences of a batch, bytes of the KV
cache are not; FLOPs grow with tokens; launches cost the same for one row and for many.
"""

from __future__ import annotations

from dataclasses import dataclass

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.kernels.kernel_results import KernelClass, KernelFigures
from phaseprof.analyzers.results import Bound, Lever
from phaseprof.analyzers.roofline import DTYPE_BYTES, RoofTimes, roof_times
from phaseprof.analyzers.wording import (
    byte_rate,
    duration,
    flop_rate,
    number,
    pass_noun,
    percent,
)
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings

#: What a compiler puts into one kernel: it reads and writes each element and computes little in between.
_FUSIBLE = (
    KernelClass.ELEMENTWISE,
    KernelClass.ACTIVATION,
    KernelClass.NORM,
    KernelClass.ROPE,
    KernelClass.REDUCTION,
)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of a phase besides time and work. Every field may be left out.

    Attributes:
        passes: Passes that the figures come from.
        cold_passes: Those of them that were the first of their phase, counted for want of others.
        profiled_passes: Passes that the busy share comes from.
        pass_spread: 90th percentile over median of the passes' time, each over its own roof time.
        known_share: Share of the phase's time in passes whose work is known.
        sequences_per_pass, tokens_per_pass: Means.
        weight_byte_share: Weight bytes over all bytes.
        attention_flop_share: FLOPs of attention pairs over all FLOPs.
        recomputed_share: Recomputed tokens over all tokens.
        device_kind: ``cpu`` or ``cuda``; empty if not recorded.
        kernels: What its kernels do; None if none were recorded.
        other_roofs: Roofs of the same device for other dtypes.
        no_work: Why FLOPs and bytes are not known.
        no_roofs: Why no roof is known.
    """

    passes: int | None = None
    cold_passes: int = 0
    profiled_passes: int | None = None
    pass_spread: float | None = None
    known_share: float = 1.0
    sequences_per_pass: float | None = None
    tokens_per_pass: float | None = None
    weight_byte_share: float | None = None
    attention_flop_share: float | None = None
    recomputed_share: float = 0.0
    device_kind: str = ""
    kernels: KernelFigures | None = None
    other_roofs: tuple[Ceilings, ...] = ()
    no_work: str = ""
    no_roofs: str = ""


def lever(
    bound: Bound,
    phase: Phase,
    circumstances: Circumstances,
    *,
    roofs: RoofTimes | None = None,
    ceilings: Ceilings | None = None,
    dtype_hint: str = "",
) -> Lever | None:
    """The first lever for a class; None where nothing is known to help.

    Args:
        bound: The class.
        phase: The phase.
        circumstances: What else is known.
        roofs: Times of the phase's work at the roofs.
        ceilings: The roofs.
        dtype_hint: What :func:`wider_dtype_hint` found, for latency.
    """
    if bound is Bound.UNKNOWN:
        return None
    if bound is Bound.OVERHEAD_OR_LATENCY:
        return Lever(
            "a kernel timeline",
            "`phaseprof profile` and `--collect default,kernels` record one of a few passes: it shows whether the "
            "device was idle",
        )
    if circumstances.recomputed_share >= thresholds.DOMINANT.value:
        return Lever(
            "the KV cache",
            f"{percent(circumstances.recomputed_share)} of the tokens are computed again: run with the cache on, or "
            "with room for the requests that were preempted",
        )
    if bound is Bound.COMMUNICATION:
        return Lever(
            "less exposed communication",
            "overlap collectives with compute or split the model over fewer ranks; a larger batch spends each "
            "collective on more tokens",
        )
    if bound is Bound.OVERHEAD:
        return _overhead(phase, circumstances)
    if bound is Bound.LATENCY:
        return _latency(phase, circumstances, dtype_hint)
    if bound is Bound.COMPUTE:
        return _compute(phase, circumstances, ceilings)
    return _bandwidth(phase, circumstances, roofs)


def _compute(phase: Phase, known: Circumstances, ceilings: Ceilings | None) -> Lever:
    attention = known.attention_flop_share
    if attention is not None and attention >= thresholds.DOMINANT.value:
        return Lever(
            "shorter contexts",
            f"attention is {percent(attention)} of the FLOPs and grows with the square of the prompt: cut prompts, "
            "cache shared prefixes, or take a model with windowed attention",
        )
    cheaper = _cheaper_matmul(known, ceilings)
    if phase is Phase.PREFILL:
        return Lever(
            "fewer prompt tokens", f"cache shared prefixes or shorten the prompts; next, {cheaper}"
        )
    if phase is Phase.DECODE:
        return Lever(
            "cheaper matmuls",
            f"the batch fills the device already, so that a larger one adds latency only; take {cheaper}",
        )
    if phase is Phase.MIXED:
        return Lever(
            "smaller prefill chunks",
            f"they shorten the steps in which decode waits; for throughput, {cheaper}",
        )
    return Lever("cheaper matmuls", f"take {cheaper}, or compute fewer tokens")


def _cheaper_matmul(known: Circumstances, ceilings: Ceilings | None) -> str:
    faster = [
        roof
        for roof in known.other_roofs
        if ceilings is not None and roof.flops_per_s > ceilings.flops_per_s
    ]
    if ceilings is None or not faster:
        return "a lower-precision matmul (FP8 or INT8 where the device has it)"
    best = max(faster, key=lambda roof: roof.flops_per_s)
    return (
        f"{best.dtype}, whose matmuls reach {flop_rate(best.flops_per_s)} against "
        f"{flop_rate(ceilings.flops_per_s)} ({best.source})"
    )


def _bandwidth(phase: Phase, known: Circumstances, roofs: RoofTimes | None) -> Lever:
    weights = known.weight_byte_share
    if weights is not None and weights < thresholds.DOMINANT.value:
        return Lever(
            "a smaller KV cache",
            f"{percent(1 - weights)} of the bytes are keys and values, of which each sequence reads its own: quantize "
            "the cache, shorten the context, or take a model with fewer KV heads; a larger batch gains little",
        )
    if phase is Phase.DECODE:
        return Lever(
            "batch",
            "all sequences of a step read the same weights once; next, quantize the weights or decode speculatively",
        )
    noun = pass_noun(phase)
    critical = ""
    if roofs is not None and roofs.compute_s > 0 and known.tokens_per_pass:
        tokens = known.tokens_per_pass * roofs.memory_s / roofs.compute_s
        critical = f": below about {number(tokens)} tokens the weights take longer to read than to use (modelled)"
    return Lever(
        f"more tokens a {noun}",
        f"batch prompts or take larger chunks{critical}; next, quantize the weights",
    )


def _overhead(phase: Phase, known: Circumstances) -> Lever:
    if known.device_kind == "cpu":
        return Lever(
            "fewer operators",
            "fuse them with torch.compile; a larger batch pays for the same operators once for all its sequences",
        )
    kernels = known.kernels
    graphs = 0.0 if kernels is None else kernels.graph_kernels / kernels.kernels
    if kernels is not None and graphs >= thresholds.BY_GRAPHS.value:
        return Lever(
            "less work on the host",
            f"graphs launch {percent(graphs)} of the kernels already, so that the device waits for Python, the "
            "scheduler or sampling between them; a larger batch costs the same host work",
        )
    if phase is Phase.DECODE:
        return Lever(
            "fewer launches",
            'CUDA graphs or torch.compile (mode "reduce-overhead") launch a step at once; next, a larger batch, '
            "which costs the same launches",
        )
    return Lever(
        "fewer launches",
        "fuse kernels with torch.compile; a larger batch or larger chunks cost the same launches",
    )


def _latency(phase: Phase, known: Circumstances, dtype_hint: str) -> Lever:
    if dtype_hint:
        return Lever("another dtype", dtype_hint)
    of_class = None if known.kernels is None else _by_class(known.kernels)
    if of_class is not None:
        return of_class
    rows = (
        "a larger batch gives each kernel more rows"
        if phase in (Phase.DECODE, Phase.MIXED)
        else "more tokens a pass give each kernel more rows"
    )
    if known.device_kind == "cpu":
        return Lever(
            "better kernels",
            f"try torch.compile, or another dtype, for which this CPU may have faster ones; {rows}",
        )
    return Lever(
        "better kernels",
        f"try torch.compile, or fused attention and MLP kernels; {rows}",
    )


def _by_class(kernels: KernelFigures) -> Lever | None:
    """The lever for what most of the busy time goes to; None where nothing takes so much, or nothing helps it."""
    kind = "operators" if kernels.on_cpu else "kernels"
    fusible = sum(kernels.of(each) for each in _FUSIBLE)
    if fusible >= thresholds.DOMINANT.value:
        return Lever(
            f"fused {kind}",
            f"{percent(fusible)} of the busy time goes to element-wise {kind}, norms and reductions, which "
            "torch.compile puts together",
        )
    for kernel_class, name, how in _LEVERS:
        share = kernels.of(kernel_class)
        if share >= thresholds.DOMINANT.value:
            return Lever(name, f"{percent(share)} of the busy time goes to {how}")
    plain = _without_tensor_cores(kernels)
    if plain >= thresholds.DOMINANT.value:
        return Lever(
            "tensor cores",
            f"{percent(plain)} of the busy time goes to matmuls without them: compute in bfloat16, or allow TF32 "
            "(`torch.set_float32_matmul_precision`)",
        )
    return None


#: Class, lever, and what its time goes to and how to do with less.
_LEVERS = (
    (
        KernelClass.QUANTIZATION,
        "matmuls that take packed weights",
        "unpacking them before each product: take a kernel that multiplies with them as they are",
    ),
    (
        KernelClass.COPY,
        "fewer copies",
        "copies: a static cache writes new keys and values in place, where a growing one is copied in every step",
    ),
    (
        KernelClass.ATTENTION,
        "another attention kernel",
        "attention: try another implementation, or shorter contexts",
    ),
)


def _without_tensor_cores(kernels: KernelFigures) -> float:
    """The share of products that by their names run on plain multiply-adds; 0 where some names do not tell."""
    if kernels.tensor_core_share is None or kernels.tensor_core_unknown_share:
        return 0.0
    return sum(
        each.share * (1 - each.tensor_core_ms / each.busy_ms)
        for each in kernels.classes
        if each.kernel_class in (KernelClass.GEMM, KernelClass.MOE) and each.busy_ms
    )


def wider_dtype_hint(
    *,
    time_s: float,
    flops: float,
    moved_bytes: float,
    ceilings: Ceilings,
    other_roofs: tuple[Ceilings, ...],
    phase: Phase,
    passes: int,
) -> str:
    """Say when a wider dtype could be faster: it moves more bytes, and its roofs still allow less time than was spent.

    That is a finding only for a wider dtype (a narrower one always has the lower floor), and it is typical of CPUs
    whose kernels for a narrow dtype are slow. Returns an empty text when nothing of the sort is known.
    """
    width = DTYPE_BYTES.get(ceilings.dtype)
    for roof in other_roofs:
        other_width = DTYPE_BYTES.get(roof.dtype)
        if width is None or other_width is None or other_width <= width:
            continue
        other = roof_times(
            flops=flops, moved_bytes=moved_bytes * other_width / width, ceilings=roof
        )
        if other.floor_s <= time_s * thresholds.WIDER_DTYPE.value:
            return (
                f"in {roof.dtype} the roofs of this device ({flop_rate(roof.flops_per_s)}, "
                f"{byte_rate(roof.bytes_per_s)}) allow {duration(other.floor_s / passes)} a {pass_noun(phase)}, "
                f"against {duration(time_s / passes)} in {ceilings.dtype} now (modelled)"
            )
    return ""
