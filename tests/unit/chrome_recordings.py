"""Recordings of torch.profiler in Chrome's JSON, as launches, device events and steps: for tests of attribution."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from phaseprof.attribution import DeviceEvent, Launch, PassWindow

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_HOST = {"cuda_runtime", "cuda_driver", "runtime"}
_LAUNCHING = ("Launch", "Memcpy", "Memset")

#: Kept beside the tests, and a folder of more of them that not every checkout has.
KEPT = Path(__file__).parents[1] / "data" / "traces"
MORE = Path(__file__).parents[3] / "shared" / "traces"


@dataclass(frozen=True)
class Recording:
    """What a trace holds. Times are Unix ns, or ns of the trace's own axis where it names no base.

    Attributes:
        launches: Calls that give a device work.
        events: Kernels, copies and memsets.
        kernels: Kernels alone.
        annotations: Spans that users and engines placed on host threads, by name.
    """

    launches: tuple[Launch, ...]
    events: tuple[DeviceEvent, ...]
    kernels: tuple[DeviceEvent, ...]
    annotations: dict[str, PassWindow]


def read_recording(path: Path) -> Recording:
    """Read a trace."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        # Times have more digits than a float of this size keeps.
        trace = json.load(file, strict=False, parse_float=Decimal)
    base = int(trace.get("baseTimeNanoseconds") or 0)
    launches, events, kernels = [], [], []
    annotations: dict[str, PassWindow] = {}
    for entry in trace["traceEvents"]:
        kind = str(entry.get("cat", "")).lower()
        if entry.get("ph") != "X" or kind not in {*_DEVICE, *_HOST, "user_annotation"}:
            continue
        start, end = _span(entry, base)
        arguments: dict[str, Any] = entry.get("args", {})
        correlation = arguments.get("correlation")
        if kind in _DEVICE:
            device = arguments.get("device", 0)
            stream = arguments.get("stream")
            event = DeviceEvent(entry["name"], f"cuda:{device}", start, end, stream, correlation)
            events.append(event)
            if kind == "kernel":
                kernels.append(event)
        elif kind == "user_annotation":
            thread = int(entry["tid"])
            annotations[entry["name"]] = PassWindow(len(annotations), thread, start, end)
        elif correlation is not None and any(part in entry["name"] for part in _LAUNCHING):
            launches.append(Launch(correlation, start, int(entry["tid"]), entry["name"]))
    return Recording(tuple(launches), tuple(events), tuple(kernels), annotations)


def _span(entry: dict[str, Any], base: int) -> tuple[int, int]:
    start, length = Decimal(entry["ts"]), Decimal(entry.get("dur", 0))
    return base + int(start * 1000), base + int((start + length) * 1000)
