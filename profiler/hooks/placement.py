"""Where a model runs: the device that its passes are timed on."""

from __future__ import annotations

from typing import Any


def device_of(model: Any) -> Any:
    """The torch device that a model runs on: that of its first parameter that has data. None if it cannot be told.

    Between passes the weights that accelerate keeps elsewhere are on `meta`: they run on the device that its hooks move
    them to. A replica of DataParallel has its parameters as plain attributes.
    """
    first = None
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
        first = first or parameter.device
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
