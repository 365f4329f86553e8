"""Stay out of torch.compile's way.

A call may be compiled around our wrapper: `torch.compile(model)`, or the call that generate compiles for itself. Dynamo
must then neither trace our code nor break its graph at it. So the wrapper's own frames are marked to be skipped (they
run as they are, and what they call is compiled as ever), and while our code runs Dynamo is off on the thread. Where a
wrapped call is inlined into a larger graph, the wrapper sees that it is being traced and hands the call on.

Both switches are private to torch and looked up once; without them compiled calls go on as they do, and the passes
that are traced are not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any


class Dynamo:
    """The switches of one torch.

    Attributes:
        set_callback: Replaces the frame callback of this thread, and gives the one that was there; None is off.
        is_tracing: Whether Dynamo is tracing the calling code.
        at_trace: Called in traced code, has Dynamo run a function while it traces, which leaves nothing in the graph;
            None if there is no such way.
    """

    def __init__(self) -> None:
        torch = sys.modules["torch"]
        eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
        self._skip = _skipper(eval_frame)
        set_callback = getattr(eval_frame, "set_eval_frame", None)
        self.set_callback: Callable[[Any], Any] = set_callback or _leave_alone
        self.is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling
        comptime = sys.modules.get("torch._dynamo.comptime")
        self.at_trace: Callable[[Callable[[Any], None]], None] | None = getattr(
            comptime, "comptime", None
        )

    def skip(self, function: Callable[..., Any]) -> None:
        """Let a function's frames run as they are; what it calls may be compiled."""
        if self._skip is not None:
            self._skip(getattr(function, "__func__", function).__code__)


def _skipper(eval_frame: Any) -> Callable[[CodeType], None] | None:
    """What marks a code object to be skipped: `skip_code` up to torch 2.6, an execution strategy since."""
    if hasattr(eval_frame, "skip_code"):
        skip: Callable[[CodeType], None] = eval_frame.skip_code
        return skip
    try:
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        set_strategy = eval_frame.set_code_exec_strategy
    except AttributeError:
        return None
    return lambda code: set_strategy(code, strategy)


def graphs_compiled() -> int:
    """Graphs that Dynamo has compiled so far in this process: a pass during which it grows has compiled."""
    utils = sys.modules.get("torch._dynamo.utils")
    # `get`, not an index: a miss would run Counter.__missing__, which is slow.
    stats = None if utils is None else utils.counters.get("stats")
    return 0 if stats is None else stats.get("unique_graphs", 0)


def _leave_alone(callback: Any) -> None:
    """Stands in for a missing switch."""
