"""What recording costs a step of vLLM, on the threads of its worker and of its engine core and beside them: medians, in
microseconds.

    .venv-vllm/bin/python benchmarks/vllm_step_cost.py -o benchmarks/results/vllm_step_cost.json

A runner of vLLM's own class whose methods do nothing is given `SchedulerOutput` objects and gives `ModelRunnerOutput`
ones, of 1 to 256 requests. Each step is run twice in turns, through the wrapped methods and through what they wrap; the
difference is the hook's: back to back, and with work of torch between the steps, which leaves the caches of the
processor as a model's step does. Beside it stands what two wrappers cost that do nothing. The recorder runs as ever,
and its CPU time is told for each step. Likewise a scheduler of vLLM's own class, which decides and hands over in no
time. Then blocks of steps of a real engine on the CPU take turns with and without a session. Without vLLM it says so
and ends.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SIZES = (1, 8, 64, 256)
#: Microseconds that a step may take on the worker's thread, by its requests.
BUDGET_US = {1: 15.0, 64: 60.0, 256: 200.0}
#: Operations of torch between two steps, where they are not run back to back: about a millisecond.
OPERATIONS = 120


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two that make a step, with its two calls.

    Attributes:
        kind: A class of vLLM.
        names: Its methods.
        subject: Makes an instance.
        bare: Makes what the methods do, given a list that holds what the step is told and what it gives.
        run: Makes a step: instance, both methods, and the list.
    """

    kind: Any
    names: tuple[str, str]
    subject: Callable[[Any], Any]
    bare: Callable[[list[Any]], tuple[Callable[..., Any], Callable[..., Any]]]
    run: Callable[[Any, Callable[..., Any], Callable[..., Any], list[Any]], None]

    def methods(self) -> tuple[Any, Any]:
        """What the class has now."""
        first, second = self.names
        return getattr(self.kind, first), getattr(self.kind, second)

    def put(self, methods: tuple[Any, Any]) -> None:
        """Give them to the class."""
        for name, method in zip(self.names, methods, strict=True):
            setattr(self.kind, name, method)


def worker_side() -> Side:
    """A worker: it is told what was scheduled, and gives what it has sampled."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def bare(given: list[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda runner, output: None, lambda runner, grammar: given[1]

    def run(
        runner: Any, execute: Callable[..., Any], sample: Callable[..., Any], given: list[Any]
    ) -> None:
        execute(runner, given[0])
        sample(runner, None)

    return Side(GPUModelRunner, ("execute_model", "sample_tokens"), make_runner, bare, run)


def core_side() -> Side:
    """A scheduler: it decides, and hands over what its requests get."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def bare(given: list[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda scheduler: given[0], lambda scheduler, output, sampled: given[1]

    def run(
        scheduler: Any, schedule: Callable[..., Any], update: Callable[..., Any], given: list[Any]
    ) -> None:
        update(scheduler, schedule(scheduler), None)

    return Side(Scheduler, ("schedule", "update_from_output"), make_scheduler, bare, run)


def make_scheduler(kind: Any) -> Any:
    """A scheduler with nothing in it but what is read of it."""
    scheduler = kind.__new__(kind)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1)
    scheduler.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="none", architecture="None", architectures=["None"], served_model_name="none"
        ),
        parallel_config=parallel,
    )
    scheduler.requests = {}
    scheduler.get_request_counts = lambda: (1, 0)
    scheduler.get_kv_cache_usage = lambda: 0.5
    return scheduler


def handed_over(step: tuple[Any, Any]) -> tuple[Any, Any]:
    """A step as its scheduler sees it: what it decides, and what its requests get."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    scheduled, sampled = step
    outputs = [
        EngineCoreOutput(request_id=name, new_token_ids=tokens)
        for name, tokens in zip(sampled.req_ids, sampled.sampled_token_ids, strict=True)
    ]
    return scheduled, {0: EngineCoreOutputs(outputs=outputs)}


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
    side: Side, make: Callable[[int], tuple[Any, Any]], steps: int, operations: int
) -> dict[str, float]:
    """Steps through the wrapped methods, in turns with what they wrap.

    Returns:
        ``hook_us`` and ``hook_p90_us`` on the thread of the step, ``empty_us`` for two wrappers that do nothing,
        ``recorder_us`` of the recorder's CPU time, all a step.
    """
    from phaseprof.session import Session

    given: list[Any] = []
    bare = side.bare(given)
    original = side.methods()
    side.put(bare)
    subject = side.subject(side.kind)
    run, clock = side.run, time.perf_counter_ns
    try:
        with tempfile.TemporaryDirectory() as folder:
            session = Session(Path(folder) / "trace")
            session.start()
            inputs = [make(n) for n in range(steps)]
            ways = {"bare": bare, "hook": side.methods(), "empty": tuple(map(empty, bare))}
            times: dict[str, list[int]] = {way: [] for way in ways}
            gc.collect()
            gc.disable()
            for number, step in enumerate(inputs):
                given[:] = step
                # Each comes first, last and between the others.
                order = list(ways)[number % 3 :] + list(ways)[: number % 3]
                for way in order:
                    work(operations)
                    first, second = ways[way]
                    began = clock()
                    run(subject, first, second, given)
                    times[way].append(clock() - began)
            gc.enable()
            session.stop()
            cost = session.self_cost
    finally:
        side.put(original)
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


def given_by(
    give: Callable[[tuple[Any, Any]], tuple[Any, Any]],
    make: Callable[[int], tuple[Any, Any]],
    number: int,
) -> tuple[Any, Any]:
    """The step of that number, as its side sees it."""
    return give(make(number))


def synthetic(
    side: Side, name: str, steps: int, give: Callable[[tuple[Any, Any]], tuple[Any, Any]]
) -> dict[str, dict[str, float]]:
    """Steps of all sizes and kinds; prints what it finds.

    Args:
        side: Of the step.
        name: Of the side; empty for the worker.
        steps: So many, of few requests.
        give: Makes a step of this side from one of a worker.
    """
    results: dict[str, dict[str, float]] = {}
    for size in SIZES:
        names = [f"{n}-0a1b2c3d" for n in range(size)]
        for what, make in (
            ("decode", partial(decoding, names, 0)),
            ("3 drafts each", partial(decoding, names, 3)),
            ("all begin", partial(beginning, names)),
        ):
            for how, operations in (("back to back", 0), ("between work", OPERATIONS)):
                found = measure(
                    side,
                    partial(given_by, give, make),
                    max(steps // (1 if size < 64 else 4), 20),
                    operations,
                )
                results[f"{name}{what}, {size}, {how}"] = found
                budget = f", budget {BUDGET_US[size]:.0f}" if size in BUDGET_US and not name else ""
                print(
                    f"{name}{what:>14} {size:4d} requests {how:>14}: {found['hook_us']:6.1f} us a step "
                    f"(p90 {found['hook_p90_us']:.1f}{budget}; empty wrappers {found['empty_us']:.1f}), "
                    f"recorder {found['recorder_us']:.0f} us",
                    flush=True,
                )
    return results


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

    torch.set_num_threads(1)
    results = synthetic(worker_side(), "", arguments.steps, lambda step: step)
    results |= synthetic(core_side(), "engine core: ", arguments.steps, handed_over)
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
