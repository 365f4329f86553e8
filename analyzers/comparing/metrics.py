"""The figures that are compared: their names, their units, and how each is read from a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from phaseprof.analyzers.comparing.results import Better, Figure, Metric, Unit
from phaseprof.analyzers.comparing.sample import PhaseSample, Sample
from phaseprof.analyzers.comparing.series import BEYOND, Distribution, Ratio, SameBatch
from phaseprof.analyzers.counters.counter_results import CounterFigure
from phaseprof.analyzers.kernels.kernel_results import KernelClass
from phaseprof.analyzers.results import PhaseFigures
from phaseprof.phases import Phase

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
STATISTICS = ("mean", *PERCENTILES)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms")
#: The mean time of a pass at equal batch sizes.
SAME_BATCH = "pass_ms.same_batch"

_L, _H, _N = Better.LOWER, Better.HIGHER, Better.NEITHER

#: Figures of a phase that come from its passes, by name; latencies of a pass apart.
_RATIOS: dict[str, tuple[Unit, Better]] = {
    "between_ms": (Unit.MS, _L),
    "prompt_tokens_per_s": (Unit.TOKENS_PER_S, _H),
    "output_tokens_per_s": (Unit.TOKENS_PER_S, _H),
    "tflops": (Unit.TFLOPS, _H),
    "gb_per_s": (Unit.GB_PER_S, _H),
    "mfu": (Unit.SHARE, _H),
    "mbu": (Unit.SHARE, _H),
    "busy_share": (Unit.SHARE, _H),
}
_COUNTERS: dict[str, tuple[Unit, Better]] = {
    "sm_active": (Unit.SHARE, _N),
    "sm_occupancy": (Unit.SHARE, _N),
    "tensor_active": (Unit.SHARE, _N),
    "dram_active": (Unit.SHARE, _N),
    "power_w": (Unit.WATT, _N),
    "joules_per_token": (Unit.JOULES_PER_TOKEN, _L),
}
_KERNELS = {f"kernels.{each.value}.ms_per_pass": (Unit.MS, _L) for each in KernelClass}

#: What people call a figure, and its path.
ALIASES = {
    **{
        f"{name}{suffix}": f"requests.{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2e", "queue")
        for suffix in ("", "_ms")
    },
    "prefill.ttft_ms": "requests.ttft_ms",
    "decode.tpot_ms": "requests.tpot_ms",
    "decode.itl_ms": "requests.itl_ms",
    "prefill.tokens_per_s": "prefill.prompt_tokens_per_s",
    "decode.tokens_per_s": "decode.output_tokens_per_s",
    "decode.step_ms": "decode.pass_ms",
    "mixed.step_ms": "mixed.pass_ms",
}


def catalogue(*samples: Sample) -> Iterator[Metric]:
    """Every figure that one of the samples could have, in the order of a table.

    Without samples: those of each phase and of requests, without single batch sizes.
    """
    for phase in Phase:
        if not samples or any(phase.value in each.phases for each in samples):
            yield from _of_phase(phase.value, None)
            for batch in sorted({n for each in samples for n in each.by_batch}):
                if any(phase.value in each.by_batch.get(batch, {}) for each in samples):
                    yield from _of_phase(phase.value, batch)
    for name in LATENCIES:
        for statistic in STATISTICS:
            path = f"{name}.{statistic}"
            yield Metric(f"requests.{path}", Unit.MS, _L, "requests", None, path)


def _of_phase(phase: str, batch: int | None) -> Iterator[Metric]:
    prefix = phase if batch is None else f"by_batch.{batch}.{phase}"
    names = {f"pass_ms.{statistic}": (Unit.MS, _L) for statistic in STATISTICS}
    if batch is None:
        names[SAME_BATCH] = (Unit.MS, _L)
    for name, (unit, better) in {**names, **_RATIOS, **_COUNTERS, **_KERNELS}.items():
        yield Metric(f"{prefix}.{name}", unit, better, phase, batch, name)


def figures(a: Sample, b: Sample, metric: Metric) -> tuple[Figure, Figure]:
    """The figure in both traces."""
    if metric.group == "requests":
        return _latency(a, metric.name), _latency(b, metric.name)
    if metric.name == SAME_BATCH:
        return _same_batch(a, b, metric.group)
    return _phase_figure(a, metric), _phase_figure(b, metric)


def _latency(sample: Sample, path: str) -> Figure:
    if sample.requests is None:
        return Figure(None, lacking="it has no request")
    name, _, statistic = path.partition(".")
    found = sample.requests.latencies.get(name)
    if found is None:
        return Figure(None, lacking="none of its requests has one")
    return _statistic(sample, found, statistic)


def _statistic(sample: Sample, found: Distribution, statistic: str) -> Figure:
    if not found.count:
        return Figure(None, lacking="there are none")
    if statistic == "mean":
        return _of(sample, found.mean, found.count)
    share = PERCENTILES[statistic]
    spread = found.spread(share, sample.draws)
    value = found.percentile(share)
    if spread is not None:
        return Figure(value, spread.error, spread.freedom, spread.blocks, found.count)
    needed = found.needed(share)
    why = (
        f"fewer than {BEYOND} of its {found.count} values lie beyond it: {needed} values are needed"
        if found.count < needed
        else "nothing in it was repeated"
    )
    return Figure(value, count=found.count, lacking=why)


def _of(sample: Sample, ratio: Ratio, count: int, scale: float = 1.0) -> Figure:
    value = ratio.value
    if value is None:
        return Figure(None, lacking="it is not known")
    spread = ratio.spread(sample.draws)
    if spread is None:
        return Figure(value * scale, count=count, lacking="nothing in it was repeated")
    return Figure(value * scale, spread.error, spread.freedom, spread.blocks, count)


def _same_batch(a: Sample, b: Sample, phase: str) -> tuple[Figure, Figure]:
    sizes = [{n for n, of in each.by_batch.items() if phase in of} for each in (a, b)]
    common = sorted(sizes[0] & sizes[1])
    if not common or len(sizes[0] | sizes[1]) == 1:
        why = "they have no batch sizes in common, or only one"
        return Figure(None, lacking=why), Figure(None, lacking=why)
    # As many as the trace with fewer has: a size that hardly occurs says little of either.
    shared = [min(a.by_batch[n][phase].passes, b.by_batch[n][phase].passes) for n in common]
    weights = tuple(each / sum(shared) for each in shared)
    return _mean_of(a, phase, common, weights), _mean_of(b, phase, common, weights)


def _mean_of(sample: Sample, phase: str, batches: list[int], weights: tuple[float, ...]) -> Figure:
    found = SameBatch(tuple(sample.by_batch[n][phase].pass_ms.mean for n in batches), weights)
    spread = found.spread(sample.draws)
    count = sum(sample.by_batch[n][phase].passes for n in batches)
    if spread is None:
        return Figure(found.value, count=count, lacking="nothing in it was repeated")
    return Figure(found.value, spread.error, spread.freedom, spread.blocks, count)


def _phase_figure(sample: Sample, metric: Metric) -> Figure:
    report = sample.report
    if metric.batch is None:
        own, told = sample.phases.get(metric.group), report.phases.get(metric.group)
    else:
        own = sample.by_batch.get(metric.batch, {}).get(metric.group)
        told = report.by_batch.get(metric.batch, {}).get(metric.group)
    if own is None or told is None or not own.passes:
        return Figure(None, lacking="it has no such pass")
    if metric.name.startswith("pass_ms."):
        return _statistic(sample, own.pass_ms, metric.name.removeprefix("pass_ms."))
    if metric.name.startswith("kernels."):
        return _kernels(told, metric.name.split(".")[1])
    if metric.name in _COUNTERS:
        return _counter(told, metric.name)
    return _READ[metric.name](sample, own, told)


def _busy(sample: Sample, own: PhaseSample, told: PhaseFigures) -> Figure:
    if told.busy_ms is None or not told.span_ms:
        return Figure(None, lacking="no pass was recorded with a kernel timeline")
    return Figure(told.busy_ms / told.span_ms, lacking="it comes from a few profiled passes")


def _rate(name: str) -> Callable[[Sample, PhaseSample, PhaseFigures], Figure]:
    def read(sample: Sample, own: PhaseSample, told: PhaseFigures) -> Figure:
        ratio: Ratio = getattr(own, name)
        return _of(sample, ratio, own.passes) if ratio.value else Figure(None, lacking="none")

    return read


def _work(name: str, scale: float) -> Callable[[Sample, PhaseSample, PhaseFigures], Figure]:
    def read(sample: Sample, own: PhaseSample, told: PhaseFigures) -> Figure:
        if told.flops is None:
            return Figure(None, lacking="its FLOPs and bytes are not known")
        return _of(sample, getattr(own, name), own.passes, scale)

    return read


def _share(name: str, roof: str) -> Callable[[Sample, PhaseSample, PhaseFigures], Figure]:
    def read(sample: Sample, own: PhaseSample, told: PhaseFigures) -> Figure:
        ceilings = sample.report.ceilings
        if ceilings is None or (told.mfu is None and told.mbu is None):
            return Figure(None, lacking="its roofs or its work are not known")
        return _of(sample, getattr(own, name), own.passes, 1 / getattr(ceilings, roof))

    return read


_READ: dict[str, Callable[[Sample, PhaseSample, PhaseFigures], Figure]] = {
    "between_ms": _rate("between_ms"),
    "prompt_tokens_per_s": _rate("prompt_tokens_per_s"),
    "output_tokens_per_s": _rate("output_tokens_per_s"),
    "tflops": _work("flops_per_s", 1e-12),
    "gb_per_s": _work("bytes_per_s", 1e-9),
    "mfu": _share("flops_per_s", "flops_per_s"),
    "mbu": _share("bytes_per_s", "bytes_per_s"),
    "busy_share": _busy,
}


def _counter(told: PhaseFigures, name: str) -> Figure:
    found: CounterFigure | None = None if told.counters is None else getattr(told.counters, name)
    if found is None:
        return Figure(None, lacking="it was not sampled")
    if found.sure is None:
        return Figure(None, lacking=found.reason or "it is insufficient")
    if found.error is None or not found.sure:
        return Figure(found.sure, count=found.windows, lacking="its error is not known")
    # The error is half of a 95 % interval.
    return Figure(found.sure, found.error / 1.96 / found.sure, float("inf"), 0, found.windows)


def _kernels(told: PhaseFigures, kernel_class: str) -> Figure:
    found = told.kernels
    if found is None or not found.passes:
        return Figure(None, lacking="no pass was recorded with a kernel timeline")
    busy_ms = sum(e.busy_ms for e in found.classes if e.kernel_class.value == kernel_class)
    if not busy_ms:
        return Figure(None, lacking="no kernel is of this class")
    return Figure(
        busy_ms / found.passes, count=found.passes, lacking="it comes from a few profiled passes"
    )
