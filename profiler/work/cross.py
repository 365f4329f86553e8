"""Encoder-decoders: a decoder whose layers attend to the output of an encoder beside their own tokens.

A pass of the whole model is one of the decoder. Its own tokens are counted like those of any decoder; each query then
attends to every token of the source. Keys and values of the source are projected once, by the pass that fills the
cache for them, and read from it by the passes after it. The encoder is counted with a pass that runs it inside
(scoring); in `generate` it runs before the first pass, and is a pass of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phaseprof.work.cost import CrossAttentionCost, ModelCost
from phaseprof.work.encoders import (
    KNOWN,
    encoder_cost,
    not_covered,
    output_head,
    read_stack,
    stack_cost,
)
from phaseprof.work.modules import matrix_of
from phaseprof.work.parts import NotCovered
from phaseprof.work.weights import Weights

if TYPE_CHECKING:
    from torch import nn

#: What generates, or gives out the states of its decoder. Others (classifiers) have heads of their own.
_WHOLE = ("ForConditionalGeneration", "Model", "MTModel")


def encoder_decoder_cost(model: nn.Module) -> ModelCost | None:
    """Count an encoder-decoder; None for anything else.

    Args:
        model: `T5ForConditionalGeneration`, `WhisperModel`, and the like. It is only read.
    """
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return None
    parts = _parts(model)
    if parts is None:
        return None
    encoder, decoder = parts
    weights = Weights.of(model)
    if getattr(config, "model_type", None) not in KNOWN:
        kind = getattr(config, "model_type", "unknown")
        return not_covered(weights, [f"an encoder-decoder of a kind that is not known ({kind})"])
    if not type(model).__name__.endswith(_WHOLE):
        return not_covered(weights, [f"the head of {type(model).__name__} on an encoder-decoder"])
    reasons = list(weights.odd())
    inside = encoder_cost(encoder)
    if inside is None:
        reasons.append("an encoder that is not known")
    elif not inside.covered:
        reasons.extend(f"the encoder: {reason}" for reason in inside.not_covered)
    head = output_head(model)
    try:
        stack = read_stack(decoder, getattr(decoder, "config", config), None)
    except NotCovered as reason:
        return not_covered(weights, [*reasons, str(reason)])
    if len(stack.cross) != len(stack.attention):
        reasons.append("layers that do not all attend to the source")
    if reasons:
        return not_covered(weights, reasons)
    cost = stack_cost(stack, weights, decoder.modules(), head)
    return replace(cost, cross=_cross(stack.cross, weights), encoder=inside)


def _parts(model: nn.Module) -> tuple[Any, Any] | None:
    """The encoder and the decoder: where one module holds both."""
    for module in model.modules():
        encoder, decoder = (module._modules.get(name) for name in ("encoder", "decoder"))
        if encoder is not None and decoder is not None:
            return encoder, decoder
    return None


def _cross(
    found: list[tuple[Any, tuple[Any, ...]]], weights: Weights
) -> tuple[CrossAttentionCost, ...]:
    groups: dict[CrossAttentionCost, int] = {}
    for attention, over_source in found:
        matrices = [m for part in over_source if (m := matrix_of(part)) is not None]
        cost = CrossAttentionCost(
            layers=1,
            query_heads=attention.query_heads,
            qk_head_dim=attention.qk_head_dim,
            v_head_dim=attention.v_head_dim,
            kv_flops_per_source_token=sum(m.flops_per_token for m in matrices),
            kv_weight_bytes=weights.bytes(weights.of_modules(over_source)),
            kv_bytes_per_source_token=attention.kv_bytes_per_token,
        )
        groups[cost] = groups.get(cost, 0) + 1
    return tuple(replace(cost, layers=number) for cost, number in groups.items())
