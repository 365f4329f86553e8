"""`phaseprof profile [MODEL]`: run requests of a known size on a model, and report."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phaseprof.cli.options import AsJson, Collect, Output
from phaseprof.cli.render.progress import TerminalProgress
from phaseprof.collectors import known
from phaseprof.errors import CalibrationError, EmptyRunError, UsageError

if TYPE_CHECKING:
    import torch

    from phaseprof.api import PrintableReport
    from phaseprof.workload.load import Placement
    from phaseprof.workload.plan import WorkloadOutcome, WorkloadPlan

_INTERRUPTED = 130
_VLLM = "With --engine vllm"


def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face model: a folder or a name on the hub. Default: SmolLM2-135M-Instruct, which is "
            "fetched once.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="hf|vllm", help="What runs the model: transformers or vLLM.")
    ] = "hf",
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N[,N…]", help="Tokens of each prompt: one length or several.")
    ] = "512",
    new_tokens: Annotated[
        str, typer.Option(metavar="N[,N…]", help="Tokens to generate: one number or several.")
    ] = "64",
    batch: Annotated[
        str,
        typer.Option(
            metavar="N[,N…]",
            help="Sequences per call (vLLM: requests at once): one size or several.",
        ),
    ] = "1",
    repeats: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Calls per combination of sizes. Default: 8; where counters of a GPU are sampled, as many more as "
            "take 12 s for each.",
            show_default=False,
        ),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option(
            metavar="N", help="Calls per combination of sizes that run first and do not count."
        ),
    ] = 1,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed of the prompts and of random weights.")
    ] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on CUDA.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda or cuda:N. Default: CUDA if there is a device.", show_default=False
        ),
    ] = None,
    attn: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Attention implementation: sdpa, eager, flash_attention_2, … Default: transformers'.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="KV cache implementation: dynamic, static, … Default: the model's.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Threads torch computes with on a CPU. Default: torch's.",
            show_default=False,
        ),
    ] = None,
    model_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Instead of MODEL: random weights for a config.json, nothing is downloaded.",
            show_default=False,
        ),
    ] = None,
    max_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="vLLM: tokens of a step; longer prompts are computed in chunks. Default: vLLM's.",
            show_default=False,
            rich_help_panel=_VLLM,
        ),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            help="vLLM: keep the KV of prefixes; all prompts then have the same first half. Default: off.",
            show_default=False,
            rich_help_panel=_VLLM,
        ),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="ngram:K",
            help="vLLM: draft K tokens a step, looked up in the prompt and the output.",
            show_default=False,
            rich_help_panel=_VLLM,
        ),
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(metavar="N", help="vLLM: ranks that share each layer.", rich_help_panel=_VLLM),
    ] = 1,
    output: Output = None,
    collect: Collect = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run whose trace -o names, with the calls that it lacks; begin it if there is none.",
        ),
    ] = False,
    as_json: AsJson = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            help="Measure this device's ceilings first, if they are not known yet (seconds, once)."
        ),
    ] = True,
) -> None:
    """Run requests of a known size on a model, and say what bounds prefill and decode.

    Prompts are random tokens of exactly the given number, and every sequence generates exactly as many as asked for.
    Several sizes make a sweep over all their combinations: where batching stops helping, and what prefill does.
    Ctrl-C ends the run early and reports what was recorded; --resume goes on with it.
    """
    from phaseprof.launch.output import check_output
    from phaseprof.workload.plan import REPEATS, WorkloadPlan, parse_sizes
    from phaseprof.workload.vllm_plan import EngineOptions, parse_speculate

    plan = WorkloadPlan(
        prompt_tokens=parse_sizes(prompt_tokens, "--prompt-tokens"),
        new_tokens=parse_sizes(new_tokens, "--new-tokens"),
        batches=parse_sizes(batch, "--batch"),
        warmup=warmup,
        repeats=REPEATS if repeats is None else repeats,
        seed=seed,
        cache_implementation=cache,
    )
    if model is not None and model_config is not None:
        raise UsageError("MODEL and --model-config exclude each other.", "Give one of them.")
    if threads is not None and threads < 1:
        raise UsageError(f"Threads: {threads} is less than 1.")
    options = EngineOptions(
        max_batched_tokens, prefix_caching, parse_speculate(speculate), tensor_parallel
    )
    collected = known.asked_for(collect)
    if engine not in ("hf", "vllm"):
        raise UsageError(f"Unknown engine {engine!r}.", "Use hf or vllm.")
    if engine == "hf" and options != EngineOptions():
        raise UsageError(
            "--max-batched-tokens, --prefix-caching, --speculate and --tensor-parallel are vLLM's.",
            "Add --engine vllm.",
        )
    if engine == "vllm" and (attn is not None or cache is not None):
        raise UsageError("--attn and --cache are of transformers.", "Leave them out.")
    if resume and output is None:
        raise UsageError("--resume does not say with which trace.", "Name its folder with -o.")
    if output is not None and not (resume and output.is_dir()):
        # Said before the model is loaded; the trace's writer would say it after.
        check_output(output)
    if engine == "vllm":
        from phaseprof.cli.profile_vllm import VllmRun, profile_vllm
        from phaseprof.workload.vllm_engine import choose_vllm_place, require_vllm

        require_vllm()
        place = choose_vllm_place(device, dtype)
        if repeats is None and not place.cpu:
            plan = _long_enough(plan, collected)
        report, outcome = profile_vllm(
            VllmRun(
                model,
                model_config,
                plan,
                options,
                place,
                threads,
                output,
                calibrate,
                collected,
                resume,
            )
        )
        _end(report, outcome, as_json)
        return
    with TerminalProgress() as progress:
        progress("Loading torch and transformers")
        _use_threads(threads)
        from phaseprof.workload.load import choose_placement, require_transformers

        placement = choose_placement(device, dtype, attn)
        require_transformers()
        if repeats is None and placement.device != "cpu":
            plan = _long_enough(plan, collected)
        subject = _get_model(model, model_config, placement, seed, progress)
        result = _measure(
            subject, plan, placement, output, calibrate, progress, collected, resume=resume
        )
    _end(result.report, result.outcome, as_json)


def _long_enough(plan: WorkloadPlan, collect: str | None) -> WorkloadPlan:
    """The plan, to run until there are samples of every phase where a GPU is sampled."""
    from phaseprof.collectors.gpu_counters import samples_gpus
    from phaseprof.workload.plan import SAMPLED_S

    if not samples_gpus(collect):
        return plan
    return replace(plan, least_s=SAMPLED_S * len(plan.cells))


def _end(report: PrintableReport, outcome: WorkloadOutcome, as_json: bool) -> None:
    _print(report, as_json)
    if outcome.interrupted:
        TerminalProgress().say(
            f"interrupted after {outcome.calls} of {outcome.planned} calls; the report covers those"
            f" (--resume -o {report.facts.trace_path} goes on with the rest)"
        )
        raise typer.Exit(_INTERRUPTED)


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model to run, and what a reader should know about it."""

    model: torch.nn.Module
    name: str
    note: str


@dataclass(frozen=True, slots=True)
class _Result:
    report: PrintableReport
    outcome: WorkloadOutcome


def _use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _get_model(
    model: str | None,
    model_config: Path | None,
    placement: Placement,
    seed: int,
    progress: TerminalProgress,
) -> _Subject:
    from phaseprof.workload import embedded
    from phaseprof.workload.load import config_name, load_model, random_model, read_config

    if model_config is not None:
        name = config_name(model_config)
        progress(f"Making random weights for {name}")
        made = random_model(read_config(model_config), placement, name=name, seed=seed)
        return _Subject(made, f"{name} (random weights)", "")
    if model is not None:
        progress(f"Loading {model}")
        return _Subject(load_model(model, placement), model, "")
    found = embedded.ensure_embedded(progress)
    if found.path is None:
        progress.say(found.note)
        progress(f"Making random weights for {embedded.NAME}")
        made = random_model(embedded.CONFIG, placement, name=embedded.NAME, seed=seed)
        return _Subject(made, found.name, found.note)
    progress(f"Loading {found.name}")
    return _Subject(load_model(str(found.path), placement, name=found.name), found.name, "")


def _measure(
    subject: _Subject,
    plan: WorkloadPlan,
    placement: Placement,
    output: Path | None,
    calibrate: bool,
    progress: TerminalProgress,
    collect: str | None,
    *,
    resume: bool,
) -> _Result:
    import phaseprof.api
    from phaseprof.workload.generate import check_fits, run_few_tokens, run_workload
    from phaseprof.workload.load import quiet_transformers
    from phaseprof.workload.plan import WorkloadOutcome
    from phaseprof.workload.resume import FRESH, progressed

    check_fits(subject.model, plan)
    facts = _facts(subject, plan, placement)
    done = progressed(output, facts) if resume and output is not None else FRESH
    if not sys.stderr.isatty():
        progress.say(_one_line(subject, plan, placement))
    if done.calls:
        progress.say(done.told(plan))
    if calibrate:
        _ensure_ceilings(placement, progress)
    if output is not None and done.is_whole(plan):
        report = phaseprof.api.load_report(output, calibrate=calibrate)
        return _Result(report, WorkloadOutcome(0, 0, interrupted=False))
    with (
        quiet_transformers(),
        phaseprof.api.profile(subject.model, output, workload=facts, collect=collect) as prof,
    ):
        outcome = run_workload(subject.model, plan, done=done, progress=progress)
        if not outcome.interrupted:
            progress("Looking at what runs during a few passes")
            try:
                with prof.operator_window():
                    run_few_tokens(subject.model, plan, done=done)
                    if placement.device != "cpu":
                        # A profiler that has just begun may lose the first kernels of a GPU.
                        run_few_tokens(subject.model, plan, done=done, again=1)
            except KeyboardInterrupt:
                outcome = replace(outcome, interrupted=True)
        progress("Writing the trace")
    progress("Reading the trace")
    try:
        return _Result(prof.report(calibrate=calibrate), outcome)
    except EmptyRunError:
        if outcome.interrupted:  # before the first pass: there is nothing to say but that
            raise KeyboardInterrupt from None
        raise


def _facts(subject: _Subject, plan: WorkloadPlan, placement: Placement) -> dict[str, object]:
    """What a reader should know of the run, and what must be the same for it to be continued."""
    from phaseprof.devices import describe

    device = describe(placement.device)
    facts: dict[str, object] = {
        **plan.facts(),
        "attn": placement.attn_implementation,
        "engine": "hf",
        "model": subject.name,
        "parameters": sum(parameter.numel() for parameter in subject.model.parameters()),
        "dtype": placement.dtype,
        "device": device.key,
        "threads": device.threads,
    }
    if subject.note:
        facts["note"] = subject.note
    return facts


def _one_line(subject: _Subject, plan: WorkloadPlan, placement: Placement) -> str:
    from phaseprof.workload.plan import listed

    return (
        f"profiling {subject.name} on {placement.device} in {placement.dtype}: {plan.amount()} of "
        f"{plan.sizes()}, batch {listed(plan.batches)}"
    )


def _ensure_ceilings(placement: Placement, progress: TerminalProgress) -> None:
    """Before the run, so that nothing else of ours is in memory; the report finds them in the cache."""
    from phaseprof.collectors import ceilings
    from phaseprof.devices import describe

    try:
        ceilings.ensure(
            describe(placement.device),
            placement.dtype,
            progress=lambda done, total, what: progress(f"Measuring this device: {what or 'done'}"),
        )
    except CalibrationError as error:
        progress.say(f"{error.message} The report gives no share of a ceiling.")


def _print(report: PrintableReport, as_json: bool) -> None:
    if as_json:
        from phaseprof.analyzers.as_json import to_json

        print(json.dumps(to_json(report), indent=2, allow_nan=False))
    else:
        from phaseprof.cli.render.stream import render_for

        print(render_for(report, sys.stdout))
