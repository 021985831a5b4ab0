"""Drafting by looking up: what followed the last few tokens when they came up before? Costs no forward.

The lookup is that of the public code for arXiv 2608.26112: n-grams of up to five tokens of the verified text, longest
first; every earlier occurrence, most recent first, proposes the token after it and a chain of tokens after that;
lengths below are consulted only until `width` distinct tokens are found; a node with fewer is *terminal*. Chains get
shorter with depth: 5, 4, 3, 2, 1, 1, ... tokens, their head included. Two things are ours:

* *Scores.* That code reads cached target probabilities; we estimate the chance that a proposal is accepted from
  counts, as a predictor by partial matching does. A context of n tokens seen C times, c of them followed by t, predicts
  t with probability c / (C + b_n), and leaves b_n / (C + b_n) to the contexts shorter by one. The longer the match, the
  smaller b_n. What a node's children get sums to less than one.
* *Chains read on.* A chain that reaches the end of the text goes on with the draft itself, as in LZ77 copies, so a text
  with a period of two tokens still gets a chain of five.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from drafters.base import DraftRequest, Halt
from tree.growth import Answer, Ask, Candidates
from tree.tree import TokenTree

MAX_N = 5
"""Longest context looked up, and the longest chain."""

_ESCAPE = (math.inf, 16.0, 5.0, 2.0, 0.8, 0.3)
"""b_n by n: after one occurrence, a match of 1 to 5 tokens is believed by 0.06, 0.17, 0.33, 0.56 and 0.77."""


class _Followers:
    """What followed an n-gram that occurred more than once."""

    __slots__ = ("by_token", "total")

    def __init__(self, token: int, position: int) -> None:
        self.total = 1
        self.by_token: dict[int, tuple[int, int]] = {
            token: (1, position)
        }  # how often, where last; in order of the latter

    def push(self, token: int, position: int) -> None:
        times, _ = self.by_token.pop(token, (0, 0))
        self.by_token[token] = (times + 1, position)
        self.total += 1


class NgramIndex:
    """All n-grams of a growing text, n from `min_n` to five, and what followed them.

    Invariant: an n-gram's occurrence is indexed once the token after it is known, so the text's own end is never a
    match.
    """

    __slots__ = ("_best", "_counts", "_followers", "min_n", "tokens")

    def __init__(self, min_n: int = 1) -> None:
        """An index of nothing. Raises ValueError unless 1 <= min_n <= 5."""
        if not 1 <= min_n <= MAX_N:
            raise ValueError(f"min_n must be between 1 and {MAX_N}, not {min_n}")
        self.min_n = min_n
        self.clear()

    def __len__(self) -> int:
        """Number of tokens indexed."""
        return len(self.tokens)

    @property
    def most_frequent(self) -> int | None:
        """The most frequent token, of equals the one that got there first; None when empty."""
        return self._best

    def clear(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        # Of an n-gram that occurred once, as most do, only the position after it is kept.
        self._followers: dict[tuple[int, ...], int | _Followers] = {}
        self._counts: dict[int, int] = {}
        self._best: int | None = None

    def push(self, token: int) -> None:
        """Append one token; constant time."""
        position = len(self.tokens)
        tail = tuple(self.tokens[-MAX_N:])
        followers = self._followers
        for n in range(self.min_n, len(tail) + 1):
            key = tail[-n:]
            seen = followers.get(key)
            if seen is None:
                followers[key] = position
                continue
            if isinstance(seen, int):
                seen = followers[key] = _Followers(self.tokens[seen], seen)
            seen.push(token, position)
        self.tokens.append(token)
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._best is None or self._counts[token] > self._counts[self._best]:
            self._best = token

    def extend(self, tokens: Sequence[int]) -> None:
        """Append several tokens."""
        for token in tokens:
            self.push(token)

    def candidates(self, context_tail: Sequence[int], k: int) -> list[tuple[int, float, int]]:
        """Up to `k` distinct tokens that followed the end of `context_tail`; longest match first, then most recent.

        Each comes with its log-probability and the position in :attr:`tokens` of its last occurrence after that match.
        A token found under two lengths keeps the longer. `context_tail` may go beyond the indexed text (a path of a
        tree); only its last five tokens are looked at.
        """
        tail = tuple(context_tail[-MAX_N:])
        found: dict[int, tuple[int, float, int]] = {}
        left = 1.0  # probability that longer matches leave to this length
        for n in range(len(tail), self.min_n - 1, -1):
            seen = self._followers.get(tail[-n:])
            if seen is None:
                continue
            if isinstance(seen, int):
                total = 1.0 + _ESCAPE[n]
                token = self.tokens[seen]
                if token not in found:
                    found[token] = (token, math.log(left / total), seen)
            else:
                total = seen.total + _ESCAPE[n]
                for token, (times, position) in reversed(seen.by_token.items()):
                    if token not in found:
                        found[token] = (token, math.log(left * times / total), position)
                        if len(found) == k:
                            break
            if len(found) >= k:
                break
            left *= _ESCAPE[n] / total
        return list(found.values())

    def lp(self, context_tail: Sequence[int], token: int) -> float | None:
        """The log-probability :meth:`candidates` with no limit gives to one token; None if it never followed."""
        tail = tuple(context_tail[-MAX_N:])
        left = 1.0
        for n in range(len(tail), self.min_n - 1, -1):
            seen = self._followers.get(tail[-n:])
            if seen is None:
                continue
            if isinstance(seen, int):
                total, times = 1.0 + _ESCAPE[n], int(self.tokens[seen] == token)
            else:
                total, times = seen.total + _ESCAPE[n], seen.by_token.get(token, (0, 0))[0]
            if times:
                return math.log(left * times / total)
            left *= _ESCAPE[n] / total
        return None

    def share(self, token: int) -> float:
        """The share of the text that is `token`."""
        return self._counts.get(token, 0) / max(len(self.tokens), 1)


class NgramDrafter:
    """A drafter that needs no model. Its state of a sequence is the :class:`NgramIndex` of the sequence's text."""

    name = "ngram"
    runs_model = False

    def __init__(self, *, min_n: int = 1, fallback: Literal["none", "frequent"] = "none") -> None:
        """Set the drafter up.

        Args:
            min_n: shortest match, 1 to 5; 2 proposes less and is right more often.
            fallback: what to propose after the root if nothing matches. "none": nothing, so that the step costs nothing
                extra; "frequent": the text's most frequent token, as that code does, so that a tree is never empty.
        """
        if fallback not in ("none", "frequent"):
            raise ValueError(f"fallback must be 'none' or 'frequent', not {fallback!r}")
        NgramIndex(min_n)  # refuses a bad min_n now and not with the first request
        self.min_n = min_n
        self.fallback = fallback

    def open(self) -> NgramIndex:
        """An empty index; the first :meth:`propose` reads the prompt."""
        return NgramIndex(self.min_n)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        """Look every asked node up, its path below the root included."""
        return [self._answer(r.state, r.context, r.tree, r.ask) for r in requests]

    def commit(self, state: NgramIndex, context: Sequence[int], tree: TokenTree | None, path: Sequence[int]) -> None:
        """Nothing to do: drafted tokens never enter the index, and accepted ones are read with the next question."""

    def close(self, state: NgramIndex) -> None:
        """Forget the text."""
        state.clear()

    def _answer(self, index: NgramIndex, context: Sequence[int], tree: TokenTree, ask: Ask) -> Answer:
        assert len(index) <= len(context), f"the text shrank from {len(index)} to {len(context)} tokens"
        index.extend(context[len(index) :])
        end = index.tokens[-MAX_N:]
        rescored: dict[int, float] = {}
        if ask.rescore:
            for node in range(1, len(tree)):
                lp = index.lp(end + tree.path_tokens(tree.parent[node]), tree.token[node])
                if lp is not None:
                    rescored[node] = lp
        return Answer({node: self._candidates(index, end, tree, node, ask.width) for node in ask.nodes}, rescored)

    def _candidates(self, index: NgramIndex, end: list[int], tree: TokenTree, node: int, width: int) -> Candidates:
        path = tree.path_tokens(node)
        found = index.candidates(end + path, width)
        frequent = index.most_frequent
        if not found and self.fallback == "frequent" and node == 0 and frequent is not None:
            return Candidates((frequent,), (math.log(index.share(frequent)),), ((),), terminal=width > 1)
        terminal = len(found) < width
        found.sort(key=lambda candidate: (-candidate[1], candidate[0]))
        length = max(1, MAX_N - tree.depth[node])
        return Candidates(
            tokens=tuple(token for token, _, _ in found),
            lps=tuple(lp for _, lp, _ in found),
            suffixes=tuple(_chain(index, end, [*path, token], position, length) for token, _, position in found),
            terminal=terminal,
        )


def _chain(
    index: NgramIndex, end: list[int], path: list[int], position: int, length: int
) -> tuple[tuple[int, float], ...]:
    """Up to ``length - 1`` (token, lp) that follow the candidate at the end of `path`, read from `position` on."""
    drafted = list(path)
    chain: list[tuple[int, float]] = []
    text = index.tokens
    for source in range(position + 1, position + length):
        token = text[source] if source < len(text) else drafted[source - len(text)]
        lp = index.lp(end + drafted, token)
        if lp is None:
            break
        chain.append((token, lp))
        drafted.append(token)
    return tuple(chain)
