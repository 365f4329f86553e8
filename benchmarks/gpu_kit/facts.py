"""Versions, the driver, and what `phaseprof doctor` finds."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "pyarrow", "nvidia-ml-py", "cupti-python", "triton", "numpy")


def gather(out: Path) -> dict[str, Any]:
    """All of it; each part that fails says why."""
    from gpu_kit.cases import save

    facts: dict[str, Any] = {"python": sys.version, "machine": platform.platform()}
    facts["cpus"] = len(os.sched_getaffinity(0))
    for name, part in (
        ("packages", _packages),
        ("torch", _torch),
        ("doctor", _doctor),
        ("driver", _driver),
        ("nvidia_smi", _nvidia_smi),
    ):
        try:
            facts[name] = part()
        except Exception as error:
            facts[name] = f"failed: {type(error).__name__}: {error}"
        save(out / "facts.json", facts)
    return facts


def _packages() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _torch() -> dict[str, Any]:
    import torch

    return {
        "cuda": torch.version.cuda,
        "devices": [
            str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())
        ],
    }


def _doctor() -> list[dict[str, Any]]:
    from phaseprof.collectors.environment import inspect

    return [asdict(section) for section in inspect()]


def _driver() -> str:
    path = Path("/proc/driver/nvidia/params")
    return path.read_text(errors="replace")[:4000] if path.exists() else "no driver"


def _nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not there"
    done = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=30)
    return done.stdout[:20_000]
