"""Logged decoding steps with everything that could have been drafted in them, and their price under any cost profile.

A trace file has one JSON object per line: a header, then one record per logged position of a text that the target wrote at
temperature 0. A record holds a tree for every word over S and M of the header's length (see :mod:`scheduler.value`), as arrays:
parent, log-probability and drafter of each node, and which nodes lie on the target's own path. So budgets, orders and policies
can be tried offline; how many tokens a cut of the tree would have had accepted is counted, not guessed.

    trace = read_trace(path.read_text("utf-8"))
    steps = priced(trace, CostProfile.from_json(...), budget=None)      # None: sized by price, node by node
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from scheduler.cost import CostProfile
from scheduler.features import FEATURES, Row
from scheduler.sizing import best_first, choose_size
from scheduler.value import Floats, Steps, prefix_index, word_index, words_of

FORMAT = "graftserve-trace"
VERSION = 1
LEAST_LP = -20.0  # stands for a probability of 0, which JSON has no number for


@dataclass(frozen=True, slots=True)
class Branch:
    """The tree of one word. Node 0, the root, is in none of the arrays: entry i belongs to node i + 1."""

    parent: tuple[int, ...]  # node numbers, smaller than the node's own
    lp: tuple[float, ...]  # log-probability of the edge, by the drafter that scored it last
    creator: str  # a letter per node, N, S or M: who drafted it first
    path: tuple[int, ...]  # nodes on the target's path, from depth 1 down without a gap
    forwards: tuple[tuple[str, int], ...]  # letter and rows of every drafter forward, in order

    def __post_init__(self) -> None:
        size = len(self.parent)
        if len(self.lp) != size or len(self.creator) != size:
            raise ValueError(f"parent, lp and creator must pair up, got {size}, {len(self.lp)} and {len(self.creator)}")
        if any(not 0 <= parent <= node for node, parent in enumerate(self.parent)):
            raise ValueError("parents must come before their children")
        if not all(lp <= 0 for lp in self.lp):
            raise ValueError("lp must not be positive")
        steps = list(pairwise((0, *self.path)))
        if any(not 1 <= node <= size or self.parent[node - 1] != above for above, node in steps):
            raise ValueError(f"path = {self.path} does not lead down from the root")

    def probabilities(self) -> Floats:
        """`[nodes]`: path probabilities, root first, in creation order."""
        path = np.ones(len(self.parent) + 1)
        edge = np.exp(np.array(self.lp))
        for node, parent in enumerate(self.parent):
            path[node + 1] = path[parent] * edge[node]
        return path

    def accepted(self, order: np.ndarray, size: int) -> int:
        """Drafted tokens accepted if the first `size` nodes of `order` (root first) are verified."""
        verified = set(order[:size].tolist())
        count = 0
        for node in self.path:
            if node not in verified:
                break
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class Record:
    """One logged position."""

    prompt: int
    category: str | None
    position: int  # tokens of the text before the drafted ones, prompt included
    rows: Mapping[str, Row]  # signals before the next drafting step, by what was drafted before it
    branches: Mapping[str, Branch]  # by word


@dataclass(frozen=True, slots=True)
class Header:
    """What a trace was made with."""

    model: str
    small: str  # drafters' names, as a cost profile has them
    medium: str
    depth: int  # letters of a word
    budget: int  # nodes verified per step where it was made, root included
    stride: int
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.depth < 1 or self.budget < 1 or self.stride < 1:
            raise ValueError(f"depth, budget and stride must be at least 1, got {self}")


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file's content."""

    header: Header
    records: tuple[Record, ...]
    profile: CostProfile | None = None  # of the machine that it was made on


def header_line(header: Header, profile: CostProfile | None) -> str:
    """The first line of a trace file."""
    costs = None if profile is None else json.loads(profile.to_json())
    return json_line({"format": FORMAT, "version": VERSION, **asdict(header), "costs": costs})


def record_line(record: Record) -> str:
    """A further line."""
    return json_line(
        {
            "prompt": record.prompt,
            "category": record.category,
            "position": record.position,
            "rows": {prefix: [round(value, 5) for value in row] for prefix, row in record.rows.items()},
            "branches": {word: _branch_json(branch) for word, branch in record.branches.items()},
        }
    )


def read_trace(text: str) -> Trace:
    """The content of a trace file. ValueError that names the line for what is none."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError("not a trace: it is empty")
    number = 0
    try:
        number, line = lines[0]
        document = json.loads(line)
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ValueError(f"expected {FORMAT}, version {VERSION}")
        names = ("model", "small", "medium", "depth", "budget", "stride")
        header = Header(**{name: document[name] for name in names}, features=tuple(document["features"]))
        if header.features != FEATURES:
            raise ValueError("it has other signals than this version; make it again")
        costs = document["costs"]
        profile = None if costs is None else CostProfile.from_json(json.dumps(costs))
        records = []
        for place, line in lines[1:]:
            number = place  # for the message below
            records.append(_record(json.loads(line), header.depth))
        return Trace(header, tuple(records), profile)
    except KeyError as error:
        raise ValueError(f"not a trace: line {number}: {error.args[0]!r} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trace: line {number}: {error}") from error


def priced(trace: Trace, profile: CostProfile, *, budget: int | None, overhead_ms: float = 0.0) -> Steps:
    """The steps of a trace as they would cost under a profile.

    Each tree is cut to the `budget` likeliest nodes, root included, or (None) to the size of the best expected rate, by the
    drafters' own probabilities and never by what was accepted. `overhead_ms` is added to every step, plain ones included.
    ValueError if the profile lacks the target; a drafter that it lacks costs nothing, which is right for prompt lookup only.
    """
    if "target" not in profile.models:
        raise ValueError(f"the cost profile has no target, only {', '.join(profile.models)}")
    header = trace.header
    for name in {letter for record in trace.records for branch in record.branches.values() for letter, _ in branch.forwards}:
        drafter = _drafter(header, name)
        if drafter not in profile.models:
            raise ValueError(f"the cost profile has no {drafter} drafter, only {', '.join(profile.models)}")
    count, words = len(trace.records), 1 << header.depth
    tokens, ms = np.empty((count, words)), np.empty((count, words))
    rows = np.empty((count, words - 1, len(FEATURES)))
    plain = np.empty(count)
    groups = np.array([record.prompt for record in trace.records], dtype=np.intp)
    ratio_at = FEATURES.index("log_cost_ratio")
    most = 1 + max((len(b.parent) for record in trace.records for b in record.branches.values()), default=0)
    for index, record in enumerate(trace.records):
        context = record.position
        curve = profile.models["target"].curve(most, context=context) + overhead_ms
        plain[index] = curve[0]
        for word, branch in record.branches.items():
            spent = sum(profile.ms(_drafter(header, letter), n, context=context) for letter, n in branch.forwards)
            path = branch.probabilities()
            order = best_first(path)
            if budget is None:
                size = choose_size(path[order], curve[: len(order)], spent_ms=spent).nodes
            else:
                size = min(budget, len(order))
            at = word_index(word)
            tokens[index, at] = 1 + branch.accepted(order, size)
            ms[index, at] = spent + curve[size - 1]
        for prefix, row in record.rows.items():
            rows[index, prefix_index(prefix)] = row
        rows[index, :, ratio_at] = math.log(cost_ratio(profile, header.medium, context))
    return Steps(groups, tokens, ms, rows, plain)


def cost_ratio(profile: CostProfile, medium: str, context: int) -> float:
    """Price of a one-row call of the medium, in forwards of the target; 1 if it has no price."""
    if medium not in profile.models:
        return 1.0
    return profile.ms(medium, 1, context=context) / profile.ms("target", 1, context=context)


def categories(trace: Trace) -> dict[str, list[int]]:
    """Indices of records by category; those without one under "-"."""
    found: dict[str, list[int]] = {}
    for index, record in enumerate(trace.records):
        found.setdefault(record.category or "-", []).append(index)
    return found


def _drafter(header: Header, letter: str) -> str:
    return header.medium if letter == "M" else header.small


def _branch_json(branch: Branch) -> dict[str, Any]:
    return {
        "parent": branch.parent,
        "lp": [round(max(lp, LEAST_LP), 3) for lp in branch.lp],
        "creator": branch.creator,
        "path": branch.path,
        "forwards": branch.forwards,
    }


def _record(entry: Any, depth: int) -> Record:
    branches = {
        word: Branch(
            tuple(values["parent"]),
            tuple(map(float, values["lp"])),
            values["creator"],
            tuple(values["path"]),
            tuple((letter, int(rows)) for letter, rows in values["forwards"]),
        )
        for word, values in entry["branches"].items()
    }
    rows = {prefix: tuple(map(float, row)) for prefix, row in entry["rows"].items()}
    if set(branches) != set(words_of(depth)):
        raise ValueError(f"it has the words {', '.join(branches)}")
    if set(rows) != set(_prefixes(depth)) or any(len(row) != len(FEATURES) for row in rows.values()):
        raise ValueError(f"it has no row of {len(FEATURES)} signals for every decision")
    return Record(int(entry["prompt"]), entry["category"], int(entry["position"]), rows, branches)


def _prefixes(depth: int) -> Iterable[str]:
    return ("", *(word for length in range(1, depth) for word in words_of(length)))


def json_line(document: Mapping[str, Any]) -> str:
    """A line of a file of records."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"
