"""Many processes of one job: one trace with a rank each, labels and tokens as of one process, and what went wrong said.

Real launchers and process groups (gloo) throughout; a job takes seconds to import its libraries, so tests share them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

from phaseprof.analyzers.report import build_report
from phaseprof.analyzers.results import Parallelism, Report
from phaseprof.cli.render.terminal import render
from phaseprof.hooks.parallel import tensor_ranks
from phaseprof.trace.reader import Trace, open_trace

RUN = [sys.executable, "-m", "phaseprof", "run", "--no-report", "-o", "t", "--"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")

# What every worker begins with: two ranks on the shared cores, and a model that each of them builds alike.
HEAD = """
import os, signal, sys, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
def make():
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=512, eos_token_id=2, pad_token_id=0, bos_token_id=1)).eval()
def generate(model, first):
    ids = torch.arange(first, first + 9).unsqueeze(0)
    return model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)[0].tolist()
def say(text):
    os.write(1, f"{text}\\n".encode())  # whole, whatever the other rank says at the time
"""


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _write(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(body))
    return path


def _run(
    command: Sequence[str | Path], folder: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    environment = {**_environment(), **env}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, env=environment
    )


def _report(folder: Path) -> Report:
    return build_report(open_trace(folder / "t"))


def _rows(trace: Trace, rank: int, *columns: str) -> list[tuple[Any, ...]]:
    """Columns of a rank's passes in their order."""
    own = trace.passes.filter(pc.equal(trace.passes.column("rank"), rank)).select(list(columns))
    return [tuple(row.values()) for row in own.to_pylist()]


# Data parallel: torchrun, two ranks with prompts of their own


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the trace `t` of a torchrun job, and what the job printed."""
    folder = tmp_path_factory.mktemp("data-parallel")
    worker = _write(
        folder,
        "worker.py",
        """
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = make()
        say(f"site {sys.of_the_user} {sys.path[1]}")
        for request in range(3):
            tokens = generate(model, 3 + 100 * rank + request)
            dist.barrier()
            say(f"tokens {rank} {request} {tokens}")
        dist.destroy_process_group()
        """,
    )
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.of_the_user = 'still there'\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = _run([*RUN, *TORCHRUN, worker], folder, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_workers_have_the_environment_of_the_user(data_parallel: tuple[Path, str]) -> None:
    folder, printed = data_parallel
    assert printed.count(f"site still there {folder / 'site'}\n") == 2


def test_each_rank_has_its_passes_and_its_process(data_parallel: tuple[Path, str]) -> None:
    folder, _ = data_parallel
    trace = open_trace(folder / "t")
    expected = [("prefill", 9, 0), *[("decode", 0, 1)] * 5] * 3
    for rank in (0, 1):
        assert _rows(trace, rank, "phase", "prefill_tokens", "decode_tokens") == expected
    assert trace.damage == ()
    # One meta a worker: the agent and phaseprof itself leave none.
    metas = sorted(trace.metas, key=lambda meta: meta.rank)
    assert [(m.rank, m.local_rank, m.world_size, m.restart) for m in metas] == [
        (0, 0, 2, 0),
        (1, 1, 2, 0),
    ]
    assert {m.rank_source for m in metas} == {"torch.distributed"}
    assert all(m.complete for m in metas)
    assert metas[0].host is not None and metas[0].host == metas[1].host
    assert len({m.pid for m in metas}) == 2
    assert trace.requests.num_rows == 6
    assert len(set(trace.requests.column("request_id").to_pylist())) == 6
    assert len(set(trace.passes.column("pass_id").to_pylist())) == trace.passes.num_rows == 36


def test_what_the_ranks_computed_is_what_one_process_computes(
    data_parallel: tuple[Path, str], llama: LlamaForCausalLM
) -> None:
    _, printed = data_parallel
    generating: Any = llama
    for rank in (0, 1):
        for request in range(3):
            first = 3 + 100 * rank + request
            ids = torch.arange(first, first + 9).unsqueeze(0)
            tokens: Any = generating.generate(
                ids, max_new_tokens=6, min_new_tokens=6, do_sample=False
            )
            assert f"tokens {rank} {request} {tokens[0].tolist()}" in printed


def test_data_parallel_ranks_add_up_and_are_compared(data_parallel: tuple[Path, str]) -> None:
    folder, _ = data_parallel
    report = _report(folder)
    ranks = report.ranks
    assert ranks is not None
    assert ranks.groups == ((0,), (1,))
    # The first decode step of each rank is cold.
    assert report.phases["decode"].decode_tokens == 2 * (3 * 5 - 1)
    # So is the first request of each rank.
    assert report.requests.count == 4 and report.requests.prompt_tokens == 4 * 9
    assert ranks.missing == ()
    (skew,) = ranks.skews
    assert skew.kind is Parallelism.DATA
    # All steps but the cold ones: of 18, the first prefill and the first decode.
    assert skew.steps == 16
    # They meet at a barrier after each request, so that no step begins seconds apart: the clocks are one.
    assert skew.start_ms is not None and 0 < skew.start_ms.p50 < 1_000
    text = render(report, width=80)
    assert "Ranks           2 on " in text and "data-parallel" in text
    assert max(map(len, text.splitlines())) <= 80 or str(folder) in text


# Tensor parallel: workers that are spawned, and say their rank when they join


@pytest.fixture(scope="module")
def tensor_parallel(
    tmp_path_factory: pytest.TempPathFactory, llama: LlamaForCausalLM
) -> tuple[Path, str]:
    """A folder with the trace `t` of a script that spawns two workers, and what they printed."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    llama.save_pretrained(folder / "model")
    script = _write(
        folder,
        "spawn.py",
        """
        import warnings
        warnings.simplefilter("ignore")
        def work(rank, port):
            # A model that runs before the rank is known.
            with torch.no_grad():
                make()(torch.arange(3, 8).unsqueeze(0))
            time.sleep(0.8)
            dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            model = LlamaForCausalLM.from_pretrained("model", tp_plan="auto").eval()
            for request in range(4):
                say(f"tokens {rank} {generate(model, 3 + request)}")
            shard = model.model.layers[0].mlp.up_proj.weight
            shard = shard.to_local() if hasattr(shard, "to_local") else shard
            say(f"shard {rank} {tuple(shard.shape)}")
            dist.destroy_process_group()
        if __name__ == "__main__":
            torch.multiprocessing.spawn(work, args=(os.path.abspath("store"),), nprocs=2)
        """,
    )
    done = _run([*RUN, sys.executable, script], folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_weights_were_split(tensor_parallel: tuple[Path, str]) -> None:
    """Or the tests below would show nothing: 128 rows of a matrix over two ranks."""
    _, printed = tensor_parallel
    assert "shard 0 (64, 64)" in printed and "shard 1 (64, 64)" in printed


def test_a_tensor_parallel_run_gives_the_tokens_of_one_process(
    tensor_parallel: tuple[Path, str], llama: LlamaForCausalLM
) -> None:
    _, printed = tensor_parallel
    generating: Any = llama
    for request in range(4):
        ids = torch.arange(3 + request, 12 + request).unsqueeze(0)
        tokens: Any = generating.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        for rank in (0, 1):
            assert f"tokens {rank} {tokens[0].tolist()}" in printed


def test_a_rank_that_becomes_known_late_is_followed(tensor_parallel: tuple[Path, str]) -> None:
    folder, _ = tensor_parallel
    trace = open_trace(folder / "t")
    workers = sorted((m for m in trace.metas if m.models), key=lambda meta: meta.rank)
    assert [m.rank for m in workers] == [0, 1]
    assert all(m.rank_source == "torch.distributed" and m.world_size == 2 for m in workers)
    for rank in (0, 1):
        models = [model for (model,) in _rows(trace, rank, "model_id")]
        # The pass before it joined is with the others.
        assert models == ["LlamaForCausalLM-1", *["LlamaForCausalLM-2"] * 24]
    parts = sorted(str(p.parent.relative_to(folder / "t")) for p in (folder / "t").rglob("part-*"))
    tables = ("passes", "requests", "samples")
    assert parts == [f"{table}/rank={rank}" for table in tables for rank in (0, 1)]


def test_the_labels_of_a_split_model_are_those_of_a_whole_one(
    tensor_parallel: tuple[Path, str],
) -> None:
    folder, _ = tensor_parallel
    trace = open_trace(folder / "t")
    expected = [("prefill", 9, 0), *[("decode", 0, 1)] * 5] * 4
    for rank in (0, 1):
        assert _rows(trace, rank, "phase", "prefill_tokens", "decode_tokens")[1:] == expected
    split = [m for meta in trace.metas for m in meta.models if m.model_id == "LlamaForCausalLM-2"]
    whole = [m for meta in trace.metas for m in meta.models if m.model_id == "LlamaForCausalLM-1"]
    assert [m.tensor_ranks for m in split] == [(0, 1)] * 2
    assert [m.tensor_ranks for m in whole] == [()] * 2
    # What a rank computes of a split layer is not counted, and no share of a roof is made up.
    assert all(m.cost is not None and not m.cost.covered for m in split)
    assert all(m.cost is not None and m.cost.covered for m in whole)


def test_a_pass_of_a_split_model_counts_once(tensor_parallel: tuple[Path, str]) -> None:
    folder, _ = tensor_parallel
    report = _report(folder)
    ranks = report.ranks
    assert ranks is not None
    assert ranks.groups == ((0, 1),) and ranks.kinds == (Parallelism.TENSOR,)
    assert report.phases["decode"].decode_tokens == 4 * 5 - 1
    assert [each.tokens for each in ranks.ranks] == [ranks.ranks[0].tokens] * 2
    (skew,) = ranks.skews
    assert skew.by_start and skew.steps == 24 - 2
    assert skew.start_ms is not None and skew.start_ms.p90 < 1_000


# What goes wrong


def test_a_killed_worker_and_its_restart(tmp_path: Path) -> None:
    """Rank 1 is killed once; torchrun ends rank 0 with it and starts both again."""
    worker = _write(
        tmp_path,
        "worker.py",
        """
        generate(make(), 3)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(1.2)
            if os.environ["RANK"] == "1":
                # The other one may be slower to its first pass.
                time.sleep(2)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        """,
    )
    done = _run([*RUN, *TORCHRUN, "--max-restarts=1", worker], tmp_path)
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    assert trace.damage == ()
    assert sorted((m.rank, m.restart, m.complete) for m in trace.metas) == [
        (0, 0, False),
        (0, 1, True),
        (1, 0, False),
        (1, 1, True),
    ]
    for rank in (0, 1):
        assert [phase for (phase,) in _rows(trace, rank, "phase")] == [
            "prefill",
            *["decode"] * 5,
        ] * 2
    report = build_report(trace)
    assert any("2 of 4 processes" in sentence for sentence in report.answer)
    assert report.ranks is not None
    assert [(r.processes, r.restarts, r.ended) for r in report.ranks.ranks] == [(2, 1, True)] * 2
    assert "restarted" in render(report, width=80)


@contextlib.contextmanager
def _started(command: Sequence[str | Path], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A job, from the moment that both of its workers say that they have run a pass."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        seen = 0
        while seen < 2:
            line = process.stdout.readline()
            assert line
            seen += line.count("ready")
        yield process


def test_a_job_that_is_terminated_ends_as_without_us_and_leaves_its_trace(tmp_path: Path) -> None:
    worker = _write(
        tmp_path,
        "worker.py",
        """
        dist.init_process_group("gloo")
        generate(make(), 3)
        time.sleep(1.2)
        say("ready")
        time.sleep(60)
        """,
    )
    # What torchrun makes of the signal does not depend on what its workers do.
    idle = tmp_path / "idle.py"
    idle.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    codes = []
    commands: list[list[str | Path]] = [[*TORCHRUN, idle], [*RUN, *TORCHRUN, worker]]
    for command in commands:
        with _started(command, tmp_path) as process:
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            codes.append(process.wait(timeout=60))
            assert time.monotonic() - began < 40
    plain, wrapped = codes
    assert plain != 0
    # A process that a signal ends has 128 + N as the exit code of what wraps it.
    assert wrapped == (plain if plain > 0 else 128 - plain)
    report = _report(tmp_path)
    assert report.ranks is not None
    assert [each.ended for each in report.ranks.ranks] == [False, False]
    rows = [line for line in render(report, width=80).splitlines() if line.endswith("  no end")]
    assert len(rows) == 2


# Meshes


@pytest.fixture
def rank_2_of_8() -> Iterator[None]:
    """A process group of eight of which this process is the third, without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    yield
    torch.distributed.destroy_process_group()


def _with_dtensors(mesh: Any) -> torch.nn.Module:
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def split(name: str, module: torch.nn.Module, over: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placements = [Shard(0)] * over.ndim
            whole = distribute_tensor(parameter.data, over, placements)
            module.register_parameter(key, torch.nn.Parameter(whole))

    return distribute_module(torch.nn.Linear(8, 8), mesh, split)


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((8,), ("tp",), tuple(range(8))),
        ((8,), None, tuple(range(8))),
        ((8,), ("fsdp",), ()),
        ((4, 2), ("dp", "tp"), (2, 3)),
        ((2, 4), ("tp", "dp"), (2, 6)),
        ((2, 2, 2), ("pp", "fsdp", "tp"), (2, 3)),
        ((4, 2), None, ()),
        ((8, 1), ("dp", "tp"), ()),
    ],
)
def test_the_ranks_of_a_split_model_are_read_from_its_mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    expected: tuple[int, ...],
    rank_2_of_8: None,
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    assert tensor_ranks(_with_dtensors(mesh)) == expected


def test_a_whole_model_has_no_tensor_ranks(rank_2_of_8: None) -> None:
    assert tensor_ranks(torch.nn.Linear(4, 4)) == ()


def test_a_fully_sharded_model_makes_passes_of_its_own(rank_2_of_8: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
    assert tensor_ranks(model) == ()
