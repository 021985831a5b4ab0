"""Schedules: how a tree grows, who drafts at which step, how much is verified and by which rule.

A schedule is chosen per server and per request. Plain decoding is the schedule whose plan says STOP at once; comparing two
ways of speculating is comparing two schedules. Nothing in the decoding loop knows any of their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from scheduler.rule import Rule
from tree.graft import TreeGraft
from tree.growth import Policy

WORD = r"[NSMBV]*\.*|[NSMBV]+\*"
"""Pattern of a plan's letters."""


class Action(Enum):
    """What happens next to one tree."""

    LOOKUP = "N"
    SMALL = "S"
    MEDIUM = "M"
    BEST = "B"  # whichever of the schedule's drafters is worth most beyond its price
    VALUE = "V"  # the medium drafter where the schedule's rule says that its call is worth it, else the small one
    STOP = "."


@dataclass(frozen=True, slots=True)
class Signals:
    """What a plan may look at before it decides. All of it is known before the next drafting step begins."""

    step: int  # drafting steps already decided in this decoding step
    num_nodes: int  # of the tree so far, root included
    budget: int  # nodes that will be verified at most, root included


class Plan(Protocol):
    """Decides, drafting step by drafting step, who goes on with a tree."""

    def decide(self, signals: Signals) -> Action:
        """The next action; after STOP it is not asked again in this decoding step."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word over {N, S, M, B, V}, one letter per drafting step (TreeGraft, 2608.26112); `MSM..` stops after three.

    A star repeats the letter before it for ever: `SM*` asks the small drafter once and then the medium one.
    """

    letters: str

    def __post_init__(self) -> None:
        if not re.fullmatch(WORD, self.letters):
            raise ValueError(f"plan {self.letters!r}: letters must be N, S, M, B or V; '.' or one '*' may come at the end")

    def decide(self, signals: Signals) -> Action:
        """The letter of this step; STOP past the end."""
        letters = self.letters
        if letters.endswith("*"):
            return Action(letters[min(signals.step, len(letters) - 2)])
        return Action(letters[signals.step]) if signals.step < len(letters) else Action.STOP


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named way to speculate. `drafters` maps the actions its plan uses to drafter names."""

    name: str
    description: str
    policy: Policy
    plan: Plan
    drafters: Mapping[Action, str] = field(default_factory=dict)
    greedy_verifier: str = "greedy"  # names of decision rules, at temperature 0 and above it
    sampling_verifier: str = "walk"
    fixed_plan: Plan | None = None  # the plan where prices do not decide; None: the same
    rule: Rule | None = None  # what a V in the plan goes by
    is_auto: bool = False  # how much is drafted and verified follows from prices, and `budget` is the most

    def __post_init__(self) -> None:
        """ValueError for a plan by a rule that is not there, or for trees that say nothing to it."""
        words = [plan.letters for plan in (self.plan, self.fixed_plan) if isinstance(plan, Word)]
        if any(Action.VALUE.value in word for word in words):
            if self.rule is None:
                raise ValueError("plan: there is no rule for V to go by, see the setting `rule`")
            if not isinstance(self.policy, TreeGraft) or not {Action.SMALL, Action.MEDIUM} <= set(self.drafters):
                raise ValueError("plan: V chooses between a small and a medium drafter of policy treegraft")

    @property
    def budget(self) -> int:
        """Nodes verified per step at most, root included; 1 is plain decoding."""
        return self.policy.budget

    def with_budget(self, budget: int) -> Schedule:
        """The same schedule with a budget that holds whatever it costs; ValueError below 1."""
        if budget < 1:
            raise ValueError(f"budget must be at least 1 (the root), got {budget}")
        return replace(self, policy=self.policy.with_budget(budget), is_auto=False)
