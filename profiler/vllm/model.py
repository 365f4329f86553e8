"""Count a model of vLLM once: from its modules on one rank to a `ModelCost`.

The modules have other classes than those of transformers, and hold one rank's part of each matrix. All of them declare
what they are, so that nothing has to be guessed from names: linear layers, tables for the vocabulary (with the padding
that is computed as well), experts, attention with its heads. Every linear layer inside the stack of layers is taken to
be run once for each token. What is not known makes the model not covered, with the reason.

Only the decoder is counted: towers for images or sound of a multimodal model are left out, and so is a draft model,
which vLLM runs inside the step of the model that it drafts for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phaseprof.vllm.matrices import (
    HeldMatrix,
    Places,
    elements_of,
    matmuls_of,
    products_in,
    unique,
)
from phaseprof.vllm.mixers import backend_of, is_kind, mixer_of
from phaseprof.vllm.storage import (
    Held,
    WeightsAsLoaded,
    activation_dtype,
    held_matrix,
    held_numbers,
)
from phaseprof.work.cost import (
    AdapterCost,
    AttentionCost,
    ExpertsCost,
    ModelCost,
    StateCost,
)
from phaseprof.work.decoder import grouped, grouped_experts
from phaseprof.work.modules import Kind, class_name, kind_of, matrix_of, own_parameters
from phaseprof.work.ops import OpKind
from phaseprof.work.parts import NotCovered
from phaseprof.work.reasons import shorten
from phaseprof.work.roles import hidden_size, is_norm, role_of
from phaseprof.work.structure import general, place

if TYPE_CHECKING:
    from torch import nn

#: Linear layers outside of the stack that every token passes through. Of a list, the name of the list counts.
_PER_TOKEN = frozenset(
    {
        "project_in",
        "project_out",
        "embedding_hidden_mapping_in",
        "embeddings_project",
        "per_layer_model_projection",
        "altup_projections",
        "altup_unembed_projections",
    }
)
#: Those that run once for each sequence, on its pooled vector.
_PER_ROW = ("pooler", "score", "classifier")
_HEADS = ("lm_head", "embed_out", "output")
#: Modules of vLLM that only stand for something elsewhere.
_ABSENT = ("PPMissingLayer", "StageMissingLayer")


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank does of a model, as far as its modules do not tell.

    Attributes:
        first: It looks tokens up: the first stage of a pipeline.
        last: It computes logits: the last stage.
        absorbs: Query tokens of a row up to which latent attention is run on latents.
        splits_tokens: Context parallelism: it computes only some of the tokens, or holds only some of their keys.
    """

    first: bool = True
    last: bool = True
    absorbs: int = 1
    splits_tokens: bool = False


def vllm_cost(
    model: nn.Module, rank: Rank | None = None, loaded: WeightsAsLoaded | None = None
) -> ModelCost:
    """Count a model of vLLM on one rank.

    Args:
        model: The model as it was loaded; it is only read.
        rank: What this rank does of it; None: everything.
        loaded: What was remembered of weights that were repacked.

    Returns:
        The cost of what the rank holds. If the closed form does not hold, ``not_covered`` says why, and everything but
        the sizes is zero.
    """
    walk = _Walk(model, Rank() if rank is None else rank, loaded)
    walk.run()
    return walk.cost()


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of a multimodal model that mixes text; any other model as it is."""
    if getattr(model, "supports_multimodal", False) is not True:
        return model
    find = getattr(model, "get_language_model", None)
    try:
        found: Any = find() if callable(find) else None
    except (AttributeError, NotImplementedError):
        found = None
    return found if found is not None and hasattr(found, "named_modules") else model


def attention_backends(model: nn.Module) -> tuple[str, ...]:
    """Names of the backends that the attention of a model runs on, in the order of its layers."""
    names = (backend_of(module) for _, module in mixing_modules(decoder_of(model)))
    return tuple(dict.fromkeys(name for name in names if name))


def mixing_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that mix tokens, with their paths."""
    for path, module in _modules(model):
        if is_kind(module, "AttentionLayerBase"):
            yield path, module


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, each once; those that the models of transformers keep beside them in vLLM as well."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        seen.add(id(module))
        yield path, module
        beside = vars(module).get("attention_instances")
        for number, attention in beside.items() if isinstance(beside, dict) else ():
            if id(attention) not in seen and hasattr(attention, "named_modules"):
                seen.add(id(attention))
                yield f"{path}.layers.{number}.attn".lstrip("."), attention


@dataclass(slots=True)
class _Walk:
    """One pass over the modules. Findings go to the fields, what is not covered to ``reasons``."""

    model: nn.Module
    rank: Rank
    loaded: WeightsAsLoaded | None
    reasons: list[str] = field(default_factory=list)
    linear_flops: int = 0
    row_flops: int = 0
    head_flops: int = 0
    adapter: AdapterCost | None = None
    head: Any = None
    body: list[Held] = field(default_factory=list)
    head_held: list[Held] = field(default_factory=list)
    tables: list[tuple[Held, int]] = field(default_factory=list)
    #: What is stored on this rank and is no part of a step: towers, experts beside those that are counted.
    rest: list[Held] = field(default_factory=list)
    layers: dict[int, AttentionCost] = field(default_factory=dict)
    indexers: dict[int, AttentionCost] = field(default_factory=dict)
    states: dict[int, StateCost] = field(default_factory=dict)
    experts: list[ExpertsCost] = field(default_factory=list)
    matrices: list[HeldMatrix] = field(default_factory=list)
    hidden: int = 0
    norms: int = 0
    places: Places = field(default_factory=Places)
    _mixers: int = 0
    _top_k: int | None = None

    def run(self) -> None:
        decoder = decoder_of(self.model)
        self._top_k = chosen_keys(self.model)
        self.hidden = hidden_size(_text_config(self.model))
        self.places = Places.of(decoder)
        inside = dict(_modules(decoder))
        self.head = _head(self.model, inside, self.rank.last)
        if self.rank.splits_tokens:
            self.reasons.append("tokens or their keys are split over ranks (context parallelism)")
        own = {id(module) for module in inside.values()} | {id(self.head)}
        self._check_shared(decoder)
        for path, module in inside.items():
            try:
                self._read(path, module)
            except NotCovered as reason:
                self.reasons.append(str(reason))
        if self.head is not None and all(module is not self.head for module in inside.values()):
            self._read("lm_head", self.head)
        for _, module in self.model.named_modules():
            if id(module) not in own:
                self.rest.append(self._beside(module))
        if not self.layers and not self.states:
            self.reasons.append("no attention layers that are known")

    def cost(self) -> ModelCost:
        everything = [*self.body, *self.head_held, *(held for held, _ in self.tables), *self.rest]
        activations = activation_dtype(everything)
        stored = unique(everything)
        by_dtype: dict[str, int] = {}
        for part in stored.values():
            by_dtype[part.dtype] = by_dtype.get(part.dtype, 0) + part.bytes
        whole = ModelCost(
            linear_flops_per_token=0,
            head_flops_per_token=0,
            attention=(),
            body_weight_bytes=0,
            head_weight_bytes=0,
            lookup_bytes_per_token=0,
            parameter_bytes=sum(part.bytes for part in stored.values()),
            parameters=elements_of(everything),
            dtype=products_in(everything, activations),
            not_covered=shorten(self.reasons),
            stored=tuple(sorted(by_dtype.items(), key=lambda item: -item[1])),
            offloaded_bytes=_offloaded(self.model),
        )
        if self.reasons:
            return whole
        head = unique(self.head_held)
        tables = unique(held for held, _ in self.tables)
        body = unique(self.body)
        looked_up = [(held, size) for held, size in self.tables if self.rank.first]
        return replace(
            whole,
            linear_flops_per_token=self.linear_flops,
            head_flops_per_token=self.head_flops,
            attention=(*grouped(self.layers), *grouped(self.indexers)),
            body_weight_bytes=sum(
                part.bytes for key, part in body.items() if key not in head and key not in tables
            ),
            head_weight_bytes=sum(part.bytes for part in head.values()),
            lookup_bytes_per_token=sum(size for _, size in looked_up),
            tied_lookup_bytes_per_token=sum(
                size for held, size in looked_up if {p.key for p in held.stored} <= head.keys()
            ),
            experts=grouped_experts(self.experts),
            states=grouped(self.states),
            row_flops=self.row_flops,
            adapter=self.adapter,
            matmuls=matmuls_of(self.matrices, tables.keys() - head.keys()),
            hidden_size=self.hidden,
            norms=self.norms,
        )

    def _beside(self, module: nn.Module) -> Held:
        """What a module outside of the decoder holds."""
        if is_kind(module, "LinearBase"):
            inputs, outputs = _widths(module)
            bias = outputs if own_parameters(module).get("bias") is not None else 0
            held = held_matrix(module, inputs * outputs, bias, self.loaded)
            if held is not None:
                return held
        return held_numbers(module)

    def _check_shared(self, decoder: nn.Module) -> None:
        """A linear layer that stands in several layers of a stack runs as often as it stands there."""
        places: dict[tuple[int, str], set[int]] = {}
        for path, module in decoder.named_modules(remove_duplicate=False):
            at = place(path)
            if at is not None and is_kind(module, "LinearBase"):
                found = places.setdefault((id(module), at[0]), set())
                found.add(at[1])
                if len(found) == 2:
                    what = f"{general(path)} ({class_name(module)})"
                    self.reasons.append(
                        f"{what} stands in several layers: how often it runs is not known"
                    )

    def _read(self, path: str, module: Any) -> None:
        """Count one module with what it holds itself.

        Raises:
            NotCovered: If its work is not known.
        """
        if is_kind(module, "BaseLayerWithLoRA"):
            self._read_adapters(path, module)
            return
        if class_name(module) in _ABSENT:
            return
        if module is self.head:
            self._read_head(module)
        elif is_kind(module, "RoutedExperts"):
            self._read_experts(path, module)
        elif is_kind(module, "LinearBase"):
            inputs, outputs = _widths(module)
            self._read_linear(path, module, inputs, outputs)
        elif is_kind(module, "ParallelLMHead"):
            # Of a model that pools, or of a stage before the last: there, and not used.
            self.rest.append(held_numbers(module))
        elif is_kind(module, "VocabParallelEmbedding"):
            rows = int(module.num_embeddings_per_partition)
            held = self._held(path, module, rows * int(module.embedding_dim), 0)
            self.tables.append((held, held.bytes // max(rows, 1)))
        else:
            self._read_mixer(path, module)

    def _read_mixer(self, path: str, module: nn.Module) -> None:
        mixer = mixer_of(module, self.rank.absorbs, self._top_k)
        if mixer is None:
            self._read_other(path, module)
            return
        # Its name says which layer it is, also where a stack is in two parts or this is a later stage.
        at = place(mixer.name) or place(path)
        number = self._mixers if at is None else at[1]
        kept: dict[int, Any] = self.states if isinstance(mixer.cost, StateCost) else self.layers
        while number in kept:
            # Blocks of several attentions: numbers beyond those of the layers.
            number += 1_000_000
        kept[number] = mixer.cost
        if mixer.indexer is not None:
            self.indexers[number] = mixer.indexer
        self._mixers += 1
        if not is_kind(module, "MLAAttention"):
            # Decays and scales: they are read whole, and multiply no matrix. Latent attention keeps copies of a
            # projection that is counted where it stands.
            self.body.append(held_numbers(module))

    def _read_other(self, path: str, module: Any) -> None:
        """Norms, activations, tables and linear layers of torch, and what nobody knows."""
        if is_kind(module, "Gemma3nAltUp"):
            # The router runs before and after the layer, and the streams are mixed by a matrix that it makes.
            streams, hidden = int(module.altup_num_inputs), _widths(module.modality_router)[0]
            self.linear_flops += 2 * streams * hidden * (1 + streams)
            self.matrices.append(HeldMatrix(OpKind.OTHER.value, hidden, streams, None))
        kind = kind_of(module)
        if kind in (Kind.EMPTY, Kind.ELEMENTWISE):
            self.norms += is_norm(module, self.places.around(path), self.hidden)
        if kind is Kind.EMPTY:
            return
        held = held_numbers(module)
        if kind is Kind.TABLE:
            rows = int(getattr(module, "num_embeddings", 0)) or 1
            self.tables.append((held, held.bytes // rows))
            return
        if kind is Kind.MATRIX:
            matrix = matrix_of(module)
            assert matrix is not None
            self._read_linear(path, module, matrix.inputs, matrix.outputs)
            return
        if kind is Kind.UNKNOWN:
            unknown = [
                name
                for name, parameter in own_parameters(module).items()
                if sum(size > 1 for size in parameter.shape) > 1
            ]
            if unknown:
                raise NotCovered(
                    f"{general(path) or 'the model'} ({class_name(module)}) has parameters of unknown use: "
                    f"{', '.join(unknown)}"
                )
        self.body.append(held)

    def _read_linear(self, path: str, module: Any, inputs: int, outputs: int) -> None:
        flops = 2 * inputs * outputs
        names = path.split(".")
        bias = outputs if own_parameters(module).get("bias") is not None else 0
        held = self._held(path, module, inputs * outputs, bias)
        if any(name.startswith(_PER_ROW) for name in names):
            self.row_flops += flops
        elif place(path) is not None or any(name in _PER_TOKEN for name in names[-2:]):
            if "experts" in names[:-1] and names[names.index("experts") + 1].isdigit():
                raise NotCovered(
                    f"{general(path)}: experts in a list, of which it is not known how many run"
                )
            self.linear_flops += flops
            inside = self.places.around(path)
            role = role_of(path, inside, inputs=inputs, outputs=outputs, hidden=self.hidden)
            self.matrices.append(HeldMatrix(role, inputs, outputs, held))
        else:
            raise NotCovered(
                f"{general(path)} ({class_name(module)}): how often it is used is not known"
            )
        self.body.append(held)

    def _read_adapters(self, path: str, module: Any) -> None:
        """The room for adapters beside a layer, which itself is a module inside. Each slot has the matrices of
        one adapter, of the highest rank that the engine allows, whatever rank the adapter has."""
        before, after = module.lora_a_stacked, module.lora_b_stacked
        slots = [*before, *after] if isinstance(before, tuple) else [before, after]
        elements = [int(stacked[0].numel()) for stacked in slots]
        size = sum(
            n * int(stacked.element_size()) for n, stacked in zip(elements, slots, strict=True)
        )
        old = self.adapter or AdapterCost()
        if is_kind(module, "BaseLinearLayerWithLoRA"):
            self.adapter = replace(
                old,
                flops_per_token=old.flops_per_token + 2 * sum(elements),
                body_bytes=old.body_bytes + size,
            )
        elif is_kind(module, "LogitsProcessorWithLoRA"):
            self.adapter = replace(
                old, head_flops_per_token=2 * sum(elements), head_bytes=old.head_bytes + size
            )
        elif is_kind(module, "VocabParallelEmbeddingWithLoRA"):
            # A row is looked up, and made as wide as a hidden state.
            self.adapter = replace(
                old,
                flops_per_token=old.flops_per_token + 2 * elements[1],
                body_bytes=old.body_bytes + elements[1] * int(after.element_size()),
                lookup_bytes_per_token=int(before.shape[-1]) * int(before.element_size()),
            )
        else:
            what = f"{general(path)} ({class_name(module)})"
            raise NotCovered(f"{what}: LoRA adapters of a kind that is not known")

    def _read_head(self, module: Any) -> None:
        rows, width = int(module.num_embeddings_per_partition), int(module.embedding_dim)
        bias = rows if own_parameters(module).get("bias") is not None else 0
        held = self._held("lm_head", module, rows * width, bias)
        self.head_flops = 2 * rows * width
        self.head_held.append(held)
        self.matrices.append(HeldMatrix(OpKind.LM_HEAD.value, width, rows, held))
        if not is_kind(module, "ParallelLMHead"):
            # The tokens are looked up in the same table.
            self.tables.append((held, held.bytes // max(rows, 1)))

    def _read_experts(self, path: str, module: Any) -> None:
        config = module.moe_config
        local, everywhere = int(module.local_num_experts), int(module.global_num_experts)
        matrices = 3 if config.is_act_and_mul else 2
        hidden, inner = int(module.hidden_size), int(module.intermediate_size_per_partition)
        manager = getattr(module, "expert_map_manager", None)
        if getattr(manager, "num_fused_shared_experts", 0):
            raise NotCovered(f"{general(path)}: shared experts among the routed ones")
        if _chooses_nothing(self.model, path):
            raise NotCovered(f"{general(path)}: a router that may send a token to no expert")
        parallel = config.moe_parallel_config
        elements = matrices * hidden * inner
        bias = (matrices - 1) * inner + hidden if getattr(config, "has_bias", False) else 0
        held = self._held(path, module, local * elements, local * bias)
        self.rest.append(held)
        self.experts.append(
            ExpertsCost(
                layers=1,
                experts=everywhere,
                top_k=int(module.top_k),
                expert_flops_per_token=2 * elements,
                expert_bytes=held.bytes // max(local, 1),
                held=None if local == everywhere else local,
                sources=int(parallel.dp_size),
            )
        )

    def _held(self, path: str, module: nn.Module, elements: int, biases: int) -> Held:
        held = held_matrix(module, elements, biases, self.loaded)
        if held is None:
            raise NotCovered(
                f"{general(path)} ({class_name(module)}): its weights were repacked before recording began"
            )
        return held


def _widths(module: Any) -> tuple[int, int]:
    """Inputs and outputs of the part of a linear layer that this rank holds."""
    inputs = getattr(module, "input_size_per_partition", None) or module.input_size
    outputs = getattr(module, "output_size_per_partition", None) or module.output_size
    return int(inputs), int(outputs)


def _head(model: nn.Module, inside: dict[str, nn.Module], last: bool) -> Any:
    """The module whose table makes logits; None where none is made."""
    if not last or getattr(model, "is_pooling_model", False) is True:
        return None
    candidates = [*inside.values(), *(module for _, module in model.named_modules())]
    for module in candidates:
        for name in _HEADS:
            child = module._modules.get(name)
            if child is not None and is_kind(child, "VocabParallelEmbedding"):
                return child
    if not callable(getattr(model, "compute_logits", None)):
        return None
    # Models that are always tied hand the table of their tokens to `compute_logits` (Gemma).
    tables = (m for m in inside.values() if is_kind(m, "VocabParallelEmbedding"))
    return next(tables, None)


def chosen_keys(model: Any) -> int | None:
    """Keys that an indexer chooses for a query, as the config says."""
    top_k = getattr(_text_config(model), "index_topk", None)
    return top_k if isinstance(top_k, int) else None


def _text_config(model: Any) -> Any:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _chooses_nothing(model: nn.Module, path: str) -> bool:
    """Whether the runner around experts has a router with experts that do nothing (LongCat)."""
    around = path.rpartition(".")[0]
    runner: Any = model.get_submodule(around) if around else model
    return type(getattr(runner, "router", None)).__name__ == "ZeroExpertRouter"


def _offloaded(model: nn.Module) -> int:
    """Bytes of weights that stay in the host's memory and are read through the bus (`--cpu-offload-gb`)."""
    return sum(
        int(p.numel()) * int(p.element_size())
        for p in model.parameters()
        if getattr(p, "_vllm_is_uva_offloaded", False)
    )
