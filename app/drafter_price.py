"""What does a drafter cost? Milliseconds of one call that looks at n new nodes, beside the target's pass over n rows.

A call is one forward of the drafter, with what turns its rows into candidates; a drafting layer of n nodes is one such call, so
this is the price that a tree policy pays per layer. All models take turns, on a context of the same length. With several
sequences every call and every pass is for all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from app.measure import WARM_UP, Timed, take_turns
from app.teacher_forcing import TRUTH, Memory, Trail, read_text
from drafters.base import Drafter, DraftRequest, Halt
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

    rows: tuple[int, ...] = (1, 4, 8, 16)  # of each sequence
    sequences: int = 1
    context: int = CONTEXT  # tokens before the rows; a drafter's grows by one in every round and has this length on average
    rounds: int = 15


@dataclass(frozen=True, slots=True)
class Price:
    """Samples of one model with one number of rows."""

    who: str  # a drafter's name, or "target"
    rows: int  # of each sequence
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
    read: list[Memory] = []
    scratch: list[list[int]] = []
    calls: list[_Calls] = []
    try:
        for _ in range(plan.sequences):
            read.append(read_text(target, text[:1] * plan.context, ()))
            scratch.append(target.pool.allocate(max(plan.rows)))
        for drafter in drafters.values():
            call = _Calls(drafter.name, plan.rows)
            calls.append(call)
            for _ in range(plan.sequences):
                memory = read_text(target, text, drafter.layers) if drafter.layers else None
                call.asked.append(_Asked(Trail(drafter, text, first - 1, memory), plan.rows))
        things: dict[tuple[str, int], Timed] = {}
        for count in plan.rows:  # models that are compared stand next to each other
            segments = [chain_segment(own.rows, rows[:count]) for own, rows in zip(read, scratch, strict=True)]
            things[TARGET, count] = Timed(partial(target.forward, segments))
            for call in calls:
                things[call.drafter, count] = Timed(partial(call.run, count), partial(call.prepare, count))
        take_turns(list(things.values()), plan.rounds, target.device)
    finally:
        for call in calls:
            for asked in call.asked:
                asked.trail.close()
        for rows in scratch:
            target.pool.release(rows)
        for own in read:
            own.close()
    return [Price(who, count, tuple(thing.seconds)) for (who, count), thing in things.items()]


@dataclass(slots=True)
class _Asked:
    """One sequence that a drafter is asked about. A tree has children of its root enough for every number of rows once."""

    trail: Trail
    rows: tuple[int, ...]
    tree: TokenTree | None = None
    left: dict[int, range] = field(default_factory=dict)  # number of rows -> nodes that were not asked about yet

    def renew(self) -> int:
        """Begin a new tree, at the next token if there was one; questions about its root that the drafter needs to catch up."""
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
        return num_reads

    def ask(self, nodes: range) -> DraftRequest:
        """The question about so many nodes."""
        assert self.tree is not None
        return self.trail.ask(self.tree, nodes, _WIDTH)


@dataclass(slots=True)
class _Calls:
    """Calls to one drafter, each for all sequences at once."""

    drafter: str
    rows: tuple[int, ...]
    asked: list[_Asked] = field(default_factory=list)

    def prepare(self, count: int) -> None:
        """See that there are `count` nodes below every root, and that the drafter has looked at the roots."""
        if count not in self.asked[0].left:
            for _ in range(max([asked.renew() for asked in self.asked])):
                self._call([asked.ask(range(1)) for asked in self.asked])

    def run(self, count: int) -> None:
        """One call."""
        self._call([asked.ask(asked.left.pop(count)) for asked in self.asked])

    def _call(self, questions: list[DraftRequest]) -> None:
        for answer in self.asked[0].trail.drafter.propose(questions):
            if isinstance(answer, Halt):
                raise GaveUp(self.drafter, answer.reason)


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
