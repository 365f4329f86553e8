"""The bytes of a file, whatever wraps them: plain, gzip, standard input. Damage is told, not raised.

What a file is, is read off its first bytes, never off its name.
"""

from __future__ import annotations

import enum
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from phaseprof.errors import TraceError

#: Bytes that are read at a time.
CHUNK_BYTES = 4 << 20
STANDARD_INPUT = "-"
#: Packed bytes that are unpacked in one call: a hundredfold of them fits into memory.
_UNPACKED_AT_ONCE = 64 << 10

_GZIP = b"\x1f\x8b"
#: By their first bytes: what somebody may hand over by mistake, and what would help.
_OTHERS: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1", "a Parquet file", "A trace of phaseprof is a folder: phaseprof report FOLDER."),
    (b"PK\x03\x04", "a zip archive", "Unpack it first."),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "Unpack it first: unzstd FILE."),
    (b"BZh", "compressed with bzip2", "Unpack it first: bunzip2 FILE."),
    (b"\xfd7zXZ", "compressed with xz", "Unpack it first: unxz FILE."),
    (b"\x80\x04", "a pickle", "Export the profile as a Chrome trace: prof.export_chrome_trace(…)."),
    (b"\x80\x02", "a pickle", "Export the profile as a Chrome trace: prof.export_chrome_trace(…)."),
)


class NoRecordingError(TraceError):
    """A file holds no recording that could be imported."""


class FileKind(enum.StrEnum):
    """What a file holds."""

    JSON = "JSON"
    SQLITE = "SQLite"


class Bytes:
    """The unpacked bytes of one file, once.

    Args:
        path: The file; ``-`` for standard input.

    Raises:
        TraceError: If it cannot be opened.
        NoRecordingError: If it is empty, or no file that can be read here.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = "standard input" if str(path) == STANDARD_INPUT else str(path)
        #: Why the bytes end before their end, as a clause; empty if they do not.
        self.damage = ""
        self._file = self._open(path)
        self._first = self._read_first()
        self.kind = self._kind()

    def __iter__(self) -> Iterator[bytes]:
        """Pieces of a few megabytes. The file is closed when they end."""
        with self._file:
            if self._first.startswith(_GZIP):
                yield from self._unpacked()
            else:
                yield from self._plain()

    def close(self) -> None:
        """Close the file without having read it."""
        self._file.close()

    def _open(self, path: str | Path) -> BinaryIO:
        if str(path) == STANDARD_INPUT:
            return sys.stdin.buffer
        try:
            return open(path, "rb")
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from error

    def _read_first(self) -> bytes:
        try:
            first = self._file.read(CHUNK_BYTES)
        except OSError as error:
            self._file.close()
            raise TraceError(f"{self.name} cannot be read: {error.strerror or error}.") from error
        if not first:
            self._file.close()
            raise NoRecordingError(f"{self.name} is empty.")
        return first

    def _kind(self) -> FileKind:
        head = self._first
        if head.startswith(_GZIP):
            try:
                head = zlib.decompressobj(wbits=31).decompress(head[:4096], 512)
            except zlib.error:
                return FileKind.JSON  # the damage is met, and told, when it is read
        if head.startswith(b"SQLite format 3\x00"):
            return FileKind.SQLITE
        for magic, what, remedy in _OTHERS:
            if head.startswith(magic):
                self._file.close()
                raise NoRecordingError(
                    f"{self.name} is {what}, no trace that can be imported.", remedy
                )
        return FileKind.JSON

    def _plain(self) -> Iterator[bytes]:
        piece = self._first
        self._first = b""
        while piece:
            yield piece
            piece = self._more()

    def _more(self) -> bytes:
        try:
            return self._file.read(CHUNK_BYTES)
        except OSError as error:
            self.damage = f"reading stopped: {error.strerror or error}"
            return b""

    def _unpacked(self) -> Iterator[bytes]:
        unpack = zlib.decompressobj(wbits=31)
        packed, self._first = self._first, b""
        pieces: list[bytes] = []
        while packed:
            # A little at a time: where the data is damaged, what a call had unpacked before it is lost.
            now, packed = packed[:_UNPACKED_AT_ONCE], packed[_UNPACKED_AT_ONCE:]
            try:
                pieces.append(unpack.decompress(now))
            except zlib.error as error:
                self.damage = f"its compressed data is damaged ({error})"
                break
            if sum(map(len, pieces)) >= CHUNK_BYTES:
                yield b"".join(pieces)
                pieces = []
            if unpack.eof:
                # Several gzip files in one, as `cat a.gz b.gz` makes; zeros pad some.
                packed = (unpack.unused_data + packed or self._more()).lstrip(b"\x00")
                if packed:
                    unpack = zlib.decompressobj(wbits=31)
            elif not packed:
                packed = self._more()
        if not unpack.eof and not self.damage:
            self.damage = "its compressed data ends before its end"
        yield b"".join(pieces)
