"""What the model of a vLLM engine is called in the tables: the same in the engine's core and in its workers."""

from __future__ import annotations

from collections import Counter
from typing import Any


def model_id_of(config: Any, numbers: Counter[str]) -> str:
    """The id of the next engine's model, from what all processes of the engine know of it.

    The class that a worker loads may have another name (a decoder that is served as an embedding model).

    Args:
        config: vLLM's `ModelConfig`.
        numbers: How many engines of each architecture were seen in this process; counted up.
    """
    name = str(getattr(config, "architecture", None) or "model")
    numbers[name] += 1
    # Apart from what transformers' own models are called.
    return f"vllm-{name}-{numbers[name]}"
