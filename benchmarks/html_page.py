"""What the HTML report of a long run costs: time to write it, its size, and how long a browser takes to show it.

    python benchmarks/html_page.py -o benchmarks/results/html_page.json
    python benchmarks/html_page.py --passes 100000

A trace is made as `trace_scale.py` makes it (a run of `generate`, a prefill and 127 decode steps by turns), then:

* write: wall time and peak RSS of `phaseprof report --html`, as a process of its own;
* size: of the file;
* load: in a headless Chromium, from the start of the navigation until the timeline is drawn, several times;
* redraw: a zoom step, from the key to the next frame, from the whole run down to single passes;
* what the browser said and asked for meanwhile.

It needs playwright, and a Chromium: `--browser`, or the first that is found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trace_scale import Case

ZOOMS = 18


def make_trace(folder: Path, passes: int) -> Path:
    """A trace of so many passes."""
    trace = folder / "trace"
    case = json.dumps(asdict(Case("page", passes, rate=0, flush_every=2_000)))
    script = Path(__file__).with_name("trace_scale.py")
    command = [sys.executable, str(script), "--child", case, "-o", str(trace)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return trace


def write_page(trace: Path, page: Path) -> dict[str, Any]:
    """Write the page, in a process of its own."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "phaseprof", "report", str(trace), "--html", str(page)],
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the report failed with {process.returncode}")
    return {
        "write_s": time.perf_counter() - begun,
        "write_mb": used.ru_maxrss * 1024 / 1e6,
        "page_bytes": page.stat().st_size,
    }


def show(page: Path, browser: str, repeats: int) -> dict[str, Any]:
    """Open the page in a browser."""
    from playwright.sync_api import sync_playwright

    said: list[str] = []
    asked: list[str] = []
    load_ms, redraw_ms = [], []
    with sync_playwright() as driver:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=browser, args=flags)
        for _ in range(repeats):
            tab = chromium.new_page(viewport={"width": 1200, "height": 900})
            tab.on("console", lambda message: said.append(message.text))
            tab.on("pageerror", lambda error: said.append(str(error)))
            tab.on("request", lambda request: asked.append(request.url))
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("html[data-ready=yes]")
            load_ms.append(tab.evaluate("performance.getEntriesByName('timeline')[0].startTime"))
            redraw_ms += tab.evaluate(
                """async (zooms) => {
                    const canvas = document.getElementById("timeline-canvas");
                    const found = [];
                    for (let i = 0; i < zooms; i++) {
                        const begun = performance.now();
                        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp" }));
                        await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
                        found.push(performance.now() - begun);
                    }
                    return found;
                }""",
                ZOOMS,
            )
            drawn = tab.locator("#timeline-canvas").get_attribute("data-drawn")
            tab.close()
        version = chromium.version
        chromium.close()
    return {
        "browser": version,
        "load_ms": load_ms,
        "load_ms_p50": statistics.median(load_ms),
        "redraw_ms_p50": statistics.median(redraw_ms),
        "redraw_ms_max": max(redraw_ms),
        "drawn_at_the_end": drawn,
        "said": said,
        "asked_for_besides": [url for url in asked if not url.startswith("file:")],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--passes", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5, help="times that the page is loaded")
    parser.add_argument("--trace", type=Path, help="a trace to take in place of a made one")
    parser.add_argument("--browser", help="path of a Chromium")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    browser = options.browser or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium was found: give its path with --browser")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trace = options.trace or make_trace(folder, options.passes)
        page = folder / "page.html"
        result: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "python": platform.python_version(),
            "passes": None if options.trace else options.passes,
            **write_page(trace, page),
            **show(page, browser, options.repeats),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
