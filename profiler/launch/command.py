"""From what the user typed after `phaseprof run --` to a program that can be executed."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phaseprof.errors import UsageError

_PYTHON_NAME = re.compile(r"(python|pypy)[\d.]*t?")
# What each interpreter option does to our start-up hook.
_BLOCKING_OPTIONS = {
    "I": "ignores PYTHONPATH",
    "E": "ignores PYTHONPATH",
    "S": "skips the site module",
}
_OPTIONS_WITH_VALUE = "WX"


class CommandNotFoundError(UsageError):
    """The command does not exist. 127, as shells say it."""

    exit_code = 127


class CommandNotRunnableError(UsageError):
    """The command exists and cannot be executed. 126, as shells say it."""

    exit_code = 126


@dataclass(frozen=True, slots=True)
class Command:
    """A command, ready to be executed.

    Attributes:
        typed: What the user typed.
        argv: What the program gets as its arguments, its own name first.
        executable: Path of the program.
    """

    typed: tuple[str, ...]
    argv: tuple[str, ...]
    executable: str

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return self.typed[0]

    def is_python(self) -> bool:
        """Whether the program itself is a Python interpreter, by its name."""
        return _PYTHON_NAME.fullmatch(Path(self.executable).name) is not None

    def blocking_option(self) -> tuple[str, str] | None:
        """The interpreter option that keeps the start-up hook from running, and what it does.

        Looks at the command's own interpreter options, or at those in the first line of a script. None if there is
        none, or if the program is no Python as far as can be seen from here.
        """
        if self.is_python():
            return _blocking(self.argv[1:])
        interpreter, *options = _shebang(Path(self.executable)) or [""]
        if Path(interpreter).name == "env":
            own = itertools.takewhile(lambda word: word.startswith("-") or "=" in word, options)
            interpreter, *options = options[len(list(own)) :] or [""]
        return _blocking(options) if _PYTHON_NAME.fullmatch(Path(interpreter).name) else None


def resolve(typed: Sequence[str], environment: Mapping[str, str]) -> Command:
    """Find the program of a command.

    A path that ends in ``.py`` is run with the Python that phaseprof runs in; so is a command that begins with ``-m``.
    Any other is looked up as a shell would.

    Raises:
        UsageError: Nothing was typed.
        CommandNotFoundError: There is no such program.
        CommandNotRunnableError: It is a folder or lacks the permission to execute.
    """
    if not typed or not typed[0]:
        raise UsageError(
            "There is no command to run.", "Say it after `--`: phaseprof run -- python script.py"
        )
    first = typed[0]
    if first == "-m" or (first.endswith(".py") and Path(first).is_file()):
        return Command(tuple(typed), (sys.executable, *typed), sys.executable)
    executable = _look_up(first, environment.get("PATH", os.defpath))
    return Command(tuple(typed), tuple(typed), executable)


def _look_up(name: str, path: str) -> str:
    if os.sep not in name:
        found = shutil.which(name, path=path)
        if found is None:
            raise CommandNotFoundError(
                f"{name}: command not found.",
                f"Give its path, or a name on PATH. (The Python of this phaseprof is {sys.executable}.)",
            )
        return found
    if not os.path.exists(name):
        raise CommandNotFoundError(f"{name}: no such file.", "Check the path of the command.")
    if os.path.isdir(name):
        raise CommandNotRunnableError(f"{name} is a folder.", "Name the program to run in it.")
    if not os.access(name, os.X_OK):
        raise CommandNotRunnableError(
            f"{name}: permission denied; the file is not executable.",
            f"Name its interpreter before it, or `chmod +x {name}`.",
        )
    return name


def _blocking(arguments: Sequence[str]) -> tuple[str, str] | None:
    """Reads options as CPython does: up to ``-c``, ``-m``, a script or ``-``, single letters possibly joined."""
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("--"):
            if argument == "--check-hash-based-pycs":
                next(rest, None)
            continue
        if not argument.startswith("-") or argument == "-":
            return None
        letters = argument[1:]
        for place, letter in enumerate(letters):
            if letter in _BLOCKING_OPTIONS:
                return f"-{letter}", _BLOCKING_OPTIONS[letter]
            if letter in "cm":
                return None
            if letter in _OPTIONS_WITH_VALUE:
                if place == len(letters) - 1:
                    next(rest, None)
                break
    return None


def _shebang(program: Path) -> list[str] | None:
    try:
        with program.open("rb") as file:
            first_line = file.readline(512)
    except OSError:
        return None
    if not first_line.startswith(b"#!"):
        return None
    return os.fsdecode(first_line[2:]).split()
