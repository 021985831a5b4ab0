"""Charts hold the numbers they were given, in both formats, and the server does not load what draws them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from app.distill_plot import training_panels
from app.plots import FORMATS, Curve, Panel, draw

SVG = "{http://www.w3.org/2000/svg}"
LOG = [
    {"step": 0, "tokens": 0, "agreement": [0.1234, 0.05], "divergence": [2.5, 3.25], "seconds": 0.0, "loss": None},
    {"step": 40, "tokens": 2000, "agreement": [0.4567, 0.25], "divergence": [1.125, 1.5], "seconds": 90.0, "loss": 1.2},
    {"step": 1234, "tokens": 56789, "agreement": [0.789, 0.5], "divergence": [0.375, 0.75], "seconds": 600.0, "loss": 0.5},
]


def words(root: ElementTree.Element) -> set[str]:
    return {"".join(text.itertext()).strip() for text in root.iter(f"{SVG}text")}


def line(root: ElementTree.Element, gid: str) -> list[tuple[float, float]]:
    """The points of a curve, in the units of the page; y grows downwards."""
    (group,) = [group for group in root.iter(f"{SVG}g") if group.get("id") == gid]
    path = next(group.iter(f"{SVG}path")).get("d") or ""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)]


def test_points_are_where_their_numbers_say(tmp_path: Path) -> None:
    """Linear axes: distances on the page are in the proportion of the values."""
    file = tmp_path / "out.svg"
    draw([Panel("one", [Curve("a", (0, 1, 4), (0.0, 0.5, 0.25))]), Panel("two", [Curve("b", (1, 2), (3, 4), 1, "--")])], file)
    root = ElementTree.parse(file).getroot()
    points = line(root, "one 0")
    assert len(points) == 3 and len(line(root, "two 0")) == 2
    across, up = ([point[axis] - points[0][axis] for point in points] for axis in (0, 1))
    assert across[1] / across[2] == pytest.approx(1 / 4, abs=1e-3)
    assert up[1] / up[2] == pytest.approx(0.5 / 0.25, abs=1e-3) and up[1] < 0
    assert {"one", "two", "a", "b"} <= words(root)


def test_the_curves_of_training_are_those_of_the_log(tmp_path: Path) -> None:
    """People choose a drafter, or stop its training, by them."""
    panels = training_panels(LOG)
    assert [panel.x_title for panel in panels] == ["million tokens", "minutes", "million tokens"]
    for panel, key in zip(panels, ("agreement", "agreement", "divergence"), strict=True):
        assert [curve.name for curve in panel.curves] == ["depth 1", "depth 2"]
        for depth, curve in enumerate(panel.curves):
            assert list(curve.ys) == [entry[key][depth] for entry in LOG]  # type: ignore[index]
    assert list(panels[0].curves[0].xs) == [0.0, 0.002, 0.056789] and list(panels[1].curves[0].xs) == [0.0, 1.5, 10.0]
    file = tmp_path / "curves.svg"
    draw(panels, file, "head:3 for a<b&c $x$")
    assert {"head:3 for a<b&c $x$", "depth 1", "depth 2"} <= words(ElementTree.parse(file).getroot())
    draw(training_panels(LOG[:1]), tmp_path / "one.svg", "only begun")
    nothing = [{**LOG[0], "agreement": [0.0], "divergence": [0.0]}]
    draw(training_panels(nothing), tmp_path / "none.svg", "nothing learned")


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    """A drawing under version control should change only if its numbers do."""
    for ending in FORMATS:
        files = [tmp_path / f"{name}{ending}" for name in "ab"]
        for file in files:
            draw([Panel("one", [Curve("a", (0, 1), (0, 1), sizes=(3, 9))])], file)
        assert files[0].read_bytes() == files[1].read_bytes(), ending


def test_a_png_is_a_picture_with_something_on_it(tmp_path: Path) -> None:
    """An empty canvas is a valid file too."""
    blank, full = tmp_path / "blank.png", tmp_path / "full.png"
    draw([Panel("", [])], blank)
    draw([Panel("", [Curve("a", (0, 1), (0, 1), number) for number in range(9)])], full)
    colors = []
    for file in (blank, full):
        with Image.open(file) as image:
            assert image.width > 400
            colors.append(len(image.convert("RGB").getcolors(10**6) or ()))
    assert colors[1] > colors[0] + 20


def test_other_formats_are_refused(tmp_path: Path) -> None:
    """And nothing is written under a name that says otherwise."""
    with pytest.raises(ValueError, match=r"out.gif: drawings are written as .png or .svg files"):
        draw([Panel("", [])], tmp_path / "out.gif")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_server_does_not_load_what_draws() -> None:
    """It would cost its start half a second and some memory for nothing."""
    code = (
        "import sys, app.cli, app.main, app.build, app.commands.serve, app.commands.bench, app.drafter_report\n"
        "assert 'app.plots' in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=80)
