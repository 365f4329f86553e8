"""The two roofs of a device: how fast it multiplies matrices, and how fast it reads memory.

Both are measured with torch, since that is what a model runs on:

- FLOP/s: square GEMMs ``A Bᵀ`` (the layout of a linear layer) of a few sizes n, 2 n³ FLOPs each;
- bytes/s: reading a buffer that no cache can hold, by a sum, a dot product and matmuls with one row, which is what
  decode does to the weights.

Each figure is the median of repeats of the fastest candidate, so one lucky repeat does not raise the roof; the spread
says how far the repeats lay apart. On a CPU a call is timed by the host clock, on CUDA by events. Results are cached
per `Device.key` and dtype. docs/ceilings.md explains all of it to users.
"""

from __future__ import annotations

import contextlib
import glob
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseprof.collectors import datasheet
from phaseprof.collectors.ceilings_cache import cache_path, load, store
from phaseprof.devices import describe
from phaseprof.errors import CalibrationError, UsageError
from phaseprof.trace.meta import Ceilings, Device

if TYPE_CHECKING:
    import torch

__all__ = [
    "MEASURED_DTYPES",
    "NOISY_SPREAD",
    "Progress",
    "cache_path",
    "ensure",
    "load",
    "measure",
    "resolve",
    "store",
]

#: Called with (figures done, figures in all, what is measured next; empty at the end).
Progress = Callable[[int, int, str], None]

#: dtypes whose matmul is measured. Others (fp8, int8) need scales or kernels of their own: datasheet or nothing.
MEASURED_DTYPES = ("float32", "bfloat16", "float16")

#: A wider spread than this means that something else ran, or the clock moved: measure again when it is quiet.
NOISY_SPREAD = 0.15

_REPEATS = 7
_FEWEST_REPEATS = 3
#: Sizes of GEMM that are repeated after each was tried once.
_GEMM_FINALISTS = 3
#: Read kernels that are repeated: all of them, so that the one-row figure can be named beside the best.
_READ_FINALISTS = 4
_ROW_READS = ("one-row x·Wᵀ", "one-row x·W")
_CPU_SIZES = (256, 512, 1024, 2048)
_CUDA_SIZES = (2048, 4096, 8192)
#: Columns of the buffer when it is read as a weight matrix: a usual hidden size.
_ROW = 4096
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One way to reach a roof.

    Attributes:
        label: Its name, for people; unique among its like.
        run: One call.
        work: FLOPs or bytes of a call.
        growth: How many times the work of the next candidate; 0 if it does no more.
    """

    label: str
    run: Callable[[], object]
    work: float
    growth: float = 0.0


@dataclass(frozen=True, slots=True)
class _Rate:
    """Work per second: median of the repeats, half their range over the median, and what was run."""

    per_s: float
    spread: float
    label: str


def measure(
    device: Device,
    dtypes: Sequence[str],
    *,
    seconds: float = 5.0,
    progress: Progress | None = None,
) -> tuple[Ceilings, ...]:
    """Measure both roofs of `device`, one entry per dtype.

    The bandwidth is a property of the memory, not of a dtype: it is measured once, in float32, and shared. The random
    state of the process is left as it was.

    Args:
        device: From `phaseprof.devices.describe`. A CPU is measured with `device.threads` threads.
        dtypes: Of `MEASURED_DTYPES`.
        seconds: About how long it may take in all, allocation not counted.
        progress: Told before each figure, and at the end.

    Raises:
        CalibrationError: If the device cannot be measured, a dtype is not one that is measured or cannot be
            multiplied on it, memory runs out, or the device is not what it was when it was described.
    """
    wanted = tuple(dict.fromkeys(dtypes))
    for dtype in wanted:
        if dtype not in MEASURED_DTYPES:
            raise CalibrationError(
                f"No ceiling is measured for dtype {dtype!r}.",
                f"Use one of {', '.join(MEASURED_DTYPES)}.",
            )
    if device.kind not in ("cpu", "cuda"):
        raise CalibrationError(
            f"No ceilings are measured on devices of kind {device.kind!r}.",
            "Use a CPU or a CUDA device.",
        )
    import torch

    with _threads(device):
        _check_still_the_same(device)
        # Under a caller's autocast a float32 matmul would be a bfloat16 one.
        plain = torch.autocast(device.kind, enabled=False)
        try:
            with torch.inference_mode(), plain:
                return _measure(device, wanted, seconds, progress or _tell_nobody)
        except (RuntimeError, MemoryError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CalibrationError(
                f"The ceilings of {device.name} cannot be measured: {reason}",
                "Free its memory, or leave a dtype out that it does not support (--dtype float32).",
            ) from error
        finally:
            if device.kind == "cuda":
                torch.cuda.empty_cache()


def _measure(
    device: Device, dtypes: Sequence[str], seconds: float, tell: Progress
) -> tuple[Ceilings, ...]:
    total = len(dtypes) + 1
    share = seconds / total
    tell(0, total, "memory bandwidth")
    size = _buffer_bytes(device)
    reads = _rank(_read_candidates(device, size), device, share, _READ_FINALISTS)
    compute: dict[str, _Rate] = {}
    for done, dtype in enumerate(dtypes, start=1):
        tell(done, total, f"{dtype} matmul")
        compute[dtype] = _rank(_gemm_candidates(device, dtype), device, share, _GEMM_FINALISTS)[0]
    tell(total, total, "")
    read = reads[0]
    row = max(rate.per_s for rate in reads if rate.label in _ROW_READS)
    now_ns = time.time_ns()
    return tuple(
        Ceilings(
            device_key=device.key,
            dtype=dtype,
            flops_per_s=rate.per_s,
            bytes_per_s=read.per_s,
            source="measured",
            measured_ns=now_ns,
            spread=max(rate.spread, read.spread),
            reference=(
                f"{dtype} matmul {rate.label}; {read.label} over {size // _MIB} MiB; "
                f"a one-row matmul reads {row / 1e9:.3g} GB/s"
            ),
        )
        for dtype, rate in compute.items()
    )


def _tell_nobody(done: int, total: int, what: str) -> None:
    """No progress is shown."""


@contextlib.contextmanager
def _threads(device: Device) -> Iterator[None]:
    """Compute with the threads that the device was described with."""
    import torch

    before = torch.get_num_threads()
    if device.threads is not None and device.threads != before:
        torch.set_num_threads(device.threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _check_still_the_same(device: Device) -> None:
    """A figure must not be kept under the key of another device or another setting."""
    try:
        live = describe(_torch_name(device))
    except UsageError as error:
        raise CalibrationError(
            f"{device.name} is not a device of this machine: {error.message}",
            "Calibrate on the machine that it belongs to.",
        ) from error
    if live.key != device.key:
        raise CalibrationError(
            f"{device.name} is not what it was when it was described ({live.key}, not {device.key}).",
            "Describe the device again, or undo the change of settings.",
        )


def _torch_name(device: Device) -> str:
    return "cpu" if device.kind == "cpu" else f"{device.kind}:{device.index}"


def _rank(
    candidates: Iterable[_Candidate], device: Device, seconds: float, finalists: int
) -> list[_Rate]:
    """The fastest candidates, fastest first: each is tried once, so many finalists are repeated in turns.

    In turns, so that a disturbance of half a second hits one repeat of each and not all of one. `candidates` is
    consumed lazily and ends once the next one, with its work, would take too long: a GEMM of the usual size takes
    minutes where a dtype has no hardware.
    """
    tried: list[tuple[_Candidate, float]] = []
    for candidate in candidates:
        candidate.run()
        took = _time(candidate, 1, device)
        tried.append((candidate, took))
        if took * candidate.growth > seconds / 5:
            break
    tried.sort(key=lambda entry: entry[1] / entry[0].work)
    tried = tried[:finalists]
    share = seconds / len(tried) / _REPEATS
    rates: dict[str, list[float]] = {candidate.label: [] for candidate, _ in tried}
    deadline_s = time.monotonic() + 2 * seconds
    for repeat in range(_REPEATS):
        # On a machine that others load, calls take longer than they did when they were tried.
        if repeat >= _FEWEST_REPEATS and time.monotonic() > deadline_s:
            break
        for candidate, took in tried:
            calls = max(1, int(share / max(took, 1e-9)))
            work = candidate.work * calls
            rates[candidate.label].append(work / _time(candidate, calls, device))
    ranked = [_rate(label, repeats) for label, repeats in rates.items()]
    return sorted(ranked, key=lambda rate: rate.per_s, reverse=True)


def _rate(label: str, repeats: Sequence[float]) -> _Rate:
    median = statistics.median(repeats)
    return _Rate(median, (max(repeats) - min(repeats)) / 2 / median, label)


def _time(candidate: _Candidate, calls: int, device: Device) -> float:
    """Seconds that `calls` calls take on the device."""
    if device.kind == "cuda":
        import torch

        stream = torch.cuda.current_stream(device.index)
        make: Callable[..., Any] = torch.cuda.Event
        begin, end = make(enable_timing=True), make(enable_timing=True)
        stream.synchronize()
        begin.record(stream)
        for _ in range(calls):
            candidate.run()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    begin_s = time.perf_counter()
    for _ in range(calls):
        candidate.run()
    return time.perf_counter() - begin_s


def _gemm_candidates(device: Device, dtype: str) -> Iterator[_Candidate]:
    """Square GEMMs, smallest first. Random values: a GPU clocks higher on constant ones than on a real model's."""
    import torch

    at = torch.device(_torch_name(device))
    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator(device=at)
    generator.manual_seed(0)
    for n in _CUDA_SIZES if device.kind == "cuda" else _CPU_SIZES:
        left, right = (
            torch.randn(n, n, generator=generator, device=at, dtype=torch.float32).to(kind)
            for _ in range(2)
        )
        out = torch.empty(n, n, device=at, dtype=kind)
        run = _bind(torch.mm, left, right.t(), out=out)
        yield _Candidate(f"A·Bᵀ {n}x{n}", run, 2.0 * n**3, growth=8.0)


def _read_candidates(device: Device, size: int) -> Iterator[_Candidate]:
    """Kernels that read one buffer once and write next to nothing."""
    import torch

    at = torch.device(_torch_name(device))
    rows = size // 4 // _ROW
    # Written, not just allocated: pages that were never written are all one page, and that one is in the cache.
    buffer = torch.empty(rows * _ROW, device=at, dtype=torch.float32).fill_(1.0)
    weight = buffer.view(rows, _ROW)
    row = torch.ones(1, _ROW, device=at, dtype=torch.float32)
    wide = torch.ones(1, rows, device=at, dtype=torch.float32)
    moved = float(buffer.numel() * 4)
    yield _Candidate("sum", _bind(torch.sum, buffer), moved)
    yield _Candidate("dot product", _bind(torch.dot, buffer, buffer), moved)
    yield _Candidate("one-row x·Wᵀ", _bind(torch.mm, row, weight.t()), moved)
    yield _Candidate("one-row x·W", _bind(torch.mm, wide, weight), moved)


def _bind(call: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Callable[[], object]:
    """A loop variable bound now, not when it is called."""
    return lambda: call(*args, **kwargs)


def _buffer_bytes(device: Device) -> int:
    """At least eight times the last cache, within an eighth of the memory, a whole number of rows of `_ROW` floats."""
    cache: int
    memory: int | None
    if device.kind == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device.index)
        cache = getattr(properties, "L2_cache_size", 64 * _MIB)
        smallest, memory = 1024 * _MIB, torch.cuda.mem_get_info(device.index)[0]
    else:
        cache, smallest, memory = _last_level_cache_bytes(), 256 * _MIB, device.memory_bytes
    size = max(smallest, 8 * cache)
    if memory is not None:
        size = min(size, memory // 8)
    return max(1, size // (4 * _ROW * 256)) * 4 * _ROW * 256


def _last_level_cache_bytes() -> int:
    """Sum of the distinct last-level caches of this machine; 32 MiB if the kernel does not say."""
    sizes: dict[tuple[int, str], int] = {}
    for folder in glob.glob("/sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int(Path(folder, "level").read_text())
            shared = Path(folder, "shared_cpu_list").read_text().strip()
            size = Path(folder, "size").read_text().strip()
            factor = {"K": 1024, "M": _MIB, "G": 1024 * _MIB}.get(size[-1:], 1)
            sizes[level, shared] = int(size.rstrip("KMG")) * factor
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or 32 * _MIB


def resolve(device: Device, dtype: str) -> Ceilings | None:
    """The roofs known for `device` and `dtype`, nothing measured now: from the cache, else the datasheet, else None."""
    for entry in load(device):
        if entry.dtype == dtype:
            return entry
    return datasheet.lookup(device, dtype)


def ensure(
    device: Device, dtype: str, progress: Progress | None = None, *, seconds: float = 5.0
) -> Ceilings | None:
    """The measured roofs of `device` for `dtype`: from the cache, or measured now and cached.

    A cache that cannot be written does not spoil the figure: it is returned all the same. For a dtype or a kind of
    device that is never measured this is :func:`resolve`. `seconds` and `progress` are those of :func:`measure`.

    Raises:
        CalibrationError: If measuring fails, and no datasheet knows the device.
    """
    known = resolve(device, dtype)
    if known is not None and known.source == "measured":
        return known
    if dtype not in MEASURED_DTYPES or device.kind not in ("cpu", "cuda"):
        return known
    try:
        (measured,) = measure(device, (dtype,), seconds=seconds, progress=progress)
    except CalibrationError:
        if known is not None:
            return known
        raise
    with contextlib.suppress(CalibrationError):
        store((measured,))
    return measured
