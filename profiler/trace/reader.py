"""Open a trace: whole, half-written or damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from phaseprof.trace.meta import ProcessMeta


@dataclass(frozen=True, slots=True)
class Trace:
    """The tables of a trace, with the rows that were written again replaced, and what could not be read.

    Attributes:
        path: The folder.
        passes, requests, kernels, samples: Arrow tables with the columns of `phaseprof.schema` and a column ``rank``.
        metas: One a process.
        damage: Parts that could not be read, one sentence each.
        size_bytes: Size of the folder.
    """

    path: Path
    passes: pa.Table
    requests: pa.Table
    kernels: pa.Table
    samples: pa.Table
    metas: tuple[ProcessMeta, ...]
    damage: tuple[str, ...]
    size_bytes: int
