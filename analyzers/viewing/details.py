"""What a page shows beside the report: the run over time, the spread of latencies, the worst requests, the setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phaseprof.analyzers.lean import LEAN
from phaseprof.analyzers.passes import primary_model, sort_passes
from phaseprof.analyzers.ranks import counted_once, groups_of
from phaseprof.analyzers.requests import analyze_requests
from phaseprof.analyzers.results import Report
from phaseprof.analyzers.viewing.distributions import Distribution, distributions
from phaseprof.analyzers.viewing.parts_of_work import PartOfWork, parts_of_work
from phaseprof.analyzers.viewing.setting import Setting, setting_of
from phaseprof.analyzers.viewing.timeline import Timeline, timeline
from phaseprof.analyzers.viewing.worst import WorstRequest, worst_requests
from phaseprof.trace.meta import ModelMeta
from phaseprof.trace.reader import Trace

#: What is not needed of a trace for a report and its details.
DETAILS_LEAN = replace(
    LEAN,
    without=LEAN.without - {"requests.itl_steps", "requests.client_id", "requests.preemptions"},
)


@dataclass(frozen=True, slots=True)
class Details:
    """Beside the report.

    Attributes:
        timeline: The run over time.
        distributions: The spread of each latency. worst: The worst requests.
        parts: Products of matrices and attention apart, where both their work and their time are known.
        setting: How it was measured.
    """

    timeline: Timeline
    distributions: tuple[Distribution, ...]
    worst: tuple[WorstRequest, ...]
    parts: tuple[PartOfWork, ...]
    setting: Setting


def build_details(trace: Trace, report: Report) -> Details:
    """The details of a trace.

    Args:
        trace: The trace, read with at least what `DETAILS_LEAN` leaves.
        report: Its report.
    """
    primary = primary_model(trace.passes)
    counted = counted_once(trace, groups_of(trace, primary.model_id))
    requests = analyze_requests(
        counted.requests, counted.passes, primary.model_id, cut_off=trace.cut_off
    )
    parts: tuple[PartOfWork, ...] = ()
    if any(figures.kernels is not None for figures in report.phases.values()):
        model = _model(trace, primary.model_id)
        parts = parts_of_work(
            counted.passes,
            sort_passes(counted.passes, primary, None).profiled,
            report.phases,
            None if model is None else model.cost,
        )
    devices = {
        device.uuid: device.name for meta in trace.metas for device in meta.devices if device.uuid
    }
    return Details(
        timeline=timeline(counted.passes, trace.samples, primary, devices),
        distributions=distributions(requests.counted, counted.requests, primary),
        worst=worst_requests(counted.requests, counted.passes, primary),
        parts=parts,
        setting=setting_of(trace.metas),
    )


def _model(trace: Trace, model_id: str) -> ModelMeta | None:
    found = [model for meta in trace.metas for model in meta.models if model.model_id == model_id]
    return next((model for model in found if model.cost is not None), None)
