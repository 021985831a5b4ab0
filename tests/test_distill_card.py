"""What people read about a drafter: the card holds the numbers of the log."""

from __future__ import annotations

from dataclasses import replace

from distill.card import model_card
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
