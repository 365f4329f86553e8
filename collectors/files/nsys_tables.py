"""The tables of an Nsight Systems export: their names, the processes in them, the strings, the clock.

Identifiers are composed: ``globalTid`` holds the process in bits 24 to 47 and the thread in the 24 below. Times are ns
since the capture began, which ``TARGET_INFO_SESSION_START_TIME`` places on the Unix axis, unless the export has moved
them already.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from phaseprof.collectors.files.nsys_database import Database
from phaseprof.collectors.files.source import NoRecordingError

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
SETS = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES = "NVTX_EVENTS"
#: The process stands above these bits of an identifier, the thread below.
PID_BITS, TID_MASK = 24, (1 << 24) - 1
#: No time is later.
LATEST_NS = 7 * 10**18
INT32 = 1 << 31
#: Later than any capture is long: such a time counts from the Unix epoch. 1973.
_EPOCH_NS = 10**17
_COPY = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
    11: "HtoD",
    12: "DtoH",
    13: "DtoD",
}
_MEMORY = {
    0: "Pageable",
    1: "Pinned",
    2: "Device",
    3: "Array",
    4: "Managed",
    5: "Device",
    6: "Managed",
}


@dataclass(frozen=True, slots=True)
class Process:
    """A process that used devices, or called them.

    Attributes:
        key: What its rows hold above the thread's bits; None: of all rows, which do not tell it.
        pid: As its system numbered it; 0 if not known.
        rank: That MPI gave it; None if it gave none.
    """

    key: int | None
    pid: int
    rank: int | None = None


def processes(database: Database) -> tuple[Process, ...]:
    """The processes that ran something on a device; of a recording without devices those that called or placed ranges.

    Raises:
        NoRecordingError: If the database is no export of Nsight Systems, or has nothing of what is read here.
    """
    known = (KERNELS, COPIES, SETS, GRAPHS, CALLS, RANGES)
    if not any(map(database.has, (*known, "StringIds", "META_DATA_EXPORT"))):
        raise NoRecordingError(
            f"{database.name} is an SQLite database, but no export of Nsight Systems.",
            "nsys export --type sqlite REPORT.nsys-rep",
        )
    ranks = {
        key >> PID_BITS: rank
        for key, rank in database.rows(
            "MPI_RANKS", ("globalPid", "rank"), needs=("globalPid", "rank")
        )
        if isinstance(key, int) and isinstance(rank, int) and 0 <= rank < INT32
    }
    for tables, column in (
        ((KERNELS, GRAPHS, COPIES, SETS), "globalPid"),
        ((CALLS, RANGES), "globalTid"),
    ):
        found = {
            key
            for table in tables
            for key in database.distinct(table, f'"{column}" >> {PID_BITS}', column)
            if isinstance(key, int)
        }
        if found:
            return tuple(Process(key, key & TID_MASK, ranks.get(key)) for key in sorted(found))
        if any(_some(database, table) for table in tables):
            break
    if any(_some(database, table) for table in known):
        return (Process(None, 0),)
    damage = f" ({'; '.join(database.damage)})" if database.damage else ""
    raise NoRecordingError(
        f"{database.name} has no kernels, no launches and no ranges{damage}.",
        "Record with nsys profile --trace=cuda,nvtx, and export all tables.",
    )


class Strings:
    """The table of strings: looked up, and kept, as rows name them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[int, str] = {}

    def get(self, number: Any) -> str:
        """The text; what is text already as it is; empty for what there is not."""
        if isinstance(number, str):
            return number
        if not isinstance(number, int):
            return ""
        found = self._known.get(number)
        if found is None:
            value = self._database.value("StringIds", "value", where='"id" = ?', of=(number,))
            if len(self._known) >= 1 << 16:
                self._known.clear()
            found = self._known[number] = value if isinstance(value, str) else ""
        return found


def clock_of(database: Database) -> tuple[int, bool]:
    """What to add to the times, and whether they then are Unix times."""
    for table in (KERNELS, GRAPHS, CALLS, RANGES):
        first = next((row[0] for row in database.rows(table, ("start",), needs=("start",))), None)
        if isinstance(first, int) and first > _EPOCH_NS:
            return 0, True
        if first is not None:
            break
    began = database.value("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
    if not isinstance(began, int) or not _EPOCH_NS < began < LATEST_NS:
        return 0, False
    moved = database.value(
        "META_DATA_EXPORT", "value", where="name = ?", of=("EXPORT_PARAM_TIME_SHIFT",)
    )
    by = int(moved) if isinstance(moved, str) and re.fullmatch(r"-?\d{1,18}", moved) else 0
    return began - by, True


def _some(database: Database, table: str) -> bool:
    return next(database.rows(table, ("start",)), None) is not None


def copy_name(kind: Any, source: Any, target: Any) -> str:
    """What a copy is called among the kernels, as torch.profiler would: its direction, and the kinds of memory."""
    name = f"Memcpy {_COPY.get(kind, 'of unknown kind')}"
    if source in _MEMORY and target in _MEMORY:
        name += f" ({_MEMORY[source]} -> {_MEMORY[target]})"
    return name


def set_name(kind: Any) -> str:
    """What a memset is called among the kernels."""
    return f"Memset ({_MEMORY.get(kind, 'Unknown')})"
