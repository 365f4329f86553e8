"""The form in which the rows of a trace are read: this version's columns, whole or lean."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from phaseprof.schema import TableSpec
from phaseprof.trace.columns import to_column


@dataclass(frozen=True, slots=True)
class Lean:
    """Columns that somebody has no use for. Without them, and with names as dictionaries, a trace takes a third of the
    memory and of the time.

    Attributes:
        without: What is not read: ``table.column``, or ``table.column.field`` for a field of its structs.
        without_if_whole: What is not read besides, unless the trace was cut off.
    """

    without: frozenset[str]
    without_if_whole: frozenset[str] = frozenset()


#: Columns of few different values, or of values that are repeated from row to row.
_NAMES = frozenset(
    [
        *("model_id", "role", "phase", "tag_source", "dtype", "warmup", "error", "finish"),
        *("name", "device", "source", "metric"),
    ]
)


def is_name(path: str) -> bool:
    """Whether a stored column (``phase``, ``slices.list.element.request_id``) holds names."""
    column, _, inner = path.partition(".")
    return column in _NAMES or inner.endswith((".request_id", ".phase"))


@dataclass(frozen=True, slots=True)
class Form:
    """The form that the rows of a table are brought to: this version's columns, and `rank`.

    Attributes:
        spec: The table.
        omitted: Columns that are left out, and fields of structs (``slices.past``).
        lean: Names are dictionaries, and whole numbers in structs int32.
        schema: Of the rows.
    """

    spec: TableSpec
    omitted: frozenset[str]
    lean: bool
    schema: pa.Schema

    @classmethod
    def of(cls, spec: TableSpec, omitted: frozenset[str], lean: bool) -> Form:
        """The form of a table; ``omitted`` names its columns with the table before them."""
        prefix = f"{spec.name}."
        own = frozenset(name.removeprefix(prefix) for name in omitted if name.startswith(prefix))
        fields = [
            field.with_type(_lean(field, own)) if lean else field
            for field in spec.arrow
            if field.name not in own
        ]
        return cls(spec, own, lean, pa.schema([*fields, pa.field("rank", pa.int32(), False)]))

    def wants(self, path: str) -> bool:
        """Whether a stored column is read: ``flops``, ``slices.list.element.past``."""
        column, _, inner = path.partition(".")
        return (
            column not in self.omitted
            and f"{column}.{inner.rpartition('.')[2]}" not in self.omitted
        )

    def no_rows(self) -> pa.Table:
        """The table without rows."""
        plain = [to_column((), _stored_type(field.type)) for field in self.schema]
        columns = [
            values.cast(field.type) for values, field in zip(plain, self.schema, strict=True)
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def conform(self, rows: pa.Table, rank: int) -> pa.Table:
        """Bring rows of any version to this form: a missing column becomes null, a newer one is dropped."""
        columns = []
        for field in self.schema:
            if field.name == "rank":
                columns.append(to_column([rank] * len(rows), field.type))
            elif field.name in rows.column_names:
                columns.append(_cast(rows.column(field.name), field.type))
            else:
                columns.append(pa.nulls(len(rows), field.type))
        nullable = pa.schema([field.with_nullable(True) for field in self.schema])
        return pa.Table.from_arrays(columns, schema=nullable)


_DICTIONARY = pa.dictionary(pa.int32(), pa.string())


def _lean(field: pa.Field, omitted: frozenset[str]) -> pa.DataType:
    """The type of a column in the lean form."""
    if field.name in _NAMES:
        return _DICTIONARY
    if not pa.types.is_list(field.type) or not pa.types.is_struct(field.type.value_type):
        return field.type
    kept = [
        part.with_type(_DICTIONARY if pa.types.is_string(part.type) else pa.int32())
        for part in field.type.value_type
        if f"{field.name}.{part.name}" not in omitted
    ]
    return pa.list_(field.type.value_field.with_type(pa.struct(kept)))


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """A type without dictionaries, of which empty columns can be made."""
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_stored_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(_stored_type(part.type)) for part in kind])
    return pa.string() if pa.types.is_dictionary(kind) else kind


def _cast(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if values.type.equals(kind):
        return values
    if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(values.type):
        return values.cast(pa.string()).dictionary_encode()
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        return pa.chunked_array([_cast_structs(chunk, kind) for chunk in values.chunks], kind)
    return values.cast(kind)


def _cast_structs(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Lists of structs field by field: a cast of Arrow's own makes no dictionaries inside. A field that an older
    version did not write is null."""
    if not (pa.types.is_list(values.type) and pa.types.is_struct(values.type.value_type)):
        return values.cast(kind)
    structs = values.values
    parts = [
        _cast(pa.chunked_array([structs.field(part.name)]), part.type).combine_chunks()
        if structs.type.get_field_index(part.name) >= 0
        else pa.nulls(len(structs), part.type)
        for part in kind.value_type
    ]
    inner = pa.StructArray.from_arrays(parts, fields=list(kind.value_type))
    mask = values.is_null() if values.null_count else None
    return pa.ListArray.from_arrays(values.offsets, inner, type=kind, mask=mask)
