"""Python's start-up hook in a command under `phaseprof run`.

`phaseprof run` puts this file's folder first on PYTHONPATH, so the interpreter imports this file as ``sitecustomize``
before the program's first line. It takes its folder off ``sys.path``, runs the ``sitecustomize`` that would have run
without it, leaves a launch note and lets phaseprof wait for an engine.

Any Python from 3.8 on may run it, also one without phaseprof: standard library only, and nothing here may fail.
"""

import os
import sys


def _begin(notes: str) -> None:
    # `phaseprof run` removes the folder when it ends: what starts later is not part of that run.
    if not os.path.isdir(notes):
        return
    problem = ("", "")
    try:
        from phaseprof.launch import autostart
    except ModuleNotFoundError as error:
        problem = ("missing" if error.name == "phaseprof" else "broken", str(error))
    except Exception as error:
        problem = ("broken", type(error).__name__ + ": " + str(error))
    facts = (
        "python",
        os.getpid(),
        sys.executable or "",
        getattr(sys, "argv", [""])[0],
        ".".join([str(part) for part in sys.version_info[:3]]),
        *problem,
    )
    import time

    note = os.path.join(notes, f"{os.getpid()}-{int(time.time() * 1e6)}.note")
    file = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, (ascii(facts) + "\n").encode("ascii"))
    finally:
        os.close(file)
    if not problem[0]:
        autostart.start(note)


def _step_aside() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)
    sys.modules.pop("sitecustomize", None)


if __name__ == "sitecustomize":
    _step_aside()
    try:
        # As if this file were not there: `site` handles what this raises, "no such module" included.
        __import__("sitecustomize")
    finally:
        # Last, since a sitecustomize may be what makes phaseprof importable.
        try:  # noqa: SIM105  # contextlib would cost every Python process a millisecond
            _begin(os.environ.get("PHASEPROF_NOTES", ""))
        except Exception:
            pass  # Not being recorded is the most that a program may notice of us.
