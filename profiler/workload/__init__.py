"""A workload of our own: the model and the requests that `phaseprof profile` runs.

`embedded` finds the model that is used when none is named, `load` loads any other, `generate` runs the requests.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told what goes on, for people who wait."""

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        """Say that ``text`` begins or goes on.

        Args:
            text: What goes on, as a phrase without a full stop.
            done: Steps done of this work.
            total: Steps of this work; 0 where they cannot be counted.
        """


def silent(text: str, done: int = 0, total: int = 0) -> None:
    """The `Progress` that tells nobody."""
