"""What recording costs a step of a vLLM worker, on the worker's thread and beside it: medians, in microseconds.

    .venv-vllm/bin/python benchmarks/vllm_step_cost.py -o benchmarks/results/vllm_step_cost.json

A runner of vLLM's own class whose methods do nothing is given `SchedulerOutput` objects and gives `ModelRunnerOutput`
ones, of 1 to 256 requests. Each step is run twice in turns, through the wrapped methods and through what they wrap; the
difference is the hook's: back to back, and with work of torch between the steps, which leaves the caches of the
processor as a model's step does. Beside it stands what two wrappers cost that do nothing. The recorder runs as ever,
and its CPU time is told for each step. Then blocks of steps of a real engine on the CPU take turns with and without a
session. Without vLLM it says so and ends.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SIZES = (1, 8, 64, 256)
#: Microseconds that a step may take on the worker's thread, by its requests.
BUDGET_US = {1: 15.0, 64: 60.0, 256: 200.0}
#: Operations of torch between two steps, where they are not run back to back: about a millisecond.
OPERATIONS = 120


def make_runner(kind: Any) -> Any:
    """A runner with nothing in it but what is read at its first step."""
    import torch

    model = torch.nn.Module()
    runner = kind.__new__(kind)
    runner.device = torch.device("cpu")
    runner.model_config = SimpleNamespace(
        model="none", enforce_eager=True, attn_type="decoder", is_encoder_decoder=False
    )
    runner.compilation_config = SimpleNamespace(mode=None)
    runner.is_pooling_model = False
    runner.execute_model_state = None
    runner.get_model = lambda: model
    return runner


def decode(names: list[str], past: int, drafts: int) -> tuple[Any, Any]:
    """A step of requests that decode, and what it gives."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    count = len(names)
    scheduled = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(names),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None] * count,
            num_computed_tokens=[past] * count,
            num_output_tokens=[past - 15] * count,
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1 + drafts),
        total_num_scheduled_tokens=count * (1 + drafts),
        scheduled_spec_decode_tokens={name: [-1] * drafts for name in names} if drafts else {},
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )
    given = ModelRunnerOutput(
        req_ids=list(names),
        req_id_to_index={name: n for n, name in enumerate(names)},
        sampled_token_ids=[[5] * (1 + drafts) for _ in names],
    )
    return scheduled, given


def prefill(names: list[str], prompt: int) -> tuple[Any, Any]:
    """A step that begins all of its requests."""
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    scheduled, given = decode([], 0, 0)
    parameters = SamplingParams(max_tokens=1 << 20)
    tokens = [7] * prompt
    scheduled.scheduled_new_reqs = [
        NewRequestData(name, tokens, [], parameters, None, ([1],), 0, None) for name in names
    ]
    scheduled.num_scheduled_tokens = dict.fromkeys(names, prompt)
    scheduled.total_num_scheduled_tokens = prompt * len(names)
    given.req_ids = list(names)
    given.sampled_token_ids = [[5] for _ in names]
    return scheduled, given


def decoding(names: list[str], drafts: int, number: int) -> tuple[Any, Any]:
    """The step of that number of requests that decode."""
    return decode(names, 16 + (1 + drafts) * number, drafts)


def beginning(names: list[str], number: int) -> tuple[Any, Any]:
    """A step of requests that no other step has."""
    return prefill([f"{number}.{name}" for name in names], 16)


def empty(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that does nothing."""

    @functools.wraps(original)
    def wrapper(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original(runner, *args, **kwargs)

    return wrapper


def work(operations: int) -> None:
    """What a step of a small model does besides, on one thread."""
    import torch

    value = torch.ones(16, 256)
    for _ in range(operations):
        value = torch.nn.functional.silu(value) + 0.5


def measure(
    kind: Any, make: Callable[[int], tuple[Any, Any]], steps: int, operations: int
) -> dict[str, float]:
    """Steps through the wrapped methods, in turns with what they wrap.

    Returns:
        ``hook_us`` and ``hook_p90_us`` on the worker's thread, ``empty_us`` for two wrappers that do nothing,
        ``recorder_us`` of the recorder's CPU time, all a step.
    """
    from phaseprof.session import Session

    given: list[Any] = []
    kind.execute_model = lambda runner, output: None
    kind.sample_tokens = lambda runner, grammar: given[0]
    runner = make_runner(kind)
    bare = kind.execute_model, kind.sample_tokens
    clock = time.perf_counter_ns
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder) / "trace")
        session.start()
        hooked = kind.execute_model, kind.sample_tokens
        inputs = [make(n) for n in range(steps)]
        ways = {"bare": bare, "hook": hooked, "empty": tuple(map(empty, bare))}
        times: dict[str, list[int]] = {way: [] for way in ways}
        gc.collect()
        gc.disable()
        for number, (scheduled, output) in enumerate(inputs):
            given[:] = [output]
            # Each comes first, last and between the others.
            order = list(ways)[number % 3 :] + list(ways)[: number % 3]
            for way in order:
                work(operations)
                execute, sample = ways[way]
                began = clock()
                execute(runner, scheduled)
                sample(runner, None)
                times[way].append(clock() - began)
        gc.enable()
        session.stop()
        cost = session.self_cost
    added = {
        way: [on - off for on, off in zip(times[way], times["bare"], strict=True)]
        for way in ("hook", "empty")
    }
    return {
        "hook_us": statistics.median(added["hook"]) / 1e3,
        "hook_p90_us": statistics.quantiles(added["hook"], n=10)[-1] / 1e3,
        "empty_us": statistics.median(added["empty"]) / 1e3,
        "recorder_us": cost.writer_cpu_ns / steps / 1e3,
    }


def real(rounds: int, requests: int = 8, tokens: int = 64) -> dict[str, float]:
    """Decode steps of a real engine on the CPU, in blocks with and without a session.

    Returns:
        ``bare_us`` and ``recorded_us`` of a step, the median of the blocks, and the median ``ratio`` of a round.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from transformers import LlamaConfig
    from vllm import LLM, SamplingParams

    from phaseprof.session import Session

    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=4096,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(folder)
        engine = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 26,
            max_model_len=256,
            dtype="float32",
        )
        parameters = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        prompts: list[Any] = [{"prompt_token_ids": [5 + n] * 8} for n in range(requests)]

        def block() -> float:
            began = time.perf_counter_ns()
            engine.generate(prompts, parameters, use_tqdm=False)
            return (time.perf_counter_ns() - began) / tokens / 1e3

        block()
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            for recorded in (True, False) if number % 2 else (False, True):
                gc.collect()
                session = Session(Path(folder) / f"trace-{number}")
                if recorded:
                    session.start()
                times[recorded].append(block())
                if recorded:
                    session.stop()
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    return {
        "bare_us": statistics.median(times[False]),
        "recorded_us": statistics.median(times[True]),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=20, help="of a real engine")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed for this Python: run it with .venv-vllm/bin/python")
        return
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    torch.set_num_threads(1)
    original = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens
    kind: Any = GPUModelRunner
    results: dict[str, dict[str, float]] = {}
    try:
        for size in SIZES:
            names = [f"{n}-0a1b2c3d" for n in range(size)]
            for what, make in (
                ("decode", partial(decoding, names, 0)),
                ("3 drafts each", partial(decoding, names, 3)),
                ("all begin", partial(beginning, names)),
            ):
                steps = max(arguments.steps // (1 if size < 64 else 4), 20)
                for how, operations in (("back to back", 0), ("between work", OPERATIONS)):
                    found = measure(kind, make, steps, operations)
                    results[f"{what}, {size}, {how}"] = found
                    budget = f", budget {BUDGET_US[size]:.0f}" if size in BUDGET_US else ""
                    print(
                        f"{what:>14} {size:4d} requests {how:>14}: {found['hook_us']:6.1f} us a step "
                        f"(p90 {found['hook_p90_us']:.1f}{budget}; empty wrappers {found['empty_us']:.1f}), "
                        f"recorder {found['recorder_us']:.0f} us"
                    )
    finally:
        GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = original
    engine = real(arguments.rounds)
    print(
        f"a real engine, 8 requests: {engine['bare_us']:.0f} us a step, recorded {engine['recorded_us']:.0f} us, "
        f"ratio {engine['ratio']:.3f}"
    )
    if arguments.output is not None:
        facts = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "vllm": str(sys.modules["vllm"].__version__),
        }
        arguments.output.write_text(
            json.dumps({**facts, "us_per_step": results, "real engine": engine}, indent=1) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
