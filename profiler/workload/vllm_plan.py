"""What `phaseprof profile --engine vllm` asks of vLLM: its options, checked, as arguments of `vllm.LLM`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phaseprof.errors import UsageError
from phaseprof.workload.plan import WorkloadPlan

#: The KV cache on a CPU, where vLLM would take half of the memory: so much, or a quarter of what is there.
_CPU_CACHE_BYTES = 4 << 30
_CPU_CACHE_SHARE = 0.25

_SPECULATE = re.compile(r"ngram:([1-9][0-9]?)")
#: Tokens that an n-gram of the prompt lookup has: vLLM's own defaults match five, which random tokens never repeat.
_NGRAM_MIN, _NGRAM_MAX = 1, 3


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine.

    Attributes:
        max_batched_tokens: Tokens of a step; longer prompts are computed in chunks. None for vLLM's default.
        prefix_caching: Keep the KV of prefixes, and give all prompts of a run the same first half. None: leave the
            cache off, as prompts that are all different find nothing in it.
        draft_tokens: Tokens that the n-gram lookup drafts a step; None for no speculation.
        tensor_parallel: Ranks that share each layer.

    Raises:
        UsageError: If a number is out of range.
    """

    max_batched_tokens: int | None = None
    prefix_caching: bool | None = None
    draft_tokens: int | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.max_batched_tokens is not None and self.max_batched_tokens < 1:
            raise UsageError(f"Tokens of a step: {self.max_batched_tokens} is less than 1.")
        if self.tensor_parallel < 1:
            raise UsageError(f"Tensor-parallel ranks: {self.tensor_parallel} is less than 1.")

    def facts(self) -> dict[str, object]:
        """What was set, as plain values, for the trace's meta file."""
        return {name: value for name, value in asdict(self).items() if value not in (None, 1)}


def parse_speculate(text: str | None) -> int | None:
    """Read ``ngram:K``.

    Raises:
        UsageError: If it is something else.
    """
    if text is None:
        return None
    found = _SPECULATE.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--speculate {text!r} is not known.",
            "Give ngram:K, K tokens drafted a step, for example --speculate ngram:4",
        )
    return int(found[1])


def engine_arguments(
    model: str,
    name: str,
    plan: WorkloadPlan,
    options: EngineOptions,
    *,
    dtype: str,
    random_weights: bool,
    cpu: bool,
) -> dict[str, Any]:
    """The arguments of `vllm.LLM`.

    Args:
        model: A folder, or the name of a model on the hub.
        name: What reports call it.
        plan: The requests, which the engine is laid out for.
        options: Of the engine.
        dtype: As vLLM names it.
        random_weights: Read no weights, make some.
        cpu: It runs on a CPU.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "served_model_name": name,
        "dtype": dtype,
        "seed": plan.seed,
        "skip_tokenizer_init": True,
        "max_model_len": plan.longest_tokens,
        "max_num_seqs": max(plan.batches),
        "enable_prefix_caching": bool(options.prefix_caching),
        "tensor_parallel_size": options.tensor_parallel,
    }
    if random_weights:
        arguments["load_format"] = "dummy"
    if options.max_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_batched_tokens
    if options.draft_tokens is not None:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": options.draft_tokens,
            "prompt_lookup_min": _NGRAM_MIN,
            "prompt_lookup_max": _NGRAM_MAX,
        }
    if cpu:
        # Compilation for a CPU takes minutes; what is profiled here is the engine.
        arguments["enforce_eager"] = True
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes()
    return arguments


def engine_environment(
    options: EngineOptions, *, cpu: bool, threads: int | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables to set before vLLM is imported. Those that the user has set stand.

    On a CPU the engine runs in this process, which starts in half the time and lets its operators be recorded; ranks
    of a tensor-parallel engine, and any engine on a GPU, have the processes that vLLM gives them.
    """
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if cpu and options.tensor_parallel == 1:
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if cpu and options.tensor_parallel > 1:
        cores = sorted(os.sched_getaffinity(0))
        each = threads if threads is not None else len(cores) // options.tensor_parallel
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = _bound(cores, options.tensor_parallel, each)
    elif threads is not None:
        wanted["OMP_NUM_THREADS"] = str(threads)
    return {name: value for name, value in wanted.items() if name not in environment}


def _bound(cores: list[int], ranks: int, each: int) -> str:
    """Cores of each rank, as vLLM reads them: ``0,1|2,3``.

    Raises:
        UsageError: If there are too few cores.
    """
    if not 0 < each * ranks <= len(cores):
        raise UsageError(
            f"--tensor-parallel {ranks}: each rank needs cores of its own, and there are {len(cores)} in all.",
            "Use fewer ranks, or fewer --threads, which are those of a rank.",
        )
    groups = [cores[rank * each : (rank + 1) * each] for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in group) for group in groups)


def _cpu_cache_bytes() -> int:
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(_CPU_CACHE_BYTES, int(there * _CPU_CACHE_SHARE))
