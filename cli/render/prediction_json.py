"""A prediction as one JSON document; docs/prediction.md has its schema."""

from __future__ import annotations

import json
from typing import Any

from phaseprof.analyzers.efficiency.estimate import Estimate
from phaseprof.analyzers.steps.prediction import (
    Memory,
    PhasePrediction,
    Prediction,
    PredictionReport,
    Rate,
)
from phaseprof.analyzers.steps.step_model import StepTime, Term


def to_json(report: PredictionReport) -> str:
    """All figures; times in ms, bytes and FLOPs of one rank."""
    machine, load = report.machine, report.predictions[0].load
    document = {
        "schema": 1,
        "model": {
            "name": report.model,
            "class": report.class_name,
            "parameters": report.parameters,
            "weights": report.weights,
            "kv_dtype": report.kv,
        },
        "device": {
            "name": report.device,
            "ranks": machine.ranks,
            "link": None if machine.link is None else machine.link.name,
            "tflops": machine.ceilings.flops_per_s / 1e12,
            "gb_per_s": machine.ceilings.bytes_per_s / 1e9,
            "provenance": machine.ceilings.source,
            "reference": machine.ceilings.reference,
            "runtime": machine.runtime.name,
        },
        "prompt_tokens": load.prompt_tokens,
        "new_tokens": load.new_tokens,
        "interval": 0.9,
        "provenance": "modelled",
        "predictions": [_prediction(each) for each in report.predictions],
        "notes": list(report.notes),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def _prediction(each: Prediction) -> dict[str, Any]:
    return {
        "batch": each.load.batch,
        "ttft_ms": _ms(each.ttft),
        "tpot_ms": _ms(each.tpot),
        "whole_ms": _ms(each.whole),
        "output_tokens_per_s": _rate(each.output_tokens_per_s),
        "tokens_per_s_per_user": _rate(each.tokens_per_s_per_user),
        "memory": _memory(each.memory),
        "phases": {
            phase.phase.value: _phase(phase)
            for phase in (each.prefill, each.decode)
            if phase is not None
        },
    }


def _phase(phase: PhasePrediction) -> dict[str, Any]:
    return {
        "passes": phase.passes,
        "tokens_per_pass": phase.tokens,
        "pass_ms": _ms(phase.pass_time),
        "floor_ms": phase.floor_s * 1e3,
        "flops": phase.flops,
        "moved_bytes": phase.moved_bytes,
        "bound": phase.bound.value,
        "nearest_roof": None if phase.roof is None else phase.roof.value,
        "explained": phase.explained,
        "communication": phase.communication,
        "idle": phase.idle,
        "step": _step(phase.step),
    }


def _step(step: StepTime) -> dict[str, Any]:
    return {
        "device_ms": _ms(step.device),
        "host_ms": _ms(step.host),
        "launches": step.launches,
        "ops": [_term(term) for term in step.terms],
    }


def _term(term: Term) -> dict[str, Any]:
    gemm = term.gemm
    return {
        "kind": term.kind.value,
        "what": term.what,
        "calls": term.calls,
        "m": None if gemm is None else gemm.m,
        "n": None if gemm is None else gemm.n,
        "k": None if gemm is None else gemm.k,
        "groups": None if gemm is None else gemm.groups,
        "flops": term.flops,
        "moved_bytes": term.moved_bytes,
        "floor_ms": term.floor_s * 1e3,
        "roof": None if term.roof is None else term.roof.value,
        "ms": _ms(term.time),
        "reference": term.time.reference,
    }


def _memory(memory: Memory) -> dict[str, Any]:
    return {
        "weights_bytes": memory.weights,
        "kv_bytes": memory.kv,
        "kv_bytes_per_request": memory.kv_per_sequence,
        "activation_bytes": memory.activations,
        "reserve_bytes": memory.reserve,
        "needed_bytes": memory.needed,
        "capacity_bytes": memory.capacity,
        "fits": memory.fits,
        "lacks": memory.lacks,
        "largest_batch": memory.largest_batch,
    }


def _ms(estimate: Estimate | None) -> dict[str, float] | None:
    if estimate is None:
        return None
    return {
        "value": estimate.seconds * 1e3,
        "low": estimate.low * 1e3,
        "high": estimate.high * 1e3,
    }


def _rate(rate: Rate | None) -> dict[str, float] | None:
    return None if rate is None else {"value": rate.value, "low": rate.low, "high": rate.high}
