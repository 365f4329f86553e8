"""Steps by spans that a profiler drew on devices, in recordings of devices alone.

torch.profiler draws each range of the host once more around the kernels that were launched in it, on every stream that
has some (``gpu_user_annotation``). With the host recorded the range itself and the launches say more. Without it a span
is all there is: what ran within it on its stream is the step's, and on a stream without spans, what ran within a single
step.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from phaseprof.importing.annotations import steps_announced
from phaseprof.importing.forms import Span, Step
from phaseprof.phases import Phase


@dataclass(frozen=True, slots=True)
class Drawn:
    """Steps on devices.

    Attributes:
        steps: By begin; their times are those on devices, and no thread launched them.
        places: By device and stream, the spans as ``(start_ns, end_ns, place of the step)``, by begin.
    """

    steps: tuple[Step, ...] = ()
    places: Mapping[tuple[int, int], Sequence[tuple[int, int, int]]] = field(default_factory=dict)

    def of(self, device: int, stream: int, middle_ns: int) -> int | None:
        """The place of the step that ran something on a device at a moment; None if it is none, or one of several."""
        own = self.places.get((device, stream))
        if own is not None:
            return _within(own, middle_ns)
        found = {
            place
            for (number, _), spans in self.places.items()
            if number == device and (place := _within(spans, middle_ns)) is not None
        }
        return found.pop() if len(found) == 1 else None


def steps_drawn(drawn: Sequence[Span], named: Mapping[str, Phase]) -> Drawn:
    """The steps that spans on devices announce. Spans of one name that overlap are one step, on several streams.

    Args:
        drawn: With the device as the process and the stream as the thread.
        named: Phases by names of the user's.
    """
    streams: dict[tuple[int, int], list[Span]] = {}
    for span in drawn:
        streams.setdefault((span.process, span.thread_id), []).append(span)
    # On a stream the outermost span is the step, as it is on a thread of the host.
    announced = [
        (step, stream) for stream, own in streams.items() for step in steps_announced(own, named)
    ]
    steps: list[Step] = []
    places: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    last: dict[str, int] = {}
    for step, stream in sorted(announced, key=lambda each: each[0].start_ns):
        place = last.get(step.name)
        if place is not None and step.start_ns < steps[place].end_ns:
            end = max(steps[place].end_ns, step.end_ns)
            steps[place] = replace(steps[place], end_ns=end)
        else:
            place = last[step.name] = len(steps)
            steps.append(replace(step, thread_id=None))
        places.setdefault(stream, []).append((step.start_ns, step.end_ns, place))
    return Drawn(tuple(steps), places)


def _within(spans: Sequence[tuple[int, int, int]], middle_ns: int) -> int | None:
    after = bisect.bisect_right(spans, middle_ns, key=lambda span: span[0])
    if not after:
        return None
    start, end, place = spans[after - 1]
    return place if start <= middle_ns < max(end, start + 1) else None
