"""What speaks against a verdict: roofs, shares and passes that are less sure than they look."""

from __future__ import annotations

from phaseprof.analyzers import thresholds
from phaseprof.analyzers.case import Case
from phaseprof.analyzers.results import Bound, Confidence, Provenance, Roof
from phaseprof.analyzers.roofline import RoofTimes
from phaseprof.analyzers.wording import count, data, number, percent, sentence
from phaseprof.trace.meta import Ceilings


def explain_excess(case: Case, roofs: RoofTimes, ceilings: Ceilings) -> None:
    """A share above 100 % is never shown without its explanation."""
    spread = ceilings.spread or 0.0
    for roof, needed_s in ((Roof.COMPUTE, roofs.compute_s), (Roof.BANDWIDTH, roofs.memory_s)):
        share = needed_s / case.time_s
        if share <= 1:
            continue
        lead = f"{percent(share)} of the {roof} roof is above it"
        if share <= 1 + spread:
            text = f"{lead}, but within the ±{percent(spread)} to which the roof is known"
            case.say(text, Provenance.MEASURED)
        else:
            far = share >= thresholds.FAR_ABOVE_ROOF.value
            text = f"{lead}: {_excess_reason(case, roof, ceilings)}"
            case.doubt(Confidence.LOW if far else Confidence.MEDIUM, text, Provenance.MODELLED)
        case.excess.append(sentence(text))


def _excess_reason(case: Case, roof: Roof, ceilings: Ceilings) -> str:
    again = "; measure the roof again (`phaseprof calibrate`) on a quiet machine"
    if roof is Roof.BANDWIDTH:
        assert case.moved_bytes is not None
        per_pass = case.moved_bytes / case.passes
        if per_pass <= thresholds.CACHE_RESIDENT_BYTES.value:
            return (
                f"the {data(per_pass)} of a {case.noun} are smaller than many a last-level cache and can stay in it, "
                "so that memory is not read each time: the memory roof does not hold for it"
            )
        if ceilings.source == "measured":
            return (
                "the roof was measured while the memory was slower or shared, or a part of the bytes stayed in a cache"
                + again
            )
        return (
            "a part of the bytes stayed in a cache, or the datasheet names a slower memory variant"
        )
    if ceilings.source == "measured":
        return "the device ran at a higher clock than when its roof was measured" + again
    return (
        "the device boosts above the clock of the datasheet's dense peak, or it multiplied sparse or "
        "lower-precision matrices, for which the peak is higher"
    )


def doubt_roofs(case: Case, roofs: RoofTimes, ceilings: Ceilings, bound: Bound) -> None:
    """Roofs that were not measured or differ between repeats, and two that are close to each other.

    Counters that confirm the class make up for the first: what was measured does not depend on the roofs.
    """
    confirmed = Confidence.HIGH if case.hearing.confirmed else None
    if ceilings.source != "measured":
        case.doubt(
            confirmed or Confidence.MEDIUM,
            f"the roofs are {ceilings.source} values, not measured on this device; sustained peaks are lower",
            Provenance.DATASHEET,
        )
    elif ceilings.spread is not None and ceilings.spread > thresholds.ROOF_SPREAD.value:
        wide = ceilings.spread > thresholds.ROOF_SPREAD_WIDE.value
        case.doubt(
            confirmed or (Confidence.LOW if wide else Confidence.MEDIUM),
            f"repeats of the roofs spread by ±{percent(ceilings.spread)}; measure them on a quiet machine",
            Provenance.MEASURED,
        )
    if bound not in (Bound.COMPUTE, Bound.BANDWIDTH):
        return
    if roofs.closeness >= thresholds.RIDGE.value:
        tie = roofs.closeness >= thresholds.RIDGE_TIE.value
        case.doubt(
            Confidence.LOW if tie else Confidence.MEDIUM,
            f"the other roof needs {percent(roofs.closeness)} of the nearer one's time: the work lies near the ridge, "
            "where compute and bandwidth bind together",
            Provenance.MODELLED,
        )


def doubt_threshold(case: Case, ceilings: Ceilings, explained: float) -> None:
    """An explained share that repeats or the error of the roofs may carry to the other side."""
    enough = thresholds.ENOUGH_EXPLAINED.value
    margin = max(thresholds.NEAR_ENOUGH_EXPLAINED.value, explained * (ceilings.spread or 0.0))
    if abs(explained - enough) <= margin:
        side = "above" if explained >= enough else "below"
        near = abs(explained - enough) <= thresholds.NEAR_ENOUGH_EXPLAINED.value
        how = f"just {side}" if near else f"{side}, by less than the error of the roofs,"
        case.doubt(
            Confidence.MEDIUM,
            f"{percent(explained)} is {how} the {percent(enough)} from which a roof counts as the bound",
            Provenance.MODELLED,
        )


def doubt_passes(case: Case) -> None:
    """Few, cold or uneven passes, and work that is known for a part of them."""
    known = case.known
    if known.passes is not None and known.passes < thresholds.FEW_PASSES.value:
        too_few = known.passes < thresholds.TOO_FEW_PASSES.value
        case.doubt(
            Confidence.LOW if too_few else Confidence.MEDIUM,
            f"only {count(known.passes, 'pass')} of this phase could be counted",
            Provenance.COUNTED,
        )
    if known.cold_passes:
        case.doubt(
            Confidence.MEDIUM,
            "the first pass of the phase, with cold caches, is counted for want of others",
            Provenance.COUNTED,
        )
    spread = known.pass_spread
    if spread is not None and spread > thresholds.PASS_SPREAD.value:
        wide = spread > thresholds.PASS_SPREAD_WIDE.value
        shared = ", as when other processes take the cores" if known.device_kind == "cpu" else ""
        case.doubt(
            Confidence.LOW if wide else Confidence.MEDIUM,
            f"the passes differ: the 90th percentile takes {number(spread)}x the median, each against its own "
            f"roof{shared}",
            Provenance.MEASURED,
        )
    if known.known_share < 1:
        case.doubt(
            Confidence.MEDIUM,
            f"the work is known for {percent(known.known_share)} of the time; the rest is left out",
            Provenance.COUNTED,
        )
