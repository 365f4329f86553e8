"""`phaseprof what-if TRACE`: what changes would do to a measured run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from phaseprof.cli.options import AsJson, Width
from phaseprof.errors import UsageError

if TYPE_CHECKING:
    from phaseprof.analyzers.what_if.changes import Change, Speculate

_Format = TypeVar("_Format", bound=StrEnum)


def what_if(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="The folder that profile or run wrote.", show_default=False
        ),
    ],
    weights: Annotated[
        str | None,
        typer.Option(metavar="fp8|int8|int4", help="Format of the weights.", show_default=False),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(metavar="fp8|int8", help="Format of keys and values.", show_default=False),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences of a step.", show_default=False)
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs", help="Launch decode steps as CUDA graphs.")
    ] = False,
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="K[:A[:COST]]",
            help="Draft K tokens a step, each accepted with the chance A, drafted in COST of a step's time. Default: "
            "as measured, else assumed.",
            show_default=False,
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(metavar="N", help="Prompt tokens of a mixed step.", show_default=False),
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="A model with N heads of keys and values (GQA; 1: MQA).",
            show_default=False,
        ),
    ] = None,
    mla: Annotated[
        bool, typer.Option("--mla", help="A model with latents in the place of keys and values.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Another GPU: h100-sxm, a100-sxm-80gb, …; `list` shows all.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", metavar="N", help="Ranks that each layer is split over.", show_default=False
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the arithmetic, line by line.")
    ] = False,
    as_json: AsJson = False,
    width: Width = None,
) -> None:
    """Say what a change would do to a measured run: TTFT, TPOT, throughput, and what limits it then.

    Several changes are worked out each alone and all together. With none, all that make sense are tried and ranked by
    what they gain, and what cannot help is said with its reason. Nothing is run: figures are modelled from the trace,
    each with an interval.
    """
    from phaseprof.analyzers.what_if.ranking import asked, ranked
    from phaseprof.api import load_report

    if device == "list":
        from phaseprof.cli.boards import known_boards

        print("\n".join(f"{board.name:<16} {board.title}" for board in known_boards()))
        return
    changes = list(
        _changes(weights, kv, batch, graphs, speculate, chunk, kv_heads, mla, device, tp)
    )
    report = load_report(trace)
    assert report.measured is not None
    found = asked(report.measured, changes) if changes else ranked(report.measured)
    if as_json:
        import json

        from phaseprof.analyzers.what_if.as_json import to_json

        print(json.dumps(to_json(found), indent=2, allow_nan=False))
        return
    from phaseprof.cli.render.stream import takes_color, takes_unicode, width_of
    from phaseprof.cli.render.terminal import subject
    from phaseprof.cli.render.what_if import Head, render

    print(
        render(
            found,
            Head(tuple(subject(report)), str(trace)),
            width=width or width_of(sys.stdout),
            color=takes_color(sys.stdout),
            unicode=takes_unicode(sys.stdout),
            explain=explain,
        )
    )


def _changes(
    weights: str | None,
    kv: str | None,
    batch: int | None,
    graphs: bool,
    speculate: str | None,
    chunk: int | None,
    kv_heads: int | None,
    mla: bool,
    device: str | None,
    tp: int | None,
) -> Iterator[Change]:
    from phaseprof.analyzers.what_if import changes

    if weights is not None:
        yield changes.Weights(_one_of(changes.WeightFormat, "--weights", weights))
    if kv is not None:
        yield changes.KvCache(_one_of(changes.KvFormat, "--kv", kv))
    if batch is not None:
        yield changes.Batch(batch)
    if graphs:
        yield changes.Graphs()
    if speculate is not None:
        yield _speculation(speculate)
    if chunk is not None:
        yield changes.Chunk(chunk)
    if mla and kv_heads is not None:
        raise UsageError("--mla and --kv-heads are two models.", "Give one of them.")
    if kv_heads is not None:
        yield changes.KvHeads(kv_heads)
    if mla:
        yield changes.Mla()
    if device is not None:
        from phaseprof.cli.boards import find_board

        board = find_board(device)
        yield changes.OtherDevice(
            changes.Hardware(
                name=board.device.name,
                kind=board.device.kind,
                memory_bytes=board.device.memory_bytes,
                roofs=board.roofs,
                sheet=board.roofs,
                board=board.title,
            )
        )
    if tp is not None:
        yield changes.TensorParallel(tp)


def _one_of(formats: type[_Format], option: str, given: str) -> _Format:
    try:
        return formats(given.lower())
    except ValueError:
        known = ", ".join(str(each) for each in formats)
        raise UsageError(f"{option} {given!r} is not one of {known}.") from None


def _speculation(given: str) -> Speculate:
    from phaseprof.analyzers.what_if.changes import Speculate, Speculation

    drafts, *rest = given.split(":")
    try:
        numbers = [float(part) for part in rest]
        wanted = Speculation(int(drafts), *numbers)
    except (TypeError, ValueError):
        raise UsageError(
            f"--speculate {given!r} is not of the form K[:A[:COST]].",
            "For example --speculate 4, --speculate 4:0.7 or --speculate 4:0.7:0.05.",
        ) from None
    return Speculate(wanted)
