"""The comparison in words: what changed and by how much, what did not, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phaseprof.analyzers.comparing.environment import Surroundings
from phaseprof.analyzers.comparing.metrics import SAME_BATCH
from phaseprof.analyzers.comparing.results import (
    BoundChange,
    Call,
    Delta,
    Difference,
    KernelChange,
    Level,
    Topic,
)
from phaseprof.analyzers.results import Bound
from phaseprof.analyzers.wording import joined, number, pass_noun, percent, sentence
from phaseprof.phases import Phase

#: The order in which phases are told.
_PHASES = (Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.ENCODE, Phase.EXTEND)
#: Figures that tell how long a pass of a phase takes, the best first.
_TIMES = (SAME_BATCH, "pass_ms.p50", "pass_ms.mean")
_REQUESTS = {
    "requests.ttft_ms.p50": "TTFT",
    "requests.tpot_ms.p50": "TPOT",
    "requests.e2e_ms.p50": "the time of a request",
}
#: Differences that may be the reason of a change, in the order in which they are told.
_TOLD = (Topic.MODEL, Topic.WORKLOAD, Topic.SOFTWARE, Topic.MACHINE, Topic.SETUP)
_MOST_TOLD = 6
#: A class that changes with a share that moved by less than this lies at the edge of both.
_EDGE = 0.05


def verdict(
    deltas: Sequence[Delta],
    bounds: Sequence[BoundChange],
    kernels: Sequence[KernelChange],
    around: Surroundings,
) -> tuple[str, ...]:
    """The sentences, most important first. What does not compare is said before anything else by whoever shows
    `Comparison.reasons`."""
    by_path = {delta.metric.path: delta for delta in deltas}
    times = {phase: found for phase in _PHASES if (found := time_of(phase.value, by_path))}
    lines = []
    if around.level is not Level.SHARES:
        lines += [
            *_headline(times),
            *(_of_phase(phase, delta) for phase, delta in times.items()),
            *_of_requests(by_path),
        ]
    lines += [*_classes(bounds), *_grown(times, kernels), *_energy(by_path), _why(around)]
    return tuple(sentence(line) for line in lines)


def time_of(phase: str, by_path: dict[str, Delta]) -> Delta | None:
    """The figure that tells how long a pass of the phase takes: the first that is compared and has an interval, else
    the first of which both traces have a value."""
    found = [d for name in _TIMES if (d := by_path.get(f"{phase}.{name}")) is not None]
    for delta in found:
        if delta.low is not None:
            return delta
    both = [d for d in found if d.a.value is not None and d.b.value is not None]
    return next(iter(both or found), None)


# --- time -----------------------------------------------------------------------------------------


def _headline(times: dict[Phase, Delta]) -> Iterator[str]:
    """Which phases changed, in one breath."""
    worse = [p.value for p, d in times.items() if d.call is Call.WORSE]
    better = [p.value for p, d in times.items() if d.call is Call.BETTER]
    same = [p.value for p, d in times.items() if d.call is Call.UNCHANGED]
    unsure = [p.value for p, d in times.items() if d.call is Call.UNSURE]
    parts = []
    if worse:
        parts.append(f"{joined(worse)} {_is(worse)} slower")
    if better:
        parts.append(f"{joined(better)} {_is(better)} faster")
    if same:
        parts.append(f"{joined(same)} {_is(same)} unchanged")
    if unsure:
        parts.append(f"of {joined(unsure)} nothing is certain")
    if parts:
        yield ", ".join(parts)


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _of_phase(phase: Phase, delta: Delta) -> str:
    noun = pass_noun(phase)
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    name = phase.value.capitalize()
    at = ", at equal batch sizes," if delta.metric.name == SAME_BATCH else ""
    figures = f"{_ms(delta.a.value)} to {_ms(delta.b.value)}"
    if delta.call is Call.NOT_COMPARED:
        return f"{name} {plural} are not compared: {delta.why}"
    if delta.call is Call.UNCHANGED and delta.within is not None:
        return f"{name} {plural}{at} are unchanged within {_bound(delta.within)} ({figures})"
    if delta.call is Call.UNSURE:
        return f"{name} {plural}{at} went from {figures}, which is not certain: {_range(delta)}"
    return f"{name} {plural}{at} are {size(delta, figures)}"


def _of_requests(by_path: dict[str, Delta]) -> Iterator[str]:
    """Latencies that changed, and those that did not."""
    changed, same = [], []
    for path, name in _REQUESTS.items():
        delta = by_path.get(path)
        if delta is None:
            continue
        if delta.call in (Call.WORSE, Call.BETTER):
            figures = f"{_ms(delta.a.value)} to {_ms(delta.b.value)}"
            changed.append(f"{name} at p50 is {size(delta, figures)}")
        elif delta.call is Call.UNCHANGED and delta.within is not None:
            same.append(f"{name} within {_bound(delta.within)}")
    if changed:
        yield "; ".join(changed)
    if same:
        yield f"unchanged at p50: {joined(same)}"


def size(delta: Delta, figures: str) -> str:
    """``8.1 % longer: 4.0 ms to 4.3 ms (95 % interval of the change +5.9 % to +10.4 %)``."""
    assert delta.change is not None and delta.low is not None and delta.high is not None
    word = "longer" if delta.change > 0 else "shorter"
    interval = f"95 % interval of the change {signed(delta.low)} to {signed(delta.high)}"
    return f"{_share(abs(delta.change))} {word}: {figures} ({interval})"


def _range(delta: Delta) -> str:
    why = f", {delta.why}" if delta.why else ""
    if delta.low is None or delta.high is None or delta.change is None:
        return delta.why or "nothing tells how sure it is"
    return f"{signed(delta.change)}, between {signed(delta.low)} and {signed(delta.high)}{why}"


def signed(change: float) -> str:
    """``+8.1 %``, with a minus sign below zero."""
    sign = "+" if change >= 0 else "\N{MINUS SIGN}"
    return f"{sign}{_share(abs(change))}"


def _share(value: float) -> str:
    value *= 100
    return f"{value:.1f} %" if value < 99.95 else f"{value:,.0f} %"


def _bound(value: float) -> str:
    """The next whole percent above."""
    return f"{max(-(-value * 100 // 1), 1):.0f} %"


def _ms(value: float | None) -> str:
    return "nothing" if value is None else f"{number(value)} ms"


# --- why ------------------------------------------------------------------------------------------


def _classes(bounds: Sequence[BoundChange]) -> Iterator[str]:
    for each in bounds:
        if each.a is each.b or Bound.UNKNOWN in (each.a, each.b):
            continue
        doubt = "" if each.sure else ", with low confidence"
        shares = ""
        if each.a_explained is not None and each.b_explained is not None:
            if abs(each.a_explained - each.b_explained) < _EDGE * each.a_explained:
                doubt += ", at the edge between the two"
            shares = (
                f" (its nearer roof explains {percent(each.a_explained)} of the time, then "
                f"{percent(each.b_explained)})"
            )
        yield f"what bounds {each.phase} went from {each.a.value} to {each.b.value}{doubt}{shares}"


def _grown(times: dict[Phase, Delta], kernels: Sequence[KernelChange]) -> Iterator[str]:
    """Of each phase that changed: the class of kernels that moved most in the same direction."""
    for phase, delta in times.items():
        if delta.call not in (Call.WORSE, Call.BETTER):
            continue
        up = delta.call is Call.WORSE
        own = [each for each in kernels if each.phase == phase and (each.b_ms > each.a_ms) == up]
        if not own or own[0].b_ms == own[0].a_ms:
            continue
        first = own[0]
        what = "growth" if up else "decline"
        yield (
            f"in {phase.value} the kernels of class {first.kernel_class} moved most: {_ms(first.a_ms)} to "
            f"{_ms(first.b_ms)} a {pass_noun(phase)}, {percent(first.part)} of the {what} (from {first.a_passes} and "
            f"{first.b_passes} profiled passes)"
        )


def _energy(by_path: dict[str, Delta]) -> Iterator[str]:
    for phase in _PHASES:
        delta = by_path.get(f"{phase.value}.joules_per_token")
        if delta is not None and delta.call in (Call.WORSE, Call.BETTER):
            assert delta.change is not None and delta.low is not None and delta.high is not None
            yield (
                f"a token of {phase.value} takes {number(delta.b.value or 0.0)} J after {number(delta.a.value or 0.0)} "
                f"J: {signed(delta.change)} ({signed(delta.low)} to {signed(delta.high)})"
            )


def _why(around: Surroundings) -> str:
    """What was not the same around the runs."""
    told = [each for topic in _TOLD for each in around.differences if each.topic is topic]
    if not told:
        same = "versions, device, model and workload are the same in both"
        command = any(each.topic is Topic.COMMAND for each in around.differences)
        return f"{same}; the commands differ" if command else same
    shown = "; ".join(_difference(each) for each in told[:_MOST_TOLD])
    more = len(told) - _MOST_TOLD
    return f"not the same in both: {shown}{f'; and {more} more' if more > 0 else ''}"


def _difference(each: Difference) -> str:
    return f"{each.what} {each.a or 'not recorded'} → {each.b or 'not recorded'}"
