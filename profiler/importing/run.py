"""`phaseprof import`: from recordings of one run to a trace, a rank at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import phaseprof
from phaseprof.collectors.files.nsys_database import refuse_report
from phaseprof.collectors.files.source import STANDARD_INPUT, NoRecordingError
from phaseprof.errors import NotMeasured, UsageError
from phaseprof.importing.described import devices_of
from phaseprof.importing.joining import Joined
from phaseprof.importing.lacking import lacking_work
from phaseprof.importing.model import work_of
from phaseprof.importing.ranks import align, made_together
from phaseprof.importing.reading import (
    NothingDoneError,
    Options,
    Progress,
    RankRead,
    Reader,
    short_name,
)
from phaseprof.importing.rows import MODEL_ID, pass_rows
from phaseprof.schema import SCHEMA_VERSION
from phaseprof.trace.meta import ModelMeta, ProcessMeta

__all__ = ["Imported", "Options", "RankFound", "find_files", "import_files"]

#: What profilers name their recordings.
_RECORDING = re.compile(r"\.(?:json|sqlite)(?:\.gz)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankFound:
    """What one file gave.

    Attributes:
        file: Its name. rank: The rank that it is of.
        source: What wrote it: ``kineto`` or ``nsys``.
        passes: How many steps of each phase.
        sources: How many steps were found in each way.
        joined: What its kernels were joined to.
        incomplete: Steps of which kernels are missing.
        not_measured: What it lacks, damage included.
        damage: What is wrong with it, as clauses.
    """

    file: str
    rank: int
    source: str
    passes: Mapping[str, int]
    sources: Mapping[str, int]
    joined: Joined
    incomplete: int
    not_measured: tuple[NotMeasured, ...]
    damage: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import gave.

    Attributes:
        ranks: What each file gave, or each process of it.
        left_out: Files that are no part of the trace, by their names, and why.
    """

    ranks: tuple[RankFound, ...]
    left_out: Mapping[str, str]


def find_files(asked: Sequence[str]) -> list[str]:
    """The recordings that are meant: files as they are, of a folder those that are named like some.

    Raises:
        UsageError: If a folder has none, or there is no such file.
    """
    found: list[str] = []
    for name in asked:
        path = Path(name)
        if name == STANDARD_INPUT or not path.is_dir():
            found.append(name)
            continue
        if (path / "meta").is_dir():
            raise UsageError(f"{name} is a trace of phaseprof already.", f"phaseprof report {name}")
        inside = sorted(str(file) for file in path.iterdir() if _RECORDING.search(file.name))
        if not inside:
            for file in sorted(path.iterdir()):
                refuse_report(file)
            raise UsageError(
                f"The folder {name} has no recordings (*.json, *.json.gz, *.sqlite).",
                "Name the files, or their folder.",
            )
        found += inside
    if found.count(STANDARD_INPUT) > 1:
        raise UsageError("Standard input can be read once.", "Name each file.")
    return found


def import_files(
    files: Sequence[str], trace: Path, options: Options, progress: Progress = lambda text: None
) -> Imported:
    """Import recordings of one run into a folder that is there and empty.

    Args:
        files: As `find_files` gives them.
        trace: The folder.
        options: What the user says of them.
        progress: Told what goes on.

    Raises:
        TraceError: If no file is a recording, or one cannot be read, or the trace cannot be written.
    """
    read, left_out = _read_all(files, Reader(trace, options, progress, idle=len(files) == 1))
    if not read:
        # In none of them anything was done: what they hold is looked at all the same.
        read, left_out = _read_all(files, Reader(trace, options, progress))
    read[0].said.extend(NotMeasured(f"anything of {file}", why) for file, why in left_out.items())
    progress("writing")
    _number_steps(read)
    together = _together(read)
    _say_missing(read)
    # Ranks that were not given are no ranks that failed: it is said of what was given.
    world_size = len({each.rank for each in read})
    for each in read:
        _write(each, together, world_size if world_size > 1 else None, options)
    return Imported(tuple(map(_found, read)), left_out)


def _read_all(files: Sequence[str], reader: Reader) -> tuple[list[RankRead], dict[str, str]]:
    """The ranks of the files; files that are no recordings are left out where there are others."""
    read: list[RankRead] = []
    left_out: dict[str, str] = {}
    refused: list[NoRecordingError] = []
    for file in files:
        short = short_name(file)
        reader.progress(f"reading {short}")
        try:
            read += reader.read(file)
        except NoRecordingError as error:
            refused.append(error)
            left_out[short] = error.message.rstrip(".").removeprefix(f"{file} ")
    if refused and not read and not any(isinstance(each, NothingDoneError) for each in refused):
        raise refused[0]
    return read, left_out


def _number_steps(read: Sequence[RankRead]) -> None:
    """Number the steps of all files, so that those of several ranks with one number are the same step."""
    reference = max(read, key=lambda each: len(each.steps))
    windows: Counter[int] = Counter()
    for each in read:
        offset: int | None = 0
        if each.rank != reference.rank:
            offset = align(reference.steps, each.steps)
        if offset is None:
            each.said.append(
                NotMeasured(
                    f"which steps of rank {each.rank} are those of rank {reference.rank}",
                    "they do not follow one another in the same way; each rank is numbered by itself",
                )
            )
        each.first_step = (offset or 0) + windows[each.rank]
        windows[each.rank] += len(each.steps)
    lowest = min(each.first_step for each in read)
    for each in read:
        each.first_step -= lowest


def _say_missing(read: Sequence[RankRead]) -> None:
    """Say which ranks of the run were not given."""
    ranks = {each.rank for each in read}
    world = max(each.contents.world_size or 0 for each in read)
    if world > len(ranks):
        read[0].said.append(
            NotMeasured(
                f"{world - len(ranks):,} ranks of {world:,}",
                "their recordings were not given",
                "name the files of all ranks, or their folder",
            )
        )


def _together(read: Sequence[RankRead]) -> tuple[int, ...]:
    """The ranks that make every step together; empty if each works for itself."""
    ranks = sorted({each.rank for each in read})
    if len(ranks) != len(read) or not made_together([each.steps for each in read]):
        return ()
    return tuple(ranks)


def _write(
    each: RankRead, together: tuple[int, ...], world_size: int | None, options: Options
) -> None:
    """Write what is known once all ranks have been read: passes and the meta file."""
    given, contents, writer = options.model, each.contents, each.writer
    split = (contents.world_size or 1) > 1 or len(together) > 1
    each.said.extend(lacking_work(given, each.steps, split=split))
    usable = None if split else given
    for row in pass_rows(
        each.steps,
        each.joined.steps,
        pass_ids=each.pass_ids,
        first_step=each.first_step,
        dtype="" if given is None else given.dtype,
        work_of=lambda told: None if usable is None else work_of(usable, told),
    ):
        writer.put_pass(row)
    devices = devices_of(contents, on_cpu=each.joined.on_cpu)
    model = ModelMeta(
        model_id=MODEL_ID,
        name=each.file if given is None else given.name,
        class_name="" if given is None else given.class_name,
        engine=each.engine,
        device_key=devices[0].key,
        # Of a rank that holds a part of the model, the whole one's structure would say too much.
        cost=None if usable is None else usable.cost,
        attn_implementation=None,
        cache_class=None,
        tensor_ranks=together,
        devices=len(devices),
    )
    writer.write_meta(
        ProcessMeta(
            schema=SCHEMA_VERSION,
            phaseprof=phaseprof.__version__,
            rank=each.rank,
            pid=writer.pid,
            command=options.command,
            versions=contents.versions,
            started_ns=contents.start_ns,
            ended_ns=contents.end_ns,
            complete=True,
            devices=devices,
            models=(model,) if each.steps else (),
            not_measured=tuple(each.said),
            world_size=world_size,
            rank_source="the recording" if contents.rank is not None else "",
        )
    )
    writer.close()


def _found(each: RankRead) -> RankFound:
    return RankFound(
        file=each.file,
        rank=each.rank,
        source=each.contents.source,
        passes=Counter(step.work.phase.value for step in each.steps),
        sources=Counter(step.tag_source.value for step in each.steps),
        joined=each.joined,
        incomplete=each.incomplete,
        not_measured=tuple(each.said),
        damage=each.contents.damage,
    )
