"""Tracks as a Perfetto trace, in its protobuf format: for ui.perfetto.dev and trace_processor.

It is written packet by packet: a trace of any length takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from phaseprof.analyzers.viewing.viewer_tracks import Entry, Point, Span, Track, TrackKind
from phaseprof.errors import MissingPackageError

#: All packets are of one sequence, and times are Unix ns: the clock that Perfetto calls real time.
_SEQUENCE = 1
_REALTIME = 1
#: Numbers of processes and tracks, apart from each other.
_PROCESS = 1 << 40
#: Process ids: rank 0 would be the idle process of Linux.
_PID = 1_000_000


def write_perfetto(entries: Iterable[Entry], file: IO[bytes]) -> None:
    """Write the tracks.

    Args:
        entries: What `phaseprof.analyzers.viewing.viewer_tracks.viewer_tracks` gives.
        file: Where to.

    Raises:
        MissingPackageError: If the package perfetto is not installed.
    """
    try:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise MissingPackageError(
            "Traces for Perfetto are written with the package perfetto, which is not installed.",
            "Run: pip install 'phaseprof[perfetto]' (or use --to chrome, which ui.perfetto.dev reads as well).",
        ) from error
    _Writer(StreamingTraceProtoBuilder(file)).write(entries)


class _Writer:
    def __init__(self, builder: Any) -> None:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

        self._builder = builder
        self._begin = TrackEvent.TYPE_SLICE_BEGIN
        self._end = TrackEvent.TYPE_SLICE_END
        self._counter = TrackEvent.TYPE_COUNTER
        self._cleared = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self._processes: set[int] = set()

    def write(self, entries: Iterable[Entry]) -> None:
        first = self._builder.create_packet()
        first.trusted_packet_sequence_id = _SEQUENCE
        first.sequence_flags = self._cleared
        first.trace_packet_defaults.timestamp_clock_id = _REALTIME
        self._builder.write_packet(first)
        for entry in entries:
            if isinstance(entry, Track):
                self._track(entry)
            elif isinstance(entry, Span):
                self._span(entry)
            else:
                self._point(entry)

    def _track(self, track: Track) -> None:
        if track.rank not in self._processes:
            self._processes.add(track.rank)
            packet = self._packet()
            packet.track_descriptor.uuid = _PROCESS + track.rank
            packet.track_descriptor.process.pid = _PID + track.rank
            packet.track_descriptor.process.process_name = track.process
            self._builder.write_packet(packet)
        packet = self._packet()
        packet.track_descriptor.uuid = track.number
        packet.track_descriptor.parent_uuid = _PROCESS + track.rank
        packet.track_descriptor.name = track.name
        if track.kind is TrackKind.COUNTER:
            packet.track_descriptor.counter.SetInParent()
        self._builder.write_packet(packet)

    def _span(self, span: Span) -> None:
        packet = self._event(span.track, span.start_ns, self._begin)
        packet.track_event.name = span.name
        for name, value in span.details:
            note = packet.track_event.debug_annotations.add()
            note.name = name
            if isinstance(value, bool):
                note.bool_value = value
            elif isinstance(value, int):
                note.int_value = value
            elif isinstance(value, float):
                note.double_value = value
            else:
                note.string_value = value
        self._builder.write_packet(packet)
        for each in span.inside:
            self._span(each)
        self._builder.write_packet(self._event(span.track, span.end_ns, self._end))

    def _point(self, point: Point) -> None:
        packet = self._event(point.track, point.at_ns, self._counter)
        packet.track_event.double_counter_value = point.value
        self._builder.write_packet(packet)

    def _event(self, track: int, at_ns: int, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = at_ns
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _packet(self) -> Any:
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet
