"""`phaseprof doctor` and `phaseprof calibrate`, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_MEASURE = ("calibrate", "--device", "cpu", "--dtype", "float32", "--seconds", "0.2")


def _phaseprof(
    cache: Path, *arguments: str, pythonpath: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PHASEPROF_CACHE_DIR": str(cache), "NO_COLOR": "1"}
    environment["OMP_NUM_THREADS"] = "2"
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    return subprocess.run(
        [sys.executable, "-m", "phaseprof", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def _json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_doctor_says_what_is_here(tmp_path: Path) -> None:
    done = _phaseprof(tmp_path, "doctor")
    assert done.returncode == 0
    assert done.stderr == ""
    assert torch.__version__ in done.stdout
    assert "2 threads" in done.stdout
    assert str(tmp_path) in done.stdout


def test_doctor_as_json(tmp_path: Path) -> None:
    document = _json(_phaseprof(tmp_path, "doctor", "--json"))
    findings = {
        (section["title"], finding["subject"]): finding
        for section in document["sections"]
        for finding in section["findings"]
    }
    assert findings["Versions", "torch"]["detail"] == torch.__version__
    assert findings["Ceilings", "CPU"]["fix"] == "phaseprof calibrate --device cpu"


def test_doctor_works_where_torch_does_not(tmp_path: Path) -> None:
    broken = tmp_path / "site" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open')")
    done = _phaseprof(tmp_path, "doctor", pythonpath=broken.parent)
    assert done.returncode == 0
    assert "missing  torch" in done.stdout
    assert "OSError: libcudart.so.13: cannot open" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_calibrate_measures_once_and_again_by_force(tmp_path: Path) -> None:
    first = _json(_phaseprof(tmp_path, *_MEASURE, "--json"))
    assert first["device"]["kind"] == "cpu"
    (entry,) = first["ceilings"]
    assert entry["dtype"] == "float32"
    assert entry["flops_per_s"] > 0
    assert json.loads(Path(first["cache"]).read_text())["ceilings"] == [entry]
    again = _json(_phaseprof(tmp_path, *_MEASURE, "--json"))
    assert again["ceilings"] == first["ceilings"]
    forced = _json(_phaseprof(tmp_path, *_MEASURE, "--json", "--force"))
    assert forced["ceilings"][0]["measured_ns"] > entry["measured_ns"]


def test_calibrate_as_text(tmp_path: Path) -> None:
    done = _phaseprof(tmp_path, *_MEASURE)
    assert done.returncode == 0
    # Nothing is drawn where there is no terminal.
    assert done.stderr == ""
    assert "TFLOP/s" in done.stdout
    assert "float32" in done.stdout
    assert f"Cached in {tmp_path / 'ceilings.json'}" in done.stdout
    seen = _phaseprof(tmp_path, "doctor").stdout
    assert "measured: float32" in seen


def test_calibrate_says_that_the_cache_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = _phaseprof(blocked, *_MEASURE)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "cannot be cached" in done.stderr
    assert "PHASEPROF_CACHE_DIR" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "int8"), "int8"),
        (("--seconds", "0"), "--seconds 0"),
        (("--device", "toaster"), "toaster"),
        pytest.param(
            ("--device", "cuda"),
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_wrong_call_of_calibrate(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = _phaseprof(tmp_path, "calibrate", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
