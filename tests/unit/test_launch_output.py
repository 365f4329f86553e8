"""The trace folder: made before the run, refused when occupied, taken back when nothing came."""

import os
from pathlib import Path

import pytest

from phaseprof.errors import TraceError, UsageError
from phaseprof.launch.output import prepare_output


def test_a_new_folder_is_made_and_taken_back_with_its_parents(tmp_path: Path) -> None:
    output = prepare_output(tmp_path / "a" / "b")
    assert output.path == tmp_path / "a" / "b"
    assert output.path.is_dir()
    output.remove_if_empty()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_trace_stays(tmp_path: Path) -> None:
    output = prepare_output(tmp_path / "a" / "b")
    (output.path / "meta").mkdir()
    output.remove_if_empty()
    assert (tmp_path / "a" / "b" / "meta").is_dir()


def test_an_empty_folder_of_the_user_is_used_and_never_removed(tmp_path: Path) -> None:
    output = prepare_output(tmp_path)
    assert output.path == tmp_path
    output.remove_if_empty()
    assert tmp_path.is_dir()


def test_the_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare_output(Path("t")).path == tmp_path / "t"


def test_two_default_folders_of_one_second_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: form.replace("%", ""))
    first, second = prepare_output(None), prepare_output(None)
    assert first.path == tmp_path / "phaseprof-Y-m-dTH-M-S"
    assert second.path == tmp_path / "phaseprof-Y-m-dTH-M-S-2"


def test_an_occupied_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not empty") as occupied:
        prepare_output(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        prepare_output(tmp_path / "file")
    assert occupied.value.exit_code == 2
    assert "remove" in occupied.value.remedy


def test_a_place_that_cannot_hold_a_folder_is_a_trace_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="cannot be written"):
        prepare_output(tmp_path / "file" / "t")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_a_trace_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        for path in (tmp_path, tmp_path / "t"):
            with pytest.raises(TraceError, match="Permission denied"):
                prepare_output(path)
    finally:
        tmp_path.chmod(0o700)


def test_the_commands_of_one_job_share_a_folder(tmp_path: Path) -> None:
    first = prepare_output(tmp_path / "t", "slurm 17.0")
    (first.path / "meta").mkdir()
    second = prepare_output(tmp_path / "t", "slurm 17.0")
    assert second.path == first.path
    for job in ("slurm 17.1", ""):
        with pytest.raises(UsageError, match="not empty"):
            prepare_output(tmp_path / "t", job)
    second.remove_if_empty()
    first.remove_if_empty()
    assert (tmp_path / "t" / "meta").is_dir()


def test_a_job_that_recorded_nothing_leaves_no_mark(tmp_path: Path) -> None:
    first = prepare_output(tmp_path / "a" / "t", "slurm 17.0")
    second = prepare_output(tmp_path / "a" / "t", "slurm 17.0")
    first.remove_if_empty()
    second.remove_if_empty()
    assert list(tmp_path.iterdir()) == []
