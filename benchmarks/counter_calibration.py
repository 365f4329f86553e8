"""How right counters per phase are: thousands of runs whose truth is known, solved from their slow samples.

    python benchmarks/counter_calibration.py -o benchmarks/results/counter_calibration.json
    python benchmarks/counter_calibration.py --draws 200

Each draw is a run of a generate loop, of a serving engine, or of one with hardly a prefill, with times, values and
disturbances of its samples drawn at random (`drawn` in tests/unit/scripted.py says from what). Each phase of it counts:

* sure: shares of figures that the tool calls sure, and of those in runs where nothing stands in the way (20 s or more,
  noise up to 2 points, at least 2 s and 40 windows of the phase);
* within five points: of the sure ones, what the tool promises;
* covered: whether the truth lies in the 95 % interval, of the sure ones and of all that have one.

Then the same for runs that are disturbed in ways that the draws are not: see `DISTURBED`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "unit"))

from scripted import Draw, Ran, Script, drawn, solved_for  # noqa: E402
from traces import MS  # noqa: E402

from phaseprof.metrics import Metric  # noqa: E402
from phaseprof.phases import Phase  # noqa: E402

Windows = list[tuple[int, int, float]]


def tally(draw: Draw, found: Counter[str], source: str = "gpm") -> None:
    """Count one run's phases."""
    passes = draw.script.passes if draw.passes is None else draw.passes
    solution = solved_for(passes, draw.windows, source)
    for name in sorted({ran.phase for ran in draw.script.passes}):
        phase, truth = Phase(name), draw.script.truth(name)
        figure = solution.figure(Metric.SM_ACTIVE, phase)
        plain = draw.plain and solution.seconds(phase) >= 2 and figure.windows >= 40
        found["figures"] += 1
        found["plain"] += plain
        if figure.value is not None and figure.error is not None:
            found["with an interval"] += 1
            found["covered"] += abs(figure.value - truth) <= figure.error
        if figure.sure is not None and figure.error is not None:
            found["sure"] += 1
            found["plain and sure"] += plain
            found["sure and within five points"] += abs(figure.sure - truth) <= 0.05
            found["sure and covered"] += abs(figure.sure - truth) <= figure.error


def lengths(random: Random, passes: Sequence[Ran]) -> list[Ran]:
    """Prompts of a tenth, of one and of three times the length; longer ones do more."""
    found, at = [], 0.0
    for ran in passes:
        times = random.choice((0.1, 1.0, 3.0)) if ran.phase == "prefill" else 1.0
        end = at + (ran.end - ran.start) * times
        value = min(max(ran.value + 0.15 * math.log10(times), 0.0), 1.0)
        found.append(Ran(at, end, ran.phase, value))
        at = end + 0.3 * MS
    return found


def ends(random: Random, passes: Sequence[Ran]) -> list[Ran]:
    """The last tenth of each pass does up to 40 points more or less than the rest of it."""
    change = {name: random.uniform(-0.4, 0.4) for name in ("prefill", "decode", "mixed")}
    found = []
    for ran in passes:
        cut = ran.end - 0.1 * (ran.end - ran.start)
        value = min(max(ran.value + change[ran.phase], 0.0), 1.0)
        found += [replace(ran, end=cut), replace(ran, start=cut, value=value)]
    return found


def step(random: Random, passes: Sequence[Ran]) -> list[Ran]:
    """Everything does 20 points more after three fifths of the run."""
    turn = passes[-1].end * 0.6
    return [
        replace(ran, value=min(ran.value + (0.2 if ran.start > turn else 0.0), 1.0))
        for ran in passes
    ]


def wandering(random: Random, windows: Windows) -> Windows:
    """Noise that each window shares with the one before it (0.9 of it)."""
    found, error = [], 0.0
    for start, end, value in windows:
        error = 0.9 * error + random.gauss(0, 0.01)
        found.append((start, end, min(max(value + error, 0.0), 1.05)))
    return found


def outliers(random: Random, windows: Windows) -> Windows:
    """One value in fifty is anything."""
    return [
        (start, end, random.random() if random.random() < 0.02 else value)
        for start, end, value in windows
    ]


def coarse(random: Random, windows: Windows) -> Windows:
    """Values in steps of five points."""
    return [(start, end, round(value * 20) / 20) for start, end, value in windows]


#: By name: what is done to the passes, to how they are sampled, and to the samples.
DISTURBED: dict[
    str,
    tuple[
        Callable[[Random, Sequence[Ran]], list[Ran]] | None,
        dict[str, Any],
        Callable[[Random, Windows], Windows] | None,
    ],
] = {
    "prompts of three lengths": (lengths, {}, None),
    "passes that end unlike they begin": (ends, {}, None),
    "a step in the run": (step, {}, None),
    "noise that wanders": (None, {"noise": 0.0}, wandering),
    "outliers": (None, {}, outliers),
    "steps of five points": (None, {}, coarse),
    "edges that jitter by 3 ms": (None, {"jitter": 3 * MS}, None),
    "clocks 15 ms apart": (None, {"offset": 15 * MS}, None),
}


def disturbed(name: str, seed: int) -> Draw:
    """One draw, disturbed."""
    change, sampling, spoil = DISTURBED[name]
    draw, random = drawn(seed), Random(seed)
    passes = draw.script.passes if change is None else change(random, draw.script.passes)
    script = Script(passes, draw.script.idle, draw.script.between)
    how = {"noise": 0.02, "jitter": 0.5 * MS, "offset": random.uniform(-3, 3) * MS, **sampling}
    windows = script.sampled(random, **how)
    windows = windows if spoil is None else spoil(random, windows)
    # A trace has whole passes.
    return Draw(script, windows, False, draw.script.passes if change is ends else None)


def sharp(seed: int) -> Draw:
    """One draw as `pm` samples it: windows of 1 ms with edges that are good to microseconds, 40 times 100 of them."""
    draw, random = drawn(seed), Random(seed)
    passes = ends(random, draw.script.passes) if seed % 2 else draw.script.passes
    script = Script(passes, draw.script.idle, draw.script.between)
    offset, noise = random.uniform(-0.2, 0.2) * MS, random.choice((0.0, 0.01, 0.02))
    windows: Windows = []
    for block in range(40):
        begin = block * max(script.end - 100 * MS, 0.0) / 39
        for i in range(100):
            start = begin + i * MS
            if windows and start < windows[-1][1]:
                continue
            edges = [round(at + offset + random.gauss(0, 0.02) * MS) for at in (start, start + MS)]
            value = script.mean(start, start + MS) + random.gauss(0, noise)
            windows.append((edges[0], edges[1], min(max(value, 0.0), 1.0)))
    return Draw(script, windows, draw.plain, draw.script.passes)


def shares(found: Counter[str]) -> dict[str, float | int]:
    sure = max(found["sure"], 1)
    result: dict[str, float | int] = {
        "figures": found["figures"],
        "sure": found["sure"],
        "sure_share": found["sure"] / max(found["figures"], 1),
        "within_five_points_of_sure": found["sure and within five points"] / sure,
        "wrong": found["sure"] - found["sure and within five points"],
        "covered_of_sure": found["sure and covered"] / sure,
        "covered_of_all": found["covered"] / max(found["with an interval"], 1),
    }
    if found["plain"]:
        result["sure_share_where_nothing_stands_in_the_way"] = (
            found["plain and sure"] / found["plain"]
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=10_000, help="the first seed")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    found: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.draws):
        tally(drawn(seed), found)
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/counter_calibration.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "draws": arguments.draws,
        **shares(found),
        "disturbed": {},
    }
    each = max(arguments.draws // 20, 1)
    for name in DISTURBED:
        of_kind: Counter[str] = Counter()
        for seed in range(arguments.first, arguments.first + each):
            tally(disturbed(name, seed), of_kind)
        result["disturbed"][name] = shares(of_kind)
    of_pm: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + each):
        tally(sharp(seed), of_pm, "pm")
    result["windows of 1 ms"] = shares(of_pm)
    result["seconds"] = round(time.perf_counter() - begun, 1)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
