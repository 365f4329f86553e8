"""What a user sees when something goes wrong: one line that says it, one line that helps."""

from __future__ import annotations

from phaseprof.errors import PhaseprofError


def render(error: PhaseprofError, *, color: bool = False) -> str:
    """``phaseprof: MESSAGE`` and, on a line of its own, the remedy. Never wrapped: a line can be searched for."""
    message = " ".join(error.message.split())
    remedy = " ".join(error.remedy.split())
    name = "\x1b[1;31mphaseprof:\x1b[0m" if color else "phaseprof:"
    return f"{name} {message}" + (f"\n{remedy}" if remedy else "")
