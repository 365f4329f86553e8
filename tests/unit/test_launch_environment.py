"""The environment of a wrapped command, and what its processes derive from it."""

from pathlib import Path

import pytest

from phaseprof.launch.autostart import process_rank
from phaseprof.launch.environment import child_environment, startup_folder

OWN = str(startup_folder())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, OWN),
        ("", OWN),
        ("/a", f"{OWN}:/a"),
        ("/a:/b", f"{OWN}:/a:/b"),
        (":/a", f"{OWN}::/a"),
        ("/a:", f"{OWN}:/a:"),
        ("/a::/b", f"{OWN}:/a::/b"),
        (OWN, OWN),
        (f"{OWN}:/a", f"{OWN}:/a"),
        (f"/a:{OWN}:/b", f"{OWN}:/a:/b"),
    ],
)
def test_the_startup_folder_goes_before_the_users_own_path(before: str | None, after: str) -> None:
    base = {"HOME": "/h"} if before is None else {"HOME": "/h", "PYTHONPATH": before}
    assert child_environment(base, Path("/t"), Path("/n")) == {
        "HOME": "/h",
        "PYTHONPATH": after,
        "PHASEPROF_TRACE": "/t",
        "PHASEPROF_NOTES": "/n",
    }


def test_the_startup_folder_offers_one_module() -> None:
    names = {p.stem for p in startup_folder().iterdir() if p.suffix == ".py"}
    assert names - {"__init__"} == {"sitecustomize"}


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"SLURM_PROCID": "12"}, 12),
        ({"OMPI_COMM_WORLD_RANK": "5", "SLURM_PROCID": "0"}, 5),
        ({"RANK": "7", "OMPI_COMM_WORLD_RANK": "1"}, 7),
        ({"RANK": "first", "OMPI_COMM_WORLD_RANK": "2"}, 2),
        ({"RANK": ""}, 0),
        ({"RANK": "-1"}, 0),
        ({"RANK": "\u0663"}, 0),
    ],
)
def test_the_rank_is_the_launchers(
    environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert process_rank() == rank
