"""The collectors of a session: made, started, and put aside when they fail.

`phaseprof.evidence.load_evidence` comes here. Which collectors there are stands in `phaseprof.collectors.known`; their
modules are imported when they are wanted.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from phaseprof.collectors.base import Collector, failure
from phaseprof.collectors.known import Chosen, choose
from phaseprof.collectors.sampler_thread import SamplerThread
from phaseprof.collectors.sampling import SampledCollector
from phaseprof.errors import NotMeasured
from phaseprof.evidence import EvidenceSink, PassWindow
from phaseprof.trace.meta import Device

log = logging.getLogger("phaseprof")


def make(chosen: Chosen) -> Collector:
    """A new collector."""
    known = chosen.known
    module: Any = importlib.import_module(known.module)
    factory = getattr(module, known.factory)
    collector = cast(Collector, factory(chosen.argument) if known.takes else factory())
    if isinstance(collector, SampledCollector):
        collector.asked = chosen.asked
    return collector


class Collection:
    """Runs several collectors as one: a `phaseprof.evidence.Evidence`.

    One that fails is put aside with its reason, and the others go on. Those that sample share a thread.

    Args:
        collectors: In the order in which they start.
        missing: What could not even be made.
    """

    def __init__(
        self, collectors: Sequence[Collector], missing: Sequence[NotMeasured] = ()
    ) -> None:
        self._collectors = list(collectors)
        self._missing = tuple(missing)
        self._sink: EvidenceSink | None = None
        #: The thread of the collectors that sample.
        self.thread = SamplerThread()
        for collector in collectors:
            if isinstance(collector, SampledCollector):
                collector.thread = self.thread

    @property
    def sampler_cpu_ns(self) -> int:
        """CPU time of the shared thread; known once it has ended."""
        return self.thread.cpu_ns

    @property
    def window(self) -> PassWindow | None:
        """Of the one collector that wants to be told of passes."""
        windows: list[_GuardedWindow] = []

        def look(collector: Collector) -> None:
            window = collector.window
            if window is not None:
                windows.append(
                    _GuardedWindow(window, lambda error: self._put_aside(collector, error))
                )

        self._each(look)
        return windows[0] if windows else None

    def start(self, sink: EvidenceSink) -> None:
        """Start each."""
        self._sink = sink
        for missing in self._missing:
            sink.note(missing)
        self._each(lambda collector: collector.start(sink))

    def device_seen(self, device: Device) -> None:
        """Tell each."""
        self._each(lambda collector: collector.device_seen(device))

    def stop(self) -> None:
        """Stop each, the last first."""
        self._collectors.reverse()
        self._each(lambda collector: collector.stop(), stopping=True)
        self._collectors = []

    def _each(self, call: Callable[[Collector], None], *, stopping: bool = False) -> None:
        for collector in tuple(self._collectors):
            try:
                call(collector)
            except Exception as error:
                self._put_aside(collector, error, stop=not stopping)

    def _put_aside(self, collector: Collector, error: Exception, *, stop: bool = True) -> None:
        if collector in self._collectors:
            self._collectors.remove(collector)
        missing = failure(collector.name, collector.what, error)
        if self._sink is not None:
            self._sink.note(missing)
        if stop:
            try:
                collector.stop()
            except Exception:
                log.debug("a failed collector could not be stopped", exc_info=True)


class _GuardedWindow:
    """A window that never raises into a pass: it closes for good when it fails."""

    __slots__ = ("_failed", "_window")

    def __init__(self, window: PassWindow, failed: Callable[[Exception], None]) -> None:
        self._window: PassWindow | None = window
        self._failed = failed

    def begins(self, wide: bool, warmup: bool) -> bool:
        window = self._window
        if window is None:
            return False
        try:
            return window.begins(wide, warmup)
        except Exception as error:
            self._close(error)
            return False

    def ended(self) -> None:
        window = self._window
        if window is None:
            return
        try:
            window.ended()
        except Exception as error:
            self._close(error)

    def hold(self, on: bool) -> None:
        window = self._window
        if window is None:
            return
        try:
            window.hold(on)
        except Exception as error:
            self._close(error)

    def _close(self, error: Exception) -> None:
        self._window = None
        self._failed(error)


def collection(wanted: str | None) -> Collection:
    """The collectors of a session.

    Raises:
        UsageError: If there is no collector of such a name.
    """
    collectors: list[Collector] = []
    missing: list[NotMeasured] = []
    for chosen in choose(wanted):
        try:
            collectors.append(make(chosen))
        except Exception as error:
            missing.append(failure(chosen.known.name, f"what {chosen.known.name} collects", error))
    return Collection(collectors, missing)
