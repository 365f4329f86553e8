"""How an attention module is shaped: heads and widths, read from the weights of its projections.

The widths are facts of the weights; how they divide into heads is checked against what the module and its config say.
Where the two disagree, the module is something that this page does not describe, and `NotCovered` says so. Latent
attention is read in `phaseprof.work.latent`, what a query can reach in `phaseprof.work.reach`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phaseprof.work.cost import AttentionCost
from phaseprof.work.indexer import chooses_keys, chosen_reach
from phaseprof.work.latent import is_latent, latent_cost
from phaseprof.work.modules import Matrix, class_name, matrix_of, own_parameters
from phaseprof.work.parts import NotCovered
from phaseprof.work.reach import reach_of

if TYPE_CHECKING:
    from torch import nn

#: Names of the projections in the decoders of transformers.
_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("Wq", "Wk", "Wv"), ("query", "key", "value"))
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
#: Keys and values alone, where each query head is an expert's (JetMoE).
_SHARED = "kv_proj"
_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "attn_out", "Wo")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size")


@dataclass(frozen=True, slots=True)
class _Widths:
    """Outputs of the three projections and inputs of the last: Hq d_qk, Hkv d_qk, Hkv d_v, Hq d_v."""

    query: int
    key: int
    value: int
    output: int
    kv_element_bytes: int


def is_attention(module: nn.Module) -> bool:
    """Whether a module holds the projections of an attention, all of them or only some."""
    children = module._modules
    if is_latent(module) or any(name in children for name in (*_FUSED, _SHARED)):
        return True
    return any(trio[0] in children or trio[1] in children for trio in _SEPARATE)


def borrows_keys(module: nn.Module) -> bool:
    """Whether an attention uses the keys and values of a layer before it (Gemma 3n)."""
    return getattr(module, "is_kv_shared_layer", False) is True


def attention_cost(module: nn.Module, config: object, layer: int) -> AttentionCost:
    """Read one attention module.

    Args:
        module: One for which :func:`is_attention` holds, with keys and values of its own.
        config: The config of the decoder that it belongs to.
        layer: Its place in the stack of layers.

    Returns:
        The cost of one layer.

    Raises:
        NotCovered: If it is no causal self-attention, or if weights, module and config disagree.
    """
    name = class_name(module)
    if getattr(module, "is_cross_attention", False):
        raise NotCovered(f"{name} is a cross attention")
    if getattr(module, "is_causal", True) is False:
        raise NotCovered(f"{name} attends in both directions (an encoder)")
    if is_latent(module):
        chosen = chooses_keys(module)
        reach = chosen_reach(module, config) if chosen else reach_of(module, config, layer)
        return latent_cost(module, _output(module), reach)
    if chooses_keys(module):
        raise NotCovered(f"{name} attends to what an indexer chooses")
    widths = _widths(module)
    heads = _heads(module, config, layer)
    query = _ungated(module, widths, heads)
    if query % heads:
        raise NotCovered(f"{name}: a query of {query} does not divide into {heads} heads")
    qk_head_dim = query // heads
    if widths.key % qk_head_dim or heads % (kv_heads := max(widths.key // qk_head_dim, 1)):
        raise NotCovered(f"{name}: keys of {widths.key} do not divide into heads of {qk_head_dim}")
    if widths.value % kv_heads or widths.output != heads * (widths.value // kv_heads):
        raise NotCovered(
            f"{name}: values of {widths.value} for {kv_heads} heads do not lead to the {widths.output} inputs of its "
            "output projection"
        )
    if _SHARED not in module._modules:
        _check_declared(module, heads, kv_heads, qk_head_dim)
    # Falcon's newer layout spreads keys and values over all query heads before it caches them.
    cached = heads // kv_heads if getattr(module, "new_decoder_architecture", False) else 1
    reach = reach_of(module, config, layer)
    return AttentionCost(
        layers=1,
        query_heads=heads,
        kv_heads=kv_heads,
        qk_head_dim=qk_head_dim,
        v_head_dim=widths.value // kv_heads,
        window_tokens=reach.window_tokens,
        kv_bytes_per_token=cached * (widths.key + widths.value) * widths.kv_element_bytes,
        chunk_tokens=reach.chunk_tokens,
        forgets=reach.forgets,
    )


def borrowed_cost(
    module: nn.Module, config: object, layer: int, before: Iterable[AttentionCost]
) -> AttentionCost:
    """Read an attention that uses the keys and values of a layer before it: the last with the same reach.

    Args:
        module: One for which :func:`borrows_keys` holds.
        config: The config of the decoder that it belongs to.
        layer: Its place in the stack of layers.
        before: The layers before it, in their order.

    Raises:
        NotCovered: If there is no layer that it could use, or if its query does not fit that one's keys.
    """
    reach = reach_of(module, config, layer)
    own = [cost for cost in before if not cost.borrows]
    source = next((c for c in reversed(own) if c.window_tokens == reach.window_tokens), None)
    name = class_name(module)
    if source is None:
        raise NotCovered(f"{name} uses the keys and values of a layer that is not known")
    query, output = _matrix(module, "q_proj").outputs, _output(module)
    fits = query == source.query_heads * source.qk_head_dim
    if not fits or output.inputs != source.query_heads * source.v_head_dim:
        raise NotCovered(f"{name} has other heads than the layer whose keys and values it uses")
    return replace(source, borrows=True)


def unused_projections(module: nn.Module) -> list[nn.Module]:
    """The projections to keys and values of an attention that does not use them (transformers up to 5.10)."""
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return [c for n in names if (c := module._modules.get(n)) is not None]


def _widths(module: nn.Module) -> _Widths:
    if _SHARED in module._modules and "experts" in module._modules:
        return _widths_of_experts(module)
    output = _output(module)
    fused = [name for name in _FUSED if name in module._modules]
    if fused:
        matrix = _matrix(module, fused[0])
        # Keys and values share what the queries leave; that they are equally wide is what fusing them implies.
        keys_and_values = matrix.outputs - output.inputs
        if keys_and_values <= 0 or keys_and_values % 2:
            raise NotCovered(
                f"{class_name(module)}: {fused[0]} of {matrix.outputs} does not divide into queries of "
                f"{output.inputs} and equal keys and values"
            )
        half = keys_and_values // 2
        return _Widths(output.inputs, half, half, output.inputs, matrix.element_bytes)
    trio = next(
        trio for trio in _SEPARATE if trio[0] in module._modules or trio[1] in module._modules
    )
    query, key = (_matrix(module, name) for name in trio[:2])
    # Where there is no projection to values and the module knows it, the keys are the values (Gemma 4).
    shared = getattr(module, trio[2], module) is None
    value = key if shared else _matrix(module, trio[2])
    return _Widths(query.outputs, key.outputs, value.outputs, output.inputs, key.element_bytes)


def _widths_of_experts(module: nn.Module) -> _Widths:
    """Queries of k experts, each as wide as the keys that all share. Their weights are read with the experts."""
    matrix = _matrix(module, _SHARED)
    top_k = _attribute(module, None, ("top_k",)) or 1
    half = matrix.outputs // 2
    return _Widths(top_k * half, half, half, top_k * half, matrix.element_bytes)


def _ungated(module: nn.Module, widths: _Widths, heads: int) -> int:
    """The width of the query, without the gate of its output that some projections hold beside it (Qwen3-Next)."""
    head_dim = _attribute(module, None, _HEAD_DIM)
    doubled = widths.query == 2 * widths.output
    if doubled and head_dim is not None and heads * head_dim == widths.output:
        return widths.output
    return widths.query


def _heads(module: nn.Module, config: object, layer: int) -> int:
    by_layer = getattr(config, "num_attention_heads_per_layer", None)
    if isinstance(by_layer, list | tuple) and layer < len(by_layer):
        return int(by_layer[layer])
    heads = _attribute(module, config, _HEADS)
    if heads is None or heads <= 0:
        raise NotCovered(f"{class_name(module)}: how many heads it has is not said")
    return heads


def _output(module: nn.Module) -> Matrix:
    return _only(module, _OUTPUT)


def _only(module: nn.Module, names: tuple[str, ...]) -> Matrix:
    found = [name for name in names if name in module._modules]
    if len(found) != 1:
        raise NotCovered(f"{class_name(module)} has no output projection that is known")
    return _matrix(module, found[0])


def _matrix(module: nn.Module, name: str) -> Matrix:
    child = module._modules.get(name)
    matrix = None if child is None else matrix_of(_inner(child))
    if matrix is None:
        what = "missing" if child is None else f"a {class_name(child)}"
        raise NotCovered(f"{name} of {class_name(module)} is {what}, not a plain linear layer")
    return matrix


def _inner(child: nn.Module) -> nn.Module:
    """The linear layer in a module that holds one and nothing else (Moshi)."""
    inside = [c for c in child._modules.values() if c is not None]
    alone = len(inside) == 1 and not own_parameters(child) and matrix_of(child) is None
    return inside[0] if alone else child


def _attribute(module: object, config: object, names: tuple[str, ...]) -> int | None:
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _check_declared(module: object, heads: int, kv_heads: int, head_dim: int) -> None:
    for names, derived in (
        (_HEAD_DIM, head_dim),
        (("num_key_value_heads", "num_kv_heads", "kv_heads"), kv_heads),
        (("num_key_value_groups",), heads // kv_heads),
    ):
        declared = _attribute(module, None, names)
        if declared is not None and declared != derived:
            raise NotCovered(
                f"{class_name(module)} says {names[0]} = {declared}, but its weights say {derived}"
            )
