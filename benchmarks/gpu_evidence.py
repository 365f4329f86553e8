"""All hardware evidence on one machine with an NVIDIA GPU, in under eight minutes: one command, no downloads.

    python benchmarks/gpu_evidence.py -o evidence
    python benchmarks/gpu_evidence.py --device cpu --small -o evidence     # tries the script, on any machine

A Llama of 8 billion random parameters generates at several batch sizes, eager and compiled, under every collector.
Each step is a process of its own with a limit of its own, so that a failure of one leaves the rest. The folder then
holds for each case the report as JSON, the tables (bounded) and the meta files, and `summary.txt` with a line for each
band.

It needs torch, transformers and pyarrow. phaseprof need not be installed: a checkout is enough. Packages that are
missing (nvidia-ml-py, cupti-python) are taken from wheels in `benchmarks/wheels`, or the folder given by `--wheels`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_kit.importable import WHEELS, is_there, make_importable
from gpu_kit.plan import FULL, SMALL, STEPS, Step

FACTS = "facts"
_FACTS_SECONDS = 60.0
_KILL_AFTER_SECONDS = 15.0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=_default_output())
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model and short requests")
    parser.add_argument("--minutes", type=float, default=7.5, help="for everything")
    parser.add_argument("--only", default="", help="steps to run, with commas between")
    parser.add_argument("--wheels", type=Path, default=WHEELS)
    parser.add_argument("--step", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _default_output() -> Path:
    return Path(os.environ.get("OUT", "gpu-evidence"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if nothing failed that was run."""
    options = parse(arguments)
    options.output = options.output.absolute()
    if options.step:
        return run_here(options)
    with tempfile.TemporaryDirectory(prefix="gpu-evidence-") as scratch:
        for line in make_importable(Path(scratch), options.wheels):
            print(line)
        return run_all(options)


def run_here(options: argparse.Namespace) -> int:
    """One step, in this process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.step == FACTS:
        from gpu_kit.facts import gather

        gather(options.output)
        return 0
    from gpu_kit.cases import Deadline, run_step

    (step,) = (step for step in STEPS if step.name == options.step)
    sizes = SMALL if options.small else FULL
    run_step(step, sizes, options.device, options.output, Deadline(options.seconds))
    return 0


def run_all(options: argparse.Namespace) -> int:
    """The steps, each in a process, while there is time; then the summary."""
    if options.device == "cuda" and not _cuda_is_there():
        print("torch sees no CUDA device: nothing is run. `--device cpu --small` tries the script.")
        return 0
    begun = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PHASEPROF_CACHE_DIR", str(options.output / "cache"))
    ends = {FACTS: _run(options, FACTS, _FACTS_SECONDS)}
    for step in STEPS:
        if options.only and step.name not in options.only.split(","):
            continue
        reason = _not_worth_it(step, options)
        left_s = options.minutes * 60 - (time.monotonic() - begun)
        if reason or left_s < 20.0:
            ends[step.name] = reason or "no time was left"
        else:
            ends[step.name] = _run(options, step.name, min(step.seconds, left_s))
        print(f"{step.name}: {ends[step.name]}", flush=True)
    return summarize(options.output, ends, time.monotonic() - begun)


def _not_worth_it(step: Step, options: argparse.Namespace) -> str:
    if step.name == "pm" and options.device == "cuda" and not is_there("cupti"):
        return "cupti-python is not installed"
    return ""


def _cuda_is_there() -> bool:
    ask = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], timeout=120).returncode == 0


def _run(options: argparse.Namespace, name: str, seconds: float) -> str:
    """Run a step in a process, with its output in a file; how it ended."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        *("--step", name, "--seconds", f"{seconds:.1f}", "--device", options.device),
        *("-o", str(options.output)),
        *(["--small"] if options.small else []),
    ]
    begun = time.monotonic()
    with (options.output / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=_environment(name)
        )
        try:
            code = process.wait(seconds + _KILL_AFTER_SECONDS)
            how = "ended" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            how = "was ended, as its time was over"
    return f"{how} after {time.monotonic() - begun:.0f} s"


def _environment(name: str) -> dict[str, str]:
    """For pm the libcupti of the unpacked wheels, if there is one, comes before the older one that torch brings."""
    if name != "pm":
        return dict(os.environ)
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    found = [path for folder in folders if folder for path in Path(folder).glob("libcupti.so.1?")]
    mine = [str(path) for path in found if "gpu-evidence-" in str(path)]
    return {**os.environ, **({"LD_PRELOAD": mine[0]} if mine else {})}


def summarize(out: Path, ends: dict[str, str], seconds: float) -> int:
    """Write and print a line a check; 1 if one failed."""
    from gpu_kit.checks import FAILED, check, load

    cases = load(out)
    checks = check(cases)
    lines = [f"{c.verdict:<8} {c.name}: {c.found} (should be {c.band})" for c in checks]
    lines += [f"step     {name}: {how}" for name, how in ends.items()]
    lines += [
        f"case     {name}: {case.log.get('seconds')} s, rows {case.log.get('rows')}"
        for name, case in cases.items()
    ]
    lines += _failures(out)
    lines.append(f"took     {seconds:.0f} s")
    (out / "summary.txt").write_text("\n".join(lines) + "\n")
    document = {
        "checks": [
            {"name": c.name, "verdict": c.verdict, "found": c.found, "band": c.band} for c in checks
        ],
        "steps": ends,
        "seconds": round(seconds, 1),
    }
    (out / "summary.json").write_text(json.dumps(document, indent=1))
    print("\n".join(lines))
    return int(any(c.verdict == FAILED for c in checks))


def _failures(out: Path) -> list[str]:
    lines = []
    for path in sorted(out.glob("*.json")):
        document = json.loads(path.read_text())
        if "failed" in document:
            lines.append(f"error    {path.stem}: {document['failed'].strip().splitlines()[-1]}")
        for name, case in document.get("cases", {}).items():
            if "failed" in case:
                lines.append(f"error    {name}: {case['failed'].strip().splitlines()[-1]}")
            if "skipped" in case:
                lines.append(f"skipped  {name}: {case['skipped']}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
