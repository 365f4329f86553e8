"""What stands around the events of a Chrome trace: devices, ranks, versions, and what is wrong with the file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from phaseprof.collectors.files.chrome import Damage, lists
from phaseprof.collectors.files.contents import DeviceFound
from phaseprof.collectors.files.values import natural, whole


def clauses(damage: Damage, of_bytes: str) -> list[str]:
    """What is wrong with a file, as clauses."""
    found = []
    if of_bytes:
        found.append(of_bytes)
    if damage.truncated:
        found.append("its list of events ends before its end")
    if damage.events_lost:
        found.append(
            f"{damage.events_lost} events or pieces of events ({damage.bytes_lost} bytes) "
            "could not be read"
        )
    if damage.events_repaired:
        found.append(f"{damage.events_repaired} events were no JSON and had to be repaired")
    return [*found, *damage.wrappings]


def devices_described(header: dict[str, Any]) -> list[DeviceFound]:
    """The devices that the header describes."""
    described = [_device(entry) for entry in lists(header, "deviceProperties")]
    return [each for each in described if each is not None]


def devices_named(used: Collection[int], described: list[DeviceFound]) -> tuple[DeviceFound, ...]:
    """The devices that were used, as the file describes them; those that it describes if none was."""
    if not used:
        return tuple(described)
    by_number = {each.number: each for each in described}
    alike = {(each.name, each.cores, each.memory_bytes) for each in described}
    found = []
    for number in sorted(used):
        own = by_number.get(number)
        if own is None and len(alike) == 1:
            own = described[0]  # numbers of agents, of which CPUs are some
        found.append(
            DeviceFound(number)
            if own is None
            else DeviceFound(number, own.name, own.cores, own.memory_bytes, own.capability)
        )
    return tuple(found)


def _device(entry: Any) -> DeviceFound | None:
    if not isinstance(entry, dict):
        return None
    number = whole(entry.get("id"))
    if number is None:
        return None
    major, minor = natural(entry.get("computeMajor")), natural(entry.get("computeMinor"))
    return DeviceFound(
        number,
        str(entry.get("name") or "").strip(),
        natural(entry.get("numSms")) or None,
        natural(entry.get("totalGlobalMem")) or None,
        None if major is None or minor is None else (major, minor),
    )


def versions_of(header: dict[str, Any]) -> dict[str, str]:
    """Versions of the drivers and of what recorded, as far as the header names them."""
    return {
        key.removesuffix("_version"): str(value)
        for key, value in header.items()
        if key.endswith("_version") and isinstance(value, int | str)
    }
