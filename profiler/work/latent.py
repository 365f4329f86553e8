"""Multi-head latent attention (MLA, DeepSeek-V2): keys and values are compressed to one latent for all heads.

One projection makes the latent of ``r`` elements and a rotary key of ``d_rope``; another expands it to the keys
(without rotary part) and values of every head. Later releases of transformers cache the latent and expand what the
cache holds again in each pass (the attention then has an ``expand_kv``); earlier ones cache what they expanded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phaseprof.work.cost import AttentionCost
from phaseprof.work.modules import Matrix, class_name, matrix_of
from phaseprof.work.parts import NotCovered
from phaseprof.work.reach import Reach

if TYPE_CHECKING:
    from torch import nn

_COMPRESS = "kv_a_proj_with_mqa"
_EXPAND = "kv_b_proj"
_QUERY = ("q_b_proj", "q_proj")
#: Any of these makes an attention a latent one, whatever else it has.
_NAMES = (_COMPRESS, _EXPAND, "q_a_proj", "kv_a_proj")


def is_latent(module: nn.Module) -> bool:
    """Whether a module holds the projections of a latent attention, all of them or only some."""
    return any(name in module._modules for name in _NAMES)


def latent_cost(module: nn.Module, output: Matrix, reach: Reach) -> AttentionCost:
    """Read one latent attention.

    Args:
        module: One for which :func:`is_latent` holds.
        output: Its output projection.
        reach: What its queries can reach.

    Raises:
        NotCovered: If its projections do not fit together.
    """
    name = class_name(module)
    compress, expand = _matrix(module, _COMPRESS), _matrix(module, _EXPAND)
    query = _matrix(module, next((n for n in _QUERY if n in module._modules), _QUERY[0]))
    heads, nope, rope = (
        _said(module, n) for n in ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    v_head_dim = _said(module, "v_head_dim")
    consistent = (
        compress.outputs == expand.inputs + rope
        and expand.outputs == heads * (nope + v_head_dim)
        and query.outputs == heads * (nope + rope)
        and output.inputs == heads * v_head_dim
    )
    if not consistent:
        raise NotCovered(f"{name}: the projections of its latents do not fit its heads")
    cached_latent = callable(getattr(module, "expand_kv", None))
    elements = compress.outputs if cached_latent else heads * (nope + rope + v_head_dim)
    return AttentionCost(
        layers=1,
        query_heads=heads,
        kv_heads=heads,
        qk_head_dim=nope + rope,
        v_head_dim=v_head_dim,
        window_tokens=reach.window_tokens,
        kv_bytes_per_token=elements * expand.element_bytes,
        chunk_tokens=reach.chunk_tokens,
        expand_flops_per_token=expand.flops_per_token if cached_latent else 0,
        forgets=reach.forgets,
    )


def _matrix(module: nn.Module, name: str) -> Matrix:
    child = module._modules.get(name)
    matrix = None if child is None else matrix_of(child)
    if matrix is None:
        raise NotCovered(f"{name} of {class_name(module)} is missing, or no plain linear layer")
    return matrix


def _said(module: nn.Module, name: str) -> int:
    value = getattr(module, name, None)
    if not isinstance(value, int):
        raise NotCovered(f"{class_name(module)} does not say its {name}")
    return value
