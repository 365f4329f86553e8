"""How long `import phaseprof` and `phaseprof --help` take: whole processes, against a bare interpreter, medians.

python benchmarks/import_time.py -o benchmarks/results/import_time.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import phaseprof": ["-c", "import phaseprof"],
    "phaseprof --help": ["-m", "phaseprof", "--help"],
}


def wall_ms(arguments: list[str]) -> float:
    """One process, start to end."""
    begin = time.perf_counter_ns()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter_ns() - begin) / 1e6


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description="Start-up times, medians of interleaved processes."
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds):
        for name, arguments in COMMANDS.items():
            times[name].append(wall_ms(arguments))
    result: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "median_ms": {name: statistics.median(values) for name, values in times.items()},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
