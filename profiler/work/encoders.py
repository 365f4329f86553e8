"""Encoders: stacks in which every token attends to every other, of text, images or sound.

Which positions an attention reaches cannot be read from weights, so that only kinds of model are covered whose pattern
is known, by ``config.model_type``. Tokens are those of the output. What a pass does once for each sequence and not for
each token (a pooler, a classifier on top of it) is in ``row_flops``; so is, negative, what a class token does not need:
a convolution over patches makes one token less than the encoder works on.

A convolution that makes tokens is a matrix for each position of its output. Where several follow each other
(Whisper, Moonshine), each has as many positions as those behind it need: one of stride s and kernel k with padding p
makes L tokens from up to ``s L + k - 2p - 1`` positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phaseprof.work.cost import AttentionCost, ModelCost
from phaseprof.work.modules import Kind, class_name, kind_of, matrix_of, own_parameters
from phaseprof.work.ops import OpKind
from phaseprof.work.parts import NotCovered
from phaseprof.work.roles import Found, hidden_size, inside_by_name, is_norm, matmuls_of, role_of
from phaseprof.work.weights import Weights

if TYPE_CHECKING:
    from torch import nn

#: Encoders whose attention reaches everything (ModernBERT: a window in some layers), by ``config.model_type``.
KNOWN = frozenset(
    {
        "bart",
        "bert",
        "camembert",
        "clip_vision_model",
        "distilbert",
        "electra",
        "m2m_100",
        "marian",
        "mbart",
        "modernbert",
        "moonshine",
        "mt5",
        "pegasus",
        "roberta",
        "siglip_vision_model",
        "t5",
        "umt5",
        "vit",
        "whisper",
        "xlm-roberta",
    }
)
_TRIOS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query", "key", "value"),
)
_HEADS = ("num_heads", "n_heads", "num_attention_heads")
#: Matrices outside of the layers that each token passes through.
_EACH = frozenset({"embeddings_project"})
_CROSS = re.compile(r"^(encoder_attn|EncDecAttention|crossattention)$")
#: Vectors that are added to tokens, or are tokens.
_VECTORS = frozenset({"cls_token", "class_embedding", "mask_token", "position_embeddings", "bias"})
_CLASS_TOKENS = ("cls_token", "class_embedding")
#: Heads on top of one vector for each sequence.
_ON_ROWS = re.compile(r"For(Sequence|Image)Classification|ForMultipleChoice|WithProjection")
#: Heads on top of each token.
_ON_TOKENS = re.compile(r"ForMaskedLM|ForTokenClassification|ForQuestionAnswering")


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention, read from its projections: heads and widths, and the matrices."""

    query_heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    kv_bytes_per_token: int

    def cost(self, *, window: int | None = None, causal: bool = False) -> AttentionCost:
        """As a group of one layer."""
        return AttentionCost(
            layers=1,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            qk_head_dim=self.qk_head_dim,
            v_head_dim=self.v_head_dim,
            window_tokens=window,
            kv_bytes_per_token=self.kv_bytes_per_token,
            causal=causal,
        )


@dataclass(slots=True)
class Stack:
    """What a stack of layers and what stands around it cost.

    Attributes:
        linear_flops: Per token of the output.
        row_flops: Per sequence.
        attention: Of each layer, in their order.
        tables: Looked up in, a row for each token.
        cross: Each attention to a source, with the projections that run over the source and not over the tokens.
        matrices: Those behind ``linear_flops``; without convolutions, which work on other positions than tokens.
        norms: Over the whole hidden state.
        hidden: Width of the hidden state.
    """

    linear_flops: int = 0
    row_flops: int = 0
    attention: list[AttentionCost] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)
    cross: list[tuple[Attention, tuple[Any, ...]]] = field(default_factory=list)
    matrices: list[Found] = field(default_factory=list)
    norms: int = 0
    hidden: int = 0


def encoder_cost(model: nn.Module) -> ModelCost | None:
    """Count an encoder; None for anything else.

    Args:
        model: `BertModel`, `T5EncoderModel`, `SiglipVisionModel`, the encoder of a `WhisperModel`. It is only read.

    Returns:
        The cost, with tokens of the output as tokens.
    """
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in KNOWN or not is_encoder(model):
        return None
    weights = Weights.of(model)
    reasons = list(weights.odd())
    head = output_head(model)
    stack = Stack()
    try:
        stack = read_stack(model, config, head)
    except NotCovered as reason:
        reasons.append(str(reason))
    if reasons:
        return not_covered(weights, reasons)
    return stack_cost(stack, weights, model.modules(), head)


def is_encoder(model: nn.Module) -> bool:
    """Whether no attention of a model is causal, or attends to something else than its own tokens."""
    found = [m for path, m in model.named_modules() if attention_projections(m) is not None]
    causal = any(
        getattr(m, "is_causal", False) is True or getattr(m, "is_decoder", False) is True
        for m in found
    )
    return bool(found) and not causal and not any(_crosses(p) for p, _ in model.named_modules())


def stack_cost(
    stack: Stack, weights: Weights, modules: Iterable[nn.Module], head: nn.Module | None
) -> ModelCost:
    """The cost of a stack that was read.

    Args:
        stack: What was read of it.
        weights: Of the whole model.
        modules: Those whose parameters a pass over the stack reads.
        head: The output head, or None.
    """
    own = weights.of_modules(modules)
    heads = weights.of_modules([head] if head is not None else [])
    apart = weights.of_modules([m for _, over_source in stack.cross for m in over_source])
    tables = weights.of_modules(stack.tables)
    # Several modules may look up in one table.
    unique = {frozenset(weights.of_modules([table])): table for table in stack.tables}
    rows = [(table, weights.row_bytes(table)) for table in unique.values()]
    matrix = None if head is None else matrix_of(head)
    found = list(stack.matrices)
    if head is not None and matrix is not None:
        found.append(Found(OpKind.LM_HEAD.value, matrix, head))
    return ModelCost(
        linear_flops_per_token=stack.linear_flops,
        head_flops_per_token=0 if matrix is None else matrix.flops_per_token,
        attention=tuple(_joined(stack.attention)),
        body_weight_bytes=weights.bytes(own - heads - tables - apart),
        head_weight_bytes=weights.bytes(heads),
        lookup_bytes_per_token=sum(size for _, size in rows),
        parameter_bytes=weights.bytes(),
        parameters=weights.elements(),
        dtype=weights.dtype(),
        tied_lookup_bytes_per_token=sum(s for t, s in rows if weights.of_modules([t]) <= heads),
        row_flops=stack.row_flops,
        matmuls=matmuls_of(found, weights, tables - heads),
        hidden_size=stack.hidden,
        norms=stack.norms,
    )


def not_covered(weights: Weights, reasons: Iterable[str]) -> ModelCost:
    """The sizes of a model and why nothing else is given."""
    return ModelCost(
        linear_flops_per_token=0,
        head_flops_per_token=0,
        attention=(),
        body_weight_bytes=0,
        head_weight_bytes=0,
        lookup_bytes_per_token=0,
        parameter_bytes=weights.bytes(),
        parameters=weights.elements(),
        dtype=weights.dtype(),
        not_covered=tuple(dict.fromkeys(reasons)),
    )


def read_stack(root: nn.Module, config: object, head: nn.Module | None) -> Stack:
    """Read the layers below a module, and what stands before and behind them.

    Raises:
        NotCovered: If a part is of unknown use.
    """
    reading = _Reading(root, config, head)
    reading.stack.hidden = hidden_size(config)
    for path, module in root.named_modules():
        reading.read(path, module)
    reading.read_stem()
    return reading.stack


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes logits over a vocabulary, or None."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        found = get() if callable(get) else None
    except (AttributeError, NotImplementedError):
        found = None
    return found if any(m is found for m in model.modules()) else None


def attention_projections(module: nn.Module) -> tuple[str, ...] | None:
    """The names of the query, key and value projections of an attention, or of the one that makes all three."""
    children = module._modules
    if "Wqkv" in children:
        return ("Wqkv",)
    return next((trio for trio in _TRIOS if set(trio) <= children.keys()), None)


@dataclass(slots=True)
class _Reading:
    root: nn.Module
    config: Any
    head: nn.Module | None
    stack: Stack = field(default_factory=Stack)
    done: set[nn.Module] = field(default_factory=set)
    convolutions: list[Any] = field(default_factory=list)
    class_tokens: int = 0

    def read(self, path: str, module: nn.Module) -> None:
        names = attention_projections(module)
        if names is not None:
            self._read_attention(path, module, names)
        kind = kind_of(module)
        if module in self.done or module is self.head:
            return
        if kind in (Kind.EMPTY, Kind.ELEMENTWISE):
            self.stack.norms += is_norm(module, inside_by_name(path), self.stack.hidden)
            return
        if kind is Kind.MATRIX:
            self._read_matrix(path, module)
        elif kind is Kind.TABLE:
            self._read_table(path, module)
        elif class_name(module) == "SiglipMultiheadAttentionPoolingHead":
            self._read_pooling(module)
        elif class_name(module) in ("Conv1d", "Conv2d"):
            self.convolutions.append(module)
        else:
            self._read_vectors(path, module)

    def read_stem(self) -> None:
        """The convolutions that make tokens, from the last to the first: how many positions each works on."""
        if self.convolutions and "Classification" in class_name(self.root):
            raise NotCovered(
                f"{class_name(self.root)} gives out no states: its tokens are not known"
            )
        each, extra = 1, -self.class_tokens
        for conv in reversed(self.convolutions):
            if conv.groups != 1 or any(d != 1 for d in conv.dilation):
                raise NotCovered(f"a convolution in groups or with holes ({class_name(conv)})")
            weight = conv.weight
            flops = 2 * int(weight.numel())
            self.stack.linear_flops += flops * each
            self.stack.row_flops += flops * extra
            padded = (0,) if conv.padding == "valid" else conv.padding
            if isinstance(padded, str):
                raise NotCovered(f"a convolution padded to {padded}")
            if len(conv.stride) == 2 and (conv.stride != conv.kernel_size or any(padded)):
                raise NotCovered("patches that overlap")
            stride, kernel, padding = conv.stride[0], conv.kernel_size[0], padded[0]
            each, extra = each * stride, extra * stride + kernel - 2 * padding - 1

    def _read_attention(self, path: str, module: nn.Module, names: tuple[str, ...]) -> None:
        attention = self._attention(module, names)
        if _crosses(path):
            over_source = tuple(module._modules[name] for name in names[1:])
            self.done.update(m for m in over_source if m is not None)
            self.stack.cross.append((attention, over_source))
            return
        causal = any(getattr(module, name, False) is True for name in ("is_causal", "is_decoder"))
        self.stack.attention.append(attention.cost(window=self._window(module), causal=causal))

    def _attention(self, module: nn.Module, names: tuple[str, ...]) -> Attention:
        matrices = [matrix_of(module._modules[name]) for name in names]
        widths = [m.outputs for m in matrices if m is not None]
        first = matrices[0]
        if first is None or len(widths) != len(names):
            raise NotCovered(f"the projections of {class_name(module)} are no plain linear layers")
        if len(widths) == 1:
            widths = [widths[0] // 3] * 3
        owners = (module, self.config)
        heads = next((n for o in owners for name in _HEADS if (n := _int(o, name)) is not None), 0)
        if not heads or widths[0] % heads:
            raise NotCovered(f"{class_name(module)} does not say how many heads it has")
        width = widths[0] // heads
        kv_heads = widths[1] // width
        if widths[1] % width or not kv_heads or heads % kv_heads or widths[2] % kv_heads:
            raise NotCovered(f"the keys of {class_name(module)} do not divide into its heads")
        size = (widths[1] + widths[2]) * first.element_bytes
        return Attention(heads, kv_heads, width, widths[2] // kv_heads, size)

    def _window(self, module: Any) -> int | None:
        """Tokens to either side, itself included (ModernBERT)."""
        local = getattr(module, "local_attention", None)
        if isinstance(local, tuple):
            return None if local[0] < 0 else int(local[0]) + 1
        return _int(module, "sliding_window")

    def _read_matrix(self, path: str, module: nn.Module) -> None:
        matrix = matrix_of(module)
        flops = 0 if matrix is None else matrix.flops_per_token
        parts = path.split(".")
        model = class_name(self.root)
        if "pooler" in parts:
            self.stack.row_flops += flops
        elif (
            any(part.isdigit() for part in parts) or parts[-1] in _EACH or _ON_TOKENS.search(model)
        ):
            self.stack.linear_flops += flops
            self._keep(path, module)
        elif _ON_ROWS.search(model):
            self.stack.row_flops += flops
        else:
            raise NotCovered(f"{path} ({class_name(module)}): how often it is used is not known")

    def _keep(self, path: str, module: nn.Module) -> None:
        matrix = matrix_of(module)
        if matrix is not None:
            inside, hidden = inside_by_name(path), self.stack.hidden
            role = role_of(
                path, inside, inputs=matrix.inputs, outputs=matrix.outputs, hidden=hidden
            )
            self.stack.matrices.append(Found(role, matrix, module))

    def _read_table(self, path: str, module: Any) -> None:
        # The biases of T5 are looked up for pairs, over and over: the table is read whole.
        if not path.endswith("relative_attention_bias"):
            self.stack.tables.append(module)

    def _read_pooling(self, module: Any) -> None:
        """SigLIP: one query a sequence attends to all tokens, and passes through two matrices more."""
        inner = module._modules["attention"]
        width, whole = int(inner.embed_dim), int(inner.in_proj_weight.numel())
        if whole != 3 * width * width or inner.in_proj_weight.dim() != 2:
            raise NotCovered("the pooling head is no plain attention")
        below = [m for m in module.modules() if matrix_of(m) is not None]
        self.done.update([module, inner, *below])
        # Keys and values of each token, and its share in scores and values; the query once.
        self.stack.linear_flops += 2 * 2 * width * width + 4 * width
        self.stack.row_flops += 2 * width * width
        for part in below:
            matrix = matrix_of(part)
            self.stack.row_flops += 0 if matrix is None else matrix.flops_per_token

    def _read_vectors(self, path: str, module: Any) -> None:
        own = own_parameters(module)
        if not own.keys() <= _VECTORS:
            raise NotCovered(
                f"{path or 'the model'} ({class_name(module)}) has parameters of unknown use: {', '.join(own)}"
            )
        self.class_tokens += sum(name in own for name in _CLASS_TOKENS)


def _crosses(path: str) -> bool:
    return any(_CROSS.match(part) for part in path.split("."))


def _int(owner: object, name: str) -> int | None:
    value = getattr(owner, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _joined(layers: list[AttentionCost]) -> Iterator[AttentionCost]:
    """Join identical layers, in the order of the first of them."""
    groups: dict[AttentionCost, list[int]] = {}
    for index, cost in enumerate(layers):
        groups.setdefault(cost, []).append(index)
    for cost, found in groups.items():
        yield replace(cost, layers=len(found), layer_indices=tuple(found))
