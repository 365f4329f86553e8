"""The `golden` fixture: compare a text with its file, or rewrite the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Call it with the name of a file in this folder and the text that it should hold.

    With ``--update-golden`` it writes the file where it differs, and fails, so that a run that rewrites what it should
    check can never pass for a test.
    """

    def check(name: str, text: str) -> None:
        path = _HERE / name
        expected = path.read_text(encoding="utf-8") if path.exists() else None
        if request.config.getoption("--update-golden"):
            if expected != f"{text}\n":
                path.write_text(f"{text}\n", encoding="utf-8")
                pytest.fail(f"{name} was rewritten: look at the difference, then run again")
            return
        assert expected is not None, f"{name} does not exist: run with --update-golden"
        assert f"{text}\n" == expected

    return check
