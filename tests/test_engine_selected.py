"""Trees whose shape a network picks at every step: what it is told, what is drawn, and that the text stays the target's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from app.build import build
from app.config import Settings
from engine.admission import is_lossless, keeps_seeded_text
from models.toy import byte_tokenizer, tiny_causal_lm
from scheduler.registry import build_schedules
from scheduler.schedule import Action, Schedule, Word
from scheduler.selected import SERVED, Facts, Selected
from scheduler.selector import SCALARS, SHAPES, Selector, SelectorConfig
from tests.engine_world import World, greedy_reference
from tests.test_engine_auto import prices
from tree.growth import Answer
from tree.policies.sampled import Delayed

TinyModel = Callable[..., PreTrainedModel]
PROMPT = [7, 3, 7, 3, 7, 3, 9, 7]


class Told(Selector):
    """Picks one shape, if there is room for it, and remembers what it was told."""

    def __init__(self, shape: Delayed) -> None:
        super().__init__(SelectorConfig("specinfer", inputs=SERVED))
        torch.nn.init.zeros_(self.body[-1].weight)  # type: ignore[arg-type]
        self.body[-1].bias.data[SHAPES.index(shape)] = 1.0  # type: ignore[union-attr, operator]
        self.rows: list[tuple[float, ...]] = []

    def select(
        self, features: Sequence[float], hidden: Sequence[torch.Tensor] = (), *, budget: int | None = None
    ) -> Delayed:
        self.rows.append(tuple(features))
        return super().select(features, hidden, budget=budget)


def world(tiny_model: TinyModel, selector: Selector, limit: int = 41, **options: object) -> World:
    policy = Selected(selector, limit)
    drafter = {Action.MEDIUM: "medium"}
    schedule = Schedule("nde", "test", policy, Word("M*"), drafter, sampling_verifier="specinfer")
    target = tiny_model("llama")
    return World(target, medium=target, schedules=[schedule], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [Delayed(1, 0, 0), Delayed(1, 3, 0), Delayed(3, 1, 2), Delayed(2, 0, 4)])
def test_the_shape_that_was_picked_is_drawn(shape: Delayed, tiny_model: TinyModel) -> None:
    """No more forwards than it has layers, but one where nothing is drawn: that is how the drafter's row is known."""
    selector = Told(shape)
    with world(tiny_model, selector) as running:
        reply = running.run(PROMPT, "nde", max_tokens=30)
    assert reply.tokens == greedy_reference(tiny_model("llama"), PROMPT, 30)
    count, steps = reply.stats.drafters["medium"], len(selector.rows)
    assert steps > 0 and count.forwards <= steps * max(shape.trunk + shape.branch, 1)
    assert count.drafted <= steps * (shape.budget - 1)
    assert (count.drafted > 0) is (shape.budget > 1)


def test_the_network_is_told_what_the_server_knows(tiny_model: TinyModel) -> None:
    """Entropies of both models, settings and prices; what is not known is as usual in training."""
    selector = Told(Delayed(1, 2, 0))
    selector.center.copy_(torch.arange(float(len(SCALARS))))
    with world(tiny_model, selector, auto=prices(2.0)) as running:
        reply = running.run(PROMPT, "nde", temperature=0.7, seed=1, max_tokens=20)
    assert len(reply.tokens) == 20
    rows = [dict(zip(SCALARS, row, strict=True)) for row in selector.rows]
    for row in rows:
        assert row["temperature"] == 0.7 and row["top_p"] == 1.0
        assert row["log_draft_ms"] == pytest.approx(math.log(2.0), abs=0.01)
        assert row["log_target_ms"] == pytest.approx(math.log(10.0))
        assert all(row[name] == SCALARS.index(name) for name in SCALARS if name not in SERVED)
        assert 0.0 <= row["target_entropy"] <= math.log(256) and 0.0 < row["root_entropy"] <= math.log(256)
    contexts = [round(math.expm1(row["log_context"])) for row in rows]
    assert contexts == sorted(contexts) and contexts[0] > len(PROMPT)
    # The drafter is the target, so its entropy at a root is the target's where the first child stands.
    assert len({row["root_entropy"] for row in rows}) > 5


def test_a_limit_bounds_the_shape(tiny_model: TinyModel) -> None:
    """Drawn trees must not be cut afterwards, so the network chooses among those that fit."""
    selector = Told(Delayed(4, 0, 8))
    with world(tiny_model, selector, limit=5) as running:
        reply = running.run(PROMPT, "nde", max_tokens=20)
        one = running.run(PROMPT, "nde", max_tokens=6, budget=1)
    assert max(reply.stats.drafted, default=0) <= 4
    assert one.stats.num_drafted == 0 and one.tokens == reply.tokens[:6]


def test_without_a_usable_row_nothing_is_drawn() -> None:
    """A drafter with no distribution, or a broken one: plain decoding, and the network is not asked."""
    selector = Told(Delayed(1, 2, 0))
    for row in (None, torch.tensor([math.nan, 1.0]), torch.zeros(2)):
        growth = Selected(selector, 8).begin(0, vocab_size=2, uniform=lambda depth, index: 0.5)
        assert growth.ask("medium") is not None
        growth.attach("medium", Answer({}, {}, {} if row is None else {0: row}))
        assert growth.ask("medium") is None and growth.verify_nodes() == [0]
    assert not selector.rows


def test_facts_that_are_not_known_are_as_usual() -> None:
    """The network has learned around its training means; zeros would be a place that it has never seen."""
    usual = torch.arange(float(len(SCALARS)))
    row = dict(zip(SCALARS, Facts(context=9).features(0.25, usual), strict=True))
    assert row["root_entropy"] == 0.25 and row["log_context"] == pytest.approx(math.log(10))
    assert row["target_entropy"] == SCALARS.index("target_entropy")


def test_inputs_that_a_network_does_not_look_at_change_nothing() -> None:
    """Else what cannot be known while serving would decide all the same."""
    torch.manual_seed(3)
    selector = Selector(SelectorConfig("walk", inputs=SERVED)).eval()
    torch.nn.init.normal_(selector.body[-1].weight)  # type: ignore[arg-type]
    row = torch.randn(1, len(SCALARS))
    unseen = [index for index, name in enumerate(SCALARS) if name not in SERVED]
    other, seen = row.clone(), row.clone()
    other[:, unseen] += 5.0
    seen[:, SCALARS.index("root_entropy")] += 5.0
    assert torch.equal(selector(row), selector(other)) and not torch.equal(selector(row), selector(seen))
    with pytest.raises(ValueError, match="mood"):
        SelectorConfig("walk", inputs=("mood",))


def test_nde_is_offered_where_there_is_a_network() -> None:
    """With the rule that it was trained for; never sized by price, as what is drawn must not be left out."""
    found = build_schedules(
        small="small", medium="medium", budget=8, is_auto=True, selector=Selector(SelectorConfig("khisti"))
    )["nde"]
    assert found.sampling_verifier == "khisti" and found.budget == 8 and not found.is_auto
    assert is_lossless(found) and not keeps_seeded_text(found)
    assert "nde" not in build_schedules(small="small", medium="medium", budget=8)


def test_a_file_that_is_no_selector_is_refused_by_the_name_of_the_setting(tmp_path: Path) -> None:
    """Instead of a server without the schedule that was asked for."""
    folder = tmp_path / "model"
    tiny_causal_lm("llama", 259, 0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    for file in (folder / "model.safetensors", tmp_path / "nothing"):
        settings = Settings(target=str(folder), small="ngram", medium=None, selector=str(file), costs="none")
        with pytest.raises(ValueError, match="selector = "):
            build(settings, lambda line: None)
