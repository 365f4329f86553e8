"""`phaseprof compare A B`: what changed between traces, how sure that is, and whether rules were broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phaseprof.cli.compare_settings import parse_noise, read_settings
from phaseprof.cli.options import AsJson, Width
from phaseprof.errors import EmptyRunError, TraceError, UsageError

if TYPE_CHECKING:
    from phaseprof.analyzers.comparing.results import Comparison
    from phaseprof.analyzers.comparing.sample import Sample
    from phaseprof.analyzers.results import Report
    from phaseprof.trace.meta import Ceilings
    from phaseprof.trace.reader import Trace


def compare(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B [C…]",
            help="Folders that profile or run wrote: the base first, then one or more to hold against it.",
            show_default=False,
        ),
    ],
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="Exit with 1 if this happened, noise taken into account: 'decode.tpot_ms.p50 > +5%', "
            "'requests.ttft_ms.p99 > 200ms', 'decode.mbu < -3%'. Can be given several times.",
            show_default=False,
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rules from a TOML file. Default: the section tool.phaseprof.compare of ./pyproject.toml, if it "
            "has one.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option(
            "--strict/--no-strict",
            help="Exit with 1 also where a rule could not be judged, or its breach is not certain.",
            show_default=False,
        ),
    ] = None,
    run_noise: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="By how much whole runs of the same thing differ (standard deviation). Default: 2% on a CPU, 0.5% on "
            "GPUs.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Write Markdown for a pull request to a file; - prints it instead of text.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every figure, and every batch size.")
    ] = False,
    width: Width = None,
) -> None:
    """Say what changed between traces: which phase, by how much, how sure that is, and what was different around them.

    Intervals take into account that passes of one request are alike and that machines drift. With rules it is a gate:
    the exit code is 1 where a change is beyond a rule and beyond the noise.
    """
    import pyarrow as pa

    from phaseprof.analyzers.comparing.compare import compare as compare_samples
    from phaseprof.analyzers.comparing.rules import parse

    if len(traces) < 2:
        raise UsageError("One trace is nothing to compare.", "Give two or more: A B.")
    if as_json and markdown == "-":
        raise UsageError("--json and --markdown - both print.", "Give one of them a file.")
    settings = read_settings(rules)
    # Before anything is read: a wrong rule is said at once.
    parsed = [parse(text) for text in (*settings.fail_on, *(fail_on or ()))]
    strict = bool(settings.strict) if strict is None else strict
    noise = settings.run_noise if run_noise is None else parse_noise(run_noise)
    # It gives back at once what is freed. This process is ours alone.
    pa.set_memory_pool(pa.system_memory_pool())
    base = _sample(traces[0], 0, None)
    samples = [base, *(_sample(path, n, base.report) for n, path in enumerate(traces[1:], 1))]
    found = [compare_samples(base, other, rules=parsed, run_noise=noise) for other in samples[1:]]
    failed = any(each.failed(strict=strict) for each in found)
    reports = [each.report for each in samples]
    if markdown not in (None, "-"):
        _write(Path(str(markdown)), _markdown(found, reports, failed))
    if as_json:
        from phaseprof.analyzers.comparing.as_json import to_json

        print(json.dumps(to_json(found, reports, failed=failed), indent=2, allow_nan=False))
    elif markdown == "-":
        print(_markdown(found, reports, failed), end="")
    else:
        from phaseprof.cli.render.comparison import render
        from phaseprof.cli.render.stream import takes_color, takes_unicode, width_of

        text = render(
            found,
            reports,
            width=width or width_of(sys.stdout),
            color=takes_color(sys.stdout),
            unicode=takes_unicode(sys.stdout),
            everything=everything,
            rules_from=settings.source if settings.fail_on else "",
        )
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))
    if failed:
        raise typer.Exit(1)


def _sample(path: Path, side: int, base: Report | None) -> Sample:
    """Read one trace. Its roofs are those of the base where it ran on the same kind of device: two calibrations differ
    by some percent, and shares of them would as well."""
    from phaseprof.analyzers.comparing.sample import sample_of
    from phaseprof.analyzers.lean import ENGINE_LEAN, LEAN
    from phaseprof.analyzers.report import build_report
    from phaseprof.schema import STEPS
    from phaseprof.trace.reader import open_trace

    trace = open_trace(path, lean=ENGINE_LEAN if (path / STEPS.name).is_dir() else LEAN)
    try:
        report = build_report(trace, ceilings=_roofs(trace, base))
    except EmptyRunError as error:
        raise EmptyRunError(f"{path}: {error.message}", error.remedy) from error
    return sample_of(trace, report, side)


def _roofs(trace: Trace, base: Report | None) -> Ceilings | None:
    from phaseprof.analyzers.report import primary_device
    from phaseprof.collectors import ceilings as ceilings_of

    device, dtype = primary_device(trace)
    if device is None or not dtype:
        return None
    if base is not None and base.ceilings is not None and base.facts.device is not None:
        first = base.facts.device
        same = (first.name, first.kind, first.threads) == (device.name, device.kind, device.threads)
        if same and base.ceilings.dtype == dtype:
            return base.ceilings
    kept = any(
        each.device_key == device.key and each.dtype == dtype
        for meta in trace.metas
        for each in meta.ceilings
    )
    return None if kept else ceilings_of.resolve(device, dtype)


def _markdown(found: list[Comparison], reports: list[Report], failed: bool) -> str:
    from phaseprof.cli.render.comparison_markdown import render_markdown

    return render_markdown(found, reports, failed=failed)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(
            f"{path} cannot be written: {error.strerror or error}.", "Choose another file."
        ) from error
