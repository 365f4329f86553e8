"""How often `phaseprof compare` raises a false alarm, and what it finds: simulated pairs of runs whose truth is known.

    python benchmarks/compare_calibration.py -o benchmarks/results/compare_calibration.json

A run is made pass by pass. Its noise has what real runs have: a level of its own (`run_noise`), a drift from repeat to
repeat (an autoregression), passes that are like the one before, and a few slow ones. Pairs of the same thing tell the
rate of false alarms; pairs of which the second decodes 8 % slower tell what is found. A server's run never pauses
between its requests, so that it is cut into stretches of time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from traces import MS, Timeline

from phaseprof.analyzers.comparing.compare import delta
from phaseprof.analyzers.comparing.metrics import catalogue, figures
from phaseprof.analyzers.comparing.results import Call, Delta, Outcome
from phaseprof.analyzers.comparing.rules import judge, parse
from phaseprof.analyzers.comparing.sample import Sample, sample_of
from phaseprof.analyzers.report import build_report

#: What is looked at in each pair.
PATHS = (
    *("prefill.pass_ms.p50", "decode.pass_ms.p50", "decode.pass_ms.p90", "decode.pass_ms.mean"),
    *("decode.output_tokens_per_s", "requests.ttft_ms.p50", "requests.tpot_ms.p50"),
    *("requests.itl_ms.p50", "requests.e2e_ms.p50"),
)
#: What `compare` is told of the noise of runs: what the simulated ones have.
RUN_NOISE = 0.02
#: The acceptance rule, and one at no change at all: it is broken by every interval that misses zero on one side.
TEN_PERCENT = tuple(
    parse(f"{path} > +10%") for path in PATHS if path != "decode.output_tokens_per_s"
)


@dataclass(frozen=True, slots=True)
class Noise:
    """What a run is made with, as standard deviations of logarithms.

    Attributes:
        run: Of the level of a run. drift: Of the drift over repeats. persistence: Of the drift, from one to the next.
        passes: Of a pass. likeness: Of a pass to the one before.
        slow: Share of passes that take twice as long.
    """

    run: float = 0.02
    drift: float = 0.03
    persistence: float = 0.7
    passes: float = 0.04
    likeness: float = 0.5
    slow: float = 0.01


class _Drift:
    """An autoregression with a given spread in the long run."""

    def __init__(self, chance: random.Random, spread: float, persistence: float) -> None:
        self._chance, self._spread, self._persistence = chance, spread, persistence
        self._value = chance.gauss(0, spread)

    def next(self) -> float:
        fresh = self._spread * math.sqrt(1 - self._persistence**2)
        self._value = self._persistence * self._value + self._chance.gauss(0, fresh)
        return self._value


def calls(seed: str, repeats: int, noise: Noise, decode: float = 1.0) -> Timeline:
    """A run of calls one after another, 24 steps each, whose decode steps take `decode` times as long."""
    chance = random.Random(seed)
    run = chance.gauss(0, noise.run)
    drift = _Drift(chance, noise.drift, noise.persistence)
    step = _Drift(chance, noise.passes, noise.likeness)
    timeline = Timeline(gap_ns=MS // 4)
    for number in range(repeats):
        level = run + drift.next()

        def ms(base: float, level: float = level) -> float:
            slow = 2.0 if chance.random() < noise.slow else 1.0
            return base * slow * math.exp(level + step.next())

        begin, name = timeline.now_ns, f"r{number}"
        timeline.add("prefill", ms(60), gflop=30, gb=0.2, tokens=256, request=name)
        first = timeline.now_ns - timeline.gap_ns
        ends = [first]
        for past in range(256, 280):
            timeline.add(
                "decode", ms(5 * decode), gflop=0.1, gb=0.2, request=name, past=past, prompt=256
            )
            ends.append(timeline.now_ns - timeline.gap_ns)
        gaps = [b - a for a, b in pairwise(ends)]
        timeline.request(
            name,
            arrival_ns=begin,
            first_token_ns=first,
            finished_ns=ends[-1],
            ttft_ns=first - begin,
            tpot_ns=sum(gaps) // len(gaps),
            itl_ns=gaps,
            prompt_tokens=256,
            output_tokens=25,
        )
        timeline.now_ns += 5 * MS
    return timeline


def server(seed: str, requests: int, noise: Noise, decode: float = 1.0) -> Timeline:
    """A run in which the next request always comes before the last one ends: eight are served at a time."""
    chance = random.Random(seed)
    run = chance.gauss(0, noise.run)
    drift = _Drift(chance, noise.drift, 0.98)
    step = _Drift(chance, noise.passes, noise.likeness)
    timeline = Timeline(gap_ns=MS // 4)
    alive: dict[str, list[int]] = {}
    begun: dict[str, int] = {}
    number = 0

    def ms(base: float) -> float:
        slow = 2.0 if chance.random() < noise.slow else 1.0
        return base * slow * math.exp(run + drift.next() + step.next())

    while number < requests or alive:
        if number < requests and len(alive) < 8:
            name = f"r{number}"
            begun[name] = timeline.now_ns
            timeline.add("prefill", ms(20), gflop=10, gb=0.2, tokens=128, request=name)
            alive[name] = [timeline.now_ns - timeline.gap_ns]
            number += 1
        n = len(alive)
        timeline.add(
            "decode",
            ms((4 + 0.1 * n) * decode),
            gflop=0.1 * n,
            gb=0.2,
            tokens=n,
            sequences=n,
            past=128,
            prompt=128,
        )
        for name in list(alive):
            ends = alive[name]
            ends.append(timeline.now_ns - timeline.gap_ns)
            if len(ends) > 24:
                gaps = [b - a for a, b in pairwise(ends)]
                timeline.request(
                    name,
                    arrival_ns=begun[name],
                    first_token_ns=ends[0],
                    finished_ns=ends[-1],
                    ttft_ns=ends[0] - begun[name],
                    tpot_ns=sum(gaps) // len(gaps),
                    itl_ns=gaps,
                    prompt_tokens=128,
                    output_tokens=25,
                )
                del alive[name]
    return timeline


def sample(timeline: Timeline, side: int) -> Sample:
    """A run as it is compared."""
    trace = timeline.trace()
    return sample_of(trace, build_report(trace), side)


def deltas(a: Sample, b: Sample, run_noise: float = RUN_NOISE) -> dict[str, Delta]:
    """The figures that are looked at."""
    return {
        metric.path: delta(metric, *figures(a, b, metric), run_noise)
        for metric in catalogue(a, b)
        if metric.path in PATHS
    }


def _truth(path: str, decode: float) -> float | None:
    """How many times as large a figure is where decode steps take `decode` times as long; None if it depends."""
    if decode == 1.0 or path.startswith(("prefill.", "requests.ttft")):
        return 1.0
    if path.startswith("decode.pass_ms"):
        return decode
    return 1 / decode if path == "decode.output_tokens_per_s" else None


@dataclass(slots=True)
class Tally:
    """What came of the pairs of one case.

    Attributes:
        breaches: Breaches of the rule at 10 %, over all figures.
        pairs_breached: Pairs with at least one.
        missed: Of each figure, intervals on which the true change does not lie.
        worse, better: Of each figure, how often it was called so.
    """

    pairs: int = 0
    breaches: int = 0
    pairs_breached: int = 0
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, 0))
    worse: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, 0))
    better: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, 0))
    half_widths: dict[str, float] = field(default_factory=dict)


def run_case(
    kind: str, size: int, pairs: int, *, decode: float = 1.0, noise: Noise | None = None
) -> Tally:
    """So many pairs of runs, of which the second decodes `decode` times as long."""
    noise = noise or Noise()
    make = calls if kind == "calls" else server
    found = Tally()
    widths: dict[str, list[float]] = {path: [] for path in PATHS}
    for pair in range(pairs):
        a = sample(make(f"{kind}:{size}:{pair}:a", size, noise), 0)
        b = sample(make(f"{kind}:{size}:{pair}:b", size, noise, decode), 1)
        of = deltas(a, b)
        found.pairs += 1
        broken = [
            rule.path
            for rule in TEN_PERCENT
            if judge(rule, list(of.values()), RUN_NOISE).outcome is Outcome.BREACH
        ]
        found.breaches += len(broken)
        found.pairs_breached += bool(broken)
        for path, each in of.items():
            if each.low is None or each.high is None:
                continue
            truth = _truth(path, decode)
            if truth is not None and not each.low <= truth - 1 <= each.high:
                found.missed[path] += 1
            found.worse[path] += each.call is Call.WORSE
            found.better[path] += each.call is Call.BETTER
            widths[path].append((each.high - each.low) / 2)
    found.half_widths = {
        path: sorted(values)[len(values) // 2] for path, values in widths.items() if values
    }
    return found


CASES = (
    ("calls", 4, 1.0, None),
    ("calls", 8, 1.0, None),
    ("calls", 32, 1.0, None),
    ("calls", 8, 1.0, Noise(run=0.0, drift=0.05, persistence=0.0)),
    ("server", 64, 1.0, None),
    ("calls", 8, 1.08, Noise(run=0.005, drift=0.01, passes=0.03)),
    ("calls", 16, 1.08, Noise(run=0.005, drift=0.01, passes=0.03)),
    ("calls", 16, 1.08, None),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--only", help="calls or server")
    options = parser.parse_args()
    begun = time.perf_counter()
    cases = []
    for kind, size, decode, noise in CASES:
        if options.only in (None, kind):
            tally = run_case(kind, size, options.pairs, decode=decode, noise=noise)
            cases.append(
                {
                    "kind": kind,
                    "size": size,
                    "decode_factor": decode,
                    "noise": asdict(noise or Noise()),
                    **asdict(tally),
                }
            )
            print(kind, size, decode, tally, file=sys.stderr)
    result = {
        "benchmark": "compare_calibration",
        "pairs": options.pairs,
        "assumed_run_noise": RUN_NOISE,
        "seconds": round(time.perf_counter() - begun, 1),
        "cases": cases,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
