"""The package as it is installed: what it holds, what it exports, what importing it costs."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import phaseprof

ROOT = Path(__file__).parents[2]
SOURCES = {
    "profiler": "phaseprof",
    "collectors": "phaseprof.collectors",
    "analyzers": "phaseprof.analyzers",
    "cli": "phaseprof.cli",
}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def source_files() -> list[Path]:
    return [file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))]


def test_every_source_folder_is_a_listed_package(pyproject: dict[str, Any]) -> None:
    found = set()
    for folder, package in SOURCES.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            below = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *below)))
    listed = pyproject["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found)


def test_every_source_file_is_in_a_package() -> None:
    assert [file for file in source_files() if not (file.parent / "__init__.py").is_file()] == []


def test_the_folders_map_to_one_import_package(pyproject: dict[str, Any]) -> None:
    mapping = pyproject["tool"]["setuptools"]["package-dir"]
    assert mapping == {package: folder for folder, package in SOURCES.items()}


def test_types_are_shipped(pyproject: dict[str, Any]) -> None:
    assert (ROOT / "profiler" / "py.typed").is_file()
    assert "py.typed" in pyproject["tool"]["setuptools"]["package-data"]["phaseprof"]


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("phaseprof") == phaseprof.__version__


def test_every_exported_name_is_there() -> None:
    missing = [name for name in phaseprof.__all__ if not hasattr(phaseprof, name)]
    assert missing == []


def test_the_public_names() -> None:
    # Written out: adding or taking away a public name is a decision, not a side effect.
    assert set(phaseprof.__all__) >= {"profile", "phase", "__version__"}
    assert len(set(phaseprof.__all__)) == len(phaseprof.__all__)


@pytest.mark.parametrize("statement", ["import phaseprof", "import phaseprof.cli.main"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "phaseprof" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "pyarrow", "pandas", "numpy"})


def test_extras_name_what_the_code_imports(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    hf = " ".join(extras["hf"])
    demo = " ".join(extras["demo"])
    assert "transformers>=5" in hf and "accelerate" in hf
    assert "phaseprof[hf]" in demo and "gguf" in demo


def test_no_module_is_imported_under_its_folder_name() -> None:
    wrong = []
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = ["." * node.level + (node.module or "")]
            wrong += [
                f"{file.name}: {name}"
                for name in names
                if name.partition(".")[0] in SOURCES or name.startswith(".")
            ]
    assert wrong == []


def test_every_module_says_what_it_is() -> None:
    mute = [
        str(file.relative_to(ROOT))
        for file in source_files()
        if file.stat().st_size  # an empty __init__.py only marks a folder
        and not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert mute == []


@pytest.mark.parametrize("package", ["phaseprof", *sorted(set(SOURCES.values()) - {"phaseprof"})])
def test_packages_import_from_this_checkout(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT)
