"""The collectors that there are, and how `--collect` names them. Imports nothing heavy: help texts come from here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phaseprof.errors import UsageError

#: As `phaseprof.evidence.COLLECT_VARIABLE`; importing that would make help slower.
COLLECT_VARIABLE = "PHASEPROF_COLLECT"
NONE = "none"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Known:
    """A collector that there is.

    Attributes:
        name: As `--collect` takes it.
        module, factory: Where it is made: a call of ``factory``, with what stands behind the name's ``=`` if it takes
            that, else without arguments.
        by_default: Whether it runs when nothing is asked for. It then stays silent where it has nothing to watch.
        collects: What it collects, for help texts: a few words.
        takes: What stands behind its name and ``=``, for help texts; empty if nothing does. It is a path.
    """

    name: str
    module: str
    factory: str
    by_default: bool
    collects: str
    takes: str = ""

    @property
    def form(self) -> str:
        """How it is written behind `--collect`."""
        return f"{self.name}={self.takes}" if self.takes else self.name


#: In the order in which they start.
KNOWN: tuple[Known, ...] = (
    Known(
        "host",
        "phaseprof.collectors.host",
        "host_collector",
        by_default=True,
        collects="CPU use and memory of the host",
    ),
    Known(
        "nvml",
        "phaseprof.collectors.nvml_samples",
        "nvml_collector",
        by_default=True,
        collects="clocks, power, energy and throttling of NVIDIA GPUs",
    ),
    Known(
        "gpm",
        "phaseprof.collectors.gpm",
        "gpm_collector",
        by_default=True,
        collects="SM, tensor-core and memory activity every 110 ms, on Hopper and newer",
    ),
    Known(
        "pm",
        "phaseprof.collectors.pm",
        "pm_collector",
        by_default=False,
        collects="SM, tensor-core and DRAM counters every 200 µs by CUPTI, with the extra cupti",
    ),
    Known(
        "replay",
        "phaseprof.collectors.replay",
        "replay_collector",
        by_default=False,
        collects="the samples of a recording, as if they were measured",
        takes="PATH",
    ),
    Known(
        "kernels",
        "phaseprof.collectors.torch_profiler",
        "kernels_collector",
        by_default=False,
        collects="kernels, or operators of a CPU, of some passes",
    ),
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A collector that is to run.

    Attributes:
        known: Which.
        asked: Whether it was asked for by name.
        argument: What stands behind its name and ``=``; empty if nothing does.
    """

    known: Known
    asked: bool
    argument: str = ""

    @property
    def text(self) -> str:
        """How it is written behind `--collect`."""
        return f"{self.known.name}={self.argument}" if self.argument else self.known.name


def names(known: Sequence[Known] | None = None) -> tuple[str, ...]:
    """How the collectors are written behind `--collect`."""
    return tuple(each.form for each in (KNOWN if known is None else known))


def choose(wanted: str | None, known: Sequence[Known] | None = None) -> tuple[Chosen, ...]:
    """The collectors that are asked for.

    Args:
        wanted: Names with commas between; ``default`` stands for the defaults, ``none`` for no collector. None or empty
            for the defaults.
        known: Those that there are; `KNOWN` by default.

    Raises:
        UsageError: If there is no collector of such a name, or what stands behind it is missing or too much.
    """
    known = KNOWN if known is None else known
    parts = [part.strip() for part in (wanted or DEFAULT).split(",") if part.strip()]
    if NONE in parts and len(parts) > 1:
        raise UsageError(
            f"{NONE!r} stands alone: there is no collector then.", f"Use {NONE}, or names."
        )
    asked: dict[str, str] = {}
    for part in parts:
        name, _, argument = part.partition("=")
        if name in (NONE, DEFAULT) and not argument:
            continue
        found = next((each for each in known if each.name == name), None)
        if found is None:
            raise UsageError(
                f"There is no collector {name!r}.",
                f"Use {', '.join((*names(known), DEFAULT))} or {NONE}, with commas between.",
            )
        asked[name] = _argument(found, argument)
    return tuple(
        Chosen(each, each.name in asked, asked.get(each.name, ""))
        for each in known
        if each.name in asked or (each.by_default and DEFAULT in parts)
    )


def _argument(known: Known, argument: str) -> str:
    if not known.takes:
        if argument:
            raise UsageError(f"The collector {known.name} takes nothing behind its name.")
        return ""
    if not argument:
        raise UsageError(f"The collector {known.name} needs a {known.takes}.", f"Use {known.form}.")
    path = Path(argument).expanduser().absolute()
    if not path.exists():
        raise UsageError(f"--collect {known.name}: there is no {path}.")
    return str(path)


def normalized(wanted: str | None) -> str | None:
    """What is asked for, checked, and so that it means the same in a process that runs in another folder.

    Raises:
        UsageError: As `choose`.
    """
    if not wanted:
        return None
    chosen = choose(wanted)
    parts = [DEFAULT] if DEFAULT in [part.strip() for part in wanted.split(",")] else []
    return ",".join([*parts, *(each.text for each in chosen if each.asked)]) or NONE


def asked_for(option: str | None) -> str | None:
    """What is asked for by an option, else by the environment, `normalized`; None if neither asks.

    Raises:
        UsageError: As `choose`.
    """
    return normalized(option if option is not None else os.environ.get(COLLECT_VARIABLE))


def help_text() -> str:
    """What `--collect` takes, for the help of a command."""
    lines = [
        f"{each.form} ({each.collects}{'; default' if each.by_default else ''})" for each in KNOWN
    ]
    return (
        f"What is recorded besides the passes: names with commas between, or {NONE}. "
        + ("There are " + ", ".join(lines) + ". " if lines else "")
        + f"{DEFAULT} stands for the defaults."
    )
