"""Recordings damaged at random: an import says so or refuses, and invents nothing.

Each example damages a real recording in one way, drawn from a seed; `PHASEPROF_DAMAGES=10000` runs so many of them.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from phaseprof.errors import TraceError
from phaseprof.importing.run import Options, RankFound, import_files
from phaseprof.trace.reader import open_trace

KEPT = Path(__file__).parents[1] / "data" / "traces"
NAMES = ("vllm-mi300x-decode-full-graph", "vllm-b200-tp8-prefill", "sglang-mi300x-extend")
MORE = Path(__file__).parents[3] / "shared" / "traces"
EXAMPLES = int(os.environ.get("PHASEPROF_DAMAGES", "120"))
BATCH = 40

Row = tuple[str, int, int]


@cache
def content(name: str) -> bytes:
    return gzip.decompress((KEPT / f"{name}.json.gz").read_bytes())


def cut(text: bytes, draw: random.Random) -> bytes:
    return text[: draw.randrange(1, len(text))]


def leave_out(text: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(text))
    return text[:place] + text[place + draw.choice((1, 2, 17, 400, 5_000, 60_000)) :]


def overwrite(text: bytes, draw: random.Random) -> bytes:
    place, length = draw.randrange(len(text)), draw.choice((1, 3, 30, 500, 4_000))
    return text[:place] + draw.randbytes(length) + text[place + length :]


def break_form(text: bytes, draw: random.Random) -> bytes:
    """Take one of the characters away that give JSON its form, or put one where none should be."""
    mark = draw.choice((b'"', b"{", b"}", b"[", b"]", b",", b":"))
    place = text.find(mark, draw.randrange(len(text)))
    if draw.random() < 0.5 and place >= 0:
        return text[:place] + text[place + 1 :]
    place = draw.randrange(len(text))
    return text[:place] + mark + text[place:]


def odd_words(text: bytes, draw: random.Random) -> bytes:
    place = text.find(b": ", draw.randrange(len(text)))
    word = draw.choice((b"inf", b"NaN", b"N/A", b"1e999", b"-", b"9" * 25, b"null", b'"\xff\\q"'))
    return text if place < 0 else text[: place + 2] + word + b", " + text[place + 2 :]


def twice(text: bytes, draw: random.Random) -> bytes:
    place, length = draw.randrange(len(text)), draw.randrange(1, 3_000)
    return text[: place + length] + text[place:]


def flip(text: bytes, draw: random.Random) -> bytes:
    """A few bits, as a disk or a network turns them over."""
    turned = bytearray(text)
    for _ in range(draw.choice((1, 1, 2, 8))):
        turned[draw.randrange(len(turned))] ^= 1 << draw.randrange(8)
    return bytes(turned)


def append(text: bytes, draw: random.Random) -> bytes:
    return text + draw.choice((b"\x00" * 40, b"garbage", draw.randbytes(5_000), text[:3_000]))


def pack(
    damage: Callable[[bytes, random.Random], bytes],
) -> Callable[[bytes, random.Random], bytes]:
    """Damage what is packed, not the text."""

    def packed(text: bytes, draw: random.Random) -> bytes:
        return damage(gzip.compress(text, 1), draw)

    return packed


DAMAGES = (
    *(cut, leave_out, overwrite, break_form, odd_words, twice, flip),
    *(pack(cut), pack(overwrite), pack(leave_out), pack(flip), pack(append)),
)


def is_whole(text: bytes) -> bool:
    """Whether there is nothing to be seen of the damage: it is packed right, and JSON of the right form."""
    try:
        plain = gzip.decompress(text) if text.startswith(b"\x1f\x8b") else text
        events = json.loads(plain)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return False
    except Exception:  # zlib.error has no base of its own
        return False
    return isinstance(events, list) and all(isinstance(event, dict) for event in events)


def run_import(text: bytes, folder: Path) -> tuple[RankFound, Counter[Row]] | None:
    file, trace = folder / "recording.json", folder / "trace"
    file.write_bytes(text)
    shutil.rmtree(trace, ignore_errors=True)
    trace.mkdir()
    try:
        found = import_files([str(file)], trace, Options()).ranks[0]
    except TraceError:
        return None
    opened = open_trace(trace)
    assert not opened.damage
    kernels = opened.kernels.select(["name", "start_ns", "end_ns"]).to_pylist()
    return found, Counter((row["name"], row["start_ns"], row["end_ns"]) for row in kernels)


@pytest.mark.parametrize("batch", range(-(-EXAMPLES // BATCH)))
def test_damage_is_said_and_nothing_is_invented(batch: int, tmp_path: Path) -> None:
    for number in range(batch * BATCH, min((batch + 1) * BATCH, EXAMPLES)):
        draw = random.Random(number)
        name, damage = NAMES[number % len(NAMES)], DAMAGES[number // len(NAMES) % len(DAMAGES)]
        damaged = damage(content(name), draw)
        got = run_import(damaged, tmp_path)
        if got is None or is_whole(damaged):
            continue
        assert got[0].damage, f"example {number}: {name}, {damage.__name__}: nothing is said"


def few_bytes(text: bytes, draw: random.Random) -> bytes:
    turned = bytearray(text)
    for _ in range(draw.choice((1, 20, 300))):
        turned[draw.randrange(len(turned))] = draw.randrange(256)
    return bytes(turned)


#: What moves or removes pages of a database; single values have no check in it.
BREAK_PAGES = (cut, leave_out, pack(cut), pack(flip))
DATABASE_DAMAGES = (*BREAK_PAGES, overwrite, twice, flip, few_bytes, pack(append))


def test_damaged_exports_of_nsight_systems_raise_nothing_else(tmp_path: Path) -> None:
    path = MORE / "nsys-h100-2gpu-training.sqlite.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in this checkout")
    plain = gzip.decompress(path.read_bytes())
    for number in range(max(EXAMPLES // 12, len(DATABASE_DAMAGES))):
        damage = DATABASE_DAMAGES[number % len(DATABASE_DAMAGES)]
        got = run_import(damage(plain, random.Random(number)), tmp_path)
        assert [file.name for file in (tmp_path / "trace").glob(".*")] == []
        if got is not None and damage in BREAK_PAGES:
            assert got[0].damage, f"example {number}: {damage.__name__}: nothing is said"


def test_what_is_not_damaged_is_not_said_to_be(tmp_path: Path) -> None:
    for name in NAMES:
        got = run_import(content(name), tmp_path)
        assert got is not None
        found, kernels = got
        assert found.damage == ()
        events = json.loads(content(name))["traceEvents"]
        listed = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        assert sum(kernels.values()) == len(listed)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_of_a_truncated_file_are_those_before_the_cut(
    name: str, tmp_path: Path
) -> None:
    text = content(name)
    whole = run_import(text, tmp_path)
    assert whole is not None
    for number in range(8):
        got = run_import(text[: len(text) * (number + 1) // 9], tmp_path)
        if got is None:
            continue
        found, kernels = got
        assert found.damage
        # The time on the Unix axis may stand behind the events: durations and names tell them.
        assert not _kinds(kernels) - _kinds(whole[1])


def _kinds(kernels: Counter[Row]) -> Counter[tuple[str, int]]:
    kinds: Counter[tuple[str, int]] = Counter()
    for (name, start_ns, end_ns), count in kernels.items():
        kinds[name, end_ns - start_ns] += count
    return kinds
