"""Count a model once: from its modules to a `ModelCost`.

Each kind of model has a walk of its own; a decoder's is what everything else falls to.

Weights are facts, a config is a claim. Widths come from the weights; the config is asked for what weights cannot tell
(heads, windows) and has to agree with them. Nothing is imported, moved or run: only attributes and shapes are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from phaseprof.work.adapters import has_adapters
from phaseprof.work.cost import ModelCost
from phaseprof.work.cross import encoder_decoder_cost
from phaseprof.work.decoder import decoder_cost
from phaseprof.work.encoders import encoder_cost

if TYPE_CHECKING:
    from torch import nn

#: Walks over models that are no decoder, asked in turn. Each gives None for a model of another kind.
_KINDS: tuple[Callable[[nn.Module], ModelCost | None], ...] = (encoder_decoder_cost, encoder_cost)

_ADAPTERS = ("adapters in a model that is no decoder",)


def model_cost(model: nn.Module) -> ModelCost:
    """Count a model: `LlamaForCausalLM`, a bare `LlamaModel`, or a module that wraps one.

    Parameters count once each storage (tied weights are one), by their real element size. The figures follow the
    formulas of docs/work-model.md.

    Args:
        model: A module with real parameters. It is only read.

    Returns:
        The cost. If the closed form does not hold, ``not_covered`` says why, and everything but the sizes is zero.
    """
    for kind in _KINDS:
        cost = kind(model)
        if cost is not None:
            return cost if not has_adapters(model) else replace(cost, not_covered=_ADAPTERS)
    return decoder_cost(model)
