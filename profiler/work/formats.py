"""The formats that weights are published in, by what a ``quantization_config`` says of them: bytes by formula.

A checkpoint in one of these formats holds for each matrix its packed data, scales for blocks or groups of it, and,
depending on the format, zero points, an index of groups or a code book. The layouts are those of

- FP8 in blocks (DeepSeek-V3, Qwen3-FP8: ``weight_scale_inv``) and for whole rows or tensors (FBGEMM, ModelOpt);
- GPTQ and AutoRound (``qweight``, ``scales``, ``qzeros``, ``g_idx``) and AWQ (the same without an index);
- compressed-tensors (llm-compressor): ``int-quantized``, ``float-quantized``, ``pack-quantized``, ``nvfp4``, ``mxfp4``;
- MXFP4 (OCP Microscaling 1.0, gpt-oss): 4 bits and a byte for each 32, of experts alone;
- bitsandbytes: NF4 and FP4 (Dettmers et al., arXiv 2305.14314), LLM.int8 (arXiv 2208.07339).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaseprof.errors import ModelError, UsageError

_FP8, _FP4, _INT8 = "float8_e4m3fn", "float4_e2m1fn_x2", "int8"
#: A first-level block of bitsandbytes, and how many of their scales share one of the second level.
_BNB_BLOCK, _BNB_NESTED = 64, 256


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix of ``inputs x outputs`` is stored.

    Attributes:
        bits: Of one element.
        stored_as: Dtype of the tensor with the data, as torch spells it.
        inputs_per_scale, outputs_per_scale: The block that shares a scale; None: all of them.
        scale_bytes: Of one scale; 0: there are none.
        zero_bits: Of the zero point of a group and output, packed into words of 32 bits; 0: there are none.
        index_bytes: For each input: which group it is in.
        fixed_bytes: For each matrix: scales of the whole, its shape.
        nested: The scales themselves are kept in 8 bits (bitsandbytes' double quantization).
        flat: Blocks run through the whole matrix, not along its rows.
        word_bits: Data of an output are filled up to words of so many bits.
        computes_in: Dtype of its products; None: that of the activations.
    """

    bits: int
    stored_as: str
    inputs_per_scale: int | None = None
    outputs_per_scale: int | None = None
    scale_bytes: int = 0
    zero_bits: int = 0
    index_bytes: int = 0
    fixed_bytes: int = 0
    nested: bool = False
    flat: bool = False
    word_bits: int = 8
    computes_in: str | None = None

    def data_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of the elements."""
        if self.flat:
            return _up(inputs * outputs * self.bits, 8)
        return outputs * _up(inputs * self.bits, self.word_bits) * (self.word_bits // 8)

    def other_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of all that is needed to read them."""
        groups = _up(inputs, self.inputs_per_scale or inputs)
        scales = groups * _up(outputs, self.outputs_per_scale or outputs)
        if self.flat:
            scales = _up(inputs * outputs, self.inputs_per_scale or 1)
        size = scales * self.scale_bytes
        if self.nested:
            # A byte each, a number and the code of 256 values for the second level, and its offset.
            size = scales + 4 * _up(scales, _BNB_NESTED) + 4 * 256 + 4
        zeros = 4 * _up(outputs * self.zero_bits, 32) * groups
        return size + zeros + inputs * self.index_bytes + self.fixed_bytes


@dataclass(frozen=True, slots=True)
class Rules:
    """Which matrices of a model are stored how.

    Attributes:
        groups: Targets (``Linear``, names, patterns after ``re:``) and their format; the first that fits counts.
        ignored: Names and patterns of those that are left alone.
        packs_head: The output head is packed like others, unless it is ignored.
        experts_only: Only routed experts are packed.
    """

    groups: tuple[tuple[tuple[str, ...], Format], ...]
    ignored: tuple[str, ...] = ()
    packs_head: bool = False
    experts_only: bool = False

    def format_of(self, path: str) -> Format | None:
        """How the linear layer or the experts of a path are stored; None: as they are."""
        if any(_names(pattern, path) for pattern in self.ignored):
            return None
        return next(
            (
                form
                for targets, form in self.groups
                if any(target == "Linear" or _names(target, path) for target in targets)
            ),
            None,
        )


def _names(pattern: str, path: str) -> bool:
    """Whether a name or pattern of a config means a module: from the start to the end of a name, as in transformers,
    or, without ``re:``, as a part of the path."""
    expression = pattern.removeprefix("re:")
    try:
        found = re.match(rf"(?:{expression})(?:(?<=\.)|(?=\.|$))", path) is not None
    except re.error:
        found = False
    return found or (expression == pattern and f".{pattern}." in f".{path}.")


_EVERY = ("Linear",)
#: What may be asked for by name.
NAMED: Mapping[str, Format] = {
    "fp8": Format(8, _FP8, None, 1, 4, computes_in=_FP8),
    "fp8-block": Format(8, _FP8, 128, 128, 4, computes_in=_FP8),
    "int8": Format(8, _INT8, None, 1, 4, computes_in=_INT8),
    "int8-weight-only": Format(8, _INT8, None, 1, 2),
    "int4": Format(4, "int32", 128, 1, 2, word_bits=32),
    "nf4": Format(4, "uint8", _BNB_BLOCK, scale_bytes=4, fixed_bytes=64, flat=True),
    "mxfp4": Format(4, "uint8", 32, 1, 1),
    "nvfp4": Format(4, "uint8", 16, 1, 1, fixed_bytes=8, computes_in=_FP4),
}


def named_rules(name: str) -> Rules:
    """All matrices of the layers in one format.

    Raises:
        UsageError: If there is no such format.
    """
    form = NAMED.get(name)
    if form is None:
        raise UsageError(f"Unknown quantization {name!r}.", f"Use {', '.join(NAMED)}, or none.")
    return Rules(((_EVERY, form),))


def rules_of(config: Mapping[str, Any], model: str) -> Rules:
    """Read a ``quantization_config``.

    Args:
        config: As it stands in ``config.json``.
        model: What to call the model in an error.

    Raises:
        ModelError: If the bytes do not follow from what it says.
    """
    method = str(config.get("quant_method") or "")
    if not method and any(config.get(name) for name in _BNB_FLAGS):
        method = "bitsandbytes"
    read = _READERS.get(method.replace("_", "-"))
    rules = None if read is None else read(config)
    if rules is None:
        raise ModelError(
            f"The config of {model} does not tell the bytes of its quantized weights ({method or 'of no name'}).",
            f"Leave quantization_config out of it, or name a format that comes near: {', '.join(NAMED)}.",
        )
    return rules


def _fp8(config: Mapping[str, Any]) -> Rules:
    block = config.get("weight_block_size")
    outputs, inputs = block if block else (None, None)
    form = Format(8, _FP8, inputs, outputs, 4, computes_in=_FP8)
    return Rules(((_EVERY, form),), _listed(config, "modules_to_not_convert", "ignored_layers"))


def _fbgemm(config: Mapping[str, Any]) -> Rules:
    form = Format(8, _FP8, None, 1, 4, computes_in=_FP8)
    return Rules(((_EVERY, form),), _listed(config, "modules_to_not_convert"))


def _gptq(config: Mapping[str, Any]) -> Rules | None:
    bits, group = config.get("bits"), config.get("group_size")
    if not isinstance(bits, int) or not isinstance(group, int):
        return None
    form = Format(bits, "int32", group if group > 0 else None, 1, 2, zero_bits=bits, index_bytes=4)
    inside = config.get("modules_in_block_to_quantize") or ()
    flat = [name for part in inside for name in (part if isinstance(part, list) else [part])]
    dynamic = config.get("dynamic") or {}
    left = tuple(f"re:{key[2:]}" for key in dynamic if key.startswith("-:"))
    return Rules(((tuple(flat) or _EVERY, form),), left, bool(config.get("lm_head")))


def _awq(config: Mapping[str, Any]) -> Rules | None:
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", 128)
    if not isinstance(bits, int) or not isinstance(group, int):
        return None
    zeros = bits if config.get("zero_point", True) else 0
    form = Format(bits, "int32", group if group > 0 else None, 1, 2, zero_bits=zeros)
    return Rules(((_EVERY, form),), _listed(config, "modules_to_not_convert"))


def _mxfp4(config: Mapping[str, Any]) -> Rules:
    left = _listed(config, "modules_to_not_convert")
    return Rules(((_EVERY, NAMED["mxfp4"]),), left, experts_only=True)


_BNB_FLAGS = ("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit")


def _bitsandbytes(config: Mapping[str, Any]) -> Rules | None:
    left = _listed(config, "llm_int8_skip_modules")
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return Rules(((_EVERY, Format(8, _INT8, None, 1, 4, computes_in=_INT8)),), left)
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        return None
    told = config.get("bnb_4bit_compute_dtype")
    form = Format(
        4,
        "uint8",
        _BNB_BLOCK,
        scale_bytes=4,
        fixed_bytes=64,
        nested=bool(config.get("bnb_4bit_use_double_quant")),
        flat=True,
        computes_in=None if told is None else str(told).removeprefix("torch."),
    )
    return Rules(((_EVERY, form),), left)


def _compressed(config: Mapping[str, Any]) -> Rules | None:
    groups = []
    for group in (config.get("config_groups") or {}).values():
        form = _compressed_format(group, str(group.get("format") or config.get("format") or ""))
        if form is None:
            return None
        groups.append((tuple(group.get("targets") or _EVERY), form))
    if not groups:
        return None
    return Rules(tuple(groups), _listed(config, "ignore"), packs_head=True)


def _compressed_format(group: Mapping[str, Any], layout: str) -> Format | None:
    weights, activations = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping) or not isinstance(weights.get("num_bits"), int):
        return None
    bits, is_float = weights["num_bits"], weights.get("type") == "float"
    grouped: Sequence[int | None] | None = {
        "tensor": (None, None),
        "channel": (None, 1),
        "token": (None, 1),
        "group": (weights.get("group_size"), 1),
        "tensor_group": (weights.get("group_size"), 1),
        "block": tuple(reversed(weights.get("block_structure") or ())),
    }.get(str(weights.get("strategy")))
    if grouped is None or len(grouped) != 2:
        return None
    inputs, outputs = grouped
    computes_in = _product(bits, is_float, activations)
    if is_float and bits == 4:
        micro = layout.startswith("mxfp4") or weights.get("scale_dtype") == "torch.uint8"
        shared = 0 if micro else (8 if activations else 4)
        return Format(4, "uint8", inputs, outputs, 1, fixed_bytes=shared, computes_in=computes_in)
    if is_float:
        return (
            Format(bits, _FP8, inputs, outputs, 2, computes_in=computes_in) if bits == 8 else None
        )
    packed = layout.startswith(("pack", "marlin")) or bits < 8
    return Format(
        bits,
        "int32" if packed else _INT8,
        inputs,
        outputs,
        2,
        zero_bits=0 if weights.get("symmetric", True) else bits,
        index_bytes=4 if weights.get("actorder") in ("group", True) else 0,
        # Packed, it is said how wide it was.
        fixed_bytes=16 if packed else 0,
        word_bits=32 if packed else 8,
        computes_in=computes_in,
    )


def _product(bits: int, is_float: bool, activations: object) -> str | None:
    """What both operands are multiplied in, where activations are quantized as well."""
    if not isinstance(activations, Mapping):
        return None
    wider = max(bits, int(activations.get("num_bits") or 16))
    if is_float and activations.get("type") == "float":
        return {8: _FP8, 4: _FP4}.get(wider)
    return _INT8 if wider == 8 and not is_float else None


def _modelopt(config: Mapping[str, Any]) -> Rules | None:
    inner = config.get("quantization")
    told = {**config, **(inner if isinstance(inner, Mapping) else {})}
    form = {
        "FP8": Format(8, _FP8, scale_bytes=4, fixed_bytes=4, computes_in=_FP8),
        "NVFP4": NAMED["nvfp4"],
    }.get(str(told.get("quant_algo")))
    left = _listed(told, "ignore", "exclude_modules")
    # Patterns of file names.
    patterns = tuple(f"re:{re.escape(p).replace(chr(92) + '*', '.*')}" for p in left)
    return None if form is None else Rules(((_EVERY, form),), patterns)


_READERS = {
    "fp8": _fp8,
    "fbgemm-fp8": _fbgemm,
    "gptq": _gptq,
    "auto-round": _gptq,
    "intel/auto-round": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}


def _listed(config: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    found = next((config[name] for name in names if config.get(name)), ())
    return tuple(str(item) for item in found)


def _up(number: int, by: int) -> int:
    return -(-number // by)
