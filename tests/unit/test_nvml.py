"""The only way to NVML: every failure has its typed reason, and devices of torch are found among the driver's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import Standin, environment, standin

from phaseprof.collectors import nvml
from phaseprof.collectors.nvml import Driver, Nvml, NvmlError, NvmlState, ask_nvml
from phaseprof.collectors.nvml_devices import Gpu, find
from phaseprof.trace.meta import Device

EIGHT = "\n".join(
    f"device {number} uuid=GPU-{number}{number}aaaaaa-0000-0000-0000-000000000000"
    for number in range(8)
)


def cuda(index: int = 0, uuid: str = "") -> Device:
    return Device("NVIDIA H100 80GB HBM3", "cuda", index, 132, None, 80 * 10**9, "cuda|h100", uuid)


def found(device: Device, variables: dict[str, str] | None = None, bus_id: str = "") -> Gpu:
    with Driver() as driver:
        return find(driver, device, pci_bus_id=bus_id, environment=variables or {})


# Opening and asking


def test_every_opening_is_closed_once(tmp_path: Path) -> None:
    with standin(EIGHT, tmp_path) as library:
        first, second = Driver(), Driver()
        assert library.references == 2
        first.close()
        first.close()
        assert library.references == 1
        assert second.ask("nvmlDeviceGetCount") == 8
        with pytest.raises(NvmlError) as raised:
            first.ask("nvmlDeviceGetCount")
        assert raised.value.state is NvmlState.CLOSED
        second.close()
        assert library.references == 0


@pytest.mark.parametrize(
    ("code", "state", "lasting", "gone"),
    [
        (1, NvmlState.CLOSED, True, True),
        (2, NvmlState.REFUSED, True, False),
        (3, NvmlState.NOT_SUPPORTED, True, False),
        (4, NvmlState.NO_PERMISSION, True, False),
        (6, NvmlState.NOT_FOUND, True, False),
        (10, NvmlState.TIMEOUT, False, False),
        (13, NvmlState.TOO_OLD, True, False),
        (15, NvmlState.GPU_LOST, True, True),
        (16, NvmlState.RESET_REQUIRED, True, True),
        (17, NvmlState.NO_PERMISSION, True, False),
        (18, NvmlState.MISMATCH, True, True),
        (21, NvmlState.NO_DATA, False, False),
        (25, NvmlState.TOO_OLD, True, False),
        (28, NvmlState.NOT_FOUND, True, False),
        (999, NvmlState.FAILED, False, False),
        # A number that no version of nvml.h has.
        (4242, NvmlState.FAILED, False, False),
    ],
)
def test_a_code_of_any_function_has_its_state(
    code: int, state: NvmlState, lasting: bool, gone: bool, tmp_path: Path
) -> None:
    script = f"device 0\nfault nvmlDeviceGetPowerUsage code={code}"
    with standin(script, tmp_path), Driver() as driver:
        handle = driver.ask("nvmlDeviceGetHandleByIndex", 0)
        with pytest.raises(NvmlError) as raised:
            driver.ask("nvmlDeviceGetPowerUsage", handle)
    error = raised.value
    assert (error.state, error.function) == (state, "nvmlDeviceGetPowerUsage")
    assert (error.state.lasting, error.state.device_gone) == (lasting, gone)
    assert error.why.startswith(state.value)
    assert str(error).startswith("nvmlDeviceGetPowerUsage: ")


def test_every_state_reads_as_a_clause_and_remedies_are_one_line() -> None:
    for state in NvmlState:
        assert state.value[0].islower() or state.value.startswith("NVML")
        assert not state.value.endswith(".")
        assert "\n" not in state.remedy


def test_a_function_that_the_bindings_lack(tmp_path: Path) -> None:
    with standin("device 0", tmp_path), Driver() as driver, pytest.raises(NvmlError) as raised:
        driver.ask("nvmlDeviceGetWhatComesNext", 0)
    assert raised.value.state is NvmlState.TOO_OLD
    assert "nvidia-ml-py" in raised.value.fix


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (9, NvmlState.NOT_LOADED),
        (18, NvmlState.MISMATCH),
        (4, NvmlState.NO_PERMISSION),
        (999, NvmlState.FAILED),
    ],
)
def test_a_driver_that_cannot_be_opened(code: int, state: NvmlState, tmp_path: Path) -> None:
    with standin(f"device 0\nfault nvmlInit code={code}", tmp_path) as library:
        with pytest.raises(NvmlError) as raised:
            Driver()
        assert raised.value.state is state
        assert ask_nvml().state is state
        assert library.references == 0


def test_asking_for_the_driver(tmp_path: Path) -> None:
    with standin(f"driver 575.51\n{EIGHT}", tmp_path) as library:
        assert ask_nvml() == Nvml(NvmlState.AVAILABLE, "575.51", 8)
        assert library.references == 0


@pytest.mark.parametrize("function", ["nvmlSystemGetDriverVersion", "nvmlDeviceGetCount_v2"])
def test_a_driver_that_fails_later_is_closed(function: str, tmp_path: Path) -> None:
    with standin(f"device 0\nfault {function} code=999", tmp_path) as library:
        assert ask_nvml().state is NvmlState.FAILED
        assert library.references == 0


def test_a_driver_that_hangs_is_given_up(tmp_path: Path) -> None:
    with standin("device 0\nsleep nvmlInit lasting=300ms", tmp_path):
        assert ask_nvml(patience_s=0.05).state is NvmlState.TIMEOUT
        # The thread ends by itself, once the driver comes back.
        for thread in threading.enumerate():
            if thread.name == "phaseprof-nvml":
                thread.join()


def test_where_there_is_no_library(tmp_path: Path) -> None:
    code = (
        "from phaseprof.collectors.nvml import ask_nvml; print(ask_nvml().state.name);"
        "import pynvml; print(pynvml.nvmlLib)"
    )
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    # On a machine with a driver there is one.
    assert done.stdout.split()[0] in ("NO_LIBRARY", "AVAILABLE", "NOT_LOADED"), done.stderr


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    code = "from phaseprof.collectors.nvml import ask_nvml; print(ask_nvml().state.name)"
    env = {**environment("device 0", tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["NO_LIBRARY"], done.stderr


def test_a_fork_opens_its_own(tmp_path: Path) -> None:
    """What the parent opened is closed to the child, closing it there does nothing, and the child may open NVML."""
    with standin(EIGHT, tmp_path) as library, Driver() as driver:
        pid = os.fork()
        if pid == 0:
            _exit_of(driver)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
        assert driver.ask("nvmlDeviceGetCount") == 8
        assert library.references == 1
        shut = library.calls("nvmlShutdown")
        assert [call.pid for call in shut] == [pid]


def _exit_of(driver: Driver) -> None:
    status = 99
    try:
        driver.ask("nvmlDeviceGetCount")
    except NvmlError as error:
        if error.state is NvmlState.CLOSED:
            driver.close()
            with Driver() as own:
                status = own.ask("nvmlDeviceGetCount")
    finally:
        os._exit(status)


# Which device it is


@pytest.mark.parametrize("number", range(8))
def test_a_device_is_found_by_its_uuid(number: int, tmp_path: Path) -> None:
    """Whatever CUDA calls it, and whatever CUDA hides."""
    uuid = f"GPU-{number}{number}aaaaaa-0000-0000-0000-000000000000"
    with standin(EIGHT, tmp_path) as library:
        gpu = found(cuda(0, uuid), {"CUDA_VISIBLE_DEVICES": "7,3"})
        assert (gpu.uuid, gpu.instance) == (uuid, None)
        assert library.references == 0
        assert library.calls("nvmlDeviceGetCount_v2") == []


def test_a_device_is_found_by_its_place_on_the_bus(tmp_path: Path) -> None:
    script = "device 0 pci=0000:1b:00\ndevice 1 pci=0002:1b:00 uuid=GPU-second"
    with standin(script, tmp_path):
        assert found(cuda(0), bus_id="0002:1b:00.0").uuid == "GPU-second"


@pytest.mark.parametrize(
    ("variables", "index", "number"),
    [
        ({}, 3, 3),
        ({"CUDA_VISIBLE_DEVICES": "5,2"}, 1, 2),
        ({"CUDA_VISIBLE_DEVICES": " 5 , 2 "}, 0, 5),
        ({"CUDA_VISIBLE_DEVICES": "GPU-44aaaaaa-0000-0000-0000-000000000000"}, 0, 4),
        # As much of it as tells the devices apart.
        ({"CUDA_VISIBLE_DEVICES": "1,GPU-66"}, 1, 6),
        ({"CUDA_VISIBLE_DEVICES": "6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, 6),
    ],
)
def test_a_device_without_an_identity_is_found_by_its_number(
    variables: dict[str, str], index: int, number: int, tmp_path: Path
) -> None:
    with standin(EIGHT, tmp_path):
        gpu = found(cuda(index), variables)
    assert gpu.uuid == f"GPU-{number}{number}aaaaaa-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({}, 8),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "9"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ff"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "MIG-ff"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "nonsense"}, 0),
    ],
)
def test_a_number_that_is_not_certain_is_no_device(
    variables: dict[str, str], index: int, tmp_path: Path
) -> None:
    with standin(EIGHT, tmp_path), pytest.raises(NvmlError) as raised:
        found(cuda(index), variables)
    assert raised.value.state is NvmlState.NOT_FOUND


def test_numbers_of_unlike_gpus_need_their_order(tmp_path: Path) -> None:
    script = 'device 0 name="NVIDIA T4" uuid=GPU-a\ndevice 1 name="NVIDIA H100" uuid=GPU-b'
    with standin(script, tmp_path):
        with pytest.raises(NvmlError) as raised:
            found(cuda(0))
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in raised.value.why
        assert found(cuda(0), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).uuid == "GPU-a"


def test_a_uuid_that_the_driver_does_not_know_is_no_other_device(tmp_path: Path) -> None:
    with standin(EIGHT, tmp_path), pytest.raises(NvmlError) as raised:
        found(cuda(0, "GPU-elsewhere"))
    assert raised.value.state is NvmlState.NOT_FOUND


def test_a_lost_neighbour_does_not_hide_a_device(tmp_path: Path) -> None:
    """A search by UUID may fail for another GPU's sake; the place on the bus, and a number, still find ours."""
    script = f"{EIGHT}\nfault nvmlDeviceGetHandleByUUID code=15\nfault * device=2 code=15"
    uuid = "GPU-55aaaaaa-0000-0000-0000-000000000000"
    with standin(script, tmp_path):
        assert found(cuda(5, uuid), bus_id="0000:15:00.0").uuid == uuid
        assert found(cuda(5)).uuid == uuid
        with pytest.raises(NvmlError) as raised:
            found(cuda(2))
        assert raised.value.state is NvmlState.NOT_FOUND


MIG = """
device 0 uuid=GPU-00000000-1111-2222-3333-444444444444
device 1 uuid=GPU-99999999-1111-2222-3333-444444444444
instance 1 gi=3 ci=0 uuid=MIG-aaaaaaaa-1111-2222-3333-444444444444 name="NVIDIA H100 MIG 1g.10gb"
instance 1 gi=5 ci=1 uuid=MIG-bbbbbbbb-1111-2222-3333-444444444444 name="NVIDIA H100 MIG 1g.10gb"
"""


@pytest.mark.parametrize(
    ("uuid", "visible", "instance"),
    [
        ("MIG-bbbbbbbb-1111-2222-3333-444444444444", None, 5),
        # torch gives a UUID without its kind.
        ("GPU-aaaaaaaa-1111-2222-3333-444444444444", None, 3),
        # The UUID of the whole GPU: the variable says which part of it.
        (
            "GPU-99999999-1111-2222-3333-444444444444",
            "MIG-bbbbbbbb-1111-2222-3333-444444444444",
            5,
        ),
        ("", "MIG-bbbbbbbb-1111-2222-3333-444444444444", 5),
        ("", "MIG-aaaa", 3),
        ("", "MIG-GPU-99999999-1111-2222-3333-444444444444/5/1", 5),
        ("", "0", None),
    ],
)
def test_mig_instances_are_found(
    uuid: str, visible: str | None, instance: int | None, tmp_path: Path
) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with standin(MIG, tmp_path), Driver() as driver:
        gpu = find(driver, cuda(0, uuid), pci_bus_id="", environment=variables)
        assert gpu.instance == instance
        assert driver.ask("nvmlDeviceGetIndex", gpu.whole) == (0 if instance is None else 1)


def test_which_part_of_a_divided_gpu_is_not_guessed(tmp_path: Path) -> None:
    with standin(MIG, tmp_path), pytest.raises(NvmlError) as raised:
        found(cuda(0, "GPU-99999999-1111-2222-3333-444444444444"))
    assert "divided by MIG" in raised.value.why


def test_the_only_part_of_a_divided_gpu(tmp_path: Path) -> None:
    script = "device 0 uuid=GPU-a\ninstance 0 gi=7 uuid=MIG-only"
    with standin(script, tmp_path):
        assert found(cuda(0, "GPU-a")).instance == 7


LOOKUPS = [
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
    "nvmlDeviceGetGpuInstanceId",
]


#: The second device of the driver is the first of CUDA, in two parts.
VISIBLE = {"CUDA_VISIBLE_DEVICES": "MIG-bbbbbbbb-1111-2222-3333-444444444444"}


@pytest.mark.parametrize("function", LOOKUPS)
@pytest.mark.parametrize("code", [2, 3, 4, 13, 15, 999])
def test_a_fault_while_looking_is_typed(function: str, code: int, tmp_path: Path) -> None:
    """Either the device is found all the same, or there is a typed reason; nothing is left open."""
    devices = [
        cuda(0, "GPU-00000000-1111-2222-3333-444444444444"),
        cuda(0, "MIG-bbbbbbbb-1111-2222-3333-444444444444"),
        cuda(0),
    ]
    with standin(f"{MIG}\nfault {function} code={code}", tmp_path) as library:
        for device, bus_id in ((each, bus) for each in devices for bus in ("", "0000:10:00.0")):
            try:
                gpu = found(device, {"CUDA_VISIBLE_DEVICES": "0"}, bus_id)
            except NvmlError as error:
                assert error.why
            else:
                assert (gpu.instance == 5) == (device.uuid.startswith("MIG"))
        assert library.references == 0


def test_the_module_names_no_function_that_changes_a_device() -> None:
    """The choke point is asked by name; what reads may not turn into what sets."""
    folder = Path(str(nvml.__file__)).parent
    named: set[Any] = set()
    for file in folder.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        named |= {
            word for word in text.replace('"', " ").split() if word.startswith("nvmlDeviceSet")
        }
    assert named == set()


def test_the_fixture_leaves_nothing_open(tmp_path: Path) -> None:
    with standin("device 0", tmp_path) as library:
        assert isinstance(library, Standin)
        assert library.references == 0
