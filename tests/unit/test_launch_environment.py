"""The environment of a wrapped command, and what its processes derive from it."""

from pathlib import Path

import pytest

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
