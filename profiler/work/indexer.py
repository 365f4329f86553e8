"""Sparse attention with an indexer (DeepSeek-V3.2, DeepSeek Sparse Attention): each query attends to the keys that a
small scorer chooses among all before it.

The scorer has heads of its own over one key for each token, and weighs its heads to one score: ``2 H d`` FLOPs for the
products of a query x key pair and ``2 H`` for the weighing. It looks at every pair; the attention itself needs at most
``index_topk`` keys for each query, as if it had a window of that size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaseprof.work.cost import AttentionCost
from phaseprof.work.modules import class_name, matrix_of
from phaseprof.work.parts import NotCovered
from phaseprof.work.reach import Reach

if TYPE_CHECKING:
    from torch import nn

_CHILD = "indexer"
_PARTS = frozenset({"wq_b", "wk", "k_norm", "weights_proj"})


def chooses_keys(module: nn.Module) -> bool:
    """Whether an attention attends to chosen keys, by an indexer of its own or by that of a layer before it."""
    return _CHILD in module._modules or getattr(module, "skip_topk", False) is True


def chosen_reach(module: nn.Module, config: object) -> Reach:
    """What a query of such an attention reaches. The cache keeps every token.

    Raises:
        NotCovered: If it is not said how many keys are chosen.
    """
    indexer = module._modules.get(_CHILD)
    top_k = getattr(config if indexer is None else indexer, "index_topk", None)
    if not isinstance(top_k, int) or top_k <= 0:
        raise NotCovered(f"{class_name(module)} attends to what an indexer chooses")
    return Reach(window_tokens=top_k, forgets=False)


def indexer_cost(module: nn.Module) -> AttentionCost | None:
    """The scorer of one layer, as an attention with values of width one. Its projections are linear layers like any
    other.

    Returns:
        None for an attention without an indexer of its own.

    Raises:
        NotCovered: If its projections do not fit together.
    """
    indexer = module._modules.get(_CHILD)
    if indexer is None:
        return None
    names = {name for name, child in indexer._modules.items() if child is not None}
    query, key, weigh = (matrix_of(indexer._modules.get(n)) for n in ("wq_b", "wk", "weights_proj"))
    if names != _PARTS or query is None or key is None or weigh is None:
        raise NotCovered(f"{class_name(module)} attends to what an indexer of unknown form chooses")
    heads, head_dim = weigh.outputs, key.outputs
    if query.outputs != heads * head_dim:
        raise NotCovered(f"{class_name(indexer)}: its queries do not fit its key")
    return AttentionCost(
        layers=1,
        query_heads=heads,
        kv_heads=1,
        qk_head_dim=head_dim,
        v_head_dim=1,
        window_tokens=None,
        kv_bytes_per_token=head_dim * key.element_bytes,
    )
