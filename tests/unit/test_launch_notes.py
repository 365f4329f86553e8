"""Launch notes: what is written is what is read, whatever else lies in the folder."""

import os
from pathlib import Path

from phaseprof.launch.autostart import append
from phaseprof.launch.notes import LaunchNotes, PythonStarted, leave_nested_note, read_notes


def test_no_notes(tmp_path: Path) -> None:
    assert read_notes(tmp_path) == LaunchNotes()
    assert read_notes(tmp_path / "gone") == LaunchNotes()


def test_a_process_and_its_events(tmp_path: Path) -> None:
    note = tmp_path / "41-1.note"
    note.write_text("('python', 41, '/v/bin/python', 'a b\\n\\xe9.py', '3.12.1', '', '')\n")
    append(str(note), "engine", "transformers")
    append(str(note), "failed", "transformers", "OSError: no 'space'\nleft")
    append(str(note), "recording", "transformers")

    assert read_notes(tmp_path) == LaunchNotes(
        pythons=(PythonStarted(41, "/v/bin/python", "a b\né.py", "3.12.1", "", ""),),
        engines=frozenset({"transformers"}),
        recording=frozenset({os.getpid()}),
        failures=("OSError: no 'space'\nleft",),
    )


def test_a_half_written_note_costs_only_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "1-1.note").write_text("('engine', 1, 'transformers')\n('recording', 1, 'tra")
    (tmp_path / "2-1.note").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "3-1.note").write_text("('python', 3)\n['engine', 3, 'x']\n17\n__import__('os')\n")
    (tmp_path / "unrelated.txt").write_text("('engine', 9, 'other')\n")
    assert read_notes(tmp_path) == LaunchNotes(engines=frozenset({"transformers"}))


def test_an_append_to_a_note_that_is_gone_does_nothing(tmp_path: Path) -> None:
    append(str(tmp_path / "gone.note"), "engine", "transformers")
    leave_nested_note(tmp_path / "gone", Path("/t"))
    assert list(tmp_path.iterdir()) == []


def test_a_nested_run_is_told(tmp_path: Path) -> None:
    leave_nested_note(tmp_path, Path("/inner trace"))
    assert read_notes(tmp_path).nested == ("/inner trace",)
