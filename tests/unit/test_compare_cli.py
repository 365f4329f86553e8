"""`phaseprof compare` as a command line: what it prints, what it reads, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from comparisons import run, written
from traces import META

from phaseprof.cli.compare_settings import parse_noise, read_settings
from phaseprof.cli.main import main
from phaseprof.errors import UsageError
from phaseprof.trace.writer import meta_path, write_json


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder without a project, no ceilings of this machine, and the memory pool as it was."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PHASEPROF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    pool = pa.default_memory_pool()
    yield
    pa.set_memory_pool(pool)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(run(1), tmp_path_factory.mktemp("traces") / "base")


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(run(2, decode=1.25), tmp_path_factory.mktemp("traces") / "slower")


def test_the_verdict_comes_first_and_nothing_goes_to_stderr(
    base: Path, slower: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(base), str(slower), "--run-noise", "2%"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "phaseprof compare"
    assert "  Decode is slower, prefill is unchanged." in lines
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("decode.tpot_ms.p50 > +5%", 1),
        ("decode.tpot_ms.p50 > +20%", 0),
        ("decode.tpot_ms.p50 > +40%", 0),
        ("prefill.pass_ms > +10%", 0),
        ("decode.output_tokens_per_s < -5%", 1),
        ("requests.ttft_ms.p50 > 200ms", 0),
        ("requests.ttft_ms.p50 > 50ms", 1),
        ("decode.pass_ms.p99 > +5%", 0),
    ],
)
def test_a_breach_is_exit_code_one(
    base: Path, slower: Path, rule: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(base), str(slower), "--fail-on", rule]) == code
    assert ("breach" in capsys.readouterr().out) == bool(code)


def test_what_is_not_certain_fails_only_if_it_is_asked_for(base: Path, slower: Path) -> None:
    unsure = ["compare", str(base), str(slower), "--fail-on", "decode.tpot_ms.p50 > +19%"]
    assert main(unsure) == 0
    assert main([*unsure, "--strict"]) == 1
    missing = ["compare", str(base), str(slower), "--fail-on", "decode.joules_per_token > +5%"]
    assert main(missing) == 0
    assert main([*missing, "--strict"]) == 1


def test_a_larger_noise_of_runs_keeps_a_rule(base: Path, slower: Path) -> None:
    rule = ["compare", str(base), str(slower), "--fail-on", "decode.tpot_ms.p50 > +5%"]
    assert main(rule) == 1
    assert main([*rule, "--run-noise", "10%"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["A"], "one trace is nothing to compare"),
        (["A", "B", "--fail-on", "decode.tpto_ms > +5%"], "there is no figure"),
        (["A", "B", "--fail-on", "nothing"], "is no rule"),
        (["A", "B", "--json", "--markdown", "-"], "both print"),
        (["A", "B", "--run-noise", "2"], "is no percentage"),
        (["A", "B", "--rules", "none.toml"], "there is no file of rules"),
    ],
)
def test_wrong_calls_are_usage_errors(
    base: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"A": str(base), "B": str(base)}
    assert main(["compare", *(place.get(each, each) for each in arguments)]) == 2
    assert said in capsys.readouterr().err.lower()


def test_a_trace_that_is_not_there_or_empty_is_named(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(base), str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    empty = tmp_path / "empty"
    (empty / "meta").mkdir(parents=True)
    write_json(meta_path(empty, 0, 1), META.to_json())
    assert main(["compare", str(base), str(empty)]) == 1
    assert f"{empty}: no forward pass was seen" in capsys.readouterr().err


def test_rules_of_the_project(base: Path, slower: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text(
        '[tool.phaseprof.compare]\nfail-on = ["tpot > +5%", "ttft > +10%"]\nrun-noise = "1%"\n'
    )
    assert main(["compare", str(base), str(slower)]) == 1
    out = capsys.readouterr().out
    assert "breach: tpot > +5%" in out and "kept: ttft > +10%" in out
    assert "rules of pyproject.toml" in out and "1 % added for each run" in out
    # What is asked for comes on top; another file replaces them.
    assert main(["compare", str(base), str(slower), "--fail-on", "e2e > 1ms"]) == 1
    assert "breach: e2e > 1ms" in capsys.readouterr().out
    Path("own.toml").write_text('[compare]\nfail-on = "ttft > +10%"\n')
    assert main(["compare", str(base), str(slower), "--rules", "own.toml"]) == 0


def test_a_project_without_rules_or_with_other_tools_is_left_alone() -> None:
    assert read_settings(None).fail_on == ()
    Path("pyproject.toml").write_text("[tool.other]\nx = 1\n[compare]\nfail-on = 3\n")
    assert read_settings(None).fail_on == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fail-on = [1]", "a list of rules"),
        ("strict = 'yes'", "true or false"),
        ("fails = []", "unknown key 'fails'"),
        ("run-noise = 2", "no percentage"),
        ("fail-on = [", "cannot be read as TOML"),
    ],
)
def test_a_file_that_says_something_else_is_a_usage_error(text: str, said: str) -> None:
    Path("rules.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_settings(Path("rules.toml"))


def test_noise_is_a_percentage() -> None:
    assert parse_noise("3%") == 0.03
    assert parse_noise(" 0.5 % ") == 0.005
    for text in ("-1%", "60%", "x%", "%"):
        with pytest.raises(UsageError):
            parse_noise(text)


def test_json_and_markdown(
    base: Path, slower: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "comment.md"
    rule = ["--fail-on", "tpot > +5%"]
    assert main(["compare", str(base), str(slower), "--json", "--markdown", str(file), *rule]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] and data["comparisons"][0]["rules"][0]["outcome"] == "breach"
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!-- phaseprof compare -->\n") and "A rule was broken." in text
    assert main(["compare", str(base), str(slower), "--markdown", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!-- phaseprof compare -->\n")
    assert main(["compare", str(base), str(slower), "--markdown", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_several_traces_stand_beside_each_other(
    base: Path, slower: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = ["--fail-on", "tpot > +5%"]
    assert main(["compare", str(base), str(base), str(slower), *rule]) == 1
    out = capsys.readouterr().out
    assert out.count("Rules  ") == 2
    assert "* certain" in out


def test_the_roofs_of_the_base_hold_for_the_same_device(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    # Calibrated again, with a peak a tenth higher: no reason for a lower MFU.
    roofs = tuple(replace(each, flops_per_s=each.flops_per_s * 1.1) for each in META.ceilings)
    again = written(run(1), tmp_path / "again", replace(META, ceilings=roofs))
    assert main(["compare", str(base), str(again), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["comparisons"][0]["metrics"]
    assert metrics["prefill.mfu"]["change"] == 0.0
