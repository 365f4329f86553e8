"""Engines of vLLM for tests, prompts for them, and what was recorded of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaseprof.phases import RequestTokens, check_invariants
from phaseprof.trace.reader import Trace

#: They live as long as the process: the end of one takes the process groups of all.
_engines: list[Any] = []


def make_engine(folder: Path, **changes: Any) -> Any:
    """An `LLM` of dummy weights, eager, in this process."""
    from vllm import LLM
    from vllm.triton_utils import dispatcher

    if _engines:
        # vLLM replaces its kernels for the CPU once an engine, though they are the process's; the second time it may
        # meet modules that it cannot read.
        dispatcher.register_kernels = lambda overrides: None
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 22,
        "max_model_len": 256,
        "dtype": "float32",
        "block_size": 32,
        "disable_log_stats": False,
    }
    _engines.append(LLM(str(folder), **{**settings, **changes}))
    return _engines[-1]


def sampling(tokens: int, **changes: Any) -> Any:
    """Greedy sampling of so many tokens, whatever they are."""
    from vllm import SamplingParams

    settings = {"max_tokens": tokens, "temperature": 0.0, "detokenize": False, "ignore_eos": True}
    return SamplingParams(**{**settings, **changes})


def prompts(*lengths: int, first: int = 3) -> list[Any]:
    """Prompts of these lengths, no two of which begin alike."""
    return [
        {"prompt_token_ids": [(first + 17 * n + 5 * place) % 250 + 3 for place in range(length)]}
        for n, length in enumerate(lengths)
    ]


def generate(engine: Any, inputs: list[Any], parameters: Any) -> Any:
    """The engine's answers, without a progress bar."""
    return engine.generate(inputs, parameters, use_tqdm=False)


def tokens_of(outputs: Any) -> list[list[int]]:
    """The tokens of each answer."""
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def counter(engine: Any, name: str) -> int:
    """What a counter of the engine's own says, over its life."""
    return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == name)


@dataclass(frozen=True)
class Part:
    """What a pass computed of one request."""

    request: str
    phase: str
    query: int
    past: int
    prompt: int


@dataclass(frozen=True)
class Recorded:
    """What a recorded call returned, and its trace."""

    output: Any
    trace: Trace

    def passes(self, *columns: str) -> list[tuple[Any, ...]]:
        """Rows of the passes table in the order in which they ran, the named columns alone."""
        rows = self.trace.passes.sort_by("pass_id").select(list(columns)).to_pylist()
        return [tuple(row[name] for name in columns) for row in rows]

    def parts(self) -> list[list[Part]]:
        """Of each pass, its requests. They are numbered in the order in which they were first computed, from ``a``."""
        names: dict[str, str] = {}
        rows = []
        for (slices,) in self.passes("slices"):
            row = []
            for one in slices:
                name = names.setdefault(one["request_id"], chr(ord("a") + len(names)))
                row.append(Part(name, one["phase"], one["query"], one["past"], one["prompt"]))
            rows.append(row)
        return rows

    def short(self) -> list[str]:
        """Of each pass, its phase and its requests as ``a: phase past+query``."""
        phases = [phase for (phase,) in self.passes("phase")]
        return [
            f"{phase} | " + ", ".join(f"{p.request}: {p.phase} {p.past}+{p.query}" for p in parts)
            for phase, parts in zip(phases, self.parts(), strict=True)
        ]

    def sum(self, column: str) -> int:
        """A column of the passes, summed."""
        return sum(value for (value,) in self.passes(column))

    def notes(self) -> set[str]:
        """What could not be measured."""
        return {note.what for meta in self.trace.metas for note in meta.not_measured}

    def broken(self, outputs: Mapping[str, int], *, cached: int) -> list[str]:
        """Which of the two identities of the labels does not hold over requests that are complete.

        Args:
            outputs: Tokens that each request got, by its name in `parts`.
            cached: Tokens that they found in the cache.
        """
        prompt = {part.request: part.prompt for parts in self.parts() for part in parts}
        assert set(prompt) == set(outputs)
        return check_invariants(
            [
                RequestTokens(
                    request_id="all",
                    # The prompts below are of all of them; each has one token that is sampled and never computed.
                    sequences=1,
                    prompt_tokens=sum(prompt.values()),
                    cached_tokens=cached,
                    recomputed_tokens=self.sum("recomputed_tokens"),
                    prefill_tokens=self.sum("prefill_tokens"),
                    decode_tokens=self.sum("decode_tokens"),
                    rejected_tokens=self.sum("draft_tokens") - self.sum("accepted_tokens"),
                    output_tokens=sum(outputs.values()) - len(outputs) + 1,
                )
            ]
        )
