"""The seam between a session and the collectors that run beside its hooks.

The ground does not know the collectors: a session asks for them by the name of one module, and talks to what it gets
through the protocols below. Nothing that a collector does may raise into a session, or into the workload.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from phaseprof.clock import Clock
from phaseprof.errors import NotMeasured
from phaseprof.records import Kernel, Sample
from phaseprof.trace.meta import CollectorCost, Device

#: Which collectors run, for the processes of a wrapped command: as `--collect` takes it. Unset: the defaults.
COLLECT_VARIABLE = "PHASEPROF_COLLECT"
#: The module that makes the collectors, by its function `collection(wanted) -> Evidence`.
_COLLECTION = "phaseprof.collectors.collection"
#: The collector whose window can be held open for a block.
LOOK = "kernels"


class EvidenceSink(Protocol):
    """Where collectors put what they saw. Its methods may be called from any thread, and are cheap."""

    @property
    def clock(self) -> Clock:
        """Places readings of the monotonic clock on the axis of the trace."""
        ...

    def put_samples(self, rows: Sequence[Sample]) -> None:
        """Add counter samples."""
        ...

    def put_kernels(self, rows: Sequence[Kernel]) -> None:
        """Add kernels and operators of passes that were flagged `profiled`; they are joined to their passes later."""
        ...

    def note(self, what: NotMeasured) -> None:
        """Say what is not measured; the same is kept once."""
        ...

    def spent(self, cost: CollectorCost) -> None:
        """Say what a collector took of the workload's time."""
        ...

    def sampling_of(self, key: str) -> bool:
        """Whether this process is the one that samples the device of that key into the trace: the first that asks is,
        until it ends."""
        ...


class PassWindow(Protocol):
    """What is told of every pass on the workload's threads while it is set: a window that a profiler may be open in."""

    def begins(self, wide: bool, warmup: bool) -> bool:
        """A pass is about to begin. Returns whether a costly collector runs during it.

        Args:
            wide: It computes more than one token for some sequence. That is no label (a chunk of one token is prefill,
                a draft that is verified is decode): it lets a window see passes of both kinds.
            warmup: It is a warm-up, as the user says.
        """
        ...

    def ended(self) -> None:
        """It has ended, or raised. Called on the thread that began it."""
        ...

    def hold(self, on: bool) -> None:
        """Be open for every pass from the next one on; or no longer, and close now."""
        ...


class Evidence(Protocol):
    """The collectors of one session."""

    @property
    def window(self) -> PassWindow | None:
        """What is to be told of every pass; None if no collector wants to be."""
        ...

    def start(self, sink: EvidenceSink) -> None:
        """Begin to collect. What cannot be collected is said to the sink."""
        ...

    def device_seen(self, device: Device) -> None:
        """A model runs on this device: called once a device, on the workload's thread; costs next to nothing."""
        ...

    def stop(self) -> None:
        """End. What was collected is in the sink when it returns."""
        ...

    @property
    def sampler_cpu_ns(self) -> int:
        """CPU time of the thread that samples counters; known once it has stopped."""
        ...


def load_evidence(wanted: str | None) -> Evidence:
    """The collectors of a session.

    Args:
        wanted: As `--collect` takes it: names with commas between, ``none``; None for the defaults of the machine.

    Raises:
        UsageError: If there is no collector of such a name.
    """
    module: Any = importlib.import_module(_COLLECTION)
    return cast(Evidence, module.collection(wanted))
