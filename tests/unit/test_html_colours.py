"""The colours of the page, by the definitions of WCAG 2.1 and a model of how few colours are seen."""

from __future__ import annotations

from importlib.resources import files
from itertools import combinations

import pytest
from html_pages import css_colours

STYLE = files("phaseprof.cli.render.html").joinpath("static", "report.css").read_text("utf-8")
COLOURS = css_colours(STYLE)
PHASES = ("prefill", "decode", "mixed", "extend", "encode", "other")
CLASSES = (*(f"class-{place}" for place in range(7)), "class-rest")
THEMES = {"light": 0, "dark": 1}

#: Machado, Oliveira and Fernandes (2009), severity 1.0: what is left of linear RGB.
PROTANOPIA = (
    (0.152286, 1.052583, -0.204868),
    (0.114503, 0.786281, 0.099216),
    (-0.003882, -0.048116, 1.051998),
)
DEUTERANOPIA = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)


def linear(colour: str) -> tuple[float, float, float]:
    def channel(text: str) -> float:
        value = int(text, 16) / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    return channel(colour[1:3]), channel(colour[3:5]), channel(colour[5:7])


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    matrix = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        sum(w * max(c, 0.0) for w, c in zip(row, rgb, strict=True)) / n
        for row, n in zip(matrix, white, strict=True)
    )

    def f(t: float) -> float:
        return float(t ** (1 / 3)) if t > 0.008856 else 7.787 * t + 16 / 116

    return 116 * f(y) - 16, 500 * (f(x) - f(y)), 200 * (f(y) - f(z))


def apart(one: str, other: str, seen: tuple[tuple[float, ...], ...]) -> float:
    """The distance of two colours (CIE76) as somebody sees them who lacks a sort of cone."""
    first, second = (
        lab(tuple(sum(w * c for w, c in zip(row, linear(each), strict=True)) for row in seen))
        for each in (one, other)
    )
    return float(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["text", "quiet", "link", "warn"])
def test_text_has_the_contrast_of_aa(name: str, theme: str) -> None:
    place = THEMES[theme]
    backgrounds = ["page", "panel"] if name != "warn" else ["warn-panel"]
    for background in backgrounds:
        assert contrast(COLOURS[name][place], COLOURS[background][place]) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", [*PHASES, *CLASSES, "strong-line", "text"])
def test_marks_have_the_contrast_of_graphics(name: str, theme: str) -> None:
    place = THEMES[theme]
    for background in ("page", "panel"):
        assert contrast(COLOURS[name][place], COLOURS[background][place]) >= 3.0


@pytest.mark.parametrize("seen", [PROTANOPIA, DEUTERANOPIA], ids=["protanopia", "deuteranopia"])
@pytest.mark.parametrize("theme", THEMES)
def test_phases_that_occur_together_are_told_apart_without_red_or_green(
    theme: str, seen: tuple[tuple[float, ...], ...]
) -> None:
    place = THEMES[theme]
    for one, other in combinations(("prefill", "decode", "mixed"), 2):
        assert apart(COLOURS[one][place], COLOURS[other][place], seen) > 15
