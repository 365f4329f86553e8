"""Rules of the form ``decode.tpot_ms.p50 > +5%``: what must not happen, and whether it did.

The grammar is in docs/compare.md. A rule is breached where the change is beyond the limit and so is the whole 95 %
interval: a change that lies at the limit breaches it in one of forty comparisons, a smaller one in fewer.
"""

from __future__ import annotations

import difflib
import enum
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from phaseprof.analyzers.comparing.metrics import (
    ALIASES,
    LATENCIES,
    SAME_BATCH,
    STATISTICS,
    catalogue,
)
from phaseprof.analyzers.comparing.resampling import half_width
from phaseprof.analyzers.comparing.results import (
    Call,
    Delta,
    Figure,
    Judged,
    Metric,
    Outcome,
    Unit,
)
from phaseprof.analyzers.wording import number, sentence
from phaseprof.errors import UsageError

_FORM = re.compile(
    r"^\s*(?P<metric>[\w.\-]+)\s*(?P<sign>>=|<=|>|<)\s*(?P<plus>[+-]?)\s*(?P<limit>\d+(?:\.\d+)?|\.\d+)\s*"
    r"(?P<unit>[A-Za-zµμ/%]*)\s*$"
)
_EXAMPLE = "For example: decode.tpot_ms.p50 > +5%, requests.ttft_ms.p99 > 200ms, decode.mbu < -3%"
_BATCH = re.compile(r"^by_batch\.(\d+)\.(.+)$")
#: The units that a limit may have, what each is in the unit of the figure, and the figures that it fits.
_UNITS: dict[str, tuple[float, Unit]] = {
    "ns": (1e-6, Unit.MS),
    "us": (1e-3, Unit.MS),
    "µs": (1e-3, Unit.MS),
    "μs": (1e-3, Unit.MS),
    "ms": (1.0, Unit.MS),
    "s": (1e3, Unit.MS),
    "tok/s": (1.0, Unit.TOKENS_PER_S),
    "tokens/s": (1.0, Unit.TOKENS_PER_S),
    "gflop/s": (1e-3, Unit.TFLOPS),
    "tflop/s": (1.0, Unit.TFLOPS),
    "gb/s": (1.0, Unit.GB_PER_S),
    "tb/s": (1e3, Unit.GB_PER_S),
    "pp": (0.01, Unit.SHARE),
    "%": (0.01, Unit.SHARE),
    "w": (1.0, Unit.WATT),
    "mj/token": (1e-3, Unit.JOULES_PER_TOKEN),
    "j/token": (1.0, Unit.JOULES_PER_TOKEN),
}
_FITTING = {
    Unit.MS: "ns, us, ms or s",
    Unit.TOKENS_PER_S: "tok/s",
    Unit.TFLOPS: "GFLOP/s or TFLOP/s",
    Unit.GB_PER_S: "GB/s or TB/s",
    Unit.SHARE: "% or, for a difference of shares, pp",
    Unit.WATT: "W",
    Unit.JOULES_PER_TOKEN: "J/token or mJ/token",
}


class Kind(enum.StrEnum):
    """What a limit is held against."""

    #: The change as a share of the first trace: ``+5%``.
    RELATIVE = "relative change"
    #: The change in the figure's own unit: ``+20ms``, ``-2pp``.
    ABSOLUTE = "absolute change"
    #: The figure of the second trace: ``200ms``.
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Rule:
    """What must not happen.

    Attributes:
        text: As it was written. path: Of the figure, aliases resolved.
        above: Whether it is breached above the limit, else below.
        kind: What the limit is held against. limit: In the unit of the figure; of a relative change a fraction.
    """

    text: str
    path: str
    above: bool
    kind: Kind
    limit: float


def parse(text: str) -> Rule:
    """Read a rule.

    Raises:
        UsageError: If it is none, names an unknown figure, or its limit does not fit the figure.
    """
    form = _FORM.match(text)
    if form is None:
        raise UsageError(f"{text!r} is no rule: METRIC > LIMIT or METRIC < LIMIT.", _EXAMPLE)
    metric = _metric(form["metric"], text)
    sign = {"+": 1.0, "-": -1.0, "": 1.0}[form["plus"]]
    limit, unit = sign * float(form["limit"]), form["unit"]
    above = form["sign"].startswith(">")
    if unit == "%" and form["plus"]:
        return Rule(text.strip(), metric.path, above, Kind.RELATIVE, limit / 100)
    known = _UNITS.get(unit.lower())
    if unit == "%" and metric.unit is not Unit.SHARE:
        raise UsageError(
            f"{text!r}: is {limit:g} % a change? {metric.path} is in {metric.unit.value}.",
            f"Write +{limit:g}% or -{limit:g}% for a change.",
        )
    if known is None or known[1] is not metric.unit or (unit.lower() == "pp" and not form["plus"]):
        said = f"{unit!r} does not fit" if unit else "the limit has no unit"
        raise UsageError(
            f"{text!r}: {said}; {metric.path} is in {metric.unit.value}.",
            f"Use {_FITTING[metric.unit]}, or a change such as +5%.",
        )
    kind = Kind.ABSOLUTE if form["plus"] else Kind.VALUE
    return Rule(text.strip(), metric.path, above, kind, limit * known[0])


def _metric(name: str, text: str) -> Metric:
    """The figure that a rule names: by its path, by an alias, with p50 where no statistic is named."""
    path = name.lower()
    batch = _BATCH.match(path)
    inner = batch[2] if batch else path
    known = {metric.path: metric for metric in catalogue()}
    for candidate in _candidates(inner):
        found = known.get(candidate)
        if found is not None and batch is None:
            return found
        if found is not None and found.group != "requests" and found.name != SAME_BATCH and batch:
            prefix = f"by_batch.{int(batch[1])}."
            return Metric(
                prefix + found.path,
                found.unit,
                found.better,
                found.group,
                int(batch[1]),
                found.name,
            )
    near = _near(inner, [*known, *ALIASES])
    raise UsageError(
        f"{text!r}: there is no figure {name!r}.",
        f"Near ones: {', '.join(near)}." if near else "`phaseprof compare A B --json` lists them.",
    )


def _candidates(path: str) -> Iterable[str]:
    """What a name may stand for."""
    yield path
    head, _, last = path.rpartition(".")
    if last in STATISTICS and head in ALIASES:
        yield f"{ALIASES[head]}.{last}"
    resolved = ALIASES.get(path, path)
    yield resolved
    yield f"{resolved}.p50"


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Names that are alike: by their letters, or by what they end in."""
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.6)
    parts = {part for part in name.split(".") if part not in STATISTICS}
    stems = {latency.removesuffix("_ms") for latency in LATENCIES}
    alike = [
        each
        for each in known
        if any(
            part in each.split(".") or (part in stems and f"{part}_ms" in each.split("."))
            for part in parts - {"requests", "prefill", "decode", "mixed"}
        )
    ]
    return list(dict.fromkeys([*close, *alike]))[:5]


# --- judging --------------------------------------------------------------------------------------


def judge(rule: Rule, deltas: Sequence[Delta], run_noise: float) -> Judged:
    """Whether a rule was breached.

    Args:
        rule: Which.
        deltas: All figures of the comparison.
        run_noise: As `compare` takes it.
    """
    delta = next((each for each in deltas if each.metric.path == rule.path), None)
    if delta is None:
        metric = _metric(rule.path, rule.text)
        lacking = "neither trace has it"
        nothing = Figure(None, lacking=lacking)
        missing = Delta(metric, nothing, nothing, None, None, None, Call.NOT_COMPARED, lacking)
        return Judged(rule.text, Outcome.NOT_JUDGED, missing, sentence(lacking))
    found = _measured(rule, delta, run_noise)
    if found is None:
        why = delta.why or delta.b.lacking or "nothing tells how sure it is"
        return Judged(rule.text, Outcome.NOT_JUDGED, delta, sentence(why))
    point, low, high = found
    beyond = point > rule.limit if rule.above else point < rule.limit
    said = _said(rule, delta, point, low, high)
    if not beyond:
        return Judged(rule.text, Outcome.KEPT, delta, sentence(said))
    if low is None or high is None:
        why = f"{said}, and nothing tells how sure that is: {delta.why or delta.b.lacking}"
        return Judged(rule.text, Outcome.NOT_CERTAIN, delta, sentence(why))
    if low > rule.limit if rule.above else high < rule.limit:
        return Judged(rule.text, Outcome.BREACH, delta, sentence(said))
    why = f"{said}: beyond the limit, and not beyond the noise"
    return Judged(rule.text, Outcome.NOT_CERTAIN, delta, sentence(why))


def _measured(
    rule: Rule, delta: Delta, run_noise: float
) -> tuple[float, float | None, float | None] | None:
    """What the limit is held against, and its 95 % interval; None if there is nothing."""
    a, b = delta.a, delta.b
    if rule.kind is Kind.VALUE:
        if b.value is None:
            return None
        if b.error is None or b.value <= 0:
            return b.value, None, None
        half = half_width((b.error, b.freedom), (run_noise, math.inf))
        return b.value, b.value * math.exp(-half), b.value * math.exp(half)
    if delta.call is Call.NOT_COMPARED:
        return None
    if rule.kind is Kind.RELATIVE:
        return None if delta.change is None else (delta.change, delta.low, delta.high)
    if a.value is None or b.value is None:
        return None
    point = b.value - a.value
    if a.error is None or b.error is None:
        return point, None, None
    half = half_width(
        (a.value * a.error, a.freedom),
        (b.value * b.error, b.freedom),
        (math.hypot(a.value, b.value) * run_noise, math.inf),
    )
    return point, point - half, point + half


def _said(rule: Rule, delta: Delta, point: float, low: float | None, high: float | None) -> str:
    """``+8.1 % (+5.9 % to +10.4 %)``, ``212 ms (203 ms to 221 ms)``."""
    show = _percent if rule.kind is Kind.RELATIVE else _shower(rule, delta.metric.unit)
    between = "" if low is None or high is None else f" ({show(low)} to {show(high)})"
    return f"{show(point)}{between}"


def _percent(change: float) -> str:
    return f"{'+' if change >= 0 else chr(0x2212)}{abs(change) * 100:.1f} %"


def _shower(rule: Rule, unit: Unit) -> Callable[[float], str]:
    def show(value: float) -> str:
        sign = ""
        if rule.kind is Kind.ABSOLUTE:
            sign = "+" if value >= 0 else "\N{MINUS SIGN}"
            value = abs(value)
        if unit is Unit.SHARE:
            return f"{sign}{value * 100:.1f} {'points' if sign else '%'}"
        return f"{sign}{number(value)} {unit.value}"

    return show
