"""phaseprof: tag every forward pass of an LLM as prefill, decode or mixed, and say what bounds it.

::

    import phaseprof

    with phaseprof.profile(model) as prof:
        model.generate(**inputs, max_new_tokens=64)
    print(prof.report())

Names are loaded when they are asked for, so that importing the package costs next to nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"

# Every wrapped Python process imports this module when it starts: nothing is imported here that it may not need, not
# even `typing`. Type checkers take the name for the one in `typing`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from phaseprof.analyzers.results import Bound, Report
    from phaseprof.api import Profile, load_report, profile
    from phaseprof.errors import PhaseprofError
    from phaseprof.phases import Phase
    from phaseprof.session import phase, warmup
    from phaseprof.trace.reader import Trace, open_trace

_HOME = {
    "Bound": "phaseprof.analyzers.results",
    "Phase": "phaseprof.phases",
    "PhaseprofError": "phaseprof.errors",
    "Profile": "phaseprof.api",
    "Report": "phaseprof.analyzers.results",
    "Trace": "phaseprof.trace.reader",
    "load_report": "phaseprof.api",
    "open_trace": "phaseprof.trace.reader",
    "phase": "phaseprof.session",
    "profile": "phaseprof.api",
    "warmup": "phaseprof.session",
}

__all__ = [
    "Bound",
    "Phase",
    "PhaseprofError",
    "Profile",
    "Report",
    "Trace",
    "__version__",
    "load_report",
    "open_trace",
    "phase",
    "profile",
    "warmup",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
