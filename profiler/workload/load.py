"""Load a Hugging Face model, or build one with random weights from a config, and say in one line why it fails.

transformers and torch are imported inside the functions: `phaseprof --help` must not wait for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phaseprof.errors import MissingPackageError, ModelError, PhaseprofError, UsageError

if TYPE_CHECKING:
    import torch

#: Accepted spellings of a dtype, and torch's name for it.
DTYPES: Mapping[str, str] = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}

#: Attention implementations that transformers brings along; names with a slash are kernels from the hub.
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")

#: How long to wait for the hub before the local cache has to do.
HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model runs.

    Attributes:
        device: ``cpu`` or ``cuda:N``.
        dtype: A value of `DTYPES`.
        attn_implementation: As transformers names it; None for its default.
    """

    device: str
    dtype: str
    attn_implementation: str | None = None


def require(package: str, *, extra: str, purpose: str) -> None:
    """Check that an optional package is installed, without importing it.

    Raises:
        MissingPackageError: If it is not; the remedy is to install the extra.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which is not installed.",
            f'pip install "phaseprof[{extra}]"',
        )


def choose_placement(
    device: str | None = None,
    dtype: str | None = None,
    attn_implementation: str | None = None,
) -> Placement:
    """Fill in what the user left open: CUDA if there is a device, float32 on a CPU and bfloat16 on CUDA.

    Raises:
        UsageError: If a name is not known, or the device is not there.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"Unknown dtype {dtype!r}.", "Use float32, bfloat16 or float16.")
    if (
        attn_implementation is not None
        and attn_implementation not in ATTENTION
        and "/" not in attn_implementation
    ):
        raise UsageError(
            f"Unknown attention implementation {attn_implementation!r}.",
            f"Use one of {', '.join(ATTENTION)}, or the name of a kernel on the hub.",
        )
    where = _choose_device(device)
    default = "float32" if where == "cpu" else "bfloat16"
    return Placement(
        device=where,
        dtype=DTYPES[dtype] if dtype is not None else default,
        attn_implementation=attn_implementation,
    )


def _choose_device(name: str | None) -> str:
    kind, _, number = (name or "").partition(":")
    if name is not None and (
        kind not in ("cpu", "cuda")
        or (":" in name and not (number.isascii() and number.isdigit()))
        or (kind == "cpu" and number not in ("", "0"))
    ):
        raise UsageError(f"Unknown device {name!r}.", "Use cpu, cuda or cuda:N.")
    if kind == "cpu":
        return "cpu"

    import torch

    if not torch.cuda.is_available():
        if name is None:
            return "cpu"
        raise UsageError(
            f"Device {name!r} was asked for, but torch {torch.__version__} finds no CUDA device.",
            "Use --device cpu, or see what `phaseprof doctor` says about the GPU.",
        )
    index = int(number or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"Device {name!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices, from cuda:0.",
            "Name one of them.",
        )
    return f"cuda:{index}"


def load_model(source: str, placement: Placement, *, name: str = "") -> torch.nn.Module:
    """Load a model that can generate, with its weights, in evaluation mode.

    Args:
        source: A folder, or the name of a model on the hub.
        placement: Device, dtype and attention.
        name: What reports call it; by default a folder's name, or the name on the hub.

    Raises:
        MissingPackageError: If transformers (or a package that the model needs) is not installed.
        ModelError: If there is no such model, it cannot be reached or read, or it does not generate text.
    """
    require_transformers()
    path = Path(source).expanduser()
    if path.is_dir():
        content = read_config(path)
        if "auto_map" not in content:
            _known_kind(content, source)
        where, local, called = str(path), True, name or path.resolve().name
    else:
        _refuse_what_is_no_name(source, path)
        where, local, called = source, not _hub_has(source), name or source
    try:
        with quiet_transformers():
            import transformers

            config = transformers.AutoConfig.from_pretrained(
                where, local_files_only=local, trust_remote_code=False
            )
            model = _auto_class(config, source).from_pretrained(
                where,
                config=config,
                local_files_only=local,
                trust_remote_code=False,
                **_options(placement),
                **_device_map(placement),
            )
            return _settle(model, placement, called)
    except PhaseprofError:
        raise
    except Exception as error:
        remedy = "Look at the model's files." if local else "Look at the model on the hub."
        raise _translate(error, source, remedy=remedy) from error


def random_model(
    config: Mapping[str, object], placement: Placement, *, name: str, seed: int = 0
) -> torch.nn.Module:
    """Build a model with random weights; the same seed gives the same weights on the same device and dtype.

    Args:
        config: The content of a ``config.json``.
        placement: Device, dtype and attention.
        name: What reports call it.
        seed: Seed of the weights. The caller's random state is left as it was.

    Raises:
        MissingPackageError: If transformers is not installed.
        ModelError: If the config does not describe a model that generates text.
    """
    require_transformers()
    kind = _known_kind(config, name)
    # The weights are made in `placement.dtype`; packed ones cannot be drawn at random.
    fields = {k: v for k, v in config.items() if k != "quantization_config"}
    try:
        with quiet_transformers():
            import torch
            import transformers

            described = transformers.CONFIG_MAPPING[kind].from_dict(fields)
            auto = _auto_class(described, name)
            device = torch.device(placement.device)
            devices = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), device:
                torch.manual_seed(seed)
                model = auto.from_config(described, **_options(placement))
    except PhaseprofError:
        raise
    except Exception as error:
        raise _translate(error, name, remedy="Look at the config.") from error
    return _settle(model, placement, f"{name} (random weights)")


def read_config(path: Path) -> dict[str, object]:
    """Read a ``config.json``, named itself or by its folder.

    Raises:
        ModelError: If there is none, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = f"The folder {path} has no config.json." if path.is_dir() else f"No file {path}."
        raise ModelError(what, "Name a config.json, or a folder saved with save_pretrained().")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {one_line(error)}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object.", "Use the config.json of a model.")
    return content


def config_name(path: Path) -> str:
    """What to call the model of a config: the folder's name for a ``config.json``, else the file's."""
    resolved = path.resolve()
    if resolved.is_dir():
        return resolved.name
    return resolved.parent.name if resolved.name == "config.json" else resolved.stem


def require_transformers() -> None:
    """Check that transformers is there and new enough.

    Raises:
        MissingPackageError: If not.
    """
    require("transformers", extra="hf", purpose="Running a Hugging Face model")
    try:
        import transformers
    except Exception as error:
        raise MissingPackageError(
            f"transformers is installed but cannot be imported: {one_line(error)}.",
            'pip install --upgrade "phaseprof[hf]"',
        ) from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise MissingPackageError(
            f"transformers {transformers.__version__} is too old: phaseprof needs 5.0 or newer.",
            'pip install --upgrade "phaseprof[hf]"',
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep advice and progress bars of transformers off the terminal; what fails still raises."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
        hub.setLevel(level)


def one_line(error: BaseException) -> str:
    """The first sentence of an exception's message on one line, shortened, or its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    announces = lines[0].endswith(":") and len(lines) > 1
    said = " ".join(lines[: 2 if announces else 1]).rstrip(".:")
    return said if len(said) <= 200 else f"{said[:197]}..."


def _known_kind(config: Mapping[str, object], name: str) -> str:
    """The ``model_type`` of a config, if transformers has it."""
    import transformers

    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(
            f"The config of {name} has no model_type.",
            "Use the config.json of a transformers model.",
        )
    if kind not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"transformers {transformers.__version__} does not know the model type {kind!r} of {name}.",
            "A newer transformers may: pip install --upgrade transformers",
        )
    return kind


def _refuse_what_is_no_name(source: str, path: Path) -> None:
    if path.is_file():
        raise ModelError(
            f"{source} is a file, not a model folder.",
            "Name the folder that holds config.json; for a config alone use --model-config.",
        )
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelError(
            f"There is no folder {source}.",
            "Name a folder saved with save_pretrained(), or a model on the hub.",
        )


def _hub_has(name: str) -> bool:
    """Ask the hub once for the model's config. False if it cannot be reached: the local cache has to do.

    Without this, the hub's client retries for 23 s when there is no network.

    Raises:
        ModelError: If the hub says that there is no such model, or that it may not be read.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        url = huggingface_hub.hf_hub_url(name, "config.json")
        huggingface_hub.get_hf_file_metadata(url, token=_token(), timeout=HUB_TIMEOUT_S)
    except errors.HFValidationError as error:
        raise ModelError(
            f"{name!r} is neither a folder nor a name of a model on the hub.",
            "Names look like owner/model.",
        ) from error
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.EntryNotFoundError) as e:
        raise _translate(e, name) from e
    except Exception:
        return False
    return True


def _token() -> str | None:
    from huggingface_hub import get_token

    token: str | None = get_token()
    return token


def _auto_class(config: Any, source: str) -> Any:
    """The auto class whose models generate text for this config."""
    import transformers

    for auto in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForImageTextToText,
    ):
        if type(config) in auto._model_mapping:
            return auto
    raise ModelError(
        f"{source} ({config.model_type}) is not a model that generates text.",
        "Profile it from a script of your own: phaseprof run -- python script.py",
    )


def _options(placement: Placement) -> dict[str, object]:
    import torch

    options: dict[str, object] = {"dtype": getattr(torch, placement.dtype)}
    if placement.attn_implementation is not None:
        options["attn_implementation"] = placement.attn_implementation
    return options


def _device_map(placement: Placement) -> dict[str, object]:
    """Load straight onto a GPU where accelerate allows it, past the host's memory."""
    if placement.device == "cpu" or importlib.util.find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": placement.device}}


def _settle(model: Any, placement: Placement, name: str) -> torch.nn.Module:
    # Both: a model copies the name from its config when it is made.
    model.config._name_or_path = name
    model.name_or_path = name
    module: torch.nn.Module = model
    if next(module.parameters()).device.type != placement.device.partition(":")[0]:
        module = module.to(placement.device)
    return module.eval()


def _translate(error: Exception, source: str, *, remedy: str = "") -> PhaseprofError:
    """One line for what transformers and the hub's client raise, with ``remedy`` where nothing better is known.

    Causes are told apart by class name along the chain: transformers wraps the hub's errors in OSError.
    """
    names = {type(link).__name__ for link in _chain(error)}
    if "GatedRepoError" in names:
        return ModelError(
            f"{source} is gated: its owner has to grant access.",
            "Ask for access on the model's page, then log in with `hf auth login`.",
        )
    if "RepositoryNotFoundError" in names:
        return ModelError(
            f"There is no model {source} on the hub, or it is private.",
            "Check the name; for a private model log in with `hf auth login`.",
        )
    if "EntryNotFoundError" in names or "RemoteEntryNotFoundError" in names:
        return ModelError(
            f"{source} lacks a file that transformers needs (config.json or weights).",
            "Name a model in transformers format.",
        )
    if names & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}:
        from huggingface_hub import constants

        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return ModelError(
            f"{source} is not in the local cache, and {why}.",
            "Name a local folder, or run without MODEL: the embedded model needs no hub.",
        )
    if "OutOfMemoryError" in names or "DefaultCPUAllocator" in str(error):
        return ModelError(
            f"{source} does not fit into the memory of the device.",
            "Use a smaller model, another --device or --dtype bfloat16.",
        )
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{source} brings code of its own, which phaseprof does not run.",
            "Load it in a script of your own: phaseprof run -- python script.py",
        )
    if isinstance(error, ImportError):
        return MissingPackageError(f"{source} cannot be loaded: {one_line(error)}.")
    said = one_line(error)
    if not isinstance(error, (OSError, ValueError)):
        said = f"{type(error).__name__}: {said}"
    return ModelError(f"{source} cannot be loaded: {said}.", remedy)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
