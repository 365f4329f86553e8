"""The walk over a decoder: from its modules to a `ModelCost`.

The walk knows a stack of layers, each with one causal self-attention, a state mixer or both, and linear layers that
every token passes through, norms, lookup tables for tokens and positions, and a linear output head. What is of a kind
of its own (experts, states) is told by the readers below. Whatever else holds parameters makes the model "not
covered", with a reason: no figure is better than a wrong one.

Weights are facts, a config is a claim. Widths come from the weights; the config is asked for what weights cannot tell
(heads, windows) and has to agree with them. Nothing is imported, moved or run: only attributes and shapes are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phaseprof.work.attention import AttentionShape, attention_shape, is_attention
from phaseprof.work.cost import AttentionCost, ExpertsCost, ModelCost, StateCost
from phaseprof.work.modules import (
    Kind,
    class_name,
    kind_of,
    matrix_of,
    own_parameters,
    shared_modules,
)
from phaseprof.work.parts import NotCovered, Part, Reader
from phaseprof.work.state import state_part
from phaseprof.work.weights import Weights

if TYPE_CHECKING:
    from torch import nn

#: Readers of what mixes tokens in place of an attention, or beside it. They are asked before a module is taken for an
#: attention.
MIXERS: tuple[Reader, ...] = (state_part,)
#: Readers of what each token passes through by itself.
POINTWISE: tuple[Reader, ...] = ()

#: Linear layers outside the stack that every token passes through (OPT's projections, a classifier's score).
_PER_TOKEN = frozenset({"project_in", "project_out", "score"})
_HEADS = frozenset({"lm_head", "embed_out"})
_POSITIONS = re.compile(r"pos|wpe")
#: How many reasons are kept: a vision tower would give hundreds.
_MAX_REASONS = 8

#: Parts that are known and not covered yet, by their path or class, most telling first.
_FOREIGN = (
    (re.compile(r"expert|moe|router", re.IGNORECASE), "a mixture of experts"),
    (re.compile(r"lora_|peft", re.IGNORECASE), "an adapter that is not merged"),
    (re.compile(r"vision|visual|image|patch", re.IGNORECASE), "a vision tower"),
    (re.compile(r"audio|speech", re.IGNORECASE), "an audio tower"),
    (
        re.compile(r"mamba|ssm|rwkv|deltanet|linear_?attn|recurrent|conv", re.IGNORECASE),
        "a state space or convolution",
    ),
    (re.compile(r"cross_?att|encoder_?attn", re.IGNORECASE), "a cross attention"),
)


def decoder_cost(model: nn.Module) -> ModelCost:
    """Count a decoder: `LlamaForCausalLM`, a bare `LlamaModel`, or a module that wraps one.

    Parameters count once each storage (tied weights are one), by their real element size. The figures follow the
    formulas of docs/work-model.md.

    Args:
        model: A module with real parameters. It is only read.

    Returns:
        The cost. If the closed form does not hold, ``not_covered`` says why, and everything but the sizes is zero.
    """
    weights = Weights.of(model)
    reasons = list(weights.odd())
    walk = _Walk(model, reasons)
    walk.run()
    dtype = weights.dtype()
    if reasons:
        return ModelCost(
            linear_flops_per_token=0,
            head_flops_per_token=0,
            attention=(),
            body_weight_bytes=0,
            head_weight_bytes=0,
            lookup_bytes_per_token=0,
            parameter_bytes=weights.bytes(),
            parameters=weights.elements(),
            dtype=dtype,
            not_covered=_shorten(reasons),
        )
    head = weights.of_modules([walk.head] if walk.head is not None else [])
    tables = weights.of_modules(walk.tables)
    apart = weights.of_modules(walk.apart)
    rows = [(table.weight, _row_bytes(table)) for table in walk.tables]
    return ModelCost(
        linear_flops_per_token=walk.linear_flops,
        head_flops_per_token=0 if walk.head is None else _matrix_flops(walk.head),
        attention=_grouped(walk.layers),
        body_weight_bytes=weights.bytes() - weights.bytes(head | tables | apart),
        head_weight_bytes=weights.bytes(head),
        lookup_bytes_per_token=sum(size for _, size in rows),
        parameter_bytes=weights.bytes(),
        parameters=weights.elements(),
        dtype=dtype,
        tied_lookup_bytes_per_token=sum(size for w, size in rows if weights.key(w) in head),
        experts=_grouped_experts(walk.experts),
        states=_grouped_states(walk.states),
    )


@dataclass(slots=True)
class _Walk:
    """One pass over the modules. Findings go to the fields, what is not covered to ``reasons``."""

    model: nn.Module
    reasons: list[str]
    linear_flops: int = 0
    tables: list[Any] = field(default_factory=list)
    head: nn.Module | None = None
    layers: dict[int, AttentionShape] = field(default_factory=dict)
    states: dict[int, StateCost] = field(default_factory=dict)
    experts: list[ExpertsCost] = field(default_factory=list)
    accounted: set[nn.Module] = field(default_factory=set)
    apart: list[nn.Module] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def run(self) -> None:
        modules = dict(self.model.named_modules())
        self._check_whole(modules)
        stack = self._read_stack(modules)
        self.head = _output_head(modules)
        token_table = _token_table(modules)
        seen: set[str] = set()
        for path, module in modules.items():
            if module in self.accounted:
                continue
            kind = kind_of(module)
            if kind in (Kind.EMPTY, Kind.ELEMENTWISE):
                continue
            foreign = None if self._is_known(path) else _foreign(path, module, kind)
            if foreign is None:
                self._read_part(path, module, kind, stack, token_table)
            elif foreign not in seen:
                seen.add(foreign)
                self.reasons.append(f"{foreign} ({_general(path) or class_name(module)})")

    def _check_whole(self, modules: dict[str, nn.Module]) -> None:
        configs = [c for m in modules.values() if (c := _config(m)) is not None]
        if any(getattr(config, "is_encoder_decoder", False) for config in configs):
            self.reasons.append("an encoder-decoder model")
        if any(getattr(config, "num_kv_shared_layers", 0) for config in configs):
            self.reasons.append("layers that share the keys and values of others")
        for path, module in shared_modules(self.model):
            self.reasons.append(
                f"{path} ({class_name(module)}) stands in several places: how often it runs is not known"
            )

    def _read_stack(self, modules: dict[str, nn.Module]) -> str | None:
        """Read the mixers of every layer, and what else the readers know. Return the path of the one stack that the
        layers form, if they do."""
        try:
            mixers = self._mixers(modules)
        except NotCovered as reason:
            self.reasons.append(str(reason))
            return None
        places = {path: _place(path) for path in mixers}
        stacks = {place[0] for place in places.values() if place is not None}
        if not mixers:
            self.reasons.append("no attention layers that are known")
            return None
        if len(stacks) != 1 or None in places.values():
            where = ", ".join(sorted(set(map(_general, mixers))))
            self.reasons.append(f"attention in several places ({where})")
            return None
        stack = stacks.pop()
        config = _text_config(modules, stack)
        try:
            for path, part in mixers.items():
                place = places[path]
                self._add_mixer(path, modules[path], part, config, 0 if place is None else place[1])
            self._add_pointwise(modules, stack)
        except NotCovered as reason:
            self.reasons.append(str(reason))
            return stack
        depth = len(modules[stack]._modules)
        declared = getattr(config, "num_hidden_layers", depth)
        mixed = self.layers.keys() | self.states.keys()
        if sorted(mixed) != list(range(depth)):
            self.reasons.append(f"only {len(mixed)} of {depth} layers have an attention")
        elif declared != depth:
            # A stack that is run several times, or not to its end.
            self.reasons.append(f"the config says {declared} layers, the model has {depth}")
        return stack

    def _mixers(self, modules: dict[str, nn.Module]) -> dict[str, Part | None]:
        """Everything that mixes tokens, by its path; None for an attention, which is read later.

        Raises:
            NotCovered: By a reader.
        """
        found: dict[str, Part | None] = {}
        for path, module in modules.items():
            place = _place(path)
            part = None if place is None else _ask(MIXERS, module, modules, path, place[1])
            if part is not None or is_attention(module):
                found[path] = part
        return found

    def _add_mixer(
        self, path: str, module: nn.Module, part: Part | None, config: object, layer: int
    ) -> None:
        if part is not None:
            if layer in self.states or not isinstance(part.cost, StateCost):
                raise NotCovered(f"several state mixers in one layer ({_general(path)})")
            self.states[layer] = part.cost
            self._account(path, part)
            return
        if layer in self.layers:
            raise NotCovered(f"several attentions in one layer ({_general(path)})")
        self.layers[layer] = attention_shape(module, config, layer)

    def _add_pointwise(self, modules: dict[str, nn.Module], stack: str) -> None:
        for path, module in modules.items():
            place = _place(path)
            if place is None or place[0] != stack or module in self.accounted:
                continue
            part = _ask(POINTWISE, module, modules, path, place[1])
            if part is not None and isinstance(part.cost, ExpertsCost):
                self.experts.append(part.cost)
                self._account(path, part)

    def _is_known(self, path: str) -> bool:
        """Whether a reader has told what a module or one around it is: its name may say anything then."""
        while path:
            if path in self.known:
                return True
            path = path.rpartition(".")[0]
        return False

    def _account(self, path: str, part: Part) -> None:
        self.known.add(path)
        self.accounted.update(part.accounted)
        self.apart.extend(part.apart)

    def _read_part(
        self, path: str, module: nn.Module, kind: Kind, stack: str | None, token_table: object
    ) -> None:
        """Count one module with parameters of its own, or say why it cannot be counted."""
        name = path.rpartition(".")[2]
        inside = None if stack is None else _inside(stack, path)
        if kind is Kind.MATRIX and (inside is not None or name in _PER_TOKEN):
            if _numbered(inside or ""):
                self.reasons.append(f"several blocks in one layer ({_general(path)})")
            self.linear_flops += _matrix_flops(module)
        elif kind is Kind.MATRIX and module is self.head:
            pass
        elif kind is Kind.TABLE and inside is None and _is_lookup(name, module, token_table):
            self.tables.append(module)
        elif kind is Kind.UNKNOWN:
            names = ", ".join(own_parameters(module))
            self.reasons.append(
                f"{_general(path) or 'the model'} ({class_name(module)}) has parameters of unknown use: {names}"
            )
        elif stack is not None or not _numbered(path):
            # Without a stack, that is said already, and so is every layer's part in it.
            self.reasons.append(
                f"{_general(path)} ({class_name(module)}): how often it is used is not known"
            )


def _matrix_flops(module: nn.Module) -> int:
    matrix = matrix_of(module)
    return 0 if matrix is None else matrix.flops_per_token


def _row_bytes(table: Any) -> int:
    return int(table.weight.shape[1]) * int(table.weight.element_size())


def _grouped(layers: dict[int, AttentionShape]) -> tuple[AttentionCost, ...]:
    """Join identical layers, groups in the order of their first layer."""
    groups: dict[AttentionShape, list[int]] = {}
    for layer in sorted(layers):
        groups.setdefault(layers[layer], []).append(layer)
    return tuple(
        AttentionCost(
            layers=len(indices),
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            qk_head_dim=shape.qk_head_dim,
            v_head_dim=shape.v_head_dim,
            window_tokens=shape.window_tokens,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            layer_indices=tuple(indices),
        )
        for shape, indices in groups.items()
    )


def _ask(
    readers: tuple[Reader, ...],
    module: nn.Module,
    modules: dict[str, nn.Module],
    path: str,
    layer: int,
) -> Part | None:
    for reader in readers:
        part = reader(module, _text_config(modules, path), layer)
        if part is not None:
            return part
    return None


def _grouped_experts(found: list[ExpertsCost]) -> tuple[ExpertsCost, ...]:
    """Join identical mixtures, in the order of their first layer."""
    layers: dict[ExpertsCost, int] = {}
    for cost in found:
        layers[cost] = layers.get(cost, 0) + cost.layers
    return tuple(replace(cost, layers=number) for cost, number in layers.items())


def _grouped_states(found: dict[int, StateCost]) -> tuple[StateCost, ...]:
    """Join identical layers, in the order of the first of them."""
    groups: dict[StateCost, list[int]] = {}
    for layer in sorted(found):
        groups.setdefault(found[layer], []).append(layer)
    return tuple(
        replace(cost, layers=len(indices), layer_indices=tuple(indices))
        for cost, indices in groups.items()
    )


def _config(module: object) -> object:
    config = getattr(module, "config", None)
    return None if callable(config) else config


def _text_config(modules: dict[str, nn.Module], path: str) -> object:
    """The config of the nearest module around a path; of a composite config, its text part."""
    while True:
        config = _config(modules.get(path))
        if config is not None or not path:
            get_text = getattr(config, "get_text_config", None)
            return get_text() if callable(get_text) else config
        path = path.rpartition(".")[0]


def _output_head(modules: dict[str, nn.Module]) -> nn.Module | None:
    for path, module in modules.items():
        get = getattr(module, "get_output_embeddings", None)
        try:
            head: nn.Module | None = get() if callable(get) else None
        except (AttributeError, NotImplementedError):
            head = None
        if head is not None and head in modules.values():
            return head
        if path.rpartition(".")[2] in _HEADS:
            return module
    return None


def _token_table(modules: dict[str, nn.Module]) -> object:
    for module in modules.values():
        get = getattr(module, "get_input_embeddings", None)
        try:
            table = get() if callable(get) else None
        except (AttributeError, NotImplementedError):
            table = None
        if table is not None:
            return table
    return None


def _is_lookup(name: str, table: nn.Module, token_table: object) -> bool:
    return table is token_table or _POSITIONS.search(name) is not None


def _place(path: str) -> tuple[str, int] | None:
    """The stack that an attention lies in and the number of its layer there: what the last number in its path says."""
    parts = path.split(".")
    at = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
    return None if at is None else (".".join(parts[:at]), int(parts[at]))


def _inside(stack: str, path: str) -> str | None:
    """The path within a layer of the stack; None for a path outside of it."""
    layer, _, rest = path.removeprefix(f"{stack}." if stack else "").partition(".")
    within = path.startswith(f"{stack}.") if stack else True
    return rest if within and layer.isdigit() else None


def _numbered(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def _general(path: str) -> str:
    """A path with its numbers left out, so that the layers of a stack give one reason and not eighty."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _foreign(path: str, module: nn.Module, kind: Kind) -> str | None:
    # A linear layer says nothing by its class (Conv1D of GPT-2 is one), only by where it stands.
    names = [path] if kind is Kind.MATRIX else [path, class_name(module)]
    return next((what for pattern, what in _FOREIGN if any(map(pattern.search, names))), None)


def _shorten(reasons: Iterable[str]) -> tuple[str, ...]:
    unique = list(dict.fromkeys(reasons))
    if len(unique) <= _MAX_REASONS:
        return tuple(unique)
    return (*unique[: _MAX_REASONS - 1], f"and {len(unique) - _MAX_REASONS + 1} more reasons")
