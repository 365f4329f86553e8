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
from typing import TYPE_CHECKING, Any, TypeVar

from phaseprof.work.adapters import Added, read_adapters
from phaseprof.work.altup import read_altup
from phaseprof.work.attention import (
    attention_cost,
    borrowed_cost,
    borrows_keys,
    is_attention,
    unused_projections,
)
from phaseprof.work.cost import AttentionCost, ExpertsCost, MatmulCost, ModelCost, StateCost
from phaseprof.work.experts import read_experts
from phaseprof.work.indexer import indexer_cost
from phaseprof.work.modules import (
    Kind,
    class_name,
    kind_of,
    matrix_of,
    own_parameters,
    shared_modules,
)
from phaseprof.work.ops import OpKind
from phaseprof.work.parts import NotCovered, Part, Reader
from phaseprof.work.reasons import foreign_kind, shorten
from phaseprof.work.roles import Found, Inside, hidden_size, is_norm, joined, matmuls_of, role_of
from phaseprof.work.state import state_part
from phaseprof.work.structure import (
    config_of,
    general,
    layer_of,
    numbered,
    output_head,
    place,
    stops_early,
    text_config,
    text_modules,
    token_table,
)
from phaseprof.work.weights import Weights

if TYPE_CHECKING:
    from torch import nn

_Layer = TypeVar("_Layer", AttentionCost, StateCost)

#: Readers of what mixes tokens in place of an attention, or beside it. They are asked before a module is taken for an
#: attention.
MIXERS: tuple[Reader, ...] = (state_part,)
#: Readers of what each token passes through by itself.
POINTWISE: tuple[Reader, ...] = (read_experts, read_altup)

#: Linear layers outside the stack that every token passes through: OPT's projections, a classifier's score, those of
#: Gemma 3n. Of a list, the name of the list counts.
_PER_TOKEN = frozenset(
    {
        "project_in",
        "project_out",
        "score",
        "per_layer_model_projection",
        "altup_projections",
        "altup_unembed_projections",
    }
)
#: Kinds of layers that mix no tokens, where each layer is one thing only (Nemotron-H).
_POINTWISE_LAYERS = frozenset({"mlp", "moe"})
_POSITIONS = re.compile(r"pos|wpe")
_TABLES = frozenset({"embed_tokens_per_layer"})
#: Vectors that scale, shift or replace elements: they multiply no matrix.
_VECTORS = re.compile(r"bias|sinks?$|scale|scalar|residual")
#: Bytes of the wider dtypes of activations; the others have two.
_WIDE = {"float32": 4, "float64": 8}


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
    walk = _Walk(model, reasons, _WIDE.get(weights.activation_dtype, 2))
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
            not_covered=shorten(reasons),
            stored=weights.by_dtype(),
        )
    head = weights.of_modules([walk.head] if walk.head is not None else [])
    outside = head | weights.of_modules(walk.tables) | weights.of_modules(walk.apart)
    beside_head = weights.of_tensors(
        t for a in walk.added if a.base is walk.head for t in a.tensors
    )
    beside = weights.of_tensors(t for a in walk.added if a.base is not walk.head for t in a.tensors)
    rows = [(weights.of_modules([table]), weights.row_bytes(table)) for table in walk.tables]
    matmuls = matmuls_of(walk.matrices, weights, weights.of_modules(walk.tables) - head)
    return ModelCost(
        linear_flops_per_token=walk.linear_flops,
        head_flops_per_token=walk.head_flops,
        attention=(*grouped(walk.layers), *grouped(walk.indexers)),
        body_weight_bytes=weights.bytes((weights.of_modules(walk.run_modules) | beside) - outside),
        head_weight_bytes=weights.bytes(head | beside_head),
        lookup_bytes_per_token=sum(size for _, size in rows),
        parameter_bytes=weights.bytes(),
        parameters=weights.elements(),
        dtype=dtype,
        tied_lookup_bytes_per_token=sum(size for keys, size in rows if keys <= head),
        experts=grouped_experts(walk.experts),
        states=grouped(walk.states),
        offloaded_bytes=weights.offloaded_bytes,
        stored=weights.by_dtype(),
        matmuls=joined((*matmuls, *walk.without_modules)),
        hidden_size=walk.hidden,
        norms=walk.norms,
    )


@dataclass(slots=True)
class _Walk:
    """One pass over the modules. Findings go to the fields, what is not covered to ``reasons``."""

    model: nn.Module
    reasons: list[str]
    activation_bytes: int
    linear_flops: int = 0
    head_flops: int = 0
    tables: list[Any] = field(default_factory=list)
    head: nn.Module | None = None
    layers: dict[int, AttentionCost] = field(default_factory=dict)
    indexers: dict[int, AttentionCost] = field(default_factory=dict)
    states: dict[int, StateCost] = field(default_factory=dict)
    experts: list[ExpertsCost] = field(default_factory=list)
    #: What a pass runs, and of it what a reader stands for; paths that a reader has told what they are.
    run_modules: list[nn.Module] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    accounted: set[nn.Module] = field(default_factory=set)
    apart: list[nn.Module] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    #: Every matrix that tokens are multiplied with; then those that readers found.
    matrices: list[Found] = field(default_factory=list)
    without_modules: list[MatmulCost] = field(default_factory=list)
    hidden: int = 0
    norms: int = 0
    _inside: dict[str, Inside] = field(default_factory=dict)
    _routers: set[nn.Module] = field(default_factory=set)

    def run(self) -> None:
        adapters = read_adapters(self.model)
        self.reasons.extend(adapters.reasons)
        everything = adapters.modules
        modules = text_modules(everything)
        self._check_whole(modules)
        stack = self._find_stack(modules)
        if stack is not None:
            modules = self._without_rest(modules, stack)
            try:
                self._read_layers(modules, stack)
            except NotCovered as reason:
                self.reasons.append(str(reason))
        self.head = output_head(everything)
        table = token_table(everything)
        self.hidden = hidden_size(text_config(modules, stack or ""), table)
        seen: set[str] = set()
        self.run_modules = list(modules.values())
        for path, module in modules.items():
            if module in self.accounted:
                continue
            kind = kind_of(module)
            if kind in (Kind.EMPTY, Kind.ELEMENTWISE):
                self.norms += is_norm(module, self._stands_in(path), self.hidden)
                continue
            foreign = None if self._is_known(path) else foreign_kind(path, module, kind)
            if foreign is None:
                self._read_part(path, module, kind, stack, table)
            elif foreign not in seen:
                seen.add(foreign)
                self.reasons.append(f"{foreign} ({general(path) or class_name(module)})")
        head = None if self.head is None else matrix_of(self.head)
        if self.head is not None and head is not None:
            self.head_flops = head.flops_per_token
            self.matrices.append(Found(OpKind.LM_HEAD.value, head, self.head))
        self._add_adapters(adapters.added)

    def _add_adapters(self, added: Iterable[Added]) -> None:
        run = set(self.run_modules)
        self.added = [one for one in added if one.base in run]
        for one in self.added:
            if one.base is self.head:
                self.head_flops += one.flops_per_token
            else:
                self.linear_flops += one.flops_per_token

    def _check_whole(self, modules: dict[str, nn.Module]) -> None:
        configs = [c for m in modules.values() if (c := config_of(m)) is not None]
        if any(getattr(config, "is_encoder_decoder", False) for config in configs):
            self.reasons.append("an encoder-decoder model")
        run = set(modules.values())
        for path, module in shared_modules(self.model):
            if module in run:
                self.reasons.append(
                    f"{path} ({class_name(module)}) stands in several places: how often it runs is not known"
                )

    def _find_stack(self, modules: dict[str, nn.Module]) -> str | None:
        """The path of the one stack that the layers form, if they do."""
        places = {
            path: place(path)
            for path, module in modules.items()
            if is_attention(module) or self._mixer(modules, path) is not None
        }
        stacks = {at[0] for at in places.values() if at is not None}
        if not places:
            self.reasons.append("no attention layers that are known")
            return None
        if len(stacks) != 1 or None in places.values():
            where = ", ".join(sorted(set(map(general, places))))
            self.reasons.append(f"attention in several places ({where})")
            return None
        return stacks.pop()

    def _mixer(self, modules: dict[str, nn.Module], path: str) -> Part | None:
        at = place(path) if MIXERS else None
        if at is None:
            return None
        try:
            return _ask(MIXERS, modules[path], text_config(modules, at[0]), at[1])
        except NotCovered as reason:
            self.reasons.append(str(reason))
            return None

    def _without_rest(self, modules: dict[str, nn.Module], stack: str) -> dict[str, nn.Module]:
        """Leave out the layers that the config has a pass stop before (early exit)."""
        depth = len(modules[stack]._modules)
        declared = getattr(text_config(modules, stack), "num_hidden_layers", depth)
        if declared == depth:
            return modules
        if not 0 < declared < depth or not stops_early(modules, stack):
            self.reasons.append(f"the config says {declared} layers, the model has {depth}")
            return modules
        return {
            path: module
            for path, module in modules.items()
            if (at := layer_of(stack, path)) is None or at[0] < declared
        }

    def _read_layers(self, modules: dict[str, nn.Module], stack: str) -> None:
        """Read the mixers of every layer, and what else the readers know.

        Raises:
            NotCovered: By a reader, or if a layer has no mixer or several.
        """
        config = text_config(modules, stack)
        borrowing: list[nn.Module] = []
        for path, module in modules.items():
            at = layer_of(stack, path)
            if at is None or module in self.accounted:
                continue
            layer = at[0]
            mixer = self._mixer(modules, path)
            if mixer is not None:
                if layer in self.states or not isinstance(mixer.cost, StateCost):
                    raise NotCovered(f"several state mixers in one layer ({general(path)})")
                self.states[layer] = mixer.cost
                self._inside[path] = Inside.STATE
                self._account(path, mixer)
            elif is_attention(module):
                if layer in self.layers:
                    raise NotCovered(f"several attentions in one layer ({general(path)})")
                self._inside[path] = Inside.ATTENTION
                self.layers[layer] = self._attention(module, config, layer, borrowing)
                indexer = indexer_cost(module)
                if indexer is not None:
                    self.indexers[layer] = indexer
            part = _ask(POINTWISE, module, config, layer)
            if part is not None:
                if isinstance(part.cost, ExpertsCost):
                    self.experts.append(part.cost)
                self._account(path, part)
        self._leave_out(borrowing)
        depth = len({at[0] for path in modules if (at := layer_of(stack, path)) is not None})
        kinds: Any = getattr(config, "layer_types", None) or ()
        pointwise = {i for i, kind in enumerate(kinds) if kind in _POINTWISE_LAYERS}
        mixed = self.layers.keys() | self.states.keys() | pointwise
        if not mixed.issuperset(range(depth)):
            raise NotCovered(f"only {len(mixed)} of {depth} layers have an attention")

    def _attention(
        self, module: nn.Module, config: object, layer: int, borrowing: list[nn.Module]
    ) -> AttentionCost:
        if borrows_keys(module):
            borrowing.append(module)
            before = (self.layers[i] for i in sorted(self.layers) if i < layer)
            return borrowed_cost(module, config, layer, before)
        cost = attention_cost(module, config, layer)
        packed = [
            m.element_bytes == 1 for c in module.children() if (m := matrix_of(c)) is not None
        ]
        if not any(packed):
            return cost
        # Packed projections count elements: what they give is as wide as the activations.
        size = cost.kv_bytes_per_token
        if not all(packed):
            size = cost.kv_heads * (cost.qk_head_dim + cost.v_head_dim)
        return replace(cost, kv_bytes_per_token=size * self.activation_bytes)

    def _leave_out(self, borrowing: list[nn.Module]) -> None:
        for attention in borrowing:
            unused = [m for child in unused_projections(attention) for m in child.modules()]
            self.accounted.update(unused)
            self.apart.extend(unused)

    def _is_known(self, path: str) -> bool:
        """Whether a reader has told what a module or one around it is: its name may say anything then."""
        while path:
            if path in self.known:
                return True
            path = path.rpartition(".")[0]
        return False

    def _account(self, path: str, part: Part) -> None:
        self.known.add(path)
        self.linear_flops += part.linear_flops_per_token
        self.accounted.update(part.accounted)
        self.apart.extend(part.apart)
        self.without_modules.extend(part.matmuls)
        self._routers.update(part.routers)

    def _add_matrix(self, path: str, module: nn.Module) -> None:
        matrix = matrix_of(module)
        assert matrix is not None
        self.linear_flops += matrix.flops_per_token
        role = OpKind.ROUTER.value
        if module not in self._routers:
            role = role_of(
                path,
                self._stands_in(path),
                inputs=matrix.inputs,
                outputs=matrix.outputs,
                hidden=self.hidden,
            )
        self.matrices.append(Found(role, matrix, module))

    def _stands_in(self, path: str) -> Inside:
        while path:
            if path in self._inside:
                return self._inside[path]
            path = path.rpartition(".")[0]
        return Inside.REST

    def _read_part(
        self, path: str, module: nn.Module, kind: Kind, stack: str | None, table: object
    ) -> None:
        """Count one module with parameters of its own, or say why it cannot be counted."""
        inside = None if stack is None else layer_of(stack, path)
        if kind is Kind.MATRIX and (inside is not None or _per_token(path)):
            if inside is not None and numbered(inside[1]):
                self.reasons.append(f"several blocks in one layer ({general(path)})")
            self._add_matrix(path, module)
        elif kind is Kind.MATRIX and module is self.head:
            pass
        elif kind is Kind.TABLE and inside is None and _is_lookup(path, module, table):
            self.tables.append(module)
        elif kind is Kind.UNKNOWN:
            unknown = [n for n, p in own_parameters(module).items() if not _is_vector(n, p)]
            if unknown:
                self.reasons.append(
                    f"{general(path) or 'the model'} ({class_name(module)}) has parameters of unknown use: "
                    f"{', '.join(unknown)}"
                )
        elif stack is not None or not numbered(path):
            # Without a stack, that is said already, and so is every layer's part in it.
            self.reasons.append(
                f"{general(path)} ({class_name(module)}): how often it is used is not known"
            )


def _ask(readers: tuple[Reader, ...], module: nn.Module, config: object, layer: int) -> Part | None:
    return next(
        (part for read in readers if (part := read(module, config, layer)) is not None), None
    )


def grouped(found: dict[int, _Layer]) -> tuple[_Layer, ...]:
    """Join identical layers, groups in the order of their first layer."""
    groups: dict[_Layer, list[int]] = {}
    for layer in sorted(found):
        groups.setdefault(found[layer], []).append(layer)
    return tuple(
        replace(cost, layers=len(indices), layer_indices=tuple(indices))
        for cost, indices in groups.items()
    )


def grouped_experts(found: list[ExpertsCost]) -> tuple[ExpertsCost, ...]:
    """Join identical mixtures, in the order of their first layer."""
    layers: dict[ExpertsCost, int] = {}
    for cost in found:
        layers[cost] = layers.get(cost, 0) + cost.layers
    return tuple(replace(cost, layers=number) for cost, number in layers.items())


def _per_token(path: str) -> bool:
    *around, name = path.split(".")
    return (around[-1] if name.isdigit() and around else name) in _PER_TOKEN


def _is_lookup(path: str, table: nn.Module, tokens: object) -> bool:
    name = path.rpartition(".")[2]
    return table is tokens or name in _TABLES or _POSITIONS.search(name) is not None


def _is_vector(name: str, parameter: Any) -> bool:
    return parameter.dim() <= 1 and _VECTORS.search(name) is not None
