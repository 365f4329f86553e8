"""What recording costs a pass: interleaved calls with and without the hooks in one process, medians.

    python benchmarks/hook_cost.py -o benchmarks/results/hook_cost.json

Two questions:

* How many microseconds does a hook add to a call? Two copies of one model take turns, call by call: one as it is, and
  one whose classes call `nn.Module.__call__` directly, so that no wrapper of ours is in its way. What a session adds to
  the difference of the two is the hook's. A model of two tiny layers, which does nearly nothing besides.
* Would a user notice? Blocks of decode steps of SmolLM2-135M with and without a session (its background thread
  included) take turns; the ratio of the blocks' median steps.

`gc.collect()` runs before each block, and the order within a round alternates.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from phaseprof.session import Session
from phaseprof.trace.meta import SelfCost
from phaseprof.workload.embedded import CONFIG, ensure_embedded

CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
PROMPT_TOKENS = 16


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
    """The embedded model in float32; random weights of its shape where it cannot be had."""
    path = ensure_embedded(lambda _: None).path
    if path is None:
        return LlamaForCausalLM(LlamaConfig.from_dict(dict(CONFIG))).eval()
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def unhooked(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy whose classes do not inherit their call from the class that is hooked."""
    copied = copy.deepcopy(model)
    for module in (copied, copied.model):
        own = type(module)
        module.__class__ = type(own.__name__, (own,), {"__call__": nn.Module.__call__})
    return copied


class Decode:
    """Decode steps at batch 1 behind a short prompt."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.prompt = torch.randint(3, model.config.vocab_size, (1, PROMPT_TOKENS))
        self.token = self.prompt[:, :1]
        self.cache = DynamicCache(config=model.config)

    def begin(self) -> None:
        """Prefill a new cache."""
        self.cache = DynamicCache(config=self.model.config)
        self.model(input_ids=self.prompt, logits_to_keep=1, **{CACHE: self.cache})

    def step_ns(self) -> int:
        """One step; how long it took."""
        begin = time.perf_counter_ns()
        self.model(input_ids=self.token, logits_to_keep=1, **{CACHE: self.cache})
        return time.perf_counter_ns() - begin


@torch.no_grad()
def call_by_call(model: LlamaForCausalLM, steps: int, rounds: int) -> dict[str, float]:
    """What a session adds to the difference between the hooked and the unhooked model.

    Two copies of a model differ by some microseconds for reasons of their own (where their memory lies, how their
    classes are looked up), so each round takes the difference with a session and without one.
    """
    hooked, bare = Decode(model), Decode(unhooked(model))

    def difference_us() -> tuple[float, float]:
        hooked.begin()
        bare.begin()
        gc.collect()
        pairs = [(hooked.step_ns(), bare.step_ns()) for _ in range(steps)]
        bare_us = statistics.median(pair[1] for pair in pairs) / 1000
        return statistics.median(pair[0] for pair in pairs) / 1000 - bare_us, bare_us

    def recorded(trace: Path) -> tuple[float, SelfCost]:
        session = Session(trace)
        session.start()
        try:
            difference, _ = difference_us()
        finally:
            session.stop()
        return difference, session.self_cost

    def with_empty_hooks() -> float:
        """A pair of module hooks that do nothing: what the plainest of all ways to watch a module costs here."""
        handles = (
            model.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
            model.register_forward_hook(lambda *_: None, with_kwargs=True),
        )
        difference, _ = difference_us()
        for handle in handles:
            handle.remove()
        return difference

    difference_us()
    added, bare_us, own_us, setup_ms, empty = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            if number % 2:
                (control, step), (with_session, own) = (
                    difference_us(),
                    recorded(Path(folder) / f"t{number}"),
                )
            else:
                with_session, own = recorded(Path(folder) / f"t{number}")
                control, step = difference_us()
            added.append(with_session - control)
            empty.append(with_empty_hooks() - control)
            bare_us.append(step)
            own_us.append(own.hook_ns / own.passes / 1000)
            setup_ms.append(own.setup_ns / 1e6)
    added.sort()
    return {
        "bare_step_us": statistics.median(bare_us),
        "added_us": statistics.median(added),
        "added_us_p10": added[len(added) // 10],
        "added_us_p90": added[-1 - len(added) // 10],
        "own_clock_us": statistics.median(own_us),
        "two_empty_module_hooks_added_us": statistics.median(empty),
        "first_sight_ms": statistics.median(setup_ms),
    }


@torch.no_grad()
def block_by_block(model: LlamaForCausalLM, steps: int, rounds: int) -> dict[str, float]:
    """Blocks under a session and without one in turn; the ratio of their median steps."""
    decode = Decode(model)

    def block() -> float:
        decode.begin()
        gc.collect()
        return statistics.median(decode.step_ns() for _ in range(steps)) / 1000

    def recorded(trace: Path) -> float:
        session = Session(trace)
        session.start()
        try:
            return block()
        finally:
            session.stop()

    block()
    bare_us, hooked_us = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for kind in ("bare", "hooked") if number % 2 else ("hooked", "bare"):
                if kind == "bare":
                    bare_us.append(block())
                else:
                    hooked_us.append(recorded(Path(folder) / f"t{number}"))
    ratios = sorted(h / b for h, b in zip(hooked_us, bare_us, strict=True))
    return {
        "bare_us": statistics.median(bare_us),
        "hooked_us": statistics.median(hooked_us),
        "ratio": statistics.median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[-1 - len(ratios) // 10],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": options.rounds,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result["tiny, call by call, 1 thread"] = call_by_call(tiny(), 400, options.rounds)
    torch.set_num_threads(threads)
    result[f"SmolLM2-135M float32, block by block, {threads} threads"] = block_by_block(
        smollm2(), 24, options.rounds
    )
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
