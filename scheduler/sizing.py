"""How many nodes are worth verifying, and when drafting on cannot pay any more.

Given s(v), an estimate of the probability that node v is accepted, a step that verifies n nodes (root included) emits E_n = 1
+ (the n - 1 largest s) tokens on average and takes T_n = spent + C(n) + overhead milliseconds. The best size is the n with
the largest rate E_n / T_n, found by looking at all of them: C is measured and need not be convex. OPT-Tree (2406.17276) and
Sequoia (2402.12374) rank nodes in the same way; the price of a step is ours.

Stopping. Let R be the best rate of the tree so far and U the open mass: what the nodes that may still get children can pass
on. Scores are sub-stochastic (children of v sum to at most s(v)), so a further layer adds at most U, and leaves at most U to
the layer after it. If every layer costs at least c then J layers add at most J * U tokens for J * c milliseconds, and where U
<= R * c no J raises the rate. That is a proof only if c is the price of the *cheapest* later layer, usually of one row, and
not of the whole frontier: later layers may be narrow.

Traps: a node that has children but may get more of them (another drafter's) passes on s(v) minus what they hold already.
Maximizing the rate of each step is not quite maximizing tokens over time, which wants E - rate * T at the rate of the long
run (Dinkelbach): give `rate` for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Size:
    """A number of nodes and what it is expected to bring."""

    nodes: int  # root included
    tokens: float  # expected per step, the target's own one included
    ms: float  # of the step

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


def best_first(path_probability: Floats) -> NDArray[np.intp]:
    """Nodes by falling probability, root first; the first n of them contain every node's ancestors, for all n.

    `path_probability` `[nodes]`, in creation order: parents come before their children and are no less probable.
    """
    return np.argsort(-path_probability, kind="stable")  # ties by creation, so parents first


def choose_size(
    ranked: Floats, verify_ms: Floats, *, spent_ms: float = 0.0, overhead_ms: float = 0.0, rate: float | None = None
) -> Size:
    """The best number of nodes; the smallest of equally good ones.

    `ranked` `[nodes]`: probabilities in the order of `best_first`, the root's 1 first. `verify_ms` `[most]`: milliseconds of
    verifying 1, 2, … nodes; as many as that are taken at most. `spent_ms` is drafting that is paid for whatever comes out.
    With `rate` (tokens per millisecond) the size maximizes tokens - rate * ms instead of tokens / ms.
    """
    count = min(len(ranked), len(verify_ms))
    assert count >= 1, "a tree has a root, and verifying it a price"
    tokens = np.cumsum(ranked[:count])
    ms = verify_ms[:count] + (spent_ms + overhead_ms)
    chosen = int(np.argmax(tokens / ms if rate is None else tokens - rate * ms))
    return Size(chosen + 1, float(tokens[chosen]), float(ms[chosen]))


def open_masses(path_probability: Sequence[float], parent: Sequence[int]) -> list[float]:
    """`[nodes]`: the probability that children to come of each node can have together.

    `parent` `[nodes of the tree]`, -1 for the root. The root's own share is 1.
    """
    masses = list(path_probability)
    for chance, above in zip(path_probability[1:], parent[1:], strict=True):
        masses[above] -= chance
    return [mass if mass > 0.0 else 0.0 for mass in masses]


def open_mass(path_probability: Sequence[float], parent: Sequence[int], expandable: Iterable[int]) -> float:
    """U: the probability that nodes to come can have in one layer. `expandable` are all nodes that may yet get children.

    `parent` `[nodes]`, -1 for the root. The root's own share is 1.
    """
    masses = open_masses(path_probability, parent)
    return sum([masses[node] for node in expandable])


def may_pay(open_mass: float, rate: float, layer_ms: float, kappa: float = 1.0) -> bool:
    """Whether drafting on may raise the best `rate` so far, in tokens per millisecond.

    With `kappa` 1 a False is proven, if `layer_ms` is what the cheapest later layer costs; a smaller `kappa`, the share of the
    open mass that layers turn out to realize, stops earlier and may be wrong.
    """
    return kappa * open_mass > rate * layer_ms
