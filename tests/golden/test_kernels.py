"""The kernels of phases as text, compared exactly: the figures are made up by hand, the layout is under test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text

from phaseprof.analyzers.kernels.kernel_results import (
    ClassShare,
    KernelClass,
    KernelFigures,
    TensorCores,
    Unattributed,
)
from phaseprof.analyzers.results import (
    Bound,
    Confidence,
    Percentiles,
    PhaseFigures,
    Verdict,
)
from phaseprof.cli.render.kernels import TITLES, kernels_section
from phaseprof.cli.render.layout import to_ascii
from phaseprof.phases import Phase

Golden = Callable[[str, str], None]
C = KernelClass
BUSY_MS = 80.0


def share(
    kernel_class: KernelClass, part: float, longest: str = "a_kernel", of: float = 0.9
) -> ClassShare:
    return ClassShare(
        kernel_class=kernel_class,
        busy_ms=part * BUSY_MS,
        share=part,
        calls=64,
        tensor_cores=TensorCores.YES if kernel_class is C.GEMM else TensorCores.NO,
        tensor_core_ms=part * BUSY_MS if kernel_class is C.GEMM else 0.0,
        longest=longest,
        longest_share=of,
    )


def kernels(*classes: ClassShare, **changes: Any) -> KernelFigures:
    figures: dict[str, Any] = {
        "on_cpu": False,
        "passes": 3,
        "kernels": 975,
        "span_ms": 100.0,
        "busy_ms": BUSY_MS,
        "gap_ms": 12.0,
        "overlap_ms": 0.0,
        "classes": classes,
        "tensor_core_share": 0.71,
        "tensor_core_unknown_share": 0.0,
        "collective_ms": 0.0,
        "exposed_collective_ms": 0.0,
        "exposed_comm_share": 0.0,
        "copies": 0,
        "copy_ms": 0.0,
        "unclassed_share": 0.0,
        "launch_delay_ms": Percentiles(975, 0.0143, 0.0421, 0.2),
        "graph_kernels": 0,
    }
    return KernelFigures(**{**figures, **changes})


def phase(name: Phase, figures: KernelFigures | None, sequences: float = 1.0) -> PhaseFigures:
    nothing: dict[str, Any] = dict.fromkeys(
        field for field in PhaseFigures.__dataclass_fields__ if field not in {"counters", "kernels"}
    )
    verdict = Verdict(Bound.UNKNOWN, Confidence.LOW, None, None, (), "")
    return PhaseFigures(
        **{
            **nothing,
            "phase": name,
            "sequences_per_pass": sequences,
            "verdict": verdict,
            "kernels": figures,
        }
    )


#: A dense model on one GPU.
PREFILL = kernels(
    share(C.GEMM, 0.62, "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", 0.7),
    share(C.ATTENTION, 0.21, "flash::flash_fwd_kernel"),
    share(C.ELEMENTWISE, 0.09),
    share(C.NORM, 0.05),
    share(C.COPY, 0.02),
    share(C.EMBEDDING, 0.006),
    share(C.SAMPLING, 0.004),
    copies=6,
    copy_ms=0.41,
)
DECODE = kernels(
    share(C.GEMM, 0.74, "nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 0.06),
    share(C.ATTENTION, 0.08),
    share(C.ELEMENTWISE, 0.10),
    share(C.NORM, 0.07),
    share(C.REDUCTION, 0.01),
    passes=24,
    kernels=24 * 312,
    tensor_core_share=0.41,
    tensor_core_unknown_share=0.2,
    graph_kernels=24 * 310,
)
#: The same over eight GPUs: an all-reduce after each half layer.
SPLIT = replace(
    DECODE,
    classes=(
        share(C.COLLECTIVE, 0.45, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
        share(C.GEMM, 0.35, "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        share(C.MOE, 0.12),
        share(C.KV_WRITE, 0.05),
        share(C.OTHER, 0.03),
    ),
    collective_ms=36.0,
    exposed_collective_ms=33.0,
    exposed_comm_share=0.33,
    launch_delay_ms=None,
)
CPU = kernels(
    share(C.GEMM, 0.58, "aten::linear", 1.0),
    share(C.ATTENTION, 0.22, "aten::scaled_dot_product_attention", 1.0),
    share(C.ELEMENTWISE, 0.12),
    share(C.VIEW, 0.08),
    on_cpu=True,
    passes=1,
    kernels=274,
    tensor_core_share=None,
    tensor_core_unknown_share=None,
    launch_delay_ms=None,
)

GPU_PHASES = {
    "prefill": phase(Phase.PREFILL, PREFILL),
    "decode": phase(Phase.DECODE, DECODE),
    "mixed": phase(Phase.MIXED, None),
}
ONE_BATCH = {4: {"decode": phase(Phase.DECODE, replace(DECODE, passes=2, kernels=624), 4.0)}}
BETWEEN = Unattributed(
    between=1_204, between_ms=3.21, launchless=1, launchless_ms=0.1, launchless_share=0.001
)
Batches = Mapping[int, Mapping[str, PhaseFigures]]

CASES: dict[str, tuple[Mapping[str, PhaseFigures], Batches, int]] = {
    "kernels-60": (GPU_PHASES, {}, 60),
    "kernels-80": (GPU_PHASES, {}, 80),
    "kernels-100": (GPU_PHASES, ONE_BATCH, 100),
    "kernels-140": (GPU_PHASES, ONE_BATCH, 140),
    "kernels-split": ({"decode": phase(Phase.DECODE, SPLIT)}, {}, 100),
    "kernels-cpu-48": ({"prefill": phase(Phase.PREFILL, CPU)}, {}, 48),
    "kernels-cpu": ({"prefill": phase(Phase.PREFILL, CPU)}, {}, 100),
}


def text_of(lines: list[Text]) -> str:
    return "\n".join(line.plain.rstrip() for line in lines)


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_laid_out_as_before(name: str, golden: Golden) -> None:
    phases, by_batch, width = CASES[name]
    text = text_of(kernels_section(phases, by_batch, BETWEEN, width))
    assert max(map(len, text.splitlines())) <= width
    golden(f"{name}.txt", text)


def test_kernels_on_an_ascii_stream(golden: Golden) -> None:
    text = to_ascii(text_of(kernels_section(GPU_PHASES, ONE_BATCH, BETWEEN, 80)))
    assert text.isascii() and "?" not in text
    golden("kernels-ascii.txt", text)


def test_without_kernels_there_is_no_section() -> None:
    assert kernels_section({"decode": phase(Phase.DECODE, None)}, {}, BETWEEN, 100) == []


def test_without_kernels_between_passes_nothing_is_said_of_them() -> None:
    lines = text_of(kernels_section(GPU_PHASES, {}, None, 100))
    assert lines == text_of(kernels_section(GPU_PHASES, {}, replace(BETWEEN, between=0), 100))
    assert "Of no pass" not in lines


def test_every_title_is_of_a_class_that_needs_one() -> None:
    assert all(title != kernel_class.value for kernel_class, title in TITLES.items())
    assert all("_" not in TITLES.get(each, each.value) for each in KernelClass)
