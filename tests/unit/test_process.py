"""The place of a process in its job, from what launchers and process groups say."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from phaseprof.process import (
    Place,
    ProcessPlace,
    first_pass_id,
    job_of,
    place_of,
    say_rank,
    this_host,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place()),
        (TORCHRUN, Place(3, 4, 1, "RANK", 2)),
        ({"SLURM_PROCID": "12"}, Place(12, None, None, "SLURM_PROCID")),
        (
            {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"},
            Place(5, 8, 1, "SLURM_PROCID"),
        ),
        # A job asks for tasks and starts torchrun in its batch script, which is task 0 itself.
        ({**TORCHRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, Place(3, 4, 1, "RANK", 2)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "6",
                "OMPI_COMM_WORLD_LOCAL_RANK": "2",
                "SLURM_PROCID": "0",
            },
            Place(5, 6, 2, "OMPI_COMM_WORLD_RANK"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Place(1, 2, None, "PMI_RANK")),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place(1, 2, 1, "LOCAL_RANK")),
        ({"RANK": "first", "OMPI_COMM_WORLD_RANK": "2"}, Place(2, source="OMPI_COMM_WORLD_RANK")),
        ({"RANK": ""}, Place()),
        ({"RANK": "-1"}, Place()),
        ({"RANK": "\u0663"}, Place()),
    ],
)
def test_the_first_launcher_with_a_rank_is_believed(
    environment: dict[str, str], place: Place
) -> None:
    assert place_of(environment) == place


class Group:
    """Stands for `torch.distributed`, whose state a test sets."""

    def __init__(self, rank: int | None = None, world_size: int = 2) -> None:
        self.rank = rank
        self.world_size = world_size

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.rank is not None

    def get_rank(self) -> int | None:
        return self.rank

    def get_world_size(self) -> int:
        return self.world_size


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    stand_in = Group()
    monkeypatch.setitem(sys.modules, "torch.distributed", stand_in)
    return stand_in


def test_a_process_group_that_comes_late_is_believed_and_remembered(group: Group) -> None:
    place = ProcessPlace({})
    assert place.now() == Place()
    group.rank = 1
    assert place.now() == Place(1, 2, None, "torch.distributed")
    group.rank = None
    assert place.now().rank == 1


def test_a_process_group_overrules_the_launcher(group: Group) -> None:
    """A batch script of Slurm is its task 0, and so is every worker that it spawns by itself."""
    group.rank = 1
    place = ProcessPlace({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert place.now() == Place(1, 2, None, "torch.distributed")


def test_the_local_rank_of_the_launcher_stands_where_the_ranks_agree(group: Group) -> None:
    group.rank, group.world_size = 3, 4
    assert ProcessPlace(TORCHRUN).now() == Place(3, 4, 1, "torch.distributed", 2)


@pytest.mark.parametrize(
    ("environment", "of_group", "rank"),
    [
        # A worker of the second replica of two, alone or with another rank in its group.
        ({}, None, 5),
        ({}, 1, 5),
        # Within a batch script of Slurm, which is task 0.
        ({"SLURM_PROCID": "0"}, 1, 5),
        # An engine of its own in each process of a job.
        (TORCHRUN, None, 3),
    ],
)
def test_what_an_engine_says_of_its_workers(
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    of_group: int | None,
    rank: int,
) -> None:
    monkeypatch.setattr("phaseprof.process._said", None)
    place = ProcessPlace(environment)
    group.rank = of_group
    place.now()
    say_rank(5)
    assert place.now().rank == rank


def test_a_group_of_one_knows_nothing_of_the_others(group: Group) -> None:
    group.rank, group.world_size = 0, 1
    assert ProcessPlace(TORCHRUN).now() == Place(3, 4, 1, "RANK", 2)


def test_a_module_that_is_half_imported_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    half: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch.distributed", half)
    assert ProcessPlace({"RANK": "1"}).now().rank == 1


def test_a_host_is_named_the_same_each_time() -> None:
    host = this_host()
    this_host.cache_clear()
    assert this_host() == host
    assert len(host.token) == len(host.clock) == 6
    assert int(host.token, 16) >= 0


def test_passes_of_all_processes_have_ids_of_their_own() -> None:
    """Two hosts with the same process ids, some of them without a rank."""
    processes = [
        (rank, pid, host)
        for rank in (0, 1, 511)
        for pid in (1, 2, 50, 4_194_303)
        for host in ("", "8f5cc7", "00beef", "ffffff")
    ]
    ids = {first_pass_id(*process) >> 32 for process in processes}
    assert len(ids) == len(processes)
    assert all(0 <= first_pass_id(*process) < 2**63 for process in processes)
    assert all(first_pass_id(*process) % 2**32 == 0 for process in processes)


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        ({"PHASEPROF_JOB": "nightly"}, "named nightly"),
        (
            {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "slurm 17.0",
        ),
        # One task, or a batch script that starts what it likes: nobody shares its folder.
        ({"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-a@1"}, "openmpi prterun-a@1"),
        (
            {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "torchrun none a 1",
        ),
        ({**TORCHRUN, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, ""),
    ],
)
def test_a_job_is_named_by_what_its_processes_have_in_common(
    environment: dict[str, str], job: str
) -> None:
    assert job_of(environment) == job
