"""docs/schedules.md, written from the code: schedules, plan letters, tree policies with their options, decision rules.

    graftserve docs schedules > docs/schedules.md

Names, defaults and the words about each option are taken from where they are defined, so the page cannot say anything else
than the program does. A test compares.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import Any, NamedTuple

from app.config import ScheduleDefinition
from scheduler.definitions import POLICY_TYPES
from scheduler.registry import WITHOUT_PRICES, build_schedules
from scheduler.rule import Rule
from scheduler.schedule import Action, Plan, Schedule, Word
from scheduler.selected import Selected
from scheduler.selector import Selector, SelectorConfig
from tree.draws import TreeKind
from tree.policies.adaptive_shape import Shape
from tree.policies.sampled import Delayed, SampledPolicy
from verify import EVERY_VERIFIER
from verify.base import Verifier

_HEAD = """# Schedules, policies, rules

<!-- Written by `graftserve docs schedules`; a test compares. -->

A *schedule* is a name for one way to speculate: a tree policy, a plan that says who drafts at which step, the drafters behind
the plan's letters, and the decision rules for temperature 0 and above. `GET /v1/schedules` lists those of a server, a request
picks one by `speculative.schedule`, and `--schedule` sets the default. [concepts.md](concepts.md) explains the words.
"""

_LETTERS = {
    Action.LOOKUP: "prompt lookup; takes no drafting step from the others",
    Action.SMALL: "the small drafter",
    Action.MEDIUM: "the medium drafter",
    Action.BEST: "whoever of the schedule's drafters is worth most beyond its price; nobody if none is",
    Action.VALUE: "the medium drafter where a fitted rule says that its call pays, else the small one; lookups before either",
    Action.STOP: "drafting ends; only at the end of a plan",
}

_PARTS = {
    "policy": "one of the tree policies below",
    "options": "the policy's options, by the names below; a list for several values, an object for a policy or a shape",
    "plan": "who drafts at each step, in the letters below",
    "drafters": "what N, S and M stand for: `ngram`, `small` or `medium`; unset, N is `ngram`, S is `small`, M is `medium`",
    "verifier": "the decision rule above temperature 0",
    "greedy_verifier": "the decision rule at temperature 0",
    "auto": "prices decide how much is drafted and verified, and the policy's budget is the most",
    "description": "what `GET /v1/schedules` says of it",
}

_EXAMPLE = """```sh
graftserve serve --define '{
  "eagle":  {"policy": "eagle", "options": {"width": 4, "depth": 3, "budget": 9}, "plan": "M*"},
  "sampled": {"policy": "delayed", "options": {"num_paths": 2, "trunk": 2, "branch": 2}, "plan": "S*", "verifier": "traversal"},
  "lookup-last": {"policy": "prune_graft", "options": {"base": {"policy": "talon", "budget": 9, "first_width": 2}},
                  "plan": "MMMMS", "drafters": {"S": "ngram"}}
}'
```"""


def reference() -> str:
    """The whole page, ending in a newline."""
    parts = [_HEAD, *_schedules(), *_definitions(), *_letters(), *_policies(), *_rules()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _schedules() -> Iterator[str]:
    selector = Selector(SelectorConfig("specinfer"))
    both = build_schedules(small="small", medium="medium", budget=16, is_auto=True, rule=Rule(True), selector=selector)
    yield "## Schedules that come with the server"
    yield _filled(
        "With a small and a medium drafter of their own. Where prices are known they decide how much is drafted and verified "
        "(`auto`), and the policy's budget is the most: 16 nodes on a CPU, 64 on an accelerator."
    )
    rows = [
        (f"`{name}`", one.description, f"`{_policy_name(one)}`", _plan(one), "yes" if one.is_auto else "no")
        for name, one in both.items()
    ]
    yield _table(("name", "who drafts", "policy", "plan", "auto"), rows)
    no_medium = build_schedules(small="small", medium=None, budget=16)
    no_small = build_schedules(small="ngram", medium="medium", budget=16)
    yield _filled(f"Without a medium drafter there are {', '.join(f'`{name}`' for name in no_medium)}.")
    names = ", ".join(f"`{name}`" for name in no_small)
    yield _filled(f"Without a small drafter of its own, where `small` is `ngram`, there are {names}.")
    yield _filled(
        "The plan of `treegraft` is the setting `plan`. Unset, it is the one above, and "
        f"`{WITHOUT_PRICES}` where no prices are known (`--costs none`, or a number as budget). The rule of `guided` is the "
        "setting `rule`, the network of `nde` the setting `selector`, both files of `graftserve fit-scheduler`. One of each "
        "comes with the shipped pair of drafters; without a rule there is no `guided`, without a network no `nde`."
    )


def _definitions() -> Iterator[str]:
    yield "## Schedules of your own"
    yield _filled(
        "`--define`, or `define` in the settings file (a table, or a JSON object in a string), adds schedules by name. "
        "A definition that would give wrong text is refused at start, with the reason."
    )
    yield _EXAMPLE
    known = ScheduleDefinition.model_fields
    assert set(_PARTS) == set(known), f"parts without words: {set(known) ^ set(_PARTS)}"
    rows = []
    for name, field in known.items():
        default = "required" if field.is_required() else _as_json(field.default)
        rows.append((f"`{name}`", default, _PARTS[name]))
    yield _table(("part", "default", "is"), rows)


def _letters() -> Iterator[str]:
    assert set(_LETTERS) == set(Action), "a letter without words"
    yield "## Letters of a plan"
    yield _filled(
        "One letter per drafting step. A star at the end repeats the letter before it: `M*` asks the medium drafter until the "
        "tree policy has had enough, `SM*` the small one first. Past the end of a plan drafting stops."
    )
    yield _table(("letter", "who drafts"), [(f"`{action.value}`", words) for action, words in _LETTERS.items()])


def _policies() -> Iterator[str]:
    yield "## Tree policies"
    yield _filled(
        "Budgets count nodes that are verified per step, the root included. *Trees* says how children come to be, which "
        "decides which rules may verify them."
    )
    for name, kind in POLICY_TYPES.items():
        yield f"### `{name}`"
        sources = ", ".join(_sources(kind))
        text = f"{_summary(kind)} Trees: {_tree_kind(kind).value}.{f' arXiv {sources}.' if sources else ''}"
        yield _filled(text)
        yield _options(kind)
    yield "### Shapes"
    yield "`adaptive_shape` takes two of these, as objects."
    yield _options(Shape)


def _rules() -> Iterator[str]:
    yield "## Decision rules"
    yield _filled(
        "*Lossless* rules give the target's own text at temperature 0, and exactly its distribution above it, on the trees "
        "named. Other pairs are refused at start. Lossy rules also need `--allow-lossy true`."
    )
    rows = []
    for name, rule in EVERY_VERIFIER.items():
        when = "0" if rule.reads_logits else "above 0"
        rows.append((f"`{name}`", when, "yes" if rule.lossless else "**no**", _accepted(rule), _first_sentence(rule)))
    yield _table(("rule", "temperature", "lossless", "trees", "does"), rows)
    yield "| trees | made by |\n|---|---|\n" + "\n".join(
        f"| {kind.value} | {', '.join(f'`{name}`' for name, policy in POLICY_TYPES.items() if _tree_kind(policy) is kind)} |"
        for kind in TreeKind
    )


def _policy_name(schedule: Schedule) -> str:
    kind = Delayed if isinstance(schedule.policy, Selected) else type(schedule.policy)
    return next(name for name, other in POLICY_TYPES.items() if kind is other)


def _plan(schedule: Schedule) -> str:
    plan: Plan = schedule.plan
    assert isinstance(plan, Word), f"{schedule.name} has a plan that this page cannot spell"
    return f"`{plan.letters}`" if plan.letters else "nobody"


def _tree_kind(kind: type[Any]) -> TreeKind:
    return kind.kind if issubclass(kind, SampledPolicy) else TreeKind.DETERMINISTIC


def _accepted(rule: Verifier) -> str:
    kinds = "all" if rule.accepts == frozenset(TreeKind) else ", ".join(kind.value for kind in TreeKind if kind in rule.accepts)
    return f"{kinds}; chains only" if rule.needs_chain else kinds


def _first_sentence(rule: Verifier) -> str:
    return _markdown((sys.modules[type(rule).__module__].__doc__ or "").partition("\n\n")[0]).removeprefix("LOSSY. ")


def _summary(kind: type[Any]) -> str:
    return _markdown((inspect.getdoc(kind) or "").partition("\n\n")[0])


def _sources(kind: type[Any]) -> list[str]:
    """arXiv ids in the class's words; in those of its module if it is the only policy there."""
    texts = [inspect.getdoc(kind) or ""]
    if sum(other.__module__ == kind.__module__ for other in POLICY_TYPES.values()) == 1:
        texts.append(sys.modules[kind.__module__].__doc__ or "")
    return list(dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", " ".join(texts))))


class _Words(NamedTuple):
    """What the source says of one option."""

    type: str
    comment: str


def _options(kind: type[Any]) -> str:
    words = _words(kind)
    rows = [(f"`{one.name}`", f"`{words[one.name].type}`", _default(one), words[one.name].comment) for one in fields(kind)]
    return _table(("option", "type", "default", "is"), rows)


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return "required"
    if isinstance(value, tuple) and len(value) > 8:
        return f"{len(value)} of them"
    return _as_json(value)


def _as_json(value: Any) -> str:
    """As a definition spells it."""
    return f"`{json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value)}`"


def _words(kind: type[Any]) -> dict[str, _Words]:
    """Type and comment of every field, from the class's source."""
    source = inspect.getsource(kind)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef), f"{kind} is no class"
    for line in definition.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            found[line.target.id] = _Words(ast.unparse(line.annotation), _markdown(comments.get(line.end_lineno or 0, "")))
    return found


def _markdown(text: str) -> str:
    """Words of a docstring or comment on one line, code in single backticks."""
    return re.sub(r":\w+:`([^`]*)`", r"`\1`", " ".join(text.split())).replace("``", "`")


def _filled(text: str) -> str:
    """A paragraph."""
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(text: str) -> str:
    """A bar would end the cell, inside code too."""
    return re.sub(r"(?<!\\)\|", r"\\|", text)
