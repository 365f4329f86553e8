"""Weights that are stored packed, scaled or wrapped: how large they are as matrices, and what a pass reads of them.

The size of a matrix is what its layer declares (`in_features` x `out_features`): packed data do not show it. The bytes
are those of everything that the layer multiplies with: packed data, scales, zero points, outlier columns, code books,
whether they are parameters, buffers, inner tensors of a tensor subclass, or (bitsandbytes, HQQ) attributes beside them.
Nothing is unpacked, imported or run, but for one form of torch (`torch.ao` dynamic quantization), whose data can only
be had as a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Dtypes whose elements are the numbers themselves. Anything else is packed or scaled.
PLAIN_DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})
#: Classes of tensors that are what they seem. Others (quantized, distributed) wrap something.
_PLAIN_TENSORS = frozenset(
    {"Parameter", "Tensor", "FakeTensor", "Buffer", "Int8Params", "Params4bit"}
)
#: Names under which layers declare their widths: torch's and those of older GPTQ layers.
_WIDTHS = (("in_features", "out_features"), ("infeatures", "outfeatures"))
#: Buffers of packed layers that are no weights: scratch space of kernels.
_SCRATCH = frozenset({"workspace"})
#: Fields of the quantization state that bitsandbytes hangs on a weight.
_STATE_FIELDS = ("absmax", "code", "offset", "state2")
#: Both operands are quantized, and the product runs on the units of that dtype, by the class of the layer.
_QUANTIZED_MATHS = {
    "FP8Linear": "float8_e4m3fn",
    "FP8GroupedLinear": "float8_e4m3fn",
    "FbgemmFp8Linear": "float8_e4m3fn",
    "FP8Experts": "float8_e4m3fn",
    "FbgemmFp8Llama4TextExperts": "float8_e4m3fn",
    "NVFP4Linear": "float4_e2m1fn_x2",
    "Linear8bitLt": "int8",
}
#: A weight takes 1 to 64 bits, scales included. Outside of that the data lie somewhere else.
_BITS = (1, 64)


@dataclass(frozen=True, slots=True)
class Stored:
    """A stretch of memory that a pass reads.

    Attributes:
        key: What tells it apart: storage, offset and shape.
        dtype: Of its elements, as torch spells it without the prefix.
        bytes: Its size.
    """

    key: tuple[object, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix or table.

    Attributes:
        rows: Inputs of a linear layer; entries of a table.
        columns: Outputs of a linear layer; width of a table.
        stored: Everything that a pass reads of it; of a table, if all its rows are looked up.
        bias_elements: Elements of its bias.
        computes_in: The dtype that the product is computed in; None: that of the activations.
    """

    rows: int
    columns: int
    stored: tuple[Stored, ...]
    bias_elements: int
    computes_in: str | None

    @property
    def elements(self) -> int:
        """Numbers that it stands for."""
        return self.rows * self.columns + self.bias_elements


def packed_matrix(module: object) -> Packed | None:
    """Read a linear layer that is stored in another form than a matrix of plain numbers.

    A layer is taken for one if its class is called something with "Linear" (or derives from `torch.nn.Linear`), it
    declares its widths, holds no modules with parameters, and its tensors are of packed dtypes or wrapped.

    Returns:
        None for anything else, a plain linear layer among it.
    """
    if not _is_called(module, "Linear"):
        return None
    weight = getattr(module, "_parameters", {}).get("weight")
    if type(module).__module__ == "torch.nn.modules.linear" and not is_wrapped(weight):
        # torch's own layer multiplies with what its weight says; packed data in it would be of unknown use.
        return None
    widths = _widths(module)
    if widths is None:
        return None
    stored = tuple(_dynamic(module) or _stored(module))
    if not _is_packed(module, stored) or _holds_parameters(module):
        return None
    inputs, outputs = widths
    bits = 8 * sum(part.bytes for part in stored)
    if not _BITS[0] <= bits / (inputs * outputs) <= _BITS[1]:
        return None
    return Packed(inputs, outputs, stored, _bias_elements(module), _computes_in(module))


def packed_table(module: object) -> Packed | None:
    """Read a lookup table that is stored in another form than rows of plain numbers; None for anything else."""
    if not _is_called(module, "Embedding"):
        return None
    rows, width = _integer(module, "num_embeddings"), _integer(module, "embedding_dim")
    if not rows or not width or getattr(module, "_modules", None):
        return None
    weight = getattr(module, "_parameters", {}).get("weight")
    if weight is not None and not is_wrapped(weight) and dtype_of(weight) in PLAIN_DTYPES:
        # A buffer beside it may hold a whole number: what the rows are scaled by (MiniCPM3).
        return None
    stored = tuple(_stored(module))
    if not _is_packed(module, stored):
        return None
    return Packed(rows, width, stored, 0, None)


def packed_experts(module: object) -> Packed | None:
    """Read routed experts that are stored packed (GGUF blocks, MXFP4, FP8 with scales): one layer's, stacked.

    Returns:
        A table with a row for each expert, as wide as its matrices together (gate, up and down; up and down without a
        gate); None for anything else.
    """
    if not _is_called(module, "Experts"):
        return None
    experts = _integer(module, "num_experts")
    hidden = _integer(module, "hidden_dim") or _integer(module, "hidden_size")
    inner = _integer(module, "intermediate_dim") or _integer(module, "intermediate_size")
    if not experts or not hidden or not inner or getattr(module, "_modules", {}).get("0"):
        return None
    stored = tuple(_stored(module))
    if all(part.dtype in PLAIN_DTYPES for part in stored):
        return None
    matrices = 3 if getattr(module, "has_gate", True) else 2
    biases = sum(
        int(p.numel())
        for name, p in getattr(module, "_parameters", {}).items()
        if p is not None and name.endswith("bias")
    )
    maths = vars(module).get("computes_in") or _QUANTIZED_MATHS.get(type(module).__name__)
    return Packed(experts, matrices * hidden * inner, stored, biases, maths)


def leaves(tensor: Any) -> Iterator[Tensor]:
    """The tensors that hold the data: of a tensor subclass those inside it, of a distributed one the local shard."""
    if is_wrapped(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            # A distributed tensor names its mesh as well.
            if hasattr(inner, "numel"):
                yield from leaves(inner)
    else:
        yield tensor


def is_wrapped(tensor: object) -> bool:
    """Whether a tensor only wraps others."""
    return type(tensor).__name__ not in _PLAIN_TENSORS and hasattr(tensor, "__tensor_flatten__")


def is_known_tensor(tensor: object) -> bool:
    """Whether it can be told what bytes lie behind a tensor."""
    return type(tensor).__name__ in _PLAIN_TENSORS or hasattr(tensor, "__tensor_flatten__")


def dtype_of(tensor: Any) -> str:
    """As torch spells it, without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def stored_of(tensor: Any) -> Iterator[Stored]:
    """What is stored behind a tensor."""
    for leaf in leaves(tensor):
        size = int(leaf.numel()) * int(leaf.element_size())
        yield Stored(key_of(leaf), dtype_of(leaf), size)


def key_of(tensor: Any) -> tuple[object, ...]:
    """What makes two tensors the same bytes: storage, offset and shape (of the first tensor inside, where it wraps
    others)."""
    leaf: Any = next(leaves(tensor))
    return (_storage(leaf), _offset(leaf), tuple(leaf.shape))


def _storage(tensor: Any) -> object:
    """An identity of the bytes behind a tensor. Storages without an address are told apart by their handle."""
    try:
        storage = tensor.untyped_storage()
        address = (
            0 if tensor.is_meta or type(tensor).__name__ == "FakeTensor" else storage.data_ptr()
        )
        return address or ("handle", storage._cdata)
    except (RuntimeError, NotImplementedError):
        return ("object", id(tensor))


def _offset(tensor: Any) -> int:
    try:
        return int(tensor.storage_offset())
    except (RuntimeError, NotImplementedError):
        return 0


def _widths(module: object) -> tuple[int, int] | None:
    for first, second in _WIDTHS:
        inputs, outputs = _integer(module, first), _integer(module, second)
        if inputs and outputs:
            return inputs, outputs
    weight = getattr(module, "_parameters", {}).get("weight")
    if type(module).__name__ == "EetqLinear" and weight is not None and weight.dim() == 2:
        # Declares nothing, and stores int8 of the shape (inputs, outputs).
        return int(weight.shape[0]), int(weight.shape[1])
    return None


def _integer(module: object, name: str) -> int:
    value = getattr(module, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _is_called(module: object, word: str) -> bool:
    return any(word in kind.__name__ for kind in type(module).__mro__)


def _is_packed(module: object, stored: tuple[Stored, ...]) -> bool:
    """Whether some of the data are no plain numbers, or the weight is a wrapper around them."""
    if any(part.dtype not in PLAIN_DTYPES for part in stored):
        return True
    weight = getattr(module, "_parameters", {}).get("weight")
    return is_wrapped(weight) and type(weight).__name__ != "DTensor"


def _holds_parameters(module: Any) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def _tensors(module: Any) -> Iterator[Any]:
    """Every tensor that a packed layer multiplies with, a storage more than once where it hangs in several places."""
    idle = _idle_buffers(module)
    for held in (module._parameters, module._buffers, vars(module)):
        for name, value in held.items():
            if name not in idle and _is_tensor(value):
                yield value
    for parameter in module._parameters.values():
        for name in ("quant_state", "SCB"):
            yield from _inside(getattr(parameter, name, None), depth=2)
    yield from _inside(getattr(module, "quant_state", None), depth=2)
    # LLM.int8 keeps the scales of its rows on the weight, and from the first pass on beside it.
    yield from _inside(getattr(getattr(module, "state", None), "SCB", None), depth=0)
    for name in ("gate_up_proj", "down_proj"):
        # GPT-OSS's kernels take their weights and scales in tensors of their own kind.
        yield from _inside_triton(vars(module).get(name))
        config = vars(module).get(f"{name}_precision_config")
        yield from _inside_triton(getattr(config, "weight_scale", None))
    meta = vars(module).get("meta")
    if isinstance(meta, dict):
        yield from _inside(meta, depth=3)  # HQQ


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """Tensors in a quantization state, which may hold another one for its own scales."""
    if _is_tensor(value):
        yield value
    elif isinstance(value, dict) and depth > 0:
        for part in value.values():
            yield from _inside(part, depth - 1)
    elif value is not None and depth > 0 and hasattr(value, "absmax"):
        for name in _STATE_FIELDS:
            yield from _inside(getattr(value, name, None), depth - 1)


def _inside_triton(value: Any) -> Iterator[Any]:
    data = getattr(getattr(value, "storage", None), "data", None)
    if not _is_tensor(value) and _is_tensor(data):
        yield data


def _is_tensor(value: object) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "element_size")


def _idle_buffers(module: Any) -> frozenset[str]:
    if hasattr(module, "activation_qtype") and module.activation_qtype is None:
        # Quanto registers them for every layer, and reads them where activations are quantized as well.
        return _SCRATCH | {"input_scale", "output_scale"}
    return _SCRATCH


def _stored(module: Any) -> Iterator[Stored]:
    seen: set[tuple[object, ...]] = set()
    for tensor in _tensors(module):
        if not is_known_tensor(tensor):
            continue
        for part in stored_of(tensor):
            if part.bytes and part.key not in seen:
                seen.add(part.key)
                yield part


def _dynamic(module: Any) -> list[Stored]:
    """A layer of torch's dynamic quantization, whose matrix lies in an object of the library: 1 byte (float16: 2) for
    each element, the scale and zero point of each row if it has its own, and the bias. What the library adds to align
    its blocks cannot be seen.
    """
    inner = getattr(module, "_modules", {}).get("_packed_params")
    if type(inner).__name__ != "LinearPackedParams":
        return []
    weight, bias = module._weight_bias()
    identity = ("object", id(inner))
    parts = [Stored((identity, "weight"), dtype_of(weight), weight.numel() * weight.element_size())]
    if weight.is_quantized and "channel" in str(weight.qscheme()):
        # Kept as float32 and int32.
        rows = int(weight.shape[0])
        parts += [
            Stored((identity, "scale"), "float32", 4 * rows),
            Stored((identity, "zero_point"), "int32", 4 * rows),
        ]
    if bias is not None:
        parts.append(Stored((identity, "bias"), dtype_of(bias), bias.numel() * bias.element_size()))
    return parts


def _bias_elements(module: Any) -> int:
    bias = getattr(module, "bias", None)
    if callable(bias) and not _is_tensor(bias):
        bias = bias()
    return int(bias.numel()) if _is_tensor(bias) else 0  # type: ignore[union-attr]


def _computes_in(module: Any) -> str | None:
    """The dtype of the product. Packed weights are mostly unpacked to the dtype of the activations first; only where
    the layer quantizes those as well does it use the faster units."""
    told = vars(module).get("computes_in")
    if isinstance(told, str):
        return told  # A stand-in for a checkpoint's layer (`phaseprof.work.packing`).
    weight = getattr(module, "_parameters", {}).get("weight")
    for kind in type(module).__mro__:
        maths = _QUANTIZED_MATHS.get(kind.__name__)
        if maths is not None:
            # The layers of this kind that hold a plain weight use it as it is.
            plain = weight is not None and dtype_of(weight) in PLAIN_DTYPES
            return dtype_of(weight) if plain else maths
    if type(module.__dict__.get("compute_dtype")).__name__ == "dtype":
        return str(module.compute_dtype).removeprefix("torch.")  # Linear4bit
    inner = getattr(module, "_modules", {}).get("_packed_params")
    if inner is not None:
        return "int8" if "qint8" in str(getattr(inner, "dtype", "")) else "float32"
    if weight is None or not is_wrapped(weight):
        return None
    quantizes = (
        getattr(weight, "act_quant_kwargs", None) is not None
        or getattr(module, "activation_qtype", None) is not None
    )
    data = dtype_of(next(leaves(weight)))
    if quantizes and (data == "int8" or data.startswith("float8")):
        return data
    # A wrapper shows the dtype that it is unpacked to.
    return dtype_of(weight)
