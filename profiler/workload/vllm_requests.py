"""Requests of a known size on a vLLM engine: prompts of exactly N tokens, so many at once, outputs of exactly M."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from phaseprof.errors import ModelError
from phaseprof.records import CallKind
from phaseprof.workload import Progress, silent
from phaseprof.workload.generate import call_sizes, prompt_seed, special_tokens
from phaseprof.workload.plan import FEW_TOKENS, Cell, WorkloadOutcome, WorkloadPlan
from phaseprof.workload.resume import FRESH, Progressed
from phaseprof.workload.vllm_engine import EngineOutput, failed_to_generate

Prompts = list[dict[str, list[int]]]


def run_requests(
    engine: Any,
    plan: WorkloadPlan,
    output: EngineOutput,
    *,
    share_prefix: bool = False,
    done: Progressed = FRESH,
    progress: Progress = silent,
) -> WorkloadOutcome:
    """Run the requests: warm-up of every cell first, then `Rounds` over the cells. Ctrl-C ends the run early.

    Args:
        engine: A `vllm.LLM`.
        plan: What to run; a batch is requests that are handed over at once.
        output: Where the cause of a failure is looked for.
        share_prefix: All prompts of a length have the same first half.
        done: What an earlier run has done of it.
        progress: Told what goes on.

    Raises:
        ModelError: If the engine fails; what was recorded up to then is kept.
    """
    from phaseprof.session import warmup, workload_call

    rounds = done.rounds(plan)
    try:
        draw = _prompts(engine, plan.seed, share_prefix)
        warmups = [(cell, n) for n in range(plan.warmup) for cell in done.to_warm(plan)]
        for number, (cell, repeat) in enumerate(warmups):
            progress(f"Warm-up, {plan.named(cell)}", number, len(warmups))
            new = min(cell.new_tokens, FEW_TOKENS)
            with warmup(), workload_call(CallKind.WARMUP, **call_sizes(cell, new, repeat)):
                _generate(engine, draw(cell, "warm-up", repeat), new, output)
        for cell, repeat in rounds:
            progress(f"Generating, {plan.named(cell)}", rounds.calls, rounds.planned)
            prompts = draw(cell, "counted", repeat)
            with workload_call(CallKind.COUNTED, **call_sizes(cell, cell.new_tokens, repeat)):
                _generate(engine, prompts, cell.new_tokens, output)
        progress("Generating", rounds.calls, rounds.planned)
    except KeyboardInterrupt:
        return WorkloadOutcome(rounds.calls, rounds.planned, interrupted=True)
    return WorkloadOutcome(rounds.calls, rounds.planned, interrupted=False)


def run_few_requests(
    engine: Any,
    plan: WorkloadPlan,
    output: EngineOutput,
    *,
    done: Progressed = FRESH,
    again: int = 0,
) -> None:
    """Run one short call for each batch size and length of prompt, for collectors that are too costly to time with.

    Args:
        engine, plan, output: As of `run_requests`.
        done: What an earlier run has looked at.
        again: How often they were run before.

    Raises:
        ModelError: If the engine fails.
    """
    from phaseprof.session import workload_call

    draw = _prompts(engine, plan.seed, False)
    for cell in done.unseen(plan):
        new = min(cell.new_tokens, FEW_TOKENS)
        with workload_call(CallKind.LOOK, **call_sizes(cell, new, again)):
            _generate(engine, draw(cell, "look", again), new, output)


def _prompts(engine: Any, seed: int, share_prefix: bool) -> Callable[[Cell, str, int], Prompts]:
    """Makes prompts of random tokens, without those that mean something to the model (end, padding, image)."""
    config = engine.llm_engine.model_config
    special = special_tokens(config.hf_config, config.hf_text_config)
    ordinary = [token for token in range(config.get_vocab_size()) if token not in special]
    if not ordinary:
        raise ModelError("The model's vocabulary has special tokens only.")

    def draw(cell: Cell, kind: str, repeat: int) -> Prompts:
        length = cell.prompt_tokens
        shared: list[int] = []
        if share_prefix:
            shared = random.Random(f"{seed} {length}").choices(ordinary, k=length // 2)
        chance = random.Random(prompt_seed(seed, cell, kind, repeat))
        own = length - len(shared)
        return [
            {"prompt_token_ids": shared + chance.choices(ordinary, k=own)}
            for _ in range(cell.batch)
        ]

    return draw


def _generate(engine: Any, prompts: Prompts, new_tokens: int, output: EngineOutput) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    try:
        engine.generate(prompts, sampling, use_tqdm=False)
    except Exception as error:
        raise failed_to_generate(error, len(prompts), output) from error
