"""Which devices a model runs on, by where its weights lie and where accelerate's hooks bring them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.hooks.models import ModelBook
from phaseprof.hooks.placement import device_of, devices_of
from phaseprof.trace.meta import Device as DescribedDevice
from phaseprof.work.cost import ModelCost


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


def test_a_model_on_two_devices_has_a_timer_on_each() -> None:
    """Split by accelerate: its weights are nowhere between passes, and its modules say where they run."""
    torch = pytest.importorskip("torch")

    class Timer:
        failure = None

        def __init__(self, at: Any) -> None:
            self.at = str(at)

        def begin(self) -> str:
            return self.at

        def end(self, mark: str) -> None:
            asked.append(mark)

        def finish(self) -> None: ...

    def describe(at: Any) -> DescribedDevice:
        return DescribedDevice(str(at), "cuda", at.index, 132, None, None, str(at))

    def count(_: Any) -> ModelCost:
        raise ValueError("not a decoder")

    asked: list[str] = []
    book = ModelBook(
        describe=describe,
        make_timer=Timer,
        count=count,
        on_new=lambda seen: None,
        note=lambda what: None,
    )
    layers = [torch.nn.Linear(2, 2, device="meta") for _ in range(4)]
    for layer, at in zip(layers, ("cuda:1", "cuda:1", "cuda:0", "cuda:0"), strict=True):
        layer._hf_hook = SimpleNamespace(execution_device=torch.device(at))
    seen = book.find(torch.nn.Sequential(*layers), None)
    assert seen.device is not None and seen.device.key == "cuda:1"
    assert seen.meta.devices == 2
    assert seen.timer is not None
    seen.timer.end(seen.timer.begin())
    assert asked == ["cuda:1", "cuda:0"]
    # Whoever ends the session finishes each of them, once.
    assert len(book.timers) == 2
    alone = book.find(torch.nn.Sequential(*layers[:2]), None)
    assert isinstance(alone.timer, Timer) and alone.meta.devices == 1
