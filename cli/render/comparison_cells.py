"""What the terminal and the Markdown form of a comparison share: names of figures, cells, and which rows are shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phaseprof.analyzers.comparing.results import Call, Comparison, Delta, Metric, Unit
from phaseprof.analyzers.results import Report
from phaseprof.cli.render import units

_NAMES = {
    "pass_ms.same_batch": "pass, same batch",
    "between_ms": "between passes",
    "prompt_tokens_per_s": "prompt tok/s",
    "output_tokens_per_s": "output tok/s",
    "tflops": "TFLOP/s",
    "gb_per_s": "GB/s",
    "mfu": "MFU",
    "mbu": "MBU",
    "busy_share": "busy",
    "sm_active": "SM active",
    "sm_occupancy": "SM occupancy",
    "tensor_active": "tensor active",
    "dram_active": "DRAM active",
    "power_w": "power",
    "joules_per_token": "J/token",
}
#: Rows of a table that is not asked for everything, by their names; p90 and p99 only where their noise is known.
_SHOWN = (
    *("pass_ms.same_batch", "pass_ms.p50", "pass_ms.p99", "between_ms"),
    *("prompt_tokens_per_s", "output_tokens_per_s", "mfu", "mbu", "dram_active", "tensor_active"),
    *("power_w", "joules_per_token"),
    *("ttft_ms.p50", "ttft_ms.p90", "ttft_ms.p99", "tpot_ms.p50", "tpot_ms.p99"),
    *("itl_ms.p50", "itl_ms.p99", "e2e_ms.p50", "queue_ms.p50", "queue_ms.p99"),
)
#: Passes that a batch size has to have in both traces to be shown without being asked for.
_OF_A_BATCH = 5
_SURE = re.compile(r"\.p9[09]$")


@dataclass(frozen=True, slots=True)
class Names:
    """Short names of traces that tell them apart.

    Attributes:
        of: One a trace, in their order.
    """

    of: tuple[str, ...]

    @classmethod
    def from_paths(cls, paths: Sequence[str]) -> Names:
        """The last part of each path; all of it where two would be the same, with a number where that does not help."""
        short = [path.rstrip("/").rpartition("/")[2] or path for path in paths]
        for found in (short, paths):
            if len(set(found)) == len(found):
                return cls(tuple(found))
        return cls(tuple(f"{name} ({place})" for place, name in enumerate(short, 1)))


def names_of(reports: Sequence[Report]) -> Names:
    """Of the traces that reports are of."""
    return Names.from_paths([each.facts.trace_path for each in reports])


def label(metric: Metric) -> str:
    """``pass p50``, ``TTFT p99``, ``gemm kernels``."""
    if metric.name in _NAMES:
        return _NAMES[metric.name]
    head, _, statistic = metric.name.partition(".")
    if head == "kernels":
        return f"{statistic.partition('.')[0]} kernels"
    name = head.removesuffix("_ms")
    return f"{name if name in ('pass', 'queue', 'e2e') else name.upper()} {statistic}"


def group(metric: Metric) -> str:
    """``decode``, ``decode, batch 16``, ``requests``."""
    return metric.group if metric.batch is None else f"{metric.group}, batch {metric.batch}"


def value(metric: Metric, figure: float | None) -> str:
    """A figure with its unit, where the name of the row does not say it."""
    if figure is None:
        return units.DASH
    if metric.unit is Unit.MS:
        return units.latency(figure)
    if metric.unit is Unit.SHARE:
        return f"{figure * 100:.1f} %"
    return f"{units.rate(figure)} W" if metric.unit is Unit.WATT else units.rate(figure)


def change(part: float | None) -> str:
    """``+8.1 %``; a dash for none."""
    if part is None:
        return units.DASH
    share = abs(part) * 100
    sign = "" if share < 0.05 else "+" if part > 0 else "\N{MINUS SIGN}"
    return f"{sign}{share:.1f} %" if share < 999.5 else f"{sign}{share:,.0f} %"


def interval(delta: Delta) -> str:
    """``+5.9 to +10.4 %``; empty where there is none."""
    if delta.low is None or delta.high is None:
        return ""
    low = change(delta.low).removesuffix(" %")
    return f"{low} to {change(delta.high)}"


def rows(found: Comparison, *, everything: bool) -> list[Delta]:
    """The figures that a table shows, in its order."""
    return [delta for delta in found.deltas if everything or _is_shown(delta)]


def _is_shown(delta: Delta) -> bool:
    metric = delta.metric
    if delta.a.value is None and delta.b.value is None:
        return False
    if metric.batch is not None:
        enough = min(delta.a.count, delta.b.count) >= _OF_A_BATCH
        return metric.name == "pass_ms.p50" and enough
    if metric.name.startswith("queue_ms") and not (delta.a.value and delta.b.value):
        return False
    if metric.name not in _SHOWN:
        return False
    return not _SURE.search(metric.name) or delta.low is not None


def grouped(
    deltas: Sequence[Delta], key: Callable[[Metric], str] = group
) -> dict[str, list[Delta]]:
    """Rows under the name of what they are of, in their order."""
    found: dict[str, list[Delta]] = {}
    for delta in deltas:
        found.setdefault(key(delta.metric), []).append(delta)
    return found


def word(call: Call) -> str:
    """What is said of a change, empty where nothing is."""
    return {Call.UNSURE: "?", Call.NOT_COMPARED: "not compared"}.get(call, call.value)
