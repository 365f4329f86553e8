"""The page in a headless Chromium: it loads without a request or an error, is drawn, hovered, zoomed, and runs nothing
that a name says. Skipped where there is no Chromium, or no playwright to drive it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from html_pages import page_of
from test_html_injection import HOSTILE, Names, hostile_trace
from traces import MS, START_NS, Timeline, healthy

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

#: Passes of a run that has bins.
MANY = 20_000


def chromium() -> str | None:
    """The path of a Chromium or Chrome of this machine."""
    named = os.environ.get("PHASEPROF_CHROMIUM")
    candidates = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return named or next((path for path in map(shutil.which, candidates) if path), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine; PHASEPROF_CHROMIUM names one")
    with api.sync_playwright() as driver:
        # Its sandbox needs rights that a container's root does not have.
        flags = ["--no-sandbox"] if sys.platform == "linux" and os.geteuid() == 0 else []
        started = driver.chromium.launch(executable_path=path, args=flags)
        yield started
        started.close()


@dataclass
class Opened:
    """A page, and what it said and asked for."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    @property
    def canvas(self) -> Locator:
        return self.page.locator("#timeline-canvas")

    @property
    def tip(self) -> str:
        """The hint that is shown; empty if none is."""
        tip = self.page.locator("#tip")
        return tip.inner_text() if tip.is_visible() else ""

    def view(self) -> tuple[float, float]:
        """What the timeline shows, in us."""
        self.page.wait_for_timeout(60)
        shown: list[float] = self.canvas.evaluate(
            "c => [Number(c.dataset.from), Number(c.dataset.to)]"
        )
        return shown[0], shown[1]

    def colours(self) -> int:
        """Colours of the drawing of the timeline."""
        script = """c => {
            const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
            return seen.size;
        }"""
        found: int = self.canvas.evaluate(script)
        return found

    def check(self) -> None:
        """Nothing was complained of, and nothing was asked for but the file itself."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("file:")] == []
        assert len(self.asked) == 1


def opened(browser: Browser, file: Path, **context: Any) -> Opened:
    page = browser.new_context(**context).new_page()
    found = Opened(page)
    page.on("console", lambda message: found.said.append(message.text))
    page.on("pageerror", lambda error: found.said.append(str(error)))
    page.on("request", lambda request: found.asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=10_000)
    return found


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 64 passes: prefills of 100 ms, decode steps of 4 ms, 1 ms between; and a slow request."""
    made = healthy()
    made.request(
        "slow", arrival_ns=START_NS, ttft_ns=900 * MS, itl_ns=[10 * MS, 400 * MS], tpot_ns=205 * MS
    )
    file = tmp_path_factory.mktemp("page") / "short.html"
    file.write_text(page_of(made.trace()), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of so many passes that most zooms show bins."""
    made = Timeline()
    for place in range(MANY):
        if place % 10:
            made.add("decode", 1)
        else:
            made.add("prefill", 6, tokens=30)
    file = tmp_path_factory.mktemp("page") / "long.html"
    file.write_text(page_of(made.trace()), encoding="utf-8")
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_loads_without_a_request_or_an_error(
    browser: Browser, short: Path, scheme: str
) -> None:
    found = opened(browser, short, color_scheme=scheme)
    assert found.page.locator(".answer").first.is_visible()
    assert found.colours() > 4
    back = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    found.check()


def test_the_button_changes_the_theme(browser: Browser, short: Path) -> None:
    found = opened(browser, short, color_scheme="light")
    back = "getComputedStyle(document.body).backgroundColor"
    before = found.page.evaluate(back)
    found.page.locator("#theme").click()
    assert found.page.evaluate(back) != before
    found.page.locator("#theme").click()
    assert found.page.evaluate(back) == before
    found.check()


def test_a_narrow_page_does_not_scroll_sideways(browser: Browser, short: Path) -> None:
    found = opened(browser, short, viewport={"width": 360, "height": 700})
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 360
    found.check()


def test_pointing_at_a_chart_shows_its_figures(browser: Browser, short: Path) -> None:
    found = opened(browser, short)
    found.page.locator(".roofline .point path").last.hover()
    assert "TFLOP/s" in found.tip and "FLOP/byte" in found.tip
    found.page.locator("svg.small [data-tip]").first.hover()
    assert "request" in found.tip
    found.page.locator("h1").hover()
    assert found.tip == ""
    found.check()


def test_the_keyboard_reaches_the_values_of_a_chart(browser: Browser, short: Path) -> None:
    found = opened(browser, short)
    found.page.locator("svg.roofline").focus()
    found.page.keyboard.press("ArrowRight")
    first = found.tip
    found.page.keyboard.press("ArrowRight")
    assert first and found.tip and found.tip != first
    found.page.keyboard.press("Escape")
    assert found.tip == ""


def test_pointing_at_a_pass_says_which_it_is(browser: Browser, short: Path) -> None:
    found = opened(browser, short)
    box = found.canvas.bounding_box()
    assert box is not None
    # The first prefill takes 100 ms of 1,087 ms.
    found.canvas.hover(position={"x": box["width"] * 0.05, "y": 60})
    assert found.tip.startswith("prefill, step 0, 100 ms")
    assert "512 prompt and 0 output tokens" in found.tip
    # Then decode steps of 4 ms with 1 ms between them: 103 ms lies in the first.
    found.canvas.hover(position={"x": box["width"] * 103 / 1087, "y": 60})
    assert found.tip.startswith("decode, step 1, 4.00 ms")


def test_the_keyboard_moves_and_zooms_the_timeline(browser: Browser, short: Path) -> None:
    found = opened(browser, short)
    whole = found.view()
    assert whole == (0, 1_087_000)
    found.canvas.focus()
    found.page.keyboard.press("ArrowUp")
    near = found.view()
    assert near == pytest.approx((271_750, 815_250))
    found.page.keyboard.press("ArrowRight")
    assert found.view() == pytest.approx((407_625, 951_125))
    found.page.keyboard.press("ArrowLeft")
    assert found.view() == pytest.approx(near)
    found.page.keyboard.press("ArrowDown")
    assert found.view() == pytest.approx(whole)
    found.page.keyboard.press("ArrowUp")
    found.page.keyboard.press("Home")
    assert found.view() == whole
    found.page.keyboard.press(".")
    assert found.tip.startswith("prefill, step 0")
    found.page.keyboard.press(".")
    assert found.tip.startswith("decode, step 1")
    found.check()


def test_buttons_wheel_and_dragging_zoom_and_move(browser: Browser, short: Path) -> None:
    found = opened(browser, short, viewport={"width": 1000, "height": 900})
    found.page.locator("[data-do=in]").click()
    assert found.view() == pytest.approx((271_750, 815_250))
    found.page.locator("[data-do=all]").click()
    box = found.canvas.bounding_box()
    assert box is not None
    found.canvas.hover(position={"x": box["width"] / 4, "y": 60})
    found.page.mouse.wheel(0, -200)
    assert found.view() == (0, 1_087_000)  # the wheel alone moves the page
    found.page.locator("#timeline").scroll_into_view_if_needed()
    found.canvas.hover(position={"x": box["width"] / 4, "y": 60})
    found.page.keyboard.down("Control")
    found.page.mouse.wheel(0, -200)
    found.page.keyboard.up("Control")
    low, high = found.view()
    assert high - low == pytest.approx(1_087_000 / 2.71828, rel=1e-3)
    assert low + (high - low) / 4 == pytest.approx(1_087_000 / 4, rel=1e-2)
    now = found.canvas.bounding_box()
    assert now is not None
    x, y = now["x"] + now["width"] / 2, now["y"] + 60
    found.page.mouse.move(x, y)
    found.page.mouse.down()
    found.page.mouse.move(x - now["width"] / 10, y, steps=4)
    found.page.mouse.up()
    assert found.view()[0] == pytest.approx(low + (high - low) / 10, rel=1e-2)
    found.check()


def test_a_long_run_shows_bins_and_its_passes_when_zoomed(browser: Browser, long: Path) -> None:
    found = opened(browser, long)
    assert found.canvas.get_attribute("data-drawn") == "bins"
    box = found.canvas.bounding_box()
    assert box is not None
    found.canvas.hover(position={"x": box["width"] / 2, "y": 60})
    # 6 of 15 ms are prefill's; a bin is about as long, and holds a little more or less of them.
    shares = dict(re.findall(r"(\w+) (\d+) %", found.tip))
    assert set(shares) == {"prefill", "decode"}
    assert 30 <= int(shares["prefill"]) <= 50
    found.canvas.focus()
    for _ in range(6):
        found.page.keyboard.press("+")
    found.view()
    assert found.canvas.get_attribute("data-drawn") == "passes"
    found.canvas.hover(position={"x": box["width"] / 2, "y": 60})
    assert ", step " in found.tip
    found.check()


def test_a_run_of_too_many_passes_is_shown_in_bins(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phaseprof.analyzers.viewing.timeline.MOST_PASSES", 1_000)
    made = Timeline()
    for _ in range(1_500):
        made.add("decode", 1)
    file = tmp_path / "bins.html"
    file.write_text(page_of(made.trace()), encoding="utf-8")
    found = opened(browser, file)
    found.canvas.focus()
    for _ in range(8):
        found.page.keyboard.press("+")
    found.page.keyboard.press(".")
    found.view()
    assert found.canvas.get_attribute("data-drawn") == "bins"
    assert "too many to be kept one by one" in found.page.locator("#timeline").inner_text()
    found.check()


def test_a_slow_request_is_shown_on_the_timeline(browser: Browser, short: Path) -> None:
    found = opened(browser, short)
    found.page.locator("button.show").first.click()
    low, high = found.view()
    # The wait is from 0 to 900 ms, with a fifth of it around where there is room.
    assert low == 0 and 900_000 <= high <= 1_087_000
    assert found.page.evaluate("document.activeElement.id") == "timeline-canvas"
    found.check()


def test_print_is_light_and_whole(browser: Browser, short: Path, tmp_path: Path) -> None:
    found = opened(browser, short, color_scheme="dark")
    found.page.emulate_media(media="print")
    assert (
        found.page.evaluate("getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    assert not found.page.locator("nav").is_visible()
    paper = tmp_path / "page.pdf"
    found.page.pdf(path=str(paper), format="A4")
    assert paper.read_bytes().startswith(b"%PDF")


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    names = Names(hostile=True)
    file = tmp_path / "hostile.html"
    file.write_text(page_of(hostile_trace(names)), encoding="utf-8", errors="replace")
    found = opened(browser, file)
    found.page.locator(".bar [data-tip]").first.hover()
    for element in found.page.locator("details").all():
        element.evaluate("each => each.open = true")
    assert found.page.evaluate("window.hacked") is None
    assert found.page.locator("img, iframe, [onerror], [onload], [onmouseover]").count() == 0
    text = found.page.evaluate("document.body.innerText")
    for hostile in HOSTILE[:3]:
        assert hostile in text
    found.check()


def test_the_policy_stops_what_was_let_in(browser: Browser, short: Path, tmp_path: Path) -> None:
    """Were a name not escaped, the page's policy would not let it run, nor ask for anything."""
    evil = (
        "<script>window.hacked=1</script><img src='http://127.0.0.1:9/x' onerror='window.hacked=1'>"
    )
    page = short.read_text(encoding="utf-8").replace("</main>", f"{evil}</main>")
    file = tmp_path / "evil.html"
    file.write_text(page, encoding="utf-8")
    found = opened(browser, file)
    found.page.wait_for_timeout(200)
    assert found.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in said for said in found.said)
