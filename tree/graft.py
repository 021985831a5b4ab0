"""TreeGraft: two drafters of unequal cost grow one shared tree.

Source: 2608.26112. The *small* drafter is nearly free (prompt lookup), the *medium* one is a real, smaller model. A
drafting step k belongs to one of them. With V(T) the nodes, N_k the nodes that step k - 1 made, P_k the nodes that have
been in the medium's pool in this decoding step, the pool is ::

    C_k = N_k             small: trusts every earlier pool, moves only the newest layer on
    C_k = V(T_k) - P_k    medium: may reopen any node that it never considered
    F_k = the W best of C_k by path score; a medium step first replaces the edge scores by its own

and the m best children of every node of F_k join the tree. After a medium step P grows by the whole pool, not only by
F_k.

This file decides pools, frontier and merging. Who drafts next is the scheduler's business, and how many nodes are
verified is decided once at the end (:mod:`tree.select`).

Traps:
    Merging never destroys: existing children and their subtrees stay, a token that is there already is only rescored.
    A node outside the medium's W best is never offered to the medium again, and nodes made by the medium are not in P
    yet. Nodes that the answer leaves out were not considered: whoever asks may ask about the most promising part only.

    Ours: a lookup (of what the text has said before) may help at any time. It goes on from the newest layer and joins that
    layer, so the next drafter still sees what it would have seen, and what the lookup found besides.

    If no node was made (the medium found all its picks in place), the small drafter goes on from the picks that
    it has not expanded. The nodes of a suffix chain below a candidate count as made when a later step first proposes
    them; until then only the medium may open them, so that the termination rule is not bypassed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tree.growth import Answer, Ask, Limits, StartsTrees, is_graft
from tree.select import top, verify_set
from tree.tree import TokenTree


@dataclass(frozen=True, slots=True)
class TreeGraft(StartsTrees):
    """Grafting of a small and a medium drafter; any two drafter names."""

    steps: int = 5  # D: drafting steps per decoding step
    frontier: int = 10  # W: nodes expanded per drafting step
    width: int = 10  # m: children per expanded node
    budget: int = 64  # verified nodes, root included
    pool: Literal["paper", "lookback"] = "paper"  # lookback: the released code's medium pool, which forgets P
    lookback: int = 5  # depths above the newest layer that the lookback pool reaches
    min_probability: float = 0.0  # path probability below which a node is not worth a row of the target's forward
    min_expansion: float = 0.0  # path probability below which a node is not worth a drafter's look at what follows it
    max_nodes: int = 511  # size of the working tree, root included
    rank: Literal["rescored", "before"] = "rescored"  # before: choose the medium's frontier by the scores it found
    small: str = "small"  # names of the drafters; in a definition they follow from its `drafters`
    medium: str = "medium"  # the one that rescores
    lookup: str | None = None  # a drafter that costs nothing and takes no step; may help at any time

    def __post_init__(self) -> None:
        for name in ("steps", "frontier", "width", "budget", "max_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("min_probability", "min_expansion"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.lookback < 0:
            raise ValueError(f"lookback must be at least 0, got {self.lookback}")
        if self.pool not in ("paper", "lookback"):
            raise ValueError(f"pool must be 'paper' or 'lookback', got {self.pool!r}")
        if self.rank not in ("rescored", "before"):
            raise ValueError(f"rank must be 'rescored' or 'before', got {self.rank!r}")
        names = [name for name in (self.small, self.medium, self.lookup) if name is not None]
        if len(set(names)) < len(names):
            raise ValueError(f"small, medium and lookup must be different drafters, they are {', '.join(names)}")

    def with_budget(self, budget: int) -> TreeGraft:
        """The same growth, cut to another number of verified nodes, root included."""
        return replace(self, budget=budget)

    def start(self, root_token: int, limits: Limits) -> GraftGrowth:
        """A tree of only the root."""
        return GraftGrowth(self, TokenTree(root_token), limits)


class GraftGrowth:
    """A shared tree under construction; pools are forgotten with it at the end of the decoding step."""

    def __init__(self, policy: TreeGraft, tree: TokenTree, limits: Limits) -> None:
        self.tree = tree
        self.num_grafts = 0
        self.num_steps = 0  # drafting steps attached so far, k - 1
        self.visited: set[int] = set()  # P_k
        self.fresh: list[int] = [0]  # N_k
        self._policy = policy
        self._limits = limits
        self._touched: list[int] = []  # existing nodes that the last step proposed again
        self._tails: set[int] = set()  # suffix nodes that no step has proposed yet
        self._expanded: defaultdict[str | None, set[int]] = defaultdict(set)
        self._newest_depth = 0  # of the last N_k that was not empty
        self._asked: tuple[str, tuple[int, ...]] | None = None  # drafter and pool of the open question

    def pool(self, drafter: str) -> list[int]:
        """C_k if `drafter` took the next step: the nodes that may get children, ascending."""
        policy, tree = self._policy, self.tree
        if drafter == policy.small:
            nodes = self._open(self.fresh)
            return nodes or self._open([v for v in self._touched if v not in self._expanded[drafter]])
        if drafter == policy.lookup:
            return self._open([v for v in self.fresh if v not in self._expanded[drafter]])
        if drafter != policy.medium:
            raise ValueError(f"{drafter!r} is not one of {policy.small!r}, {policy.medium!r}, {policy.lookup!r}")
        if policy.pool == "lookback":
            top_depth = self._newest_depth - policy.lookback
            return self._open([v for v in range(len(tree)) if tree.depth[v] >= top_depth])
        return self._open([v for v in range(len(tree)) if v not in self.visited])

    def frontier(self, drafter: str) -> list[int]:
        """F_k by the scores as they are, best first: what `drafter` would expand if it took the next step."""
        return top(self.tree, self.pool(drafter), self._policy.frontier)

    def ask(self, drafter: str) -> Ask | None:
        """The frontier for the small drafter; for the medium the whole pool, since its best are not known yet."""
        policy, tree = self._policy, self.tree
        pool = self.pool(drafter)
        if not pool or self.num_steps >= policy.steps or policy.budget == 1:
            return None
        is_medium = drafter == policy.medium
        if len(tree) >= policy.max_nodes and not (is_medium and set(tree.scorer[1:]) - {drafter}):
            return None  # no room for a child; the medium is still worth a call for the sake of its scores
        nodes = pool if is_medium else top(tree, pool, policy.frontier)
        self._asked = (drafter, tuple(pool))
        return Ask(nodes=tuple(nodes), width=min(policy.width, self._limits.vocab_size), rescore=is_medium)

    def attach(self, drafter: str, answer: Answer) -> None:
        """Rescore (medium), choose the frontier, merge its children, and move the pools on by one step."""
        assert self._asked is not None and self._asked[0] == drafter, f"{drafter} was not asked"
        # An answer about no node at all is one about all of them: they are not to be asked about for ever.
        pool = [node for node in self._asked[1] if node in answer.candidates] or list(self._asked[1])
        self._asked = None
        tree, policy = self.tree, self._policy
        is_medium = drafter == policy.medium
        frontier = top(tree, pool, policy.frontier)
        if is_medium:
            for node, lp in answer.rescored.items():
                tree.rescore(node, lp, drafter)
            tree.refresh()
            if policy.rank == "rescored":
                frontier = top(tree, pool, policy.frontier)
        before = self.fresh
        self._merge(drafter, answer, frontier)
        tree.refresh()
        if drafter == policy.lookup:  # what was newest still is
            self.fresh = sorted({*before, *self.fresh})
            return
        if is_medium:
            self.visited.update(pool)
        if self.fresh:
            self._newest_depth = max(tree.depth[v] for v in self.fresh)
        self.num_steps += 1

    def verify_nodes(self) -> list[int]:
        """The best nodes of the working tree within the budget that are worth their row."""
        least = self._policy.min_probability
        return verify_set(self.tree, self._policy.budget, math.log(least) if least > 0.0 else -math.inf)

    def _merge(self, drafter: str, answer: Answer, frontier: Sequence[int]) -> None:
        """Attach the candidates of every frontier node, then the chains below them; sets N_{k+1} and touched."""
        tree = self.tree
        self.fresh, self._touched = [], []
        chains: list[tuple[int, tuple[tuple[int, float], ...]]] = []
        for v in frontier:
            candidates = answer.candidates.get(v)
            if candidates is None:
                continue
            self._expanded[drafter].add(v)
            for i, (token, lp) in enumerate(zip(candidates.tokens, candidates.lps, strict=True)):
                child = tree.children[v].get(token)
                is_new = child is None or child in self._tails
                if child is None:
                    child = self._add(v, token, lp, drafter)
                    if child is None:
                        continue
                else:
                    self._score_again(child, lp, drafter)
                    self._tails.discard(child)
                if not candidates.terminal:
                    (self.fresh if is_new else self._touched).append(child)
                if candidates.suffixes and candidates.suffixes[i]:
                    chains.append((child, candidates.suffixes[i]))
        # Chains come last: when the tree is nearly full, candidates matter more than what lies far below them.
        for node, chain in chains:
            self._add_chain(node, chain, drafter)

    def _add(self, parent: int, token: int, lp: float, drafter: str) -> int | None:
        """Create a child unless the tree is full or the token is not one of the target's."""
        if len(self.tree) >= self._policy.max_nodes or not self._limits.allows(token):
            return None
        self.num_grafts += is_graft(self.tree, parent, drafter)
        return self.tree.add(parent, token, lp, drafter)

    def _score_again(self, child: int, lp: float, drafter: str) -> None:
        """An existing child is proposed again.

        The medium always takes the edge over; the small scores only its own chain nodes and is otherwise just recorded.
        """
        tree = self.tree
        if drafter == self._policy.medium or (child in self._tails and tree.scorer[child] == drafter):
            tree.rescore(child, lp, drafter)
        elif tree.scorer[child] != drafter:
            tree.record(child, lp, drafter)

    def _add_chain(self, node: int, chain: tuple[tuple[int, float], ...], drafter: str) -> None:
        """Hang a suffix below `node`, walking over what is there already; it ends where a branch must end."""
        for token, lp in chain:
            if not self._limits.is_open(self.tree, node):
                return
            child = self.tree.children[node].get(token)
            if child is None:
                child = self._add(node, token, lp, drafter)
                if child is None:
                    return
                self._tails.add(child)
            node = child

    def _open(self, nodes: Sequence[int]) -> list[int]:
        """Those of `nodes` that may get children and are worth it, ascending."""
        least = self._policy.min_expansion
        floor = math.log(least) if least > 0.0 else -math.inf
        return sorted(v for v in set(nodes) if self.tree.score[v] >= floor and self._limits.is_open(self.tree, v))
