"""`phaseprof predict CONFIG_OR_MODEL --device NAME`: what requests would take, from the structure of a model alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phaseprof.cli.options import AsJson
from phaseprof.errors import ModelError, UsageError

if TYPE_CHECKING:
    from phaseprof.analyzers.steps.prediction import Load, PredictionReport
    from phaseprof.analyzers.steps.step_model import Machine
    from phaseprof.cli.boards import Board
    from phaseprof.work.cost import ModelCost

#: Formats of weights narrower than 16 bits, and their bits.
_NARROW: Mapping[str, int] = {"fp8": 8, "int8": 8, "int4": 4}
#: Beginnings of the names of dtypes that matrices in them can be multiplied in; those of 4 bits are unpacked first.
_MULTIPLIED: Mapping[str, str] = {"fp8": "float8", "int8": "int8"}
#: Accepted names of dtypes of keys and values, and bytes of an element.
_KV: Mapping[str, float] = {
    "fp8": 1.0,
    "int8": 1.0,
    "bfloat16": 2.0,
    "bf16": 2.0,
    "float16": 2.0,
    "fp16": 2.0,
    "float32": 4.0,
    "fp32": 4.0,
}
#: Tokens of a step that serving engines compute at most, by default.
_PASS_TOKENS = 8192


def predict(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG_OR_MODEL",
            help="A config.json, its folder, or the name of a model in the local cache of the hub. No weights are "
            "needed, and nothing is downloaded.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="A known GPU (h100-sxm, a100-sxm-80gb, …; `list` shows all), or `this`: the device of this machine, "
            "as calibrated.",
            show_default=False,
        ),
    ] = "this",
    batch: Annotated[
        str, typer.Option(metavar="N[,N…]", help="Requests that arrive and decode together.")
    ] = "1",
    prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens that each request generates.")
    ] = 128,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: bfloat16, float16, float32, fp8, int8 or int4. Default: what the config says.",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the KV cache: bfloat16, float16, float32, fp8 or int8. Default: that of the activations.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", help="GPUs that share each layer (tensor parallel).")
    ] = 1,
    graphs: Annotated[
        bool,
        typer.Option(
            help="CUDA graphs and fused kernels, as serving engines have them; or kernels launched one by one, as "
            "transformers does."
        ),
    ] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the arithmetic of each operation.")
    ] = False,
    as_json: AsJson = False,
    width: Annotated[
        int | None,
        typer.Option(
            metavar="COLUMNS",
            min=60,
            help="Columns of the text. Default: the terminal's, at most 160; 100 in a file or a pipe.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Predict TTFT, TPOT, throughput and memory of a model on a device, from its config alone.

    Every figure is modelled and has a 90 % interval. Requests that arrive while others run, the scheduler of an engine
    and the network are no part of it.
    """
    from phaseprof.analyzers.steps.prediction import Load
    from phaseprof.cli.boards import known_boards
    from phaseprof.cli.render import prediction as render
    from phaseprof.cli.render.stream import takes_unicode, width_of
    from phaseprof.workload.plan import parse_sizes

    if device.strip().lower() == "list":
        print(render.boards([(board.name, board.title) for board in known_boards()]))
        return
    if model is None:
        raise UsageError("no model is named.", "Name a config.json, its folder, or a cached model.")
    batches = parse_sizes(batch, "--batch")
    for name, value in (("--prompt-tokens", prompt_tokens), ("--new-tokens", new_tokens)):
        _at_least_one(name, value)
    for size in batches:
        _at_least_one("--batch", size)
    _at_least_one("--tp", tp)
    pass_tokens = _PASS_TOKENS if graphs else None
    loads = [Load(size, prompt_tokens, new_tokens, pass_tokens) for size in batches]
    asked = _Asked(device, dtype, kv_dtype, tp, graphs)
    report = _predicted(*_find_config(model), loads, asked)
    if as_json:
        from phaseprof.cli.render.prediction_json import to_json

        print(to_json(report))
        return
    text = render.render(
        report,
        width=width or width_of(sys.stdout),
        explain=explain,
        unicode=takes_unicode(sys.stdout),
    )
    print(text)


def _at_least_one(option: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{option} {value} is less than 1.")


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options, as given."""

    device: str
    dtype: str | None
    kv_dtype: str | None
    ranks: int
    graphs: bool


@dataclass(frozen=True, slots=True)
class _Formats:
    """What weights are stored in, what is multiplied in, and what keys and values are stored in."""

    weights: str
    activations: str
    kv: str
    kv_bytes: float | None


def _find_config(model: str) -> tuple[Path, str]:
    """The config of a path, or of a model in the local cache of the hub; and what the model is called.

    Raises:
        ModelError: If there is neither.
    """
    from phaseprof.workload.load import config_name

    path = Path(model).expanduser()
    if path.exists():
        return path, config_name(path)
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".json"):
        raise ModelError(
            f"There is no file or folder {model}.", "Name a config.json or its folder."
        )
    cached = _cached(model)
    if cached is None:
        raise ModelError(
            f"{model} is no file, and not in the local cache of the hub.",
            f"Name a config.json, or get it first: hf download {model} config.json",
        )
    return cached, model


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _predicted(path: Path, name: str, loads: list[Load], asked: _Asked) -> PredictionReport:
    from phaseprof.analyzers.steps.prediction import PredictionReport, predict
    from phaseprof.analyzers.steps.restructured import absorbed, fused, tensor_parallel
    from phaseprof.cli.render.progress import TerminalProgress
    from phaseprof.work.from_config import told_dtype
    from phaseprof.workload.load import read_config

    content = read_config(path)
    formats = _formats(content, name, asked, told_dtype(content))
    with TerminalProgress() as progress:
        progress("Loading torch and transformers")
        board = _board(asked.device, formats)
        if asked.ranks > 1 and board.device.kind != "cuda":
            raise UsageError("--tp needs GPUs.", "Name one with --device.")
        progress(f"Reading the structure of {name}")
        class_name, whole = _structure(content, name, formats.activations)
    # An engine that has graphs attends to latents as they are, and merges projections.
    engine = board.device.kind == "cuda" and asked.graphs
    cost = _formatted(absorbed(whole) if engine else whole, formats)
    machine = _machine(board, formats, asked)
    if engine:
        cost = fused(cost)
    cost = tensor_parallel(cost, asked.ranks)
    memory = board.device.memory_bytes
    return PredictionReport(
        model=name,
        class_name=class_name,
        parameters=whole.parameters,
        weights=formats.weights,
        kv=formats.kv,
        device=board.title,
        machine=machine,
        predictions=tuple(predict(cost, load, machine, memory) for load in loads),
        notes=_notes(content, loads, board),
    )


def _formats(content: Mapping[str, object], name: str, asked: _Asked, told: str) -> _Formats:
    from phaseprof.workload.load import DTYPES

    stored = content.get("quantization_config")
    dtype = asked.dtype
    if dtype is None and isinstance(stored, dict):
        dtype = _stored_format(stored)
        if dtype is None:
            raise ModelError(
                f"The weights of {name} are quantized in a way that its config does not tell the bytes of.",
                "Name the nearest format with --dtype: fp8, int8 or int4.",
            )
    if dtype is not None and dtype not in DTYPES and dtype not in _NARROW:
        raise UsageError(
            f"unknown dtype {dtype!r}.",
            "Use bfloat16, float16, float32, fp8, int8 or int4.",
        )
    if dtype in _NARROW:
        weights, activations = str(dtype), told if told in ("bfloat16", "float16") else "bfloat16"
    else:
        weights = activations = told if dtype is None else DTYPES[dtype]
    if asked.kv_dtype is None:
        return _Formats(weights, activations, activations, None)
    if asked.kv_dtype not in _KV:
        raise UsageError(
            f"unknown dtype of the KV cache {asked.kv_dtype!r}.",
            "Use bfloat16, float16, float32, fp8 or int8.",
        )
    kv = DTYPES.get(asked.kv_dtype, asked.kv_dtype)
    return _Formats(weights, activations, kv, _KV[asked.kv_dtype])


def _stored_format(stored: Mapping[str, object]) -> str | None:
    """The format that a checkpoint is quantized in, where its config tells the bits of a weight."""
    if stored.get("quant_method") == "fp8":
        return "fp8"
    bits = stored.get("bits")
    return {4: "int4", 8: "int8"}.get(bits) if isinstance(bits, int) else None


def _board(name: str, formats: _Formats) -> Board:
    """The device, with ceilings for the dtype of the activations.

    Raises:
        UsageError: If it is not known, or its ceilings for that dtype are not.
    """
    from phaseprof.cli.boards import THIS, find_board, this_board

    if name == THIS:
        return this_board((formats.activations,))
    board = find_board(name)
    if formats.activations not in board.roofs:
        raise UsageError(
            f"The peak of {board.title} for {formats.activations} is not known.",
            f"Use --dtype {' or '.join(sorted(n for n in board.roofs if 'float16' in n))}.",
        )
    return board


def _structure(content: Mapping[str, object], name: str, dtype: str) -> tuple[str, ModelCost]:
    """The class of the model and its structure; torch builds it without data.

    Raises:
        MissingPackageError: If transformers is not installed.
        ModelError: If the config describes no model that generates text, or its work is not covered.
    """
    from phaseprof.work.walk import model_cost
    from phaseprof.workload.load import Placement, random_model

    built = random_model(content, Placement("meta", dtype), name=name)
    cost = model_cost(built)
    if not cost.covered:
        raise ModelError(
            f"The work of {name} has no closed form here: {'; '.join(cost.not_covered)}.",
            "docs/work-model.md says which models are covered.",
        )
    if cost.cross or cost.encoder is not None:
        raise ModelError(
            f"{name} has an encoder beside its decoder, which is not predicted.",
            "Measure it: phaseprof profile or phaseprof run.",
        )
    return type(built).__name__, cost


def _formatted(cost: ModelCost, formats: _Formats) -> ModelCost:
    from phaseprof.analyzers.steps.restructured import with_kv_bytes, with_weight_bits

    if formats.weights in _NARROW:
        bits = _NARROW[formats.weights]
        cost = with_weight_bits(cost, bits, grouped=bits < 8)
    return cost if formats.kv_bytes is None else with_kv_bytes(cost, formats.kv_bytes)


def _machine(board: Board, formats: _Formats, asked: _Asked) -> Machine:
    from phaseprof.analyzers.efficiency import efficiency_for
    from phaseprof.analyzers.steps.collectives import LINKS
    from phaseprof.analyzers.steps.step_model import CPU, EAGER, GRAPHS, Machine

    wide = board.roofs[formats.activations]
    products = formats.activations
    begin = _MULTIPLIED.get(formats.weights)
    if begin is not None:
        # Without a unit for it the weights are widened first, and multiplied in 16 bits.
        products = next((name for name in board.roofs if name.startswith(begin)), products)
    link = LINKS.get(board.title)
    if asked.ranks > 1 and link is None:
        raise UsageError(
            f"What connects several {board.title} is not known.", "Use a known GPU with --device."
        )
    runtime = CPU if board.device.kind == "cpu" else GRAPHS if asked.graphs else EAGER
    return Machine(
        efficiency=efficiency_for(wide, board.device, more=tuple(board.roofs.values())),
        ceilings=board.roofs[products],
        runtime=runtime,
        products=products,
        activations=formats.activations,
        other_ceilings=wide,
        ranks=asked.ranks,
        link=link if asked.ranks > 1 else None,
    )


def _notes(content: Mapping[str, object], loads: list[Load], board: Board) -> tuple[str, ...]:
    notes = []
    text = content.get("text_config")
    limit = content.get("max_position_embeddings")
    if not isinstance(limit, int) and isinstance(text, dict):
        limit = text.get("max_position_embeddings")
    needed = max(load.prompt_tokens + load.new_tokens - 1 for load in loads)
    if isinstance(limit, int) and 0 < limit < needed:
        notes.append(f"A request needs {needed:,} positions; the model was made for {limit:,}.")
    if board.device.kind == "cpu":
        notes.append(
            "The memory of this machine is shared with all that runs on it: whether a batch fits is said for all of it."
        )
    return tuple(notes)
