"""An Nsight Systems export as a database: opened for reading, its tables and columns looked up, its rows in order.

Exports of every version have other tables and columns; damage may show at any row. Nothing here knows what rows mean.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phaseprof.collectors.files.source import Bytes, NoRecordingError
from phaseprof.errors import TraceError

#: What `nsys` itself writes. They are not open, and `nsys` alone can read them.
_REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
#: What a damaged file may raise.
_ERRORS = (sqlite3.Error, OverflowError, UnicodeError)
#: Rows that are fetched at a time.
_ROWS = 4096


def refuse_report(path: str | Path) -> None:
    """Say how to export a report of Nsight Systems that is given as it is.

    Raises:
        TraceError: If the file is named like one.
    """
    name = str(path)
    if name.lower().removesuffix(".gz").endswith(_REPORTS):
        raise TraceError(
            f"{name} is a report of Nsight Systems, which only nsys reads.",
            f"nsys export --type sqlite {name}, then import the .sqlite file.",
        )


class Database:
    """A database that is only read.

    Args:
        path: The file, unpacked.
        name: What messages call it.

    Attributes:
        damage: Why rows of it could not be read, as clauses, each once.

    Raises:
        NoRecordingError: If it is no database, or its list of tables cannot be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.damage: list[str] = []
        self._columns: dict[str, dict[str, str]] = {}
        # Immutable: no lock and no journal beside a file that may lie on a read-only disk.
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        connection: sqlite3.Connection | None = None
        try:
            connection = sqlite3.connect(uri, uri=True)
            connection.text_factory = _text
            found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self._tables = {str(row[0]).lower(): str(row[0]) for row in found.fetchall()}
        except _ERRORS as error:
            if connection is not None:
                connection.close()
            raise NoRecordingError(
                f"{name} is a damaged SQLite file: {_said(error)}.", "Export it, or copy it, again."
            ) from error
        self._connection = connection
        if clause := _of_another_size(path):
            self.damage.append(clause)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def has(self, table: str) -> bool:
        """Whether there is a table of that name."""
        return table.lower() in self._tables

    def columns(self, table: str) -> dict[str, str]:
        """The columns of a table as they are written, by their lower-case names; none if there is no such table."""
        if table not in self._columns:
            rows: list[Any] = []
            if self.has(table):
                rows = list(self._run(f"PRAGMA table_info({_quoted(self._tables[table.lower()])})"))
            self._columns[table] = {str(row[1]).lower(): str(row[1]) for row in rows}
        return self._columns[table]

    def rows(
        self,
        table: str,
        columns: Sequence[str],
        *,
        needs: Sequence[str] = (),
        where: str = "",
        parameters: Sequence[Any] = (),
    ) -> Iterator[tuple[Any, ...]]:
        """The rows of a table, in the order of the file; columns that it lacks are None.

        Args:
            table: Its name.
            columns: What is wanted.
            needs: Those without which a row says nothing: there are no rows if one is missing.
            where: A condition, over columns that the caller has looked up.
            parameters: Its values.
        """
        known = self.columns(table)
        if not known or any(column.lower() not in known for column in needs):
            return
        listed = ", ".join(
            _quoted(known[column.lower()]) if column.lower() in known else "NULL"
            for column in columns
        )
        text = f"SELECT {listed} FROM {_quoted(self._tables[table.lower()])}"
        yield from self._run(f"{text} WHERE {where}" if where else text, parameters)

    def distinct(self, table: str, expression: str, column: str) -> list[Any]:
        """The distinct values of an expression over one column; none without the column."""
        if column.lower() not in self.columns(table):
            return []
        name = _quoted(self._tables[table.lower()])
        return [row[0] for row in self._run(f"SELECT DISTINCT {expression} FROM {name}")]

    def value(self, table: str, column: str, *, where: str = "", of: Sequence[Any] = ()) -> Any:
        """One column of the first row; None without it."""
        for row in self.rows(table, (column,), needs=(column,), where=where, parameters=of):
            return row[0]
        return None

    def _run(self, text: str, parameters: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            cursor = self._connection.execute(text, parameters)
            while rows := cursor.fetchmany(_ROWS):
                yield from rows
        except _ERRORS as error:
            clause = f"reading its tables stopped: {_said(error)}"
            if clause not in self.damage:
                self.damage.append(clause)


@contextlib.contextmanager
def opened(source: Bytes, path: str | Path, folder: Path) -> Iterator[Database]:
    """The database in a file, unpacked beside the trace where it is packed or comes from standard input.

    Args:
        source: The file; it is closed.
        path: Its path, ``-`` for standard input.
        folder: Where a temporary file may be made.

    Raises:
        TraceError: As `Database` does, and if there is no room to unpack it.
    """
    with contextlib.ExitStack() as stack:
        place = Path(path)
        if str(path) == "-" or not _is_plain(place):
            place = _unpacked(source, folder, stack)
        else:
            source.close()
        database = Database(place, source.name)
        stack.callback(database.close)
        if source.damage:
            database.damage.append(source.damage)
        yield database


def _unpacked(source: Bytes, folder: Path, stack: contextlib.ExitStack) -> Path:
    try:
        handle, name = tempfile.mkstemp(prefix=".import-", suffix=".sqlite", dir=folder)
        stack.callback(_remove, name)
        with os.fdopen(handle, "wb") as file:
            for piece in source:
                file.write(piece)
    except OSError as error:
        raise TraceError(
            f"{source.name} cannot be unpacked into {folder}: {error.strerror or error}.",
            "Choose another folder with -o, or unpack it first.",
        ) from error
    return Path(name)


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)


def _is_plain(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(16) == b"SQLite format 3\x00"
    except OSError:
        return False


def _said(error: Exception) -> str:
    """What SQLite says. It quotes the file, and what is quoted may be no text: then that is the error."""
    return (
        "its tables are described by what is no text"
        if isinstance(error, UnicodeError)
        else str(error)
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _of_another_size(path: Path) -> str:
    """What is wrong with the size of a file, by the pages that its header counts (SQLite file format, 1.3); empty where
    it is right, or where the header says itself that its count is not current."""
    with path.open("rb") as file:
        header = file.read(100)
    page = int.from_bytes(header[16:18], "big")
    page_bytes = 65_536 if page == 1 else page
    pages = int.from_bytes(header[28:32], "big")
    size = path.stat().st_size
    if header[24:28] != header[92:96] or not pages or size == pages * page_bytes:
        return ""
    return f"the file has {size:,} bytes, and its header counts {pages:,} pages of {page_bytes:,}"
