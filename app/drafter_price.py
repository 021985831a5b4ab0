"""What does a drafter cost? Milliseconds of one call that looks at n new nodes, beside the target's pass over n rows.

A call is one forward of the drafter, with what turns its rows into candidates; a drafting layer of n nodes is one such call, so
this is the price that a tree policy pays per layer. All models take turns, on a context of the same length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from app.measure import WARM_UP, Timed, take_turns
from app.teacher_forcing import TRUTH, Trail, read_text
from drafters.base import Drafter, Halt
from models.attention import Segment, chain_then_tree
from models.causal_lm import CausalLM
from models.kv_cache import RowList
from tree.tree import TokenTree

TARGET = "target"
CONTEXT = 200
_TOKEN = 5  # any; time does not depend on it
_WIDTH = 4  # candidates per node


@dataclass(frozen=True, slots=True)
class Plan:
    """What is timed."""

    rows: tuple[int, ...] = (1, 4, 8, 16)
    context: int = CONTEXT  # tokens before the rows; a drafter's grows by one in every round and has this length on average
    rounds: int = 15


@dataclass(frozen=True, slots=True)
class Price:
    """Samples of one model with one number of rows."""

    who: str  # a drafter's name, or "target"
    rows: int
    seconds: tuple[float, ...]


class GaveUp(Exception):
    """A drafter refused while it was timed."""

    def __init__(self, drafter: str, reason: str) -> None:
        super().__init__(f"{drafter} gave up: {reason}")
        self.drafter, self.reason = drafter, reason


def prices(target: CausalLM, drafters: Sequence[Drafter], plan: Plan) -> tuple[list[Price], dict[str, str]]:
    """Time the target and all drafters that run a model.

    Returns the prices, and by name why drafters are missing from them. Raises OutOfRows if the target has no room.
    """
    timed = {drafter.name: drafter for drafter in drafters if drafter.runs_model}
    missing: dict[str, str] = {}
    while True:
        try:
            return _prices(target, timed, plan), missing
        except GaveUp as refusal:  # the others' samples would not be interleaved with its own: begin again without it
            missing[refusal.drafter] = refusal.reason
            del timed[refusal.drafter]


@torch.inference_mode()
def _prices(target: CausalLM, drafters: Mapping[str, Drafter], plan: Plan) -> list[Price]:
    rounds = WARM_UP + plan.rounds
    first = max(plan.context - rounds // 2, 1)
    text = [_TOKEN] * (first + rounds + 1)
    prefix, scratch = RowList(), target.pool.allocate(max(plan.rows))
    calls: list[_Calls] = []
    try:
        prefix.extend(target.pool.allocate(plan.context))
        rows = prefix.view().tolist()
        target.forward([Segment(text[:1] * plan.context, range(plan.context), RowList().view(), rows, [])])
        for drafter in drafters.values():
            memory = read_text(target, text, drafter.layers) if drafter.layers else None
            calls.append(_Calls(Trail(drafter, text, first - 1, memory), plan.rows))
        things: dict[tuple[str, int], Timed] = {}
        for count in plan.rows:  # models that are compared stand next to each other
            things[TARGET, count] = Timed(partial(target.forward, [chain_segment(prefix, scratch[:count])]))
            for call in calls:
                things[call.trail.drafter.name, count] = Timed(partial(call.run, count), partial(call.prepare, count))
        take_turns(list(things.values()), plan.rounds, target.device)
    finally:
        for call in calls:
            call.trail.close()
        target.pool.release(scratch)
        target.pool.release(prefix.truncate(0))
    return [Price(who, count, tuple(thing.seconds)) for (who, count), thing in things.items()]


@dataclass(slots=True)
class _Calls:
    """Calls to one drafter. A tree has children of its root enough for every number of rows once."""

    trail: Trail
    rows: tuple[int, ...]
    tree: TokenTree | None = None
    left: dict[int, range] = field(default_factory=dict)  # number of rows -> nodes that were not asked about yet

    def prepare(self, count: int) -> None:
        """See that there are `count` nodes below a root that the drafter has looked at."""
        if count in self.left:
            return
        num_reads = 1
        if self.tree is None:
            num_reads = self.trail.num_reads
        else:
            self.trail.advance()
        self.tree = TokenTree(_TOKEN)
        for token in range(sum(self.rows)):
            self.tree.add(0, token, -1.0, TRUTH)
        start = 1
        for size in self.rows:
            self.left[size] = range(start, start + size)
            start += size
        for _ in range(num_reads):
            self._ask(range(1))

    def run(self, count: int) -> None:
        """One call."""
        self._ask(self.left.pop(count))

    def _ask(self, nodes: range) -> None:
        assert self.tree is not None
        (answer,) = self.trail.drafter.propose([self.trail.ask(self.tree, nodes, _WIDTH)])
        if isinstance(answer, Halt):
            raise GaveUp(self.trail.drafter.name, answer.reason)


def chain_segment(prefix: RowList, rows: Sequence[int]) -> Segment:
    """A root behind the context and a chain of drafted nodes below it, with the mask of a tree."""
    count, context = len(rows), len(prefix)
    below = torch.ones(count - 1, count - 1, dtype=torch.bool).tril_()
    return Segment(
        tokens=[_TOKEN] * count,
        positions=range(context, context + count),
        prefix=prefix.view(),
        rows=rows,
        wanted=range(count),
        visible=chain_then_tree(1, below) if count > 1 else None,
    )
