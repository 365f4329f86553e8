"""How far whole runs of the same thing differ on this machine, and whether `phaseprof compare` takes that for a change.

    python benchmarks/compare_repeats.py -o benchmarks/results/compare_repeats.json

`phaseprof profile` runs a small Llama with random weights on the CPU, ten times, each time as a process of its own, and
every pair of the runs is compared. It should run on an otherwise quiet machine. Three things come out of it:

* breaches of a rule of 10 % in either direction, of which there should be none;
* the share of intervals that do not hold zero, which should be near 5 % or below;
* the noise of runs: the standard deviation of the logarithm of each figure over the runs, less what the runs show of
  themselves. It is what `--run-noise` takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from phaseprof.analyzers.comparing.compare import RUN_NOISE_CPU, compare
from phaseprof.analyzers.comparing.results import Outcome
from phaseprof.analyzers.comparing.rules import parse
from phaseprof.analyzers.comparing.sample import Sample, sample_of
from phaseprof.analyzers.report import build_report
from phaseprof.trace.reader import open_trace

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PATHS = (
    *("prefill.pass_ms.p50", "prefill.pass_ms.mean", "decode.pass_ms.p50", "decode.pass_ms.mean"),
    *("decode.output_tokens_per_s", "requests.ttft_ms.p50", "requests.tpot_ms.p50"),
    *("requests.itl_ms.p50", "requests.e2e_ms.p50"),
)
RULES = tuple(parse(f"{path} {limit}") for path in PATHS for limit in ("> +10%", "< -10%"))


def profile(folder: Path, config: Path, options: argparse.Namespace) -> None:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "phaseprof", "profile", "--model-config", str(config)]
    command += ["--device", "cpu", "--prompt-tokens", "256", "--new-tokens", "33"]
    command += ["--repeats", str(options.repeats), "--threads", str(options.threads)]
    command += ["--no-calibrate", "--json", "-o", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read(folder: Path, side: int) -> Sample:
    trace = open_trace(folder)
    return sample_of(trace, build_report(trace), side)


def summarize(samples: list[Sample]) -> dict[str, object]:
    """Every pair of the runs, and how far the runs differ."""
    breaches: list[str] = []
    missed = dict.fromkeys(PATHS, 0)
    widths: dict[str, list[float]] = {path: [] for path in PATHS}
    changes: dict[str, list[float]] = {path: [] for path in PATHS}
    pairs = list(itertools.combinations(samples, 2))
    for a, b in pairs:
        found = compare(a, b, rules=RULES)
        breaches += [each.rule for each in found.judged if each.outcome is Outcome.BREACH]
        for path in PATHS:
            delta = found.delta(path)
            if delta is None or delta.low is None or delta.high is None or delta.change is None:
                continue
            missed[path] += not delta.low <= 0 <= delta.high
            widths[path].append((delta.high - delta.low) / 2)
            changes[path].append(abs(delta.change))
    figures = {}
    first = samples[0]
    for path in PATHS:
        own = [compare(first, each).delta(path) for each in samples]
        logs = [math.log(d.b.value) for d in own if d is not None and d.b.value]
        within = [d.b.error**2 for d in own if d is not None and d.b.error is not None]
        between = statistics.variance(logs) if len(logs) > 1 else 0.0
        figures[path] = {
            "runs_differ_by": round(math.sqrt(between), 4),
            "error_within_a_run": round(math.sqrt(statistics.mean(within)), 4) if within else None,
            "noise_of_runs": round(
                math.sqrt(max(between - statistics.mean(within), 0.0)) if within else 0.0, 4
            ),
            "largest_change": round(max(changes[path], default=0.0), 4),
            "median_half_width": round(statistics.median(widths[path]), 4)
            if widths[path]
            else None,
            "intervals_without_zero": round(missed[path] / len(pairs), 4),
        }
    return {"pairs": len(pairs), "breaches": len(breaches), "broken": breaches, "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.json"
        config.write_text(json.dumps(CONFIG), encoding="utf-8")
        for run in range(options.runs):
            profile(folder / f"run-{run}", config, options)
            print(f"run {run + 1} of {options.runs}", file=sys.stderr)
        samples = [read(folder / f"run-{run}", run) for run in range(options.runs)]
        result = {
            "benchmark": "compare_repeats",
            "machine": platform.processor() or platform.machine(),
            "runs": options.runs,
            "repeats": options.repeats,
            "threads": options.threads,
            "assumed_run_noise": RUN_NOISE_CPU,
            **summarize(samples),
            "seconds": round(time.perf_counter() - begun, 1),
        }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
