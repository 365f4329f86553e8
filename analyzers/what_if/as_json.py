"""A what-if as JSON. Keys are only ever added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from phaseprof.analyzers.what_if.results import WhatIf

#: Raised when a key changes its meaning or goes away.
JSON_SCHEMA = 1


def to_json(found: WhatIf) -> dict[str, Any]:
    """Plain dicts, lists, strings and finite numbers.

    ``schema``; ``measured``, the run without a change; ``outcomes``, each with its figures as ``value``, ``low`` and
    ``high``, its ``bound``, ``terms`` (the arithmetic) and ``notes``; ``combined``, all changes together (null unless
    several were asked for); ``hopeless``, what cannot be done or help; ``generates``.
    """
    safe: dict[str, Any] = _safe({"schema": JSON_SCHEMA, **asdict(found)})
    return safe


def _safe(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)
