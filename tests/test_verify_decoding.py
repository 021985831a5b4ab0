"""Whole texts with the real random numbers: policies draw, rules verify, step follows step.

The last layer of the exactness tests: what is proved for one step elsewhere is counted here over several, where a number
used twice or a step that starts at a wrong position would show.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from engine.noise import DraftNoise, TargetNoise
from tests.verify_world import Path, World, world
from tree.growth import Answer
from tree.policies.one_sampled import OneSampled
from tree.policies.sampled import Delayed, Iid, SampledPolicy, WithoutReplacement
from verify import RATIO_VERIFIERS

LENGTH, TEXTS = 4, 500
P, Q = world("target 4"), world("drafter 4")


def row(rows: World, text: Path) -> torch.Tensor:
    """The row after a text of any length, by its last two tokens."""
    return torch.tensor(rows[text[-2:]])


def decode(rule: str, policy: SampledPolicy, seed: int, temperature_fault: bool = False) -> tuple[Path, int]:
    """A text of `LENGTH` tokens, and the number of steps it took."""
    text: Path = ()
    steps = 0
    while len(text) < LENGTH:
        growth = policy.begin(0, vocab_size=3, uniform=DraftNoise(seed, len(text)))
        tree = growth.tree
        while (ask := growth.ask("small")) is not None:
            rows = {node: row(Q, text + tuple(tree.path_tokens(node))) for node in ask.nodes}
            growth.attach("small", Answer({}, {}, rows))
        if temperature_fault:
            for node in tree.proposals:
                tree.proposals[node] = tree.proposals[node] ** 2
        nodes = growth.verify_nodes()
        p = torch.stack([row(P, text + tuple(tree.path_tokens(node))) for node in nodes])
        verdict = RATIO_VERIFIERS[rule](tree, nodes, p, TargetNoise(seed, len(text)))
        text += tuple(tree.token[node] for node in verdict.path) + (verdict.extra,)
        steps += 1
    return text[:LENGTH], steps


def statistic(counts: Counter[Path]) -> float:
    """Chi-square of the first token, and of the pairs of tokens that end at every later place."""
    total = 0.0
    for place in range(LENGTH):
        seen: Counter[Path] = Counter()
        expected: Counter[Path] = Counter()
        for text in itertools.product(range(3), repeat=place + 1):
            law = math.prod(row(P, text[:i])[text[i]].item() for i in range(place + 1))
            expected[text[-2:]] += law * TEXTS  # type: ignore[assignment]
        for text, count in counts.items():
            seen[text[: place + 1][-2:]] += count
        total += sum((seen[cell] - mean) ** 2 / mean for cell, mean in expected.items())
    return total


# Cells of one place overlap those of the next, so the sum is not a chi-square variable. Of 200 samples of the target itself
# half were below 26 and the largest was 68. Seeds are fixed: a failure does not come and go.
LIMIT = 100.0

CASES: list[tuple[str, SampledPolicy]] = [
    ("naive", Iid(2, 2)),
    ("naive", OneSampled(width=2, frontier=2, depth=2, budget=4)),
    ("specinfer", Delayed(2, 1, 1)),
    ("specinfer-distinct", WithoutReplacement((2, 1))),
    ("block", Iid(1, 3)),
    ("traversal", Iid(2, 2)),
]


@pytest.mark.parametrize(("rule", "policy"), CASES, ids=str)
def test_texts_have_the_targets_law(rule: str, policy: SampledPolicy) -> None:
    """500 seeds, 4 tokens each; every place's pairs of tokens are counted."""
    found = [decode(rule, policy, seed) for seed in range(TEXTS)]
    assert statistic(Counter(text for text, _ in found)) < LIMIT
    assert sum(steps for _, steps in found) < 0.9 * LENGTH * TEXTS, "hardly anything was accepted"


@pytest.mark.parametrize(("rule", "policy"), [CASES[0], CASES[-1]], ids=str)
def test_a_wrong_proposal_is_counted(rule: str, policy: SampledPolicy) -> None:
    """Negative control: with rows at another temperature the counts are far off."""
    assert statistic(Counter(decode(rule, policy, seed, True)[0] for seed in range(TEXTS))) > LIMIT
