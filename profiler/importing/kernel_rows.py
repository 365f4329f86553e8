"""Kernels and copies with the pass that launched them, as rows of the `kernels` table."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from phaseprof.collectors.files.joinery import EventRow, Joinery
from phaseprof.schema import KERNELS
from phaseprof.trace.columns import to_column

#: Rows that are held before they are handed on.
ROWS = 1 << 15


class Devices(dict[int, str]):
    """Names of devices by their numbers.

    Args:
        name: Names one.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, number: int) -> str:
        found = self[number] = self._name(number)
        return found


class KernelRows:
    """Rows of the `kernels` table, as columns.

    Args:
        joinery: Has their names, and their axis.
        source: What they come from: ``kineto``, ``nsys``.
        write: Takes tables of `ROWS` rows, and of fewer by `flush`.
    """

    def __init__(self, joinery: Joinery, source: str, write: Callable[[pa.Table], None]) -> None:
        self._joinery = joinery
        self._source = source
        self._write = write
        self._clear()

    def _clear(self) -> None:
        self._passes: list[int | None] = []
        self._names: list[str] = []
        self._devices: list[str] = []
        self._streams: list[int | None] = []
        self._starts = array("q")
        self._ends = array("q")
        self._launched: list[int | None] = []

    def add(
        self,
        event: EventRow,
        start_ns: int,
        pass_id: int | None,
        launched_ns: int | None,
        device: str,
    ) -> None:
        """One more row.

        Args:
            event: What ran. start_ns: When, on the axis of the trace.
            pass_id: Of what pass; None if of none.
            launched_ns: When the host launched it; None if that was not seen.
            device: Where, by its name.
        """
        self._passes.append(pass_id)
        self._names.append(self._joinery.names[event.name])
        self._devices.append(device)
        self._streams.append(event.stream if event.stream >= 0 else None)
        self._starts.append(start_ns)
        self._ends.append(start_ns + event.duration_ns)
        self._launched.append(launched_ns)
        if len(self._starts) == ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand on what is held."""
        if self._starts:
            self._write(pa.Table.from_arrays(list(self._columns()), schema=KERNELS.arrow))
            self._clear()

    def _columns(self) -> Iterator[pa.Array]:
        values: dict[str, Sequence[Any]] = {
            "pass_id": self._passes,
            "name": self._names,
            "device": self._devices,
            "stream": self._streams,
            "start_ns": self._starts.tolist(),
            "end_ns": self._ends.tolist(),
            "source": [self._source] * len(self._starts),
            "launched_ns": self._launched,
        }
        for column in KERNELS.arrow:
            yield to_column(values[column.name], column.type)
