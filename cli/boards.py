"""Devices by the names that people give them: known boards by their datasheet, and the device of this machine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phaseprof.collectors.datasheet import DATASHEET, DatasheetRow, lookup
from phaseprof.errors import UsageError
from phaseprof.trace.meta import Ceilings, Device

#: Stands for the device of this machine, as `phaseprof calibrate` measured it.
THIS = "this"

_GIB = 2**30
#: As drivers name the boards.
_DRIVER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "A100 SXM 80 GB": "NVIDIA A100-SXM4-80GB",
        "A100 PCIe 80 GB": "NVIDIA A100 80GB PCIe",
        "A100 40 GB": "NVIDIA A100-SXM4-40GB",
        "L40S": "NVIDIA L40S",
        "H100 PCIe": "NVIDIA H100 PCIe",
        "H100 SXM": "NVIDIA H100 80GB HBM3",
        "H200 SXM": "NVIDIA H200",
        "B200 SXM": "NVIDIA B200",
        "MI300X": "AMD Instinct MI300X",
    }
)


@dataclass(frozen=True, slots=True)
class Board:
    """A device to predict for.

    Attributes:
        name: Its short name, as the command line takes it.
        title: What people call it.
        device: As a trace would describe it.
        roofs: Its ceilings by dtype.
    """

    name: str
    title: str
    device: Device
    roofs: Mapping[str, Ceilings]


def known_boards() -> tuple[Board, ...]:
    """All boards of the datasheet."""
    return tuple(_board(row) for row in DATASHEET)


def find_board(name: str) -> Board:
    """The board of a short name, or of a beginning of one that is no other's: ``h200``.

    Raises:
        UsageError: If there is none, or several.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    boards = {board.name: board for board in known_boards()}
    if wanted in boards:
        return boards[wanted]
    begin = [board for board in boards.values() if board.name.startswith(wanted) and wanted]
    if len(begin) == 1:
        return begin[0]
    if begin:
        raise UsageError(
            f"{name!r} may be {_either([board.name for board in begin])}.", "Name one of them."
        )
    near = difflib.get_close_matches(wanted, boards, n=2, cutoff=0.5)
    meant = f"Did you mean {_either(near)}? " if near else ""
    raise UsageError(
        f"The device {name!r} is not known.",
        f"{meant}`--device list` shows all; `this` is the device of this machine, measured.",
    )


def this_board(dtypes: tuple[str, ...]) -> Board:
    """The device of this machine, with the ceilings that were measured on it, or else those of its datasheet.

    Args:
        dtypes: Whose ceilings are needed; those that are not known are left out.

    Raises:
        UsageError: If none of them is known.
    """
    import torch

    from phaseprof.collectors import ceilings
    from phaseprof.devices import describe

    device = describe("cuda" if torch.cuda.is_available() else "cpu")
    measured = {entry.dtype: entry for entry in ceilings.load(device)}
    roofs = {}
    for dtype in dtypes:
        found = measured.get(dtype) or lookup(device, dtype)
        if found is not None:
            roofs[dtype] = found
    if not roofs:
        raise UsageError(
            f"The ceilings of this machine ({device.name}) are not known for {dtypes[0]}.",
            f"phaseprof calibrate --dtype {dtypes[0]}",
        )
    return Board(THIS, device.name, device, roofs)


def short_name(board: str) -> str:
    """``A100 SXM 80 GB`` as the command line takes it: ``a100-sxm-80gb``."""
    return board.lower().replace(" gb", "gb").replace(" ", "-")


def _board(row: DatasheetRow) -> Board:
    # The least that such a board reports: what is predicted to fit does.
    device = Device(
        name=_DRIVER_NAMES.get(row.board, row.board),
        kind="cuda",
        index=0,
        cores=row.sms,
        threads=None,
        memory_bytes=round(row.memory_gib[0] * _GIB),
        key=f"datasheet|{row.board}",
    )
    roofs = {dtype: found for dtype in row.tflops if (found := lookup(device, dtype)) is not None}
    return Board(short_name(row.board), row.board, device, MappingProxyType(roofs))


def _either(names: list[str]) -> str:
    return " or ".join(names)
