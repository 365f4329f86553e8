"""What a reader takes out of a profiler's file: neutral rows, whatever wrote it.

Times are ns; of which epoch, the reader says. Device events and launches are many: they go to a `Joinery`
(`phaseprof.collectors.files.joinery`), which keeps them on disk. What is here is little enough to be held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phaseprof.errors import NotMeasured


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of a host thread: an annotation, or a call of a Python function.

    Attributes:
        name: As it was recorded.
        start_ns, end_ns: Begin and end; an end before the begin does not occur.
        thread_id: Of the thread, as the file numbers them.
        process: Of its process; 0 if it is not known.
    """

    name: str
    start_ns: int
    end_ns: int
    thread_id: int
    process: int = 0


@dataclass(frozen=True, slots=True)
class Marker:
    """A kernel by whose shape or place steps can be told apart where nothing announces them.

    Attributes:
        name: Of the kernel.
        launched_ns: When the host launched it; None if its launch was not seen.
        thread_id: The launching thread; None likewise.
        start_ns, end_ns: When it ran.
        device: Number of its device in the file. stream: Its stream there.
        grid: Blocks in x, y and z; None if the file does not tell.
        launch: Correlation id of its launch: kernels of one graph share it; 0 if it has none.
    """

    name: str
    launched_ns: int | None
    thread_id: int | None
    start_ns: int
    end_ns: int
    device: int
    stream: int
    grid: tuple[int, int, int] | None
    launch: int = 0


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A look-up of embeddings on the host, the first thing that a language model computes.

    Attributes:
        start_ns: When. thread_id: Where.
        shape: Of the token ids.
        end_ns: When the last matrix product before the next look-up ended; None if there was none.
    """

    start_ns: int
    thread_id: int
    shape: tuple[int, ...]
    end_ns: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceFound:
    """A device that a file describes or uses.

    Attributes:
        number: As events of the file name it.
        name: What people call it; empty if the file does not tell.
        cores: SMs, or compute units; None if not known.
        memory_bytes: None if not known.
        capability: Compute capability, major and minor; None if not known.
        uuid: The driver's name for this very device; empty if not known.
    """

    number: int
    name: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    uuid: str = ""


@dataclass(slots=True)
class LeftOut:
    """How much of a file is not in the result, by why.

    Attributes:
        no_time: Events without a begin or a length that is a number.
        bad_device: Device events whose device is no number.
        unmatched: Things that begin and never end.
    """

    no_time: int = 0
    bad_device: int = 0
    unmatched: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """What one file held beside its launches, device events and operators.

    Attributes:
        source: What wrote it: ``kineto`` or ``nsys``.
        annotations: Spans that users and engines placed, and that were asked for.
        drawn: Such spans as the profiler drew them on devices, around what they launched: the process is the number
            of the device, the thread its stream.
        functions: Calls of Python functions that were asked for.
        lookups: Look-ups of embeddings whose shapes were recorded.
        devices: Those that were used; if none was, those that are described.
        described: How many devices the file describes.
        process: That recorded; 0 if it is not known.
        rank: Rank that the file names; None if it names none.
        world_size: Likewise.
        versions: Of what recorded it.
        rocm: Its devices are AMD's.
        epoch: Times count from the Unix epoch; else from a moment that is not known.
        start_ns, end_ns: Of the first and of the last thing in it; 0 if it has none.
        left_out: What could not be taken.
        damage: What is wrong with the file, as clauses.
        lacking: What else it cannot say.
    """

    source: str
    annotations: tuple[Span, ...] = ()
    drawn: tuple[Span, ...] = ()
    functions: tuple[Span, ...] = ()
    lookups: tuple[LookedUp, ...] = ()
    devices: tuple[DeviceFound, ...] = ()
    described: int = 0
    process: int = 0
    rank: int | None = None
    world_size: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    rocm: bool = False
    epoch: bool = True
    start_ns: int = 0
    end_ns: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)
    damage: tuple[str, ...] = ()
    lacking: tuple[NotMeasured, ...] = ()
