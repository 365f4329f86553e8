"""Which devices a model runs on, by where its weights lie and where accelerate's hooks bring them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.hooks.placement import device_of, devices_of


def device(name: str) -> Any:
    kind, _, index = name.partition(":")
    return KNOWN.setdefault(name, _Device(kind, int(index) if index else None))


class _Device:
    """Like a `torch.device`, for devices that are not in this machine."""

    def __init__(self, kind: str, index: int | None) -> None:
        self.type = kind
        self.index = index

    def __repr__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


KNOWN: dict[str, _Device] = {}


class Model:
    """A model with a parameter on each of some devices, and modules that hooks run on others."""

    def __init__(self, *weights: str, runs_on: tuple[str, ...] = ()) -> None:
        self._parameters = [SimpleNamespace(device=device(name)) for name in weights]
        hooks = [SimpleNamespace(execution_device=device(name)) for name in runs_on]
        self._modules = [SimpleNamespace(_hf_hook=hook) for hook in hooks]

    def parameters(self) -> list[Any]:
        return self._parameters

    def modules(self) -> list[Any]:
        return [SimpleNamespace(), *self._modules]


@pytest.mark.parametrize(
    ("model", "runs_on", "spread"),
    [
        (Model("cpu", "cpu"), "cpu", ()),
        (Model("cuda:0"), "cuda:0", ()),
        (Model("cuda:1", "cuda:1"), "cuda:1", ()),
        # Split by hand, and by `device_map`.
        (Model("cuda:0", "cuda:1"), "cuda:0", ("cuda:0", "cuda:1")),
        (
            Model("cuda:1", "cuda:0", runs_on=("cuda:1", "cuda:0")),
            "cuda:1",
            ("cuda:1", "cuda:0"),
        ),
        # A large embedding on the host: what takes time is on the device.
        (Model("cpu", "cuda:0"), "cuda:0", ()),
        # Offloaded: between passes the weights are nowhere, and each module says where it runs.
        (Model("meta", "meta", runs_on=("cuda:0",)), "cuda:0", ()),
        (Model("meta", "meta", runs_on=("cpu",)), "cpu", ()),
        (Model("cuda:0", "meta", runs_on=("cuda:0", "cuda:0")), "cuda:0", ()),
        (Model("cuda:0", "meta", runs_on=("cuda:0", "cuda:1")), "cuda:0", ("cuda:0", "cuda:1")),
        (Model("cuda:0", "meta", runs_on=("cuda",)), "cuda:0", ()),
        (Model("meta"), "meta", ()),
        (Model(), "None", ()),
    ],
)
def test_devices(model: Model, runs_on: str, spread: tuple[str, ...]) -> None:
    assert str(device_of(model)) == runs_on
    assert tuple(map(str, devices_of(model))) == spread
