"""What a collector of evidence is: it can say whether it works here, it starts, it stops, and it never raises far.

A collector runs beside the hooks of a session and puts rows into the trace: samples of counters, or kernels. Its
constructor does nothing costly and opens nothing; all its methods but `device_seen` may take their time.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Protocol

from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink, PassWindow
from phaseprof.trace.meta import Device

log = logging.getLogger("phaseprof")


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a collector works here.

    Attributes:
        available: Whether it does.
        detail: What it will collect, or why it cannot: a clause without capital and full stop.
        fix: What would help, in one line; empty if nothing is wrong or nothing would.
    """

    available: bool
    detail: str
    fix: str = ""


class Collector(Protocol):
    """One source of evidence."""

    @property
    def name(self) -> str:
        """As `--collect` takes it, and as `source` in the tables begins."""
        ...

    @property
    def what(self) -> str:
        """What is not measured without it, for the list of what was not."""
        ...

    @property
    def window(self) -> PassWindow | None:
        """What is to be told of every pass; None if it need not be told."""
        ...

    def probe(self) -> Availability:
        """Whether it works on this machine. Takes up to seconds; never raises, leaves nothing open."""
        ...

    def start(self, sink: EvidenceSink) -> None:
        """Begin to collect into ``sink``, or to wait for a device. What cannot be collected is said there."""
        ...

    def device_seen(self, device: Device) -> None:
        """A model runs on this device. Called on the workload's thread: it may set something going, and no more."""
        ...

    def stop(self) -> None:
        """End; all that was collected is in the sink when it returns. Called once, also after a failure."""
        ...


def failure(name: str, what: str, error: Exception) -> NotMeasured:
    """Say in the log that a collector failed, and give what the report says of it.

    Args:
        name, what: As in `Collector`.
        error: What it raised, and should not have.
    """
    log.warning(
        "phaseprof: the collector %s failed, the workload goes on: %s: %s",
        name,
        type(error).__name__,
        error,
        exc_info=error if os.environ.get("PHASEPROF_DEBUG") else None,
    )
    return NotMeasured(
        what,
        f"the collector {name} failed ({type(error).__name__}: {error})",
        "please report it; PHASEPROF_DEBUG=1 shows where",
    )
