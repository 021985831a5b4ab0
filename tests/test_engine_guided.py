"""Plans with a V: a fitted rule says when the medium drafter is called, lookups come first, and the text is the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from app.build import build
from app.config import Settings
from models.toy import byte_tokenizer, tiny_causal_lm
from scheduler.features import FEATURES
from scheduler.registry import build_schedules
from scheduler.rule import Rule, Split
from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import World, greedy_reference
from tests.test_engine_auto import FREE, prices
from tree.graft import TreeGraft
from tree.policies.chain import Chain

TinyModel = Callable[..., PreTrainedModel]
PROMPT = [7, 3, 7, 3, 7, 3, 9, 7]
BOTH = {Action.LOOKUP: "ngram", Action.SMALL: "small", Action.MEDIUM: "medium"}
DEEP = Split(FEATURES.index("step_share"), 0.3, True, False)


def guided(rule: Rule, *, is_auto: bool = False, **drafters: Any) -> Schedule:
    policy = TreeGraft(steps=rule.steps, frontier=2, width=2, budget=12, lookup="ngram")
    return Schedule("guided", "test", policy, Word("V*"), drafters.get("drafters", BOTH), rule=rule, is_auto=is_auto)


def world(tiny_model: TinyModel, rule: Rule, *, is_auto: bool = False) -> World:
    small = tiny_model("llama", seed=1)
    target = tiny_model("llama")
    schedules = [guided(rule, is_auto=is_auto)]
    return World(target, small=small, medium=target, schedules=schedules, auto=prices(FREE) if is_auto else None)


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize(
    ("rule", "least", "most"),
    [
        (Rule(False), 0, 0),
        (Rule(True, max_calls=1), 1, 1),
        (Rule(True, max_calls=5, steps=2), 1, 2),
        (Rule(DEEP, steps=3), 1, 2),  # not before the first drafting step is over
    ],
)
def test_the_rule_decides_how_often_the_medium_is_called(
    rule: Rule, least: int, most: int, is_auto: bool, tiny_model: TinyModel
) -> None:
    """Per step that drafts, and no price overrules it. The text is the target's own in any case."""
    with world(tiny_model, rule, is_auto=is_auto) as running:
        reply = running.run(PROMPT, "guided", max_tokens=30)
    assert reply.tokens == greedy_reference(tiny_model("llama"), PROMPT, 30)
    count = reply.stats.drafters["medium"]
    steps = reply.stats.num_steps - sum(count.skips.get(reason, 0) for reason in ("prompt", "end"))
    assert least * (steps - 1) <= count.calls <= most * steps, f"{count} in {steps} steps"


def test_a_rule_that_waits_leaves_the_first_step_to_the_small_drafter(tiny_model: TinyModel) -> None:
    """Then the medium finds its tree, and rescores it."""
    with world(tiny_model, Rule(DEEP, steps=2)) as running:
        reply = running.run(PROMPT, "guided", max_tokens=30)
    small, medium = (reply.stats.drafters[name] for name in ("small", "medium"))
    assert small.calls >= medium.calls > 0


def test_lookups_come_before_any_model(tiny_model: TinyModel) -> None:
    """They cost nothing, and their nodes are part of what the rule looks at."""
    seen = Split(FEATURES.index("num_nodes"), 0.5, False, True)  # call only where lookup found nothing
    few = 6  # tokens, so that everything has been said before
    target, small = tiny_model("llama", few, 3), tiny_model("llama", few, 4)
    with World(target, small=small, medium=target, schedules=[guided(Rule(seen, steps=1))]) as running:
        reply = running.run([1, 2] * 6, "guided", max_tokens=40)
    assert reply.tokens == greedy_reference(tiny_model("llama", few, 3), [1, 2] * 6, 40)
    ngram, medium = (reply.stats.drafters[name] for name in ("ngram", "medium"))
    assert ngram.calls > reply.stats.num_steps / 2 > medium.calls, "lookup has something in most steps"


def test_without_a_rule_there_is_no_plan_with_a_v() -> None:
    """Said when the schedule is made, not when the first request comes."""
    with pytest.raises(ValueError, match="rule"):
        Schedule("s", "test", TreeGraft(), Word("V*"), BOTH)
    with pytest.raises(ValueError, match="treegraft"):
        Schedule("s", "test", Chain(3), Word("V*"), BOTH, rule=Rule(True))
    with pytest.raises(ValueError, match="treegraft"):
        Schedule("s", "test", TreeGraft(), Word("SV"), {Action.SMALL: "small"}, rule=Rule(True))


def test_guided_is_offered_where_there_is_a_rule_and_two_models() -> None:
    """And nowhere else."""
    assert build_schedules(small="small", medium="medium", budget=8, rule=Rule(True, steps=2))["guided"].policy.steps == 2  # type: ignore[attr-defined]
    assert "guided" not in build_schedules(small="small", medium="medium", budget=8)
    assert "guided" not in build_schedules(small="ngram", medium="medium", budget=8, rule=Rule(True))
    assert "guided" not in build_schedules(small="small", medium=None, budget=8, rule=Rule(True))


@pytest.mark.parametrize("content", [None, "{}", '{"format": "x", "version": 1}'])
def test_a_rule_file_that_is_none_is_refused_by_the_name_of_the_setting(content: str | None, tmp_path: Any) -> None:
    """A server that silently went without it would be another one than was asked for."""
    file = tmp_path / "rule.json"
    if content is not None:
        file.write_text(content)
    settings = Settings(target=str(_tiny_folder(tmp_path)), small="ngram", medium=None, rule=str(file), costs="none")
    with pytest.raises(ValueError, match="rule = "):
        build(settings, lambda line: None)


def test_adaptive_shapes_are_a_schedule(tiny_model: TinyModel) -> None:
    """With its own memory of what was accepted, per text."""
    target = tiny_model("llama")
    with World(target, small=tiny_model("llama", seed=1), medium=target) as running:
        first, second = running.run_all([PROMPT, PROMPT], "adaptive", max_tokens=30)
    assert first.tokens == second.tokens == greedy_reference(tiny_model("llama"), PROMPT, 30)
    assert first.stats.num_steps < 15, "its medium is the target itself"


def _tiny_folder(where: Any) -> Any:
    folder = where / "model"
    tiny_causal_lm("llama", 259, 0).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
