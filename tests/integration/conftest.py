"""Tiny real models, and a way to record what is done with them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phaseprof.session import Session
from phaseprof.trace.reader import Trace, open_trace

# quanto compiles with the distutils of setuptools, which refuses to come after that of the standard library.
importlib.import_module("setuptools")

EOS, PAD, BOS = 2, 0, 1


def make_llama(**changes: Any) -> LlamaForCausalLM:
    """A random Llama of two layers, the same each time."""
    torch.manual_seed(7)
    config = LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            "max_position_embeddings": 512,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            **changes,
        }
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    """A tiny random Llama with grouped-query attention, in float32 on the CPU."""
    return make_llama()


@dataclass(frozen=True)
class Recorded:
    """What a recorded call returned, and its trace."""

    output: Any
    trace: Trace

    def passes(self, *columns: str) -> list[tuple[Any, ...]]:
        """Rows of the passes table in the order in which they ran, the named columns alone."""
        rows = self.trace.passes.sort_by("pass_id").select(list(columns)).to_pylist()
        return [tuple(row[name] for name in columns) for row in rows]


@pytest.fixture
def record(tmp_path: Path) -> Callable[[Callable[[], Any]], Recorded]:
    """Run a function under a session; give what it returned and its trace."""
    count = iter(range(1000))

    def run(function: Callable[[], Any]) -> Recorded:
        path = tmp_path / f"trace-{next(count)}"
        session = Session(path)
        session.start()
        try:
            output = function()
        finally:
            session.stop()
        return Recorded(output, open_trace(path))

    return run
