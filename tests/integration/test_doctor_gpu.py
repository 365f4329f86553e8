"""What doctor says of NVIDIA GPUs, with a stand-in for the driver's library that nvidia-ml-py loads."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import environment, standin

from phaseprof.collectors import gpu_findings as module
from phaseprof.collectors.findings import Finding, State
from phaseprof.collectors.gpu_findings import gpu_findings

ONE = 'driver 580.95.05\ncuda 13000\nclock set\ndevice 0 name="NVIDIA H200" uuid=GPU-0 max_sm_clock=1980\n'


def found(folder: Path, script: str, torch_cuda: str | None = "13.0") -> dict[str, Finding]:
    with standin(script, folder) as nvml:
        findings = gpu_findings(torch_cuda)
        assert nvml.references == 0, "NVML is left open"
    assert len({finding.subject for finding in findings}) == len(findings)
    return {finding.subject: finding for finding in findings}


def test_a_gpu_on_which_nothing_is_wrong(tmp_path: Path) -> None:
    findings = found(tmp_path, ONE + "value nvmlDeviceGetPersistenceMode set=1\n")
    assert list(findings) == ["CUDA of the driver", "MIG", "ECC", "persistence", "clocks"]
    assert {finding.state for finding in findings.values()} == {State.OK}
    assert not any(finding.fix for finding in findings.values())
    assert findings["CUDA of the driver"].detail == (
        "the driver supports up to 13.0, torch was built with 13.0"
    )
    assert findings["clocks"].detail.startswith("the SMs may boost to 1980 MHz")
    assert findings["MIG"].detail == "off"


@pytest.mark.parametrize(
    ("cuda", "torch_cuda", "state"),
    [
        (13000, "13.0", State.OK),
        (12080, "12.9", State.OK),
        (13010, "12.8", State.OK),
        (12080, "13.0", State.LIMITED),
        (12080, None, State.OK),
    ],
)
def test_torch_against_the_driver(
    cuda: int, torch_cuda: str | None, state: State, tmp_path: Path
) -> None:
    script = ONE.replace("cuda 13000", f"cuda {cuda}")
    finding = found(tmp_path, script, torch_cuda)["CUDA of the driver"]
    assert finding.state is state
    assert bool(finding.fix) == (state is State.LIMITED)


@pytest.mark.parametrize(
    ("lines", "subject", "detail", "fix"),
    [
        (
            "value nvmlDeviceGetPersistenceMode set=0",
            "persistence",
            "off: the driver lets go",
            "nvidia-smi -pm 1",
        ),
        (
            "value nvmlDeviceGetApplicationsClock set=1410",
            "clocks",
            "applications get 1410 MHz of the 1980 MHz",
            "nvidia-smi -rac",
        ),
        (
            "value nvmlDeviceGetCurrentClocksEventReasons set=72",
            "clocks",
            "held back now by hardware slowdown and temperature (hardware)",
            "PERFORMANCE",
        ),
    ],
)
def test_what_limits_a_profile(
    lines: str, subject: str, detail: str, fix: str, tmp_path: Path
) -> None:
    finding = found(tmp_path, f"{ONE}{lines}\n")[subject]
    assert finding.state is State.LIMITED
    assert finding.detail.startswith(detail)
    assert fix in finding.fix


def test_a_gpu_divided_by_mig(tmp_path: Path) -> None:
    script = ONE.replace("uuid=GPU-0", "uuid=GPU-0 mig=1") + (
        "instance 0 gi=1 ci=0 uuid=MIG-1 memory_mib=9984 sms=16 name=one\n"
        "instance 0 gi=2 ci=0 uuid=MIG-2 memory_mib=9984 sms=16 name=two\n"
    )
    finding = found(tmp_path, script)["MIG"]
    assert finding.state is State.LIMITED
    assert finding.detail.startswith("on, 2 instances: gpm samples the instance")


def test_gpus_that_are_alike_share_a_line(tmp_path: Path) -> None:
    script = ONE + "".join(
        f'device {n} name="NVIDIA H200" uuid=GPU-{n} max_sm_clock=1980\n' for n in range(1, 4)
    )
    script += (
        "value nvmlDeviceGetPersistenceMode set=1\n"
        "value nvmlDeviceGetApplicationsClock set=1410 device=2\n"
    )
    findings = found(tmp_path, script)
    assert findings["persistence"].detail == "on"
    assert findings["clocks of GPU 0, 1, 3"].state is State.OK
    assert findings["clocks of GPU 2"].state is State.LIMITED


def test_what_a_board_does_not_have_is_not_mentioned(tmp_path: Path) -> None:
    faults = "".join(
        f"fault {name} code=3\n"
        for name in (
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetEccMode",
            "nvmlDeviceGetApplicationsClock",
            "nvmlDeviceGetCurrentClocksEventReasons",
        )
    )
    findings = found(tmp_path, ONE + faults)
    assert list(findings) == ["CUDA of the driver", "persistence", "clocks"]
    assert findings["clocks"].state is State.OK


def test_a_lost_gpu_beside_one_that_works(tmp_path: Path) -> None:
    script = ONE + (
        'device 1 name="NVIDIA H200" uuid=GPU-1\nfault nvmlDeviceGetHandleByIndex_v2 code=15 device=1\n'
    )
    findings = found(tmp_path, script)
    assert findings["GPU 1"].state is State.MISSING
    assert "dmesg" in findings["GPU 1"].fix
    assert findings["MIG"].detail == "off"


@pytest.mark.parametrize("code", [4, 10, 15, 999])
@pytest.mark.parametrize(
    ("function", "subject"),
    [
        ("nvmlDeviceGetCount_v2", "GPUs"),
        ("nvmlSystemGetCudaDriverVersion", "GPUs"),
        ("nvmlDeviceGetHandleByIndex_v2", "GPU 0"),
        ("nvmlDeviceGetMigMode", "MIG"),
        ("nvmlDeviceGetEccMode", "ECC"),
        ("nvmlDeviceGetPersistenceMode", "persistence"),
        ("nvmlDeviceGetMaxClockInfo", "clocks"),
        ("nvmlDeviceGetApplicationsClock", "clocks"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "clocks"),
    ],
)
def test_every_question_may_fail(function: str, subject: str, code: int, tmp_path: Path) -> None:
    """Its line says why, and the others stand."""
    finding = found(tmp_path, f"{ONE}fault {function} code={code}\n")[subject]
    assert finding.state is State.MISSING
    assert finding.detail


def test_a_driver_that_cannot_be_opened_has_its_line_elsewhere(tmp_path: Path) -> None:
    assert found(tmp_path, ONE + "fault nvmlInit code=9\n") == {}


def test_a_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "_look", lambda torch_cuda: time.sleep(0.5))
    (finding,) = gpu_findings(None)
    assert (finding.state, finding.detail) == (State.MISSING, "the NVIDIA driver does not answer")
    # The thread ends by itself.
    time.sleep(0.6)


def test_the_whole_command(tmp_path: Path) -> None:
    """Four H200 on a machine whose torch has no CUDA."""
    script = ONE + "".join(f'device {n} name="NVIDIA H200" uuid=GPU-{n}\n' for n in range(1, 4))
    script = script.replace("clock set", "clock real")
    env = {**environment(script, tmp_path), "PHASEPROF_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "phaseprof", "doctor", "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    sections: dict[str, Any] = {
        section["title"]: {finding["subject"]: finding for finding in section["findings"]}
        for section in json.loads(done.stdout)["sections"]
    }
    devices = sections["Devices"]
    assert devices["NVML"]["detail"] == "driver 580.95.05, 4 GPUs"
    assert devices["clocks"]["state"] == "ok"
    assert devices["profiling permission"]["detail"]
    assert devices["other profilers"]["detail"]
    collectors = sections["Collectors, as `--collect` takes them"]
    assert collectors["nvml"]["detail"] == "driver 580.95.05, 4 GPUs"
    assert collectors["gpm"]["state"] == "ok"
    assert (
        "torch does not see"
        in (sections["What can be measured here"]["SM, tensor-core and DRAM counters"]["detail"])
    )
