"""What people read about a drafter: the card and the curves hold the numbers of the log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distill.card import model_card
from distill.curves import draw_curves
from models.draft_files import DrafterInfo

INFO = DrafterInfo("head", "toy", "0" * 64, 3, {"draft_vocab": 150, "parameters": 98765, "data_tokens": 43210})

LINES = [
    {"step": 0, "tokens": 0, "agreement": [0.1234, 0.05], "divergence": [2.5, 3.25], "seconds": 0.0, "loss": None},
    {"step": 40, "tokens": 2000, "agreement": [0.4567, 0.25], "divergence": [1.125, 1.5], "seconds": 90.0, "loss": 1.2},
    {"step": 1234, "tokens": 56789, "agreement": [0.789, 0.5], "divergence": [0.375, 0.75], "seconds": 600.0, "loss": 0.5},
]


def test_the_card_says_what_the_log_says() -> None:
    """People choose drafters by it."""
    card = model_card(INFO, LINES)
    for said in ("150 of", "98,765", "43,210 tokens that", "56,789 tokens read, 1,234 steps, 10 minutes", "3 layers", "toy"):
        assert said in card, said
    assert "| 1 | 0.789 | 0.38 |" in card and "| 2 | 0.500 | 0.75 |" in card
    assert "given text" not in card and "answers of the target" in card
    given_too = model_card(replace(INFO, training={**INFO.training, "extra_tokens": 6400}), LINES)
    assert "6,400 tokens of given text" in given_too
    assert "answers of the target" not in given_too, "the first texts are held out, and those were given"


def test_the_curves_are_a_document_with_the_numbers_of_the_log(tmp_path: Path) -> None:
    """A viewer shows nothing at all of a file that is not well-formed."""
    draw_curves(LINES, tmp_path / "curves.svg", "head:3 for a<b&c")
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    words = [text.text for text in root.iter(f"{space}text")]
    assert "head:3 for a<b&c" in words and {"depth 1", "depth 2", "minutes", "million tokens"} <= set(words)
    lines = list(root.iter(f"{space}polyline"))
    assert len(lines) == 6, "three charts of two depths"
    points = [[tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in lines]
    assert all(len(line) == 3 for line in points)
    first, second = points[0], points[1]
    # Linear axes from zero: heights over the base line are in the proportion of the values, places in that of the tokens.
    base = first[2][1] + (first[0][1] - first[2][1]) * 0.789 / (0.789 - 0.1234)
    for line, depth in ((first, 0), (second, 1)):
        for (_, y), entry in zip(line, LINES, strict=True):
            assert (base - y) / (base - first[2][1]) == pytest.approx(entry["agreement"][depth] / 0.789, abs=2e-3)  # type: ignore[index]
    assert (first[1][0] - first[0][0]) / (first[2][0] - first[0][0]) == pytest.approx(2000 / 56789, abs=2e-3)
    minutes = points[2]
    assert (minutes[1][0] - minutes[0][0]) / (minutes[2][0] - minutes[0][0]) == pytest.approx(90 / 600, abs=2e-3)
    draw_curves(LINES[:1], tmp_path / "one.svg", "only begun")
    ElementTree.parse(tmp_path / "one.svg")
