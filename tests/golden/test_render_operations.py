"""The floor by operation, mixed steps and the facts about the phases, laid out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.text import Text

from phaseprof.analyzers.kernels.kernel_results import KernelClass
from phaseprof.analyzers.results import Provenance, Roof
from phaseprof.analyzers.steps.mixed_split import ChunkEffect, MixedSplit
from phaseprof.analyzers.steps.op_results import AboveFloor, ModelledTime, OpFigures, StepFloor
from phaseprof.analyzers.two_phases import Fact, Topic
from phaseprof.cli.render.layout import stack
from phaseprof.cli.render.operations import (
    mixed_section,
    operations_section,
    two_phases_section,
)
from phaseprof.work.ops import OpKind

Golden = Callable[[str, str], None]


def _op(kind: OpKind, floor_ms: float, share: float, roof: Roof = Roof.BANDWIDTH) -> OpFigures:
    return OpFigures(kind, 32, 1e9, 1e9, floor_ms / 3, floor_ms, floor_ms, share, roof, 8)


OPERATIONS = {
    "prefill": StepFloor(
        passes=16,
        pass_ms=48.0,
        floor_ms=30.1,
        whole_floor_ms=29.8,
        ops=(
            _op(OpKind.GATE_UP, 16.1, 0.535, Roof.COMPUTE),
            _op(OpKind.DOWN, 8.0, 0.266, Roof.COMPUTE),
            _op(OpKind.QKV, 3.4, 0.113, Roof.COMPUTE),
            _op(OpKind.O, 2.2, 0.073, Roof.COMPUTE),
            _op(OpKind.ATTENTION_PREFILL, 0.3, 0.01, Roof.COMPUTE),
            _op(OpKind.LM_HEAD, 0.1, 0.003),
        ),
    ),
    "decode": StepFloor(
        passes=64,
        pass_ms=9.2,
        floor_ms=5.0,
        whole_floor_ms=5.0,
        ops=(
            _op(OpKind.GATE_UP, 2.3, 0.46),
            _op(OpKind.DOWN, 1.15, 0.23),
            _op(OpKind.ATTENTION_DECODE, 0.6, 0.12),
            _op(OpKind.QKV, 0.5, 0.1),
            _op(OpKind.O, 0.3, 0.06),
            _op(OpKind.LM_HEAD, 0.15, 0.03),
        ),
        modelled=ModelledTime(6.1, 5.6, 6.9, "fitted to vLLM 0.24.0 on H100 SXM"),
        above=(
            AboveFloor(None, 2.6, 0.0),
            AboveFloor(KernelClass.GEMM, 5.2, 4.4),
            AboveFloor(KernelClass.ELEMENTWISE, 0.5, 0.0),
            AboveFloor(KernelClass.ATTENTION, 0.55, 0.6),
        ),
    ),
}
MIXED = MixedSplit(
    steps=64,
    step_ms=41.0,
    decode_ms=8.7,
    decode_low_ms=5.9,
    decode_high_ms=11.6,
    prefill_tokens=480.2,
    decode_tokens=31.5,
    error=0.04,
    fitted=170,
    prompt_tokens=2000,
    chunks=(
        ChunkEffect(256, False, 24.0, 23.0, 25.0, 190.0, 182.0, 198.0),
        ChunkEffect(512, True, 41.0, 39.4, 42.6, 162.0, 155.5, 168.5),
        ChunkEffect(1024, False, 75.0, 72.0, 78.0, 148.0, 142.0, 154.0),
    ),
)
FACTS = (
    Fact(
        Topic.DECODE_BATCHES,
        True,
        "Decode batches: a step of 16 sequences took 1.2 times as long as one of 1, so that tokens/s rose 13.3-fold. "
        "A step reads the weights once, whatever the number of sequences; they are 97 % of the bytes at batch 1.",
        Provenance.MEASURED,
    ),
    Fact(
        Topic.PREFILL_BATCHES,
        False,
        "Prefill batches as well here: 9,100 prompt tokens/s at batch 1, 31,000 at batch 16. One prompt of 64 tokens "
        "does not fill the device.",
        Provenance.MEASURED,
    ),
)


@pytest.mark.parametrize("width", [80, 160])
def test_operations_at_widths(golden: Golden, width: int) -> None:
    blocks = [
        operations_section(OPERATIONS, width),
        mixed_section(MIXED, width),
        two_phases_section(FACTS, width),
    ]
    text = "\n".join(line.plain.rstrip() for line in stack(blocks))
    assert max(map(len, text.splitlines())) <= width
    golden(f"operations-{width}.txt", text)


def test_nothing_is_said_of_nothing() -> None:
    nothing: list[Text] = []
    assert operations_section({}, 80) == nothing
    assert mixed_section(None, 80) == nothing
    assert two_phases_section((), 80) == nothing
