"""The script that gathers hardware evidence, on this CPU and with a tiny model: from the command to the summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_evidence.py"


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "-o", str(out), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_step_from_the_command_to_the_summary(tmp_path: Path) -> None:
    """Compiled decode over a static cache: the step that has most to go wrong."""
    done = run(tmp_path, "--device", "cpu", "--small", "--only", "compiled")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "summary.txt").read_text()
    assert summary == done.stdout[done.stdout.index("pass ") :]
    assert "outputs with and without a session: identical in 3 cases" in summary
    # The bands are a GPU's, and nothing else was wrong.
    assert "FAIL" not in summary
    assert "error" not in summary
    assert json.loads((tmp_path / "facts.json").read_text())["packages"]["torch"]
    case = tmp_path / "compiled-counters-b1"
    report = json.loads((case / "report.json").read_text())
    assert {"prefill", "decode"} <= set(report["phases"])
    passes = pq.read_table(case / "passes.parquet").to_pylist()
    # One whole generation of six tokens, and two that end after two.
    kept = [row["phase"] for row in passes if row["warmup"] is None]
    assert kept.count("prefill") == 3
    assert kept.count("decode") == 5 + 1 + 1
    assert all(row["compiled"] for row in passes if row["phase"] == "decode")
    assert not (case / "trace").exists()
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 2_000_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    done = run(tmp_path / "out")
    assert done.returncode == 0
    assert "torch sees no CUDA device" in done.stdout
    assert not (tmp_path / "out").exists()
