"""Ask the NVIDIA driver through NVML, and say with a type of reason why it does not answer."""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from typing import Any


class NvmlState(enum.StrEnum):
    """What became of asking the NVIDIA driver; the value says it to a user."""

    AVAILABLE = "available"
    NO_PACKAGE = "the package nvidia-ml-py is not installed"
    NO_LIBRARY = "there is no NVIDIA driver on this machine"
    NOT_LOADED = "the NVIDIA driver is installed but not loaded"
    MISMATCH = "the NVIDIA driver and its library are of different versions"
    NO_PERMISSION = "this user may not ask the NVIDIA driver"
    FAILED = "the NVIDIA driver gave an error"


@dataclass(frozen=True, slots=True)
class Nvml:
    """The answer of NVML. `driver` is its version and `gpus` how many it sees, where the state is AVAILABLE."""

    state: NvmlState
    driver: str = ""
    gpus: int = 0
    error: str = ""


_STATES = {
    "NVMLError_LibraryNotFound": NvmlState.NO_LIBRARY,
    "NVMLError_DriverNotLoaded": NvmlState.NOT_LOADED,
    "NVMLError_LibRmVersionMismatch": NvmlState.MISMATCH,
    "NVMLError_NoPermission": NvmlState.NO_PERMISSION,
}


def ask_nvml() -> Nvml:
    """Ask the NVIDIA driver for its version and its GPUs. Never raises."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Nvml(NvmlState.NO_PACKAGE)
    except Exception as error:
        return _failed(error)
    try:
        pynvml.nvmlInit()
        try:
            return Nvml(
                NvmlState.AVAILABLE,
                driver=str(pynvml.nvmlSystemGetDriverVersion()),
                gpus=int(pynvml.nvmlDeviceGetCount()),
            )
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Nvml:
    state = _STATES.get(type(error).__name__, NvmlState.FAILED)
    return Nvml(state, error=f"{type(error).__name__}: {error}")
