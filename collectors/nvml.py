"""The only way to NVML, the library of the NVIDIA driver: every call goes through here, and fails with a typed reason.

Calls block, and may hang where a driver or a GPU is broken: outside of `ask_nvml`, which gives up waiting, they belong
on a thread that nobody waits for without a limit. After a fork the child opens NVML itself; what the parent opened is
closed to it.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

#: A cold start of a driver takes seconds a GPU.
ANSWER_S = 30.0


class NvmlState(enum.StrEnum):
    """What became of asking the NVIDIA driver; the value says it to a user, as a clause."""

    AVAILABLE = "available"
    # Nothing can be asked.
    NO_PACKAGE = "the package nvidia-ml-py is not installed"
    NO_LIBRARY = "there is no NVIDIA driver on this machine"
    NOT_LOADED = "the NVIDIA driver is installed but not loaded"
    MISMATCH = "the NVIDIA driver and its library are of different versions"
    NO_PERMISSION = "this user may not ask the NVIDIA driver"
    CLOSED = "the NVIDIA driver's library was shut down in this process"
    # The device does not answer any more.
    GPU_LOST = "the NVIDIA driver has lost the GPU"
    RESET_REQUIRED = "the GPU has to be reset"
    # This question has no answer here.
    NOT_SUPPORTED = "the GPU does not support it"
    TOO_OLD = "the NVIDIA driver or nvidia-ml-py is too old for it"
    REFUSED = "the NVIDIA driver refuses the question"
    NOT_FOUND = "the NVIDIA driver knows no such device"
    # It may have one the next time.
    NO_DATA = "the NVIDIA driver has no data for it"
    TIMEOUT = "the NVIDIA driver does not answer"
    FAILED = "the NVIDIA driver gave an error"

    @property
    def remedy(self) -> str:
        """What would help, in one line; empty where nothing is known to."""
        return _REMEDIES.get(self, "")

    @property
    def device_gone(self) -> bool:
        """Whether no further question about the device makes sense."""
        return self in _GONE

    @property
    def lasting(self) -> bool:
        """Whether the same question about the same device will get the same answer."""
        return self in _LASTING


_REMEDIES = {
    NvmlState.NO_PACKAGE: "pip install nvidia-ml-py",
    NvmlState.NOT_LOADED: "Load it; `nvidia-smi` says why it is not.",
    NvmlState.MISMATCH: "Reboot, or reload the driver's kernel module.",
    NvmlState.NO_PERMISSION: "Give this user access to /dev/nvidia*.",
    NvmlState.GPU_LOST: "Reset the GPU or reboot; `dmesg` has the driver's Xid message.",
    NvmlState.RESET_REQUIRED: "Reset it with `nvidia-smi --gpu-reset`, or reboot.",
    NvmlState.TOO_OLD: "Update the NVIDIA driver, and `pip install -U nvidia-ml-py`.",
    NvmlState.TIMEOUT: "See whether `nvidia-smi` hangs as well.",
}
_GONE = frozenset(
    {
        NvmlState.NO_PACKAGE,
        NvmlState.NO_LIBRARY,
        NvmlState.NOT_LOADED,
        NvmlState.MISMATCH,
        NvmlState.CLOSED,
        NvmlState.GPU_LOST,
        NvmlState.RESET_REQUIRED,
    }
)
_LASTING = _GONE | {
    NvmlState.NO_PERMISSION,
    NvmlState.NOT_SUPPORTED,
    NvmlState.TOO_OLD,
    NvmlState.REFUSED,
    NvmlState.NOT_FOUND,
}

#: By the numbers of nvml.h, which never change; the bindings have no name for some of them.
_STATES = {
    0: NvmlState.AVAILABLE,
    1: NvmlState.CLOSED,
    2: NvmlState.REFUSED,
    3: NvmlState.NOT_SUPPORTED,
    4: NvmlState.NO_PERMISSION,
    6: NvmlState.NOT_FOUND,
    9: NvmlState.NOT_LOADED,
    10: NvmlState.TIMEOUT,
    12: NvmlState.NO_LIBRARY,
    13: NvmlState.TOO_OLD,
    15: NvmlState.GPU_LOST,
    16: NvmlState.RESET_REQUIRED,
    # "The GPU control device has been blocked by the operating system/cgroups."
    17: NvmlState.NO_PERMISSION,
    18: NvmlState.MISMATCH,
    21: NvmlState.NO_DATA,
    # A structure of a version that the library does not know, and a function that it has no longer.
    25: NvmlState.TOO_OLD,
    26: NvmlState.TOO_OLD,
    27: NvmlState.NO_DATA,
    28: NvmlState.NOT_FOUND,
}


def state_of(code: int) -> NvmlState:
    """What a return code of NVML means, such as that of one field or one metric."""
    return _STATES.get(code, NvmlState.FAILED)


class NvmlError(Exception):
    """A question that the driver did not answer. The only error that leaves this module.

    Args:
        state: Why.
        function: What was asked; empty if NVML could not be opened.
        detail: What the driver says beyond the state; may be empty.
    """

    def __init__(self, state: NvmlState, function: str = "", detail: str = "") -> None:
        super().__init__(state, function, detail)
        self.state = state
        self.function = function
        self.detail = detail

    @property
    def why(self) -> str:
        """The reason, as a clause without capital and full stop."""
        return f"{self.state.value} ({self.detail})" if self.detail else self.state.value

    @property
    def fix(self) -> str:
        """What would help, in one line; may be empty."""
        return self.state.remedy

    def __str__(self) -> str:
        return f"{self.function}: {self.why}" if self.function else self.why


class Driver:
    """NVML, opened in this process. NVML counts how often it was opened, so each of these closes once what it opened.

    Raises:
        NvmlError: If it cannot be opened.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._open = False
        try:
            self._binding: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlError(NvmlState.NO_PACKAGE) from error
        except Exception as error:
            raise _typed(error, "") from error
        self._call("nvmlInit", (), {})
        self._open = True

    @property
    def binding(self) -> Any:
        """The module nvidia-ml-py, for its constants and structures. Its functions are called by `ask`."""
        return self._binding

    def ask(self, function: str, *arguments: Any, **named: Any) -> Any:
        """Call a function of nvidia-ml-py by its name, and give what it returns.

        Raises:
            NvmlError: If it does not answer, or this was opened by the process that forked this one.
        """
        if not self._open or os.getpid() != self._pid:
            raise NvmlError(NvmlState.CLOSED, function)
        return self._call(function, arguments, named)

    def ask_text(self, function: str, *arguments: Any) -> str:
        """The same for an answer in text."""
        answer = self.ask(function, *arguments)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)

    def close(self) -> None:
        """Close it. Never raises; closing twice, or in a forked child, does nothing."""
        if self._open and os.getpid() == self._pid:
            self._open = False
            # An error says that there is nothing left to close, or that the driver is beyond that.
            with contextlib.suppress(NvmlError):
                self._call("nvmlShutdown", (), {})

    def _call(self, function: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        call = getattr(self._binding, function, None)
        if call is None:
            # The bindings are older than the function.
            raise NvmlError(NvmlState.TOO_OLD, function)
        try:
            return call(*arguments, **named)
        except Exception as error:
            raise _typed(error, function) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _typed(error: Exception, function: str) -> NvmlError:
    code = getattr(error, "value", None)
    if isinstance(code, int):
        state = state_of(code)
        return NvmlError(state, function, str(error) if state is NvmlState.FAILED else "")
    return NvmlError(NvmlState.FAILED, function, f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Nvml:
    """The answer of NVML. `driver` is its version and `gpus` how many it sees, where the state is AVAILABLE."""

    state: NvmlState
    driver: str = ""
    gpus: int = 0
    error: str = ""


def ask_nvml(patience_s: float = ANSWER_S) -> Nvml:
    """Ask the NVIDIA driver for its version and its GPUs. Never raises, and waits no longer than it is told to."""
    return within(patience_s, _ask) or Nvml(NvmlState.TIMEOUT)


def _ask() -> Nvml:
    try:
        with Driver() as driver:
            return Nvml(
                NvmlState.AVAILABLE,
                driver=driver.ask_text("nvmlSystemGetDriverVersion"),
                gpus=int(driver.ask("nvmlDeviceGetCount")),
            )
    except NvmlError as error:
        return Nvml(error.state, error=error.detail)


def within(patience_s: float, question: Callable[[], T]) -> T | None:
    """Ask on a thread of its own; None if there is no answer in time. The thread is left to itself then.

    Args:
        patience_s: How long to wait.
        question: What is asked. It raises nothing.
    """
    answers: list[T] = []
    thread = threading.Thread(
        target=lambda: answers.append(question()), name="phaseprof-nvml", daemon=True
    )
    thread.start()
    thread.join(patience_s)
    return answers[0] if answers else None
