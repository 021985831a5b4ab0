"""One verification for several sequences: who gets how many of its rows, possibly none.

A verification is one forward over the rows of all sequences. While it waits for memory, rows are nearly free; the more
sequences share it, the sooner each row costs arithmetic, and speculation should give way (2406.14066 chooses one length for
all by the same measure, 2501.12162 selects nodes over all requests). With k nodes besides the roots the step emits one token
per sequence plus the k probabilities, in C(sequences + k) milliseconds. For a given k the best choice is the k most probable
nodes of all, since the price does not care whose they are; k itself is found by trying all, so it is the best one for any
shape of C. Where C is convex that is the greedy rule: take nodes while a node's probability exceeds the rate times the price
of its row.

Traps: a sequence's probabilities must fall along its list, which makes what is taken of it a tree (`sizing.best_first`).
Drafting that is still to be paid counts for k > 0 only, drafting that was done counts in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NO_NODES, HELD, LOAD, MARGINAL, BUDGET, ALL = "empty", "held", "load", "marginal", "budget", "all"
"""Why a share is what it is: nothing was drafted; speculation is off and would gain too little to come back; rows cost more
than they bring; the next node does; there are no more rows; every node is taken. Bounded, for metric labels."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each sequence may have verified in one step."""

    nodes: tuple[int, ...]  # per sequence, without its root: the first so many of its list
    tokens: float  # expected of the step, over all sequences
    ms: float  # of the step
    plain: float  # tokens per millisecond without any nodes
    reason: str

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms

    @property
    def speculates(self) -> bool:
        """Whether anybody got a node."""
        return any(self.nodes)


def share_rows(
    candidates: Sequence[Sequence[float]],
    verify_ms: Sequence[float],
    *,
    budget: int | None = None,
    draft_ms: float = 0.0,
    spent_ms: float = 0.0,
    speculated: bool = True,
    margin: float = 0.05,
    rate: float | None = None,
) -> Share:
    """Share the rows of one verification among sequences.

    `candidates`: per sequence the falling path probabilities of its nodes, root excluded. `verify_ms` `[most]`: milliseconds of
    a forward over 1, 2, … rows of all these sequences, at least one for each. `budget`: most rows, roots included.
    `draft_ms` is drafting to come that is saved if nobody gets a node; `spent_ms` was spent already, or comes anyway.
    With `rate` (tokens per millisecond) the share maximizes tokens - rate * ms instead of tokens / ms.

    Hysteresis: where the last step was plain (`speculated` False) a share has to beat plain decoding by a factor 1 + `margin`;
    where it was not, any gain will do. So noise of the clock does not switch speculation on and off from step to step.
    """
    roots = len(candidates)
    assert 1 <= roots <= len(verify_ms), f"{roots} sequences, prices of {len(verify_ms)} rows"
    assert margin >= 0, f"margin {margin}"
    most = len(verify_ms) if budget is None else max(min(len(verify_ms), budget), roots)
    # Plain Python: a step has tens of nodes, and behind a forward, with nothing of numpy left in the cache, a dozen array
    # operations take several times as long. Equally probable nodes go round: nobody is served last because he came last.
    line = [(-chance, turn, owner) for owner, own in enumerate(candidates) for turn, chance in enumerate(own)]
    line.sort()
    affordable = min(len(line), most - roots)
    plain_ms = verify_ms[roots - 1] + spent_ms
    tokens, best = float(roots), (0, float(roots), plain_ms)
    most_worth = roots / plain_ms if rate is None else roots - rate * plain_ms
    for count in range(1, affordable + 1):
        tokens -= line[count - 1][0]
        ms = verify_ms[roots - 1 + count] + spent_ms + draft_ms
        worth = tokens / ms if rate is None else tokens - rate * ms
        if worth > most_worth:
            most_worth, best = worth, (count, tokens, ms)
    reason = _reason(best[0], affordable, len(line))
    if best[0] and not speculated and best[1] / best[2] < (1 + margin) * roots / plain_ms:
        reason, best = HELD, (0, float(roots), plain_ms)
    nodes = [0] * roots
    for _, _, owner in line[: best[0]]:
        nodes[owner] += 1
    return Share(tuple(nodes), best[1], best[2], roots / plain_ms, reason)


def _reason(count: int, affordable: int, existing: int) -> str:
    if existing == 0:
        return NO_NODES
    if affordable == 0:
        return BUDGET
    if count == 0:
        return LOAD
    if count < affordable:
        return MARGINAL
    return ALL if count == existing else BUDGET
