"""Requests of a known size on a vLLM engine: prompts of exactly N tokens, so many at once, outputs of exactly M."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from phaseprof.errors import ModelError
from phaseprof.workload import Progress, silent
from phaseprof.workload.generate import FEW_TOKENS, WorkloadOutcome, WorkloadPlan, special_tokens
from phaseprof.workload.rounds import Rounds
from phaseprof.workload.vllm_engine import EngineOutput, failed_to_generate


def run_requests(
    engine: Any,
    plan: WorkloadPlan,
    output: EngineOutput,
    *,
    share_prefix: bool = False,
    progress: Progress = silent,
) -> WorkloadOutcome:
    """Run the requests: warm-up first, then `Rounds` over the batch sizes. Ctrl-C ends the run early.

    Args:
        engine: A `vllm.LLM`.
        plan: What to run; a batch is requests that are handed over at once.
        output: Where the cause of a failure is looked for.
        share_prefix: All prompts have the same first half.
        progress: Told what goes on.

    Raises:
        ModelError: If the engine fails; what was recorded up to then is kept.
    """
    from phaseprof.session import warmup

    rounds = Rounds(plan.batches, plan.repeats, plan.least_s)
    try:
        draw = _prompts(engine, plan, share_prefix)
        for number, batch in enumerate(plan.batches * plan.warmup):
            progress(f"Warm-up, batch {batch}", number, len(plan.batches) * plan.warmup)
            with warmup():
                _generate(engine, draw(batch), min(plan.new_tokens, FEW_TOKENS), output)
        for batch in rounds:
            progress(f"Generating, batch {batch}", rounds.calls, rounds.planned)
            _generate(engine, draw(batch), plan.new_tokens, output)
        progress("Generating", rounds.calls, rounds.planned)
    except KeyboardInterrupt:
        return WorkloadOutcome(rounds.calls, rounds.planned, interrupted=True)
    return WorkloadOutcome(rounds.calls, rounds.planned, interrupted=False)


def run_few_requests(engine: Any, plan: WorkloadPlan, output: EngineOutput) -> None:
    """Run one short call per batch size, for collectors that are too costly to time with.

    Raises:
        ModelError: If the engine fails.
    """
    draw = _prompts(engine, plan, False)
    for batch in plan.batches:
        _generate(engine, draw(batch), min(plan.new_tokens, FEW_TOKENS), output)


def _prompts(
    engine: Any, plan: WorkloadPlan, share_prefix: bool
) -> Callable[[int], list[dict[str, list[int]]]]:
    """Makes prompts of random tokens, without those that mean something to the model (end, padding, image)."""
    config = engine.llm_engine.model_config
    special = special_tokens(config.hf_config, config.hf_text_config)
    ordinary = [token for token in range(config.get_vocab_size()) if token not in special]
    if not ordinary:
        raise ModelError("The model's vocabulary has special tokens only.")
    chance = random.Random(plan.seed)
    shared = chance.choices(ordinary, k=plan.prompt_tokens // 2 if share_prefix else 0)

    def draw(batch: int) -> list[dict[str, list[int]]]:
        own = plan.prompt_tokens - len(shared)
        return [
            {"prompt_token_ids": shared + chance.choices(ordinary, k=own)} for _ in range(batch)
        ]

    return draw


def _generate(
    engine: Any, prompts: list[dict[str, list[int]]], new_tokens: int, output: EngineOutput
) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    try:
        engine.generate(prompts, sampling, use_tqdm=False)
    except Exception as error:
        raise failed_to_generate(error, len(prompts), output) from error
