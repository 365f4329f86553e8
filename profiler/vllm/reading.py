"""What is read of a model runner of vLLM once, for the work of its steps: its model, its KV cache, and how it runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phaseprof.errors import NotMeasured
from phaseprof.vllm.kv import BlockPool, block_pool
from phaseprof.vllm.model import Rank, attention_backends, decoder_of, vllm_cost
from phaseprof.vllm.seams import Seam
from phaseprof.vllm.storage import WeightsAsLoaded
from phaseprof.work.cost import ModelCost

#: Modules that call `process_weights_after_loading`, each by a name of its own.
_LOADERS = (
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader",
    "vllm.model_executor.model_loader.weight_cache.daemon",
)
_PROCESS = "process_weights_after_loading"


@dataclass(frozen=True, slots=True)
class RunnerWork:
    """What the work of a runner's steps depends on.

    Attributes:
        cost: Its model on this rank; None if it could not be read.
        pool: Its KV cache; None before it was set up.
        attention: The backends that its attention runs on.
        quantization: How its weights are quantized; None where they are not.
        notes: What of its steps is not measured.
    """

    cost: ModelCost | None = None
    pool: BlockPool | None = None
    attention: str | None = None
    quantization: str | None = None
    notes: tuple[NotMeasured, ...] = ()


class WorkReader:
    """Reads runners, and remembers weights from before they are repacked.

    Args:
        failed: Told of an exception in our own code.

    Attributes:
        active: Set to False, the wrapper that somebody else still holds hands calls on.
    """

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        self._failed = failed
        self._loaded = WeightsAsLoaded()
        self.active = True

    def seams(self) -> tuple[Seam, ...]:
        """Where vLLM is wrapped."""
        lost = "the bytes of quantized weights that vLLM repacks as it loads them"
        return tuple(Seam(module, "", {_PROCESS: self._wrap}, lost) for module in _LOADERS)

    def remove(self) -> None:
        """Hand every call on from now on."""
        self.active = False

    def read(self, runner: Any) -> RunnerWork:
        """Read a runner at its first step, when its weights and its cache are in place."""
        model = runner.get_model()
        rank = _rank(runner)
        cost = vllm_cost(model, rank, self._loaded)
        pool = block_pool(runner, rank)
        backends = attention_backends(model)
        quantization = getattr(runner.model_config, "quantization", None)
        return RunnerWork(
            cost=cost,
            pool=pool,
            attention=", ".join(backends) or None,
            quantization=None if quantization is None else str(quantization),
            notes=tuple(_notes(runner, model, cost, pool)),
        )

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def process(model: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                try:
                    self._loaded.remember(model)
                except Exception as failure:
                    self._failed("looking at weights before vLLM repacks them", failure)
            return original(model, *args, **kwargs)

        return process


def _rank(runner: Any) -> Rank:
    """What this rank does of the model."""
    config = runner.parallel_config
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    first = last = True
    if int(getattr(config, "pipeline_parallel_size", 1)) > 1 and state is not None:
        group = state.get_pp_group()
        first, last = bool(group.is_first_rank), bool(group.is_last_rank)
    contexts = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return Rank(
        first=first,
        last=last,
        absorbs=_absorbs(runner),
        splits_tokens=any(int(getattr(config, name, 1) or 1) > 1 for name in contexts),
    )


def _absorbs(runner: Any) -> int:
    """Query tokens of a row up to which latent attention takes it for a decode: what the builders of its metadata
    split a batch at."""
    thresholds = [
        int(threshold)
        for builder in _builders(getattr(runner, "attn_groups", None))
        if (threshold := getattr(builder, "reorder_batch_threshold", None)) is not None
        and any(kind.__name__ == "MLACommonMetadataBuilder" for kind in type(builder).__mro__)
    ]
    return min(thresholds, default=1)


def _builders(groups: Any) -> Iterator[Any]:
    for group in groups if isinstance(groups, list | tuple) else ():
        if isinstance(group, list | tuple):
            yield from _builders(group)
        else:
            yield from getattr(group, "metadata_builders", None) or ()


def _notes(
    runner: Any, model: Any, cost: ModelCost, pool: BlockPool | None
) -> Iterator[NotMeasured]:
    name = type(model).__name__
    if not cost.covered:
        yield NotMeasured(
            f"FLOPs and bytes of {name}",
            f"{'; '.join(cost.not_covered)}",
            "report the model if you need it: labels and times are not affected",
        )
    if pool is not None and not pool.layout.covered:
        yield NotMeasured(
            f"KV bytes of {name}",
            pool.layout.not_covered[0],
            "report the model if you need it: labels and times are not affected",
        )
    if cost.offloaded_bytes:
        yield NotMeasured(
            f"how {name} is brought to its device",
            f"{cost.offloaded_bytes / 1e9:.3g} GB of its weights stay in the host's memory and are read from there in "
            "each step; that they come over a bus is not counted",
            "fit the model on the device",
        )
    if decoder_of(model) is not model:
        yield NotMeasured(
            f"the work of the encoders of {name}",
            "steps that encode images or sound count the decoder alone, while their time is that of both",
            "compare steps of text with each other",
        )
    if getattr(runner, "speculative_config", None) is not None and _drafts_with_model(runner):
        yield NotMeasured(
            f"the work of the model that drafts for {name}",
            "vLLM runs it inside the steps of the model that it drafts for, which count that one alone",
            "compare the times of steps with and without drafting",
        )


def _drafts_with_model(runner: Any) -> bool:
    return any(
        getattr(getattr(runner, name, None), "model", None) is not None
        for name in ("drafter", "speculator")
    )
