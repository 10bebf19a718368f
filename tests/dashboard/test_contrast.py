"""Colours of the dashboard: contrast AA of WCAG 2.1, computed from the style sheet."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs Bokeh")

from aiogpu.dashboard import charts
from aiogpu.observe.overview import COLORS, STYLE

TEXT, GRAPHIC = 4.5, 3.0
"""The least contrast of text, and of lines and the borders of fields."""


def luminance(color: str) -> float:
    """Return the relative luminance of "#rgb" or "#rrggbb", as WCAG defines it."""
    digits = color.removeprefix("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[start : start + 2], 16) / 255 for start in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def blended(front: str, back: str, alpha: float) -> str:
    """Return the colour of an area that is not opaque."""
    pairs = ((int(c[n : n + 2], 16) for c in (front, back)) for n in (1, 3, 5))
    return "#" + "".join(f"{round(alpha * f + (1 - alpha) * b):02x}" for f, b in pairs)


def colors(scheme: str) -> dict[str, str]:
    """Return the variables of a colour scheme."""
    blocks = re.findall(r":root, :host \{([^}]*)\}", STYLE)
    assert len(blocks) == 2
    block = blocks[scheme == "dark"]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block))


def test_the_measure_is_that_of_wcag() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_fields_are_readable(scheme: str) -> None:
    known = colors(scheme)
    for front, backs in {
        "text": ("back", "card", "free"),
        "dim": ("back", "card", "free"),
        "link": ("back", "card"),
        "bad": ("bad-back",),
    }.items():
        for back in backs:
            assert contrast(known[front], known[back]) >= TEXT, (front, back)
    for front in ("dim", "used"):  # borders of fields, bars of memory, focus
        for back in ("back", "card"):
            assert contrast(known[front], known[back]) >= GRAPHIC, (front, back)


def test_names_on_the_colours_of_programs_are_readable() -> None:
    found = re.findall(
        r"\.c(\d) \{ background: (#[0-9a-f]+); color: (#[0-9a-f]+); \}", STYLE
    )
    assert [int(slot) for slot, _, _ in found] == [*range(COLORS)]
    for _, back, front in found:
        assert contrast(front, back) >= TEXT, back
    assert tuple(back for _, back, _ in found) == charts.AREAS


@pytest.mark.parametrize("is_dark", [False, True])
def test_lines_of_charts_are_seen(is_dark: bool) -> None:
    back = colors("dark" if is_dark else "light")["back"]
    for line in charts.LINES[is_dark]:
        assert contrast(line, back) >= GRAPHIC
    assert contrast(charts.TEXTS[is_dark], back) >= TEXT
    # The line of the used memory runs over the areas of shares.
    for area in charts.AREAS:
        shown = blended(area, back, charts.ALPHA[is_dark])
        assert contrast(charts.TEXTS[is_dark], shown) >= GRAPHIC, area
