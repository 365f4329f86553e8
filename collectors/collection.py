"""The collectors of a session: chosen by name, started, and put aside when they fail.

`phaseprof.evidence.load_evidence` comes here. Modules of collectors are imported when they are wanted.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from phaseprof.collectors.base import Collector
from phaseprof.errors import NotMeasured, UsageError
from phaseprof.evidence import EvidenceSink, PassWindow
from phaseprof.trace.meta import Device

log = logging.getLogger("phaseprof")

NONE = "none"


@dataclass(frozen=True, slots=True)
class Known:
    """A collector that there is.

    Attributes:
        name: As `--collect` takes it.
        module, factory: Where it is made: a call of ``factory`` without arguments.
        by_default: Whether it runs when nothing is asked for. It then stays silent where it has nothing to watch.
        collects: What it collects, for help texts.
    """

    name: str
    module: str
    factory: str
    by_default: bool
    collects: str


#: In the order in which they start.
KNOWN: tuple[Known, ...] = ()


def names() -> tuple[str, ...]:
    """The collectors that there are."""
    return tuple(known.name for known in KNOWN)


def choose(wanted: str | None) -> tuple[Known, ...]:
    """The collectors that are asked for.

    Args:
        wanted: Names with commas between; ``none`` for no collector; None or empty for the defaults.

    Raises:
        UsageError: If there is no collector of such a name.
    """
    if not wanted:
        return tuple(known for known in KNOWN if known.by_default)
    asked = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in asked if name not in (*names(), NONE)]
    if unknown:
        raise UsageError(
            f"There is no collector {unknown[0]!r}.", f"Use {', '.join(names())} or {NONE}."
        )
    return tuple(known for known in KNOWN if known.name in asked)


def make(known: Known) -> Collector:
    """A new collector."""
    module: Any = importlib.import_module(known.module)
    return cast(Collector, getattr(module, known.factory)())


class Collection:
    """Runs several collectors as one: a `phaseprof.evidence.Evidence`.

    One that fails is put aside with its reason, and the others go on.
    """

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = list(collectors)
        self._sink: EvidenceSink | None = None

    @property
    def window(self) -> PassWindow | None:
        """Of the one collector that wants to be told of passes."""
        windows = [c.window for c in self._collectors if c.window is not None]
        return windows[0] if windows else None

    def start(self, sink: EvidenceSink) -> None:
        """Start each."""
        self._sink = sink
        self._each(lambda collector: collector.start(sink))

    def device_seen(self, device: Device) -> None:
        """Tell each."""
        self._each(lambda collector: collector.device_seen(device))

    def stop(self) -> None:
        """Stop each, the last first."""
        self._collectors.reverse()
        self._each(lambda collector: collector.stop())
        self._collectors = []

    def _each(self, call: Callable[[Collector], None]) -> None:
        for collector in tuple(self._collectors):
            try:
                call(collector)
            except Exception as error:
                self._collectors.remove(collector)
                self._put_aside(collector, error)

    def _put_aside(self, collector: Collector, error: Exception) -> None:
        log.warning(
            "phaseprof: the collector %s failed, the workload goes on: %s: %s",
            collector.name,
            type(error).__name__,
            error,
            exc_info=error if os.environ.get("PHASEPROF_DEBUG") else None,
        )
        if self._sink is not None:
            self._sink.note(
                NotMeasured(
                    collector.what,
                    f"the collector {collector.name} failed ({type(error).__name__}: {error})",
                    "please report it; PHASEPROF_DEBUG=1 shows where",
                )
            )
        try:
            collector.stop()
        except Exception:
            log.debug("a failed collector could not be stopped", exc_info=True)


def collection(wanted: str | None) -> Collection:
    """The collectors of a session.

    Raises:
        UsageError: If there is no collector of such a name.
    """
    return Collection([make(known) for known in choose(wanted)])
