"""Make the pictures of docs/html.md from a trace, in a headless Chromium.

    phaseprof profile --prompt-tokens 128 --new-tokens 24 --batch 1,4 -o trace
    python docs/make_pictures.py trace

It writes `docs/pictures/html-*.png`: sections of the report in light and in dark, and the page of a phone. It needs
playwright, and a Chromium: `--browser`, or the first that is found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"

#: Name of the picture, what it shows, the theme, and the width of the window.
PICTURES = (
    ("html-answer", ["#answer"], "light", 960),
    ("html-roofline", ["#roofline figure"], "light", 760),
    ("html-timeline", ["#timeline-box"], "dark", 960),
    ("html-requests", ["#requests .pictures"], "light", 960),
    ("html-phone", [], "dark", 390),
)


def main() -> None:
    """Write the page, open it, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--browser", help="path of a Chromium")
    options = parser.parse_args()
    browser = options.browser or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium was found: give its path with --browser")
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as driver:
        page = Path(temporary) / "page.html"
        command = [sys.executable, "-m", "phaseprof", "report", str(options.trace)]
        subprocess.run([*command, "--html", str(page)], check=True)
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = driver.chromium.launch(executable_path=browser, args=flags)
        for name, places, theme, width in PICTURES:
            window = {"width": width, "height": 844}
            tab = chromium.new_context(color_scheme=theme, viewport=window).new_page()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready=yes]")
            file = FOLDER / f"{name}.png"
            if places:
                tab.locator(places[0]).first.screenshot(path=file)
            else:
                tab.screenshot(path=file)
            print(file)
        chromium.close()


if __name__ == "__main__":
    main()
