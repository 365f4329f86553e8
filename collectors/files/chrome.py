"""The events of a Chrome trace (the JSON that torch.profiler writes), decoded as a stream, damaged or not.

A file of gigabytes is never in memory as a whole: it is cut between two events every few megabytes, and each piece is
decoded by msgspec into the few fields that anybody here asks for. Where to cut is learned from how the file's own first
events are laid out; a cut in a wrong place (inside a string, or a nested list) leaves a piece that is no JSON, so that
what decodes was cut right.

What does not decode is repaired where that is safe (bytes that are no UTF-8, control characters, lone backslashes, bare
``inf`` and ``N/A``), else taken apart event by event, and what still does not decode is left out and counted: a damaged
file is always said to be one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

#: A number where there should be one, or what takes its place.
Loose = int | float | str | None


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments of an event that are asked for; the names are those of kineto, of 2021 to 2026."""

    correlation: Loose = None
    external_id: Loose = msgspec.field(name="External id", default=None)
    external_id_2021: Loose = msgspec.field(name="external id", default=None)
    device: Loose = None
    stream: Loose = None
    bytes: Loose = None
    grid: Any = None
    block: Any = None
    occupancy: Loose = msgspec.field(name="est. achieved occupancy %", default=None)
    blocks_per_sm: Loose = msgspec.field(name="blocks per SM", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    name: Any = None
    #: Shapes of an operator's inputs: few operators are asked for them, and only these decode them.
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())


class Event(msgspec.Struct, gc=False, frozen=True):
    """One event, as it stands in the file: nothing is checked or converted."""

    ph: Loose = None
    cat: Loose = None
    name: Loose = None
    pid: Loose = None
    tid: Loose = None
    ts: Loose = None
    dur: Loose = None
    args: Args | None = None


@dataclass(slots=True)
class Damage:
    """What is wrong with a file.

    Attributes:
        events_lost: Events, or pieces of what may have been some, that could not be read.
        bytes_lost: Bytes that they took.
        events_repaired: Events, or pieces of the file with many, that had to be repaired to be read.
        truncated: The list of events does not end.
        wrappings: What is wrong with the bytes themselves, as clauses.
    """

    events_lost: int = 0
    bytes_lost: int = 0
    events_repaired: int = 0
    truncated: bool = False
    wrappings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.events_lost or self.events_repaired or self.truncated or self.wrappings)


class NoEventsError(ValueError):
    """The file is no Chrome trace: it has no list of events."""


#: Before the list of events there are properties of devices and ranks: a few megabytes at most.
_MAX_HEADER_BYTES = 64 << 20
#: A piece in which no event ends is no list of events any more.
_MAX_EVENT_BYTES = 64 << 20
#: Few events are longer. So many of those that are, or seem to be where a file is damaged, are followed to their end.
_LONG_EVENT_BYTES = 64 << 10
_LONG_EVENTS = 8
#: Cuts that are tried before a piece is taken apart.
_TRIES = 3

_DECODE = msgspec.json.Decoder(list[Event]).decode
_DECODE_ONE = msgspec.json.Decoder(Event).decode
_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)

_EVENTS_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_NEXT_EVENT = re.compile(rb"\s*,?\s*")
_RESUME = re.compile(rb'\{\s*"(?:ph|name|cat|pid|tid|ts|args|dur|id)"\s*:')

_CONTROL = re.compile(rb"[\x00-\x1f]")
_LONE_BACKSLASH = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_NO_NUMBER = re.compile(rb"(:\s*)(?:[-+]?(?:inf(?:inity)?|nan)|N/A)(?=\s*[,}\]])", re.IGNORECASE)


class ChromeTrace:
    """The events of one file, in its order, once.

    Args:
        pieces: The bytes of the file.

    Raises:
        NoEventsError: While it is iterated, if there is no list of events.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._ended = False
        self._rest = b""
        #: How an event ends and the next one begins, and how much of that belongs to the first.
        self._cut = b""
        self._closing = 0
        self._long_events_left = _LONG_EVENTS
        #: What is known once the events have been read.
        self.damage = Damage()
        #: The keys beside the events: those before them, and once these are read, those behind them.
        self.header: dict[str, Any] = {}

    def __iter__(self) -> Iterator[list[Event]]:
        """Lists of events, each of a few megabytes of the file."""
        rest = self._read_header()
        while True:
            piece = self._more()
            if not piece:
                break
            yield from self._take(rest + piece, last=False)
            rest = self._rest
            if self._ended:
                break
        if not self._ended:
            yield from self._take(rest, last=True)
            rest = self._rest
        self._read_trailer(rest)

    def _more(self) -> bytes:
        return next(self._pieces, b"")

    # Around the events

    def _read_header(self) -> bytes:
        """Read up to the first event; what is left of the bytes that were read."""
        head = b""
        while True:
            piece = self._more()
            head += piece
            plain = head.lstrip(b"\xef\xbb\xbf \t\r\n")
            if plain[:1] == b"[":
                return plain[1:]
            found = _EVENTS_BEGIN.search(head)
            if found is not None:
                self._keep(head[: found.start()].rstrip().rstrip(b",") + b"}")
                return head[found.end() :]
            if not piece or len(head) > _MAX_HEADER_BYTES or plain[:1] not in (b"{", b""):
                raise NoEventsError("it has no list `traceEvents`")

    def _read_trailer(self, rest: bytes) -> None:
        if not self._ended:
            return
        pieces = [rest]
        while sum(map(len, pieces)) < _MAX_HEADER_BYTES and (piece := self._more()):
            pieces.append(piece)
        behind = b"".join(pieces).strip()
        if behind not in (b"", b"}"):
            self._keep(b"{" + behind.lstrip(b",").lstrip())

    def _keep(self, text: bytes) -> None:
        """Take the keys beside the events, if they can be read; they are of use, but nothing depends on them all."""
        for candidate in (text, _repaired(text)):
            try:
                found = msgspec.json.decode(candidate)
            except _ERRORS:
                continue
            if isinstance(found, dict):
                self.header.update(found)
                if not _is_text(text) or candidate is not text:
                    self.damage.events_repaired += 1
                return
        self.damage.events_lost += 1
        self.damage.bytes_lost += len(text)

    # The events

    def _take(self, held: bytes, *, last: bool) -> Iterator[list[Event]]:
        """Decode the whole events of ``held`` and keep the rest; of the last bytes, all."""
        end = self._find_cut(held)
        if end is None and not last and len(held) <= _MAX_EVENT_BYTES:
            self._rest = held
            return
        for _ in range(_TRIES if end is not None else 0):
            assert end is not None
            piece = held[:end]
            events = _try(piece)
            if events is not None:
                if not _is_text(piece):
                    # Keys, and values that nobody asks for, are decoded whatever their bytes are.
                    self.damage.events_repaired += 1
                yield events
                held = _NEXT_EVENT.sub(b"", held[end:], count=1)
                if last:
                    break
                self._rest = held
                return
            before = held.rfind(self._cut, 0, end - self._closing)
            if before <= 0:
                break
            end = before + self._closing
        yield from self._scan(held, last=last)

    def _find_cut(self, held: bytes) -> int | None:
        """Where the last event ends that is followed by another one; None if none is seen to be."""
        if self._cut:
            place = held.rfind(self._cut)
            if place >= 0:
                return place + self._closing
        return self._learn_cut(held)

    def _learn_cut(self, held: bytes) -> int | None:
        """Learn how events are laid out from the first two of ``held``, and find the last cut of that form."""
        start = held.find(b"{")
        end = self._object_end(held, start) if start >= 0 else None
        if end is None:
            return None
        between = _NEXT_EVENT.match(held, end)
        if (
            between is None
            or b"," not in between[0]
            or held[between.end() : between.end() + 1] != b"{"
        ):
            return None
        inside = end - 1
        while inside > start and held[inside - 1 : inside].isspace():
            inside -= 1
        self._cut = held[inside : between.end() + 1]
        self._closing = end - inside
        return held.rfind(self._cut) + self._closing

    def _scan(self, held: bytes, *, last: bool) -> Iterator[list[Event]]:
        """Take ``held`` apart event by event: slow, and it finds the end of the list, and what is damaged."""
        place = 0
        found: list[Event] = []
        self._cut = b""
        while True:
            gap = _NEXT_EVENT.match(held, place)
            place = gap.end() if gap is not None else place
            here = held[place : place + 1]
            if here == b"{" and found and gap is not None and b"," not in gap[0]:
                self.damage.events_repaired += 1
            if here == b"]":
                self._ended, self._rest = True, held[place + 1 :]
                break
            end = self._object_end(held, place) if here == b"{" else None
            event = None if end is None else _try_one(held[place:end])
            if end is not None and event is not None:
                if not _is_text(held[place:end]):
                    self.damage.events_repaired += 1
                found.append(event)
                place = end
                continue
            if end is not None:
                repaired = _try_one(_repaired(held[place:end]))
                if repaired is not None:
                    self.damage.events_repaired += 1
                    found.append(repaired)
                    place = end
                    continue
            resume = _RESUME.search(held, place + 1)
            if resume is None:
                # The rest is an event that goes on in the next piece, or nothing that can be read.
                if last or len(held) - place > _MAX_EVENT_BYTES:
                    if held[place:].strip():
                        self._lose(len(held) - place)
                    self._rest = b""
                else:
                    self._rest = held[place:]
                break
            if end is None and not last and here == b"{" and not self._damaged(held, place):
                self._rest = held[place:]
                break
            self._lose(resume.start() - place)
            place = resume.start()
        if last and not self._ended:
            self.damage.truncated = True
        if found:
            yield found

    def _object_end(self, held: bytes, start: int) -> int | None:
        """Where the object that begins at ``start`` ends; None if it does not, or not before very long."""
        near = start + _LONG_EVENT_BYTES
        end = _object_end(held, start, near)
        if end is None and near < len(held) and self._long_events_left:
            self._long_events_left -= 1
            end = _object_end(held, start, len(held))
        return end

    def _damaged(self, held: bytes, place: int) -> bool:
        """Whether an object without an end is damaged, rather than cut by the end of the piece."""
        return len(held) - place > (1 << 20)

    def _lose(self, size: int) -> None:
        self.damage.events_lost += 1
        self.damage.bytes_lost += size


def _try(events: bytes) -> list[Event] | None:
    try:
        return _DECODE(b"[" + events + b"]")
    except _ERRORS:
        return None


def _is_text(piece: bytes) -> bool:
    if piece.isascii():
        return True
    try:
        piece.decode()
    except UnicodeError:
        return False
    return True


def _try_one(event: bytes) -> Event | None:
    try:
        return _DECODE_ONE(event)
    except _ERRORS:
        return None


def _object_end(text: bytes, start: int, limit: int) -> int | None:
    """Where the object that begins at ``start`` ends; None if it does not before ``limit``."""
    depth = 0
    for token in _TOKEN.finditer(text, start, limit):
        kind = token[0][:1]
        if kind in b"{[":
            depth += 1
        elif kind in b"}]":
            depth -= 1
            if depth <= 0:
                return token.end()
    return None


def _repaired(text: bytes) -> bytes:
    """The text with what can be put right without a guess; layout is lost with the control characters."""
    plain = text.decode("utf-8", "replace").encode("utf-8")
    plain = _CONTROL.sub(b" ", plain)
    plain = _LONE_BACKSLASH.sub(rb"\\\\", plain)
    return _NO_NUMBER.sub(rb"\1null", plain)


def lists(value: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key of the header; empty if there is none."""
    found = value.get(key)
    return found if isinstance(found, list) else []
