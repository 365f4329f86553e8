"""The errors that phaseprof raises to its users.

::

    PhaseprofError            base: one clear line, a remedy, an exit code
    ├── UsageError            the call or the options are wrong (exit code 2)
    ├── MissingPackageError   an optional package is not installed
    ├── ModelError            a model cannot be found, loaded or run
    ├── TraceError            a trace cannot be read or written
    ├── EmptyRunError         nothing was recorded: no forward pass was seen
    └── CalibrationError      this device's ceilings cannot be measured

None of them is ever raised into a profiled workload: what fails there is recorded as a
:class:`NotMeasured` entry, and the part that failed steps aside.
"""

from __future__ import annotations

from dataclasses import dataclass


class PhaseprofError(Exception):
    """An error with its remedy. Only `phaseprof.cli.main` catches and prints it.

    Args:
        message: What went wrong, in one sentence.
        remedy: What the user can do about it, in one sentence; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message


class UsageError(PhaseprofError):
    """The call or the options are wrong."""

    exit_code = 2


class MissingPackageError(PhaseprofError):
    """An optional package is needed and not installed."""


class ModelError(PhaseprofError):
    """A model cannot be found, loaded or run."""


class TraceError(PhaseprofError):
    """A trace cannot be read or written."""


class EmptyRunError(PhaseprofError):
    """Nothing was recorded, so there is nothing to report."""


class CalibrationError(PhaseprofError):
    """The ceilings of this device cannot be measured."""


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """Something that a report would show, had it been possible here.

    Attributes:
        what: The figure or the part that is missing.
        why: The reason, in one clause.
        fix: One line that would make it possible; empty when nothing would.
    """

    what: str
    why: str
    fix: str = ""
