"""Finding a command's program, and the interpreter options that keep the start-up hook from running."""

import sys
from pathlib import Path

import pytest

from phaseprof.errors import UsageError
from phaseprof.launch.command import (
    Command,
    CommandNotFoundError,
    CommandNotRunnableError,
    resolve,
)


def _program(path: Path, text: str = "#!/bin/sh\n", mode: int = 0o755) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_python_file_runs_with_the_python_of_phaseprof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    command = resolve(["script.py", "--flag", "-o", "x"], {"PATH": ""})
    assert command.executable == sys.executable
    assert command.argv == (sys.executable, "script.py", "--flag", "-o", "x")
    assert command.name == "script.py"


def test_a_module_runs_with_the_python_of_phaseprof() -> None:
    assert resolve(["-m", "json.tool"], {}).argv == (sys.executable, "-m", "json.tool")


def test_a_name_is_looked_up_on_the_path_of_the_command(tmp_path: Path) -> None:
    program = _program(tmp_path / "serve")
    command = resolve(["serve", "--port", "1"], {"PATH": f"/nowhere:{tmp_path}"})
    assert command.executable == str(program)
    assert command.argv == ("serve", "--port", "1")


def test_a_program_on_the_path_whose_name_ends_in_py_is_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program = _program(tmp_path / "bin" / "tool.py")
    monkeypatch.chdir(tmp_path)
    assert resolve(["tool.py"], {"PATH": str(program.parent)}).executable == str(program)


@pytest.mark.parametrize("typed", [[], [""]])
def test_no_command_is_a_usage_error(typed: list[str]) -> None:
    with pytest.raises(UsageError, match="no command") as caught:
        resolve(typed, {})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["no-such-program", "./no-such-file", "/no/such/script.py"])
def test_a_command_that_does_not_exist_is_127(name: str) -> None:
    with pytest.raises(CommandNotFoundError, match=name) as caught:
        resolve([name], {"PATH": "/nowhere"})
    assert caught.value.exit_code == 127
    assert caught.value.remedy


def test_a_folder_or_a_file_without_permission_is_126(tmp_path: Path) -> None:
    plain = _program(tmp_path / "plain", mode=0o644)
    for path in (tmp_path, plain):
        with pytest.raises(CommandNotRunnableError) as caught:
            resolve([str(path)], {"PATH": ""})
        assert caught.value.exit_code == 126


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("script.py", None),
        ("-I script.py", "-I"),
        ("-E -c pass", "-E"),
        ("-S", "-S"),
        ("-uB script.py -I", None),
        ("-uBI script.py", "-I"),
        ("-Im module", "-I"),
        ("-m module -I", None),
        ("-mI", None),
        ("-c pass -S", None),
        ("-cS", None),
        ("-s -P script.py", None),
        ("-W ignore -I x.py", "-I"),
        ("-Wignore::ImportWarning x.py", None),
        ("-W -I x.py", None),
        ("-X importtime -S x.py", "-S"),
        ("-Xfrozen_modules=off -E x.py", "-E"),
        ("--check-hash-based-pycs always -I x.py", "-I"),
        ("--version", None),
        ("- -I", None),
        ("", None),
    ],
)
def test_interpreter_options_are_read_as_cpython_reads_them(
    arguments: str, option: str | None
) -> None:
    argv = ("python3.11", *arguments.split())
    blocking = Command(argv, argv, "/usr/bin/python3.11").blocking_option()
    assert (blocking[0] if blocking else None) == option


@pytest.mark.parametrize(
    ("first_line", "option"),
    [
        ("#!/opt/venv/bin/python -I", "-I"),
        ("#!/usr/bin/python3 -Es", "-E"),
        ("#!/usr/bin/env -S python3 -S", "-S"),
        ("#!/usr/bin/env -S LANG=C python3 -I", "-I"),
        ("#!/usr/bin/env python3", None),
        ("#!/usr/bin/env", None),
        ("#!/bin/sh -E", None),
        ("#!", None),
        ("", None),
    ],
)
def test_the_first_line_of_a_script_counts_as_well(
    tmp_path: Path, first_line: str, option: str | None
) -> None:
    script = _program(tmp_path / "tool", f"{first_line}\npass\n")
    blocking = Command(("tool", "-I"), ("tool", "-I"), str(script)).blocking_option()
    assert (blocking[0] if blocking else None) == option


@pytest.mark.parametrize(
    ("executable", "expected"),
    [
        ("/usr/bin/python", True),
        ("/opt/bin/python3.13t", True),
        ("pypy3", True),
        ("/usr/bin/pythonista", False),
        ("/usr/bin/python3-config", False),
        ("/usr/bin/env", False),
    ],
)
def test_pythons_are_known_by_name(executable: str, expected: bool) -> None:
    assert Command((executable,), (executable,), executable).is_python() is expected
