"""Reports and traces in a notebook, and the notebook among the samples, run by a real kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import phaseprof
from phaseprof.cli.main import main
from phaseprof.trace.shown import trace_cell
from phaseprof.workload.load import choose_placement, random_model

NOTEBOOK = Path(__file__).parents[2] / "samples" / "notebook.ipynb"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
_RUN = """
import sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


class Page(HTMLParser):
    """The elements of a page and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a tokenizer that has one token per letter."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("model") / HOSTILE.replace("/", "")
    made: Any = random_model(CONFIG, choose_placement("cpu"), name="tiny")
    made.save_pretrained(folder)
    vocabulary = {"<unk>": 0, **{chr(code): code - 31 for code in range(32, 127)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(
        folder
    )
    return folder


def test_the_notebook_runs_and_shows(model: Path, tmp_path: Path) -> None:
    for package in ("nbclient", "nbformat", "ipykernel", "pandas"):
        pytest.importorskip(package)
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    (first, *_) = (cell for cell in book["cells"] if cell["cell_type"] == "code")
    assert first["source"][0].startswith("MODEL = ")
    first["source"][0] = f"MODEL = {str(model)!r}\n"
    made, shown = tmp_path / "made.ipynb", tmp_path / "shown.ipynb"
    made.write_text(json.dumps(book), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(made), str(shown)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ran = json.loads(shown.read_text(encoding="utf-8"))
    htmls = [
        "".join(output["data"]["text/html"])
        for cell in ran["cells"]
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    report, trace, _ = htmls
    assert "Decode is" in Page(report).text
    assert "passes" in Page(trace).text
    assert "script" not in {*Page(report).tags, *Page(trace).tags}


def test_a_report_shows_what_the_command_says(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    assert (
        main(
            [
                *("profile", str(model), "--device", "cpu", "--prompt-tokens", "8", "--repeats"),
                *("3", "--new-tokens", "4", "--no-calibrate", "-o", str(trace), "--json"),
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    page = Page(phaseprof.load_report(trace)._repr_html_())
    for sentence in told["answer"]:
        assert sentence in page.text
    assert page.tags.count("table") == 2
    # The model's name is its folder's, and it stays text.
    assert "<script>alert(1)" in page.text
    assert not {"script", "img"} & set(page.tags)
    shown = Page(phaseprof.open_trace(trace)._repr_html_())
    assert not {"script", "img"} & set(shown.tags)
    assert str(trace) in shown.text


def test_names_of_a_trace_are_escaped() -> None:
    page = Page(trace_cell(HOSTILE, (), {HOSTILE: 3}, (HOSTILE,)))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(HOSTILE) == 3
    assert page.attributes == []
