"""A comparison as JSON: the stable form of `phaseprof compare --json` (schema 1). Keys are only ever added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from phaseprof.analyzers.comparing.results import Comparison, Delta, Figure
from phaseprof.analyzers.results import Report

#: Raised when a key changes its meaning or goes away.
JSON_SCHEMA = 1


def to_json(
    comparisons: Sequence[Comparison], reports: Sequence[Report], *, failed: bool
) -> dict[str, Any]:
    """Plain dicts, lists, strings and finite numbers.

    Args:
        comparisons: Each against the first trace.
        reports: Those of all traces, the first one first.
        failed: Whether the command fails.
    """
    return {
        "schema": JSON_SCHEMA,
        "failed": failed,
        "traces": [
            {
                "path": report.facts.trace_path,
                "model": report.facts.model,
                "engine": report.facts.engine,
                "device": None if report.facts.device is None else report.facts.device.name,
                "dtype": report.facts.dtype,
                "requests": report.requests.count,
            }
            for report in reports
        ],
        "comparisons": [_comparison(each) for each in comparisons],
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "a": found.a,
        "b": found.b,
        "comparable": found.level.value,
        "reasons": list(found.reasons),
        "verdict": list(found.verdict),
        "rules": [
            {
                "rule": each.rule,
                "outcome": each.outcome.value,
                "metric": each.delta.metric.path,
                "text": each.text,
            }
            for each in found.judged
        ],
        "metrics": {each.metric.path: _delta(each) for each in found.deltas},
        "bounds": {
            each.phase: {
                "a": each.a.value,
                "b": each.b.value,
                "sure": each.sure,
                "a_explained": _finite(each.a_explained),
                "b_explained": _finite(each.b_explained),
            }
            for each in found.bounds
        },
        "kernels": [asdict(each) for each in found.kernels],
        "differences": [
            {"topic": e.topic.value, "what": e.what, "a": e.a, "b": e.b} for e in found.differences
        ],
        "notes": list(found.notes),
        "method": asdict(found.method),
    }


def _delta(delta: Delta) -> dict[str, Any]:
    return {
        "unit": delta.metric.unit.value,
        "better": delta.metric.better.value,
        "a": _figure(delta.a),
        "b": _figure(delta.b),
        "change": _finite(delta.change),
        "low": _finite(delta.low),
        "high": _finite(delta.high),
        "call": delta.call.value,
        "why": delta.why,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "value": _finite(figure.value),
        "relative_error": _finite(figure.error),
        "blocks": figure.blocks,
        "count": figure.count,
    }


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
