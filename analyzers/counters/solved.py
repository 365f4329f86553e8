"""What is known of a counter before its windows are solved, and what comes out for each label."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """What values a counter can have.

    Attributes:
        span: The width that its values spread over: 1 for a share.
        greatest: What it cannot exceed.
        idle: Mean and standard deviation that are expected of pauses, in spans: sometimes others work in them.
        between: The same of the short times between passes, in which tokens are sampled.
    """

    span: float
    greatest: float
    idle: tuple[float, float]
    between: tuple[float, float]


#: Of a share of cycles. Sampling a token runs small kernels; the driver and others use a device now and then.
SHARE = Scale(1.0, 1.0, idle=(0.1, 0.25), between=(0.1, 0.15))


@dataclass(frozen=True, slots=True)
class Errors:
    """The parts of an error, each half of a 95 % interval, in the order of the text of `unmixing`."""

    noise: float
    open: float
    offset: float
    jitter: float
    unlike: float
    moved: float
    apart: float = 0.0

    @property
    def whole(self) -> float:
        """What is random adds in squares; what pulls to one side adds up."""
        random = math.hypot(self.noise, self.open)
        return random + self.offset + self.jitter + self.unlike + self.moved + self.apart


@dataclass(frozen=True, slots=True)
class Solved:
    """The value of one label.

    Attributes:
        value: Its mean. error: Half of the 95 % interval; infinite where nothing is known. Both in the counter's unit.
        parts: What the error is made of, in spans.
        windows: Windows that hold some of it. seconds: Its time in all windows.
        blocks: How many parts of the run the value effectively rests on.
        direct: Most of what is known of it comes from windows that hold nothing else.
        apart: Share of its presence in the windows that the other labels do not explain; near 0 if it never varies on
            its own.
        residual: Standard deviation of the windows around the fit, in spans.
    """

    value: float
    error: float
    parts: Errors
    windows: int
    seconds: float
    blocks: float
    direct: bool
    apart: float
    residual: float
