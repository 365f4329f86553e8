"""Give a model without data the weights that a quantized checkpoint of it has: stand-ins with the right bytes.

The walk reads them like any packed layer (`phaseprof.work.packed`). Which matrices are packed follows from the rules of
the config; in any format routers stay as they are, and so does a head that is tied to the table of tokens.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from phaseprof.errors import ModelError
from phaseprof.work.formats import Format, Rules
from phaseprof.work.modules import class_name, matrix_of, own_parameters
from phaseprof.work.ops import OpKind
from phaseprof.work.roles import Inside, hidden_size, role_of

if TYPE_CHECKING:
    from torch import nn

_EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)
_DOWN = re.compile(r"down|output|w2", re.IGNORECASE)


def pack(model: Any, rules: Rules, name: str) -> None:
    """Put stand-ins in the place of the matrices that the rules name.

    Args:
        model: A model on the meta device; it is changed.
        rules: Of its config.
        name: What to call it in an error.

    Raises:
        ModelError: If the rules name none of its matrices.
    """
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    hidden = hidden_size(text)
    head = model.get_output_embeddings()
    table = model.get_input_embeddings()
    # On the meta device not every release of transformers ties them.
    told = getattr(text, "tie_word_embeddings", False) is True
    tied = head is not None and (told or head.weight is table.weight)
    packed = 0
    for path, module in list(model.named_modules()):
        if module is head and (tied or not rules.packs_head):
            continue
        stand_in = _stand_in(path, module, rules, hidden)
        if stand_in is not None:
            around, _, child = path.rpartition(".")
            model.get_submodule(around)._modules[child] = stand_in
            packed += 1
    if not packed:
        raise ModelError(
            f"The quantization_config of {name} names none of its matrices.",
            "Look at the modules that it excludes.",
        )


def _stand_in(path: str, module: nn.Module, rules: Rules, hidden: int) -> nn.Module | None:
    matrix = matrix_of(module)
    if matrix is not None:
        role = role_of(
            path, Inside.REST, inputs=matrix.inputs, outputs=matrix.outputs, hidden=hidden
        )
        form = rules.format_of(path)
        if form is None or role == OpKind.ROUTER or rules.experts_only:
            return None
        return _linear(module, matrix.inputs, matrix.outputs, form)
    stacked = {n: p for n, p in own_parameters(module).items() if p.dim() == 3}
    if not stacked or not (_EXPERTS.search(path) or _EXPERTS.search(class_name(module))):
        return None
    form = rules.format_of(path)
    return None if form is None else _experts(module, stacked, form, hidden)


def _linear(module: Any, inputs: int, outputs: int, form: Format) -> nn.Module:
    stand_in: Any = _classes()[0]()
    stand_in.in_features, stand_in.out_features = inputs, outputs
    stand_in.computes_in = form.computes_in
    _fill(stand_in, form, form.data_bytes(inputs, outputs), form.other_bytes(inputs, outputs))
    stand_in.register_parameter("bias", own_parameters(module).get("bias"))
    stand_in.eval()
    made: nn.Module = stand_in
    return made


def _experts(module: Any, stacked: dict[str, Any], form: Format, hidden: int) -> nn.Module | None:
    """All experts of a layer; biases stay."""
    number = int(next(iter(stacked.values())).shape[0])
    elements = sum(int(p.numel()) for p in stacked.values()) // number
    if elements % (2 * hidden):
        return None
    stand_in: Any = _classes()[1]()
    stand_in.num_experts, stand_in.has_gate = number, False
    stand_in.hidden_dim, stand_in.intermediate_dim = hidden, elements // (2 * hidden)
    stand_in.computes_in = form.computes_in
    shapes = [_widths(name, p, hidden) for name, p in stacked.items()]
    _fill(
        stand_in,
        form,
        number * sum(form.data_bytes(*shape) for shape in shapes),
        number * sum(form.other_bytes(*shape) for shape in shapes),
    )
    for name, parameter in own_parameters(module).items():
        if name not in stacked:
            stand_in.register_parameter(name, parameter)
    made: nn.Module = stand_in
    return made


def _widths(name: str, parameter: Any, hidden: int) -> tuple[int, int]:
    """Inputs and outputs of a matrix, whichever way it lies."""
    outputs, inputs = (int(size) for size in parameter.shape[1:])
    at_hidden = outputs if _DOWN.search(name) else inputs
    return (inputs, outputs) if at_hidden == hidden else (outputs, inputs)


def _fill(stand_in: Any, form: Format, data: int, other: int) -> None:
    import torch

    dtype = getattr(torch, form.stored_as)
    size = dtype.itemsize
    stand_in.register_buffer("packed", torch.empty(-(-data // size), dtype=dtype, device="meta"))
    stand_in.register_buffer("scales", torch.empty(other, dtype=torch.uint8, device="meta"))


@functools.cache
def _classes() -> tuple[type[Any], type[Any]]:
    from torch import nn

    class PackedLinear(nn.Module):
        """A matrix of a checkpoint, without data."""

    class PackedExperts(nn.Module):
        """The experts of a layer of a checkpoint, without data."""

    return PackedLinear, PackedExperts
