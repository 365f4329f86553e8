"""Terminal reports, compared exactly: the figures are made up by hand, the layout is what is under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from phaseprof.analyzers.results import (
    Bound,
    Confidence,
    Evidence,
    Lever,
    OwnCost,
    Percentiles,
    PhaseFigures,
    Provenance,
    Report,
    RequestFigures,
    Roof,
    RunFacts,
    SetAside,
    Verdict,
)
from phaseprof.cli.render.terminal import render
from phaseprof.errors import NotMeasured
from phaseprof.phases import Phase
from phaseprof.trace.meta import Ceilings, Device

Golden = Callable[[str, str], None]

CPU = Device(
    name="Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
    kind="cpu",
    index=0,
    cores=2,
    threads=2,
    memory_bytes=16_000_000_000,
    key="cpu-a",
)
GPU = Device(
    name="NVIDIA H200",
    kind="cuda",
    index=0,
    cores=132,
    threads=None,
    memory_bytes=150_000_000_000,
    key="gpu-a",
)
UNKNOWN_VERDICT = Verdict(Bound.UNKNOWN, Confidence.LOW, None, None, (), "")

PREFILL = PhaseFigures(
    phase=Phase.PREFILL,
    passes=8,
    sequences_per_pass=1.0,
    prefill_tokens=4096,
    decode_tokens=0,
    padding_tokens=0,
    recomputed_tokens=0,
    cached_tokens=0,
    tokens=4096,
    span_ms=6006.0,
    pass_ms_p50=751.6,
    pass_ms_p90=771.0,
    pass_ms_p99=790.2,
    between_ms=4.1,
    busy_ms=None,
    share=0.182,
    prompt_tokens_per_s=682.0,
    output_tokens_per_s=None,
    flops=949_000_000_000,
    weight_bytes=4_304_000_000,
    kv_read_bytes=0,
    kv_write_bytes=188_700_000,
    tflops=0.158,
    gb_per_s=0.748,
    intensity=211.2,
    mfu=0.5985,
    mbu=0.0392,
    weight_byte_share=0.958,
    attention_flop_share=0.064,
    verdict=Verdict(
        bound=Bound.COMPUTE,
        confidence=Confidence.HIGH,
        nearest_roof=Roof.COMPUTE,
        explained=0.5985,
        evidence=(
            Evidence(
                "0.119 TFLOP a pass take 449 ms at 0.264 TFLOP/s, 562 MB a pass take 29.4 ms at 19.1 GB/s: the compute "
                "roof is nearer.",
                Provenance.MODELLED,
            ),
            Evidence("A pass took 751 ms, of which that roof explains 60 %.", Provenance.MEASURED),
        ),
        remedy="Fewer prompt tokens: cache shared prefixes or shorten the prompts.",
        lever=Lever("fewer prompt tokens", "cache shared prefixes or shorten the prompts"),
    ),
)
DECODE = PhaseFigures(
    phase=Phase.DECODE,
    passes=504,
    sequences_per_pass=1.0,
    prefill_tokens=0,
    decode_tokens=504,
    padding_tokens=0,
    recomputed_tokens=0,
    cached_tokens=0,
    tokens=504,
    span_ms=27_010.0,
    pass_ms_p50=53.4,
    pass_ms_p90=55.0,
    pass_ms_p99=60.8,
    between_ms=178.0,
    busy_ms=None,
    share=0.818,
    prompt_tokens_per_s=None,
    output_tokens_per_s=18.66,
    flops=142_000_000_000,
    weight_bytes=271_200_000_000,
    kv_read_bytes=12_600_000_000,
    kv_write_bytes=23_200_000,
    tflops=0.00526,
    gb_per_s=10.51,
    intensity=0.5003,
    mfu=0.0199,
    mbu=0.5503,
    weight_byte_share=0.955,
    attention_flop_share=0.041,
    verdict=Verdict(
        bound=Bound.BANDWIDTH,
        confidence=Confidence.HIGH,
        nearest_roof=Roof.BANDWIDTH,
        explained=0.5503,
        evidence=(
            Evidence(
                "563 MB a step take 29.5 ms at 19.1 GB/s, 282 MFLOP a step take 1.07 ms at 0.264 TFLOP/s: the "
                "bandwidth roof is nearer.",
                Provenance.MODELLED,
            ),
            Evidence("A step took 53.6 ms, of which that roof explains 55 %.", Provenance.MEASURED),
        ),
        remedy="Batch: more sequences share the read of the weights.",
        lever=Lever("batch", "more sequences share the read of the weights"),
    ),
)
CPU_RUN = Report(
    facts=RunFacts(
        model="SmolLM2-135M-Instruct",
        model_class="LlamaForCausalLM",
        engine="transformers 5.24.0",
        device=CPU,
        dtype="float32",
        command=("phaseprof", "profile"),
        ranks=1,
        processes=1,
        incomplete=0,
        models=(),
        workload={"prompt_tokens": 512, "new_tokens": 64, "batch": [1]},
        trace_path="./phaseprof-2026-11-29T20-11-04",
        trace_bytes=41_200,
    ),
    answer=(
        "Decode is bandwidth-bound. Each step moves 0.56 GB (96 % of it weights) at 10.5 GB/s: 55 % of the 19.1 GB/s "
        "measured on this machine.",
        "Prefill is compute-bound. 512-token prompts run at 0.158 TFLOP/s: 60 % of the 0.264 TFLOP/s measured on this "
        "machine.",
        "82 % of the time is decode. First lever: batch. Eight sequences would read the same weights once.",
    ),
    phases={"decode": DECODE, "prefill": PREFILL},
    by_batch={},
    requests=RequestFigures(
        count=8,
        unfinished=0,
        aborted=0,
        prompt_tokens=4096,
        output_tokens=512,
        ttft_ms=Percentiles(8, 752.1, 771.3, 790.4),
        tpot_ms=Percentiles(8, 53.6, 55.1, 61.0),
        itl_ms=Percentiles(504, 53.5, 55.2, 60.9),
    ),
    set_aside=(SetAside("requested", 2, 805.0),),
    own_cost=OwnCost(
        hook_us_per_pass=6.04, share=0.000113, writer_cpu_ms=41.0, sampler_cpu_ms=13.0
    ),
    ceilings=Ceilings(
        device_key="cpu-a",
        dtype="float32",
        flops_per_s=0.264e12,
        bytes_per_s=19.1e9,
        source="measured",
        measured_ns=1_795_982_400_000_000_000,
        spread=0.04,
        reference="phaseprof calibrate",
    ),
    damage=(),
    not_measured=(
        NotMeasured(
            "SM, tensor-core and DRAM counters",
            "there is no NVIDIA GPU on this machine",
            "Run on a machine with one.",
        ),
    ),
    provenance=(
        ("time", "host clock"),
        ("FLOPs, bytes", "closed form (docs/work-model.md)"),
        ("roofs", "phaseprof calibrate, 2026-11-29, ±4 %"),
    ),
)


def gpu_run() -> Report:
    """A served model: mixed steps, batches, a busy figure, padding, a recompute, an unfinished request."""
    prefill = replace(
        PREFILL,
        passes=24,
        sequences_per_pass=2.5,
        prefill_tokens=98_304,
        tokens=98_304,
        padding_tokens=1_280,
        recomputed_tokens=2_048,
        cached_tokens=16_384,
        span_ms=2310.0,
        busy_ms=2260.0,
        pass_ms_p50=96.2,
        between_ms=None,
        share=0.118,
        prompt_tokens_per_s=42_556.0,
        tflops=612.0,
        gb_per_s=214.0,
        intensity=2860.0,
        mfu=0.619,
        mbu=0.0446,
        verdict=Verdict(
            Bound.COMPUTE,
            Confidence.MEDIUM,
            Roof.COMPUTE,
            0.619,
            (Evidence("The FLOPs alone take 62 % of the time.", Provenance.MODELLED),),
            "",
        ),
    )
    decode = replace(
        DECODE,
        passes=12_480,
        sequences_per_pass=27.3,
        decode_tokens=340_704,
        tokens=340_704,
        padding_tokens=36_696,
        span_ms=15_420.0,
        busy_ms=14_100.0,
        pass_ms_p50=1.21,
        between_ms=None,
        share=0.788,
        output_tokens_per_s=22_095.0,
        tflops=88.4,
        gb_per_s=3790.0,
        intensity=23.3,
        mfu=0.0894,
        mbu=0.79,
        verdict=Verdict(
            Bound.BANDWIDTH,
            Confidence.HIGH,
            Roof.BANDWIDTH,
            0.79,
            (
                Evidence("The bytes alone take 79 % of the time.", Provenance.MODELLED),
                Evidence("The device worked 91 % of the time.", Provenance.MEASURED),
            ),
            "",
        ),
    )
    mixed = replace(
        DECODE,
        phase=Phase.MIXED,
        passes=310,
        sequences_per_pass=24.0,
        prefill_tokens=40_960,
        decode_tokens=7_130,
        tokens=48_090,
        span_ms=1840.0,
        busy_ms=1290.0,
        pass_ms_p50=5.9,
        between_ms=None,
        share=0.094,
        prompt_tokens_per_s=22_260.0,
        output_tokens_per_s=3875.0,
        tflops=371.0,
        gb_per_s=812.0,
        intensity=457.0,
        mfu=0.375,
        mbu=0.169,
        verdict=Verdict(
            Bound.LATENCY,
            Confidence.MEDIUM,
            Roof.COMPUTE,
            0.375,
            (
                Evidence("The nearer roof explains 38 % of the time.", Provenance.MODELLED),
                Evidence("The device worked 70 % of it.", Provenance.MEASURED),
            ),
            "",
        ),
    )
    return replace(
        CPU_RUN,
        facts=replace(
            CPU_RUN.facts,
            model="Qwen3-8B",
            engine="vLLM 0.24.0",
            device=GPU,
            dtype="bfloat16",
            ranks=2,
            processes=2,
            models=("Qwen3-0.6B",),
            workload={},
            trace_path="t",
            trace_bytes=4_310_000,
        ),
        answer=(
            "Decode is bandwidth-bound: it reads 3,790 GB/s, 79 % of the 4,800 GB/s of the datasheet.",
            "Prefill is compute-bound at 612 TFLOP/s, 62 % of the datasheet.",
            "Mixed steps are latency-bound: a decode token in one waits 5.9 ms instead of 1.21 ms.",
        ),
        phases={"prefill": prefill, "decode": decode, "mixed": mixed},
        requests=RequestFigures(
            count=1_300,
            unfinished=3,
            aborted=1,
            prompt_tokens=139_264,
            output_tokens=349_134,
            ttft_ms=Percentiles(1_299, 212.0, 1_254.0, 12_480.0),
            tpot_ms=Percentiles(1_296, 1.31, 2.02, 5.5),
            itl_ms=Percentiles(347_834, 1.22, 1.4, 6.11),
        ),
        set_aside=(
            SetAside("first", 3, 1_480.0),
            SetAside("compile", 12, 38_200.0),
            SetAside("profiled", 1, 9.7),
            SetAside("error", 1, 2.0),
        ),
        ceilings=Ceilings(
            "gpu-a", "bfloat16", 989e12, 4800e9, "datasheet", None, None, "NVIDIA H200"
        ),
        not_measured=(
            NotMeasured(
                "DRAM, SM and tensor-core counters",
                "the driver restricts profiling to administrators",
                "Set NVreg_RestrictProfilingToAdminUsers=0, or run as root.",
            ),
            NotMeasured("Energy", "NVML reports none for this device"),
        ),
        provenance=(
            ("time", "CUDA events"),
            ("busy", "kernel records of CUPTI, by launch correlation"),
            ("FLOPs, bytes", "closed form"),
            ("roofs", "datasheet of NVIDIA H200, dense bfloat16"),
        ),
    )


def unknown_device() -> Report:
    """Work is counted, but no roof is known: no percentage anywhere, and no roofline."""
    phases = {
        name: replace(figures, mfu=None, mbu=None, verdict=UNKNOWN_VERDICT)
        for name, figures in CPU_RUN.phases.items()
    }
    return replace(
        CPU_RUN,
        answer=(
            "82 % of the time is decode. No roof of this device is known, so that nothing can be classed.",
        ),
        phases=phases,
        ceilings=None,
        not_measured=(
            NotMeasured(
                "MFU, MBU and class", "this device is not known", "Run `phaseprof calibrate`."
            ),
        ),
        provenance=(("time", "host clock"), ("FLOPs, bytes", "closed form")),
    )


def not_covered() -> Report:
    """The closed form does not hold: times and tokens, no work figures."""
    nothing: dict[str, Any] = dict.fromkeys(
        (
            "flops",
            "weight_bytes",
            "kv_read_bytes",
            "kv_write_bytes",
            "tflops",
            "gb_per_s",
            "intensity",
            "mfu",
            "mbu",
            "weight_byte_share",
            "attention_flop_share",
        )
    )
    phases = {
        name: replace(figures, verdict=UNKNOWN_VERDICT, padding_tokens=None, **nothing)
        for name, figures in CPU_RUN.phases.items()
    }
    phases["extend"] = replace(
        phases["decode"], phase=Phase.EXTEND, passes=1, output_tokens_per_s=None, share=0.004
    )
    return replace(
        CPU_RUN,
        facts=replace(CPU_RUN.facts, model="mamba-130m-hf", workload={}),
        answer=(
            "82 % of the time is decode. What bounds it is not known: the work of this model cannot be counted.",
        ),
        phases=phases,
        not_measured=(
            NotMeasured(
                "FLOPs and bytes of MambaForCausalLM",
                "the closed form does not cover state-space layers",
            ),
        ),
    )


def damaged() -> Report:
    """Two files cannot be read and a process was killed; its cost was never written."""
    return replace(
        CPU_RUN,
        facts=replace(CPU_RUN.facts, processes=2, incomplete=1),
        answer=(
            *CPU_RUN.answer,
            "The end of 1 of 2 processes is not in the trace: cut off, or still running.",
        ),
        damage=(
            "passes/rank=0/part-000004.parquet is cut off after 4,096 bytes: its passes are missing below.",
            "meta/rank-0-pid-4242.json is not JSON.",
        ),
        own_cost=None,
    )


def overhead() -> Report:
    """Both phases are small: neither roof explains anything, and nothing says whether the device was busy."""
    verdict = Verdict(
        Bound.OVERHEAD_OR_LATENCY,
        Confidence.LOW,
        Roof.BANDWIDTH,
        0.0312,
        (
            Evidence("The nearer roof explains 3 % of the time.", Provenance.MODELLED),
            Evidence(
                "Whether the device was idle is not known; a trace with kernels would tell.",
                Provenance.MEASURED,
            ),
        ),
        "",
    )
    small = {
        "prefill": replace(
            PREFILL,
            tflops=0.0041,
            gb_per_s=0.311,
            intensity=13.2,
            mfu=0.0155,
            mbu=0.0163,
            span_ms=12.4,
            pass_ms_p50=1.5,
            prompt_tokens_per_s=10_322.0,
            tokens=128,
            verdict=replace(verdict, bound=Bound.OVERHEAD),
        ),
        "decode": replace(
            DECODE,
            tflops=0.000291,
            gb_per_s=0.596,
            intensity=0.488,
            mfu=0.0011,
            mbu=0.0312,
            span_ms=421.0,
            pass_ms_p50=0.84,
            output_tokens_per_s=1197.0,
            verdict=verdict,
        ),
    }
    return replace(
        CPU_RUN,
        facts=replace(CPU_RUN.facts, model="tiny-random-llama"),
        answer=(
            "Decode is bound by overhead or latency. The nearer roof (bandwidth) explains 3 % of a step of 835 µs.",
            "Prefill is overhead-bound.",
        ),
        phases=small,
    )


def no_requests() -> Report:
    """A loop by hand that is nothing but decode, with an encoder beside it; several batch sizes."""
    wide = replace(
        DECODE,
        sequences_per_pass=16.0,
        passes=63,
        tokens=1_008,
        output_tokens_per_s=241.0,
        mbu=0.44,
    )
    wide = replace(
        wide, decode_tokens=1_008, tflops=0.068, intensity=7.9, gb_per_s=8.6, span_ms=4_180.0
    )
    both = replace(
        DECODE, sequences_per_pass=2.67, passes=567, tokens=1_512, output_tokens_per_s=48.5
    )
    return replace(
        CPU_RUN,
        facts=replace(CPU_RUN.facts, model="", workload={}, device=None, dtype=""),
        phases={
            "encode": replace(PREFILL, phase=Phase.ENCODE, prompt_tokens_per_s=None),
            "decode": both,
        },
        by_batch={16: {"decode": wide}, 1: {"decode": DECODE}},
        requests=RequestFigures(0, 0, 0, 0, 0, None, None, None),
        set_aside=(),
        not_measured=(),
    )


CASES: dict[str, tuple[Report, dict[str, Any]]] = {
    "cpu-run": (CPU_RUN, {}),
    "cpu-run-80": (CPU_RUN, {"width": 80}),
    "cpu-run-60": (CPU_RUN, {"width": 60}),
    "cpu-run-piped": (CPU_RUN, {"boxes": False}),
    "cpu-run-ascii": (CPU_RUN, {"unicode": False}),
    "cpu-run-color": (CPU_RUN, {"color": True}),
    "gpu-run": (gpu_run(), {}),
    "gpu-run-80": (gpu_run(), {"width": 80}),
    "gpu-run-140": (gpu_run(), {"width": 140}),
    "gpu-run-160": (gpu_run(), {"width": 160}),
    "gpu-run-60": (gpu_run(), {"width": 60}),
    "unknown-device": (unknown_device(), {}),
    "not-covered": (not_covered(), {}),
    "damaged": (damaged(), {}),
    "overhead": (overhead(), {}),
    "no-requests": (no_requests(), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_report_is_laid_out_as_before(name: str, golden: Golden) -> None:
    report, options = CASES[name]
    golden(f"{name}.txt", render(report, **options))
