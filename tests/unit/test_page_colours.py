"""The page's colours as people with protanopia, deuteranopia or tritanopia see them: what may touch
in a bar, a heat map or the chart of a pipeline differs.

Simulated by the matrices of Machado, Oliveira and Fernandes (2009) at full severity, on linear RGB;
differences are those of CIE 1976 L*a*b*, of which 2.3 is just noticeable (Mahy et al. 1994).
"""

from __future__ import annotations

import itertools
import math
import re
from importlib.resources import files

import pytest

from phalanx.report.ledger import LEDGER_PARTS
from phalanx.report.sections.ledger import _CSS_CLASS_OF_PART, UNATTRIBUTED

LEAST_DIFFERENCE = 9.0
Matrix = tuple[tuple[float, float, float], ...]
VISIONS: dict[str, Matrix] = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
XYZ_OF_RGB: Matrix = (
    (0.4124, 0.3576, 0.1805),
    (0.2126, 0.7152, 0.0722),
    (0.0193, 0.1192, 0.9505),
)
WHITE_XYZ = (0.9505, 1.0, 1.0890)
# Each run has them, so what comes before and after never touches.
PARTS_OF_EACH_RUN = (
    "start-up",
    "data",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "prepare and record",
    "ending",
)


def read_style() -> str:
    return files("phalanx.report").joinpath("page.css").read_text("utf-8")


def multiply(matrix: Matrix, vector: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def see(colour: str, vision: str) -> tuple[float, float, float]:
    """L*, a*, b* of "#rrggbb" as somebody with this vision sees it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    seen = tuple(min(max(c, 0.0), 1.0) for c in multiply(VISIONS[vision], linear))
    relative = [c / white for c, white in zip(multiply(XYZ_OF_RGB, seen), WHITE_XYZ, strict=True)]
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in relative)
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def find_alike(pairs: set[tuple[str, str]]) -> list[tuple[str, str, str, float]]:
    """Pairs of colours that somebody may take for one."""
    alike = []
    for (first, second), vision in itertools.product(sorted(pairs), VISIONS):
        difference = math.dist(see(first, vision), see(second, vision))
        if difference < LEAST_DIFFERENCE:
            alike.append((first, second, vision, round(difference, 1)))
    return alike


def read_palettes() -> dict[str, dict[str, str]]:
    """By light and dark: the colour of each variable of the page's style."""
    css = read_style()
    light_css, dark_css = css.split("prefers-color-scheme: dark", 1)
    variable = re.compile(r"--(\w+): (#[0-9a-f]{6})")
    light = dict(variable.findall(light_css))
    return {"light": light, "dark": light | dict(variable.findall(dark_css.split("\n}", 1)[0]))}


def _find_colour_class(part: str) -> str:
    """The class of a part that names its colour, without stripes."""
    return _CSS_CLASS_OF_PART[part].split()[0]


def test_no_two_parts_of_the_ledger_look_the_same() -> None:
    looks = list(_CSS_CLASS_OF_PART.values())
    assert sorted(set(looks)) == sorted(looks)


def list_touching_parts() -> set[tuple[str, str]]:
    """Classes of parts of the ledger that may lie side by side: parts without seconds have no
    segment."""
    order = [*LEDGER_PARTS, UNATTRIBUTED]
    touching = set()
    for at, part in enumerate(order):
        for other in order[at + 1 :]:
            classes = _find_colour_class(part), _find_colour_class(other)
            if classes[0] != classes[1]:
                touching.add(classes)
            if other in PARTS_OF_EACH_RUN:
                break
    return touching


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_parts_that_touch_in_a_bar_differ(scheme: str) -> None:
    palette = read_palettes()[scheme]
    pairs = {
        (palette[first.replace("g", "c")], palette[second.replace("g", "c")])
        for first, second in list_touching_parts()
    }
    assert len(pairs) >= 15
    assert not find_alike(pairs)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_steps_of_the_heat_map_and_its_two_sides_differ(scheme: str) -> None:
    css, even = read_style(), read_palettes()[scheme]["even"]
    steps = re.findall(r"\.h\d \{ background: (#[0-9a-f]{6}|var\(--even\));", css)
    colours = [even if step.startswith("var") else step for step in steps]
    assert len(colours) == 8
    sides = {(colours[4 - at], colours[4 + at]) for at in (1, 2, 3)}
    assert not find_alike({*itertools.pairwise(colours), *sides})


def test_the_work_of_a_pipeline_differs() -> None:
    css = read_style()
    colours = re.findall(r"\.p[fbiw] \{ background: (#[0-9a-f]{6})", css)
    assert len(colours) == 4
    assert not find_alike(set(itertools.combinations(colours, 2)))


def test_the_simulation_confuses_what_dichromats_confuse() -> None:
    """Red and green of equal lightness are far apart, and nearly one in deuteranopia; the palette of
    before is refused."""
    red, green = "#b05040", "#6a7a3c"
    assert math.dist(see(red, "all cones"), see(green, "all cones")) > 40
    assert find_alike({(red, green)})
    assert find_alike({("#7a5c3e", "#a33b3b")})
