"""What recording costs a pass: interleaved blocks with and without a session in one process, medians, ratios.

    python benchmarks/hook_cost.py [--rounds 30] [--model tiny|smollm2] [-o benchmarks/results/hook_cost.json]

The tiny model shows the hook itself (microseconds above the unhooked call); the real one shows whether a user would
notice (ratio of decode steps). Each block is preceded by gc.collect(); the order within a round alternates.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from phaseprof.session import Session
from phaseprof.workload.embedded import ensure_embedded

CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def tiny() -> LlamaForCausalLM:
    """As little work as a model can have."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    return LlamaForCausalLM(config).eval()


def smollm2() -> LlamaForCausalLM:
    """The embedded model in float32."""
    path = ensure_embedded(lambda _: None).path
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def decode_block(model: LlamaForCausalLM, steps: int) -> Callable[[], list[int]]:
    """A block of decode steps at batch 1 behind a prompt of 16 tokens; gives the time of each in ns."""
    prompt = torch.randint(3, model.config.vocab_size, (1, 16))
    token = prompt[:, :1]

    @torch.no_grad()
    def block() -> list[int]:
        cache = DynamicCache(config=model.config)
        model(prompt, **{CACHE: cache})
        times = []
        for _ in range(steps):
            begin = time.perf_counter_ns()
            model(token, **{CACHE: cache})
            times.append(time.perf_counter_ns() - begin)
        return times

    return block


def recorded(block: Callable[[], list[int]], trace: Path) -> tuple[list[int], float]:
    """A block under a session; its times, and what the session says of its own cost, in us a pass."""
    session = Session(trace)
    session.start()
    try:
        times = block()
    finally:
        session.stop()
    cost = session.self_cost
    return times, cost.hook_ns / cost.passes / 1000


def measure(model: LlamaForCausalLM, steps: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds of each round's median step."""
    block = decode_block(model, steps)
    block()
    bare, hooked, own = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for kind in ("bare", "hooked") if number % 2 else ("hooked", "bare"):
                gc.collect()
                if kind == "bare":
                    bare.append(statistics.median(block()))
                else:
                    times, own_us = recorded(block, Path(folder) / f"t{number}")
                    hooked.append(statistics.median(times))
                    own.append(own_us)
    differences = [h - b for h, b in zip(hooked, bare, strict=True)]
    ratios = [h / b for h, b in zip(hooked, bare, strict=True)]
    return {
        "bare_us": statistics.median(bare) / 1000,
        "hooked_us": statistics.median(hooked) / 1000,
        "difference_us": statistics.median(differences) / 1000,
        "ratio": statistics.median(ratios),
        "ratio_p10": sorted(ratios)[len(ratios) // 10],
        "ratio_p90": sorted(ratios)[-1 - len(ratios) // 10],
        "own_cost_us": statistics.median(own),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model", choices=("tiny", "smollm2", "both"), default="both")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
    }
    if options.model in ("tiny", "both"):
        result["tiny"] = measure(tiny(), steps=300, rounds=options.rounds)
    if options.model in ("smollm2", "both"):
        result["smollm2"] = measure(smollm2(), steps=24, rounds=options.rounds)
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
