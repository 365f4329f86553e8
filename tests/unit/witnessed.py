"""Whole runs on a GPU of round figures, with counters sampled every 100 ms: what each run is bound by is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from scripted import DEVICE, ON_GPU, Ran, Script, samples, trace_of
from traces import COST

from phaseprof.metrics import Metric
from phaseprof.trace.meta import Ceilings, ProcessMeta
from phaseprof.trace.reader import Trace

MS = 1_000_000
#: 1 PFLOP/s at 2 GHz, and 4 TB/s.
ROOFS = Ceilings(
    DEVICE.key, "bfloat16", 1e15, 4e12, "datasheet", None, None, "stand-in", clock_hz=2e9
)
#: 62.9 GFLOP a token, and 16 GB of weights.
MODEL = replace(
    ON_GPU.models[0],
    cost=replace(
        COST,
        linear_flops_per_token=62_800_000_000,
        head_flops_per_token=100_000_000,
        body_weight_bytes=15_900_000_000,
        head_weight_bytes=100_000_000,
        dtype="bfloat16",
    ),
)
META = replace(ON_GPU, devices=(DEVICE,), models=(MODEL,), ceilings=(ROOFS,))


@dataclass(frozen=True)
class Kind:
    """Passes of one phase.

    Attributes:
        ms: Time of one on the device.
        tflop, gb: Its work.
        sm, tensor, dram: What the counters show while it runs.
    """

    ms: float
    tflop: float
    gb: float
    sm: float
    tensor: float
    dram: float


#: 62 % of the tensor cores' peak, and 76 % of the bandwidth: as a GPU does it that runs well.
PREFILL = Kind(ms=52, tflop=32.2, gb=16, sm=0.97, tensor=0.63, dram=0.24)
DECODE = Kind(ms=5.25, tflop=0.0629, gb=16, sm=0.94, tensor=0.07, dram=0.78)


def run(
    prefill: Kind = PREFILL,
    decode: Kind = DECODE,
    *,
    requests: int = 40,
    steps: int = 64,
    ghz: float = 2.0,
    throttle: int = 0,
    meta: ProcessMeta = META,
    work: bool = True,
    counters: bool = True,
) -> Trace:
    """Requests one after another: a prefill and its decode steps, and a pause of up to 30 ms."""
    kinds = [("prefill", prefill), *[("decode", decode)] * steps]
    # Pauses of unlike length, so that the steps do not keep time with the windows.
    passes: list[tuple[str, Kind, float]] = []
    for number in range(requests):
        passes += [(phase, kind, 0.2 * MS) for phase, kind in kinds]
        passes[-1] = (*passes[-1][:2], (3 + number * 7 % 27) * MS)
    ends = list(accumulate(kind.ms * MS + pause for _, kind, pause in passes))
    places = [
        (end - pause - kind.ms * MS, end - pause)
        for end, (_, kind, pause) in zip(ends, passes, strict=True)
    ]

    def script(value: str) -> Script:
        return Script(
            [
                Ran(begin, end, phase, getattr(kind, value))
                for (begin, end), (phase, kind, _) in zip(places, passes, strict=True)
            ]
        )

    windows = range(0, int(ends[-1]) - 100 * MS, 100 * MS)
    rows: list[dict[str, Any]] = []
    shares: Mapping[str, Metric] = {
        "sm": Metric.SM_ACTIVE,
        "tensor": Metric.TENSOR_ACTIVE,
        "dram": Metric.DRAM_ACTIVE,
    }
    for name, metric in shares.items() if counters else ():
        counter = script(name)
        rows += samples(
            [(at, at + 100 * MS, counter.mean(at, at + 100 * MS)) for at in windows], metric
        )
    # Some kernel ran, in every window: what `nvidia-smi` shows.
    rows += samples([(at, at + 100 * MS, 1.0) for at in windows], Metric.GPU_UTILIZATION)
    for metric, value in ((Metric.SM_CLOCK, ghz * 1e9), (Metric.THROTTLE, float(throttle))):
        rows += samples([(at, at + 100 * MS, value) for at in windows], metric, source="nvml")

    def columns(number: int, ran: Ran) -> dict[str, Any]:
        kind = passes[number][1]
        known = {"gflop": kind.tflop * 1e3, "gb": kind.gb} if work else {}
        return {"dtype": "bfloat16", **known}

    return trace_of(script("sm").passes, rows, meta, columns=columns)
