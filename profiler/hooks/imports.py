"""Run a callback when a module has been imported, without importing it.

A finder at the head of ``sys.meta_path`` asks the other finders where a wanted module is and puts a loader around
theirs that reports when the module has been executed. The module itself never sees that loader: before it runs, its
``__loader__`` and its spec hold the real one again, so ``inspect.getsource``, ``importlib.resources`` and
``importlib.reload`` work as ever. With nothing to wait for the finder is off ``sys.meta_path``.

Every wrapped Python process imports this module at its start, so it costs only what the interpreter has loaded anyway:
no ``typing``, no ``dataclasses``, no ``threading``.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock, get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from phaseprof.errors import NotMeasured

    Callback = Callable[[ModuleType], object]

_lock = RLock()
_waiting: dict[str, list[Removal]] = {}
_failed: list[tuple[str, str]] = []


class Removal:
    """One registration: the way to take it back."""

    __slots__ = ("callback", "name")

    def __init__(self, name: str, callback: Callback) -> None:
        self.name = name
        self.callback = callback

    def remove(self) -> None:
        """Stop waiting. Does nothing if the callback was called or taken back before."""
        with _lock:
            waiting = _waiting.get(self.name, [])
            if self in waiting:
                waiting.remove(self)
            if not waiting:
                _waiting.pop(self.name, None)
            _settle_finder()


def when_imported(name: str, callback: Callback) -> Removal:
    """Call `callback(module)` once, right after the module `name` has been executed.

    If it is imported already, the call happens at once, in this thread; if another thread is in the middle of importing
    it, after that import. An import that fails leaves the callback waiting for the next attempt. A namespace package
    executes nothing and is not reported.

    Args:
        name: Full module name, as in ``sys.modules``.
        callback: An exception that it raises is kept for :func:`failures` and never reaches the import.
            KeyboardInterrupt and SystemExit do: they belong to the program.

    Returns:
        What takes the registration back.
    """
    removal = Removal(name, callback)
    with _lock:
        _waiting.setdefault(name, []).append(removal)
        _settle_finder()
    # Looked up only after registering: an import that ends in between is seen here or by the finder, or by both, and
    # `_fire` takes each registration out before it calls it.
    module = sys.modules.get(name)
    if module is not None:
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            _wait_for_import(name)
        if name in sys.modules:
            _fire(name, sys.modules[name])
    return removal


def failures() -> tuple[NotMeasured, ...]:
    """The callbacks that raised and the modules that could not be watched, oldest first."""
    from phaseprof.errors import NotMeasured

    with _lock:
        return tuple(NotMeasured(f"what happens in {name}", why) for name, why in _failed)


class _Finder:
    """Finds nothing itself: wraps the loader of what the other finders find."""

    def __init__(self) -> None:
        self._resolving: set[tuple[int, str]] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        # Another tool's finder of this kind asks all finders again, us among them.
        key = (get_ident(), fullname)
        if key in self._resolving:
            return None
        self._resolving.add(key)
        try:
            spec = self._find_elsewhere(fullname, path, target)
        finally:
            self._resolving.discard(key)
        if spec is None or spec.loader is None:
            return spec
        if not hasattr(spec.loader, "exec_module"):
            _record(fullname, f"its loader {type(spec.loader).__name__} has no exec_module")
            return spec
        spec.loader = _ReportingLoader(spec.loader)  # type: ignore[assignment]  # a proxy, not a subclass
        return spec

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            if find is not None:
                spec: ModuleSpec | None = find(fullname, path, target)
                if spec is not None:
                    return spec
        return None


class _ReportingLoader:
    """Stands for the real loader until the module runs; everything but the run is the real loader's own."""

    def __init__(self, loader: Any) -> None:
        self._phaseprof_loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._phaseprof_loader, name)

    # Code that asks for the loader's type (isinstance) gets the real one's.
    @property  # type: ignore[misc]  # read-only on purpose
    def __class__(self) -> type:
        return type(self._phaseprof_loader)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._phaseprof_loader, "create_module", None)
        module: ModuleType | None = None if create is None else create(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        loader = self._phaseprof_loader
        spec = module.__spec__
        name = module.__name__ if spec is None else spec.name
        if spec is not None and getattr(spec, "loader", None) is self:
            spec.loader = loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = loader
        loader.exec_module(module)
        # A module may have put something else in its place while it ran: that is what the program gets.
        _fire(name, sys.modules.get(name, module))


_finder = _Finder()


def _fire(name: str, module: ModuleType) -> None:
    with _lock:
        removals = _waiting.pop(name, [])
        _settle_finder()
    for removal in removals:
        try:
            removal.callback(module)
        except Exception as error:
            _record(name, f"{type(error).__name__}: {error}")


def _wait_for_import(name: str) -> None:
    # The import lock of the module makes this wait for the other thread. In the thread that is itself inside the
    # import it returns at once, with the half-made module: nothing later would tell us of its end.
    from importlib import import_module

    try:
        import_module(name)
    except Exception as error:
        _record(name, f"its import failed: {type(error).__name__}: {error}")


def _record(name: str, why: str) -> None:
    with _lock:
        _failed.append((name, why))


def _settle_finder() -> None:
    """Put the finder first on ``sys.meta_path`` while something waits, and off it otherwise. Needs the lock."""
    present = any(finder is _finder for finder in sys.meta_path)
    if _waiting and not present:
        sys.meta_path.insert(0, _finder)
    elif not _waiting and present:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _finder]


def _after_fork_in_child() -> None:
    # Another thread may have held the lock at the moment of the fork; it does not exist here.
    global _lock
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
