"""Requests of a known size: prompts of exactly N tokens, outputs of exactly M, through ``model.generate``."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phaseprof.errors import ModelError, UsageError
from phaseprof.records import CallKind
from phaseprof.workload import Progress, silent
from phaseprof.workload.load import one_line
from phaseprof.workload.plan import FEW_TOKENS, Cell, WorkloadOutcome, WorkloadPlan
from phaseprof.workload.resume import FRESH, Progressed

if TYPE_CHECKING:
    import torch


def check_fits(model: torch.nn.Module, plan: WorkloadPlan) -> None:
    """Check that prompt and output fit in the model's positions.

    The last generated token is never computed, so a request needs ``prompt + new - 1`` positions.

    Raises:
        UsageError: If they do not.
    """
    config = _text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    prompt, new = max(plan.prompt_tokens), max(plan.new_tokens)
    needed = prompt + new - 1
    # Sliding windows and ALiBi leave it out or set it to 0 or -1.
    if isinstance(limit, int) and 0 < limit < needed:
        raise UsageError(
            f"{prompt} prompt + {new} new tokens need {needed} positions; the model has {limit}.",
            f"Use --prompt-tokens {limit + 1 - new} or fewer."
            if new <= limit
            else f"Use --new-tokens {limit} or fewer, prompt included.",
        )


def run_workload(
    model: torch.nn.Module,
    plan: WorkloadPlan,
    *,
    done: Progressed = FRESH,
    progress: Progress = silent,
) -> WorkloadOutcome:
    """Run the requests: warm-up of every cell first, then `Rounds` over the cells.

    Ctrl-C ends the run and keeps what was recorded.

    Args:
        model: Generates.
        plan: What to run.
        done: What an earlier run has done of it.
        progress: Told what goes on.

    Raises:
        ModelError: If the model fails; passes recorded up to then are kept.
    """
    from phaseprof.session import warmup, workload_call

    rounds = done.rounds(plan)
    try:
        prompts = _Prompts(model, plan.seed)
        warmups = [(cell, n) for n in range(plan.warmup) for cell in done.to_warm(plan)]
        for number, (cell, repeat) in enumerate(warmups):
            progress(f"Warm-up, {plan.named(cell)}", number, len(warmups))
            new = plan.warmup_tokens(cell)
            with warmup(), workload_call(CallKind.WARMUP, **call_sizes(cell, new, repeat)):
                _generate(model, prompts.draw(cell, "warm-up", repeat), plan, new)
        for cell, repeat in rounds:
            progress(f"Generating, {plan.named(cell)}", rounds.calls, rounds.planned)
            ids = prompts.draw(cell, "counted", repeat)
            with workload_call(CallKind.COUNTED, **call_sizes(cell, cell.new_tokens, repeat)):
                _generate(model, ids, plan, cell.new_tokens)
        progress("Generating", rounds.calls, rounds.planned)
    except KeyboardInterrupt:
        return WorkloadOutcome(rounds.calls, rounds.planned, interrupted=True)
    return WorkloadOutcome(rounds.calls, rounds.planned, interrupted=False)


def run_few_tokens(
    model: torch.nn.Module, plan: WorkloadPlan, *, done: Progressed = FRESH, again: int = 0
) -> None:
    """Run one short call for each batch size and length of prompt, for collectors that are too costly to time with.

    Args:
        model: Generates.
        plan: What is run.
        done: What an earlier run has looked at.
        again: How often they were run before.

    Raises:
        ModelError: If the model fails.
    """
    from phaseprof.session import workload_call

    prompts = _Prompts(model, plan.seed)
    for cell in done.unseen(plan):
        new = min(cell.new_tokens, FEW_TOKENS)
        with workload_call(CallKind.LOOK, **call_sizes(cell, new, again)):
            _generate(model, prompts.draw(cell, "look", again), plan, new)


def call_sizes(cell: Cell, new_tokens: int, repeat: int) -> dict[str, int]:
    """What `phaseprof.session.workload_call` is told of a call; a short one generates fewer tokens than its cell."""
    return {
        "prompt_tokens": cell.prompt_tokens,
        "new_tokens": new_tokens,
        "sequences": cell.batch,
        "repeat": repeat,
    }


class _Prompts:
    """Random token ids, without tokens that mean something to the model (padding, end, image).

    They depend on the seed and the call alone: a run that is continued makes the calls that it would have made.
    """

    def __init__(self, model: torch.nn.Module, seed: int) -> None:
        import torch

        self._device = next(model.parameters()).device
        self._seed = seed
        special = special_tokens(
            model.config, _text_config(model), getattr(model, "generation_config", None)
        )
        ordinary = [i for i in range(_vocabulary(model)) if i not in special]
        if not ordinary:
            raise ModelError("The model's vocabulary has special tokens only.")
        self._ordinary = torch.tensor(ordinary)

    def draw(self, cell: Cell, kind: str, repeat: int) -> torch.Tensor:
        """Ids of shape (batch, prompt_tokens), int64."""
        import torch

        seed = prompt_seed(self._seed, cell, kind, repeat)
        generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(63))
        shape = (cell.batch, cell.prompt_tokens)
        picks = torch.randint(len(self._ordinary), shape, generator=generator)
        return self._ordinary[picks].to(self._device)


def prompt_seed(seed: int, cell: Cell, kind: str, repeat: int) -> str:
    """What the prompts of one call are drawn by."""
    return f"{seed} {cell.prompt_tokens} {cell.new_tokens} {cell.batch} {kind} {repeat}"


def _generate(model: Any, ids: torch.Tensor, plan: WorkloadPlan, new_tokens: int) -> None:
    """One call of ``generate``.

    Raises:
        ModelError: If it fails.
    """
    import torch

    options: dict[str, object] = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "num_beams": 1,
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "pad_token_id": _pad_token(model),
    }
    if plan.cache_implementation is not None:
        options["cache_implementation"] = plan.cache_implementation
    try:
        model.generate(ids, **options)
    except Exception as error:
        batch, prompt_tokens = ids.shape
        raise _say_why(error, batch, prompt_tokens + new_tokens) from error


def _say_why(error: Exception, batch: int, tokens: int) -> ModelError:
    import torch

    # torch says it by class on a GPU and by text alone on a CPU.
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPU" in str(error):
        return ModelError(
            f"The device's memory does not hold batch {batch} with {tokens} tokens a sequence.",
            "Use a smaller --batch, fewer tokens or --dtype bfloat16.",
        )
    return ModelError(
        f"The model failed at batch {batch}: {type(error).__name__}: {one_line(error)}.",
        "PHASEPROF_DEBUG=1 shows where.",
    )


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _vocabulary(model: Any) -> int:
    """Ids below it have an embedding."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    named = getattr(_text_config(model), "vocab_size", None)
    return min(rows, named) if isinstance(named, int) else rows


def special_tokens(*configs: Any) -> frozenset[int]:
    """Every id that a config of transformers names: ``eos_token_id``, ``pad_token_id``, ``image_token_id``, …"""
    found: set[int] = set()
    for config in configs:
        fields: Mapping[str, object] = config.to_dict() if config is not None else {}
        for name, value in fields.items():
            if name.endswith(("_token_id", "_token_index")):
                found.update(v for v in _as_list(value) if isinstance(v, int))
    return frozenset(found)


def _pad_token(model: Any) -> int:
    """Never written, since all sequences end together; without it transformers warns."""
    for config in (getattr(model, "generation_config", None), _text_config(model)):
        for name in ("pad_token_id", "eos_token_id"):
            for value in _as_list(getattr(config, name, None)):
                if isinstance(value, int) and value >= 0:
                    return value
    return 0


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
