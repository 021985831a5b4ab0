"""The schedules a server offers, given the drafters it has."""

from __future__ import annotations

from dataclasses import replace

from scheduler.rule import Rule
from scheduler.schedule import Action, Schedule, Word
from scheduler.selected import Selected
from scheduler.selector import Selector
from tree.graft import TreeGraft
from tree.policies.adaptive_shape import AdaptiveShape
from tree.policies.chain import Chain
from tree.policies.talon import Talon

PLAIN = "ar"
"""The schedule without speculation."""
BY_WORTH, WITHOUT_PRICES = "B*", "MSM"
"""Plans of `treegraft`."""
_LONGEST_CHAIN = 8


def build_schedules(
    *,
    small: str,
    medium: str | None,
    budget: int,
    word: str | None = None,
    ngram: str = "ngram",
    is_auto: bool = False,
    min_expansion: float = 0.0,
    width: int = 4,
    rule: Rule | None = None,
    selector: Selector | None = None,
) -> dict[str, Schedule]:
    """Every schedule that `small`, `medium` and `ngram` (names of drafters) can serve, by schedule name.

    `small` may be the n-gram drafter itself. `budget` is the number of verified nodes per step, root included; with `is_auto`
    it is the most, and prices decide. `min_expansion` is the path probability below which drafters do not look further;
    `width` are the nodes expanded per drafting step and their children; `word` is the plan of `treegraft`; None: by worth
    where prices are known, else a fixed one. `rule` is what `guided` goes by and `selector` what `nde` goes
    by, which are left out without one.
    Without a medium drafter the schedules that need one are left out, and so are a model's where the small drafter is none.
    """
    graft = TreeGraft(
        steps=8,
        frontier=width,
        width=width,
        budget=budget,
        min_expansion=min_expansion,
        small=small,
        medium=medium or "medium",
        lookup=ngram if small != ngram else None,
    )
    schedules = [
        Schedule(PLAIN, "plain decoding, no speculation", Chain(0), Word("")),
        Schedule(
            "ngram",
            "prompt lookup: continuations of what the text has said before; costs no forward",
            replace(graft, small=ngram, lookup=None),
            Word("S*"),
            {Action.SMALL: ngram},
        ),
        Schedule("small", "the small drafter alone", graft, Word("S*"), {Action.SMALL: small}),
    ]
    chain = Chain(min(budget - 1, _LONGEST_CHAIN))
    talon = Talon(budget=budget, first_width=min(10, max(budget // 4, 1)), depth_cap=16)
    if small != ngram:
        drafter = {Action.SMALL: small}
        schedules += [
            Schedule("chain-small", "one token after another from the small drafter", chain, Word("S*"), drafter),
            Schedule(
                "talon-small",
                "the small drafter alone, tree shape gated by its confidence (arXiv 2601.07353)",
                talon,
                Word("S*"),
                drafter,
            ),
        ]
    if medium is not None:
        neural = {Action.MEDIUM: medium}
        lookup = {Action.LOOKUP: ngram} if small != ngram else {}
        schedules += [
            Schedule("medium", "the medium drafter alone", graft, Word("M*"), neural),
            Schedule("chain-medium", "one token after another from the medium drafter", chain, Word("M*"), neural),
            Schedule(
                "talon",
                "the medium drafter alone, tree shape gated by its confidence (arXiv 2601.07353)",
                talon,
                Word("M*"),
                neural,
            ),
            Schedule(
                "adaptive",
                "the medium drafter alone, tree shape by its confidence and what was accepted lately (arXiv 2609.02897)",
                AdaptiveShape(),
                Word("M*"),
                neural,
            ),
            Schedule(
                "treegraft",
                "all drafters on one tree, whoever is worth most next (arXiv 2608.26112)",
                graft,
                Word(word or BY_WORTH),
                {**lookup, Action.SMALL: small, Action.MEDIUM: medium},
                fixed_plan=Word(word or WITHOUT_PRICES),
            ),
        ]
        if selector is not None:
            schedules.append(
                Schedule(
                    "nde",
                    "the medium drafter alone, drawn trees whose shape a trained network picks (arXiv 2602.16994)",
                    Selected(selector, limit=budget),
                    Word("M*"),
                    neural,
                    sampling_verifier=selector.config.verifier,
                )
            )
        if rule is not None and small != ngram:
            schedules.append(
                Schedule(
                    "guided",
                    "all drafters on one tree, the medium where a fitted rule says that it pays (arXiv 2608.26112)",
                    replace(graft, steps=rule.steps),
                    Word("V*"),
                    {**lookup, Action.SMALL: small, Action.MEDIUM: medium},
                    rule=rule,
                )
            )
    # There is nothing to price in plain decoding, and what is drawn must not be left out for its price.
    fixed = {one.name for one in schedules if one.name == PLAIN or isinstance(one.policy, Selected)}
    return {one.name: replace(one, is_auto=is_auto and one.name not in fixed) for one in schedules}


def check_budget(value: int, largest: int, *, name: str = "budget") -> None:
    """ValueError, naming the setting, for a budget that no step could verify."""
    if not 1 <= value <= largest:
        raise ValueError(f"{name} must be between 1 (the root alone) and {largest}, got {value}")
