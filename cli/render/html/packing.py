"""Numbers as text for a page: columns of whole numbers, laid out so that they deflate well, then base64.

A column is stored byte plane by byte plane, the lowest bytes of all its values first: neighbouring values differ in
their low bytes alone. Columns that may fall are stored as zigzag numbers (0, -1, 1, -2, …), columns that grow as their
differences. `static/report.js` reads them again (`unpack`).
"""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from phaseprof.analyzers.columns import scalar
from phaseprof.analyzers.viewing.tracks import view

_I64 = pa.int64()
_ZERO, _ONE, _TWO = (scalar(value, _I64) for value in (0, 1, 2))
#: A browser's numbers are whole up to 53 bits.
_MOST_BYTES = 6
#: What stands for no value in a quantised column.
MISSING = 65_535


@dataclass(frozen=True, slots=True)
class Column:
    """Where a column lies in what was packed.

    Attributes:
        at: Of its first byte. count: Values. width: Bytes of each.
        signed: Stored as zigzag numbers. summed: The values are the running sums of what is stored.
    """

    at: int
    count: int
    width: int
    signed: bool = False
    summed: bool = False


class Packer:
    """Collects columns."""

    def __init__(self) -> None:
        self._planes: list[bytes] = []
        self._size = 0

    def whole(self, values: Sequence[int]) -> Column:
        """A column of whole numbers from 0 on."""
        return self._put(array("q", values).tobytes(), len(values), max(values, default=0))

    def numbers(self, values: pa.Array, *, signed: bool = False, summed: bool = False) -> Column:
        """A column of an int64 array without nulls.

        Args:
            values: From 0 on, unless it is `signed`.
            signed: Some may be negative.
            summed: The reader is to have their running sums.
        """
        if signed:
            twice = pc.multiply(values, _TWO)
            mirrored = pc.subtract(pc.negate(twice), _ONE)
            values = pc.if_else(pc.less(values, _ZERO), mirrored, twice)
        greatest = pc.max(values).as_py() or 0
        return self._put(view(values).tobytes(), len(values), greatest, signed, summed)

    def quantised(self, values: Sequence[float | None], least: float, greatest: float) -> Column:
        """A column of numbers between two bounds, in 65,534 steps; None is :data:`MISSING`."""
        span = (greatest - least) or 1.0
        return self.whole(
            [
                MISSING if value is None else round((value - least) / span * (MISSING - 1))
                for value in values
            ]
        )

    def text(self) -> str:
        """All columns, deflated, in base64."""
        return base64.b64encode(zlib.compress(b"".join(self._planes), 7)).decode("ascii")

    def _put(
        self, data: bytes, count: int, greatest: int, signed: bool = False, summed: bool = False
    ) -> Column:
        width = max((greatest.bit_length() + 7) // 8, 1)
        if width > _MOST_BYTES:
            raise OverflowError(f"{greatest} does not fit into {_MOST_BYTES} bytes")
        column = Column(self._size, count, width, signed, summed)
        for place in range(width):
            plane = data[place::8]
            self._planes.append(plane)
            self._size += len(plane)
        return column
