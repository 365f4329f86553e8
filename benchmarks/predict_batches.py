"""Decode at other batch sizes, predicted from measured ones: SmolLM2-135M on this CPU.

    python benchmarks/predict_batches.py -o benchmarks/results/predict_batches.json

Calls of `generate` at each batch size take turns under phaseprof's own session. The step model (of
`phaseprof.analyzers.steps.calibrated`) is fitted to the decode steps of batch 1 and 4 alone, as the trace has them,
and predicts the others; each is held against the median of its own steps. Target: within 25 % at batch 2, 8 and 16.

Where the cost of the sequences themselves reaches the cost that they share (the batch at which a step takes twice what
it takes whatever the batch: the crossing from reading weights to computing) is told too, by a line through the times
of batch 4 and more: once the predicted ones, once the measured ones. Target: within a factor of two.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from hook_cost import smollm2

import phaseprof.api
from phaseprof.analyzers.efficiency import efficiency_for
from phaseprof.analyzers.passes import primary_model
from phaseprof.analyzers.steps.calibrated import (
    Calibrated,
    MeasuredPass,
    calibrate,
    measured_passes,
)
from phaseprof.analyzers.steps.pass_rows import rows_of_phases
from phaseprof.analyzers.steps.step_model import CPU, Machine
from phaseprof.collectors import ceilings
from phaseprof.devices import describe
from phaseprof.phases import Phase
from phaseprof.trace.reader import Trace
from phaseprof.work.cost import ModelCost
from phaseprof.work.count import Rows

FITTED = (1, 4)
HELD = (2, 8, 16)
#: Beyond what is held to the target: they show the slope.
FAR = (32, 64)
BATCHES = tuple(sorted((*FITTED, *HELD, *FAR)))
TARGET = 0.25
CROSSING_TARGET = 2.0
#: From here on the same kernels run whatever the batch.
STEADY_FROM = 4
DTYPE = "float32"
#: More than any run has.
_ALL = 10**9


def record(folder: Path, rounds: int, prompt_tokens: int, new_tokens: int) -> Trace:
    """Generate at each batch size in turns; the trace."""
    model = smollm2()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), phaseprof.api.profile(None, folder, collect="none") as run:
        for number in range(rounds):
            for batch in BATCHES:
                print(f"round {number + 1} of {rounds}, batch {batch}", file=sys.stderr)
                shape = (batch, prompt_tokens)
                ids = torch.randint(3, model.config.vocab_size, shape, generator=generator)
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    pad_token_id=2,
                )
    return run.trace


def decode_steps(trace: Trace) -> dict[int, list[MeasuredPass]]:
    """Decode steps by batch size."""
    rows = rows_of_phases(trace.passes, primary_model(trace.passes), at_most=_ALL)
    found: dict[int, list[MeasuredPass]] = {}
    for step in measured_passes(rows[Phase.DECODE]):
        found.setdefault(sum(row.sequences for row in step.decode), []).append(step)
    return found


def cost_of(trace: Trace) -> ModelCost:
    """The structure of the model that ran."""
    (cost,) = [m.cost for meta in trace.metas for m in meta.models if m.cost is not None]
    return cost


def middle(steps: list[MeasuredPass]) -> int:
    """Length of the cache in the middle of the steps."""
    return round(statistics.median(step.decode[0].past for step in steps))


def crossing(points: dict[int, float]) -> float:
    """Shared cost over the cost of a sequence, by a line through seconds by batch."""
    steady = {batch: seconds for batch, seconds in points.items() if batch >= STEADY_FROM}
    slope, base = statistics.linear_regression(list(steady), list(steady.values()))
    return base / slope if slope > 0 else float("inf")


def compare(model: Calibrated, steps: dict[int, list[MeasuredPass]]) -> dict[str, Any]:
    """Predicted and measured medians."""
    rows: dict[str, dict[str, Any]] = {}
    predicted, measured = {}, {}
    for batch, each in sorted(steps.items()):
        estimate = model.time((), (Rows(middle(each), 1, batch),), logits_tokens=batch)
        predicted[batch] = estimate.seconds
        measured[batch] = statistics.median(step.seconds for step in each)
        rows[str(batch)] = {
            "fitted": batch in FITTED,
            "steps": len(each),
            "measured_ms": measured[batch] * 1e3,
            "predicted_ms": estimate.seconds * 1e3,
            "low_ms": estimate.low * 1e3,
            "high_ms": estimate.high * 1e3,
            "error": estimate.seconds / measured[batch] - 1,
            "inside": estimate.low <= measured[batch] <= estimate.high,
        }
    worst = max(abs(rows[str(batch)]["error"]) for batch in HELD)
    found, true = crossing(predicted), crossing(measured)
    return {
        "batches": rows,
        "worst_error": worst,
        "within_target": worst <= TARGET,
        "crossing_batch": {
            "predicted": found,
            "measured": true,
            "within_target": max(found / true, true / found) <= CROSSING_TARGET,
        },
    }


def main() -> int:
    """Record, fit, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", type=Path, help="write the result to this file as well")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=16)
    arguments = parser.parse_args()
    device = describe("cpu")
    roofs = ceilings.ensure(device, DTYPE)
    assert roofs is not None, "a CPU can be measured"
    with tempfile.TemporaryDirectory() as folder:
        trace = record(
            Path(folder) / "trace",
            arguments.rounds,
            arguments.prompt_tokens,
            arguments.new_tokens,
        )
        steps = decode_steps(trace)
        cost = cost_of(trace)
    machine = Machine(
        efficiency=efficiency_for(roofs, device),
        ceilings=roofs,
        runtime=CPU,
        products=DTYPE,
        activations=DTYPE,
    )
    model = calibrate([step for batch in FITTED for step in steps[batch]], cost, machine)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "device": device.name,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "dtype": DTYPE,
        "roofs": {"gflops": roofs.flops_per_s / 1e9, "gb_per_s": roofs.bytes_per_s / 1e9},
        "fitted_to": list(FITTED),
        "target": TARGET,
        "factors": {
            factor.name: {"value": factor.value, "low": factor.low, "high": factor.high}
            for factor in model.factors
        },
        **compare(model, steps),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.o is not None:
        arguments.o.write_text(text + "\n", encoding="utf-8")
    met = result["within_target"] and result["crossing_batch"]["within_target"]
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
