"""Markdown of a comparison: names from traces stay text, whatever is in them."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from comparisons import run, sample
from traces import META, model

from phaseprof.analyzers.comparing.compare import compare
from phaseprof.cli.render.comparison_markdown import escaped, render_markdown

HOSTILE = (
    "<script>alert(1)</script>",
    "![x](http://evil/x.png)",
    "[x](javascript:alert(1))",
    "@everyone **bold** _em_ `code` ~~gone~~",
    "a|b\n\n# heading\n- list",
    "<!-- phaseprof compare --></details>",
    "&lt;b&gt;",
    "https://evil.example/ www.evil.example",
    "$x$ #12",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_stays_text(text: str) -> None:
    found = escaped(text)
    # What a reader sees is what was there, on one line.
    assert html.unescape(found) == " ".join(text.split())
    assert "\n" not in found
    assert not re.search(r"[<>`*_\[\]|~@$]", found)
    assert "://" not in found and "www." not in found
    assert not re.match(r"\s*([-+#>]|\d+[.)])\s", found)


def test_figures_stay_readable() -> None:
    assert escaped("4.02 ms to 4.32 ms (95 % interval: +1.2 %)") == (
        "4.02 ms to 4.32 ms (95 % interval: +1.2 %)"
    )


def test_hostile_names_add_no_tag_no_link_and_no_row() -> None:
    hostile = " ".join(HOSTILE)
    other = replace(
        META,
        versions={"transformers": hostile},
        models=(replace(model(name=hostile), attn_implementation=hostile),),
        command=("python", hostile),
    )
    a, b = sample(run(1), name="a|b<b>"), sample(run(2), other, name=f"x/{hostile}", side=1)
    text = render_markdown([compare(a, b)], [a.report, b.report], failed=False)
    tags = re.findall(r"<[^>]*>", text)
    assert set(tags) == {
        *("<!-- phaseprof compare -->", "<details>", "</details>", "<summary>", "</summary>")
    }
    assert tags.count("<details>") == tags.count("</details>")
    assert "](" not in text and "://" not in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.count("|") in (4, 7)
