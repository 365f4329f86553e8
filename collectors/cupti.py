"""CUPTI's PM sampling through NVIDIA's cupti-python: the one place that calls it, with every refusal as a typed reason.

cupti-python is an optional extra under NVIDIA's own licence; nothing of it is part of phaseprof. What is used here is
its documented interface from 13.3 on: `cupti.pm_sampling.Collector` and `cupti.cupti.get_timestamp`.

Which metrics a chip has and how many of them fit into one pass was asked of the host library of CUDA 13.0 for each chip
that it knows (Turing to Blackwell): see `METRIC_SETS`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from phaseprof.metrics import Metric

#: What the user installs: `pip install 'phaseprof[cupti]'`.
EXTRA = "pip install 'phaseprof[cupti]'"
#: The CUDA version, as drivers encode it, from which cupti-python works.
LEAST_CUDA = 13_000
#: Where the GPU keeps records until they are decoded. It is device memory.
HARDWARE_BUFFER_BYTES = 64 * 2**20
#: Samples decoded by one call: bounds the host memory of a call to some megabytes.
SAMPLES_PER_DECODE = 2_048
#: Clock of the trigger where a chip cannot trigger by time (Turing, GA100): between idle and boost. Each sample carries
#: its own timestamps, so a wrong guess changes the interval and no value.
_TRIGGER_CLOCK_HZ = 1.4e9

PERMISSION_FIX = (
    "NVreg_RestrictProfilingToAdminUsers=0 as option of the nvidia module (/etc/modprobe.d, then reload it), or "
    "CAP_SYS_ADMIN or CAP_PERFMON for the process (docker run --cap-add SYS_ADMIN)"
)
_OTHERS_FIX = (
    "end the other profiler (nsys, ncu, DCGM: `dcgmi profmetrics --pause`), then run again"
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why PM sampling does not work.

    Attributes:
        why: A clause without capital and full stop.
        fix: One line that would help; empty if nothing would.
    """

    why: str
    fix: str = ""


class PmRefused(Exception):
    """PM sampling does not work here, or no longer.

    Args:
        refusal: The reason.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.why)
        self.refusal = refusal


class BufferOverflow(Exception):
    """The GPU's buffer was full before it was decoded; sampling has to be set up again, with a longer interval."""


#: torch loads the libcupti that its own wheels pin, and cupti-python takes the one that is loaded. Tried with 13.0 and
#: cupti-python 13.4: each setting is refused as an invalid parameter, since the structures have grown.
OLD_LIBRARY = Refusal(
    "the libcupti that is loaded is older than cupti-python",
    "pip install --upgrade nvidia-cuda-cupti (pip then says that torch pins another one)",
)

#: By the name of a member of `cupti.cupti.Result`.
_REFUSALS: Mapping[str, Refusal] = MappingProxyType(
    {
        "ERROR_INSUFFICIENT_PRIVILEGES": Refusal(
            "this user may not read performance counters (ERR_NVGPUCTRPERM)", PERMISSION_FIX
        ),
        "ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES": Refusal(
            "the virtual machine may not read performance counters",
            "enable profiling for the vGPU on its host",
        ),
        "ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED": Refusal(
            "counters cannot be sampled on this virtual GPU"
        ),
        "ERROR_MIG_DEVICE_NOT_SUPPORTED": Refusal(
            "counters cannot be sampled on a part of a GPU (MIG)", "use gpm, or a whole GPU"
        ),
        "ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED": Refusal(
            "counters cannot be sampled in confidential computing"
        ),
        "ERROR_WSL_DEVICE_NOT_SUPPORTED": Refusal("counters cannot be sampled under WSL"),
        "ERROR_CMP_DEVICE_NOT_SUPPORTED": Refusal("counters cannot be sampled on this board"),
        "ERROR_SLI_DEVICE_NOT_SUPPORTED": Refusal("counters cannot be sampled with SLI"),
        "ERROR_INVALID_CHIP_NAME": Refusal(
            "this CUPTI does not know the chip", "pip install --upgrade cupti-python"
        ),
        "ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED": Refusal(
            "another profiler uses CUPTI in this process", _OTHERS_FIX
        ),
        "ERROR_HARDWARE_BUSY": Refusal("another profiler holds the GPU's counters", _OTHERS_FIX),
        "ERROR_OLD_PROFILER_API_INITIALIZED": Refusal(
            "CUPTI's older profiling interface is in use in this process", _OTHERS_FIX
        ),
        "ERROR_NOT_INITIALIZED": Refusal(
            "CUPTI cannot be initialized: its driver is too old or its libraries are incomplete",
            "a driver of CUDA 13 or newer (580+), and cupti-python with nvidia-cuda-cupti beside it",
        ),
        "ERROR_NOT_SUPPORTED": Refusal("this GPU or driver has no PM sampling"),
        "ERROR_API_NOT_IMPLEMENTED": Refusal(
            "the libcupti that is loaded has no PM sampling",
            "pip install --upgrade nvidia-cuda-cupti",
        ),
        "ERROR_PARAMETER_SIZE_NOT_SUFFICIENT": OLD_LIBRARY,
        "ERROR_INVALID_PARAMETER": Refusal(
            "CUPTI refused a call as invalid, as a libcupti does that is older than cupti-python",
            OLD_LIBRARY.fix,
        ),
    }
)

ALREADY_ENABLED = Refusal("PM sampling is enabled on this GPU already", _OTHERS_FIX)
NO_PACKAGE = Refusal("the package cupti-python is not installed", EXTRA)
OLD_PACKAGE = Refusal("this cupti-python has no PM sampling", f"{EXTRA} --upgrade (13.3 or newer)")
NO_DRIVER = Refusal("there is no NVIDIA driver on this machine")
NO_METRICS = Refusal("none of the metrics can be sampled on this chip in one pass")


@dataclass(frozen=True, slots=True)
class Counter:
    """One metric of CUPTI, and what it becomes.

    Attributes:
        name: As CUPTI has it.
        metric: As `samples` has it.
        scale: Factor on the value.
        per_second: Whether the value is a sum over the sample, to be divided by its length.
    """

    name: str
    metric: Metric
    scale: float = 1.0
    per_second: bool = False


_PERCENT = "avg.pct_of_peak_sustained_elapsed"
_SM = Counter(f"sm__cycles_active.{_PERCENT}", Metric.SM_ACTIVE, 0.01)
_TENSOR = Counter(f"sm__pipe_tensor_cycles_active.{_PERCENT}", Metric.TENSOR_ACTIVE, 0.01)
_OCCUPANCY = Counter(f"sm__warps_active.{_PERCENT}", Metric.SM_OCCUPANCY, 0.01)
_CLOCK = Counter("sm__cycles_elapsed.avg", Metric.SM_CLOCK, per_second=True)
_DRAM = Counter(f"dram__throughput.{_PERCENT}", Metric.DRAM_ACTIVE, 0.01)
_READ = Counter("dram__bytes_read.sum", Metric.DRAM_READ, per_second=True)
_WRITE = Counter("dram__bytes_write.sum", Metric.DRAM_WRITE, per_second=True)
_OP_READ = Counter("dram__bytes_op_read.sum", Metric.DRAM_READ, per_second=True)
_OP_WRITE = Counter("dram__bytes_op_write.sum", Metric.DRAM_WRITE, per_second=True)

#: Sets of metrics that fit into one pass, the richest first; the first that a chip takes is sampled. One pass holds
#: what stands in the first line on GA10x, GA100, AD10x, GH100 and GB10x; in the second on GB20x; in the fourth on chips
#: without memory of their own; in the fifth on Turing. The last two are for drivers that grant few counters.
METRIC_SETS: tuple[tuple[Counter, ...], ...] = (
    (_SM, _TENSOR, _OCCUPANCY, _CLOCK, _DRAM, _READ, _WRITE),
    (_SM, _TENSOR, _OCCUPANCY, _CLOCK, _DRAM, _OP_READ, _OP_WRITE),
    (_SM, _TENSOR, _READ, _WRITE),
    (_SM, _TENSOR, _OCCUPANCY, _CLOCK),
    (_SM, _OCCUPANCY, _CLOCK, _READ, _WRITE),
    (_SM, _TENSOR),
    (_TENSOR,),
    (_SM,),
)
#: What the richest set has: what is missing from a lesser one is said.
ALL_METRICS = tuple(counter.metric for counter in METRIC_SETS[0])


@dataclass(frozen=True, slots=True)
class RawSample:
    """One interval of the GPU.

    Attributes:
        start_ns, end_ns: On the clock of CUPTI's timestamps.
        values: One for each counter of the sampler, in the units of their metrics.
    """

    start_ns: int
    end_ns: int
    values: tuple[float, ...]


def is_installed() -> bool:
    """Whether cupti-python is there. It is not imported: that loads CUPTI into the process."""
    try:
        return "cupti" in sys.modules or importlib.util.find_spec("cupti") is not None
    except (ImportError, ValueError):
        return False


def driver_cuda_version() -> int | None:
    """The newest CUDA version that the driver supports, as it encodes it (13000); None if torch cannot say."""
    torch = sys.modules.get("torch")
    # Private, and absent from builds without CUDA.
    ask: Callable[[], int] | None = getattr(
        getattr(torch, "_C", None), "_cuda_getDriverVersion", None
    )
    try:
        return int(ask()) if ask is not None else None
    except RuntimeError:
        return None


def old_driver(version: int | None) -> Refusal | None:
    """Why a driver is too old for PM sampling; None if it is not, or nothing is known of it."""
    if version is None or version <= 0 or version >= LEAST_CUDA:
        return None
    return Refusal(
        f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, and cupti-python needs 13.0",
        "install a driver of CUDA 13 or newer (580+)",
    )


class PmSampler:
    """PM sampling of one device. All its methods raise `PmRefused` when CUPTI refuses.

    Args:
        device_index: The device, as CUDA counts in this process.
        interval_ns: From one sample to the next.

    Attributes:
        counters: What each sample holds; known when it is open.
        interval_ns: As set up last.
    """

    def __init__(self, device_index: int, interval_ns: int) -> None:
        self.counters: tuple[Counter, ...] = ()
        self.interval_ns = interval_ns
        self._index = device_index
        self._cupti: Any = None
        self._collector: Any = None

    def open(self) -> None:
        """Reserve the counters of the device and set them up."""
        refusal = old_driver(driver_cuda_version())
        if refusal is not None:
            raise PmRefused(refusal)
        sampling, self._cupti = _load()
        _make_current(self._index)
        collector = sampling.Collector(device_index=self._index)
        with self._refusing():
            collector.enable()
        self._collector = collector
        try:
            self._configure(sampling)
        except BaseException:
            self.close()
            raise

    def _configure(self, sampling: Any) -> None:
        """The richest set that the chip takes, triggered by time if it can be."""
        cycles = max(int(self.interval_ns * 1e-9 * _TRIGGER_CLOCK_HZ), 1)
        triggers = (
            (sampling.TriggerMode.GPU_TIME_INTERVAL, self.interval_ns),
            (sampling.TriggerMode.GPU_SYSCLK_INTERVAL, cycles),
        )
        known = (self.counters,) if self.counters else METRIC_SETS
        said = set()
        for mode, interval in triggers:
            for counters in known:
                refusal = self._set_up(counters, mode, interval)
                if refusal is None:
                    self.counters = counters
                    return
                said.add(refusal)
        # A metric that every chip has is among them.
        old = said == {int(self._cupti.Result.ERROR_INVALID_PARAMETER)}
        raise PmRefused(OLD_LIBRARY if old else NO_METRICS)

    def _set_up(self, counters: Sequence[Counter], mode: Any, interval: int) -> int | None:
        """Set the device up with these; the code if it does not take them. A metric that a chip has not, several
        passes and a trigger that it has not come as errors of the same kinds."""
        results = self._cupti.Result
        unknown = (
            results.ERROR_INVALID_PARAMETER,
            results.ERROR_INVALID_METRIC_NAME,
            results.ERROR_NOT_SUPPORTED,
        )
        try:
            self._collector.configure(
                metrics=[counter.name for counter in counters],
                hardware_buffer_size=HARDWARE_BUFFER_BYTES,
                sampling_interval=interval,
                trigger_mode=mode,
            )
        except ValueError:
            return int(results.ERROR_NOT_SUPPORTED)
        except self._cupti.cuptiError as error:
            if error.status in unknown:
                return int(error.status)
            raise PmRefused(_refusal(error)) from error
        except (RuntimeError, MemoryError, PermissionError) as error:
            raise PmRefused(_refusal(error)) from error
        return None

    def start(self) -> None:
        """Begin to sample."""
        with self._refusing():
            self._collector.start()

    def stop(self) -> None:
        """Stop; what was sampled can still be decoded."""
        with self._refusing():
            self._collector.stop()

    def lengthen(self, interval_ns: int) -> None:
        """Set the stopped sampler up again with another interval."""
        self.interval_ns = interval_ns
        sampling, _ = _load()
        self._configure(sampling)

    def decode(self) -> tuple[list[RawSample], bool]:
        """What was sampled since the last call, at most `SAMPLES_PER_DECODE`, and whether there may be more.

        Raises:
            BufferOverflow: If the GPU's buffer was full.
        """
        try:
            data = self._collector.decode(max_samples=SAMPLES_PER_DECODE)
        except MemoryError as error:
            raise BufferOverflow from error
        except Exception as error:
            raise PmRefused(_refusal(error)) from error
        with self._refusing():
            samples = [
                _raw(self.counters, int(s.start_timestamp), int(s.end_timestamp), s.metric_values)
                for s in data
            ]
        return samples, len(samples) >= SAMPLES_PER_DECODE

    def timestamp_ns(self) -> int:
        """Now, on CUPTI's clock."""
        with self._refusing():
            return int(self._cupti.get_timestamp())

    def close(self) -> None:
        """Give the counters back. Never raises."""
        collector, self._collector = self._collector, None
        if collector is not None:
            with contextlib.suppress(Exception):
                collector.disable()

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except PmRefused:
            raise
        except Exception as error:
            raise PmRefused(_refusal(error)) from error


def _load() -> tuple[Any, Any]:
    """The modules `cupti.pm_sampling` and `cupti.cupti`."""
    if not is_installed():
        raise PmRefused(NO_PACKAGE)
    try:
        return importlib.import_module("cupti.pm_sampling"), importlib.import_module("cupti.cupti")
    except ModuleNotFoundError as error:
        known = {"cupti.pm_sampling": OLD_PACKAGE, "cupti": NO_PACKAGE}
        refusal = known.get(error.name or "")
        raise PmRefused(refusal or _not_importable(error)) from error
    except Exception as error:
        raise PmRefused(_not_importable(error)) from error


def _not_importable(error: Exception) -> Refusal:
    return Refusal(
        f"cupti-python cannot be imported ({_short(error)})",
        "pip install --force-reinstall cupti-python nvidia-cuda-cupti cuda-bindings",
    )


def _make_current(index: int) -> None:
    """Make the device's context current on this thread, as CUPTI's own samples do before they sample."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_available():
            torch.cuda.set_device(index)


def _raw(counters: Sequence[Counter], start_ns: int, end_ns: int, values: Any) -> RawSample:
    seconds = (end_ns - start_ns) * 1e-9
    scaled = []
    for counter, value in zip(counters, values, strict=True):
        if counter.per_second:
            scaled.append(value / seconds if seconds > 0 else float("nan"))
        else:
            scaled.append(value * counter.scale)
    return RawSample(start_ns, end_ns, tuple(scaled))


def _refusal(error: BaseException) -> Refusal:
    """What an exception of cupti-python means. Some of CUPTI's codes come as exceptions of Python."""
    if isinstance(error, PermissionError):
        return _REFUSALS["ERROR_INSUFFICIENT_PRIVILEGES"]
    name = _name(error)
    if name in _REFUSALS:
        return _REFUSALS[name]
    text = _short(error)
    if isinstance(error, RuntimeError):
        if type(error).__name__ == "FunctionNotFoundError":
            return _REFUSALS["ERROR_API_NOT_IMPLEMENTED"]
        if "driver is not found" in text:
            return NO_DRIVER
        if "already enabled" in text:
            return ALREADY_ENABLED
        if "nvperf" in text:
            return _REFUSALS["ERROR_NOT_INITIALIZED"]
    if isinstance(error, MemoryError):
        return Refusal("there is no memory for PM sampling", "leave the GPU some 100 MB")
    return Refusal(f"CUPTI gave an error ({name or text})", "PHASEPROF_DEBUG=1 shows where")


def _name(error: BaseException) -> str:
    """The name of CUPTI's code, which its errors carry as a number; empty for other errors."""
    status = getattr(error, "status", None)
    results = getattr(sys.modules.get("cupti.cupti"), "Result", None)
    if not isinstance(status, int) or results is None:
        return ""
    try:
        return str(results(status).name)
    except ValueError:
        return f"error {status}"


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
