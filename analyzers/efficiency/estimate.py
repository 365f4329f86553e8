"""A modelled time with its interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long something takes, by the model.

    Attributes:
        seconds: The most likely time.
        low, high: A 90 % interval, in seconds.
        reference: Where the figure comes from, for people.
    """

    seconds: float
    low: float
    high: float
    reference: str

    def times(self, calls: float) -> Estimate:
        """The same operation several times: its error is the model's, and does not average out."""
        return Estimate(self.seconds * calls, self.low * calls, self.high * calls, self.reference)


def total(estimates: Iterable[Estimate]) -> Estimate:
    """One after the other. The intervals are added, as if all errors were of one sign: a cautious interval.

    Args:
        estimates: At least one.
    """
    parts = list(estimates)
    references = dict.fromkeys(part.reference for part in parts)
    return Estimate(
        sum(part.seconds for part in parts),
        sum(part.low for part in parts),
        sum(part.high for part in parts),
        "; ".join(references),
    )
