"""Boards that the efficiency model knows: which fitted GPU is nearest, and what differs.

The peaks and bandwidths come with the `Ceilings`; here stands what those do not say: units, cache, and which share of
the dense peak a board was seen to sustain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from phaseprof.analyzers.efficiency import fitted
from phaseprof.analyzers.efficiency.parameters import FittedGpu
from phaseprof.trace.meta import Ceilings, Device

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Board:
    """One board.

    Attributes:
        board: What people call it; a datasheet's reference begins with it.
        name: Regular expression for the whole name that the driver gives.
        units: Streaming multiprocessors or compute units.
        cache_bytes: The last cache before the memory.
        nearest: The fitted GPU that it is scaled from.
        measured: It is that GPU.
        same_chip: It has the chip of that GPU, with other memory, clocks or units.
        sustained: Largest matrix product over the dense 16-bit peak, as collected in stas00/ml-engineering; None where
            that of the fitted GPU is taken.
        narrow: Its matrix units multiply 8-bit floats.
    """

    board: str
    name: str
    units: int
    cache_bytes: int
    nearest: FittedGpu
    measured: bool = False
    same_chip: bool = False
    sustained: float | None = None
    narrow: bool = True


_H100 = fitted.H100_SXM
_A100 = fitted.A100_SXM

BOARDS: tuple[Board, ...] = (
    Board("H100 SXM", r"NVIDIA H100 80GB HBM3", 132, 50 * _MIB, _H100, measured=True),
    Board(
        "A100 SXM 80 GB",
        r"(NVIDIA )?A100-SXM4-80GB",
        108,
        40 * _MIB,
        _A100,
        measured=True,
        narrow=False,
    ),
    Board(
        "A100 PCIe 80 GB",
        r"(NVIDIA )?A100 80GB PCIe",
        108,
        40 * _MIB,
        _A100,
        same_chip=True,
        narrow=False,
    ),
    Board(
        "A100 40 GB",
        r"(NVIDIA )?A100-(SXM4|PCIE)-40GB",
        108,
        40 * _MIB,
        _A100,
        same_chip=True,
        narrow=False,
    ),
    Board("L40S", r"NVIDIA L40S", 142, 96 * _MIB, _A100),
    Board("H100 PCIe", r"NVIDIA H100 PCIe", 114, 50 * _MIB, _H100, same_chip=True),
    Board("H200 SXM", r"NVIDIA H200", 132, 50 * _MIB, _H100, same_chip=True),
    Board("B200 SXM", r"NVIDIA B200", 148, 126 * _MIB, _H100, sustained=1745 / 2250),
    Board("MI300X", r"AMD Instinct MI300X( OAM)?", 304, 256 * _MIB, _H100, sustained=668 / 1307),
)


def find_board(device: Device | None, ceilings: Ceilings) -> Board | None:
    """The board of a device; by the reference of its ceilings where there is no device.

    A part of a board (MIG carries the name of the whole) is no board: its units say so.
    """
    if device is not None:
        for board in BOARDS:
            name = device.name.strip()
            if name == board.board or re.fullmatch(board.name, name):
                return board if device.cores in (None, board.units) else None
        return None
    return next(
        (board for board in BOARDS if ceilings.reference.startswith(f"{board.board} ")), None
    )
