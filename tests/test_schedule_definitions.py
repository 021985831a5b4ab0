"""Schedules by definition: everything that can be built can be named, and a mistake is answered with its place."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.definitions import POLICY_TYPES, define_schedule, make_policy
from scheduler.schedule import Action
from tree.policies.adaptive_shape import AdaptiveShape, Shape
from tree.policies.eagle import Eagle
from tree.retrieval import PruneGraft

DRAFTERS = ("ngram", "small", "medium")
EXAMPLES: dict[str, dict[str, Any]] = {
    "iid": {"num_paths": 2, "length": 2},
    "delayed": {"num_paths": 2, "trunk": 1, "branch": 2},
    "without_replacement": {"widths": [2, 1]},
    "prune_graft": {"base": {"policy": "talon", "budget": 9, "first_width": 2}},
}


def defined(**changes: Any) -> Any:
    values = {"policy": "eagle", "options": {}, "plan": "M*", "drafters": {}, "available": DRAFTERS} | changes
    return define_schedule("mine", **values)


@pytest.mark.parametrize("policy", POLICY_TYPES)
def test_every_policy_can_be_named(policy: str) -> None:
    """A policy that exists but cannot be switched on is dead code."""
    schedule = defined(policy=policy, options=EXAMPLES.get(policy, {}), plan="MMS")
    assert schedule.budget >= 1 and schedule.drafters == {Action.MEDIUM: "medium", Action.SMALL: "small"}


def test_options_reach_the_policy() -> None:
    """Lists stand for tuples, integers for floats, objects for records and for policies inside policies."""
    assert make_policy("eagle", {"width": 3, "depth": 2, "budget": 7}) == Eagle(3, 2, 7)
    shaped = make_policy("adaptive_shape", {"sure": {"steps": 4, "width": 1, "nodes": 5}, "weight": 1})
    assert isinstance(shaped, AdaptiveShape) and shaped.sure == Shape(4, 1, 5) and shaped.weight == 1.0
    grafted = make_policy("prune_graft", {"base": {"policy": "eagle", "budget": 7}, "retriever": "ngram"})
    assert isinstance(grafted, PruneGraft) and grafted.budget == 7


def test_drafters_of_a_plan() -> None:
    """Only the letters of the plan need a drafter behind them; treegraft learns both names."""
    schedule = defined(policy="treegraft", plan="MS", drafters={"S": "ngram"})
    assert schedule.drafters == {Action.SMALL: "ngram", Action.MEDIUM: "medium"}
    assert schedule.policy.small == "ngram" and schedule.policy.medium == "medium"
    assert defined(plan="S*", available=["small"]).drafters == {Action.SMALL: "small"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "oak"}, "policy 'oak' is not one of chain"),
        ({"options": {"wdith": 3}}, "options.wdith is unknown; there are width"),
        ({"options": {"width": "3"}}, "options.width must be int, not '3'"),
        ({"options": {"width": True}}, "options.width must be int"),
        ({"options": {"width": 0}}, "width must be at least 1"),
        ({"policy": "without_replacement", "options": {"widths": 2}}, "options.widths must be a list"),
        ({"policy": "without_replacement", "options": {"widths": [2, "x"]}}, r"options.widths\[1\] must be int"),
        ({"policy": "treegraft", "options": {"pool": "mine"}, "plan": "MS"}, "options.pool must be one of 'paper'"),
        ({"policy": "prune_graft", "options": {"base": 3}}, "options.base must name a policy"),
        ({"policy": "adaptive_shape", "options": {"sure": 3}}, "options.sure must be an object"),
        ({"plan": "XM"}, "letters must be N, S, M, B or V"),
        ({"drafters": {"M": "large"}}, "'large' is not one of this server's: ngram, small, medium"),
        ({"drafters": {"Q": "small"}}, "'Q' is not a letter"),
        ({"available": ["ngram"]}, "'medium' is not one of this server's: ngram"),
    ],
)
def test_mistakes_are_answered_with_their_place(changes: dict[str, Any], message: str) -> None:
    """A definition is written by hand; "TypeError" would not help its writer."""
    with pytest.raises(ValueError, match=message) as caught:
        defined(**changes)
    assert str(caught.value).startswith("schedule 'mine': ")
