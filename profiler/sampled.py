"""Which process of a run samples which device: the first that asks, until it ends or is killed.

Several processes may run models on one device (the workers of a server, ranks that share a GPU). Its counters are the
same for all of them, so one process writes them. A lock on a file of the trace says which; it goes with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from pathlib import Path

#: A file name may be 255 bytes long, and the key of a CPU holds all that its ceilings depend on.
_NAMED = 80


class SampledDevices:
    """The devices that this process samples.

    Args:
        trace: The trace's folder; on several hosts that share it, keys should tell their devices apart.
    """

    def __init__(self, trace: Path) -> None:
        self._folder = trace / "meta"
        self._held: dict[str, tuple[int, Path]] = {}
        #: Files that are being locked: a child that is forked meanwhile must not keep their locks.
        self._trying: list[int] = []

    def take(self, key: str) -> bool:
        """Whether this process is the one. False where the trace cannot be written; True for every process where its
        file system has no locks: what is sampled twice is better than nothing."""
        if key in self._held:
            return True
        path = self._folder / f"sampled-{_file_name(key)}.lock"
        while True:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            except OSError:
                return False
            self._trying.append(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return self._give_up(file)
            except OSError:
                self._give_up(file)
                return True
            # Its holder may have let go of it and taken the file away: the next process makes a new one.
            if os.fstat(file).st_nlink:
                self._held[key] = (file, path)
                self._trying.remove(file)
                return True
            self._give_up(file)

    def release(self) -> None:
        """Leave the devices to others, and no file behind."""
        for file, path in self._held.values():
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(file)
        self._held = {}

    def forget(self) -> None:
        """In a forked child: the devices are the parent's. Closing a copy does not release its lock."""
        for file in [*self._trying, *(file for file, _ in self._held.values())]:
            with contextlib.suppress(OSError):
                os.close(file)
        self._held = {}
        self._trying = []

    def _give_up(self, file: int) -> bool:
        self._trying.remove(file)
        os.close(file)
        return False


def _file_name(key: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", key)
    if plain == key and len(key) <= _NAMED:
        return key
    return f"{plain[:_NAMED]}-{hashlib.blake2s(key.encode(), digest_size=4).hexdigest()}"
