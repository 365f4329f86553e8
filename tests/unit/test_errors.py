"""The errors: their tree, their exit codes, and how they read."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import pytest

from phaseprof import errors
from phaseprof.errors import (
    CalibrationError,
    EmptyRunError,
    MissingPackageError,
    ModelError,
    NotMeasured,
    PhaseprofError,
    TraceError,
    UsageError,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (PhaseprofError, 1),
        (UsageError, 2),
        (MissingPackageError, 1),
        (ModelError, 1),
        (TraceError, 1),
        (EmptyRunError, 1),
        (CalibrationError, 1),
    ],
)
def test_exit_codes(kind: type[PhaseprofError], code: int) -> None:
    assert kind("message").exit_code == code
    assert issubclass(kind, PhaseprofError)


def test_the_docstring_shows_every_error() -> None:
    shown = set(re.findall(r"\b[A-Z]\w+Error\b", errors.__doc__ or ""))
    assert shown == {
        PhaseprofError.__name__,
        *(c.__name__ for c in PhaseprofError.__subclasses__()),
    }


def test_an_error_reads_as_message_and_remedy() -> None:
    error = TraceError("There is no trace at t.", "Name another folder.")
    assert str(error) == "There is no trace at t.\nName another folder."
    assert (error.message, error.remedy) == ("There is no trace at t.", "Name another folder.")
    assert error.args == ("There is no trace at t.",)


def test_an_error_without_a_remedy_is_its_message() -> None:
    assert str(ModelError("No.")) == "No."
    assert ModelError("No.").remedy == ""


def test_what_was_not_measured_is_a_value() -> None:
    """Reasons are kept once: equal ones are one key."""
    note = NotMeasured("counters", "no GPU")
    assert {note: 1, NotMeasured("counters", "no GPU", ""): 2} == {note: 2}
    with pytest.raises(FrozenInstanceError):
        note.why = "another"  # type: ignore[misc]
