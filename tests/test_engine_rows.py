"""Rows of probabilities that are made when a rule looks at them are the rows that are made all at once."""

from __future__ import annotations

import pytest
import torch

from engine.noise import TargetNoise
from engine.rows import ProbabilityRows, probability_rows
from models.sampling import SamplingParams, probabilities
from tree.tree import TokenTree
from verify import VERIFIERS, Greedy

PARAMS = [
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=7, min_p=0.01),
]


def logits(rows: int, vocab: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("params", PARAMS, ids=["plain", "top-p", "top-k and min-p"])
@pytest.mark.parametrize("vocab", [11, 5000])
def test_a_row_does_not_depend_on_the_others(params: SamplingParams, vocab: int) -> None:
    """Else the text would depend on how many nodes were drafted beside it."""
    given = logits(9, vocab)
    whole, rows = probabilities(given, params), ProbabilityRows(given, params)
    assert rows.shape == whole.shape and rows.ndim == 2 and rows.device == whole.device
    for i in (8, 0, 3, 3):
        assert torch.equal(rows[i], whole[i])


def test_a_walk_makes_one_row_more_than_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all of this is for: 64 rows over 49,000 tokens cost more than everything else that is decided."""
    made: list[int] = []

    def counted(given: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        made.append(len(given))
        return probabilities(given, params)

    monkeypatch.setattr("engine.rows.probabilities", counted)
    tree = TokenTree(0)
    node = 0
    for token in range(6):
        node = tree.add(node, token, -1.0, "small")
        for other in range(20, 26):
            tree.add(node, other, -1.0, "small")
    given = logits(len(tree), 30)
    for n in range(6):
        given[tree.parent[1 + 7 * n], n] = 50.0  # the target's token along the first three layers, at least
    nodes = list(range(len(tree)))
    verdict = VERIFIERS["walk"](tree, nodes, probability_rows(given, PARAMS[0]), TargetNoise(1, 0))
    assert made == [1] * (len(verdict.path) + 1) and len(verdict.path) >= 3
    assert VERIFIERS["walk"](tree, nodes, probabilities(given, PARAMS[0]), TargetNoise(1, 0)) == verdict


def test_rules_of_logits_refuse_rows_one_by_one() -> None:
    """They look at all of them together; probabilities of a temperature would not be what they ask for."""
    with pytest.raises(AssertionError, match="together"):
        Greedy()(TokenTree(0), [0], ProbabilityRows(logits(1, 5), PARAMS[0]), TargetNoise(0, 0))
