"""From the events of a Chrome trace to what torch.profiler recorded: spans, launches, kernels, devices, ranks.

Kineto has renamed its categories and moved its clock over the years; all forms of 2021 to 2026 are read:

- ``Kernel`` and ``kernel``, ``Runtime``, ``cuda_runtime`` and ``cuda_driver``, ``Operator`` and ``cpu_op``,
  ``Memcpy``, ``memcpy`` and ``gpu_memcpy``.
- Times are whole microseconds since the Unix epoch, or fractional ones from ``baseTimeNanoseconds`` on, which may stand
  behind the events: rows have the file's own times, and `Joinery.shift_ns` says where these begin.
- A stream is an argument, or a thread named ``stream 7``; a device is an argument, or the process of the event.
- AMD's devices have numbers that are no places in the list of devices, and may have no name.

``gpu_user_annotation`` is a span of the host drawn on a device: it is no work, and is told apart from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

from phaseprof.collectors.files.chrome import Args, ChromeTrace, Event, Loose
from phaseprof.collectors.files.contents import (
    Contents,
    LeftOut,
    LookedUp,
    Span,
)
from phaseprof.collectors.files.joinery import EventRow, Joinery, correlation_of
from phaseprof.collectors.files.kineto_header import (
    clauses,
    devices_described,
    devices_named,
    versions_of,
)
from phaseprof.collectors.files.source import Bytes
from phaseprof.collectors.files.values import grid_of, ids_shape, natural, number_of, whole

#: By category: what is done with its events.
_DEVICE = frozenset(
    ("Kernel", "kernel", "Memcpy", "memcpy", "gpu_memcpy", "Memset", "memset", "gpu_memset")
)
_HOST = frozenset(
    ("Runtime", "runtime", "cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")
)
_OPERATORS = frozenset(("Operator", "cpu_op"))
#: The calls that give a device work; others have a correlation id as well.
_LAUNCHING = ("Launch", "Memcpy", "Memset")
#: Its inputs are the table, and the ids.
_LOOKUP = "aten::embedding"
#: What multiplies matrices, as the head of a model does last.
_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("linear", "matmul", "mm", "addmm", "bmm", "_scaled_mm", "_int_mm")
)
#: Later than the first days of the epoch: such a time counts from it, any other from a base.
_EPOCH_US = 1e14
#: No time of ours is later: 2200.
_LATEST_US = 7.3e15
_INT32 = 1 << 31
#: Distinct names of functions whose fate is remembered.
_NAMES = 1 << 16
_STREAM = re.compile(r"\s*stream\s+(\d+)")
#: In 2021 an annotation had the category of operators; these are such by their names.
_BACKWARD = re.compile(r"Backward\d*$")

Progress = Callable[[int], None]


def read(
    source: Bytes,
    joinery: Joinery,
    *,
    function_kind: Callable[[str], str],
    wants_marker: Callable[[str], bool],
    wants_annotation: Callable[[str], bool] = lambda name: True,
    progress: Progress = lambda done: None,
) -> Contents:
    """Read a file of torch.profiler.

    Args:
        source: The file.
        joinery: Takes launches, device events and, of a recording without devices, operators.
        function_kind: Which kind a Python function of that name (``file.py(12): function``) is of; empty for one
            whose calls are not kept. Neither are those within another one of their kind.
        wants_marker: Whether kernels of that name are kept as markers as well.
        wants_annotation: Whether spans of that name are kept.
        progress: Told of events read.

    Returns:
        What is little.

    Raises:
        NoEventsError: If it is no Chrome trace.
    """
    reading = _Reading(source, joinery, function_kind, wants_marker, wants_annotation)
    return reading.run(progress)


class _Reading:
    """One file, while it is read."""

    def __init__(
        self,
        source: Bytes,
        joinery: Joinery,
        function_kind: Callable[[str], str],
        wants_marker: Callable[[str], bool],
        wants_annotation: Callable[[str], bool],
    ) -> None:
        self._source = source
        self._trace = ChromeTrace(source)
        self._joinery = joinery
        self._function_kind = function_kind
        self._wants_marker = wants_marker
        self._wants_annotation = wants_annotation
        self._function_names: dict[str, str] = {}
        self._last_calls: dict[tuple[str, Loose], Span] = {}
        self._launching: dict[str, int] = {}
        self._marks: dict[int, bool] = {}
        self._left_out = LeftOut()
        self._annotations: list[Span] = []
        self._functions: list[Span] = []
        self._drawn: list[Span] = []
        self._process = 0
        self._lookups: list[LookedUp] = []
        self._products: dict[Loose, int] = {}
        self._devices: dict[int, None] = {}
        self._streams: dict[int, int] = {}
        self._first = math.inf
        self._last = -math.inf
        self._hip = False
        self._ended_ops = False

    def run(self, progress: Progress) -> Contents:
        take: dict[Loose, Callable[[Event], None]] = {
            **dict.fromkeys(_DEVICE, self._take_device_event),
            **dict.fromkeys(_HOST, self._take_call),
            **dict.fromkeys(_OPERATORS, self._take_operator),
            "python_function": self._take_function,
            "user_annotation": self._take_annotation,
            "gpu_user_annotation": self._take_drawn,
        }
        done = 0
        for events in self._trace:
            for event in events:
                taker = take.get(event.cat)
                if taker is not None:
                    if event.ph == "X":
                        taker(event)
                    elif event.ph in ("B", "E"):
                        self._left_out.unmatched += 1
            done += len(events)
            progress(done)
        return self._contents()

    # Events

    def _take_device_event(self, event: Event) -> None:
        span = self._span(event)
        if span is None:
            return
        args = event.args
        number = whole(event.pid if args is None or args.device is None else args.device)
        if number is None or not -1 <= number < _INT32:
            self._left_out.bad_device += 1
            return
        if not self._ended_ops:
            self._ended_ops = True
            self._joinery.drop_operators()
        self._devices[number] = None
        stream = self._stream(event)
        correlation = 0 if args is None else correlation_of(args.correlation)
        name = self._joinery.name(str(event.name))
        start, duration = span
        self._joinery.add_event(correlation, start, duration, name, number, stream)
        marks = self._marks.get(name)
        if marks is None:
            marks = self._marks[name] = self._wants_marker(str(event.name))
        if marks:
            row = EventRow(correlation, start, duration, name, number, stream)
            self._joinery.add_marker(row, None if args is None else grid_of(args.grid))

    def _take_call(self, event: Event) -> None:
        name = event.name
        if not isinstance(name, str):
            return
        place = self._launching.get(name)
        if place is None:
            launches = any(part in name for part in _LAUNCHING)
            place = self._launching[name] = self._joinery.name(name) if launches else -1
            self._hip = self._hip or name.startswith("hip")
        if place < 0 or event.args is None:
            return
        correlation = correlation_of(event.args.correlation)
        span = self._span(event)
        if correlation and span is not None:
            self._joinery.add_launch(correlation, span[0], whole(event.tid) or 0, place)

    def _take_operator(self, event: Event) -> None:
        name = event.name
        if not isinstance(name, str):
            return
        if "::" not in name:
            if event.cat == "Operator" and _BACKWARD.search(name) is None:
                self._take_annotation(event)
            return
        if name == _LOOKUP:
            if event.args is not None:
                self._take_lookup(event, event.args)
        elif self._lookups and name in _PRODUCTS:
            self._take_product(event)
        if not self._ended_ops:
            span = self._span(event)
            if span is not None:
                self._joinery.add_operator(*span, whole(event.tid) or 0, self._joinery.name(name))

    def _take_lookup(self, event: Event, args: Args) -> None:
        shape = ids_shape(args.dims)
        span = self._span(event) if shape else None
        if span is None:
            return
        before = self._products.get(event.tid)
        if before is not None and self._lookups[before].end_ns is None:
            return  # of positions, or of another kind of tokens of the same pass
        self._products[event.tid] = len(self._lookups)
        self._lookups.append(LookedUp(span[0], whole(event.tid) or 0, shape))

    def _take_product(self, event: Event) -> None:
        place = self._products.get(event.tid)
        span = self._span(event) if place is not None else None
        if place is not None and span is not None:
            own, end = self._lookups[place], sum(span)
            if own.end_ns is None or own.end_ns < end:
                self._lookups[place] = replace(own, end_ns=end)

    def _take_annotation(self, event: Event) -> None:
        span = self._named_span(event)
        if span is not None:
            self._process = self._process or span.process
            if self._wants_annotation(span.name):
                self._annotations.append(span)

    def _take_drawn(self, event: Event) -> None:
        # It spans what ran, and is none of it: not even the begin and the end of the recording are its.
        name, args = event.name, event.args
        number = whole(event.pid if args is None or args.device is None else args.device)
        if not isinstance(name, str) or number is None or not self._wants_annotation(name):
            return
        span = self._span(event)
        if span is not None:
            self._drawn.append(Span(name, span[0], sum(span), self._stream(event), number))

    def _take_function(self, event: Event) -> None:
        name = event.name
        if not isinstance(name, str):
            return
        kind = self._function_names.get(name)
        if kind is None:
            if len(self._function_names) >= _NAMES:
                self._function_names.clear()
            kind = self._function_names[name] = self._function_kind(name)
        if not kind:
            return
        call = self._named_span(event)
        if call is not None:
            # A model's layers are calls within its own one, of which there may be millions.
            around = self._last_calls.get((kind, event.tid))
            if around is None or not (
                around.start_ns <= call.start_ns and call.end_ns <= around.end_ns
            ):
                self._last_calls[kind, event.tid] = call
                self._functions.append(call)

    def _named_span(self, event: Event) -> Span | None:
        span = self._span(event)
        if span is None:
            return None
        start, duration = span
        thread, process = whole(event.tid) or 0, whole(event.pid) or 0
        return Span(str(event.name), start, start + duration, thread, process)

    def _span(self, event: Event) -> tuple[int, int] | None:
        """Begin and length in ns; None, and counted, where they are no numbers of that sort."""
        ts, dur = event.ts, event.dur
        if isinstance(ts, str):
            ts = number_of(ts)
        if isinstance(dur, str):
            dur = number_of(dur)
        if (
            ts is None
            or dur is None
            or not (-_LATEST_US < ts < _LATEST_US and 0 <= dur < _LATEST_US)
        ):
            self._left_out.no_time += 1
            return None
        if ts < self._first:
            self._first = ts
        if ts + dur > self._last:
            self._last = ts + dur
        return round(ts * 1000), round(dur * 1000)

    def _stream(self, event: Event) -> int:
        given: Loose = event.args.stream if event.args is not None else None
        if given is None:
            given = event.tid
        found = whole(given)
        if found is None and isinstance(given, str):
            match = _STREAM.match(given)
            found = None if match is None else int(match[1])
        if found is None:
            return -1
        if 0 <= found < _INT32:
            return found
        # The address of a stream: it is given a number of its own.
        return self._streams.setdefault(found, _INT32 - 1 - len(self._streams))

    # The whole

    def _contents(self) -> Contents:
        header = self._trace.header
        base = whole(header.get("baseTimeNanoseconds"))
        absolute = self._last >= _EPOCH_US and self._first >= _EPOCH_US
        shift = 0 if absolute or base is None or not 0 < base < 1 << 62 else base
        self._joinery.shift_ns = shift
        some = self._first <= self._last
        distributed = header.get("distributedInfo")
        told = distributed if isinstance(distributed, dict) else {}
        described = devices_described(header)
        return Contents(
            source="kineto",
            annotations=tuple(_moved(span, shift) for span in self._annotations),
            drawn=tuple(_moved(span, shift) for span in self._drawn),
            functions=tuple(_moved(span, shift) for span in self._functions),
            lookups=tuple(
                replace(
                    each,
                    start_ns=each.start_ns + shift,
                    end_ns=None if each.end_ns is None else each.end_ns + shift,
                )
                for each in self._lookups
            ),
            devices=devices_named(self._devices, described),
            described=len(described),
            process=self._process,
            rank=natural(told.get("rank")),
            world_size=natural(told.get("world_size")) or None,
            versions=versions_of(header),
            rocm=self._hip or any("roctracer" in key or "hip_" in key for key in header),
            epoch=absolute or shift > 0,
            start_ns=round(self._first * 1000) + shift if some else 0,
            end_ns=round(self._last * 1000) + shift if some else 0,
            left_out=self._left_out,
            damage=tuple(clauses(self._trace.damage, self._source.damage)),
        )


def _moved(span: Span, shift: int) -> Span:
    return Span(span.name, span.start_ns + shift, span.end_ns + shift, span.thread_id, span.process)
