"""Which trees are compared under which rules where nobody says: one schedule per pair, all of about the same size."""

from __future__ import annotations

import math
from typing import Any

from app.config import ScheduleDefinition
from tree.policies.sampled import WithoutReplacement

_LONGEST = 8  # tokens of a chain; further ones are hardly ever reached
_WIDTHS = (2, 2, 1, 1, 1)  # of a full tree of distinct draws below its first layer: 19 nodes for each of that


def default_pairs(
    budget: int, drafter: str, *, small: str | None = None, word: str = "MSM"
) -> dict[str, ScheduleDefinition]:
    """Definitions by name, "policy+rule", as :func:`scheduler.definitions.define_schedule` takes them.

    Args:
        budget: nodes verified per step, root included, at least 2; sampled shapes have as many or a few less.
        drafter: role of the drafter of all trees, one that runs a model: rules need the row that children were drawn from.
        small: name of a second, cheaper drafter that grows `treegraft`'s tree together with `drafter` by the plan `word`;
            None leaves that tree out.
    """
    if budget < 2:
        raise ValueError(f"budget must be at least 2 to compare trees, got {budget}")
    size, length = budget - 1, min(budget - 1, _LONGEST)
    depth = min(math.isqrt(size), _LONGEST)
    trunk = min(3, 1 + size // 16) if size > 1 else 0
    branch = min(math.isqrt(size - trunk), _LONGEST) or 1
    iid = {"num_paths": size // depth, "length": depth}
    delayed = {"num_paths": max((size - trunk) // branch, 1), "trunk": trunk, "branch": branch}
    path = {"num_paths": 1, "length": length}
    distinct = {"widths": WithoutReplacement((max(3, size // 19), *_WIDTHS)).with_budget(budget).widths}
    one = {"width": 3, "frontier": max(size // 8, 1), "depth": min(size, 5), "budget": budget}
    talon = {"budget": budget, "first_width": min(10, max(budget // 4, 1))}
    eagle = {"width": min(size, max(2, size // 8)), "depth": min(size, 5), "budget": budget}
    pairs: list[tuple[str, str, dict[str, Any], str]] = [
        ("chain", "chain", {"length": length}, "walk"),
        ("path", "iid", path, "block"),
        ("iid", "iid", iid, "walk"),
        ("iid", "iid", iid, "naive"),
        ("iid", "iid", iid, "specinfer"),
        ("iid", "iid", iid, "spectr"),
        ("distinct", "without_replacement", distinct, "specinfer-distinct"),
        ("delayed", "delayed", delayed, "traversal"),
        ("delayed", "delayed", delayed, "khisti"),
        ("one_sampled", "one_sampled", one, "naive"),
        ("talon", "talon", talon, "walk"),
        ("eagle", "eagle", eagle, "walk"),
    ]
    found = {
        f"{shape}+{rule}": ScheduleDefinition(
            policy=policy, options=options, plan="M*", drafters={"M": drafter}, verifier=rule
        )
        for shape, policy, options, rule in pairs
    }
    if small is not None:
        width = max(4, budget // 16)
        options = {"steps": max(5, len(word)), "frontier": width, "width": width, "budget": budget}
        found["treegraft+walk"] = ScheduleDefinition(
            policy="treegraft", options=options, plan=word, drafters={"S": small, "M": drafter}
        )
    return found
