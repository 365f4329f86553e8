"""The ceilings that were measured on this user's devices, in one JSON file of the user's cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from phaseprof.errors import CalibrationError
from phaseprof.trace.meta import Ceilings, Device

_VERSION = 1
_FIX = "Set PHASEPROF_CACHE_DIR to a folder that you can write to."


def cache_path() -> Path:
    """Where ceilings are cached: in PHASEPROF_CACHE_DIR, else in phaseprof/ of the user's cache folder."""
    if own := os.environ.get("PHASEPROF_CACHE_DIR"):
        return Path(own) / "ceilings.json"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "phaseprof" / "ceilings.json"
    try:
        home = Path.home()
    except RuntimeError:
        # A user without an entry in the password file and without HOME, as in some containers.
        home = Path(tempfile.gettempdir())
    return home / ".cache" / "phaseprof" / "ceilings.json"


def load(device: Device) -> tuple[Ceilings, ...]:
    """The measured ceilings of `device` in the cache. A missing, unreadable or corrupt file holds none."""
    return tuple(entry for entry in _read_cache() if entry.device_key == device.key)


def store(ceilings: Iterable[Ceilings]) -> Path:
    """Put measured ceilings into the cache, replacing those of the same device and dtype; returns its path.

    The file is replaced in one step, under a lock: processes that calibrate at once lose nothing.

    Raises:
        CalibrationError: If the cache cannot be written.
    """
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = {(entry.device_key, entry.dtype): entry for entry in _read_cache()}
            kept |= {(entry.device_key, entry.dtype): entry for entry in ceilings}
            document = {
                "version": _VERSION,
                "ceilings": [asdict(entry) for entry in kept.values()],
            }
            _replace(path, json.dumps(document, indent=1, ensure_ascii=False))
    except OSError as error:
        raise CalibrationError(
            f"The ceilings cannot be cached in {path}: {error.strerror or error}.", _FIX
        ) from error
    return path


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old one or the new one, whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _read_cache() -> tuple[Ceilings, ...]:
    try:
        document = json.loads(cache_path().read_text(encoding="utf-8"))
        entries = document["ceilings"] if document["version"] == _VERSION else []
        return tuple(known for entry in entries if (known := _entry(entry)) is not None)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def _entry(data: object) -> Ceilings | None:
    """One cached entry; None if it is not one, or holds a figure that no device has."""
    # Fields with a default are of later versions, and are not measured.
    names = {field.name for field in fields(Ceilings) if field.default is MISSING}
    if not isinstance(data, dict) or not names <= data.keys():
        return None
    entry = Ceilings(**{name: data[name] for name in names})
    texts = (entry.device_key, entry.dtype, entry.source, entry.reference)
    roofs = (entry.flops_per_s, entry.bytes_per_s)
    if not all(isinstance(text, str) for text in texts) or entry.source != "measured":
        return None
    if not all(_is_number(roof) and roof > 0 for roof in roofs):
        return None
    if not _is_number(entry.spread) or not isinstance(entry.measured_ns, int):
        return None
    return entry


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
