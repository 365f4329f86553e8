"""The import hook: when it calls back, and that an imported module looks as if it had not been there."""

import importlib
import importlib.resources
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from phaseprof.hooks.imports import failures, when_imported


@pytest.fixture
def modules(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder on sys.path; afterwards its modules are forgotten, and no finder of ours may be left."""
    finders = list(sys.meta_path)
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]
    assert sys.meta_path == finders


def test_calls_back_once_after_the_module_has_run(modules: Path) -> None:
    (modules / "hooked_a.py").write_text("value = 1\nvalue += 1\n")
    seen: list[object] = []
    when_imported("hooked_a", lambda module: seen.append(module.value))

    assert seen == []
    import hooked_a  # type: ignore[import-not-found]

    assert seen == [2]
    importlib.reload(hooked_a)
    assert seen == [2]


def test_calls_back_at_once_for_a_module_that_is_there() -> None:
    seen: list[ModuleType] = []
    when_imported("os", seen.append)
    assert seen == [os]


def test_what_is_removed_is_not_called_and_the_rest_is(modules: Path) -> None:
    (modules / "hooked_b.py").touch()
    seen: list[str] = []
    first = when_imported("hooked_b", lambda module: seen.append("first"))
    when_imported("hooked_b", lambda module: seen.append("second"))
    first.remove()
    first.remove()

    importlib.import_module("hooked_b")
    assert seen == ["second"]


def test_the_finder_leaves_with_the_last_registration() -> None:
    before = list(sys.meta_path)
    first = when_imported("never_there_1", print)
    second = when_imported("never_there_2", print)
    assert len(sys.meta_path) == len(before) + 1
    first.remove()
    assert len(sys.meta_path) == len(before) + 1
    second.remove()
    assert sys.meta_path == before


def test_a_failing_callback_is_recorded_and_hurts_nobody(modules: Path) -> None:
    (modules / "hooked_c.py").write_text("value = 3\n")
    seen: list[str] = []

    def fail(module: ModuleType) -> None:
        raise RuntimeError("out of luck")

    when_imported("hooked_c", fail)
    when_imported("hooked_c", lambda module: seen.append("still called"))
    module = importlib.import_module("hooked_c")

    assert module.value == 3
    assert seen == ["still called"]
    assert failures()[-1].what == "what happens in hooked_c"
    assert failures()[-1].why == "RuntimeError: out of luck"


def test_a_failed_import_raises_its_own_error_and_the_next_one_calls_back(modules: Path) -> None:
    file = modules / "hooked_d.py"
    file.write_text("1/0\n")
    seen: list[ModuleType] = []
    when_imported("hooked_d", seen.append)

    with pytest.raises(ZeroDivisionError):
        importlib.import_module("hooked_d")
    assert seen == []
    assert "hooked_d" not in sys.modules

    file.write_text("value = 'longer than before'\n")
    assert seen == [] and importlib.import_module("hooked_d") is seen[0]


def test_a_missing_module_stays_missing() -> None:
    removal = when_imported("never_there_3", print)
    with pytest.raises(ModuleNotFoundError, match="never_there_3"):
        importlib.import_module("never_there_3")
    removal.remove()


def test_the_module_sees_its_real_loader_while_it_runs_and_after(modules: Path) -> None:
    package = modules / "hooked_e"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from hooked_e import part\nloader_while_running = __loader__\nin_spec = __spec__.loader\n"
        "def shown():\n    return 'source'\n"
    )
    (package / "part.py").write_text("name = __name__\n")
    (package / "data.txt").write_text("data of the package")
    seen: list[ModuleType] = []
    when_imported("hooked_e", seen.append)
    module = importlib.import_module("hooked_e")

    assert seen == [module]
    for loader in (module.__loader__, module.loader_while_running, module.in_spec):
        assert type(loader) is SourceFileLoader
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
    assert "return 'source'" in inspect.getsource(module.shown)
    assert (
        importlib.resources.files(module).joinpath("data.txt").read_text() == "data of the package"
    )


def test_looking_without_importing_meets_a_loader_that_acts_as_the_real_one(modules: Path) -> None:
    (modules / "hooked_f.py").write_text("value = 6\n")
    removal = when_imported("hooked_f", print)
    spec = importlib.util.find_spec("hooked_f")
    removal.remove()

    assert spec is not None and isinstance(spec.loader, SourceFileLoader)
    assert spec.loader.get_source("hooked_f") == "value = 6\n"
    assert spec.loader.get_filename("hooked_f") == str(modules / "hooked_f.py")
    assert "hooked_f" not in sys.modules


def test_a_module_that_replaces_itself_is_passed_as_what_the_program_gets(modules: Path) -> None:
    (modules / "hooked_g.py").write_text(
        "import sys, types\nlazy = types.ModuleType(__name__)\nlazy.kind = 'lazy'\n"
        "lazy.__spec__ = __spec__\nsys.modules[__name__] = lazy\n"
    )
    seen: list[object] = []
    when_imported("hooked_g", lambda module: seen.append(module.kind))
    importlib.import_module("hooked_g")
    assert seen == ["lazy"]


@pytest.mark.parametrize("name", ["_lsprof", "__phello__"], ids=["compiled", "frozen"])
def test_modules_that_are_no_python_files(name: str) -> None:
    code = f"""
from phaseprof.hooks.imports import when_imported
import sys
assert {name!r} not in sys.modules
when_imported({name!r}, lambda module: print(module.__name__))
import {name}
print({name}.__spec__.loader is {name}.__loader__)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{name}\nTrue\n"


class _AnotherTool:
    """A finder of the same kind as ours, as other tools have: asks everybody again, itself kept out."""

    def __init__(self) -> None:
        self.asking = False
        self.found: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is not None:
            self.found.append(name)
        return spec


@pytest.mark.parametrize("ours_first", [True, False])
def test_lives_with_another_finder_of_its_kind(modules: Path, ours_first: bool) -> None:
    (modules / "hooked_h.py").touch()
    other = _AnotherTool()
    seen: list[ModuleType] = []
    if not ours_first:
        when_imported("hooked_h", seen.append)
    sys.meta_path.insert(0, other)
    try:
        if ours_first:
            when_imported("hooked_h", seen.append)
        module = importlib.import_module("hooked_h")
    finally:
        sys.meta_path.remove(other)
    assert seen == [module]
    assert other.found == ["hooked_h"]


def test_a_registration_during_another_threads_import_waits_for_its_end(modules: Path) -> None:
    (modules / "hooked_i.py").write_text(
        "import hooked_i_gate as gate\ngate.inside.set()\ngate.go_on.wait(10)\nvalue = 9\n"
    )
    (modules / "hooked_i_gate.py").write_text(
        "import threading\ninside = threading.Event()\ngo_on = threading.Event()\n"
    )
    gate = importlib.import_module("hooked_i_gate")
    importing = threading.Thread(target=importlib.import_module, args=("hooked_i",))
    importing.start()
    assert gate.inside.wait(10)

    seen: list[object] = []
    registering = threading.Thread(
        target=when_imported,
        args=("hooked_i", lambda module: seen.append(getattr(module, "value", "half-made"))),
    )
    registering.start()
    gate.go_on.set()
    importing.join(10)
    registering.join(10)
    assert seen == [9]


def test_each_of_many_threads_is_called_back_once(modules: Path) -> None:
    (modules / "hooked_j.py").touch()
    start = threading.Barrier(9)
    calls: list[int] = []

    def register(number: int) -> None:
        start.wait()
        when_imported("hooked_j", lambda module: calls.append(number))

    def do_import() -> None:
        start.wait()
        importlib.import_module("hooked_j")

    threads = [threading.Thread(target=register, args=(n,)) for n in range(8)]
    threads.append(threading.Thread(target=do_import))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    # A registration that came in the moment between "not yet loaded" and "being executed" waits for a next import.
    importlib.reload(importlib.import_module("hooked_j"))
    assert sorted(calls) == list(range(8))


def test_a_fork_while_another_thread_registers_does_not_hang_the_child() -> None:
    code = """
import os, sys, threading
from phaseprof.hooks import imports
held, done = threading.Event(), threading.Event()
def hold():
    with imports._lock:
        held.set(); done.wait(20)
threading.Thread(target=hold).start()
held.wait(20)
pid = os.fork()
if pid == 0:
    imports.when_imported("colorsys", lambda module: os._exit(17))
    import colorsys
    os._exit(1)
status = os.waitpid(pid, 0)[1]
done.set()
print(os.waitstatus_to_exitcode(status))
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout == "17\n"
