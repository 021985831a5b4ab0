"""Schedules that a user puts together: any tree policy, on any drafters, verified by any rule.

A definition names a policy with its options, a plan and the drafters behind the plan's letters::

    {"policy": "eagle", "options": {"width": 4, "depth": 3, "budget": 9}, "plan": "M*"}
    {"policy": "iid", "options": {"num_paths": 2, "length": 3}, "plan": "S*", "verifier": "traversal"}
    {"policy": "prune_graft", "options": {"base": {"policy": "talon", "budget": 9}}, "plan": "MMMMS",
     "drafters": {"S": "ngram"}}

`S*` and `M*` ask one drafter until the policy has had enough. What the rules think of the trees is checked by the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, Union, get_args, get_origin, get_type_hints

from scheduler.rule import Rule
from scheduler.schedule import Action, Schedule, Word
from tree.graft import TreeGraft
from tree.growth import Policy
from tree.policies.adaptive_shape import AdaptiveShape, Shape, ShapeHistory
from tree.policies.chain import Chain
from tree.policies.eagle import Eagle
from tree.policies.fixed import Fixed, Template
from tree.policies.one_sampled import OneSampled
from tree.policies.opt_tree import OptTree
from tree.policies.sampled import Delayed, Iid, WithoutReplacement
from tree.policies.sequoia import Sequoia
from tree.policies.talon import Talon
from tree.retrieval import PruneGraft

POLICY_TYPES: dict[str, type[Any]] = {
    "chain": Chain,
    "fixed": Fixed,
    "template": Template,
    "eagle": Eagle,
    "talon": Talon,
    "opt_tree": OptTree,
    "sequoia": Sequoia,
    "adaptive_shape": AdaptiveShape,
    "iid": Iid,
    "delayed": Delayed,
    "without_replacement": WithoutReplacement,
    "one_sampled": OneSampled,
    "treegraft": TreeGraft,
    "prune_graft": PruneGraft,
}
"""Every tree policy by the name that a definition gives it."""

_RECORDS: tuple[type[Any], ...] = (Shape, ShapeHistory)


def define_schedule(
    name: str,
    *,
    policy: str,
    options: Mapping[str, Any],
    plan: str,
    drafters: Mapping[str, str],
    available: Collection[str],
    verifier: str = "walk",
    greedy_verifier: str = "greedy",
    description: str = "",
    auto: bool = False,
    rule: Rule | None = None,
) -> Schedule:
    """The schedule `name`. `drafters` maps the letters S and M to names of the `available` drafters; V goes by `rule`.

    Raises ValueError, naming the schedule and the part of its definition, for what does not exist or does not fit.
    """
    try:
        actions = _actions(plan, drafters, available)
        extra = {}
        if policy == "treegraft":
            extra = {letter: drafters.get(sign, letter) for sign, letter in (("S", "small"), ("M", "medium"))}
            extra["lookup"] = drafters.get("N", "ngram" if "ngram" not in extra.values() else None)  # type: ignore[arg-type]
        return Schedule(
            name,
            description or f"{policy}, plan {plan}, verified by {verifier}",
            make_policy(policy, {**options, **extra}),
            Word(plan),
            actions,
            greedy_verifier,
            verifier,
            rule=rule,
            is_auto=auto,
        )
    except ValueError as error:
        raise ValueError(f"schedule {name!r}: {error}") from error


def make_policy(kind: str, options: Mapping[str, Any]) -> Policy:
    """A policy with the given options, lists standing for tuples; ValueError that names what is wrong."""
    if kind not in POLICY_TYPES:
        raise ValueError(f"policy {kind!r} is not one of {', '.join(POLICY_TYPES)}")
    return _record(POLICY_TYPES[kind], options, "options")  # type: ignore[no-any-return]


def _actions(plan: str, drafters: Mapping[str, str], available: Collection[str]) -> dict[Action, str]:
    """Names by action, for the letters that the plan uses."""
    names = {"N": "ngram", "S": "small", "M": "medium"}
    unknown = sorted(set(drafters) - set(names))
    if unknown:
        raise ValueError(f"drafters: {unknown[0]!r} is not a letter of a plan, which are {', '.join(names)}")
    letters = set(plan) & set(names)
    if "B" in plan:  # the best of those named, or of both models
        letters |= set(drafters) or {"S", "M"}
    if "V" in plan:
        letters |= {*drafters, "S", "M"}
    actions = {}
    for letter in sorted(letters):
        drafter = drafters.get(letter, names[letter])
        if drafter not in available:
            raise ValueError(f"drafters: {drafter!r} is not one of this server's: {', '.join(available)}")
        actions[Action(letter)] = drafter
    return actions


def _record(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """A dataclass from a mapping, every value checked against its annotation."""
    hints = get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            raise ValueError(f"{where}.{key} is unknown; there are {', '.join(known) or 'none'}")
    return kind(**{key: _value(hints[key], value, f"{where}.{key}") for key, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint` asks for; ValueError if it is another."""
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} must be a list, not {value!r}")
        return tuple(_value(parts[0], part, f"{where}[{index}]") for index, part in enumerate(value))
    if get_origin(hint) in (Union, type(int | None)):
        if value is None and NoneType in get_args(hint):
            return None
        return _value(next(part for part in get_args(hint) if part is not NoneType), value, where)
    if hint is Policy:
        if not isinstance(value, Mapping) or "policy" not in value:
            raise ValueError(f"{where} must name a policy: {{'policy': …}}")
        return make_policy(value["policy"], {key: v for key, v in value.items() if key != "policy"})
    if hint in _RECORDS:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, not {value!r}")
        return _record(hint, value, where)
    return _plain(hint, value, where)


def _plain(hint: Any, value: Any, where: str) -> Any:
    choices = get_args(hint)  # of a Literal
    if choices:
        if value not in choices:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} must be {hint.__name__}, not {value!r}")
    return value
