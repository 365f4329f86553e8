"""The parts of a table: their names, how they are stored, and which of them are merged when.

Parts are merged in tiers, so that a run of days rewrites each of its rows a few times and not once a minute: fresh
parts into one of tier 1, those into one of tier 2, and so on until a part is full. There are some dozens at any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

#: Fresh parts that are merged into one: a minute's worth.
MERGE_AFTER_PARTS = 64
#: Parts of a higher tier that are merged into one of the next.
MERGE_AFTER_MERGED = 16
#: The newest parts stay as they are: most rows that are written again are replaced within seconds, and are then left
#: out before they reach a part that is rarely rewritten.
KEEP_FRESH = 2
#: A part of this size (two million passes) is not merged any more, unless everything fits into two of them in the end.
FULL_PART_BYTES = 32 * 2**20
#: Rows of a group, or fewer of many bytes (lists of latencies): what a merge holds in memory, twice.
ROW_GROUP = 8192
ROW_GROUP_BYTES = 8 * 2**20

_PART = re.compile(
    r"part-(?:(?P<host>[0-9a-f]{6})-)?(?P<pid>\d+)-(?P<first>\d+)-(?P<last>\d+)\.parquet"
)


@dataclass(frozen=True, slots=True)
class PartName:
    """The name of a part: its process and the numbers of the flushes that it holds.

    Attributes:
        pid: Process id.
        first, last: Numbers of the first and the last flush inside.
        host: `Host.token` of the process's host: hosts that share a folder have the same process ids. Empty in a
            trace that was written without it.
    """

    pid: int
    first: int
    last: int
    host: str = ""

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """Read a file name; None if it is not one of a part."""
        match = _PART.fullmatch(name)
        if match is None:
            return None
        pid, first, last = (int(match[name]) for name in ("pid", "first", "last"))
        return cls(pid, first, last, match["host"] or "")

    def __str__(self) -> str:
        process = f"{self.host}-{self.pid}" if self.host else f"{self.pid}"
        return f"part-{process}-{self.first:06d}-{self.last:06d}.parquet"

    @property
    def process(self) -> tuple[str, int]:
        """The process that wrote it: host and process id."""
        return self.host, self.pid

    def holds(self, other: PartName) -> bool:
        """Whether all of another part is in this one."""
        return (
            self.process == other.process and self.first <= other.first and other.last <= self.last
        )

    def up_to(self, other: PartName) -> PartName:
        """The part that this one and all up to another are merged into."""
        return PartName(self.pid, self.first, other.last, self.host)


@dataclass(frozen=True, slots=True)
class Part:
    """A part that lies in the folder of a table.

    Attributes:
        name: Its name.
        tier: 0 for a fresh one, else one more than that of the parts that it was merged from.
        size_bytes: Its size.
    """

    name: PartName
    tier: int
    size_bytes: int

    @property
    def full(self) -> bool:
        """Whether later merges leave it alone."""
        return self.tier > 0 and self.size_bytes >= FULL_PART_BYTES


def due(parts: Sequence[Part]) -> tuple[int, int] | None:
    """Which parts are to be merged now: the place of the first and the one behind the last; None for none.

    Args:
        parts: Those of a table, in the order of their flushes. Their tiers descend.
    """
    for tier, begin, end in _tiers(parts):
        run = parts[begin:end]
        enough = MERGE_AFTER_MERGED if tier else MERGE_AFTER_PARTS
        size = sum(part.size_bytes for part in run)
        if len(run) >= enough or (len(run) > 1 and size >= FULL_PART_BYTES):
            return begin, end
    return None


def _tiers(parts: Sequence[Part]) -> Iterator[tuple[int, int, int]]:
    """The tiers that can be merged, lowest first: tier, and the places of its parts. Full parts are above all."""
    end = len(parts)
    fresh = True
    while end and not parts[end - 1].full:
        tier = parts[end - 1].tier
        begin = end
        while begin and parts[begin - 1].tier == tier and not parts[begin - 1].full:
            begin -= 1
        yield tier, begin, max(end - KEEP_FRESH, begin) if fresh and tier == 0 else end
        fresh = False
        end = begin


def last_merges(parts: Sequence[Part], stale: Sequence[bool]) -> list[tuple[int, int]]:
    """What is merged when the run ends: all into one, or of a long run what is not full yet.

    Args:
        parts: As in `due`.
        stale: Whether each of them has rows that later ones replace: these are written again, alone if need be.
    """
    runs = [(0, len(parts))]
    if sum(part.size_bytes for part in parts if part.tier) > 2 * FULL_PART_BYTES:
        runs = []
        for place, part in enumerate(parts):
            if runs and not part.full and not parts[place - 1].full:
                runs[-1] = runs[-1][0], place + 1
            else:
                runs.append((place, place + 1))
    return [(begin, end) for begin, end in runs if end - begin > 1 or any(stale[begin:end])]


def options(schema: pa.Schema, key: str) -> dict[str, Any]:
    """How a merged part is stored: what counts up or hardly changes as differences, all else by dictionaries.

    Memory comes from the system's allocator, which gives back what is freed: Arrow's own keeps some tens of megabytes.

    Args:
        schema: Of the table.
        key: Its key column: text of a key differs from row to row.
    """
    encodings: dict[str, str] = {}
    dictionaries: list[str] = []
    for field in schema:
        if pa.types.is_integer(field.type):
            encodings[field.name] = "DELTA_BINARY_PACKED"
        elif pa.types.is_string(field.type) and field.name == key:
            encodings[field.name] = "DELTA_BYTE_ARRAY"
        elif pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type):
            inner = f"{field.name}.list.element"
            dictionaries += [f"{inner}.{part.name}" for part in field.type.value_type]
        elif pa.types.is_list(field.type):
            encodings[f"{field.name}.list.element"] = "DELTA_BINARY_PACKED"
        elif not pa.types.is_boolean(field.type):
            dictionaries.append(field.name)
    return {
        "compression": "zstd",
        "write_statistics": True,
        "use_dictionary": dictionaries,
        "column_encoding": encodings,
        "memory_pool": pa.system_memory_pool(),
    }


#: A fresh part is written beside the workload and merged soon: half the CPU time counts, its size does not.
FRESH_OPTIONS: dict[str, Any] = {
    "compression": "none",
    "use_dictionary": False,
    "write_statistics": False,
    "memory_pool": pa.system_memory_pool(),
}
