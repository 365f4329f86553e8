"""The folder that a new trace goes to."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from phaseprof.errors import TraceError, UsageError


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """An empty folder, ready for a trace.

    Attributes:
        path: Absolute.
        created: Folders that had to be made for it, outermost first.
        mark: The file in it that says which job it belongs to; None for a command of its own.
    """

    path: Path
    created: tuple[Path, ...]
    mark: Path | None = None

    def remove_if_empty(self) -> None:
        """Leave nothing behind when nothing was recorded: takes back the mark and the folders that were made."""
        try:
            if self.mark is not None and list(self.path.iterdir()) == [self.mark]:
                self.mark.unlink()
        except OSError:
            return
        for folder in reversed(self.created):
            try:
                folder.rmdir()
            except OSError:
                return


def prepare_output(asked: Path | None, job: str = "") -> OutputFolder:
    """Make the folder for a trace: `asked`, or ``./phaseprof-<local time>``.

    It is made before the work begins, so that a place that cannot be written to is found out then and not after it.

    Args:
        asked: Where; the commands of one job may share it.
        job: As `phaseprof.process.job_of` names it; empty for a command of its own.

    Raises:
        UsageError: There is something there already.
        TraceError: It cannot be made or written to.
    """
    if asked is None:
        return _default_folder()
    mark = asked.absolute() / _mark(job) if job else None
    check_output(asked, mark)
    path = asked.absolute()
    if path.exists():
        return _marked(OutputFolder(path, (), mark))
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        # Another command of the job may have been quicker.
        path.mkdir(parents=True, exist_ok=mark is not None)
    except OSError as error:
        raise _not_writable(asked, error) from error
    return _marked(OutputFolder(path, tuple(reversed(missing)), mark))


def _mark(job: str) -> str:
    return f".job-{hashlib.blake2s(job.encode('utf-8', 'replace'), digest_size=6).hexdigest()}"


def _marked(folder: OutputFolder) -> OutputFolder:
    if folder.mark is not None:
        try:
            folder.mark.touch()
        except OSError as error:
            raise _not_writable(folder.path, error) from error
    return folder


def check_output(asked: Path, mark: Path | None = None) -> None:
    """See whether a folder can take a trace, without making it.

    Args:
        asked: The folder.
        mark: A file in it whose presence says that it is taken by the same job.

    Raises:
        UsageError: There is something there already.
        TraceError: It cannot be read or written to.
    """
    path = asked.absolute()
    if not path.exists():
        return
    if not path.is_dir():
        raise UsageError(f"{asked} is a file.", "Give -o a folder that is new or empty.")
    try:
        occupied = any(path.iterdir()) and not (mark is not None and mark.exists())
    except OSError as error:
        raise _not_writable(asked, error) from error
    if occupied:
        raise UsageError(
            f"The folder {asked} is not empty.",
            "Give -o a folder that is new or empty, or remove this one: two runs in one could not be told apart.",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise _not_writable(asked, PermissionError(13, os.strerror(13)))


def _default_folder() -> OutputFolder:
    stem = time.strftime("phaseprof-%Y-%m-%dT%H-%M-%S")
    attempt = 1
    while True:
        # A second run in the same second and folder gets a number.
        path = Path.cwd() / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            attempt += 1
        except OSError as error:
            raise _not_writable(path.parent, error) from error
        else:
            return OutputFolder(path, (path,))


def _not_writable(path: Path, error: OSError) -> TraceError:
    return TraceError(
        f"A trace cannot be written to {path}: {error.strerror}.",
        "Give -o a folder you may write to.",
    )
