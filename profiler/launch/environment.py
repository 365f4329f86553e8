"""The environment that makes a wrapped command's Python processes find phaseprof's start-up hook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from phaseprof.evidence import COLLECT_VARIABLE
from phaseprof.launch.autostart import TRACE_VARIABLE

NOTES_VARIABLE = "PHASEPROF_NOTES"


def startup_folder() -> Path:
    """The folder that holds our ``sitecustomize.py`` and nothing else that can be imported from there."""
    return Path(__file__).absolute().parent / "startup"


def child_environment(
    base: Mapping[str, str], trace: Path, notes: Path, collect: str | None = None
) -> dict[str, str]:
    """The environment for the wrapped command.

    The start-up folder comes first on PYTHONPATH. What follows is the user's own value, its order and its empty
    elements (each is the current folder) included; an empty value is no element at all, so nothing is appended for it.
    A folder left there by an outer `phaseprof run` is taken out: one hook a process is enough.

    Args:
        base: The environment that the command would have had.
        trace: Absolute path of the trace folder.
        notes: Absolute path of the folder for launch notes.
        collect: Which collectors run, as `--collect` takes it; None leaves what `base` says.
    """
    own = str(startup_folder())
    elements = [own]
    if before := base.get("PYTHONPATH", ""):
        elements += [element for element in before.split(os.pathsep) if element != own]
    return {
        **base,
        "PYTHONPATH": os.pathsep.join(elements),
        TRACE_VARIABLE: str(trace),
        NOTES_VARIABLE: str(notes),
        **({COLLECT_VARIABLE: collect} if collect is not None else {}),
    }
