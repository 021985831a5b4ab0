"""Sampled trees and ratio rules through the engine: the text's law is the target's, and wrong pairs never start."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import chi2
from transformers import PreTrainedModel

from engine.engine import Engine
from scheduler.schedule import Action, Schedule, Word
from scheduler.selected import Selected
from scheduler.selector import SCALARS, Selector, SelectorConfig
from tests.engine_world import World
from tree.growth import Policy
from tree.policies.chain import Chain
from tree.policies.one_sampled import OneSampled
from tree.policies.sampled import Delayed, Iid, WithoutReplacement

TinyModel = Callable[..., PreTrainedModel]



class Moody(Selector):
    """Paths side by side where the drafter is unsure at the root, one path where it is not."""

    def select(self, features: Sequence[float], hidden: Sequence[torch.Tensor] = (), *, budget: int | None = None) -> Delayed:
        return Delayed(2, 0, 2) if features[SCALARS.index("root_entropy")] > 0.9 else Delayed(1, 2, 0)


SHAPES: dict[str, tuple[Policy, tuple[str, ...]]] = {
    "iid": (Iid(2, 2), ("walk", "naive", "specinfer", "spectr", "khisti", "traversal")),
    "delayed": (Delayed(2, 1, 2), ("walk", "naive", "specinfer", "spectr", "khisti", "traversal")),
    "chain": (Delayed(1, 3, 0), ("walk", "naive", "block", "traversal")),
    "distinct": (WithoutReplacement((2, 2)), ("walk", "specinfer-distinct", "traversal")),
    "selected": (Selected(Moody(SelectorConfig("specinfer")), 6), ("walk", "specinfer", "traversal")),
    "one-sampled": (OneSampled(2, 2, 2, 8), ("walk", "naive")),
}
PAIRS = [(shape, rule) for shape, (_, rules) in SHAPES.items() for rule in rules]
VOCAB, LENGTH, PROMPT = 3, 3, [1]  # a prompt of one token: the first step has a tree already


def sampled(shape: str, rule: str) -> Schedule:
    policy = SHAPES[shape][0]
    return Schedule("sampled", "test", policy, Word("M*"), {Action.MEDIUM: "medium"}, sampling_verifier=rule)


@pytest.mark.parametrize(("shape", "rule"), PAIRS)
def test_text_is_plain_at_zero_and_has_the_targets_law_above(tiny_model: TinyModel, shape: str, rule: str) -> None:
    """A rule fed with the wrong rows, or with numbers that the drafts were drawn with, changes the law of the text.

    600 answers with fixed seeds: nothing here is random from run to run. Had the seeds been others, this would be a false
    alarm once in a thousand.
    """
    target, medium = tiny_model("llama", VOCAB, 6), tiny_model("llama", VOCAB, 7)
    law = _law(target)
    with World(target, medium=medium, schedules=[sampled(shape, rule)]) as world:
        assert world.run(PROMPT, "sampled", max_tokens=40).tokens == world.run(PROMPT, "ar", max_tokens=40).tokens
        seen = _sample(world, "sampled")
        assert world.run(PROMPT, "sampled", temperature=1.0, max_tokens=40).stats.num_accepted > 0, "nothing was tested"
    assert _p_value(seen, law) > 0.001


def test_the_law_test_notices_a_rule_on_the_wrong_tree(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows that are not those the children were drawn from must fail the same test."""
    import drafters.reading

    exact = drafters.reading._rows_to_draw_from
    monkeypatch.setattr(drafters.reading, "_rows_to_draw_from", lambda *a: torch.roll(exact(*a), 1, dims=-1).clone())
    target, medium = tiny_model("llama", VOCAB, 6), tiny_model("llama", VOCAB, 7)
    with World(target, medium=medium, schedules=[sampled("iid", "naive")]) as world:
        right = _p_value(_sample(world, "sampled"), _law(target))
    assert right > 0.001, "rows that are drawn from AND divided by stay exact, whatever they are"

    import tree.policies.sampled as policies

    record = policies.record_draws
    monkeypatch.setattr(
        policies, "record_draws", lambda t, node, tokens, q, name: record(t, node, tokens, torch.roll(q, 1), name)
    )
    with World(target, medium=medium, schedules=[sampled("iid", "naive")]) as world:
        wrong = _p_value(_sample(world, "sampled"), _law(target))
    assert wrong < 1e-6


@pytest.mark.parametrize(
    ("policy", "rule", "reason"),
    [
        (Chain(2), "naive", "chosen and not drawn"),
        (Iid(2, 2), "specinfer-distinct", "repeat"),
        (WithoutReplacement((2,)), "spectr", "not drawn from q alone"),
        (Iid(2, 2), "block", "chains only"),
        (Delayed(2, 1, 1), "block", "chains only"),
        (WithoutReplacement((1, 2)), "block", "chains only"),
        (Chain(2), "greedy", "does not decide above temperature 0"),
        (Chain(2), "gready", "is not one of"),
    ],
)
def test_a_wrong_pair_is_refused_before_anything_is_served(
    tiny_model: TinyModel, policy: Policy, rule: str, reason: str
) -> None:
    """Such a schedule would write another law than the target's, and nobody would notice."""
    wrong = Schedule("wrong", "test", policy, Word("M*"), {Action.MEDIUM: "medium"}, sampling_verifier=rule)
    model = tiny_model("llama", VOCAB, 6)
    with pytest.raises(ValueError, match=reason) as caught:
        World(model, medium=model, schedules=[wrong])
    assert "wrong" in str(caught.value)


def test_a_lossy_rule_needs_leave(tiny_model: TinyModel) -> None:
    """Lossless is the default: a rule that changes the text must not start by a mistake in a schedule."""
    model = tiny_model("llama", VOCAB, 6)
    lossy = Schedule("l", "test", Chain(2), Word("M*"), {Action.MEDIUM: "medium"}, greedy_verifier="margin")
    with pytest.raises(ValueError, match="allow_lossy"):
        World(model, medium=model, schedules=[lossy])
    world = World(model, medium=model, schedules=[lossy], allow_lossy=True)
    with pytest.raises(ValueError, match="cannot be the default"):
        Engine(
            target=world.lm,
            drafters=world.drafters,
            schedules=world.schedules,
            default_schedule="l",
            decode=str,
            stop_tokens=frozenset(),
            model_id="toy",
            allow_lossy=True,
        )


def _sample(world: World, schedule: str, count: int = 600) -> Counter[tuple[int, ...]]:
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(0, count, 60):
        waiting = [
            world.submit(PROMPT, schedule, temperature=1.0, seed=start + i, max_tokens=LENGTH) for i in range(60)
        ]
        seen.update(tuple(pending.result().tokens) for pending in waiting)
    return seen


def _p_value(seen: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    assert set(seen) <= set(law)
    total = sum(seen.values())
    statistic = sum((seen[text] - total * p) ** 2 / (total * p) for text, p in law.items())
    return float(chi2.sf(statistic, len(law) - 1))


def _law(model: PreTrainedModel) -> dict[tuple[int, ...], float]:
    """Probability of every text of LENGTH tokens."""

    def rest(tokens: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        if len(tokens) == LENGTH:
            return {tokens: 1.0}
        with torch.inference_mode():
            row = torch.softmax(model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1].double(), -1).tolist()
        return {text: p * q for t, p in enumerate(row) for text, q in rest((*tokens, t)).items()}

    law = rest(())
    assert math.isclose(sum(law.values()), 1.0, rel_tol=1e-9)
    return law
