"""Models of vLLM without an engine, loaded as one rank of several would load them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class _Group:
    """A process group that says that there are more ranks; whatever else is asked for is the real one's."""

    def __init__(self, real: Any, rank: int, ranks: int) -> None:
        self._real = real
        self.rank_in_group, self.world_size = rank, ranks
        self.is_first_rank, self.is_last_rank = rank == 0, rank == ranks - 1
        self.device_group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def _groups(init: Path, rank: int, tensor: int, stages: int) -> Iterator[None]:
    """Process groups of this process alone, shown as those of one rank of several."""
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
        parallel_state,
    )

    init_distributed_environment(1, 0, f"file://{init}", 0, backend="gloo")
    ensure_model_parallel_initialized(1, 1)
    real = {name: getattr(parallel_state, name) for name in ("_TP", "_EP", "_PP")}
    parallel_state._TP = _Group(real["_TP"], rank if tensor > 1 else 0, tensor)
    parallel_state._EP = _Group(real["_EP"] or real["_TP"], rank if tensor > 1 else 0, tensor)
    parallel_state._PP = _Group(real["_PP"], rank if stages > 1 else 0, stages)
    try:
        yield
    finally:
        for name, group in real.items():
            setattr(parallel_state, name, group)


def load_model(
    folder: Path,
    config: Any,
    *,
    rank: int = 0,
    tensor: int = 1,
    stages: int = 1,
    **changes: Any,
) -> Any:
    """A model with dummy weights, processed as vLLM does when it has loaded them.

    Args:
        folder: An empty place for the config.
        config: Of transformers, with its architecture.
        rank: Which rank loads it.
        tensor: Tensor-parallel ranks.
        stages: Pipeline stages.
        changes: Of the engine's arguments.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.save_pretrained(folder)
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 22,
        "max_model_len": 256,
        "dtype": "float32",
        "block_size": 32,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": stages,
    }
    settings.update(changes)
    engine = EngineArgs(model=str(folder), **settings).create_engine_config()
    dtype = engine.model_config.dtype
    with (
        set_current_vllm_config(engine),
        _groups(folder / "init", rank, tensor, stages),
        set_default_torch_dtype(dtype),
    ):
        model = initialize_model(engine)
        DummyModelLoader(engine.load_config).load_weights(model, engine.model_config)
        base_loader.process_weights_after_loading(
            model, engine.model_config, next(model.parameters()).device
        )
    return model.eval()
