"""`phaseprof profile --engine vllm`: start an engine, run requests of a known size on it, and report."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from phaseprof.cli.render.progress import TerminalProgress
from phaseprof.errors import EmptyRunError, ModelError

if TYPE_CHECKING:
    from phaseprof.api import PrintableReport
    from phaseprof.workload.plan import WorkloadOutcome, WorkloadPlan
    from phaseprof.workload.vllm_engine import EngineOutput, VllmPlace
    from phaseprof.workload.vllm_plan import EngineOptions


@dataclass(frozen=True, slots=True)
class VllmRun:
    """What was asked for.

    Attributes:
        model: A folder or a name on the hub; None for the embedded model, or for `model_config`.
        model_config: A config whose weights are made at random; None for real ones.
        plan: The requests.
        options: Of the engine.
        place: Device and dtype.
        threads: Threads that torch computes with on a CPU, of each rank; None for vLLM's default.
        output: The trace's folder; None for the default.
        calibrate: Measure this device's ceilings first, if they are not known yet.
        collect: Which collectors run, as `--collect` takes it; None for the defaults.
        resume: Go on with the run that `output` has a trace of.
    """

    model: str | None
    model_config: Path | None
    plan: WorkloadPlan
    options: EngineOptions
    place: VllmPlace
    threads: int | None
    output: Path | None
    calibrate: bool
    collect: str | None = None
    resume: bool = False


def profile_vllm(run: VllmRun) -> tuple[PrintableReport, WorkloadOutcome]:
    """Run it.

    Raises:
        PhaseprofError: What went wrong, in one line.
    """
    from phaseprof.api import default_trace_path
    from phaseprof.launch.why import has_passes
    from phaseprof.workload.vllm_engine import EngineOutput

    # Asked for by vLLM's own variable, its log is shown.
    with (
        EngineOutput(shown="VLLM_LOGGING_LEVEL" in os.environ) as output,
        TerminalProgress(output.terminal) as progress,
        _subject(run, progress) as (source, name, note),
    ):
        if not output.terminal.isatty():
            progress.say(_one_line(run, name))
        trace = run.output if run.output is not None else default_trace_path()
        try:
            return _measure(run, source, name, note, trace, output, progress)
        except ModelError:
            # An engine that does not start leaves no trace behind.
            if not has_passes(trace) and not run.resume:
                shutil.rmtree(trace, ignore_errors=True)
            raise


@contextlib.contextmanager
def _subject(run: VllmRun, progress: TerminalProgress) -> Iterator[tuple[str, str, str]]:
    """What vLLM loads, what it is called, and what a reader should know about it."""
    from phaseprof.workload import embedded
    from phaseprof.workload.load import config_name, read_config
    from phaseprof.workload.vllm_engine import config_folder

    if run.model_config is not None:
        name = config_name(run.model_config)
        with config_folder(read_config(run.model_config), name) as folder:
            yield str(folder), f"{name} (random weights)", ""
    elif run.model is not None:
        path = Path(run.model).expanduser()
        yield run.model, path.resolve().name if path.is_dir() else run.model, ""
    else:
        found = embedded.ensure_embedded(progress)
        if found.path is not None:
            yield str(found.path), found.name, found.note
            return
        progress.say(found.note)
        with config_folder(embedded.CONFIG, embedded.NAME) as folder:
            yield str(folder), found.name, found.note


def _measure(
    run: VllmRun,
    source: str,
    name: str,
    note: str,
    trace: Path,
    output: EngineOutput,
    progress: TerminalProgress,
) -> tuple[PrintableReport, WorkloadOutcome]:
    import phaseprof.api
    from phaseprof.evidence import COLLECT_VARIABLE
    from phaseprof.workload.plan import WorkloadOutcome
    from phaseprof.workload.resume import FRESH, check_devices, progressed
    from phaseprof.workload.vllm_engine import running_engine
    from phaseprof.workload.vllm_plan import engine_arguments, engine_environment
    from phaseprof.workload.vllm_requests import run_few_requests, run_requests

    cpu = run.place.cpu
    environment = engine_environment(
        run.options, cpu=cpu, threads=run.threads, environment=os.environ
    )
    arguments = engine_arguments(
        source,
        name,
        run.plan,
        run.options,
        dtype=run.place.dtype,
        random_weights=run.model_config is not None or bool(note),
        cpu=cpu,
    )
    facts = _facts(run, name, note)
    done = progressed(trace, facts) if run.resume else FRESH
    if done.calls:
        progress.say(done.told(run.plan))
    if done.is_whole(run.plan):
        report = phaseprof.api.load_report(trace, calibrate=run.calibrate)
        return report, WorkloadOutcome(0, 0, interrupted=False)
    if run.collect is not None:
        environment[COLLECT_VARIABLE] = run.collect
    if run.calibrate:
        _ensure_ceilings(run.place, progress)
    # It records from before the weights are loaded, as they are counted then.
    with phaseprof.api.profile(None, trace, workload=facts, collect=run.collect) as prof:
        progress("Starting vLLM, which takes a while")
        with running_engine(arguments, environment, prof.trace_path, output) as engine:
            with prof.follow(engine):
                if run.resume:
                    check_devices(trace)
                outcome = run_requests(
                    engine,
                    run.plan,
                    output,
                    share_prefix=bool(run.options.prefix_caching),
                    done=done,
                    progress=progress,
                )
                if not outcome.interrupted:
                    progress("Looking at what runs during a few steps")
                    try:
                        with prof.operator_window():
                            run_few_requests(engine, run.plan, output, done=done)
                            if not cpu:
                                # A profiler that has just begun may lose the first kernels of a GPU.
                                run_few_requests(engine, run.plan, output, done=done, again=1)
                    except KeyboardInterrupt:
                        outcome = replace(outcome, interrupted=True)
            progress("Ending the engine")
        progress("Writing the trace")
    progress("Reading the trace")
    try:
        return prof.report(calibrate=run.calibrate), outcome
    except EmptyRunError:
        if outcome.interrupted:  # before the first step: there is nothing to say but that
            raise KeyboardInterrupt from None
        raise


def _facts(run: VllmRun, name: str, note: str) -> dict[str, object]:
    """What a reader should know of the run, and what must be the same for it to be continued. The device is known when
    the engine runs."""
    facts: dict[str, object] = {
        **run.plan.facts(),
        **run.options.facts(),
        "engine": "vllm",
        "model": name,
        "dtype": run.place.dtype,
        "threads": run.threads,
    }
    if note:
        facts["note"] = note
    return facts


def _one_line(run: VllmRun, name: str) -> str:
    from phaseprof.workload.plan import listed

    plan = run.plan
    device = "cpu" if run.place.cpu else "cuda"
    return (
        f"profiling {name} with vLLM on {device} in {run.place.dtype}: "
        f"{plan.amount()} of {plan.sizes()}, {listed(plan.batches)} at once"
    )


def _ensure_ceilings(place: VllmPlace, progress: TerminalProgress) -> None:
    """Before the run, while the device is free; the report finds them in the cache."""
    from phaseprof.collectors import ceilings
    from phaseprof.devices import describe
    from phaseprof.errors import CalibrationError

    if not place.cpu and "torch" not in sys.modules:
        # The engine's processes are forked where CUDA has not been touched, and start much quicker so.
        return
    try:
        ceilings.ensure(
            describe("cpu" if place.cpu else "cuda:0"),
            place.dtype,
            progress=lambda done, total, what: progress(f"Measuring this device: {what or 'done'}"),
        )
    except CalibrationError as error:
        progress.say(f"{error.message} The report gives no share of a ceiling.")
