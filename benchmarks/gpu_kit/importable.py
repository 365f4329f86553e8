"""Make `phaseprof` importable from a checkout that is not installed, with wheels from a folder where packages miss.

Nothing is fetched and nothing is installed: links and unpacked wheels go into a temporary folder, which child processes
find by `PYTHONPATH`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
#: Where wheels lie unless another folder is named.
WHEELS = CHECKOUT / "benchmarks" / "wheels"
#: What the import package consists of; `profiler` is the package itself.
_FOLDERS = ("collectors", "analyzers", "cli")
#: Modules by which a package counts as installed.
_MODULES = {
    "pyarrow": "pyarrow",
    "rich": "rich",
    "typer": "typer",
    "nvidia_ml_py": "pynvml",
    "cupti_python": "cupti",
    "nvidia_cuda_cupti": "nvidia.cuda_cupti",
    "cuda_bindings": "cuda.bindings",
    "cuda_pathfinder": "cuda.pathfinder",
    "pyelftools": "elftools",
}


def is_there(module: str) -> bool:
    """Whether a module can be imported; its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def make_importable(scratch: Path, wheels: Path) -> list[str]:
    """Let this process and its children import phaseprof.

    Args:
        scratch: An empty folder of our own.
        wheels: Wheels to take missing packages from; it need not exist.

    Returns:
        What was done, a line each.
    """
    done = []
    added = []
    for wheel in _needed(wheels):
        target = scratch / "wheels" / wheel.name.removesuffix(".whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        added.append(target)
        done.append(f"unpacked {wheel.name}")
    if not is_there("phaseprof"):
        added.append(link(scratch / "links"))
        done.append(f"linked the checkout {CHECKOUT.name}")
    sys.path[:0] = [str(path) for path in added]
    _put_first("PYTHONPATH", added)
    # Packages look for NVIDIA's libraries where packages are installed, and then where the loader looks.
    _put_first(
        "LD_LIBRARY_PATH", sorted({p.parent for a in added for p in a.glob("nvidia/**/*.so*")})
    )
    importlib.invalidate_caches()
    return done


def _put_first(variable: str, paths: Sequence[Path]) -> None:
    inherited = [part for part in os.environ.get(variable, "").split(os.pathsep) if part]
    if paths:
        os.environ[variable] = os.pathsep.join([*map(str, paths), *inherited])


def link(folder: Path) -> Path:
    """Make the import package out of links to the source folders; what to put on the path."""
    package = folder / "phaseprof"
    package.mkdir(parents=True)
    for path in (CHECKOUT / "profiler").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for name in _FOLDERS:
        (package / name).symlink_to(CHECKOUT / name)
    return folder


def _needed(wheels: Path) -> Iterable[Path]:
    if not wheels.is_dir():
        return ()
    found = sorted(wheels.glob("*.whl"))
    return [w for w in found if not is_there(_module(w.name))]


def _module(wheel: str) -> str:
    package = wheel.partition("-")[0].lower()
    return _MODULES.get(package, package)
