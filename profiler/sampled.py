"""Which process of a run samples which device: the first that asks, until it ends or is killed.

Several processes may run models on one device (the workers of a server, ranks that share a GPU). Its counters are the
same for all of them, so one process writes them. A lock on a file of the trace says which; it goes with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path


class SampledDevices:
    """The devices that this process samples.

    Args:
        trace: The trace's folder; on several hosts that share it, keys should tell their devices apart.
    """

    def __init__(self, trace: Path) -> None:
        self._folder = trace / "meta"
        self._held: dict[str, tuple[int, Path]] = {}

    def take(self, key: str) -> bool:
        """Whether this process is the one. False where the trace cannot be written."""
        if key in self._held:
            return True
        path = self._folder / f"sampled-{re.sub(r'[^A-Za-z0-9_.-]', '_', key)}.lock"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._held[key] = (file, path)
        return True

    def release(self) -> None:
        """Leave the devices to others, and no file behind."""
        for file, path in self._held.values():
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(file)
        self._held = {}

    def forget(self) -> None:
        """In a forked child: the devices are the parent's. Closing a copy does not release its lock."""
        for file, _ in self._held.values():
            os.close(file)
        self._held = {}
