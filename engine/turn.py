"""One step's shares: who reads how much of its text, who emits, and how many drafted nodes there are rows for.

Sequences that decode take part in every step. Those that read, prompts or a text taken up again, share one budget of tokens,
so that a step grows no longer the more prompts are read at once. Shares are max-min fair: a short text is never behind a long
one, what it does not need goes to the others, and what cannot be divided goes to the oldest.

Rows that run short are drafted nodes first: a tree is cut to what is there, down to its root, and no sequence has to give way
for a guess.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.question import Draft
from engine.sequence import Sequence
from tree.policies.sampled import SampledPolicy
from tree.select import top


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one step does for whom."""

    prefills: list[tuple[Sequence, int]]  # sequences that only read, and how many tokens
    decoding: list[Sequence]  # sequences that emit, having read what they had left

    @property
    def num_rows(self) -> int:
        """Rows that the step takes without any drafted node."""
        return sum(count for _, count in self.prefills) + sum(sequence.num_pending for sequence in self.decoding)


def plan_turn(running: SequenceOf[Sequence], budget: int) -> Turn:
    """Divide a step; `running` are in order of age, oldest first, and `budget` is the most text tokens read besides roots."""
    begun = [sequence for sequence in running if sequence.has_begun]
    reading = [sequence for sequence in begun if sequence.num_pending > 1]
    shares = divide(budget, [sequence.num_pending for sequence in reading])
    prefills = []
    late = set()
    for sequence, share in zip(reading, shares, strict=True):
        if share < sequence.num_pending:
            late.add(id(sequence))
            if share:
                prefills.append((sequence, share))
    return Turn(prefills, [sequence for sequence in begun if id(sequence) not in late])


def divide(total: int, wants: SequenceOf[int]) -> list[int]:
    """Max-min fair shares of `total`: nobody gets more than it wants, and nobody less than another unless it wants no more.

    What equal parts leave over goes to the first ones, one each. The shares sum to the lesser of `total` and all wants.
    """
    level, left = 0, total
    ascending = sorted(wants)
    for place, want in enumerate(ascending):
        part = min(want - level, left // (len(ascending) - place))  # more for each of those that want more than `level`
        level += part
        left -= part * (len(ascending) - place)
        if level < want:
            break
    shares = [min(want, level) for want in wants]
    for index, want in enumerate(wants):
        if left > 0 and shares[index] < want:
            shares[index] += 1
            left -= 1
    return shares


def fitting_nodes(drafts: SequenceOf[Draft], chosen: list[list[int]], room: int) -> list[list[int]]:
    """As many of the nodes `chosen` of each draft, ascending and root first, as `room` rows for all but roots allow."""
    wants = [len(nodes) - 1 for nodes in chosen]
    if sum(wants) <= room:
        return chosen
    return [_cut(draft, nodes, share) for draft, nodes, share in zip(drafts, chosen, divide(max(room, 0), wants), strict=True)]


def _cut(draft: Draft, nodes: list[int], count: int) -> list[int]:
    """The root and the `count` best of the other nodes; they form a tree, as no node outranks its parent."""
    if count == len(nodes) - 1:
        return nodes
    if isinstance(draft.sequence.schedule.policy, SampledPolicy):
        return nodes[:1]  # to choose among drawn children by what was drawn would bend the law that the rules rely on
    return sorted(top(draft.growth.tree, nodes, count + 1))
