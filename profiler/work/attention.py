"""How an attention module is shaped: heads and widths, read from the weights of its projections.

The widths are facts of the weights; how they divide into heads is checked against what the module and its config say.
Where the two disagree (a gated query, a compressed key), the module is something that this page does not describe,
and `NotCovered` says so.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaseprof.work.modules import Matrix, class_name, matrix_of
from phaseprof.work.parts import NotCovered

if TYPE_CHECKING:
    from torch import nn

#: Names of the projections in the decoders of transformers.
_SEPARATE = (("q_proj", "k_proj", "v_proj"), ("Wq", "Wk", "Wv"), ("query", "key", "value"))
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "attn_out")
_MLA = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "kv_a_proj")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer. Field names as in `phaseprof.work.cost.AttentionCost`."""

    query_heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    window_tokens: int | None
    kv_bytes_per_token: int


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
    if any(name in children for name in (*_FUSED, *_MLA)):
        return True
    return any(trio[0] in children or trio[1] in children for trio in _SEPARATE)


def attention_shape(module: nn.Module, config: object, layer: int) -> AttentionShape:
    """Read one attention module.

    Args:
        module: One for which :func:`is_attention` holds.
        config: The config of the decoder that it belongs to.
        layer: Its place in the stack of layers.

    Raises:
        NotCovered: If it is no dense causal self-attention, or if weights, module and config disagree.
    """
    name = class_name(module)
    if any(projection in module._modules for projection in _MLA):
        raise NotCovered(f"{name} is a multi-head latent attention (MLA)")
    if getattr(module, "is_cross_attention", False):
        raise NotCovered(f"{name} is a cross attention")
    if getattr(module, "is_causal", True) is False:
        raise NotCovered(f"{name} attends in both directions (an encoder)")
    widths = _widths(module)
    heads = _attribute(module, config, _HEADS)
    if heads is None or heads <= 0 or widths.query % heads:
        raise NotCovered(f"{name}: a query of {widths.query} does not divide into {heads} heads")
    qk_head_dim = widths.query // heads
    if widths.key % qk_head_dim or heads % (kv_heads := max(widths.key // qk_head_dim, 1)):
        raise NotCovered(f"{name}: keys of {widths.key} do not divide into heads of {qk_head_dim}")
    if widths.value % kv_heads or widths.output != heads * (widths.value // kv_heads):
        raise NotCovered(
            f"{name}: values of {widths.value} for {kv_heads} heads do not lead to the {widths.output} inputs of its "
            "output projection"
        )
    _check_declared(module, heads, kv_heads, qk_head_dim)
    # Falcon's newer layout spreads keys and values over all query heads before it caches them.
    cached = heads // kv_heads if getattr(module, "new_decoder_architecture", False) else 1
    return AttentionShape(
        query_heads=heads,
        kv_heads=kv_heads,
        qk_head_dim=qk_head_dim,
        v_head_dim=widths.value // kv_heads,
        window_tokens=_window(module, config, layer),
        kv_bytes_per_token=cached * (widths.key + widths.value) * widths.kv_element_bytes,
    )


def _widths(module: nn.Module) -> _Widths:
    output = _only(module, _OUTPUT)
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
    query, key, value = (_matrix(module, name) for name in trio)
    return _Widths(query.outputs, key.outputs, value.outputs, output.inputs, key.element_bytes)


def _only(module: nn.Module, names: tuple[str, ...]) -> Matrix:
    found = [name for name in names if name in module._modules]
    if len(found) != 1:
        raise NotCovered(f"{class_name(module)} has no output projection that is known")
    return _matrix(module, found[0])


def _matrix(module: nn.Module, name: str) -> Matrix:
    child = module._modules.get(name)
    matrix = None if child is None else matrix_of(child)
    if matrix is None:
        what = "missing" if child is None else f"a {class_name(child)}"
        raise NotCovered(f"{name} of {class_name(module)} is {what}, not a plain linear layer")
    return matrix


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


def _window(module: object, config: object, layer: int) -> int | None:
    """The sliding window of a layer, in tokens; None for full attention.

    As the caches of transformers decide it: by ``config.layer_types``, or, where there is none, by the window of the
    attention or of the config, for all layers alike.
    """
    layer_types: Any = getattr(config, "layer_types", None)
    if layer_types is not None:
        kind = layer_types[layer] if layer < len(layer_types) else "not given"
        if kind == "full_attention":
            return None
        if kind != "sliding_attention":
            raise NotCovered(f"layers of type {kind}")
        window = getattr(config, "sliding_window", None) or getattr(module, "sliding_window", None)
        if window is None:
            raise NotCovered("sliding layers without a window in the config")
        return int(window)
    if getattr(config, "attention_chunk_size", None) is not None:
        raise NotCovered("layers of type chunked_attention")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise NotCovered("layers of type local (GPT-Neo)")
    owner = module if hasattr(module, "sliding_window") else config
    window = getattr(owner, "sliding_window", None)
    if not isinstance(window, int) or getattr(config, "use_sliding_window", True) is False:
        return None
    if owner is config and not _declares(config, "sliding_window"):
        # The cache forgets what the attention would still look at.
        raise NotCovered("a sliding window in the config of a model that does not know of one")
    return window


def _declares(config: object, name: str) -> bool:
    """Whether a config's class knows a field. Any key of a config.json becomes an attribute, known or not."""
    kind = type(config)
    if hasattr(kind, name):
        return True
    try:
        return name in inspect.signature(kind.__init__).parameters
    except (TypeError, ValueError):
        return False
