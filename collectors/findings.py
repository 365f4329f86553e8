"""What `phaseprof doctor` finds: a line each, in sections."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class State(enum.StrEnum):
    """How a finding turned out."""

    OK = "ok"
    #: It works, but not all of it.
    LIMITED = "limited"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What.
        state: How it turned out.
        detail: The version, the figure or the reason, in one clause.
        fix: What would help, in one line; empty if nothing is wrong or nothing would help.
    """

    subject: str
    state: State
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]


def guarded(subject: str, probe: Callable[[], Finding]) -> Finding:
    """A finding; a probe that fails is one itself."""
    try:
        return probe()
    except Exception as error:
        return Finding(subject, State.MISSING, f"the check failed: {short(error)}")


def short(error: BaseException) -> str:
    """An error in a line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def counted(number: int | None, noun: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
