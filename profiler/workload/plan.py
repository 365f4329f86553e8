"""What `phaseprof profile` runs: a grid of cells, each a size of prompt, output and batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

from phaseprof.errors import UsageError

#: Cache implementations of ``generate`` that hold their place in memory from the first pass on.
STATIC_CACHES = ("static", "offloaded_static")
CACHES = ("dynamic", "offloaded", "quantized", *STATIC_CACHES)

#: New tokens of a warm-up request, and of one whose operators are recorded: enough to see decoding.
FEW_TOKENS = 4

#: Calls per cell, unless they are asked for.
REPEATS = 8
#: Seconds that they take at least for each cell where counters of a GPU are sampled, unless they are asked for: a
#: hundred windows, of which twenty hold some of a prefill. docs/counters.md has what is sure after how long.
SAMPLED_S = 12.0


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One size of call.

    Attributes:
        prompt_tokens: Tokens of every prompt; there is no padding.
        new_tokens: Tokens that every sequence generates.
        batch: Sequences at once.
    """

    prompt_tokens: int
    new_tokens: int
    batch: int


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """What to run: every combination of the sizes.

    Attributes:
        prompt_tokens: Tokens of the prompts, one entry a size.
        new_tokens: Tokens that every sequence generates, one entry a size; an end-of-sequence token does not end it
            earlier.
        batches: Sequences per call of ``generate``, one entry a batch size.
        warmup: Calls per cell that are run first and not counted.
        repeats: Calls per cell that are counted, at least.
        least_s: Seconds that the counted calls take at least: rounds over the cells go on until then. 0 for `repeats`
            alone.
        seed: Seed of the prompts.
        cache_implementation: As ``generate`` names it; None for the model's default.

    Raises:
        UsageError: If a number is out of range or there twice, or the cache is not known.
    """

    prompt_tokens: tuple[int, ...] = (512,)
    new_tokens: tuple[int, ...] = (64,)
    batches: tuple[int, ...] = (1,)
    warmup: int = 1
    repeats: int = REPEATS
    seed: int = 0
    cache_implementation: str | None = None
    least_s: float = 0.0

    def __post_init__(self) -> None:
        _sizes("prompt tokens", "number of prompt tokens", self.prompt_tokens)
        _sizes("new tokens", "number of new tokens", self.new_tokens)
        _at_least(0, "warm-up calls", self.warmup)
        _at_least(1, "repeats", self.repeats)
        _at_least(0, "seed", self.seed)
        if not 0 <= self.least_s < math.inf:
            raise UsageError(f"Seconds: {self.least_s:g} is no length of time.")
        _sizes("batch size", "batch size", self.batches)
        if self.cache_implementation is not None and self.cache_implementation not in CACHES:
            raise UsageError(
                f"Unknown cache implementation {self.cache_implementation!r}.",
                f"Use one of {', '.join(CACHES)}.",
            )

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every combination; those of one context beside each other, by batch as given."""
        return tuple(
            Cell(*sizes) for sizes in product(self.prompt_tokens, self.new_tokens, self.batches)
        )

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(self.prompt_tokens) + max(self.new_tokens)

    def named(self, cell: Cell) -> str:
        """What tells a cell from the others: ``batch 4``, or ``batch 4, 128 prompt + 16 new tokens``."""
        batch = f"batch {cell.batch}"
        if len(self.prompt_tokens) == len(self.new_tokens) == 1:
            return batch
        return f"{batch}, {cell.prompt_tokens} prompt + {cell.new_tokens} new tokens"

    def warmup_tokens(self, cell: Cell) -> int:
        """New tokens of a warm-up call. A static cache is laid out, and what runs on it compiled, for the full
        length."""
        if self.cache_implementation in STATIC_CACHES:
            return cell.new_tokens
        return min(cell.new_tokens, FEW_TOKENS)

    def facts(self) -> dict[str, object]:
        """The plan as plain values, for the trace's meta file. A length of which there is one is a number."""
        facts = asdict(self)
        facts["batch"] = list(facts.pop("batches"))
        for name in ("prompt_tokens", "new_tokens"):
            sizes = facts[name]
            facts[name] = sizes[0] if len(sizes) == 1 else list(sizes)
        if not self.least_s:
            del facts["least_s"]
        return facts

    def amount(self) -> str:
        """How many calls there will be, in words."""
        calls = f"{self.repeats * len(self.cells)} calls"
        return f"{calls} or more, for {self.least_s:g} s," if self.least_s else calls

    def sizes(self) -> str:
        """What is asked of each call, in words: ``128/512 prompt + 64 new tokens``."""
        prompts, news = ("/".join(map(str, each)) for each in (self.prompt_tokens, self.new_tokens))
        return f"{prompts} prompt + {news} new tokens"


@dataclass(frozen=True, slots=True)
class WorkloadOutcome:
    """What was run.

    Attributes:
        calls: Calls that were counted and ended.
        planned: Calls that were to be counted; where time decides, about so many.
        interrupted: Whether Ctrl-C ended the run early.
    """

    calls: int
    planned: int
    interrupted: bool


def listed(sizes: Sequence[int]) -> str:
    """Sizes as a reader sees them: ``1, 4, 16``."""
    return ", ".join(map(str, sizes))


def parse_sizes(text: str, option: str) -> tuple[int, ...]:
    """Read ``1,4,16``.

    Args:
        text: What was given.
        option: For which option.

    Raises:
        UsageError: If an entry is not a whole number.
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not (entry.isascii() and entry.removeprefix("-").isdigit()):
            raise UsageError(
                f"{option} {text!r}: {entry!r} is not a whole number.",
                f"Give one number, or several with commas between them, for example {option} 1,4,16",
            )
    return tuple(int(entry) for entry in entries)


def _sizes(what: str, one: str, sizes: tuple[int, ...]) -> None:
    if not sizes:
        raise UsageError(f"No {one} is given.", "Name at least one, for example 1,4,16.")
    for size in sizes:
        _at_least(1, what, size)
    if len(set(sizes)) != len(sizes):
        raise UsageError(f"A {one} is named twice.", "Raise --repeats to run it more often.")


def _at_least(least: int, what: str, value: int) -> None:
    if value < least:
        raise UsageError(f"{what.capitalize()}: {value} is less than {least}.")
