"""The cache of ceilings, and which roofs are chosen for a device."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phaseprof.collectors import ceilings
from phaseprof.errors import CalibrationError
from phaseprof.trace.meta import Ceilings, Device

CPU = Device("A CPU", "cpu", 0, 2, 2, 16 * 10**9, "cpu|a|threads=2")
OTHER_CPU = replace(CPU, threads=4, key="cpu|a|threads=4")
B200 = Device("NVIDIA B200", "cuda", 0, 148, None, 191_500_000_000, "cuda|b200")
UNKNOWN_GPU = Device("NVIDIA L4", "cuda", 0, 58, None, 23_000_000_000, "cuda|l4")

FLOAT32 = Ceilings(CPU.key, "float32", 0.26e12, 19e9, "measured", 1_700_000_000_000, 0.04, "a test")
BFLOAT16 = replace(FLOAT32, dtype="bfloat16", flops_per_s=1.5e12)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(folder))
    return folder


def test_what_was_stored_is_loaded(cache: Path) -> None:
    assert ceilings.load(CPU) == ()
    assert ceilings.store([FLOAT32, BFLOAT16]) == cache / "ceilings.json"
    assert set(ceilings.load(CPU)) == {FLOAT32, BFLOAT16}


def test_ceilings_of_another_key_are_not_used() -> None:
    ceilings.store([FLOAT32])
    assert ceilings.load(OTHER_CPU) == ()
    assert ceilings.resolve(OTHER_CPU, "float32") is None


def test_a_new_measurement_replaces_the_old_one_and_leaves_the_others() -> None:
    ceilings.store([FLOAT32, BFLOAT16, replace(FLOAT32, device_key=OTHER_CPU.key)])
    again = replace(FLOAT32, flops_per_s=0.29e12)
    ceilings.store([again])
    assert set(ceilings.load(CPU)) == {again, BFLOAT16}
    assert len(ceilings.load(OTHER_CPU)) == 1


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ceilings.cache_path() == tmp_path / "cache" / "ceilings.json"
    monkeypatch.delenv("PHASEPROF_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ceilings.cache_path() == tmp_path / "xdg" / "phaseprof" / "ceilings.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ceilings.cache_path() == tmp_path / "home" / ".cache" / "phaseprof" / "ceilings.json"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"version": 1}',
        b'{"version": 1, "ceilings": 3}',
        b'{"version": 1, "ceilings": [1, null, "x", {}]}',
        b'{"version": 99, "ceilings": []}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_a_corrupt_cache_is_empty_and_is_repaired(content: bytes, cache: Path) -> None:
    cache.mkdir()
    (cache / "ceilings.json").write_bytes(content)
    assert ceilings.load(CPU) == ()
    ceilings.store([FLOAT32])
    assert ceilings.load(CPU) == (FLOAT32,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flops_per_s", 0),
        ("flops_per_s", -1.0),
        ("flops_per_s", float("nan")),
        ("bytes_per_s", float("inf")),
        ("bytes_per_s", "19e9"),
        ("bytes_per_s", True),
        ("spread", None),
        ("measured_ns", "yesterday"),
        ("source", "datasheet"),
        ("dtype", 32),
    ],
)
def test_an_entry_that_no_device_has_is_left_out(field: str, value: object, cache: Path) -> None:
    path = ceilings.store([FLOAT32, BFLOAT16])
    document = json.loads(path.read_text())
    document["ceilings"][0][field] = value
    path.write_text(json.dumps(document))
    assert ceilings.load(CPU) == (BFLOAT16,)


def test_an_entry_of_an_older_version_is_loaded() -> None:
    """A field that came later has a default."""
    path = ceilings.store([FLOAT32])
    document = json.loads(path.read_text())
    del document["ceilings"][0]["clock_hz"]
    path.write_text(json.dumps(document))
    assert ceilings.load(CPU) == (FLOAT32,)


def test_an_entry_of_a_newer_version_keeps_what_is_known() -> None:
    path = ceilings.store([FLOAT32])
    document = json.loads(path.read_text())
    document["ceilings"][0]["colour"] = "blue"
    path.write_text(json.dumps(document))
    assert ceilings.load(CPU) == (FLOAT32,)


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(CalibrationError, match="cannot be cached") as error:
        ceilings.store([FLOAT32])
    assert "PHASEPROF_CACHE_DIR" in error.value.remedy
    assert ceilings.load(CPU) == ()


def test_no_temporary_file_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings.store([FLOAT32])

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        with pytest.raises(CalibrationError, match="No space left"):
            ceilings.store([BFLOAT16])
    assert ceilings.load(CPU) == (FLOAT32,)
    assert {path.name for path in cache.iterdir()} == {"ceilings.json", "ceilings.lock"}


def test_measured_comes_before_the_datasheet() -> None:
    datasheet = ceilings.resolve(B200, "bfloat16")
    assert datasheet is not None
    assert (datasheet.source, datasheet.flops_per_s) == ("datasheet", 2250e12)
    measured = replace(BFLOAT16, device_key=B200.key, flops_per_s=1745e12)
    ceilings.store([measured])
    assert ceilings.resolve(B200, "bfloat16") == measured


def test_an_unknown_device_has_no_roofs() -> None:
    assert ceilings.resolve(CPU, "float32") is None
    assert ceilings.resolve(UNKNOWN_GPU, "bfloat16") is None


def test_ensure_measures_nothing_that_is_cached() -> None:
    """The device is not on this machine: had it to be measured, this would fail."""
    cached = replace(BFLOAT16, device_key=UNKNOWN_GPU.key)
    ceilings.store([cached])
    assert ceilings.ensure(UNKNOWN_GPU, "bfloat16") == cached


def test_ensure_falls_back_to_the_datasheet() -> None:
    roofs = ceilings.ensure(B200, "bfloat16")
    assert roofs is not None
    assert roofs.source == "datasheet"


def test_ensure_says_what_it_cannot_measure() -> None:
    with pytest.raises(CalibrationError, match="NVIDIA L4 is not"):
        ceilings.ensure(UNKNOWN_GPU, "bfloat16")


def test_ensure_leaves_other_dtypes_and_kinds_alone() -> None:
    fp8 = ceilings.ensure(B200, "float8_e4m3fn")
    assert fp8 is not None
    assert fp8.flops_per_s == 4500e12
    assert ceilings.ensure(CPU, "int8") is None
    assert ceilings.ensure(replace(CPU, kind="mps"), "float32") is None


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        (CPU, "int8", "dtype 'int8'"),
        (replace(CPU, kind="mps"), "float32", "kind 'mps'"),
        (CPU, "float32", "not what it was"),
    ],
)
def test_measure_refuses(device: Device, dtype: str, message: str) -> None:
    with pytest.raises(CalibrationError, match=message) as error:
        ceilings.measure(device, [dtype])
    assert error.value.remedy


def _sleeper(label: str, seconds: float, growth: float = 0.0) -> ceilings._Candidate:
    return ceilings._Candidate(label, lambda: time.sleep(seconds), 1000.0, growth)


def test_the_fastest_candidate_wins_and_is_not_overstated() -> None:
    """A sleep never ends early, so no rate can lie above work over sleep."""
    ranked = ceilings._rank(
        iter([_sleeper("slow", 0.03), _sleeper("fast", 0.001)]), CPU, seconds=0.1, finalists=2
    )
    assert [rate.label for rate in ranked] == ["fast", "slow"]
    assert ranked[0].per_s <= 1000 / 0.001
    assert ranked[1].per_s <= 1000 / 0.03


def test_only_finalists_are_repeated() -> None:
    ranked = ceilings._rank(
        iter([_sleeper("slow", 0.02), _sleeper("fast", 0.001)]), CPU, seconds=0.05, finalists=1
    )
    assert [rate.label for rate in ranked] == ["fast"]


def test_a_candidate_that_would_take_too_long_is_never_built() -> None:
    built: list[int] = []

    def growing() -> Iterator[ceilings._Candidate]:
        for size, seconds in enumerate((0.001, 0.02, 60.0)):
            built.append(size)
            yield _sleeper(str(size), seconds, growth=8.0)

    ceilings._rank(growing(), CPU, seconds=0.5, finalists=3)
    assert built == [0, 1]


def test_spread_is_half_the_range_over_the_median() -> None:
    rate = ceilings._rate("x", [90.0, 120.0, 100.0])
    assert rate.per_s == 100.0
    assert rate.spread == pytest.approx(0.15)
