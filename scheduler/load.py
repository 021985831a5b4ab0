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

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

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
    candidates: Sequence[Floats],
    verify_ms: Floats,
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
    everything, owner, order = _in_line(candidates)
    order = order[: most - roots]
    tokens = np.empty(len(order) + 1)
    tokens[0] = roots
    tokens[1:] = roots + np.cumsum(everything[order])
    ms = verify_ms[roots - 1 : roots + len(order)] + spent_ms
    ms[1:] += draft_ms
    rates = tokens / ms
    count = int(np.argmax(rates if rate is None else tokens - rate * ms))
    reason = _reason(count, len(order), len(everything))
    if count and not speculated and rates[count] < (1 + margin) * rates[0]:
        count, reason = 0, HELD
    nodes = np.bincount(owner[order[:count]], minlength=roots)
    return Share(tuple(nodes.tolist()), float(tokens[count]), float(ms[count]), float(rates[0]), reason)


def _in_line(candidates: Sequence[Floats]) -> tuple[Floats, NDArray[np.intp], NDArray[np.intp]]:
    """All nodes' probabilities, whose each is, and the order in which they are taken."""
    if len(candidates) == 1:  # most steps of most servers
        count = np.arange(len(candidates[0]))
        return np.asarray(candidates[0], dtype=np.float64), np.zeros_like(count), count
    everything = np.concatenate([np.asarray(own, dtype=np.float64) for own in candidates])
    owner = np.repeat(np.arange(len(candidates)), [len(own) for own in candidates])
    turn = np.concatenate([np.arange(len(own)) for own in candidates])
    # Equally probable nodes go round: nobody is served last because he came last.
    return everything, owner, np.lexsort((owner, turn, -everything))


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
