"""From a trace to the report: the one place that puts the analyses together. Pure: nothing is measured or printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import pyarrow as pa

from phaseprof.analyzers.advice import advise
from phaseprof.analyzers.answer import Findings, answer
from phaseprof.analyzers.columns import column, counts, named, names, total
from phaseprof.analyzers.counters.counters import Counters, analyze_counters
from phaseprof.analyzers.counters.counters import not_measured as not_measured_of_counters
from phaseprof.analyzers.kernels.breakdown import breakdown
from phaseprof.analyzers.kernels.kernel_results import Unattributed
from phaseprof.analyzers.passes import Primary, SortedPasses, primary_model, sort_passes
from phaseprof.analyzers.phases import Basis, phase_figures
from phaseprof.analyzers.ranks import analyze_ranks, counted_once, groups_of
from phaseprof.analyzers.ranks import not_measured as not_measured_of_ranks
from phaseprof.analyzers.requests import RequestAnalysis, analyze_requests
from phaseprof.analyzers.results import (
    Lever,
    OwnCost,
    PhaseFigures,
    RanksReport,
    Report,
    RunFacts,
)
from phaseprof.analyzers.served import analyze_serving
from phaseprof.analyzers.serving import EngineFigures, Objective
from phaseprof.analyzers.steps.mixed_split import split_mixed
from phaseprof.analyzers.steps.op_roofline import step_floors
from phaseprof.analyzers.steps.pass_rows import rows_of_phases
from phaseprof.analyzers.sweeping.sweep import analyze_sweep
from phaseprof.analyzers.testimony import Testimony
from phaseprof.analyzers.two_phases import two_phase_facts
from phaseprof.analyzers.what_if.changes import Hardware, hardware_of
from phaseprof.analyzers.what_if.measured import Facts, take_apart
from phaseprof.analyzers.windows import windows_cost
from phaseprof.analyzers.wording import count, duration, joined, percent, sentence
from phaseprof.errors import EmptyRunError, NotMeasured
from phaseprof.trace.meta import Ceilings, Device, ModelMeta, ProcessMeta
from phaseprof.trace.reader import Trace

_SAME_RUN_NS = 1_000_000_000


def build_report(
    trace: Trace,
    *,
    ceilings: Ceilings | None = None,
    objectives: Sequence[Objective] = (),
    hardware: Hardware | None = None,
) -> Report:
    """Analyse a trace.

    Args:
        trace: The trace, whole or damaged.
        ceilings: Roofs to hold the run against; None takes those that the trace holds.
        objectives: What a request should keep, for the goodput.
        hardware: What is known of the device beside the trace; None: nothing.

    Raises:
        EmptyRunError: If the trace holds no pass; it says which hooks were set and why none may have fired.
    """
    if trace.passes.num_rows == 0:
        raise _empty_run(trace)
    primary = primary_model(trace.passes)
    model = _model(trace.metas, primary.model_id)
    device, dtype = _device(trace.metas, model), _dtype(trace.passes, primary)
    basis = _basis(trace.metas, model, device, dtype, ceilings)
    groups = groups_of(trace, primary.model_id)
    counted = counted_once(trace, groups)
    sorted_passes = sort_passes(counted.passes, primary, basis.ceilings)
    kernels = breakdown(sorted_passes.profiled, counted.kernels, basis.device_kind)
    phases, by_batch = phase_figures(sorted_passes, counted.kernels, basis, kernels)
    unheard: tuple[NotMeasured, ...] = ()
    counters = analyze_counters(trace, primary, phases, by_batch, len(groups))
    if counters is not None:
        phases, by_batch = counters.beside(phases, by_batch)
        testimony = Testimony.of(counters.devices, device, model)
        phases = testimony.heard(phases)
        by_batch = {batch: testimony.heard(figures) for batch, figures in by_batch.items()}
        unheard = tuple(testimony.lacking())
    rows = rows_of_phases(
        counted_once(replace(trace, passes=trace.whole_passes), groups).passes, primary
    )
    cost = None if model is None else model.cost
    sweep = analyze_sweep(counted, primary, basis)
    unattributed = None if kernels is None else kernels.unattributed
    incomplete = sum(not meta.complete for meta in trace.metas)
    requests = analyze_requests(
        counted.requests,
        counted.passes,
        primary.model_id,
        cut_off=trace.cut_off,
    )
    facts = _facts(trace, primary, model, device, dtype, incomplete)
    ranks = analyze_ranks(trace, primary, groups)
    served = analyze_serving(trace, counted.requests, primary, phases, objectives)
    findings = Findings(
        facts, phases, by_batch, requests, sorted_passes, basis, primary.other_share, served
    )
    known = [roof for roof in (basis.ceilings, *basis.other_roofs) if roof is not None]
    batches = facts.workload.get("batch")
    measured = take_apart(
        phases,
        by_batch,
        sorted_passes,
        requests.figures,
        basis,
        Facts(
            hardware=hardware or hardware_of(device, known),
            dtype=dtype,
            engine=facts.engine,
            ranks=max(len(model.tensor_ranks), 1) if model is not None else 1,
            queue_ms=_queue_ms(served.engine),
            swept=isinstance(batches, list | tuple) and len(batches) > 1,
        ),
        counted.passes,
        primary,
    )
    return Report(
        facts=facts,
        answer=answer(findings),
        phases=phases,
        by_batch=by_batch,
        requests=requests.figures,
        set_aside=sorted_passes.set_aside,
        own_cost=_own_cost(trace),
        ceilings=basis.ceilings,
        damage=trace.damage,
        not_measured=tuple(
            _not_measured(
                trace,
                basis,
                phases,
                requests,
                ranks,
                [*served.lacking, *_launchless(unattributed), *unheard],
            )
        ),
        provenance=tuple(
            _provenance(trace, primary, basis, phases, sorted_passes, ranks, counters)
        ),
        ranks=ranks,
        engine=served.engine,
        interference=served.interference,
        goodput=served.goodput,
        devices=() if counters is None else counters.devices,
        unattributed=unattributed,
        operations=step_floors(rows, cost, basis.ceilings, phases, device),
        mixed=split_mixed(rows, cost, basis.ceilings),
        two_phases=two_phase_facts(
            phases, by_batch, counted.passes, primary, requests.figures.count, sweep
        ),
        advice=advise(measured, _first_lever(phases)),
        measured=measured,
        sweep=sweep,
    )


def _queue_ms(engine: EngineFigures | None) -> float:
    return 0.0 if engine is None or engine.queue_ms is None else engine.queue_ms.p50


def _first_lever(phases: dict[str, PhaseFigures]) -> Lever | None:
    """The lever of the phase with the most time."""
    if not phases:
        return None
    return max(phases.values(), key=lambda figures: figures.share).verdict.lever


def primary_device(trace: Trace) -> tuple[Device | None, str]:
    """The device of the model that the report is about, and the dtype it computes in: what its roofs depend on.

    Returns:
        None for a device that was not recorded; an empty dtype for a trace without passes.
    """
    if trace.passes.num_rows == 0:
        return None, ""
    primary = primary_model(trace.passes)
    device = _device(trace.metas, _model(trace.metas, primary.model_id))
    return device, _dtype(trace.passes, primary)


# --- what was profiled ----------------------------------------------------------------------------


def _model(metas: Iterable[ProcessMeta], model_id: str) -> ModelMeta | None:
    """The model's description; of several, one whose cost is known."""
    found = [model for meta in metas for model in meta.models if model.model_id == model_id]
    return next((model for model in found if model.cost is not None), found[0] if found else None)


def _device(metas: Iterable[ProcessMeta], model: ModelMeta | None) -> Device | None:
    """The model's device; for a model without description, the only one there is."""
    devices = {device.key: device for meta in metas for device in meta.devices}
    if model is not None:
        return devices.get(model.device_key)
    return next(iter(devices.values())) if len(devices) == 1 else None


def _dtype(passes: pa.Table, primary: Primary) -> str:
    """The dtype in which most passes of the model computed."""
    found = _of_primary(passes, "dtype", primary)
    return max(sorted(found), key=found.__getitem__)


def _of_primary(passes: pa.Table, name: str, primary: Primary) -> dict[str, int]:
    """How many passes of the model have each value of a column of names."""
    return counts(names(passes, name).filter(named(names(passes, "model_id"), primary.model_id)))


def _facts(
    trace: Trace,
    primary: Primary,
    model: ModelMeta | None,
    device: Device | None,
    dtype: str,
    incomplete: int,
) -> RunFacts:
    named = {m.model_id: _title(m.name) for meta in trace.metas for m in meta.models}
    for model_id in counts(names(trace.passes, "model_id")):
        named.setdefault(model_id, model_id)
    others = [name for model_id, name in named.items() if model_id != primary.model_id]
    meta = _meta_of(trace.metas, primary.model_id)
    engine = "" if model is None else model.engine
    version = meta.versions.get(engine, "") if meta is not None else ""
    cost = None if model is None else model.cost
    return RunFacts(
        model=named[primary.model_id],
        model_class="" if model is None else model.class_name,
        engine=f"{engine} {version}".strip(),
        device=device,
        dtype=dtype,
        command=() if meta is None else meta.command,
        ranks=_ranks(trace),
        processes=len(trace.metas),
        incomplete=incomplete,
        models=tuple(dict.fromkeys(others)),
        # The process that was told what to run may be another one than that of the model.
        workload=next((dict(each.workload) for each in trace.metas if each.workload), {}),
        trace_path=str(trace.path),
        trace_bytes=trace.size_bytes,
        weight_bits=cost.bits_per_weight if cost is not None else None,
    )


def _meta_of(metas: tuple[ProcessMeta, ...], model_id: str) -> ProcessMeta | None:
    """The process that ran the model; the first one if none names it."""
    for meta in metas:
        if any(model.model_id == model_id for model in meta.models):
            return meta
    return metas[0] if metas else None


def _ranks(trace: Trace) -> int:
    return len(column(trace.passes, "rank").unique())


# --- what it is held against ----------------------------------------------------------------------


def _basis(
    metas: tuple[ProcessMeta, ...],
    model: ModelMeta | None,
    device: Device | None,
    dtype: str,
    given: Ceilings | None,
) -> Basis:
    key = device.key if device is not None else (model.device_key if model is not None else None)
    known = [roof for meta in metas for roof in meta.ceilings if roof.device_key == key]
    # Measured roofs before those of a datasheet, the newest first.
    known.sort(key=lambda roof: (roof.source != "measured", -(roof.measured_ns or 0)))
    by_dtype: dict[str, Ceilings] = {}
    for roof in known:
        by_dtype.setdefault(roof.dtype, roof)
    ceilings = given if given is not None else by_dtype.get(dtype)
    others = tuple(
        roof for name, roof in by_dtype.items() if ceilings is None or name != ceilings.dtype
    )
    return Basis(
        cost=None if model is None else model.cost,
        ceilings=ceilings,
        other_roofs=others,
        device_kind="" if device is None else device.kind,
        no_work=_why_no_work(model),
        no_roofs="" if ceilings is not None else _why_no_roofs(device, dtype, others),
    )


def _why_no_work(model: ModelMeta | None) -> str:
    if model is None or (model.cost is None and not model.class_name):
        return "the trace does not describe this model, so that its FLOPs and bytes are not known"
    if model.cost is None:
        return f"the structure of {model.class_name} could not be read"
    if not model.cost.covered:
        why = "; ".join(model.cost.not_covered)
        return f"the closed form for FLOPs and bytes does not cover {model.class_name} ({why})"
    return ""


def _why_no_roofs(device: Device | None, dtype: str, others: tuple[Ceilings, ...]) -> str:
    if device is None:
        return "the device was not recorded, so that its roofs are not known"
    known = f" (known for {', '.join(sorted(roof.dtype for roof in others))})" if others else ""
    if not dtype:
        return "the dtype that the model computes in is not known, and so its roofs are not"
    return f"the roofs of {device.name} for {dtype} are not known{known}"


# --- what is missing ------------------------------------------------------------------------------


def _not_measured(
    trace: Trace,
    basis: Basis,
    phases: dict[str, PhaseFigures],
    requests: RequestAnalysis,
    ranks: RanksReport | None,
    others: Sequence[NotMeasured],
) -> Iterator[NotMeasured]:
    """What the processes could not measure, then what this analysis lacked; each thing once."""
    told: set[tuple[str, str]] = set()
    entries = [entry for meta in trace.metas for entry in meta.not_measured]
    lacking = (
        *_lacking(basis, phases, requests),
        *others,
        *not_measured_of_ranks(trace, ranks),
        *not_measured_of_counters(trace),
        *_counted(trace),
    )
    for entry in [*entries, *lacking]:
        # The process has said of which model, and why.
        again = entry.what == _WORK and any(e.what.startswith(f"{_WORK} of ") for e in entries)
        if (entry.what, entry.why) not in told and not again:
            told.add((entry.what, entry.why))
            yield entry


def _launchless(found: Unattributed | None) -> Iterator[NotMeasured]:
    """Kernels whose launch was not seen: whose they are is not guessed from where they lie."""
    if found is not None and found.launchless:
        yield NotMeasured(
            f"the pass of {count(found.launchless, 'kernel')} "
            f"({percent(found.launchless_share)} of the time of all)",
            "their launch was not recorded: they were under way when the recording began, or records were lost",
        )


def _counted(trace: Trace) -> Iterator[NotMeasured]:
    """Models whose FLOPs have another source than the closed form."""
    for model in (model for meta in trace.metas for model in meta.models):
        if model.cost is not None and model.cost.counted:
            yield NotMeasured(
                f"a closed form of the FLOPs of {model.class_name}",
                "there is none: they were counted by torch on tensors without data, at a few lengths",
            )


#: What an analysis lacks without a model's cost; the process that saw the model adds " of <class>".
_WORK = "FLOPs and bytes"


def _title(name: str) -> str:
    """What people call a model: of a local folder the last part, of a name on the hub all of it."""
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _lacking(
    basis: Basis, phases: dict[str, PhaseFigures], requests: RequestAnalysis
) -> Iterator[NotMeasured]:
    if basis.no_work:
        yield NotMeasured(_WORK, basis.no_work)
    if basis.no_roofs:
        yield NotMeasured("share of the roofs", basis.no_roofs, "phaseprof calibrate")
    unseen = [name for name, figures in phases.items() if figures.busy_ms is None]
    if unseen:
        yield NotMeasured(
            f"busy time of the device in {', '.join(unseen)}",
            "no pass was recorded with a kernel timeline",
            "record a few with `--collect default,kernels`, as `phaseprof profile` does",
        )
    if basis.device_kind == "cpu" and all(each.counters is None for each in phases.values()):
        yield NotMeasured("SM, tensor-core and DRAM counters", "no NVIDIA GPU in this run")
    if requests.rebuilt:
        yield NotMeasured(
            f"arrival of {count(requests.rebuilt, 'request')}",
            "they have no end in the trace; their time to first token begins with their first pass",
        )
    if requests.unsteady:
        yield NotMeasured(
            "latencies of steady requests",
            f"all requests {requests.unsteady}; they are counted for want of others",
            "send more requests",
        )


# --- where it comes from --------------------------------------------------------------------------


def _own_cost(trace: Trace) -> OwnCost | None:
    costs = [meta.self_cost for meta in trace.metas if meta.self_cost is not None]
    passes = sum(cost.passes for cost in costs)
    whole_ns = total(column(trace.passes, "host_ns"))
    if not passes or not whole_ns:
        return None
    hook_ns = sum(cost.hook_ns for cost in costs)
    return OwnCost(
        hook_us_per_pass=hook_ns / passes / 1e3,
        share=hook_ns / whole_ns,
        writer_cpu_ms=sum(cost.writer_cpu_ns for cost in costs) / 1e6,
        windows=windows_cost(costs, trace.passes),
        sampler_cpu_ms=sum(cost.sampler_cpu_ns for cost in costs) / 1e6,
    )


def _provenance(
    trace: Trace,
    primary: Primary,
    basis: Basis,
    phases: dict[str, PhaseFigures],
    sorted_passes: SortedPasses,
    ranks: RanksReport | None,
    counters: Counters | None,
) -> Iterator[tuple[str, str]]:
    yield "time", "device events" if sorted_passes.on_device else "host clock"
    yield "labels", _label_sources(trace.passes, primary)
    if any(figures.flops is not None for figures in phases.values()):
        yield "FLOPs, bytes", "closed form (docs/work-model)"
    if basis.ceilings is not None:
        yield "roofs", _roofs_origin(basis.ceilings, trace)
    if any(figures.busy_ms is not None for figures in phases.values()):
        yield "busy", f"kernel timeline of {count(sorted_passes.profiled.num_rows, 'pass')}"
    if counters is not None:
        yield from counters.provenance
    if ranks is not None:
        yield "ranks", _counted_ranks(ranks)


def _counted_ranks(ranks: RanksReport) -> str:
    """What the figures of the report are sums over."""
    together, groups = len(ranks.ranks), len(ranks.groups)
    if groups == together:
        return (
            f"{together}: passes, tokens, requests and time are sums over them, rates are per rank"
        )
    leaders = joined([str(rank) for rank in ranks.leaders])
    shared = f"{together} share the passes, which count once: figures are those of"
    if groups == 1:
        return f"{shared} rank {leaders}"
    return f"{shared} ranks {leaders}, summed, and rates are per group"


def _label_sources(passes: pa.Table, primary: Primary) -> str:
    found = _of_primary(passes, "tag_source", primary)
    if len(found) == 1:
        return next(iter(found))
    whole = sum(found.values())
    by_count = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {percent(passes_of / whole)}" for name, passes_of in by_count)


def _roofs_origin(roofs: Ceilings, trace: Trace) -> str:
    if roofs.source != "measured":
        return f"{roofs.source}: {roofs.reference}" if roofs.reference else roofs.source
    parts = ["phaseprof calibrate"]
    begun = min((meta.started_ns for meta in trace.metas), default=None)
    if roofs.measured_ns is not None and begun is not None:
        parts.append(_age(begun - roofs.measured_ns))
    if roofs.spread is not None:
        parts.append(f"±{percent(roofs.spread)}")
    return ", ".join(parts)


def _age(before_ns: int) -> str:
    """How long before the run something was measured, in the unit that people would use."""
    if before_ns < _SAME_RUN_NS:
        return "with the run"
    seconds = before_ns / 1e9
    for unit, size in (("days", 86_400), ("hours", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} before the run"
    return f"{duration(round(seconds))} before the run"


def _empty_run(trace: Trace) -> EmptyRunError:
    """The error for a trace without passes: what was watched, and why nothing may have come."""
    if trace.damage:
        return EmptyRunError(
            f"no forward pass can be read: {trace.damage[0]}",
            "Record the run again, with room on the disk.",
        )
    hooks = list(dict.fromkeys(hook for meta in trace.metas for hook in meta.hooks))
    elsewhere = (
        "If the model runs in another process, start that command under `phaseprof run -- …`. "
        "Details: phaseprof doctor"
    )
    if trace.kernels.num_rows and not any(meta.hooks for meta in trace.metas):
        unseen = " ".join(dict.fromkeys(_reasons(trace.metas)))
        return EmptyRunError(
            f"no forward pass is known in this trace, only {count(trace.kernels.num_rows, 'kernel')}. {unseen}".strip(),
            "Say what its ranges are: phaseprof import … --annotation NAME=prefill.",
        )
    if not trace.metas:
        return EmptyRunError("no forward pass was seen: the trace is empty.", elsewhere)
    if hooks:
        seen = f"Hooks were set on {'; '.join(hooks)}"
        cut = any(not meta.complete for meta in trace.metas)
        why = (
            "the process ended, or was killed, before a first pass was written"
            if cut
            else "the script never called a model that they watch"
        )
        message = f"no forward pass was seen. {seen}; {why}."
    else:
        message = "no forward pass was seen. No hooks were set: the process loaded no engine that phaseprof knows."
    return EmptyRunError(" ".join([message, *dict.fromkeys(_reasons(trace.metas))]), elsewhere)


def _reasons(metas: Iterable[ProcessMeta]) -> list[str]:
    """What the processes could not measure, as sentences."""
    return [sentence(f"{entry.what}: {entry.why}") for meta in metas for entry in meta.not_measured]
