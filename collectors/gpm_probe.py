"""Look in a process of its own whether GPM works on a device.

Asking for it is not harmless everywhere: on an H100 divided by MIG under driver 535 it left the question for memory
failing in the process that had asked. So another process asks first, also whether memory can be asked for after it.

``python -m phaseprof.collectors.gpm_probe UUID`` prints what it found as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaseprof.collectors.gpm_metrics import ASKED
from phaseprof.collectors.gpm_reader import GpmReader
from phaseprof.collectors.nvml import Driver, NvmlError, NvmlState
from phaseprof.collectors.nvml_devices import Gpu, find
from phaseprof.trace.meta import Device

#: Two samples have to lie further apart than 100 ms.
APART_S = 0.11
#: NVML in a new process takes up to some seconds to open; a process that takes longer hangs.
ANSWER_S = 20.0
#: Where GPM was introduced: Hopper.
_HOPPER = 9


@dataclass(frozen=True, slots=True)
class Look:
    """What was found.

    Attributes:
        state: AVAILABLE if two samples could be taken; else why not.
        function: What failed; empty if nothing did.
        detail: What the driver says beyond the state.
        older: Whether the device is older than Hopper.
        spoils: Whether memory could be asked for before the look and not after it.
        metrics: What became of each metric, by NVML's number. NO_DATA is a metric that there is.
    """

    state: NvmlState
    function: str = ""
    detail: str = ""
    older: bool = False
    spoils: bool = False
    metrics: Mapping[int, NvmlState] | None = None

    @property
    def present(self) -> frozenset[int]:
        """The metrics that there are."""
        answered = (NvmlState.AVAILABLE, NvmlState.NO_DATA)
        return frozenset(n for n, state in (self.metrics or {}).items() if state in answered)


class Looking:
    """A look in a subprocess that is under way. None of its methods raises or waits long.

    Args:
        uuid: Of the device or MIG instance, as the driver spells it.
        patience_s: How long its answer may take.
    """

    def __init__(self, uuid: str, patience_s: float = ANSWER_S) -> None:
        self._until = time.monotonic() + patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._failed = Look(NvmlState.FAILED, detail="there is no Python interpreter to look with")
        if not sys.executable:
            return
        # Under `phaseprof run` it must not count as a process of the command.
        hidden = ("PHASEPROF_TRACE", "PHASEPROF_NOTES")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, uuid],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            detail = f"{sys.executable} cannot be run: {error.strerror}"
            self._failed = Look(NvmlState.FAILED, detail=detail)

    def answer(self) -> Look | None:
        """What was found; None if there is no answer yet."""
        process = self._process
        if process is None:
            return self._failed
        if process.poll() is None:
            if time.monotonic() < self._until:
                return None
            self.end()
            self._failed = Look(NvmlState.TIMEOUT, "nvmlGpmSampleGet")
            return self._failed
        # It fits into a pipe, so that it was written before the process ended.
        text = process.stdout.read() if process.stdout is not None else b""
        self.end()
        lines = text.decode(errors="replace").strip().splitlines()
        try:
            self._failed = _read(json.loads(lines[-1]))
        except (IndexError, ValueError, KeyError, TypeError, AttributeError):
            detail = f"the process that looked first ended with {process.returncode}"
            self._failed = Look(NvmlState.FAILED, detail=detail)
        return self._failed

    def wait(self) -> Look:
        """What was found, when it is; the caller has time."""
        while (found := self.answer()) is None:
            time.sleep(0.01)
        return found

    def end(self) -> None:
        """Let go of the process, which is killed if it still runs."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.kill()
            # One that hangs in the driver does not even die.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        if process.stdout is not None:
            process.stdout.close()


def _read(found: Mapping[str, Any]) -> Look:
    return Look(
        state=NvmlState[found["state"]],
        function=str(found["function"]),
        detail=str(found["detail"]),
        older=bool(found["older"]),
        spoils=bool(found["spoils"]),
        metrics={int(number): NvmlState[name] for number, name in found["metrics"].items()},
    )


def look(uuid: str) -> Look:
    """Look in this process. Never raises."""
    try:
        with Driver() as driver:
            gpu = find(driver, Device("", "cuda", 0, None, None, None, "", uuid))
            return _look(driver, gpu)
    except NvmlError as error:
        return Look(error.state, error.function, error.detail)


def _look(driver: Driver, gpu: Gpu) -> Look:
    older = _is_older(driver, gpu)
    memory = _has_memory(driver, gpu)
    try:
        reader = GpmReader(driver, gpu)
    except NvmlError as error:
        return Look(error.state, error.function, error.detail, older)
    try:
        if not reader.supported():
            return Look(NvmlState.NOT_SUPPORTED, "nvmlGpmQueryDeviceSupport", older=older)
        reader.take()
        reader.turn()
        time.sleep(APART_S)
        reader.take()
        metrics = _metrics(reader)
    except NvmlError as error:
        return Look(error.state, error.function, error.detail, older)
    finally:
        reader.close()
    spoils = memory and not _has_memory(driver, gpu)
    return Look(NvmlState.AVAILABLE, older=older, spoils=spoils, metrics=metrics)


def _metrics(reader: GpmReader) -> dict[int, NvmlState]:
    found: dict[int, NvmlState] = {}
    for numbers in ASKED:
        try:
            answers = reader.between(numbers)
        except NvmlError as error:
            found |= dict.fromkeys(numbers, error.state)
            if error.state.device_gone:
                raise
        else:
            found |= dict.fromkeys(answers.values, NvmlState.AVAILABLE)
            found |= answers.states
    return found


def _is_older(driver: Driver, gpu: Gpu) -> bool:
    try:
        return int(driver.ask("nvmlDeviceGetCudaComputeCapability", gpu.whole)[0]) < _HOPPER
    except NvmlError:
        return False


def _has_memory(driver: Driver, gpu: Gpu) -> bool:
    try:
        driver.ask("nvmlDeviceGetMemoryInfo", gpu.handle)
    except NvmlError:
        return False
    return True


def main(uuid: str) -> None:
    """Look, and print what was found."""
    found = look(uuid)
    print(
        json.dumps(
            {
                "state": found.state.name,
                "function": found.function,
                "detail": found.detail,
                "older": found.older,
                "spoils": found.spoils,
                "metrics": {number: state.name for number, state in (found.metrics or {}).items()},
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
