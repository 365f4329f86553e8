"""Patches: set for a while, and taken off as if they had never been."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest

from phaseprof.hooks.patching import Patch


class Base:
    def run(self, value: int = 1) -> int:
        """Runs."""
        return value

    def other(self) -> str:
        return "other"


class Derived(Base):
    pass


@pytest.fixture
def owner() -> type[Base]:
    """A fresh class with a method of its own."""
    return type("Owner", (), dict(vars(Base)))


@pytest.fixture
def heir() -> type[Base]:
    """A fresh class that inherits the method."""
    return type("Heir", (Base,), {})


def counting(calls: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a wrapper that notes each call and hands it on."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return original(self, *args, **kwargs)

        return wrapper

    return make


def test_calls_go_through_the_wrapper(owner: type[Base]) -> None:
    calls: list[Any] = []
    made_before = owner()
    Patch(owner, "run", counting(calls))
    assert made_before.run(3) == 3
    assert owner().run(value=4) == 4
    assert calls == [((3,), {}), ((), {"value": 4})]


def test_an_attribute_of_its_own_is_put_back(owner: type[Base]) -> None:
    before = dict(vars(owner))
    patch = Patch(owner, "run", counting([]))
    assert vars(owner)["run"] is not before["run"]
    assert patch.remove() is True
    assert dict(vars(owner)) == before
    assert vars(owner)["run"] is before["run"]


def test_an_inherited_attribute_is_inherited_again(heir: type[Base]) -> None:
    calls: list[Any] = []
    patch = Patch(heir, "run", counting(calls))
    assert heir().run() == 1
    assert Base().run() == 1
    assert len(calls) == 1
    assert patch.remove() is True
    assert "run" not in vars(heir)
    assert heir.run is Base.run


def test_classes_below_see_it_and_then_do_not(owner: type[Base]) -> None:
    calls: list[Any] = []
    below = type("Below", (owner,), {})
    patch = Patch(owner, "run", counting(calls))
    assert below().run(2) == 2
    patch.remove()
    assert below().run(2) == 2
    assert len(calls) == 1


def test_a_function_of_a_module() -> None:
    module = types.ModuleType("engine")

    def run(value: int) -> int:
        return value + 1

    module.run = run  # type: ignore[attr-defined]
    patch = Patch(module, "run", lambda original: lambda value: original(value) * 10)
    assert patch.label == "engine.run"
    assert module.run(1) == 20
    assert patch.remove() is True
    assert module.run is run


def test_a_static_method_is_put_back_as_one(owner: type[Base]) -> None:
    kept = staticmethod(lambda: 5)
    owner.run = kept  # type: ignore[assignment]
    patch = Patch(owner, "run", lambda original: lambda *_: original())
    assert patch.remove() is True
    assert vars(owner)["run"] is kept


def test_the_wrapper_looks_like_what_it_wraps(owner: type[Base]) -> None:
    def original(self: Any, value: int = 1, *, extra: str = "x") -> int:
        """Runs."""
        return value

    original.__module__ = "engine.running"
    signature = inspect.signature(original)
    owner.run = original  # type: ignore[method-assign]
    patch = Patch(owner, "run", counting([]))
    wrapper = vars(owner)["run"]
    assert wrapper is not original
    assert inspect.signature(wrapper) == signature
    assert inspect.unwrap(wrapper) is original
    assert (wrapper.__doc__, wrapper.__module__, wrapper.__qualname__) == (
        "Runs.",
        "engine.running",
        original.__qualname__,
    )
    assert patch.label == "Owner.run"


def test_somebody_wraps_it_over_ours(owner: type[Base]) -> None:
    """Theirs stays: it holds ours, which must then pass calls through."""
    original = vars(owner)["run"]
    calls: list[Any] = []
    patch = Patch(owner, "run", counting(calls))
    ours = vars(owner)["run"]

    def theirs(self: Any, value: int = 1) -> int:
        return int(ours(self, value)) + 100

    owner.run = theirs  # type: ignore[method-assign]
    assert patch.remove() is False
    assert vars(owner)["run"] is theirs
    assert owner().run(1) == 101
    # When they put back what they had found, ours can go.
    owner.run = ours  # type: ignore[method-assign]
    assert patch.remove() is True
    assert vars(owner)["run"] is original


def test_somebody_takes_the_attribute_away(heir: type[Base]) -> None:
    patch = Patch(heir, "run", counting([]))
    del heir.run
    assert patch.remove() is False
    assert heir.run is Base.run


def test_removing_twice_does_nothing(owner: type[Base]) -> None:
    patch = Patch(owner, "run", counting([]))
    assert patch.remove() is True
    before = dict(vars(owner))
    assert patch.remove() is False
    assert dict(vars(owner)) == before


def test_two_patches_come_off_in_reverse(owner: type[Base]) -> None:
    before = dict(vars(owner))
    calls: list[Any] = []
    patches = [Patch(owner, "run", counting(calls)) for _ in range(2)]
    assert owner().run(7) == 7
    assert len(calls) == 2
    assert [patch.remove() for patch in reversed(patches)] == [True, True]
    assert dict(vars(owner)) == before


def test_other_attributes_are_left_alone(owner: type[Base]) -> None:
    other = vars(owner)["other"]
    Patch(owner, "run", counting([])).remove()
    assert vars(owner)["other"] is other


def test_an_attribute_that_is_not_there(owner: type[Base]) -> None:
    before = dict(vars(owner))
    with pytest.raises(AttributeError, match="walk"):
        Patch(owner, "walk", counting([]))
    assert dict(vars(owner)) == before


def test_a_wrapper_that_cannot_be_made_changes_nothing(owner: type[Base]) -> None:
    before = dict(vars(owner))

    def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        Patch(owner, "run", refuse)
    assert dict(vars(owner)) == before
