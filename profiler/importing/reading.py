"""One file of an import: read, its steps found, its kernels joined to them and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from phaseprof.collectors.files import kineto, nsys
from phaseprof.collectors.files.chrome import NoEventsError
from phaseprof.collectors.files.contents import Contents
from phaseprof.collectors.files.joinery import Joinery
from phaseprof.collectors.files.nsys_database import Database, opened, refuse_report
from phaseprof.collectors.files.nsys_gpus import Gpus
from phaseprof.collectors.files.nsys_metrics import Sampled
from phaseprof.collectors.files.source import STANDARD_INPUT, Bytes, FileKind, NoRecordingError
from phaseprof.errors import NotMeasured
from phaseprof.importing.counters import write_samples
from phaseprof.importing.described import engine_of, name_of
from phaseprof.importing.forms import Step
from phaseprof.importing.joining import (
    Joined,
    join_events,
    join_operators,
    under_recorded,
    with_launches,
)
from phaseprof.importing.lacking import damaged, lacking_of
from phaseprof.importing.ranks import assign_rank
from phaseprof.importing.steps import (
    Chosen,
    choose,
    function_kind,
    wants_annotation,
    wants_marker,
)
from phaseprof.phases import Phase
from phaseprof.process import first_pass_id
from phaseprof.trace.writer import TraceWriter
from phaseprof.work.from_config import GivenModel

#: Told of what goes on.
Progress = Callable[[str], None]
#: Rows of kernels that are held before they become a part.
_ROWS = 1 << 16
#: Ranges and calls that are looked at to see whose they are.
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


@dataclass(slots=True)
class RankRead:
    """A rank between its reading and the end, when the others are known as well.

    Attributes:
        file: Its name. rank: Which rank it is. writer: Has its kernels and samples.
        contents: What it held, without what only its steps needed.
        steps: They. pass_ids: Their ids. joined: What ran for them.
        incomplete: How many of them lack kernels that they ran.
        engine: Whose steps they are; empty if it is not known.
        said: What it lacks.
        first_step: The number of the first one.
    """

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


class NothingDoneError(NoRecordingError):
    """A recording has no steps, and nothing in it ran on a device."""


class Reader:
    """Reads the files of one run, one after another.

    Args:
        trace: The folder of the trace.
        options: What the user says of the files.
        progress: Told what goes on.
        idle: Whether files are taken in which nothing was done on a device and no step was made.
    """

    def __init__(
        self, trace: Path, options: Options, progress: Progress, *, idle: bool = True
    ) -> None:
        self._trace = trace
        self._options = options
        self.progress = progress
        self._idle = idle
        #: Stretches of time of the files of each rank.
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def read(self, file: str) -> list[RankRead]:
        """The ranks of a file: one of a recording of torch.profiler, those of all its processes of an export.

        Raises:
            NoRecordingError: If it is none.
            NothingDoneError: If nothing was done in it, and it is not to be taken then.
            TraceError: If it cannot be read, or the trace cannot be written.
        """
        refuse_report(file)
        source, short = Bytes(file), short_name(file)
        if source.kind is FileKind.SQLITE:
            with opened(source, file, self._trace) as database:
                return self._read_export(database, short)
        with closing(source), closing(Joinery(self._trace)) as joinery:
            contents = self._contents(source, short, joinery)
            return [self._settle(short, joinery, contents)]

    def _read_export(self, database: Database, short: str) -> list[RankRead]:
        """Each process of an export of Nsight Systems, as a rank; the counters of all devices go with the first one."""
        read: list[RankRead] = []
        for process in nsys.processes(database):
            with closing(Joinery(self._trace)) as joinery:
                contents = nsys.read(
                    database,
                    process,
                    joinery,
                    wants_marker=wants_marker,
                    wants_annotation=wants_annotation(self._options.annotations),
                    progress=lambda done: self.progress(f"reading {short}: {done:,} rows"),
                )
                if contents.start_ns or contents.end_ns:
                    read.append(self._settle(short, joinery, contents))
        if not read:
            damage = f" ({'; '.join(database.damage)})" if database.damage else ""
            raise NoRecordingError(
                f"{database.name} holds nothing that can be read{damage}.",
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

    def _contents(self, source: Bytes, short: str, joinery: Joinery) -> Contents:
        try:
            contents = kineto.read(
                source,
                joinery,
                function_kind=function_kind,
                wants_marker=wants_marker,
                wants_annotation=wants_annotation(self._options.annotations),
                progress=lambda done: self.progress(f"reading {short}: {done:,} events"),
            )
        except NoEventsError as error:
            raise NoRecordingError(
                f"{source.name} is no trace that can be imported: {error}.",
                "Give the file that torch.profiler wrote (export_chrome_trace, tensorboard_trace_handler).",
            ) from error
        if contents.start_ns == contents.end_ns == 0:
            damage = f" ({'; '.join(contents.damage)})" if contents.damage else ""
            raise NoRecordingError(
                f"{source.name} holds no event of torch.profiler{damage}.",
                "Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
            )
        return contents

    def _settle(self, short: str, joinery: Joinery, contents: Contents) -> RankRead:
        """Find the steps of what was read, and join its kernels to them."""
        chosen = choose(
            contents.annotations,
            contents.functions,
            lambda: with_launches(joinery),
            self._options.annotations,
            contents.lookups,
            contents.drawn,
        )
        steps = chosen.steps
        if not (steps or joinery.events or self._idle):
            raise NothingDoneError("has no steps, and nothing in it ran on a device")
        ranges = contents.annotations or contents.drawn
        engine = engine_of([span.name for span in ranges[:_FIRST]], contents.functions[:_FIRST])
        # What is not asked for any more need not be held while other ranks are read.
        contents = replace(contents, annotations=(), drawn=(), functions=(), lookups=())
        span = contents.start_ns, contents.end_ns
        whose = short if contents.source != "nsys" else f"process {contents.process} of {short}"
        rank, said = assign_rank(contents.rank, whose, self._spans, span)
        window = len(self._spans.setdefault(rank, []))
        self._spans[rank].append(span)
        # Several recordings of one process are as many processes in the trace.
        pid = (contents.process if 0 < contents.process < _PIDS else 1) + window
        writer = TraceWriter(self._trace, rank=rank, pid=pid, packed=True)
        first = first_pass_id(rank, pid, "")
        pass_ids = range(first, first + len(steps))
        self.progress(f"joining {short}")
        joined = _join(joinery, chosen, pass_ids, contents, writer)
        incomplete = len(under_recorded(steps, joined.steps))
        lacking = list(lacking_of(short, contents, chosen, joined, incomplete))
        if said:
            lacking.append(NotMeasured(f"the rank of {whose}", said))
        return RankRead(
            short, rank, writer, contents, steps, pass_ids, joined, incomplete, engine, lacking
        )


def short_name(file: str) -> str:
    """What messages call a file."""
    return "standard input" if file == STANDARD_INPUT else Path(file).name


def _join(
    joinery: Joinery,
    chosen: Chosen,
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
            chosen.steps,
            pass_ids,
            source=contents.source,
            device_name=name_of,
            write=write,
            drawn=chosen.drawn,
        )
    else:
        joined = join_operators(
            joinery, chosen.steps, pass_ids, source=contents.source, write=write
        )
    writer.flush()
    return joined
