"""Whether this process may read the performance counters of NVIDIA GPUs.

The driver grants them to everybody, or to processes with CAP_SYS_ADMIN or CAP_PERFMON alone:
https://developer.nvidia.com/ERR_NVGPUCTRPERM
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from phaseprof.collectors.cupti import PERMISSION_FIX

PARAMS = Path("/proc/driver/nvidia/params")
STATUS = Path("/proc/self/status")

#: Numbers of capabilities, from linux/capability.h.
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38}


@dataclass(frozen=True, slots=True)
class Permission:
    """What was found.

    Attributes:
        allowed: Whether counters may be read; None if it is not known.
        detail: Why, as a clause without capital and full stop.
        fix: What would help; empty if nothing is wrong.
    """

    allowed: bool | None
    detail: str
    fix: str = ""


def may_profile() -> Permission:
    """Read what the driver grants and what this process has. Never raises."""
    granted = _admin_only()
    held = _held()
    if granted is False:
        return Permission(True, "the driver lets all users read performance counters")
    if held:
        return Permission(True, f"this process has {held[0]}")
    if granted is None:
        return Permission(None, "the driver does not say who may read performance counters")
    return Permission(
        False,
        "the driver lets administrators alone read performance counters (RmProfilingAdminOnly is 1), and this process "
        "has neither CAP_SYS_ADMIN nor CAP_PERFMON",
        PERMISSION_FIX,
    )


def _admin_only() -> bool | None:
    found = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", _text(PARAMS), re.MULTILINE)
    return None if found is None else found[1] != "0"


def _held() -> list[str]:
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", _text(STATUS), re.MULTILINE)
    effective = int(found[1], 16) if found else 0
    return [name for name, bit in _CAPABILITIES.items() if effective >> bit & 1]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
