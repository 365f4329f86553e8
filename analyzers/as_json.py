"""The report as JSON: the stable form of `phaseprof report --json` (schema 1).

Keys are only ever added. A figure that is not known is null; nothing in it is NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from phaseprof.analyzers.results import OwnCost, PhaseFigures, RanksReport, Report
from phaseprof.analyzers.steps.op_results import StepFloor

#: Raised when a key changes its meaning or goes away.
JSON_SCHEMA = 1


def to_json(report: Report) -> dict[str, Any]:
    """Plain dicts, lists, strings and finite numbers.

    Besides ``schema``, ``device``, ``phases``, ``requests``, ``overhead`` (the profiler's own cost) and
    ``not_measured`` there are ``answer``, ``run``, ``by_batch``, ``ceilings``, ``set_aside``, ``damage``,
    ``provenance``, ``devices`` (the state of each sampled device), ``ranks`` (null for one rank), ``engine`` and
    ``interference`` (null without a serving engine), ``goodput`` (null without objectives), and ``unattributed``
    (kernels of no pass; null without any), ``operations`` (the floor of each phase, operation by operation), ``mixed``
    (null without mixed steps), ``two_phases`` and ``sweep`` (null unless several sizes were profiled).
    """
    cost = report.own_cost
    facts = asdict(report.facts)
    device = facts.pop("device")
    result = {
        "schema": JSON_SCHEMA,
        "answer": list(report.answer),
        "run": facts,
        "device": device,
        "ceilings": None if report.ceilings is None else asdict(report.ceilings),
        "phases": _phases(report.phases),
        "by_batch": {str(batch): _phases(phases) for batch, phases in report.by_batch.items()},
        "requests": asdict(report.requests),
        "overhead": dict.fromkeys(field.name for field in fields(OwnCost))
        if cost is None
        else asdict(cost),
        "set_aside": [asdict(entry) for entry in report.set_aside],
        "damage": list(report.damage),
        "not_measured": [asdict(entry) for entry in report.not_measured],
        "provenance": dict(report.provenance),
        "devices": [asdict(state) for state in report.devices],
        "ranks": _ranks(report.ranks),
        "engine": None if report.engine is None else asdict(report.engine),
        "interference": None if report.interference is None else asdict(report.interference),
        "goodput": None if report.goodput is None else asdict(report.goodput),
        "unattributed": None if report.unattributed is None else asdict(report.unattributed),
        "operations": {name: _floor(floor) for name, floor in report.operations.items()},
        "mixed": None if report.mixed is None else asdict(report.mixed),
        "two_phases": [asdict(fact) for fact in report.two_phases],
        "sweep": None if report.sweep is None else asdict(report.sweep),
        "advice": None if report.advice is None else asdict(report.advice),
    }
    safe: dict[str, Any] = _safe(result)
    return safe


def _ranks(ranks: RanksReport | None) -> dict[str, Any] | None:
    if ranks is None:
        return None
    return {**asdict(ranks), "kinds": list(ranks.kinds)}


def _floor(floor: StepFloor) -> dict[str, Any]:
    return {**asdict(floor), "distance": floor.distance}


def _phases(phases: Mapping[str, PhaseFigures]) -> dict[str, Any]:
    return {name: _phase(figures) for name, figures in phases.items()}


def _phase(figures: PhaseFigures) -> dict[str, Any]:
    plain = asdict(figures)
    verdict = plain.pop("verdict")
    del plain["phase"], plain["question"]
    return {
        **plain,
        "explained": verdict["explained"],
        "nearest_roof": verdict["nearest_roof"],
        "bound": verdict["bound"],
        "confidence": verdict["confidence"],
        "evidence": verdict["evidence"],
        "excess": verdict["excess"],
        "remedy": verdict["remedy"],
    }


def _safe(value: Any) -> Any:
    """The value with what JSON does not know replaced: infinite numbers by null, tuples by lists, the rest by text."""
    if isinstance(value, Mapping):
        return {str(key): _safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_safe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)
