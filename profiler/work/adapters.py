"""Adapters of PEFT: which of a model's modules a pass runs, given what is active, merged and disabled.

PEFT puts a wrapper in the place of a layer and keeps the layer inside it, beside the weights of every adapter that was
loaded. A pass runs the layer, and of the adapters those that are active, unless they are merged into the layer or
disabled. `read_adapters` takes the wrappers out of the view of the model, so that a walk sees the layers where they
would be without them, and says what the active adapters add.

Known are LoRA on linear layers (DoRA and layers with packed weights included), IA3 and modules that are saved whole.
Others are known where they do nothing: merged or disabled. The norm of DoRA's columns is a constant of the weights,
which PEFT computes anew in each pass; that is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

_TUNER = "BaseTunerLayer"
_WHOLE = "ModulesToSaveWrapper"
#: Variants of LoRA that run the same two matrices for each token.
_SAME_MATRICES = frozenset({"DoraLinearVariant"})
_EXPERTS = re.compile(r"expert", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Added:
    """What active adapters add to one layer.

    Attributes:
        base: The layer inside.
        flops_per_token: Of their matrices.
        tensors: What a pass reads of them.
    """

    base: nn.Module
    flops_per_token: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        modules: What a pass runs, by its path; a layer with adapters at the path of its wrapper.
        added: By layer.
        reasons: Why some adapters cannot be counted.
    """

    modules: dict[str, nn.Module]
    added: tuple[Added, ...]
    reasons: tuple[str, ...]


def base_of(module: Any) -> Any:
    """The layer that runs in the place of a module: itself, or the one that a wrapper of PEFT holds."""
    while True:
        if _is(module, _TUNER):
            inner = module._modules.get("base_layer")
        elif _is(module, _WHOLE):
            inner = _saved(module)
        else:
            return module
        if inner is None:
            return module
        module = inner


def has_adapters(model: nn.Module) -> bool:
    """Whether a wrapper of PEFT stands anywhere in a model."""
    return any(is_wrapper(module) for module in model.modules())


def read_adapters(model: nn.Module) -> Adapters:
    """Tell what a pass runs of a model with or without adapters. The model is only read."""
    modules = dict(model.named_modules())
    wrapped = {path: m for path, m in modules.items() if is_wrapper(m)}
    if not wrapped:
        return Adapters(modules, (), ())
    added: list[Added] = []
    reasons: dict[str, None] = {}
    hidden: list[str] = []
    for path, wrapper in wrapped.items():
        if any(path.startswith(f"{other}.") for other in hidden):
            continue
        base = base_of(wrapper)
        if base is wrapper:
            reasons[f"adapters of class {type(wrapper).__name__}"] = None
            continue
        hidden.append(path)
        # Wrappers may lie in one another; what the innermost holds stands at the path of the outermost.
        part = _added(path, wrapper, base, reasons)
        if part is not None:
            added.append(part)
    return Adapters(_without(modules, wrapped, hidden), tuple(added), tuple(reasons))


def _without(
    modules: Mapping[str, nn.Module], wrapped: Mapping[str, nn.Module], hidden: list[str]
) -> dict[str, nn.Module]:
    prefixes = tuple(f"{path}." for path in hidden)
    view: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if path in wrapped and path in hidden:
            for inner, part in base_of(module).named_modules():
                view[f"{path}.{inner}".rstrip(".")] = part
        elif not path.startswith(prefixes):
            view[path] = module
    return view


def _added(path: str, wrapper: Any, base: nn.Module, reasons: dict[str, None]) -> Added | None:
    """What the wrappers around one layer add."""
    flops = 0
    tensors: list[Tensor] = []
    for layer in _around(wrapper, base):
        if _EXPERTS.search(path):
            reasons["adapters on experts"] = None
        elif _is(layer, "IA3Layer"):
            tensors += [layer.ia3_l[name] for name in _active(layer) if name in layer.ia3_l]
        elif _is(layer, "LoraLayer") and not _is(layer, "AdaLoraLayer"):
            for name in _active(layer):
                flops += _lora(layer, name, tensors, reasons)
        elif not _is(layer, _WHOLE) and _active(layer):
            kind = type(layer)
            reasons[f"adapters of class {kind.__module__.split('.')[-2]}.{kind.__name__}"] = None
    return Added(base, flops, tuple(tensors)) if tensors else None


def _lora(layer: Any, name: str, tensors: list[Tensor], reasons: dict[str, None]) -> int:
    """Add what one adapter reads; give its FLOPs for a token: 2 r (inputs + outputs)."""
    variant = type(layer.lora_variant.get(name)).__name__ if _has_variant(layer, name) else ""
    if variant and variant not in _SAME_MATRICES:
        reasons[f"adapters of the kind {variant}"] = None
        return 0
    if name in getattr(layer, "lora_embedding_A", ()):
        reasons["adapters on a lookup table"] = None
        return 0
    if name not in layer.lora_A or name not in layer.lora_B:
        if hasattr(layer, "parameter_name"):
            reasons["adapters on bare parameters"] = None
        return 0
    down, up = layer.lora_A[name], layer.lora_B[name]
    if down.weight.dim() != 2 or up.weight.dim() != 2:
        reasons["adapters on convolutions"] = None
        return 0
    tensors.extend(p for part in (down, up) for p in part.parameters())
    magnitudes = getattr(layer, "lora_magnitude_vector", None)
    if magnitudes is not None and name in magnitudes:
        tensors.append(magnitudes[name].weight)
    return 2 * (int(down.weight.numel()) + int(up.weight.numel()))


def _has_variant(layer: Any, name: str) -> bool:
    return name in getattr(layer, "lora_variant", {})


def _active(layer: Any) -> tuple[str, ...]:
    """Adapters that a pass runs beside the layer."""
    if layer.disable_adapters or getattr(layer, "merged_adapters", None):
        return ()
    names = layer.active_adapters
    return tuple(dict.fromkeys((names,) if isinstance(names, str) else names))


def _around(wrapper: Any, base: object) -> Iterator[Any]:
    """The wrappers around a layer, from the outermost on."""
    while wrapper is not base:
        yield wrapper
        inner = wrapper._modules.get("base_layer") if _is(wrapper, _TUNER) else _saved(wrapper)
        if inner is None:
            return
        wrapper = inner


def _saved(wrapper: Any) -> Any:
    """What runs of a module that is saved whole: its copy for the active adapter, or the original."""
    copies = wrapper._modules["modules_to_save"]
    names = wrapper.active_adapters
    # As its forward decides it: one adapter that it does not know turns it off.
    if wrapper.disable_adapters or not names or any(name not in copies for name in names):
        return wrapper._modules["original_module"]
    return copies[names[0]]


def is_wrapper(module: object) -> bool:
    """Whether a module is a wrapper of PEFT around a layer."""
    return _is(module, _TUNER) or _is(module, _WHOLE) or _is(module, "AuxiliaryTrainingWrapper")


def _is(module: object, name: str) -> bool:
    return any(
        kind.__name__ == name and kind.__module__.startswith("peft.")
        for kind in type(module).__mro__
    )
