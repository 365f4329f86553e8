"""What torch saw of a pass, for tests of the work model: FLOPs, the keys that attention was given, the experts chosen.

None of it comes from the code under test: `FlopCounterMode` sees the matrix products that really run, the mask that
attention is really given says which pairs count (in eager attention: the weights that are not zero), and sizes are
summed over parameters and cache tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
#: The name of the cache argument changed with transformers 5.24.
CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


@dataclass
class Truth:
    """One pass: FLOPs, the length of the keys that each layer's kernel was given (not in eager attention)."""

    flops: int = 0
    key_lengths: list[int] = field(default_factory=list)


@contextmanager
def counted(eager_pair_flops: int | None = None) -> Iterator[tuple[Truth, Callable[..., Any]]]:
    """Give a function that runs a model; afterwards the truth is filled in.

    Args:
        eager_pair_flops: FLOPs of one pair in one head, 2 (d_qk + d_v), of a model in eager attention; None in sdpa.
    """
    truth = Truth()

    def sdpa(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, **named: Any
    ) -> int:
        truth.key_lengths.append(k.shape[2])
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        allowed = (allowed.tril() if is_causal else allowed).expand(*q.shape[:3], k.shape[2])
        mask = named.get("attn_mask")
        if mask is not None:
            allowed = allowed & (
                mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
            )
        return 2 * int(allowed.sum()) * int(q.shape[3] + v.shape[3])

    def bmm(a: Any, b: Any, *_: Any, **__: Any) -> int:
        # An outer product: the angles of rotary embeddings. It sums nothing up, and no formula counts it.
        return 0 if a[2] == 1 else int(2 * a[0] * a[1] * a[2] * b[2])

    def grouped_mm(a: Any, b: Any, *_: Any, **__: Any) -> int:
        # Tokens sorted by expert, each against the matrix of its own.
        return int(2 * a[0] * a[1] * b[-1])

    sdpa._get_raw = True  # type: ignore[attr-defined]
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: sdpa,
        aten.bmm: bmm,
        aten._grouped_mm: grouped_mm,
    }

    def run(model: nn.Module, *args: Any, **named: Any) -> Any:
        counter = FlopCounterMode(display=False, custom_mapping=mapping)
        if eager_pair_flops is not None:
            named["output_attentions"] = True
        with torch.no_grad(), counter:
            out = model(*args, **named)
        truth.flops = counter.get_total_flops()
        if eager_pair_flops is not None:
            # The products of eager attention are whole rectangles; what the mask took out has weight zero.
            masked = sum(int((weights == 0).sum()) for weights in out.attentions)
            truth.flops -= masked * eager_pair_flops
        return out

    yield truth, run


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny products only lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def has(name: str, *, new: bool) -> bool:
    """Whether this transformers has a model class.

    Args:
        name: Of the class.
        new: It came after transformers 5.0; all others are in every version.
    """
    if hasattr(transformers, name):
        return True
    assert new, f"transformers {transformers.__version__} has no {name}"
    return False


def held_per_token(cache: Any) -> list[int]:
    """Bytes that one token of one sequence takes in each layer, from the shapes of the tensors in it."""
    return [
        sum(t.shape[1] * t.shape[3] * t.element_size() for t in (layer.keys, layer.values))
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    ]


def weights_read(model: nn.Module, tokens: int, *, head: nn.Module | None) -> int:
    """All parameters once, but of lookup tables that are not the head only the rows of the tokens."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    for table in model.modules():
        if isinstance(table, nn.Embedding) and (head is None or table.weight is not head.weight):
            row = table.weight.shape[1] * table.weight.element_size()
            total += tokens * row - table.weight.numel() * table.weight.element_size()
    return total
