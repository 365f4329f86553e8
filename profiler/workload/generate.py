"""Requests of a known size: prompts of exactly N tokens, outputs of exactly M, through ``model.generate``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.errors import ModelError, UsageError
from phaseprof.workload import Progress, silent
from phaseprof.workload.load import one_line
from phaseprof.workload.rounds import Rounds

if TYPE_CHECKING:
    import torch

#: Cache implementations of ``generate`` that hold their place in memory from the first pass on.
STATIC_CACHES = ("static", "offloaded_static")
CACHES = ("dynamic", "offloaded", "quantized", *STATIC_CACHES)

#: New tokens of a warm-up request, and of one whose operators are recorded: enough to see decoding.
FEW_TOKENS = 4

#: Calls per batch size, unless they are asked for.
REPEATS = 8
#: Seconds that they take at least for each batch size where counters of a GPU are sampled, unless they are asked for:
#: a hundred windows, of which twenty hold some of a prefill. docs/counters.md has what is sure after how long.
SAMPLED_S = 12.0


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """What to run.

    Attributes:
        prompt_tokens: Tokens of every prompt; there is no padding.
        new_tokens: Tokens that every sequence generates; an end-of-sequence token does not end it earlier.
        batches: Sequences per call of ``generate``, one entry a batch size.
        warmup: Calls per batch size that are run first and not counted.
        repeats: Calls per batch size that are counted, at least.
        least_s: Seconds that the counted calls take at least: rounds over the batch sizes go on until then. 0 for
            `repeats` alone.
        seed: Seed of the prompts.
        cache_implementation: As ``generate`` names it; None for the model's default.

    Raises:
        UsageError: If a number is out of range, or the cache is not known.
    """

    prompt_tokens: int = 512
    new_tokens: int = 64
    batches: tuple[int, ...] = (1,)
    warmup: int = 1
    repeats: int = REPEATS
    seed: int = 0
    cache_implementation: str | None = None
    least_s: float = 0.0

    def __post_init__(self) -> None:
        _at_least(1, "prompt tokens", self.prompt_tokens)
        _at_least(1, "new tokens", self.new_tokens)
        _at_least(0, "warm-up calls", self.warmup)
        _at_least(1, "repeats", self.repeats)
        _at_least(0, "seed", self.seed)
        if not 0 <= self.least_s < math.inf:
            raise UsageError(f"Seconds: {self.least_s:g} is no length of time.")
        if not self.batches:
            raise UsageError("No batch size is given.", "Name at least one, for example 1,4,16.")
        for batch in self.batches:
            _at_least(1, "batch size", batch)
        if len(set(self.batches)) != len(self.batches):
            raise UsageError(
                "A batch size is named twice.", "Raise --repeats to run it more often."
            )
        if self.cache_implementation is not None and self.cache_implementation not in CACHES:
            raise UsageError(
                f"Unknown cache implementation {self.cache_implementation!r}.",
                f"Use one of {', '.join(CACHES)}.",
            )

    def facts(self) -> dict[str, object]:
        """The plan as plain values, for the trace's meta file."""
        facts = asdict(self)
        facts["batch"] = list(facts.pop("batches"))
        if not self.least_s:
            del facts["least_s"]
        return facts

    def amount(self) -> str:
        """How many calls there will be, in words."""
        calls = f"{self.repeats * len(self.batches)} calls"
        return f"{calls} or more, for {self.least_s:g} s," if self.least_s else calls


@dataclass(frozen=True, slots=True)
class WorkloadOutcome:
    """What was run.

    Attributes:
        calls: Calls of ``generate`` that were counted and ended.
        planned: Calls that were to be counted; where time decides, about so many.
        interrupted: Whether Ctrl-C ended the run early.
    """

    calls: int
    planned: int
    interrupted: bool


def check_fits(model: torch.nn.Module, plan: WorkloadPlan) -> None:
    """Check that prompt and output fit in the model's positions.

    The last generated token is never computed, so a request needs ``prompt + new - 1`` positions.

    Raises:
        UsageError: If they do not.
    """
    config = _text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    needed = plan.prompt_tokens + plan.new_tokens - 1
    # Sliding windows and ALiBi leave it out or set it to 0 or -1.
    if isinstance(limit, int) and 0 < limit < needed:
        raise UsageError(
            f"{plan.prompt_tokens} prompt + {plan.new_tokens} new tokens need {needed} positions; "
            f"the model has {limit}.",
            f"Use --prompt-tokens {limit + 1 - plan.new_tokens} or fewer."
            if plan.new_tokens <= limit
            else f"Use --new-tokens {limit} or fewer, prompt included.",
        )


def run_workload(
    model: torch.nn.Module, plan: WorkloadPlan, *, progress: Progress = silent
) -> WorkloadOutcome:
    """Run the requests: warm-up first, then `Rounds` over the batch sizes.

    Ctrl-C ends the run and keeps what was recorded.

    Raises:
        ModelError: If the model fails; passes recorded up to then are kept.
    """
    from phaseprof.session import warmup

    rounds = Rounds(plan.batches, plan.repeats, plan.least_s)
    try:
        prompts = _Prompts(model, plan)
        for number, batch in enumerate(plan.batches * plan.warmup):
            progress(f"Warm-up, batch {batch}", number, len(plan.batches) * plan.warmup)
            with warmup():
                _generate(model, prompts, batch, plan, _warmup_tokens(plan))
        for batch in rounds:
            progress(f"Generating, batch {batch}", rounds.calls, rounds.planned)
            _generate(model, prompts, batch, plan, plan.new_tokens)
        progress("Generating", rounds.calls, rounds.planned)
    except KeyboardInterrupt:
        return WorkloadOutcome(rounds.calls, rounds.planned, interrupted=True)
    return WorkloadOutcome(rounds.calls, rounds.planned, interrupted=False)


def run_few_tokens(model: torch.nn.Module, plan: WorkloadPlan) -> None:
    """Run one short call per batch size, for collectors that are too costly to time with.

    Raises:
        ModelError: If the model fails.
    """
    prompts = _Prompts(model, plan)
    for batch in plan.batches:
        _generate(model, prompts, batch, plan, min(plan.new_tokens, FEW_TOKENS))


def _warmup_tokens(plan: WorkloadPlan) -> int:
    """A static cache is laid out, and what runs on it compiled, for the full length."""
    if plan.cache_implementation in STATIC_CACHES:
        return plan.new_tokens
    return min(plan.new_tokens, FEW_TOKENS)


class _Prompts:
    """Random token ids, reproducible, without tokens that mean something to the model (padding, end, image)."""

    def __init__(self, model: torch.nn.Module, plan: WorkloadPlan) -> None:
        import torch

        self._device = next(model.parameters()).device
        self._tokens = plan.prompt_tokens
        self._generator = torch.Generator().manual_seed(plan.seed)
        special = special_tokens(
            model.config, _text_config(model), getattr(model, "generation_config", None)
        )
        ordinary = [i for i in range(_vocabulary(model)) if i not in special]
        if not ordinary:
            raise ModelError("The model's vocabulary has special tokens only.")
        self._ordinary = torch.tensor(ordinary)

    def draw(self, batch: int) -> torch.Tensor:
        """Ids of shape (batch, prompt_tokens), int64."""
        import torch

        shape = (batch, self._tokens)
        picks = torch.randint(len(self._ordinary), shape, generator=self._generator)
        return self._ordinary[picks].to(self._device)


def _generate(
    model: Any, prompts: _Prompts, batch: int, plan: WorkloadPlan, new_tokens: int
) -> None:
    """One call of ``generate``.

    Raises:
        ModelError: If it fails.
    """
    import torch

    ids = prompts.draw(batch)
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
        raise _say_why(error, batch, plan.prompt_tokens + new_tokens) from error


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


def _at_least(least: int, what: str, value: int) -> None:
    if value < least:
        raise UsageError(f"{what.capitalize()}: {value} is less than {least}.")
