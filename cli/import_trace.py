"""`phaseprof import FILE…`: recordings of other profilers as a trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phaseprof.cli.options import Output

if TYPE_CHECKING:
    from phaseprof.importing.run import Imported, RankFound
    from phaseprof.phases import Phase


def import_trace(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…",
            help="Traces of torch.profiler (.json, .json.gz), one a rank, or exports of Nsight Systems (.sqlite); "
            "a folder of them; - for standard input.",
            show_default=False,
        ),
    ],
    output: Output = None,
    annotation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PHASE",
            help="What a range of yours is (record_function, NVTX): prefill, decode or mixed. * in a "
            "name stands for anything. Can be given several times.",
            show_default=False,
        ),
    ] = None,
    model_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="config.json of the model, or its folder: FLOPs, bytes and the share of the roofs are worked out.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn recordings that other profilers made into a trace: passes with their phases, and the kernels of each.

    Kernels belong to the step that launched them. What cannot be joined is counted and left alone.
    """
    import pyarrow as pa

    from phaseprof.cli.render.progress import TerminalProgress
    from phaseprof.importing.run import Options, find_files, import_files
    from phaseprof.launch.output import prepare_output

    # It gives back at once what is freed. This process is ours alone.
    pa.set_memory_pool(pa.system_memory_pool())
    named = _phases(annotation or [])
    found_files = find_files(files)
    given = None
    with TerminalProgress() as progress:
        if model_config is not None:
            from phaseprof.work.from_config import load_given

            progress("reading the model")
            given = load_given(model_config)
        folder = prepare_output(output)
        # What was typed, for whoever reads the trace.
        options = Options(named, given, ("phaseprof", *sys.argv[1:]))
        try:
            found = import_files(found_files, folder.path, options, progress)
        except BaseException:
            _clear(folder.path)
            folder.remove_if_empty()
            raise
    shown = output if output is not None else Path(folder.path.name)
    some = any(each.passes for each in found.ranks)
    last = f"phaseprof report {shown}" if some else f"{shown} has the kernels, of no pass."
    print("\n".join([*_lines(found), last]))


def _phases(asked: list[str]) -> dict[str, Phase]:
    """The phases of names.

    Raises:
        UsageError: If one is not of the form ``NAME=PHASE``.
    """
    from phaseprof.errors import UsageError
    from phaseprof.phases import Phase

    known = {phase.value: phase for phase in (Phase.PREFILL, Phase.DECODE, Phase.MIXED)}
    found = {}
    for each in asked:
        name, _, phase = each.rpartition("=")
        if not name or phase not in known:
            raise UsageError(
                f"--annotation takes NAME=PHASE, not {each!r}.",
                "The phase is prefill, decode or mixed: --annotation generate_step=decode.",
            )
        found[name] = known[phase]
    return found


def _clear(trace: Path) -> None:
    """Remove what was written of a trace that will not be whole. The folder was empty before."""
    import shutil

    for path in trace.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _lines(found: Imported) -> list[str]:
    """What was found, a few lines a file."""
    from phaseprof.importing.lacking import range_of

    lines = []
    for each in found.ranks:
        where = f"{each.file}, rank {each.rank}" if len(found.ranks) > 1 else each.file
        lines.append(f"{where}: {_steps(each)}")
        lines.append(f"  {_kernels(each)}")
        lines += [f"  damaged: {clause}" for clause in each.damage]
        if each.incomplete:
            lines.append(f"  {each.incomplete:,} steps lack kernels that they ran")
    lines += [f"left out: {file}: {why}" for file, why in found.left_out.items()]
    if not any(each.passes for each in found.ranks):
        placed = range_of(found.ranks[0].source)
        lines.append(
            f"Nothing announces prefill or decode: put {placed} around each, record again, and import with "
            "--annotation NAME=prefill."
        )
    return lines


def _steps(each: RankFound) -> str:
    if not each.passes:
        return "no steps found"
    steps = ", ".join(f"{number:,} {phase}" for phase, number in sorted(each.passes.items()))
    return f"{steps} ({' and '.join(sorted(each.sources))})"


def _kernels(each: RankFound) -> str:
    joined = each.joined
    what = "operators" if joined.on_cpu else "kernels and copies"
    if not joined.events:
        return "no kernels"
    inside = joined.events - joined.between - joined.launchless
    parts = [f"{joined.events:,} {what}: {inside:,} in steps"]
    if joined.between:
        parts.append(f"{joined.between:,} outside")
    if joined.launchless:
        parts.append(f"{joined.launchless:,} whose launch was not recorded")
    return ", ".join(parts)
