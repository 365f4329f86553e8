"""Whose counters are heard about which phases: the second witness of every verdict of a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from phaseprof.analyzers.counters.counter_results import DeviceState
from phaseprof.analyzers.results import PhaseFigures
from phaseprof.analyzers.witness import Witness
from phaseprof.errors import NotMeasured
from phaseprof.trace.meta import Device, ModelMeta


@dataclass(frozen=True, slots=True)
class Testimony:
    """What may be heard of a run's counters.

    Attributes:
        state: Of the device that the model's phases are judged by; None if it was not sampled.
        spread: Devices that the model's layers lie on: counters of one of several say nothing of a whole pass.
    """

    state: DeviceState | None
    spread: int = 1

    @classmethod
    def of(
        cls, states: Sequence[DeviceState], device: Device | None, model: ModelMeta | None
    ) -> Testimony:
        """That of a model.

        Args:
            states: Of all sampled devices.
            device: The one that the model ran on.
            model: The model; None if it was not described.
        """
        return cls(state_for(states, device), 1 if model is None else model.devices)

    def heard(self, phases: Mapping[str, PhaseFigures]) -> dict[str, PhaseFigures]:
        """The phases with their counters heard. ``phases`` have them beside their figures."""
        return {name: self._heard(figures) for name, figures in phases.items()}

    def _heard(self, figures: PhaseFigures) -> PhaseFigures:
        if self.spread > 1 or figures.question is None or figures.counters is None:
            return figures
        witness = Witness(figures.counters, self.state, figures.kernels)
        return replace(figures, verdict=figures.question.answer(witness))

    def lacking(self) -> Iterator[NotMeasured]:
        """Why counters are not heard."""
        if self.spread > 1:
            yield NotMeasured(
                "counters as a second witness of what bounds a phase",
                f"the model's layers lie on {self.spread} devices, which work one after another: counters of one say "
                "nothing of the others' part of a pass",
            )


def state_for(states: Sequence[DeviceState], device: Device | None) -> DeviceState | None:
    """The state that a model's phases are judged by: of several devices that of the slowest, which sets the pace."""
    own = [state for state in states if device is not None and state.uuid == device.uuid]
    if len(states) <= 1 or not own:
        return next(iter(own or states), None)

    def clock(state: DeviceState) -> float:
        return math.inf if state.sm_clock_hz is None else state.sm_clock_hz.median

    return min(states, key=clock)
