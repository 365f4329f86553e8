"""A stand-in for the NVIDIA driver's management library, for machines without a GPU.

The C sources beside this module are compiled once with the machine's compiler into a `libnvidia-ml.so.1` that speaks
NVML's ABI, so that the real nvidia-ml-py loads it. What it shows is scripted. Nothing of it imitates how a GPU
computes: a script says what a GPU would show, and GPM, the energy counter and the averages follow from it exactly.

In this process::

    with standin(SCRIPT, tmp_path) as nvml:       # pynvml calls the stand-in until the block ends
        nvml.set_time_ns(80_000_000)
        ...
    nvml.calls("nvmlDeviceGetPowerUsage")         # what was called

In a subprocess: ``subprocess.run(..., env=environment(SCRIPT, tmp_path))``.

**The script** is text, one line a fact, ``#`` begins a comment, values with spaces stand in double quotes::

    driver 580.95.05
    library 13.580.95.05
    cuda 13000
    clock real | set | file PATH    # monotonic clock (the default), `set_time_ns`, or 8 bytes of a file (`SharedClock`)
    origin NS                       # when timelines begin, on that clock; real: when it is loaded, otherwise 0
    device 0 name="NVIDIA H200" uuid=GPU-… pci=0000:1b:00 memory_mib=143771 sms=132
                                    # also gpm=1 mig=0 ecc=1 capability=9.0 reserved_mib=600 nvlinks=18 power_limit=700
                                    # max_sm_clock=1980 max_memory_clock=2619; all have a value, an H100's
    instance 0 gi=1 ci=0 uuid=MIG-… memory_mib=9984 sms=16 name=…     # a MIG instance of device 0
    state decode sm=0.9 tensor=0.1 hmma=0.1 dram=0.85 power=510 sm_clock=1755 memory_clock=2619 temperature=55
    run 0 prefill 80ms              # adds to the timeline of device 0; `*`: of all devices; `0:1`: of its instance gi=1
    run 0 decode 12ms times=100
    repeat 0                        # its timeline begins anew when it has ended
    fault FUNCTION code=15          # always; or with from=3 count=2 (the third and fourth call), after=5s until=6s
                                    # (script time), device=0 or 0:1, item=186
    value FUNCTION set=4294967295   # what it puts in place of its value, in the units of NVML; with the same conditions
    sleep FUNCTION lasting=2s       # a call that takes so long; with the same conditions
    sleep FUNCTION while=PATH       # a call that hangs as long as there is such a file
    noise 0.03                      # GPM: normal noise on shares, standard deviation; `seed N`
    refresh 100ms                   # GPM: counters are read only so often; energy_period 100ms: so is the energy
    power_window 1s                 # what `nvmlDeviceGetPowerUsage` and the field POWER_AVERAGE average over
    log PATH                        # a line a call: pid function device:instance item code (`standin` sets it)

Devices are numbered from 0 and come before what names them; states come before `run`. The state ``idle`` (zeros unless
it is given) holds outside of a timeline. Keys of a state are shares of 1: sm, occupancy, tensor, hmma, dmma, imma,
dfma, integer, fp16, fp32, fp64, dram, graphics and util (1 where sm is not 0); bytes a second: pcie_tx, pcie_rx,
nvlink_tx, nvlink_rx; watts: power; MHz: sm_clock, memory_clock; temperature in degrees, used_mib, throttle (bits).
FUNCTION is NVML's name without a version suffix where pynvml calls it so (`nvmlInit`, `nvmlShutdown`), else with it
(`nvmlDeviceGetMemoryInfo_v2`), or `*`. An item is a metric of GPM, a field, a clock, a PCIe counter or a link; a fault
without one is that of the whole call.
Durations have a unit: ns, us, ms, s.

Stricter than a driver: after a fork the child has to call `nvmlInit` itself. Chosen where NVML's documentation is
silent: what a MIG handle does not have is NOT_SUPPORTED; two samples of GPM without a refresh between them, NO_DATA.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_NAME = "libnvidia-ml.so.1"
_OPTIONS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
SCRIPT_VARIABLE = "NVML_STANDIN_SCRIPT"


@functools.cache
def library() -> Path:
    """The built library. Its folder holds nothing else, and is kept for the next run; without a compiler the calling
    test skips."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler to build the stand-in for NVML with")
    sources = sorted(_HERE.glob("*.c"))
    told = hashlib.sha256(" ".join(_OPTIONS).encode())
    for file in (*sources, _HERE / "standin.h"):
        told.update(file.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"phaseprof-nvml-{os.getuid()}-{told.hexdigest()[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        # Nothing is loaded that another user has put there.
        folder = Path(tempfile.mkdtemp(prefix="phaseprof-nvml-"))
    built = folder / _NAME
    if not built.exists():
        # Several processes may build at a time: each its own file, and the last rename wins.
        handle, own = tempfile.mkstemp(dir=folder, suffix=".so")
        os.close(handle)
        command = [compiler, *_OPTIONS, "-o", own, *map(str, sources), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            os.unlink(own)
            raise RuntimeError(f"the stand-in for NVML could not be built:\n{done.stderr}")
        os.replace(own, built)
    return built


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the stand-in saw. `device` is ``0:-1``: its number, and that of its GPU instance."""

    pid: int
    function: str
    device: str
    item: int
    code: int


class SharedClock:
    """A simulated clock in a file, for ``clock file PATH``: seen by every process at once."""

    def __init__(self, path: Path, now_ns: int = 0) -> None:
        self.path = path
        path.write_bytes(struct.pack("=q", now_ns))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def set_time_ns(self, now_ns: int) -> None:
        """It is now so late."""
        self._map[:] = struct.pack("=q", now_ns)


@dataclass(slots=True)
class Standin:
    """The stand-in in this process."""

    script: Path
    log: Path
    _library: Any = field(repr=False)

    def set_time_ns(self, now_ns: int) -> None:
        """It is now so late, under ``clock set``."""
        self._library.standin_set_time_ns(ctypes.c_int64(now_ns))

    @property
    def origin_ns(self) -> int:
        """When the timelines begin: on `time.perf_counter_ns` under ``clock real``. Known once NVML was opened."""
        return int(self._library.standin_origin_ns())

    @property
    def references(self) -> int:
        """How often NVML is open in this process."""
        return int(self._library.standin_references())

    @property
    def samples(self) -> int:
        """Samples of GPM that were allocated and not freed, in this process so far."""
        return int(self._library.standin_samples())

    def calls(self, function: str | None = None) -> list[Call]:
        """What was called so far, in every process, in order; one function's calls if it is named. A call for several
        items is there itself (item -1) and once an item."""
        return [call for call in _calls(self.log) if function is None or call.function == function]


def _calls(log: Path) -> list[Call]:
    if not log.exists():
        return []
    rows = (line.split() for line in log.read_text(encoding="ascii").splitlines())
    return [Call(int(row[0]), row[1], row[2], int(row[3]), int(row[4])) for row in rows]


def environment(script: str, folder: Path) -> dict[str, str]:
    """The environment of a subprocess whose nvidia-ml-py loads the stand-in. Its log is ``folder/nvml.log``."""
    path, log = folder / "nvml.script", folder / "nvml.log"
    path.write_text(f"{script}\nlog {log}\n", encoding="utf-8")
    before = os.environ.get("LD_LIBRARY_PATH")
    paths = [str(library().parent), *([before] if before else [])]
    return {**os.environ, SCRIPT_VARIABLE: str(path), "LD_LIBRARY_PATH": os.pathsep.join(paths)}


@contextlib.contextmanager
def standin(script: str, folder: Path) -> Iterator[Standin]:
    """The stand-in as the library that nvidia-ml-py calls in this process, until the block ends."""
    pynvml: Any = importlib.import_module("pynvml")
    path, log = folder / "nvml.script", folder / "nvml.log"
    path.write_text(f"{script}\nlog {log}\n", encoding="utf-8")
    loaded = ctypes.CDLL(str(library()))
    loaded.standin_origin_ns.restype = ctypes.c_int64
    loaded.standin_references.restype = ctypes.c_long
    loaded.standin_samples.restype = ctypes.c_long
    loaded.standin_size.restype = ctypes.c_long
    before = os.environ.get(SCRIPT_VARIABLE)
    os.environ[SCRIPT_VARIABLE] = str(path)
    kept = pynvml.nvmlLib
    # The bindings load a library only where none is loaded; it has no soname, so nothing else finds it later.
    pynvml.nvmlLib = loaded
    pynvml._nvmlGetFunctionPointer_cache.clear()
    loaded.standin_forget()
    try:
        yield Standin(path, log, loaded)
    finally:
        pynvml.nvmlLib = kept
        pynvml._nvmlGetFunctionPointer_cache.clear()
        loaded.standin_forget()
        if before is None:
            del os.environ[SCRIPT_VARIABLE]
        else:
            os.environ[SCRIPT_VARIABLE] = before
