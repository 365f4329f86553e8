"""The thresholds of every verdict, in one place, each with its reason. `docs/classes.md` shows this table.

They were chosen from what is known of healthy and unhealthy runs, not fitted to any one machine. On CPUs in float32,
prefill reaches about 60 % of the measured matmul peak and decode about 55 % of the measured bandwidth; in bfloat16
their decode reaches about 25 % with the device busy. On GPUs, prefill of large models reaches 50-85 % and decode under
CUDA graphs 70-90 %, while eager decode at batch 1 was seen at 27 % with the device idle for 70 % of the time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number that a verdict depends on.

    Attributes:
        name: What it is called in the docs.
        value: The number; shares are fractions.
        reason: Why this number.
    """

    name: str
    value: float
    reason: str


ENOUGH_EXPLAINED = Threshold(
    "share of the time that a roof has to explain",
    0.5,
    "From here on the roof accounts for the majority of the time: nothing else can weigh more.",
)
IDLE_OF_UNEXPLAINED = Threshold(
    "share of the unexplained time that is idle, for overhead",
    0.5,
    "Time that no roof explains is either idle or spent in slow kernels; the larger part names the class.",
)
IDLE_WITHOUT_ROOFS = Threshold(
    "idle share that shows overhead when no roof is known",
    0.5,
    "Work at any roof needs a working device, so that no roof could explain the majority of the time.",
)
EXPOSED_COMMUNICATION = Threshold(
    "share of the time in exposed collectives, for communication",
    0.25,
    "Below a quarter of the time, removing them entirely gains less than a third in speed.",
)
TIMELINE_COVERAGE = Threshold(
    "busy share over explained share, below which the kernel timeline is not believed",
    0.9,
    "A device cannot do its work in less time than its roofs need; a tenth is left for the error of the roofs.",
)
RIDGE = Threshold(
    "ratio of the two roof times that makes the nearer roof uncertain",
    0.8,
    "Roofs and counts are good to about 10 % each: closer than that, either roof may be the nearer one.",
)
RIDGE_TIE = Threshold(
    "ratio of the two roof times that is a tie",
    0.95,
    "Within 5 %, a repeat of the calibration may turn the order.",
)
NEAR_ENOUGH_EXPLAINED = Threshold(
    "distance from the share that a roof has to explain which is too close to call",
    0.03,
    "Repeats of a run differ by a few percent.",
)
FAR_ABOVE_ROOF = Threshold(
    "explained share from which the roof is not believed to hold",
    1.3,
    "Boost clocks give up to 10 %; data in a last-level cache was seen at 106-129 % of the memory roof.",
)
CACHE_RESIDENT_BYTES = Threshold(
    "bytes of a pass that a last-level cache can hold",
    256e6,
    "L3 of server CPUs and L2 (or infinity cache) of GPUs reach 50-256 MB; larger passes must go to memory.",
)
ROOF_SPREAD = Threshold(
    "spread of a measured roof that lowers confidence",
    0.10,
    "Repeats of a quiet machine stay within a few percent.",
)
ROOF_SPREAD_WIDE = Threshold(
    "spread of a measured roof that makes confidence low",
    0.25,
    "Then the explained share may be off by a quarter of itself.",
)
FEW_PASSES = Threshold(
    "passes below which confidence is not high",
    5,
    "A 90th percentile of fewer than five passes is their slowest.",
)
TOO_FEW_PASSES = Threshold(
    "passes below which confidence is low",
    3,
    "Two passes show no spread, and one of them may be an accident.",
)
PASS_SPREAD = Threshold(
    "90th percentile over median of the passes' time that lowers confidence",
    1.5,
    "Measured against each pass's own roof time; steady passes of one kind stay within a few tens of percent.",
)
PASS_SPREAD_WIDE = Threshold(
    "90th percentile over median of the passes' time that makes confidence low",
    3.0,
    "Then one figure for all passes of the phase hides two kinds of passes.",
)
OTHERS_FOR_FIRST = Threshold(
    "other steady passes that must remain for the first pass to be set aside",
    3,
    "A cold pass says less than a warm one, but more than none.",
)
DOMINANT = Threshold(
    "share of the bytes (or FLOPs, or busy time) that makes one part the one to work on",
    0.5,
    "The larger part has the larger lever.",
)
BY_GRAPHS = Threshold(
    "share of the kernels launched by graphs from which graphs are no lever any more",
    0.8,
    "What is left to launch one by one cannot keep a device waiting for long.",
)
WIDER_DTYPE = Threshold(
    "roof time in a wider dtype over the present time, for that dtype to be named",
    0.55,
    "Healthy CPU runs in float32 take about 1/0.55 of their roof time: below it, the wider dtype would be faster.",
)
BATCH_GAIN = Threshold(
    "gain in tokens/s below which a larger batch is not named with a figure",
    2.0,
    "The modelled cost leaves out scheduling and slower kernels; a small modelled gain may not arrive.",
)
OTHER_MODELS = Threshold(
    "share of the time of all passes in other models that is mentioned",
    0.05,
    "Below, it does not change where to look first.",
)

ENGINE_OVERHEAD = Threshold(
    "share of the time with a request in which no step of an engine executes, that is mentioned",
    0.15,
    "Below, an engine without any overhead would gain less than a sixth.",
)
INTERFERENCE = Threshold(
    "share of the decode time lost to the prompts of others that is mentioned",
    0.1,
    "Below, the worst tokens may still be slow, but TPOT hardly is.",
)
KV_FULL = Threshold(
    "share of the KV cache in use from which it is what requests wait for",
    0.9,
    "A request needs a few blocks at once: the last tenth of a cache is rarely free for one.",
)

COUNTER_ERROR = Threshold(
    "95 % error of a counter's share in a phase from which on it is not shown as a figure",
    0.05,
    "Five points tell a saturated unit from a half idle one, and a tenth more batch from none.",
)
RATE_ERROR = Threshold(
    "95 % error of a power, an energy or a rate over the figure itself, likewise",
    0.10,
    "Sensors of boards are good to about 5 %; twice that still ranks two settings that differ by a fifth.",
)
COUNTER_WINDOWS = Threshold(
    "sample windows that have to hold some of a phase",
    6,
    "The spread of fewer windows is not known, and with it no error.",
)
COUNTER_BLOCKS = Threshold(
    "independent parts of a run that a counter's figure has to rest on",
    3,
    "With fewer, one unusual moment makes the figure and hides from its error.",
)
MEASURED_ROOF = Threshold(
    "measured share of a resource's peak from which it is what limits",
    0.6,
    "Sustained matmuls reach 80 % of the tensor cores' peak and streams 85-93 % of the interface's: at 60 % two thirds "
    "to three quarters of what can be reached are in use.",
)
MODEL_ERROR = Threshold(
    "error of a modelled share of a resource, as a part of it",
    0.15,
    "Counts and datasheet values are good to about 10 % each.",
)
MODEL_ERROR_ROOF = Threshold(
    "the same where the peak at the real clock is not known",
    0.25,
    "A measured roof lies up to 20 % below the peak that a counter's share is of, and clocks differ by as much.",
)
WITNESS_POINTS = Threshold(
    "least error of a modelled share, and slack of a measured one",
    0.05,
    "Counters in whole percents, averaged over the phase; small shares differ by tiles and launches alone.",
)
FAR_BELOW_MODEL = Threshold(
    "measured over modelled share below which the class is in question",
    0.5,
    "A resource that was used for less than half of what the work needs is hardly what limits.",
)
FEW_SMS = Threshold(
    "SM activity over busy time below which kernels fill few SMs",
    0.5,
    "Kernels with a block for each SM keep all of them active while they run.",
)
LOW_CLOCK = Threshold(
    "clock over that of the peak from which the difference is not mentioned",
    0.95,
    "Within 5 % it is less than the error of the roofs.",
)
THROTTLED = Threshold(
    "share of the time in which the clocks were held down that is mentioned",
    0.1,
    "Below, the clocks lower the figures by less than a tenth.",
)

#: All of them, in the order of the docs.
ALL: tuple[Threshold, ...] = (
    ENOUGH_EXPLAINED,
    IDLE_OF_UNEXPLAINED,
    IDLE_WITHOUT_ROOFS,
    EXPOSED_COMMUNICATION,
    TIMELINE_COVERAGE,
    RIDGE,
    RIDGE_TIE,
    NEAR_ENOUGH_EXPLAINED,
    FAR_ABOVE_ROOF,
    CACHE_RESIDENT_BYTES,
    ROOF_SPREAD,
    ROOF_SPREAD_WIDE,
    FEW_PASSES,
    TOO_FEW_PASSES,
    PASS_SPREAD,
    PASS_SPREAD_WIDE,
    OTHERS_FOR_FIRST,
    DOMINANT,
    BY_GRAPHS,
    WIDER_DTYPE,
    BATCH_GAIN,
    OTHER_MODELS,
    ENGINE_OVERHEAD,
    INTERFERENCE,
    KV_FULL,
    MEASURED_ROOF,
    MODEL_ERROR,
    MODEL_ERROR_ROOF,
    WITNESS_POINTS,
    FAR_BELOW_MODEL,
    FEW_SMS,
    LOW_CLOCK,
    THROTTLED,
    COUNTER_ERROR,
    RATE_ERROR,
    COUNTER_WINDOWS,
    COUNTER_BLOCKS,
)


def markdown() -> str:
    """The table as `docs/classes.md` shows it."""
    rows = [f"| {t.name} | {_plain(t.value)} | {t.reason} |" for t in ALL]
    return "\n".join(["| threshold | value | reason |", "|---|---|---|", *rows]) + "\n"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e6 else f"{value:g}"


if __name__ == "__main__":
    print(markdown(), end="")
