"""`phaseprof report` as a user runs it, on the trace of a real model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = (sys.executable, "-m", "phaseprof")
Record = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def trace(record: Record, llama: Any) -> Path:
    """Eight requests of 24 prompt tokens and 5 new ones each; the first pass of each phase does not count."""
    prompt = torch.arange(3, 27).reshape(1, -1)

    def run() -> None:
        for _ in range(8):
            llama.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=False,
            )

    path = record(run).trace.path
    assert isinstance(path, Path)
    return path


def report(*args: str | Path, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `phaseprof report` with an empty cache of ceilings."""
    environment = {**os.environ, "PHASEPROF_CACHE_DIR": str(cache), **env}
    return subprocess.run(
        [*PROGRAM, "report", *map(str, args)],
        capture_output=True,
        encoding=env.get("PYTHONIOENCODING", "utf-8"),
        env=environment,
        timeout=120,
    )


def test_the_report_goes_to_stdout_and_nothing_else(trace: Path, tmp_path: Path) -> None:
    done = report(trace, cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("phaseprof · LlamaForCausalLM")
    rows = {line.split()[0]: line.split()[1:3] for line in lines if re.match("  [a-z]", line)}
    assert rows["prefill"] == ["7", "168"]
    assert rows["decode"] == ["31", "31"]
    assert str(trace) in done.stdout
    assert all(len(line) <= 100 for line in lines if str(trace) not in line)
    assert "\x1b" not in done.stdout


def test_json_is_one_document(trace: Path, tmp_path: Path) -> None:
    done = report(trace, "--json", cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert document["phases"]["prefill"]["prefill_tokens"] == 168
    assert document["phases"]["decode"]["decode_tokens"] == 31
    assert document["requests"]["count"] == 7


def test_a_stream_without_unicode_gets_ascii(trace: Path, tmp_path: Path) -> None:
    done = report(trace, cache=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "phaseprof | LlamaForCausalLM" in done.stdout
    assert "?" not in done.stdout


def test_width_is_kept(trace: Path, tmp_path: Path) -> None:
    done = report(trace, "--width", "60", cache=tmp_path)
    assert done.returncode == 0
    assert all(len(line) <= 60 for line in done.stdout.splitlines() if str(trace) not in line)
    assert "Left out at 60 columns:" in done.stdout


def test_ceilings_that_are_known_here_are_used(trace: Path, tmp_path: Path) -> None:
    """A trace without roofs is held against those of its device in the cache of this machine."""
    without = report(trace, "--json", cache=tmp_path)
    assert json.loads(without.stdout)["ceilings"] is None
    (meta,) = (trace / "meta").glob("*.json")
    device = json.loads(meta.read_text())["devices"][0]
    code = (
        "import sys\n"
        "from phaseprof.collectors.ceilings import store\n"
        "from phaseprof.trace.meta import Ceilings\n"
        "store([Ceilings(sys.argv[1], 'float32', 2e11, 1e10, 'measured', 1, 0.02, 'by hand')])\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, device["key"]],
        env={**os.environ, "PHASEPROF_CACHE_DIR": str(tmp_path)},
        check=True,
    )
    document = json.loads(report(trace, "--json", cache=tmp_path).stdout)
    assert document["ceilings"]["flops_per_s"] == 2e11
    decode = document["phases"]["decode"]
    assert decode["mbu"] == pytest.approx(decode["gb_per_s"] / 10)
    text = report(trace, cache=tmp_path).stdout
    assert "0.200 TFLOP/s float32, measured" in text
    # It goes to a pipe: the roofline is drawn without box-drawing characters.
    assert "* decode" in text
    assert not set("╭│─╰┤┊◆") & set(text)


def test_several_traces_are_reported_one_after_the_other(trace: Path, tmp_path: Path) -> None:
    text = report(trace, str(trace), cache=tmp_path).stdout
    assert text.count("phaseprof · ") == 2
    told = json.loads(report(trace, str(trace), "--json", cache=tmp_path).stdout)
    assert [each["schema"] for each in told] == [1, 1]
    refused = report(trace, str(trace), "--html", str(tmp_path / "a.html"), cache=tmp_path)
    assert refused.returncode == 2
    assert "--html takes one trace, and there are 2" in refused.stderr


def test_a_damaged_trace_is_reported_as_far_as_it_is_whole(trace: Path, tmp_path: Path) -> None:
    (part,) = (trace / "passes").rglob("*.parquet")
    copy = part.with_name("part-999999.parquet")
    copy.write_bytes(part.read_bytes()[:100])
    done = report(trace, cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "! This trace is not whole." in done.stdout
    assert copy.name in done.stdout


@pytest.mark.parametrize(
    "kind", ["nothing", "a file", "an empty folder", "a folder of something else"]
)
def test_what_is_no_trace_is_said_in_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    if kind == "a file":
        path.write_text("PAR1")
    elif kind != "nothing":
        path.mkdir()
    if kind == "a folder of something else":
        (path / "notes.txt").write_text("hello")
    done = report(path, cache=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    message, remedy = done.stderr.splitlines()
    assert message.startswith("phaseprof: ")
    assert str(path) in message
    assert remedy


def test_an_empty_run_says_which_hooks_were_set(record: Record, tmp_path: Path) -> None:
    path = record(lambda: None).trace.path
    done = report(path, cache=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    message, remedy = done.stderr.splitlines()
    assert message.startswith("phaseprof: no forward pass was seen. Hooks were set on ")
    assert remedy


def test_the_console_script_is_the_module(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("phaseprof")
    runs = [
        subprocess.run([*program, "--version"], capture_output=True, text=True)
        for program in ((script,), PROGRAM)
    ]
    assert runs[0].stdout == runs[1].stdout != ""
    assert [run.returncode for run in runs] == [0, 0]
