"""How it was measured: command, versions, devices, roofs, sources of the figures, the profiler's own cost."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterable

from phaseprof.analyzers.results import Report
from phaseprof.analyzers.viewing.setting import Setting
from phaseprof.cli.render import units
from phaseprof.cli.render.html.pairs import WIDE, Pair, pairs
from phaseprof.cli.render.terminal import foot_lines
from phaseprof.trace.meta import Ceilings, Device


def setting_pairs(report: Report, setting: Setting) -> list[Pair]:
    """Keys and what is known; keys without anything are left out."""
    foot = {
        pair.key: pair.values for pair in pairs(foot_lines(report, WIDE), without=["Not measured"])
    }
    known = [
        ("Command", tuple(shlex.join(command) for command in setting.commands)),
        ("Started", _started(setting)),
        ("Host", (", ".join(setting.hosts),)),
        ("Processes", _processes(setting)),
        ("Device", tuple(_device(device) for device in setting.devices)),
        ("Model", tuple(_models(setting))),
        ("Versions", (", ".join(f"{name} {version}" for name, version in setting.versions),)),
        ("Recorded by", tuple(f"phaseprof {version}" for version in setting.phaseprof)),
        ("Workload", tuple(f"{key}: {value}" for key, value in setting.workload)),
        ("Ceilings", tuple(_ceilings(roof) for roof in _roofs(report, setting))),
        *((key.capitalize(), (value,)) for key, value in report.provenance),
        ("Own cost", foot.get("Own cost", ())),
        ("Hooks", setting.hooks),
        ("Trace", foot.get("Trace", ())),
    ]
    cleaned = ((key, tuple(value for value in values if value)) for key, values in known)
    return [Pair(key, values) for key, values in cleaned if values]


def _started(setting: Setting) -> tuple[str, ...]:
    if setting.started_ns is None:
        return ()
    begun = datetime.datetime.fromtimestamp(setting.started_ns / 1e9, datetime.UTC)
    text = begun.strftime("%Y-%m-%d %H:%M:%S UTC")
    if setting.ended_ns is not None:
        text += f", for {units.duration((setting.ended_ns - setting.started_ns) / 1e6)}"
    return (text,)


def _processes(setting: Setting) -> tuple[str, ...]:
    text = units.count(setting.processes)
    if setting.cut_off:
        text += f", {units.count(setting.cut_off)} of them without an end in the trace"
    return (text,)


def _device(device: Device) -> str:
    parts = [device.name or device.kind, f"{device.kind} {device.index}"]
    if device.cores is not None:
        parts.append(units.counted(device.cores, "core" if device.kind == "cpu" else "SM"))
    if device.threads is not None:
        parts.append(units.counted(device.threads, "thread"))
    if device.memory_bytes is not None:
        parts.append(units.size(device.memory_bytes))
    return ", ".join(parts)


def _models(setting: Setting) -> Iterable[str]:
    for model in setting.models:
        parts = [model.name, model.class_name]
        if model.parameters is not None:
            parts.append(
                f"{units.count(model.parameters)} parameters, {units.size(model.parameter_bytes)}"
            )
        if model.attention:
            parts.append(f"attention {model.attention}")
        if model.cache_class:
            parts.append(f"cache {model.cache_class}")
        if model.quantization:
            parts.append(f"quantization {model.quantization}")
        yield ", ".join(part for part in parts if part)


def _roofs(report: Report, setting: Setting) -> list[Ceilings]:
    """Those that the report uses, then the others of the trace."""
    used = [] if report.ceilings is None else [report.ceilings]
    return [*used, *(roof for roof in setting.ceilings if roof not in used)]


def _ceilings(roof: Ceilings) -> str:
    parts = [
        f"{roof.dtype}: {units.rate(roof.flops_per_s / 1e12)} TFLOP/s, {units.rate(roof.bytes_per_s / 1e9)} GB/s",
        roof.source if roof.spread is None else f"{roof.source} ±{units.percent(roof.spread)}",
        roof.reference,
    ]
    return ", ".join(part for part in parts if part)
