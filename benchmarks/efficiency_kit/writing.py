"""Writing the fitted parameters as a module: constructor calls, as a person would write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from phaseprof.analyzers.efficiency.parameters import FittedGpu, Spread

_HEAD = '''"""Parameters fitted to measured operations. Generated; this writes it:

    {command}

The measurements are those of ai-dynamo/aiconfigurator (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator):
{sources}
Half of each table was fitted; spreads are of the other half. docs/efficiency.md tells what the parameters mean, and
benchmarks/results/efficiency_fit.json has the errors by size, which a test compares with the ones here.
"""

from __future__ import annotations

from collections.abc import Mapping

from phaseprof.analyzers.efficiency.parameters import (
    AttentionFit,
    FittedAttention,
    FittedGemm,
    FittedGpu,
    GemmFit,
    Hardware,
    Spread,
    Tile,
)

'''


def write(
    path: Path, gpus: Mapping[str, FittedGpu], scaled: Mapping[str, Spread], command: str
) -> None:
    """Write the module.

    Args:
        path: Where.
        gpus: By the name of the constant.
        scaled: What scaling from one GPU to another adds.
        command: What made them.
    """
    sources = "\n".join(f"{gpu.board}: {gpu.source}." for gpu in gpus.values())
    text = [_HEAD.format(command=command, sources=sources)]
    for name, gpu in gpus.items():
        text.append(f"{name} = {_code(gpu)}\n\n")
    text.append(
        "#: Measured over modelled time of products on one of the GPUs by the parameters of the other.\n"
        f"SCALED: Mapping[str, Spread] = {_code(scaled)}\n"
    )
    path.write_text("".join(text), encoding="utf-8")


def _code(value: Any) -> str:
    if is_dataclass(value):
        given = [(field.name, getattr(value, field.name)) for field in fields(value)]
        inner = ", ".join(f"{name}={_code(part)}" for name, part in given)
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_code(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_code(part)}, " for part in value) + ")"
    if isinstance(value, float) and value >= 1e6:
        return f"{value:.6g}".replace("e+", "e")
    return repr(value)
