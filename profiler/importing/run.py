"""`phaseprof import`: from recordings of one run to a trace, a rank at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

import phaseprof
from phaseprof.collectors.files import kineto, nsys
from phaseprof.collectors.files.chrome import NoEventsError
from phaseprof.collectors.files.contents import Contents
from phaseprof.collectors.files.joinery import Joinery
from phaseprof.collectors.files.nsys_database import opened, refuse_report
from phaseprof.collectors.files.nsys_gpus import Gpus
from phaseprof.collectors.files.nsys_metrics import Sampled
from phaseprof.collectors.files.source import STANDARD_INPUT, Bytes, FileKind
from phaseprof.errors import NotMeasured, TraceError, UsageError
from phaseprof.importing.counters import write_samples
from phaseprof.importing.described import devices_of, engine_of, name_of
from phaseprof.importing.forms import Marker, Step
from phaseprof.importing.joining import (
    Joined,
    join_events,
    join_operators,
    under_recorded,
    with_launches,
)
from phaseprof.importing.lacking import damaged, lacking_of, lacking_work
from phaseprof.importing.model import work_of
from phaseprof.importing.ranks import align, assign_rank, made_together
from phaseprof.importing.rows import MODEL_ID, pass_rows
from phaseprof.importing.steps import choose, function_kind, wants_marker
from phaseprof.phases import Phase
from phaseprof.process import first_pass_id
from phaseprof.schema import SCHEMA_VERSION
from phaseprof.trace.meta import ModelMeta, ProcessMeta
from phaseprof.trace.writer import TraceWriter
from phaseprof.work.from_config import GivenModel

#: Told of what goes on.
Progress = Callable[[str], None]
#: What profilers name their recordings.
_RECORDING = re.compile(r"\.(?:json|sqlite)(?:\.gz)?$", re.IGNORECASE)
#: Rows of kernels that are held before they become a part.
_ROWS = 1 << 16
#: Steps that are looked at to see whose they are.
_FIRST = 64
#: Process ids of Linux are smaller.
_PIDS = 1 << 22


@dataclass(frozen=True, slots=True)
class Options:
    """What a user says of a recording.

    Attributes:
        annotations: Phases of ranges that the user placed, by their names.
        model: Its model; None if it is not given.
        command: The command line, for the trace.
    """

    annotations: Mapping[str, Phase] = field(default_factory=dict)
    model: GivenModel | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFound:
    """What one file gave.

    Attributes:
        file: Its name. rank: The rank that it is of.
        passes: How many steps of each phase.
        sources: How many steps were found in each way.
        joined: What its kernels were joined to.
        incomplete: Steps of which kernels are missing.
        not_measured: What it lacks, damage included.
        damage: What is wrong with it, as clauses.
    """

    file: str
    rank: int
    passes: Mapping[str, int]
    sources: Mapping[str, int]
    joined: Joined
    incomplete: int
    not_measured: tuple[NotMeasured, ...]
    damage: tuple[str, ...]


@dataclass(slots=True)
class _Read:
    """A rank between its reading and the end, when the others are known as well."""

    file: str
    rank: int
    writer: TraceWriter
    contents: Contents
    steps: tuple[Step, ...]
    pass_ids: Sequence[int]
    joined: Joined
    incomplete: int
    engine: str
    said: list[NotMeasured]
    first_step: int = 0


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
) -> tuple[RankFound, ...]:
    """Import recordings of one run into a folder that is there and empty.

    Args:
        files: As `find_files` gives them.
        trace: The folder.
        options: What the user says of them.
        progress: Told what goes on.

    Raises:
        TraceError: If a file is no recording, or the trace cannot be written.
    """
    read: list[_Read] = []
    spans: dict[int, list[tuple[int, int]]] = {}
    for file in files:
        progress(f"reading {_short(file)}")
        read += _read(file, trace, spans, options, progress)
    progress("writing")
    _number_steps(read)
    together = _together(read)
    _say_missing(read)
    # Ranks that were not given are no ranks that failed: it is said of what was given.
    world_size = len({each.rank for each in read})
    for each in read:
        _write(each, together, world_size if world_size > 1 else None, options)
    return tuple(map(_found, read))


def _read(
    file: str,
    trace: Path,
    spans: dict[int, list[tuple[int, int]]],
    options: Options,
    progress: Progress,
) -> list[_Read]:
    refuse_report(file)
    source = Bytes(file)
    if source.kind is FileKind.SQLITE:
        return _read_export(source, file, trace, spans, options, progress)
    with closing(Joinery(trace)) as joinery:
        contents, markers = _contents(source, _short(file), joinery, options, progress)
        return [_settle(file, joinery, contents, markers, 0, trace, spans, options, progress)]


def _read_export(
    source: Bytes,
    file: str,
    trace: Path,
    spans: dict[int, list[tuple[int, int]]],
    options: Options,
    progress: Progress,
) -> list[_Read]:
    """Each process of an export of Nsight Systems, as a rank; the counters of all devices go with the first one."""
    short = _short(file)
    read: list[_Read] = []
    with opened(source, file, trace) as database:
        for process in nsys.processes(database):
            pid = process.pid
            with closing(Joinery(trace)) as joinery:
                contents, markers = nsys.read(
                    database,
                    process,
                    joinery,
                    wants_marker=wants_marker,
                    progress=lambda done: progress(f"reading {short}: {done:,} rows"),
                )
                if not contents.start_ns and not contents.end_ns:
                    continue
                read.append(
                    _settle(file, joinery, contents, markers, pid, trace, spans, options, progress)
                )
        if not read:
            damage = f" ({'; '.join(database.damage)})" if database.damage else ""
            raise TraceError(
                f"{source.name} holds nothing that can be read{damage}.",
                "Export it again: nsys export --type sqlite REPORT.nsys-rep",
            )
        first, gpus, sampled = read[0], Gpus(database), Sampled()

        def write(rows: pa.Table) -> None:
            first.writer.put_rows("samples", rows)
            first.writer.flush()

        write_samples(
            nsys.samples(database, sampled),
            source="nsys",
            device_uuid=lambda number: gpus.described(number).uuid or f"device {number}",
            write=write,
        )
        first.said.extend(sampled.lacking())
        told = {clause for each in read for clause in each.contents.damage}
        for clause in database.damage:
            if clause not in told:
                first.contents = replace(first.contents, damage=(*first.contents.damage, clause))
                first.said.append(damaged(short, clause))
    return read


def _settle(
    file: str,
    joinery: Joinery,
    contents: Contents,
    markers: list[Marker],
    pid: int,
    trace: Path,
    spans: dict[int, list[tuple[int, int]]],
    options: Options,
    progress: Progress,
) -> _Read:
    """Find the steps of what was read, and join its kernels to them."""
    short = _short(file)
    try:
        chosen = choose(
            contents.annotations,
            contents.functions,
            lambda: with_launches(markers, joinery),
            options.annotations,
            contents.lookups,
        )
        steps = chosen.steps
        process = pid or (contents.annotations[0].process if contents.annotations else 0)
        engine = engine_of([step.name for step in steps[:_FIRST]], contents.functions[:_FIRST])
        # What is not asked for any more need not be held while other ranks are read.
        contents = replace(contents, annotations=(), functions=(), lookups=())
        span = contents.start_ns, contents.end_ns
        rank, said = assign_rank(contents.rank, short, spans, span)
        window = len(spans.setdefault(rank, []))
        spans[rank].append(span)
        # Several recordings of one process are as many processes in the trace.
        pid = (process if 0 < process < _PIDS else 1) + window
        writer = TraceWriter(trace, rank=rank, pid=pid, packed=True)
        first = first_pass_id(rank, pid, "")
        pass_ids = range(first, first + len(steps))
        progress(f"joining {short}")
        joined = _join(joinery, steps, pass_ids, contents, writer)
    finally:
        joinery.close()
    incomplete = len(under_recorded(steps, joined.steps))
    lacking = list(lacking_of(short, contents, chosen, joined, incomplete))
    if said:
        lacking.append(NotMeasured(f"the rank of {short}", said))
    return _Read(
        short, rank, writer, contents, steps, pass_ids, joined, incomplete, engine, lacking
    )


def _contents(
    source: Bytes, short: str, joinery: Joinery, options: Options, progress: Progress
) -> tuple[Contents, list[Marker]]:
    try:
        contents, markers = kineto.read(
            source,
            joinery,
            function_kind=function_kind,
            wants_marker=wants_marker,
            progress=lambda done: progress(f"reading {short}: {done:,} events"),
        )
    except NoEventsError as error:
        raise TraceError(
            f"{source.name} is no trace that can be imported: {error}.",
            "Give the file that torch.profiler wrote (export_chrome_trace, tensorboard_trace_handler).",
        ) from error
    if contents.start_ns == contents.end_ns == 0:
        damage = f" ({'; '.join(contents.damage)})" if contents.damage else ""
        raise TraceError(
            f"{source.name} holds no event of torch.profiler{damage}.",
            "Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
        )
    return contents, markers


def _join(
    joinery: Joinery,
    steps: Sequence[Step],
    pass_ids: Sequence[int],
    contents: Contents,
    writer: TraceWriter,
) -> Joined:
    def write(rows: pa.Table) -> None:
        writer.put_rows("kernels", rows)
        if writer.pending_rows >= _ROWS:
            writer.flush()

    if joinery.events or not joinery.has_operators:
        joined = join_events(
            joinery,
            steps,
            pass_ids,
            source=contents.source,
            device_name=name_of,
            write=write,
        )
    else:
        joined = join_operators(joinery, steps, pass_ids, source=contents.source, write=write)
    writer.flush()
    return joined


def _number_steps(read: Sequence[_Read]) -> None:
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


def _say_missing(read: Sequence[_Read]) -> None:
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


def _together(read: Sequence[_Read]) -> tuple[int, ...]:
    """The ranks that make every step together; empty if each works for itself."""
    ranks = sorted({each.rank for each in read})
    if len(ranks) != len(read) or not made_together([each.steps for each in read]):
        return ()
    return tuple(ranks)


def _write(
    each: _Read, together: tuple[int, ...], world_size: int | None, options: Options
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
        class_name="the model" if given is None else given.class_name,
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


def _found(each: _Read) -> RankFound:
    return RankFound(
        file=each.file,
        rank=each.rank,
        passes=Counter(step.work.phase.value for step in each.steps),
        sources=Counter(step.tag_source.value for step in each.steps),
        joined=each.joined,
        incomplete=each.incomplete,
        not_measured=tuple(each.said),
        damage=each.contents.damage,
    )


def _short(file: str) -> str:
    return "standard input" if file == STANDARD_INPUT else Path(file).name
