"""The command line as a shell: help, exit codes, and one clear line for whatever goes wrong."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import phaseprof
from phaseprof.cli.main import main
from phaseprof.errors import TraceError

COMMANDS = ("profile", "run", "report", "calibrate", "doctor")
Captured = pytest.CaptureFixture[str]
#: Makes `phaseprof report` fail with the given exception, where it opens the trace.
Break = Callable[[BaseException], None]


@pytest.fixture
def broken_report(monkeypatch: pytest.MonkeyPatch) -> Break:
    def install(error: BaseException) -> None:
        def load_report(*_: object, **__: object) -> NoReturn:
            raise error

        monkeypatch.setattr("phaseprof.api.load_report", load_report)

    return install


@pytest.fixture(autouse=True)
def _no_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHASEPROF_DEBUG", raising=False)


def error_lines(captured: Captured) -> list[str]:
    """What stands on stderr; nothing may stand on stdout."""
    out, err = captured.readouterr()
    assert out == ""
    return err.splitlines()


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"phaseprof {phaseprof.__version__}\n"


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_names_every_command(args: list[str], capsys: Captured) -> None:
    assert main(args) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f" {command} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command: str, capsys: Captured) -> None:
    assert main([command, "--help"]) == 0
    assert f"Example: phaseprof {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said", "path"),
    [
        (["reprot"], "no such command 'reprot'", "phaseprof"),
        (["--versio"], "no such option: --versio", "phaseprof"),
        (["report"], "missing argument 'TRACE…'", "phaseprof report"),
        (["report", "t", "--jsn"], "no such option: --jsn", "phaseprof report"),
        (["report", "t", "--width", "wide"], "invalid value for '--width'", "phaseprof report"),
        (["report", "t", "--width", "3"], "invalid value for '--width'", "phaseprof report"),
        (["calibrate", "u"], "unexpected extra argument", "phaseprof calibrate"),
    ],
)
def test_a_wrong_call_is_one_line_and_where_to_look(
    args: list[str], said: str, path: str, capsys: Captured
) -> None:
    assert main(args) == 2
    message, remedy = error_lines(capsys)
    assert message.startswith("phaseprof: ")
    assert said in message
    assert remedy == f"See `{path} --help`."


def test_an_error_is_one_line_and_its_remedy(tmp_path: Path, capsys: Captured) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    message, remedy = error_lines(capsys)
    assert message.startswith("phaseprof: ")
    assert "nowhere" in message
    assert remedy


def test_ctrl_c_is_one_line(broken_report: Break, capsys: Captured) -> None:
    broken_report(KeyboardInterrupt())
    assert main(["report", "t"]) == 130
    assert error_lines(capsys) == ["phaseprof: interrupted."]


def test_an_error_that_nobody_foresaw_asks_for_a_report(
    broken_report: Break, capsys: Captured
) -> None:
    broken_report(ValueError("bad magic"))
    assert main(["report", "t"]) == 1
    message, remedy = error_lines(capsys)
    assert message == "phaseprof: `phaseprof report` failed: ValueError: bad magic"
    assert "PHASEPROF_DEBUG=1" in remedy
    assert "bug" in remedy


def test_an_error_of_the_system_is_not_called_a_bug(broken_report: Break, capsys: Captured) -> None:
    broken_report(OSError(errno.ENOSPC, "No space left on device", "/full"))
    assert main(["report", "t"]) == 1
    message, remedy = error_lines(capsys)
    assert "No space left on device" in message
    assert "/full" in message
    assert "bug" not in remedy


@pytest.mark.parametrize(
    "error", [ValueError("bad magic"), TraceError("cut off.", "Record again.")]
)
def test_debugging_shows_the_traceback(
    error: Exception, broken_report: Break, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    broken_report(error)
    monkeypatch.setenv("PHASEPROF_DEBUG", "1")
    assert main(["report", "t"]) == 1
    lines = error_lines(capsys)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2].startswith("phaseprof: ")


@pytest.mark.parametrize("args", [["--version"], ["report", "--help"]])
def test_a_closed_pipe_is_quiet(args: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "phaseprof", *args],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.stderr == ""
    assert done.returncode == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from phaseprof.cli.main import main\n"
        "main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'numpy', 'phaseprof.api'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
