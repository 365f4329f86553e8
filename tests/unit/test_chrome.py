"""Events of Chrome traces: every layout is cut right, and what is damaged is repaired, or left out and counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaseprof.collectors.files.chrome import ChromeTrace, Event, NoEventsError
from phaseprof.collectors.files.source import Bytes, FileKind
from phaseprof.errors import TraceError

#: Strings in which a cut in the wrong place would be tempting.
NAMES = ("gemm", 'quote " }, {', "}},\n  {", "back\\slash", "{[", "é€😀", "]}")


def events_of(count: int) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "cat": "kernel",
            "name": NAMES[number % len(NAMES)],
            "pid": 0,
            "tid": number % 3,
            "ts": 1000.5 * number,
            "dur": 1.25,
            "args": {"correlation": number, "grid": [1, 2, {"nested": [{}, {}]}], "stream": 7},
        }
        for number in range(count)
    ]


def kineto_layout(events: list[dict[str, Any]]) -> str:
    """As kineto writes them: by hand, two spaces deep."""
    written = []
    for event in events:
        args = json.dumps(event["args"], ensure_ascii=False)
        rest = {key: value for key, value in event.items() if key != "args"}
        head = json.dumps(rest, ensure_ascii=False)[1:-1]
        written.append(f'  {{\n    {head},\n    "args": {{\n      {args[1:-1]}\n    }}\n  }}')
    return "[\n" + ",\n".join(written) + "\n  ]"


LAYOUTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "kineto": kineto_layout,
    "compact": lambda events: json.dumps(events, separators=(",", ":"), ensure_ascii=False),
    "dumps": json.dumps,
    "indented": lambda events: json.dumps(events, indent=4, ensure_ascii=False),
    "tabs": lambda events: json.dumps(events, indent="\t", ensure_ascii=False),
}


def whole(events: str) -> bytes:
    head = '{\n "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "a }, { b"}],\n "traceEvents": '
    tail = ',\n "traceName": "x", "INFO": [{"a": 1}, {"b": [1]}], "baseTimeNanoseconds": 1700000000000000000}\n'
    return (head + events + tail).encode()


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    return (text[place : place + size] for place in range(0, len(text), size))


def read(text: bytes, size: int = 1 << 20) -> tuple[list[Event], ChromeTrace]:
    trace = ChromeTrace(pieces(text, size))
    return [event for batch in trace for event in batch], trace


def numbers(events: list[Event]) -> list[Any]:
    return [event.args.correlation for event in events if event.args is not None]


@pytest.mark.parametrize("size", (13, 400, 1 << 20))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_in_pieces_of_every_size(layout: str, size: int) -> None:
    expected = events_of(30)
    events, trace = read(whole(LAYOUTS[layout](expected)), size)
    assert numbers(events) == list(range(30))
    assert [event.name for event in events] == [event["name"] for event in expected]
    assert [event.ts for event in events] == [event["ts"] for event in expected]
    assert not trace.damage
    assert trace.header["schemaVersion"] == 1
    assert trace.header["baseTimeNanoseconds"] == 1700000000000000000
    assert trace.header["INFO"] == [{"a": 1}, {"b": [1]}]


@pytest.mark.parametrize("size", (50, 1 << 20))
def test_a_bare_list_and_layouts_that_change(size: int) -> None:
    first, second = events_of(20)[:10], events_of(20)[10:]
    mixed = json.dumps(first, indent=2)[:-2] + ",\n" + json.dumps(second)[1:]
    events, trace = read(mixed.encode(), size)
    assert numbers(events) == list(range(20))
    assert not trace.damage


def test_no_events_and_no_list() -> None:
    events, trace = read(whole("[]"))
    assert events == [] and not trace.damage
    for text in (b"{}", b"hello", b'{"events": []}', b"\x7fELF\x02", b'"traceEvents"'):
        with pytest.raises(NoEventsError):
            read(text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_truncated_file_yields_its_whole_events(layout: str) -> None:
    text = whole(LAYOUTS[layout](events_of(30)))
    begin = text.index(b"[", text.index(b"traceEvents")) + 1
    end = text.rindex(b'"traceName"')
    for place in range(begin, end - 20, 331):
        events, trace = read(text[:place], 400)
        assert numbers(events) == list(range(len(events)))
        assert trace.damage.truncated
        # Nothing that was whole is lost.
        assert len(events) >= text[:place].count(b'"correlation"') - 1


@pytest.mark.parametrize(
    ("bad", "name"),
    (
        (b'"name": "a\xff\xfeb"', "a��b"),
        (b'"name": "a\x01\tb"', "a  b"),
        (rb'"name": "C:\Windows\path"', "C:\\Windows\\path"),
    ),
)
def test_names_that_are_no_json_are_repaired(bad: bytes, name: str) -> None:
    text = whole(json.dumps(events_of(9))).replace(b'"name": "gemm"', bad, 1)
    events, trace = read(text)
    assert numbers(events) == list(range(9))
    assert events[0].name == name
    assert trace.damage.events_repaired == 1 and trace.damage.events_lost == 0


@pytest.mark.parametrize("value", (b"inf", b"-inf", b"Infinity", b"NaN", b"nan", b"N/A"))
def test_numbers_that_are_none_are_null(value: bytes) -> None:
    text = whole(json.dumps(events_of(9))).replace(b'"dur": 1.25', b'"dur": ' + value, 1)
    events, trace = read(text)
    assert numbers(events) == list(range(9))
    assert events[0].dur is None and events[1].dur == 1.25
    assert trace.damage.events_repaired == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_event_that_cannot_be_read_is_left_out_and_counted(layout: str) -> None:
    text = whole(LAYOUTS[layout](events_of(30)))
    name = b'"quote \\" }, {"'
    text = text.replace(name, b'"quote " }, {"', 1)  # a quote that is not escaped
    events, trace = read(text, 2000)
    assert numbers(events) == [0, *range(2, 30)]
    assert trace.damage.events_lost >= 1 and trace.damage.bytes_lost > 0


def test_ids_beyond_64_bits_and_types_of_all_kinds() -> None:
    event = events_of(1)[0]
    event |= {"pid": "Spans", "tid": "stream 7", "ts": "12.5", "dur": None, "cat": None}
    event["args"] |= {"correlation": 2**63 + 5, "External id": 2**70, "device": "0"}
    events, trace = read(whole(json.dumps([event])))
    assert not trace.damage
    (found,) = events
    assert found.args is not None and found.args.correlation == 2**63 + 5
    assert float(found.args.external_id or 0) == float(2**70)
    assert (found.pid, found.tid, found.ts, found.dur) == ("Spans", "stream 7", "12.5", None)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_of_any_kind_is_said_or_changes_nothing_of_the_form(data: st.DataObject) -> None:
    """Cut a stretch out of a file, or put other bytes there: nothing raises, and what was lost is counted."""
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    text = whole(LAYOUTS[layout](events_of(25)))
    begin = text.index(b"traceEvents") + 20
    place = data.draw(st.integers(begin, len(text) - 1))
    length = data.draw(st.integers(0, 300))
    junk = data.draw(st.binary(max_size=40))
    damaged = text[:place] + junk + text[place + length :]
    events, trace = read(damaged, data.draw(st.sampled_from((64, 500, 1 << 20))))
    assert len(events) <= 25 + damaged.count(b'"ph"')
    try:
        intact = json.loads(damaged)
    except ValueError:
        if b"traceEvents" in damaged and damaged.rfind(b'"traceName"') < begin:
            assert trace.damage
        return
    if isinstance(intact, dict) and all(isinstance(e, dict) for e in intact["traceEvents"]):
        assert len(events) + trace.damage.events_lost >= len(intact["traceEvents"])


def test_a_packed_file_that_is_cut_or_damaged(tmp_path: Path) -> None:
    text = whole(kineto_layout(events_of(8_000)))
    packed = gzip.compress(text)
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed)
    source = Bytes(path)
    assert numbers([e for batch in ChromeTrace(source) for e in batch]) == list(range(8_000))
    assert source.damage == ""

    path.write_bytes(packed[: len(packed) // 2])
    source = Bytes(path)
    events = [event for batch in ChromeTrace(source) for event in batch]
    assert numbers(events) == list(range(len(events))) and len(events) > 1500
    assert source.damage == "its compressed data ends before its end"

    broken = bytearray(packed)
    broken[len(packed) // 2] ^= 0xFF
    path.write_bytes(bytes(broken))
    source = Bytes(path)
    list(ChromeTrace(source))
    assert "damaged" in source.damage

    path.write_bytes(packed + gzip.compress(b"   "))
    source = Bytes(path)
    assert b"".join(source) == text + b"   " and source.damage == ""


@pytest.mark.parametrize(
    ("content", "said"),
    (
        (b"", "is empty"),
        (b"PAR1....", "a Parquet file"),
        (b"PK\x03\x04..", "a zip archive"),
        (b"\x28\xb5\x2f\xfd..", "zstd"),
    ),
)
def test_another_file_is_told_by_its_first_bytes(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        Bytes(path)


def test_kinds_of_files(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for content, kind in (
        (b"SQLite format 3\x00...", FileKind.SQLITE),
        (gzip.compress(b"SQLite format 3\x00" + bytes(5000)), FileKind.SQLITE),
        (b'{"traceEvents": []}', FileKind.JSON),
    ):
        path.write_bytes(content)
        source = Bytes(path)
        assert source.kind is kind
        source.close()
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        Bytes(tmp_path / "absent")
