"""Sessions that sample a scripted driver: rows in the trace, and a workload that no fault of a driver can reach."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from nvml_standin import Standin, environment, standin
from transformers import LlamaForCausalLM

from phaseprof.collectors.nvml_samples import WHAT
from phaseprof.collectors.sampler_thread import SamplerThread
from phaseprof.errors import NotMeasured
from phaseprof.metrics import Metric
from phaseprof.session import Session
from phaseprof.trace.meta import Device
from phaseprof.trace.reader import Trace, open_trace

IDS = torch.arange(3, 12).reshape(1, 9)
TOKENS = 4
EIGHT = "\n".join(
    [
        *(f'device {at} name="NVIDIA H100" uuid={"GPU-" + str(at)}' for at in range(8)),
        "state busy sm=0.7 dram=0.5 power=600 sm_clock=1755 memory_clock=2619 temperature=60 used_mib=9000",
        "run * busy 1s",
        "repeat *",
    ]
)
ONE = EIGHT.replace("\nrun *", "\nrun 0")


def gpu(index: int) -> Device:
    """What torch would say of a device, on a machine that has it."""
    return Device("NVIDIA H100", "cuda", index, 132, None, 80 * 10**9, "cuda|h100", f"GPU-{index}")


def generate(model: LlamaForCausalLM) -> torch.Tensor:
    torch.manual_seed(3)
    out = model.generate(IDS, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True)
    return torch.as_tensor(out)


@pytest.fixture(scope="module")
def alone(llama: LlamaForCausalLM) -> torch.Tensor:
    """What the model generates without a session."""
    return generate(llama)


@dataclass
class Run:
    """A session in which a model ran, and what the trace says of the driver."""

    output: torch.Tensor
    trace: Trace

    @property
    def notes(self) -> list[NotMeasured]:
        return [note for note in self.trace.metas[0].not_measured if "CPU" not in note.what]

    def values(self, device: str, metric: Metric) -> list[float]:
        rows = self.trace.samples.to_pylist()
        return [row["value"] for row in rows if (row["device"], row["metric"]) == (device, metric)]


@pytest.fixture
def run(llama: LlamaForCausalLM, tmp_path: Path) -> Callable[..., Run]:
    """Run a model on the CPU while a session samples these devices, until `until` says that it is enough."""

    def run(devices: Sequence[Device], until: Callable[[], bool]) -> Run:
        session = Session(tmp_path / "trace", collect="nvml")
        session.start()
        try:
            evidence = session._evidence
            assert evidence is not None
            for device in devices:
                evidence.device_seen(device)
            output = generate(llama)
            deadline = time.monotonic() + 30
            while not until():
                assert time.monotonic() < deadline, "it did not come"
                time.sleep(0.005)
        finally:
            session.stop()
        return Run(output, open_trace(tmp_path / "trace"))

    return run


def turns(library: Standin, function: str, count: int) -> Callable[[], bool]:
    """Whether a function was called so often."""
    return lambda: len(library.calls(function)) >= count


def test_samples_of_eight_devices(run: Callable[..., Run], tmp_path: Path) -> None:
    with standin(EIGHT, tmp_path) as library:
        done = run([gpu(at) for at in range(8)], turns(library, "nvmlDeviceGetClockInfo", 40))
        assert library.references == 0
    for at in range(8):
        assert set(done.values(f"GPU-{at}", Metric.SM_CLOCK)) == {1.755e9}
        assert set(done.values(f"GPU-{at}", Metric.POWER)) == {600.0}
        assert set(done.values(f"GPU-{at}", Metric.MEMORY_USED)) == {9000 * 2.0**20}
    meta = done.trace.metas[0]
    begin = min(done.trace.samples.column("start_ns").to_pylist())
    end = max(done.trace.samples.column("end_ns").to_pylist())
    assert meta.ended_ns is not None
    assert meta.started_ns <= begin <= end <= meta.ended_ns
    assert done.notes == []


def test_a_lost_gpu_ends_alone(run: Callable[..., Run], tmp_path: Path) -> None:
    """One of three is lost in the middle: it says so, and the others go on."""
    script = f"{EIGHT}\nfault nvmlDeviceGetCurrentClocksEventReasons device=1 from=3 code=15"
    with standin(script, tmp_path) as library:

        def others_go_on() -> bool:
            calls = library.calls("nvmlDeviceGetCurrentClocksEventReasons")
            lost = [at for at, call in enumerate(calls) if call.code == 15]
            return bool(lost) and all(
                [call.device for call in calls[lost[0] :]].count(device) >= 2
                for device in ("0:-1", "2:-1")
            )

        done = run([gpu(at) for at in range(3)], others_go_on)
        assert library.references == 0
    (note,) = done.notes
    assert (note.what, note.why) == (
        WHAT,
        "the NVIDIA driver has lost the GPU: NVIDIA H100, GPU-1",
    )
    assert "dmesg" in note.fix
    assert len(done.values("GPU-1", Metric.THROTTLE)) == 2
    assert len(done.values("GPU-0", Metric.THROTTLE)) >= 4


FUNCTIONS = [
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetUtilizationRates",
    "*",
]
CODES = [1, 3, 4, 9, 10, 13, 15, 18, 999]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_fault_reaches_the_workload(
    function: str, alone: torch.Tensor, run: Callable[..., Run], tmp_path: Path
) -> None:
    """Each code at each function, from the first call or a later one, on devices side by side."""
    faults = "\n".join(
        # Eight devices, of which each has a fault of its own; what opens the library has the first alone.
        f"fault {function} code={code} device={at} from={1 + at % 3}"
        if function not in ("nvmlInit", "nvmlShutdown")
        else f"fault {function} code={code} from={at + 1} count=1"
        for at, code in enumerate(CODES[1:])
    )
    script = f"{EIGHT}\n{faults}"
    with standin(script, tmp_path) as library:
        done = run([gpu(at) for at in range(8)], turns(library, "nvmlInit", 8))
    assert torch.equal(done.output, alone)
    assert done.trace.passes.num_rows == TOKENS
    assert all(note.why and not note.why.endswith(".") for note in done.notes)


@pytest.mark.parametrize("code", CODES)
def test_a_device_that_answers_nothing_says_why(
    code: int, alone: torch.Tensor, run: Callable[..., Run], tmp_path: Path
) -> None:
    with standin(f"{ONE}\nfault * code={code}", tmp_path) as library:
        done = run([gpu(0)], turns(library, "nvmlInit", 1))
    assert torch.equal(done.output, alone)
    (note,) = done.notes
    assert note.what == WHAT
    assert done.values("GPU-0", Metric.SM_CLOCK) == []


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetUtilizationRates", "nvmlShutdown"])
def test_a_driver_that_hangs_holds_nothing_up(
    function: str,
    alone: torch.Tensor,
    run: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session ends, with its trace, while the call still hangs."""
    # As long as a session waits for a reading that is under way; two seconds otherwise.
    monkeypatch.setattr(SamplerThread.__init__, "__kwdefaults__", {"watch_s": 1.0, "end_s": 0.1})
    hold = tmp_path / "hold"
    hold.touch()
    with standin(f"{ONE}\nsleep {function} while={hold}", tmp_path) as library:
        done = run([gpu(0)], turns(library, "nvmlInit", 1))
        assert torch.equal(done.output, alone)
        assert done.trace.passes.num_rows == TOKENS
        (note,) = done.notes
        assert "had no answer for" in note.why
        # The hanging threads end once the driver comes back.
        hold.unlink()
        for thread in threading.enumerate():
            if thread.name.startswith("phaseprof"):
                thread.join()


def test_impossible_values_are_said_once(run: Callable[..., Run], tmp_path: Path) -> None:
    script = f"{ONE}\nvalue nvmlDeviceGetClockInfo item=1 set=4294967295 from=2 count=2"
    with standin(script, tmp_path) as library:
        done = run([gpu(0)], turns(library, "nvmlDeviceGetCurrentClocksEventReasons", 5))
    assert set(done.values("GPU-0", Metric.SM_CLOCK)) == {1.755e9}
    (note,) = done.notes
    assert note.what == "sm_clock_hz at some moments"


def test_without_a_cuda_device_nothing_is_asked(run: Callable[..., Run], tmp_path: Path) -> None:
    with standin(ONE, tmp_path) as library:
        done = run([], lambda: True)
        assert library.calls() == []
    assert [note.what for note in done.notes] == [WHAT]


SCRIPT = """
import sys, time
from pathlib import Path
from phaseprof.session import Session
from phaseprof.trace.meta import Device
device = Device("NVIDIA H100", "cuda", 0, 132, None, 80 * 10**9, "cuda|h100", "GPU-0")
session = Session(Path(sys.argv[1]), collect="nvml")
session.start()
session._evidence.device_seen(device)
time.sleep(0.4)
session.stop()
"""


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (ONE, ""),
        (f"{ONE}\nfault nvmlInit code=18", "of different versions"),
        (f"{ONE}\nfault nvmlInit code=9", "not loaded"),
        (f"{ONE}\nfault nvmlInit code=4", "may not ask"),
    ],
    ids=["works", "mismatch", "not loaded", "no permission"],
)
def test_a_process_that_loads_the_library_itself(script: str, why: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "trace")],
        env=environment(script, tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "trace")
    (meta,) = trace.metas
    if why:
        assert [note.what for note in meta.not_measured] == [WHAT]
        assert why in meta.not_measured[0].why
    else:
        assert meta.not_measured == ()
        assert Metric.SM_CLOCK in trace.samples.column("metric").to_pylist()


def test_a_machine_without_the_library(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library, wherever the machine may have one")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "trace")],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (note,) = open_trace(tmp_path / "trace").metas[0].not_measured
    assert (note.what, note.why) == (WHAT, "there is no NVIDIA driver on this machine")
