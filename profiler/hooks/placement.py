"""Where a model runs: the device that its passes are timed on."""

from __future__ import annotations

from typing import Any


def device_of(model: Any) -> Any:
    """The torch device that a model runs on: that of its first parameter that has data, on an accelerator if it has any
    there (a large embedding may stay on the host). None if it cannot be told.

    Between passes the weights that accelerate keeps elsewhere are on `meta`: they run on the device that its hooks move
    them to. A replica of DataParallel has its parameters as plain attributes.
    """
    first = host = None
    for parameter in model.parameters():
        device = parameter.device
        if _is_accelerator(device):
            return device
        if device.type == "cpu":
            host = host or device
        first = first or device
    if host is not None:
        return host
    for module in model.modules():
        own = module.__dict__
        if first is not None:
            device = _execution_device(own.get("_hf_hook"))
            if device is not None:
                return device
        elif own.get("_is_replica"):
            for value in own.values():
                if hasattr(value, "is_meta") and hasattr(value, "device"):
                    return value.device
    return first


def devices_of(model: Any) -> tuple[Any, ...]:
    """The accelerators that a model's layers lie on, its first one first; empty for a model on one device.

    Layers that accelerate brings to a device for each pass run there, wherever their weights lie between passes.
    """
    first = device_of(model)
    found = [parameter.device for parameter in model.parameters()]
    found += [_execution_device(module.__dict__.get("_hf_hook")) for module in model.modules()]
    used = dict.fromkeys(
        device for device in (first, *found) if device is not None and _is_accelerator(device)
    )
    if len(used) > 1:
        # A hook may say "cuda" for the device that a weight says the number of.
        used = dict.fromkeys(device for device in used if device.index is not None)
    return tuple(used) if len(used) > 1 else ()


def _is_accelerator(device: Any) -> bool:
    return device.type not in ("cpu", "meta")


def _execution_device(hook: Any) -> Any:
    """What one of accelerate's hooks, or the first that says it in a sequence of them, runs a module on."""
    for one in (hook, *getattr(hook, "hooks", ())):
        device = getattr(one, "execution_device", None)
        if isinstance(device, dict):
            device = next(iter(device.values()), None)
        if device is not None:
            return _torch_device(device)
    return None


def _torch_device(device: Any) -> Any:
    if hasattr(device, "type"):
        return device
    import torch

    return torch.device(device)
