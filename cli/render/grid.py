"""A table before it is laid out: a head, and rows of cells that are texts already."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GridRow:
    """A row.

    Attributes:
        label: What the row is of. cells: One a column.
        nested: Whether it is a part of the row above that is not.
        note: What has to be said of it.
    """

    label: str
    cells: tuple[str, ...]
    nested: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    Attributes:
        label: Title of the labels. head: Title of each column.
        rows: The rows.
    """

    label: str
    head: tuple[str, ...]
    rows: tuple[GridRow, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)
