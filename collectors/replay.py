"""Feeds the samples of a recording into a run as if they were measured: for tests, documentation and samples.

A recording is a trace, its ``samples`` folder, or one Parquet file with the columns of that table. Its begin is put on
the begin of the session, and its devices become those that models run on, in the order in which each appear: a
recording of a GPU can be replayed beside a model on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaseprof.collectors.base import Availability
from phaseprof.collectors.host import HOST
from phaseprof.collectors.sampling import CannotSample, SampledCollector, Sampler
from phaseprof.evidence import EvidenceSink
from phaseprof.metrics import Metric
from phaseprof.records import Sample
from phaseprof.schema import SAMPLES
from phaseprof.trace.meta import Device
from phaseprof.trace.parts import PartName

_COLUMNS = tuple(column.name for column in SAMPLES.columns)


@dataclass(frozen=True, slots=True)
class Recording:
    """Samples that are to be replayed.

    Attributes:
        begin_ns: Begin of the first window.
        devices: Its devices but the host, in the order in which they appear.
        rows: In the order in which their windows ended.
    """

    begin_ns: int
    devices: tuple[str, ...]
    rows: tuple[Sample, ...]

    def of(self, place: int) -> list[Sample]:
        """The rows of a device by its place; those of the host go with the first."""
        mine = {*self.devices[place : place + 1], *([HOST] if place == 0 else [])}
        return [row for row in self.rows if row.device in mine]


def replay_collector(path: str) -> SampledCollector:
    """The collector `replay`.

    Args:
        path: The recording.
    """
    source = Path(path)
    places = itertools.count()
    loaded: list[Recording] = []

    def opens(device: Device, sink: EvidenceSink) -> Sampler:
        if not loaded:
            loaded.append(load(source))
        return Replayed(loaded[0], next(places), device, sink)

    return SampledCollector(
        "replay",
        "the samples of a recording",
        opens,
        lambda: probe(source),
        watches=lambda device: True,
    )


def probe(source: Path) -> Availability:
    """Whether a recording can be read."""
    try:
        recording = load(source)
    except CannotSample as reason:
        return Availability(False, reason.why, reason.fix)
    return Availability(True, f"{len(recording.rows)} samples of {source}")


def load(source: Path) -> Recording:
    """Read a recording, whole: one of some minutes, not of a day.

    Raises:
        CannotSample: If it cannot be read, or is none.
    """
    import pyarrow.parquet as pq

    rows: list[Sample] = []
    devices: dict[str, None] = {}
    try:
        for file in _files(source):
            table = pq.ParquetFile(file).read(columns=list(_COLUMNS))
            for row in zip(*(table.column(name).to_pylist() for name in _COLUMNS), strict=True):
                rows.append(Sample(*row))
    # What a damaged file raises has no class of its own.
    except Exception as error:
        raise CannotSample(f"{source} cannot be replayed ({_said(error)})") from error
    known = {metric.value for metric in Metric}
    rows = sorted((row for row in rows if row.metric in known), key=lambda row: row.end_ns)
    if not rows:
        raise CannotSample(
            f"{source} holds no samples", "Give a trace, or a Parquet file of its table `samples`."
        )
    for sample in rows:
        if sample.device != HOST:
            devices.setdefault(sample.device)
    return Recording(min(row.start_ns for row in rows), tuple(devices), tuple(rows))


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    folder = source / SAMPLES.name if (source / SAMPLES.name).is_dir() else source
    files = sorted(folder.rglob("*.parquet"))
    named = {file: PartName.parse(file.name) for file in files}
    # A kill may have left a part beside the wider one that it was merged into.
    return [
        file
        for file in files
        if not any(
            mine is not None and wider is not None and wider != mine and wider.holds(mine)
            for mine in [named[file]]
            for wider in named.values()
        )
    ]


def _said(error: Exception) -> str:
    text: Any = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


class Replayed:
    """The rows of one device, handed over when their time has come.

    Args:
        recording: Where they come from.
        place: Which device of the recording it is.
        device: The device that it stands for now.
        sink: Its clock began with the session.

    Raises:
        CannotSample: If the recording has no such device.
    """

    def __init__(
        self, recording: Recording, place: int, device: Device, sink: EvidenceSink
    ) -> None:
        rows = recording.of(place)
        if not rows:
            raise CannotSample(
                f"the recording has {len(recording.devices)} devices, and models ran on more"
            )
        self._clock = sink.clock
        shift = sink.clock.pair.unix_ns - recording.begin_ns
        # Beside a CPU as well: what a GPU showed is not mixed with what the host shows.
        label = device.uuid or device.key
        self._rows = [
            Sample(
                row.start_ns + shift,
                row.end_ns + shift,
                HOST if row.device == HOST else label,
                row.source,
                row.metric,
                row.value,
            )
            for row in rows
        ]
        self._next = 0

    def sample(self) -> Sequence[Sample]:
        """The rows whose windows have ended since the last call."""
        now, begin = self._clock.now_unix_ns(), self._next
        while self._next < len(self._rows) and self._rows[self._next].end_ns <= now:
            self._next += 1
        return self._rows[begin : self._next]

    def close(self) -> None:
        """Let go of the rows."""
        self._rows = []
        self._next = 0
