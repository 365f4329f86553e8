"""What `phaseprof compare` is told by a file: rules and how to judge them, from TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaseprof.errors import UsageError

#: Where a project keeps them: `[tool.phaseprof.compare]`.
PROJECT = Path("pyproject.toml")
_KEYS = ("fail-on", "strict", "run-noise")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a file says; None where it says nothing.

    Attributes:
        fail_on: Rules as they are written.
        strict: Whether what is not certain fails.
        run_noise: As `--run-noise` takes it, a fraction.
        source: The file; empty if there is none.
    """

    fail_on: tuple[str, ...] = ()
    strict: bool | None = None
    run_noise: float | None = None
    source: str = ""


def read_settings(file: Path | None) -> Settings:
    """Read a file of rules: keys at its top, under ``[compare]`` or under ``[tool.phaseprof.compare]``.

    Args:
        file: Which; None for the section in the ``pyproject.toml`` of the current folder, if there is one.

    Raises:
        UsageError: If the file cannot be read, or says something unknown.
    """
    path = PROJECT if file is None else file
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if file is None:
            return Settings()
        raise UsageError(f"There is no file of rules at {path}.") from None
    except (OSError, ValueError) as error:
        if file is None and not isinstance(error, tomllib.TOMLDecodeError):
            return Settings()
        raise UsageError(f"{path} cannot be read as TOML: {error}.") from error
    section = _section(data, project=file is None)
    return Settings() if section is None else _settings(section, str(path))


def _section(data: dict[str, Any], *, project: bool) -> dict[str, Any] | None:
    tool = data.get("tool")
    own = tool.get("phaseprof") if isinstance(tool, dict) else None
    found = own.get("compare") if isinstance(own, dict) else None
    if found is None and not project:
        found = data.get("compare", data)
    return found if isinstance(found, dict) else None


def _settings(section: dict[str, Any], source: str) -> Settings:
    unknown = sorted(set(section) - set(_KEYS))
    if unknown:
        raise UsageError(
            f"{source}: unknown key {unknown[0]!r} for compare.", f"Known are {', '.join(_KEYS)}."
        )
    rules = section.get("fail-on", [])
    if isinstance(rules, str):
        rules = [rules]
    if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
        raise UsageError(f"{source}: fail-on is a list of rules, each in quotes.")
    strict = section.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise UsageError(f"{source}: strict is true or false.")
    noise = section.get("run-noise")
    return Settings(
        fail_on=tuple(rules),
        strict=strict,
        run_noise=None if noise is None else parse_noise(str(noise)),
        source=source,
    )


def parse_noise(text: str) -> float:
    """Read ``3%``.

    Raises:
        UsageError: If it is no percentage from 0 to 50.
    """
    bare = text.strip().removesuffix("%").strip()
    try:
        value = float(bare)
    except ValueError:
        value = -1.0
    if not text.strip().endswith("%") or not 0 <= value <= 50:
        raise UsageError(f"Run noise {text!r} is no percentage from 0% to 50%.", "Write it as 3%.")
    return value / 100
