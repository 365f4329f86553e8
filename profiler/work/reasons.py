"""Why a model is not covered: what the parts of it are that no walk knows, and how much of that is said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from phaseprof.work.modules import Kind, class_name

if TYPE_CHECKING:
    from torch import nn

#: How many reasons are kept: a vision tower would give hundreds.
_MAX_REASONS = 8

#: Of a path alone: a class may be named after a model that has experts elsewhere.
_EXPERTS = re.compile(r"expert|moe|router", re.IGNORECASE)
#: Parts that are known and not covered yet, by their path or class, most telling first.
_FOREIGN = (
    (re.compile(r"lora_|peft", re.IGNORECASE), "an adapter that is not one of PEFT's"),
    (re.compile(r"vision|visual|image|patch", re.IGNORECASE), "a vision tower"),
    (re.compile(r"audio|speech", re.IGNORECASE), "an audio tower"),
    (
        re.compile(r"mamba|ssm|rwkv|deltanet|linear_?attn|recurrent|conv", re.IGNORECASE),
        "a state space or convolution",
    ),
    (re.compile(r"cross_?att|encoder_?attn", re.IGNORECASE), "a cross attention"),
)


def foreign_kind(path: str, module: nn.Module, kind: Kind) -> str | None:
    """The kind of a part that is not described, if its path or class tells; None for one that may be anything."""
    if _EXPERTS.search(path):
        return "a mixture of experts of unknown form"
    # A linear layer says nothing by its class (Conv1D of GPT-2 is one), only by where it stands.
    names = [path] if kind is Kind.MATRIX else [path, class_name(module)]
    return next((what for pattern, what in _FOREIGN if any(map(pattern.search, names))), None)


def shorten(reasons: Iterable[str]) -> tuple[str, ...]:
    """Each reason once, and of many the first ones."""
    unique = list(dict.fromkeys(reasons))
    if len(unique) <= _MAX_REASONS:
        return tuple(unique)
    return (*unique[: _MAX_REASONS - 1], f"and {len(unique) - _MAX_REASONS + 1} more reasons")
