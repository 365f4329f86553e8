"""Arrow columns from Python values, by way of buffers.

`pyarrow.array` imports pandas when it is installed, to see whether it was given a series: a third of a second and a
hundred megabytes in somebody else's process. Building the buffers ourselves avoids that, and is several times quicker.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import pyarrow as pa


def to_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array of one of the types that the schema uses; None is null.

    Structs are read by attribute, so that lists of dataclasses become lists of structs.

    Raises:
        TypeError: If the type is none of the schema's.
        OverflowError: If an integer does not fit.
    """
    if pa.types.is_list(kind):
        return _lists(values, kind)
    if pa.types.is_struct(kind):
        return _structs(values, kind)
    build = _BUILDERS.get(kind)
    if build is None:
        raise TypeError(f"no column is built of {kind}")
    return build(values)


def _numbers(code: str, kind: pa.DataType) -> Callable[[Sequence[Any]], pa.Array]:
    def build(values: Sequence[Any]) -> pa.Array:
        validity, nulls = _validity(values)
        filled = [0 if value is None else value for value in values] if nulls else values
        data = pa.py_buffer(array(code, filled))
        return pa.Array.from_buffers(kind, len(values), [validity, data], nulls)

    return build


def _booleans(values: Sequence[Any]) -> pa.Array:
    validity, nulls = _validity(values)
    return pa.Array.from_buffers(
        pa.bool_(), len(values), [validity, _bits([bool(value) for value in values])], nulls
    )


def _strings(values: Sequence[Any]) -> pa.Array:
    validity, nulls = _validity(values)
    # Names are few, and repeated from row to row.
    known = {value: value.encode("utf-8", "replace") for value in set(values) if value is not None}
    known[None] = b""
    encoded = [known[value] for value in values]
    offsets = array("i", accumulate(map(len, encoded), initial=0))
    return pa.Array.from_buffers(
        pa.string(),
        len(values),
        [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))],
        nulls,
    )


def _lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    validity, nulls = _validity(values)
    if nulls:
        values = [() if value is None else value for value in values]
    offsets = array("i", accumulate(map(len, values), initial=0))
    flat = list(chain.from_iterable(values))
    return pa.Array.from_buffers(
        kind,
        len(values),
        [validity, pa.py_buffer(offsets)],
        nulls,
        children=[to_column(flat, kind.value_type)],
    )


def _structs(values: Sequence[Any], kind: pa.StructType) -> pa.Array:
    children = [to_column(list(map(attrgetter(field.name), values)), field.type) for field in kind]
    return pa.Array.from_buffers(kind, len(values), [None], 0, children=children)


def _validity(values: Sequence[Any]) -> tuple[pa.Buffer | None, int]:
    nulls = values.count(None)
    return (_bits([value is not None for value in values]) if nulls else None), nulls


def _bits(flags: Sequence[bool]) -> pa.Buffer:
    """One bit a flag, least significant first."""
    packed = bytearray((len(flags) + 7) // 8)
    if not any(flags):
        return pa.py_buffer(bytes(packed))
    for place, flag in enumerate(flags):
        if flag:
            packed[place >> 3] |= 1 << (place & 7)
    return pa.py_buffer(bytes(packed))


_BUILDERS: dict[pa.DataType, Callable[[Sequence[Any]], pa.Array]] = {
    pa.int64(): _numbers("q", pa.int64()),
    pa.int32(): _numbers("i", pa.int32()),
    pa.float64(): _numbers("d", pa.float64()),
    pa.bool_(): _booleans,
    pa.string(): _strings,
}
