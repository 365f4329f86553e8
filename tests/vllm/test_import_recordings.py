"""Recordings that vLLM makes of itself (``--profiler-config``): their steps are those that the hooks saw meanwhile."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Recorded, generate, make_engine, prompts, sampling

from phaseprof.cli.main import main
from phaseprof.trace.reader import Trace, open_trace

Record = Callable[[Callable[[], Any]], Recorded]

#: What a step is, in the hooks' trace and in an imported one.
COUNTED = ("phase", "prefill_tokens", "decode_tokens", "sequences", "role")
LENGTHS = ("context_tokens", "attention_pairs")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def profiled_engine(llama_folder: Path, recordings: Path) -> Any:
    """An engine as vLLM is profiled by default: with stacks, packed, simple annotations."""
    settings = {"profiler": "torch", "torch_profiler_dir": str(recordings)}
    return make_engine(
        llama_folder, max_num_batched_tokens=32, max_num_seqs=8, profiler_config=settings
    )


@pytest.fixture(scope="module")
def detailed_engine(llama_folder: Path, recordings: Path) -> Any:
    """One that speculates, with the annotations that tell lengths, and without stacks."""
    return make_engine(
        llama_folder,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        profiler_config={
            "profiler": "torch",
            "torch_profiler_dir": str(recordings),
            "torch_profiler_with_stack": False,
            "torch_profiler_use_gzip": False,
            "detailed_trace_annotation": True,
        },
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )


@pytest.fixture
def recorded(
    record: Record, recordings: Path, tmp_path: Path
) -> Callable[[Any, Callable[[], Any]], tuple[Recorded, Path]]:
    """Run a function under the hooks and the engine's own profiler; the hooks' trace, and the recording."""

    def run(engine: Any, function: Callable[[], Any]) -> tuple[Recorded, Path]:
        engine.reset_prefix_cache()
        for file in recordings.iterdir():
            file.unlink()

        def profiled() -> None:
            engine.start_profile()
            try:
                function()
            finally:
                engine.stop_profile()

        live = record(profiled)
        kept = tmp_path / "profile"
        shutil.copytree(recordings, kept)
        return live, kept

    return run


def imported(source: Path, folder: Path, *options: str) -> Trace:
    assert main(["import", str(source), *options, "-o", str(folder)]) == 0
    return open_trace(folder)


def rows(trace: Trace, *columns: str) -> list[tuple[Any, ...]]:
    """Rows of the passes in the order in which they ran."""
    ordered = trace.passes.sort_by("start_ns").select(list(columns)).to_pylist()
    return [tuple(row.values()) for row in ordered]


def steps_of_all_kinds(engine: Any) -> None:
    """Chunks, mixed steps, a prompt whose last chunk is of one token, a cached prefix, a single output token."""
    generate(engine, prompts(5, 70, first=41), sampling(5))
    generate(engine, prompts(33, first=81), sampling(2))
    generate(engine, prompts(33, first=81), sampling(2))
    generate(engine, prompts(1, 12, first=85), sampling(1))


def without_annotations(source: Path, target: Path) -> Path:
    """The recording as a vLLM that announces nothing would have made it."""
    (file,) = source.glob("*.json.gz")
    content = json.loads(gzip.decompress(file.read_bytes()))
    content["traceEvents"] = [
        event for event in content["traceEvents"] if event.get("cat") != "user_annotation"
    ]
    target.write_text(json.dumps(content))
    return target


def test_steps_by_their_annotations_and_by_calls(
    profiled_engine: Any, recorded: Any, tmp_path: Path
) -> None:
    live, folder = recorded(profiled_engine, lambda: steps_of_all_kinds(profiled_engine))
    trace = imported(folder, tmp_path / "imported")
    seen = rows(live.trace, *COUNTED)
    assert {row[0] for row in seen} == {"prefill", "mixed", "decode"}
    assert rows(trace, *COUNTED) == seen
    assert set(trace.passes.column("tag_source").to_pylist()) == {"annotation"}
    # What the calls of its functions show are the same steps, of a phase that they do not tell.
    bare = imported(without_annotations(folder, tmp_path / "bare.json"), tmp_path / "calls")
    assert rows(bare, "phase", "tag_source") == [("other", "inferred")] * len(seen)
    kernels = trace.kernels.filter(trace.kernels.column("pass_id").is_valid())
    assert len(set(kernels.column("pass_id").to_pylist())) == len(seen)


def test_lengths_by_detailed_annotations_and_drafts(
    detailed_engine: Any, recorded: Any, tmp_path: Path
) -> None:
    def run() -> None:
        generate(detailed_engine, prompts(5, 70, first=41), sampling(8))
        generate(detailed_engine, prompts(33, 1, first=81), sampling(6))

    live, folder = recorded(detailed_engine, run)
    trace = imported(folder, tmp_path / "imported")
    columns = (*COUNTED, *LENGTHS)
    seen = rows(live.trace, *columns)
    assert rows(trace, *columns) == seen
    assert {row[0] for row in seen} == {"prefill", "mixed", "decode"}
    # Steps in which drafts were verified.
    assert any(row[0] == "decode" and row[2] > row[3] for row in seen)


def test_a_recording_that_begins_and_ends_midway(
    profiled_engine: Any, recordings: Path, record: Record, tmp_path: Path
) -> None:
    """Requests under way when it began; the hooks see the steps before it and after it as well."""
    engine = profiled_engine
    engine.reset_prefix_cache()
    for file in recordings.iterdir():
        file.unlink()
    core = engine.llm_engine

    def run() -> None:
        for name, prompt in zip(("p", "q"), prompts(6, 60, first=121), strict=True):
            core.add_request(name, prompt, sampling(6))
        core.step()
        engine.start_profile()
        for _ in range(4):
            core.step()
        engine.stop_profile()
        while core.has_unfinished_requests():
            core.step()

    live = record(run)
    trace = imported(recordings, tmp_path / "imported")
    seen = rows(live.trace, *COUNTED)
    assert len(seen) > 5
    assert rows(trace, *COUNTED) == seen[1:5]
    assert [row[0] for row in seen[1:5]] == ["mixed", "mixed", "decode", "decode"]
