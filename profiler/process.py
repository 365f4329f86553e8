"""This process among those of its job: its rank, and the host that it runs on. Nothing is imported or asked of others.

A launcher says the rank in the environment. A worker that is spawned without one (torch.multiprocessing) says it when
it joins the process group, which may be after recording has begun: so the place is asked for again while a run lasts,
and `torch.distributed` is believed before the environment.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from phaseprof.trace.meta import Host


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables in which a launcher tells a process its place; empty for one that it does not set."""

    rank: str
    world_size: str
    local_rank: str


#: In the order in which they are believed: torchrun (and what wraps it), Open MPI, MPICH and Intel MPI, Slurm.
#: Slurm sets SLURM_PROCID for a batch script as well, which may start a launcher of its own: it comes last.
LAUNCHERS = (
    Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    Launcher("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
)

_GROUP = "torch.distributed"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in its job.

    Attributes:
        rank: Its rank; 0 if nothing says one.
        world_size: Processes of the job; None if not known.
        local_rank: Its rank among those of its host; None if not known.
        source: The variable or the library that said the rank; empty if none did.
        restart: How often torchrun had restarted the workers before it; None if torchrun did not start it.
    """

    rank: int = 0
    world_size: int | None = None
    local_rank: int | None = None
    source: str = ""
    restart: int | None = None


class ProcessPlace:
    """The place of this process, as well as it is known by now.

    Args:
        environment: Where launchers speak.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._place = place_of(os.environ if environment is None else environment)
        self._launched = self._place.rank > 0

    def now(self) -> Place:
        """The place. What a process group has said once stands, also after the group is destroyed."""
        if self._place.source != _GROUP:
            self._place = _in_group(self._place)
        if _said is not None and not self._launched and _said != self._place.rank:
            # Also against a process group, which is that of one replica where there are several, and a batch script,
            # which is task 0 with all that it spawns.
            return replace(self._place, rank=_said, source="engine")
        return self._place


#: The rank that an engine has said for this process, which has none of its own.
_said: int | None = None


def say_rank(rank: int) -> None:
    """Say as which rank this process counts where no launcher has placed it behind others: a worker among those of all
    replicas of its engine, and an engine's core, that runs no model, beside its first worker."""
    global _said
    _said = rank


def place_of(environment: Mapping[str, str]) -> Place:
    """The place that the first launcher gives whose rank is a number."""
    restart = _number(environment.get("TORCHELASTIC_RESTART_COUNT"))
    for launcher in LAUNCHERS:
        rank = _number(environment.get(launcher.rank))
        if rank is not None:
            return Place(
                rank=rank,
                world_size=_number(environment.get(launcher.world_size)),
                local_rank=_number(environment.get(launcher.local_rank)),
                source=launcher.rank,
                restart=restart,
            )
    return Place(restart=restart)


def _in_group(known: Place) -> Place:
    """The place by the process group, if there is one. A group of one knows nothing of the other processes."""
    distributed = sys.modules.get(_GROUP)
    if distributed is None:
        return known
    try:
        if not (distributed.is_available() and distributed.is_initialized()):
            return known
        world_size, rank = int(distributed.get_world_size()), int(distributed.get_rank())
    except Exception:
        return known  # a module that is still being imported, a group that is just being destroyed
    if world_size < 2 or rank < 0:
        return known
    local_rank = known.local_rank if known.rank == rank else None
    return replace(known, rank=rank, world_size=world_size, local_rank=local_rank, source=_GROUP)


def job_of(environment: Mapping[str, str]) -> str:
    """What the processes of one job have in common and those of no other; empty if nothing says that there are others.

    Several `phaseprof run` commands of one job may write into one folder: one on each node, or one around each rank.
    `PHASEPROF_JOB` says it where the launcher does not.
    """
    get = environment.get
    if named := get("PHASEPROF_JOB"):
        return f"named {named}"
    if (step := get("SLURM_STEP_ID")) and (_number(get("SLURM_STEP_NUM_TASKS")) or 0) > 1:
        return f"slurm {get('SLURM_JOB_ID')}.{step}"
    if (_number(get("OMPI_COMM_WORLD_SIZE")) or 0) > 1:
        return f"openmpi {get('PMIX_NAMESPACE') or get('OMPI_MCA_ess_base_jobid') or ''}"
    if (run := get("TORCHELASTIC_RUN_ID")) and (_number(get("WORLD_SIZE")) or 0) > 1:
        return f"torchrun {run} {get('MASTER_ADDR')} {get('MASTER_PORT')}"
    return ""


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


@cache
def this_host() -> Host:
    """The host of this process, and the clock that it shares with others."""
    name = platform.node()
    boot = _read("/proc/sys/kernel/random/boot_id")
    # Two containers of one machine have the same clock (unless in time namespaces of their own), and process ids that
    # begin at 1 in both.
    clock = _digest(boot or name, _namespace("time"))
    return Host(name=name, clock=clock, token=_digest(name, boot, _namespace("pid")))


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def first_pass_id(rank: int, pid: int, host: str) -> int:
    """Where a process begins to count its passes, so that ids are unique over the processes of a trace.

    9 bits of rank and 22 bits of `process_code` above 32 bits of count: positive in an int64.
    """
    return (rank & 0x1FF) << 54 | process_code(pid, host) << 32


def process_code(pid: int, host: str) -> int:
    """A process in 22 bits. The host's token flips bits of its id: codes of one host stay apart, and those of the same
    process id on two hosts differ.
    """
    return (pid ^ int(host or "0", 16)) & 0x3FFFFF


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _digest(*facts: str) -> str:
    """Six hexadecimal digits for some facts, the same in every process."""
    return hashlib.blake2s("\n".join(facts).encode("utf-8", "replace"), digest_size=3).hexdigest()
