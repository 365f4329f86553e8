"""doctor on machines with GPUs, compared exactly: what a scripted driver says goes through all probes to the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cupti_stand_in import Gpu, install
from nvml_standin import environment as script_environment
from nvml_standin import standin

from phaseprof.cli.render.doctor import render
from phaseprof.collectors import cupti, environment, other_profilers, permission
from phaseprof.collectors.environment import inspect
from phaseprof.collectors.findings import Finding, Section, State
from phaseprof.trace.meta import Device

Golden = Callable[[str, str], None]

_H200 = 'device {n} name="NVIDIA H200" uuid=GPU-{n} memory_mib=143771 max_sm_clock=1980\n'
_DRIVER = "driver 580.95.05\ncuda 13000\nclock real\n"
_SHOWN = ("Devices", "What can be measured here", "Collectors, as `--collect` takes them")


def _device(index: int) -> Device:
    return Device(
        "NVIDIA H200", "cuda", index, 132, None, 150_754_820_096, "cuda|h200", f"GPU-{index}"
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Section]]:
    """Runs doctor's probes on a scripted machine; gives the sections that do not depend on this one."""

    def look(script: str, gpus: int, admin_only: int, *, under: str = "") -> list[Section]:
        (tmp_path / "params").write_text(f"RmProfilingAdminOnly: {admin_only}\n")
        (tmp_path / "status").write_text("CapEff:\t00000000a80425fb\n")
        monkeypatch.setattr(permission, "PARAMS", tmp_path / "params")
        monkeypatch.setattr(permission, "STATUS", tmp_path / "status")
        monkeypatch.setattr(
            environment,
            "find_others",
            lambda: other_profilers.find_others(
                {"NSYS_PROFILING_SESSION_ID": "7"} if under == "nsys" else {}, tmp_path / "none"
            ),
        )
        monkeypatch.setattr(
            environment,
            "_devices",
            lambda: (
                Device("AMD EPYC 9454", "cpu", 0, 96, 96, 1_517_000_000_000, "cpu|a"),
                *map(_device, range(gpus)),
            ),
        )
        monkeypatch.setattr(
            environment,
            "_phases",
            lambda: Finding("phases, tokens, latencies", State.OK, "hooks on transformers 5.24.0"),
        )
        monkeypatch.setattr(environment, "_built_for", lambda: "12.8")
        monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(tmp_path / "cache"))
        # The probe of GPM is a process of its own.
        for name in ("LD_LIBRARY_PATH", "NVML_STANDIN_SCRIPT"):
            monkeypatch.setenv(name, script_environment(script, tmp_path)[name])
        with standin(script, tmp_path):
            return [section for section in inspect() if section.title in _SHOWN]

    return look


def test_a_machine_that_has_everything(
    machine: Callable[..., list[Section]], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Gpu({}), monkeypatch)
    sections = machine(_DRIVER + _H200.format(n=0), 1, 0)
    assert all(f.state is State.OK for section in sections for f in section.findings)
    golden("doctor-gpu.txt", render(sections))
    golden("doctor-gpu-72.txt", render(sections, width=72))


def test_a_machine_that_grants_little(
    machine: Callable[..., list[Section]], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs that differ, no permission, no cupti-python, under nsys, a driver without GPM for one."""
    monkeypatch.setattr(cupti, "is_installed", lambda: False)
    script = _DRIVER + "".join(_H200.format(n=n) for n in range(2))
    script += (
        "value nvmlDeviceGetPersistenceMode set=0\n"
        "value nvmlDeviceGetApplicationsClock set=1410 device=1\n"
        "fault nvmlGpmQueryDeviceSupport code=3\n"
    )
    golden("doctor-limited.txt", render(machine(script, 2, 1, under="nsys")))
