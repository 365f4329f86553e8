"""Values of a Chrome trace as numbers: what is none is told apart, never raised."""

from __future__ import annotations

from typing import Any

import msgspec

#: No number of a grid is larger.
_INT32 = 1 << 31


def grid_of(value: Any) -> tuple[int, int, int] | None:
    """Blocks in x, y and z; None for what is no grid."""
    if (
        isinstance(value, list)
        and len(value) == 3
        and all(isinstance(each, int) and 0 <= each < _INT32 for each in value)
    ):
        return value[0], value[1], value[2]
    return None


def ids_shape(dims: msgspec.Raw) -> tuple[int, ...]:
    """The shape of the second input; empty where it was not recorded."""
    try:
        found = msgspec.json.decode(dims, type=list[list[int]]) if dims else []
    except (msgspec.MsgspecError, UnicodeError):
        return ()
    return tuple(found[1]) if len(found) > 1 else ()


def number_of(text: str) -> float | None:
    """The number that a text is; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def whole(value: object) -> int | None:
    """A whole number, also one that is written as text; None for what is none."""
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        text = value.strip()
        if text.removeprefix("-").isdecimal() and len(text) < 20:
            return int(text)
    return None


def natural(value: object) -> int | None:
    """A whole number of 0 or more; None for what is none."""
    found = whole(value)
    return found if found is not None and 0 <= found < 1 << 62 else None
