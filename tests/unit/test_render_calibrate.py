"""The text of `phaseprof calibrate`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from phaseprof.cli.render.calibrate import render, to_json
from phaseprof.trace.meta import Ceilings, Device

CPU = Device("AMD EPYC", "cpu", 0, 2, 1, 25_276_059_648, "cpu|epyc")
NOW_NS = 1_700_000_000_000_000_000
MINUTE_NS = 60_000_000_000
FLOAT32 = Ceilings(
    CPU.key, "float32", 0.2641e12, 19.13e9, "measured", NOW_NS, 0.041, "float32 matmul; a sum"
)
BFLOAT16 = replace(
    FLOAT32,
    dtype="bfloat16",
    flops_per_s=1.502e12,
    measured_ns=NOW_NS - 3 * MINUTE_NS,
    spread=0.012,
    reference="bfloat16 matmul; a sum",
)


def _render(*entries: Ceilings, device: Device = CPU, width: int = 100) -> list[str]:
    text = render(
        device, entries, cache="/c/ceilings.json", now_ns=NOW_NS, noisy_spread=0.15, width=width
    )
    return text.splitlines()


def test_roofs_spread_age_and_where_they_are_kept() -> None:
    assert _render(FLOAT32, BFLOAT16) == [
        "AMD EPYC · 2 cores, 1 thread · 25 GB",
        "",
        "             TFLOP/s   GB/s   spread   measured",
        "  float32      0.264   19.1     ±4 %   just now",
        "  bfloat16      1.50   19.1     ±1 %   3 min ago",
        "",
        "  float32 matmul; a sum",
        "  bfloat16 matmul; a sum",
        "  Cached in /c/ceilings.json",
    ]


def test_a_wide_spread_is_said() -> None:
    text = " ".join(_render(replace(FLOAT32, spread=0.42), BFLOAT16))
    assert "±42 %" in text
    assert "repeats for float32 lay far apart" in text
    assert "--force" in text
    assert "far apart" not in " ".join(_render(FLOAT32, BFLOAT16))


@pytest.mark.parametrize(
    ("minutes", "text"),
    [(0.5, "just now"), (59, "59 min ago"), (120, "2 h ago"), (60 * 24 * 3, "3 days ago")],
)
def test_age(minutes: float, text: str) -> None:
    entry = replace(FLOAT32, measured_ns=NOW_NS - round(minutes * MINUTE_NS))
    assert _render(entry)[3].endswith(f"   {text}")


def test_a_clock_that_was_set_back_is_no_negative_age() -> None:
    assert _render(replace(FLOAT32, measured_ns=NOW_NS + MINUTE_NS))[3].endswith("just now")


def test_a_gpu_is_named_with_its_sms() -> None:
    gpu = Device("NVIDIA H200", "cuda", 1, 132, None, None, "cuda|h200")
    assert _render(FLOAT32, device=gpu)[0] == "NVIDIA H200 · cuda:1, 132 SMs"


def test_lines_fit_the_width() -> None:
    lines = _render(replace(FLOAT32, spread=0.42, reference="a b c " * 30), width=60)
    assert all(len(line) <= 60 for line in lines)


def test_json_has_device_ceilings_and_cache() -> None:
    document = json.loads(to_json(CPU, [FLOAT32, BFLOAT16], cache="/c/ceilings.json"))
    assert document["schema"] == 1
    assert document["device"]["name"] == "AMD EPYC"
    assert [entry["dtype"] for entry in document["ceilings"]] == ["float32", "bfloat16"]
    assert document["ceilings"][0]["bytes_per_s"] == 19.13e9
    assert document["cache"] == "/c/ceilings.json"
