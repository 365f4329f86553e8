"""Ceilings measured on this machine's CPU: counted right, over data that no cache holds, and leaving no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from phaseprof.collectors import ceilings, ceilings_cache
from phaseprof.devices import describe

_STORE_MANY = """
import sys
from phaseprof.collectors import ceilings
from phaseprof.trace.meta import Ceilings
for number in range(20):
    entry = Ceilings(sys.argv[1], f"dtype-{number}", 1.0, 1.0, "measured", 1, 0.0, "a test")
    ceilings.store([entry])
"""


def test_a_measurement_is_whole_and_leaves_the_process_as_it_was() -> None:
    device = describe("cpu")
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    told: list[tuple[int, int, str]] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = ceilings.measure(
            device,
            ["float32", "bfloat16", "float32"],
            seconds=0.3,
            progress=lambda *step: told.append(step),
        )
        assert torch.is_autocast_enabled("cpu")
    assert [entry.dtype for entry in measured] == ["float32", "bfloat16"]
    assert told == [
        (0, 3, "memory bandwidth"),
        (1, 3, "float32 matmul"),
        (2, 3, "bfloat16 matmul"),
        (3, 3, ""),
    ]
    assert len({entry.bytes_per_s for entry in measured}) == 1
    for entry in measured:
        assert (entry.device_key, entry.source) == (device.key, "measured")
        assert entry.measured_ns is not None
        assert entry.spread is not None
        assert entry.spread >= 0
        # No CPU computes slower than 10 MFLOP/s or faster than 1 PFLOP/s: a wrong unit would.
        assert 1e7 < entry.flops_per_s < 1e15
        assert 1e7 < entry.bytes_per_s < 1e13
        assert "one-row matmul" in entry.reference
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_device_is_measured_with_the_threads_it_was_described_with() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one_thread = describe("cpu")
        torch.set_num_threads(2)
        (measured,) = ceilings.measure(one_thread, ["float32"], seconds=0.2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert measured.device_key == one_thread.key


def test_ensure_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(tmp_path))
    device, told = describe("cpu"), list[str]()

    def tell(done: int, total: int, what: str) -> None:
        told.append(what)

    first = ceilings.ensure(device, "float32", progress=tell, seconds=0.2)
    assert told == ["memory bandwidth", "float32 matmul", ""]
    assert first is not None
    assert ceilings.ensure(device, "float32", progress=tell) == first
    assert len(told) == 3
    assert ceilings.load(device) == (first,)


def test_ensure_does_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(blocked))
    measured = ceilings.ensure(describe("cpu"), "float32", seconds=0.2)
    assert measured is not None
    assert measured.source == "measured"


def test_the_flops_of_each_gemm_are_what_torch_counts() -> None:
    for candidate in ceilings._gemm_candidates(describe("cpu"), "float32"):
        with FlopCounterMode(display=False) as counter:
            candidate.run()
        assert candidate.work == counter.get_total_flops()


def test_each_read_touches_the_whole_buffer_once() -> None:
    """The kernels see every element: over a buffer of ones each result is a count of what was read."""
    size = 8 * 2**20
    elements = size // 4
    rows = elements // 4096
    expected = {
        "sum": elements,
        "dot product": elements,
        "one-row x·Wᵀ": elements,
        "one-row x·W": elements,
    }
    seen = {}
    for candidate in ceilings._read_candidates(describe("cpu"), size):
        result = candidate.run()
        assert isinstance(result, torch.Tensor)
        assert candidate.work == size
        seen[candidate.label] = result.sum().item()
        if candidate.label.startswith("one-row"):
            assert result.numel() in (rows, 4096)
    assert seen == expected


def test_the_buffer_is_larger_than_the_last_cache() -> None:
    level3 = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = ceilings._buffer_bytes(describe("cpu"))
    assert size >= min(4 * level3, memory // 9)
    assert size <= memory // 8
    assert size % (4 * 4096) == 0


def test_processes_that_store_at_once_lose_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PHASEPROF_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", _STORE_MANY, key], env=environment)
        for key in ("one", "two", "three")
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASEPROF_CACHE_DIR", str(tmp_path))
        stored = {(entry.device_key, entry.dtype) for entry in ceilings_cache._read_cache()}
    assert len(stored) == 3 * 20
