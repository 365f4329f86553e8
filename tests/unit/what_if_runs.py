"""Measured runs as what-if takes them, put together by hand: an H100 with an 8B model, and a CPU with a small one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phaseprof.analyzers.phases import Basis
from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.what_if.changes import Hardware
from phaseprof.analyzers.what_if.measured import Measured, Part, PartKind, PhaseStep
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings
from phaseprof.work.cost import AttentionCost, MatmulCost, ModelCost

LAYERS = 32
#: Bytes of keys and values of a token in a layer: 8 heads of 128, two of them, in 16 bits.
KV_TOKEN = 2 * 8 * 128 * 2


def roofs(dtype: str, tflops: float, tb_per_s: float, source: str = "datasheet") -> Ceilings:
    """Roofs by their round figures."""
    return Ceilings("key", dtype, tflops * 1e12, tb_per_s * 1e12, source, None, None, "by hand")


H100 = {
    "bfloat16": roofs("bfloat16", 1000, 3.35),
    "float8_e4m3fn": roofs("float8_e4m3fn", 2000, 3.35),
}
H200 = {
    "bfloat16": roofs("bfloat16", 1000, 4.8),
    "float8_e4m3fn": roofs("float8_e4m3fn", 2000, 4.8),
}
A100 = {"bfloat16": roofs("bfloat16", 312, 2.04), "int8": roofs("int8", 624, 2.04)}


def gpu(
    name: str, sheet: dict[str, Ceilings], memory: float = 80e9, board: str = "H100 SXM"
) -> Hardware:
    """A GPU with a datasheet."""
    return Hardware(name, "cuda", round(memory), dict(sheet), dict(sheet), board)


#: 8 billion parameters in 16 bits: 14 GB of matrices, 1 GB of head, 1 GB of embedding.
COST_8B = ModelCost(
    linear_flops_per_token=14_000_000_000,
    head_flops_per_token=1_000_000_000,
    attention=(AttentionCost(LAYERS, 32, 8, 128, 128, None, KV_TOKEN),),
    body_weight_bytes=14_000_000_000,
    head_weight_bytes=1_000_000_000,
    lookup_bytes_per_token=8192,
    parameter_bytes=16_000_000_000,
    parameters=8_000_000_000,
    dtype="bfloat16",
    stored=(("bfloat16", 16_000_000_000),),
    matmuls=(
        MatmulCost("qkv", LAYERS, 4096, 6144, 50_331_648),
        MatmulCost("o", LAYERS, 4096, 4096, 33_554_432),
        MatmulCost("gate_up", LAYERS, 4096, 28672, 234_881_024),
        MatmulCost("down", LAYERS, 14336, 4096, 117_440_512),
        MatmulCost("lm_head", 1, 4096, 128256, 1_000_000_000),
    ),
    hidden_size=4096,
)


def decode_step(
    step_ms: float = 6.0,
    *,
    sequences: float = 1.0,
    context: float = 1000.0,
    idle: float | None = 0.0,
    cost: ModelCost = COST_8B,
    **changes: Any,
) -> PhaseStep:
    """A decode step.

    Args:
        step_ms: Its time.
        sequences: Sequences of it. context: Keys and values that each of them has.
        idle: Part of it in which the device is idle; None if that was not measured.
        cost: The model.
        changes: Of its fields.
    """
    group = cost.attention[0]
    kv = sequences * context * group.layers * group.kv_bytes_per_token
    attention = sequences * context * group.layers * group.flops_per_pair
    parts = (
        Part(
            PartKind.MATRICES,
            cost.linear_flops_per_token * sequences,
            float(cost.body_weight_bytes),
        ),
        Part(PartKind.HEAD, cost.head_flops_per_token * sequences, float(cost.head_weight_bytes)),
        Part(PartKind.ATTENTION, attention, 0.0, kv),
    )
    step = PhaseStep(
        phase=Phase.DECODE,
        passes=100,
        step_s=step_ms / 1e3,
        between_s=0.0,
        idle_s=None if idle is None else idle * step_ms / 1e3,
        comm_s=0.0,
        sequences=sequences,
        prefill_tokens=0.0,
        decode_tokens=sequences,
        parts=parts,
        kernels=None if idle is None else 300.0,
        bound=Bound.BANDWIDTH,
    )
    return replace(step, **changes)


def prefill_step(
    step_ms: float = 25.0, *, tokens: float = 1000.0, cost: ModelCost = COST_8B, **changes: Any
) -> PhaseStep:
    """A pass of one prompt."""
    group = cost.attention[0]
    scored = tokens * tokens / 2 * group.layers * group.flops_per_pair
    parts = (
        Part(
            PartKind.MATRICES, cost.linear_flops_per_token * tokens, float(cost.body_weight_bytes)
        ),
        Part(PartKind.HEAD, float(cost.head_flops_per_token), float(cost.head_weight_bytes)),
        Part(PartKind.ATTENTION, scored, 0.0, tokens * group.layers * group.kv_bytes_per_token),
    )
    step = PhaseStep(
        phase=Phase.PREFILL,
        passes=1,
        step_s=step_ms / 1e3,
        between_s=0.0,
        idle_s=0.0,
        comm_s=0.0,
        sequences=1.0,
        prefill_tokens=tokens,
        decode_tokens=0.0,
        parts=parts,
        bound=Bound.COMPUTE,
    )
    return replace(step, **changes)


def mixed_step(
    step_ms: float = 20.0, *, chunk: float = 512.0, decode: float = 16.0, **changes: Any
) -> PhaseStep:
    """A step with a chunk of a prompt beside sequences that decode."""
    tokens = chunk + decode
    parts = (
        Part(PartKind.MATRICES, COST_8B.linear_flops_per_token * tokens, 14e9),
        Part(PartKind.HEAD, COST_8B.head_flops_per_token * decode, 1e9),
        Part(PartKind.ATTENTION, 1e11, 0.0, decode * 1000.0 * LAYERS * KV_TOKEN),
    )
    step = PhaseStep(
        phase=Phase.MIXED,
        passes=20,
        step_s=step_ms / 1e3,
        between_s=0.0,
        idle_s=0.0,
        comm_s=0.0,
        sequences=decode + 1,
        prefill_tokens=chunk,
        decode_tokens=decode,
        parts=parts,
        bound=Bound.COMPUTE,
    )
    return replace(step, **changes)


def run(*steps: PhaseStep, cost: ModelCost = COST_8B, **changes: Any) -> Measured:
    """A run of some steps on an H100; a prefill of 25 ms and decode of 6 ms by default."""
    found = steps or (decode_step(), prefill_step())
    ordered = tuple(sorted(found, key=lambda step: -step.step_s * step.passes))
    decode = next((step for step in ordered if step.phase is Phase.DECODE), None)
    measured = Measured(
        steps=ordered,
        ttft_ms=30.0,
        tpot_ms=None if decode is None else decode.step_s * 1e3 + 0.5,
        queue_ms=0.0,
        prompt_tokens=1000.0,
        basis=Basis(cost=cost, ceilings=H100["bfloat16"], device_kind="cuda"),
        hardware=gpu("NVIDIA H100 80GB HBM3", H100),
        dtype="bfloat16",
        engine="vllm 0.32.0",
    )
    return replace(measured, **changes)


def on_cpu(*steps: PhaseStep, **changes: Any) -> Measured:
    """The same on a CPU of 1 TFLOP/s and 50 GB/s."""
    here = roofs("bfloat16", 1.0, 0.05, "measured")
    return run(
        *(steps or (decode_step(400.0), prefill_step(25_000.0))),
        basis=Basis(cost=COST_8B, ceilings=here, device_kind="cpu"),
        hardware=Hardware("Stand-in CPU", "cpu", 64_000_000_000, {"bfloat16": here}),
        engine="transformers 5.24.0",
        **changes,
    )
