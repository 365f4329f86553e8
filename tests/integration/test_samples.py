"""The samples, run as a user would run them, on a tiny model with random weights."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phaseprof.session import Session
from phaseprof.trace.meta import Ceilings
from phaseprof.trace.reader import open_trace
from phaseprof.trace.writer import meta_path, write_json
from phaseprof.workload.generate import run_workload
from phaseprof.workload.load import choose_placement, random_model
from phaseprof.workload.plan import WorkloadPlan

SAMPLES = Path(__file__).parents[2] / "samples"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a tokenizer that has one token per letter."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("model") / "tiny"
    made: Any = random_model(CONFIG, choose_placement("cpu"), name="tiny")
    made.save_pretrained(folder)
    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PHASEPROF_CACHE_DIR": str(cwd / "cache"), **env},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_script_that_knows_nothing_is_wrapped(model: Path, tmp_path: Path) -> None:
    script = (SAMPLES / "generate_greedy.py", model, "--new-tokens", "3")
    assert "import phaseprof" not in script[0].read_text(encoding="utf-8")
    plain = run(*script, cwd=tmp_path)
    answers = [line for line in plain.stdout.splitlines() if line.startswith("> ")]
    assert answers == [
        "> What is the capital of France?",
        "> How many legs does a spider have?",
        "> Name the first three prime numbers.",
    ]
    wrapped = run("-m", "phaseprof", "run", "-o", "t", "--", sys.executable, *script, cwd=tmp_path)
    assert wrapped.stdout == plain.stdout
    requests = open_trace(tmp_path / "t").requests
    # The tokenizer has one token per letter.
    lengths = sorted(len(line.removeprefix("> ")) for line in answers)
    assert sorted(requests["prompt_tokens"].to_pylist()) == lengths


def test_without_a_model_the_script_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SAMPLES / "generate_greedy.py"],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PHASEPROF_CACHE_DIR": str(tmp_path)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "name a MODEL, or run `make demo` once" in done.stderr


def test_the_context_manager_prints_the_report_and_the_bound_of_each_phase(
    model: Path, tmp_path: Path
) -> None:
    args = (model, "--prompt-tokens", "10", "--new-tokens", "4", "--trace", "t")
    done = run(SAMPLES / "profile_context.py", *args, cwd=tmp_path)
    assert done.stdout.startswith("phaseprof · ")
    lines = done.stdout.splitlines()
    assert any(line.startswith("prefill: ") and "-bound, " in line for line in lines)
    assert any(line.startswith("decode: ") and " ms a pass (median)" in line for line in lines)
    # An end token may end a request early; one of the three at least has its prefill.
    rows = open_trace(tmp_path / "t").passes.num_rows
    assert lines[-1] == f"passes in the trace: {rows} (t)"


def test_the_queries_agree_with_the_trace(tmp_path: Path) -> None:
    tiny = random_model(CONFIG, choose_placement("cpu"), name="tiny")
    plan = WorkloadPlan(prompt_tokens=(100,), new_tokens=(31,), warmup=1, repeats=3)
    session = Session(tmp_path / "t", model=tiny)
    session.start()
    run_workload(tiny, plan)
    session.stop()

    done = run(SAMPLES / "trace_queries.py", "t", cwd=tmp_path)
    text = done.stdout
    # Three counted requests: 3 prefill passes of 100 tokens, 3 x 30 decode passes of 1.
    assert _row(text, "│ prefill")[:3] == ["prefill", "3", "300"]
    assert _row(text, "│ decode")[:3] == ["decode", "90", "90"]
    assert "ttft_ms" in text and "tpot_ms" in text
    # They attend to 101 to 130 tokens: 27 passes below 128 a request, 3 from there on.
    buckets = [_numbers(line) for line in text.splitlines() if line.startswith("│ ")]
    assert [row[:2] for row in buckets if row and row[0] in ("64", "128")] == [
        ["64", "81"],
        ["128", "9"],
    ]


def test_a_continuous_batch_is_shown_by_request_and_by_phase(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.10")
    args = ("--requests", "4", "--new-tokens", "3", "--step-tokens", "48", "--trace", "t")
    done = run(SAMPLES / "continuous_batching.py", model, *args, cwd=tmp_path)
    assert done.stdout.startswith("4 requests, 12 tokens (t)")
    trace = open_trace(tmp_path / "t")
    requests = trace.requests.to_pylist()
    assert sorted(row["prompt_tokens"] for row in requests) == [40, 48, 56, 64]
    # Two pages of 16 are shared by all. One request may begin in the step that computes them.
    cached = sorted(row["cached_tokens"] for row in requests)
    assert cached in ([0, 0, 32, 32], [0, 32, 32, 32])
    assert sum(trace.passes["prefill_tokens"].to_pylist()) == 208 - sum(cached)
    assert {row[0] for row in map(_numbers, done.stdout.splitlines())} >= {
        "req_0",
        "req_3",
        "prefill",
        "decode",
    }


def _row(text: str, begin: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(begin)]
    return _numbers(line)


def _numbers(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("┆", "│").strip("│").split("│")]


def test_other_rules_are_wrong_where_the_contract_says_so(tmp_path: Path) -> None:
    done = run(SAMPLES / "label_rules.py", "--demo", cwd=tmp_path)
    lines = done.stdout.splitlines()
    rows = {line[:37].strip(): line[37:].split(maxsplit=2) for line in lines[1:]}
    # A prompt of n and 5 new tokens: one pass of n tokens and 4 of one. Both rules see that.
    assert rows["prompt of 12, 5 new tokens"] == [
        "5",
        "16",
        f"{'right':>22}  {'right':>22}".strip(),
    ]
    one_wrong = f"{'1 passes, 1 tokens':>22}  {'right':>22}".strip()
    assert rows["prompt of one token"] == ["5", "5", one_wrong]
    # 9 tokens in chunks of 4 + 4 + 1.
    assert rows["prefill in chunks of 4, the last of 1"] == ["7", "13", one_wrong]
    # 12 + 13 + 14 + 15 + 16 tokens; each pass but the first has one new token, the others are computed again: the one
    # rule calls the 4 new ones prefill, the other the 12 + 13 + 14 + 15 old ones decode.
    wrong = f"{'4 passes, 4 tokens':>22}  {'4 passes, 54 tokens':>22}".strip()
    assert rows["no cache"] == ["5", "70", wrong]
    # A verification feeds several tokens, and all of them are decode.
    assert not rows["a draft model, drafts of 3"][2].startswith("right")


def test_the_rules_are_compared_on_any_trace(tmp_path: Path) -> None:
    tiny = random_model(CONFIG, choose_placement("cpu"), name="tiny")
    session = Session(tmp_path / "t", model=tiny)
    session.start()
    run_workload(tiny, WorkloadPlan(prompt_tokens=(1,), new_tokens=(3,), warmup=0, repeats=2))
    session.stop()
    done = run(SAMPLES / "label_rules.py", "t", "--passes", cwd=tmp_path)
    assert done.stdout.count("prefill  1 prefill + 0 decode tokens") == 2
    last = " ".join(done.stdout.splitlines()[-1].split())
    assert last == "t 6 6 2 passes, 2 tokens right"


def test_a_sweep_is_read_cell_by_cell(tmp_path: Path) -> None:
    tiny = random_model(CONFIG, choose_placement("cpu"), name="tiny")
    plan = WorkloadPlan(prompt_tokens=(8,), new_tokens=(4,), batches=(1, 2, 4), repeats=2)
    session = Session(tmp_path / "t", model=tiny, workload=plan.facts())
    session.start()
    run_workload(tiny, plan)
    session.stop()
    lines = run(SAMPLES / "sweep.py", "t", cwd=tmp_path).stdout.splitlines()
    assert [line[:2] for line in lines[:2]] == ["# ", "# "]
    assert lines[2] == "prompt,new,batch,tokens_per_s,tpot_ms,bound"
    assert [line.split(",")[:3] for line in lines[3:]] == [["8", "4", n] for n in ("1", "2", "4")]


def test_what_would_help_a_run(tmp_path: Path) -> None:
    tiny = random_model(CONFIG, choose_placement("cpu"), name="tiny")
    session = Session(tmp_path / "t", model=tiny)
    session.start()
    run_workload(tiny, WorkloadPlan(prompt_tokens=(8,), new_tokens=(4,), repeats=2))
    session.stop()
    (meta,) = open_trace(tmp_path / "t").metas
    key = meta.devices[0].key
    roofs = Ceilings(key, "float32", 1e11, 1e10, "measured", 0, 0.02, "by hand")
    path = meta_path(tmp_path / "t", meta.rank, meta.pid, meta.host_token)
    write_json(path, replace(meta, ceilings=(roofs,)).to_json())
    done = run(SAMPLES / "what_if.py", "t", cwd=tmp_path)
    assert done.stdout.startswith("as measured: ")
    assert "CUDA graphs: no, a CPU has no CUDA graphs" in done.stdout
    assert "all together: " in done.stdout


def test_every_sample_is_tested() -> None:
    # Those that need vLLM are run where it is installed.
    tests = (Path(__file__), Path(__file__).parents[1] / "vllm" / "test_samples.py")
    text = "".join(file.read_text(encoding="utf-8") for file in tests)
    samples = sorted(path.name for path in SAMPLES.glob("*.py"))
    assert samples == sorted(name for name in samples if f'"{name}"' in text)
    assert len(samples) >= 3


def test_ranks_that_share_questions_are_reported_together(model: Path, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    script = (SAMPLES / "torchrun_data_parallel.py", model, "--new-tokens", "3")
    wrapped = ("-m", "phaseprof", "run", "-o", "t", "--", sys.executable, *torchrun, *script)
    done = run(*wrapped, cwd=tmp_path, OMP_NUM_THREADS="1")
    questions = [
        line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")
    ]
    assert len(questions) == 4
    requests = open_trace(tmp_path / "t").requests
    rows = requests.select(["rank", "prompt_tokens"]).to_pylist()
    # The tokenizer has one token per letter, and the questions go to the ranks in turn.
    assert sorted((row["rank"], row["prompt_tokens"]) for row in rows) == sorted(
        (number % 2, len(question)) for number, question in enumerate(questions)
    )
    assert "data-parallel: each makes passes of its own" in " ".join(done.stderr.split())
