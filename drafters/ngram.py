"""Drafting by looking up: what followed the last few tokens when they came up before? Costs no forward.

The lookup is that of the public code for arXiv 2608.26112: n-grams of up to five tokens of the verified text, longest
first; earlier occurrences, most recent first, propose the token after them and a chain of tokens after that; lengths
below are consulted only until `width` distinct tokens are found; a node with fewer is *terminal*. Chains get shorter with
depth: 5, 4, 3, 2, 1, 1, ... tokens, their head included. Ours are:

* *Scores.* That code reads cached target probabilities; we estimate the chance that a proposal is accepted from
  counts, as a predictor by partial matching does. A context of n tokens seen C times, c of them followed by t, predicts
  t with probability c / (C + b_n), and leaves b_n / (C + b_n) to the contexts shorter by one. The longer the match, the
  smaller b_n. What a node's children get sums to less than one.
* *Chains read on.* A chain that reaches the end of the text goes on with the draft itself, as in LZ77 copies, so a text
  with a period of two tokens still gets a chain of five.
* *A corpus.* Where matches of two tokens and more in the text give fewer than `width` tokens, an index over other texts is
  asked before single tokens are (:mod:`drafters.corpus`).
* *Bounds.* Of each context the last 32 occurrences count, the text's oldest part is forgotten, and a long prompt is read in
  pieces, answers in between being drawn from what was read (:mod:`drafters.ngram_index`).

A later turn of a conversation has the earlier ones in its prompt, so they are matched like everything else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from drafters.base import DraftRequest, Halt, Race
from drafters.corpus import LONGEST_CONTEXT, CorpusIndex
from drafters.ngram_index import MAX_N, Followers, NgramIndex
from drafters.race import chance_to_win
from tree.growth import Answer, Candidates
from tree.tree import TokenTree

READ_AT_ONCE = 8192
"""Tokens of text indexed in one call, all sequences together: a long prompt must not hold up the answers of others."""
READ_AT_LEAST = 512
"""Tokens every sequence may read in each call even so: more than a step can add, so each keeps up."""

_ESCAPE = (math.inf, 4.5, 1.4, 1.0, 0.8, 0.2)
"""b_n by n: after one occurrence, a match of 1 to 5 tokens is believed by 0.18, 0.42, 0.50, 0.56 and 0.83.

Fitted to acceptance of the four best proposals at 41,000 positions of answers that SmolLM2-135M-Instruct wrote (half greedily,
half at temperature 0.7); on as many others, bins of predicted probability were within 0.08 of what was observed.
"""
_CORPUS_ESCAPE = (math.inf, math.inf, 3.0, 1.5, 0.7, 0.7, 0.7, 0.7, 0.7)
_CORPUS_TRUST = 0.5
"""The same for a match of 2 to 8 tokens in the corpus, and the part of its probability that is believed.

The same answers, with other answers of the model as the corpus: the token that followed most often was right half to three
quarters as often as its share of the occurrences says, in documentation of software a quarter to a half.
"""
_RECENT = 256  # tokens at the end of the text among which the "frequent" guess is chosen


@dataclass(slots=True, eq=False)
class Memory:
    """What the drafter remembers about one sequence."""

    index: NgramIndex
    # Lookups since the index last grew, by context; growing a tree asks for the same ones again and again.
    known: dict[tuple[int, ...], Followers | None] = field(default_factory=dict)
    known_elsewhere: dict[tuple[int, ...], Followers | None] = field(default_factory=dict)  # those in the corpus

    def forget_lookups(self) -> None:
        """The text has grown."""
        self.known.clear()
        self.known_elsewhere.clear()


class NgramDrafter:
    """A drafter that needs no model."""

    name = "ngram"
    runs_model = False
    layers: tuple[int, ...] = ()  # it reads tokens, nothing of the target's

    def __init__(
        self,
        *,
        min_n: int = 1,
        fallback: Literal["none", "frequent"] = "none",
        window: int = 65536,
        corpus: CorpusIndex | None = None,
    ) -> None:
        """Set the drafter up.

        Args:
            min_n: shortest match, 1 to 5; 2 proposes less and is right more often.
            fallback: what to propose after the root if nothing matches. "none": nothing, so that the step costs nothing
                extra; "frequent": the most frequent token of the text's last 256, so that a tree is never empty.
            window: most tokens of a text that are remembered, the latest; 60 bytes each.
            corpus: other texts to look things up in, shared by all sequences.

        Raises:
            ValueError: `min_n`, `fallback` or `window` is out of range.
        """
        if not 1 <= min_n <= MAX_N:
            raise ValueError(f"min_n must be between 1 and {MAX_N}, not {min_n}")
        if fallback not in ("none", "frequent"):
            raise ValueError(f"fallback must be 'none' or 'frequent', not {fallback!r}")
        NgramIndex(window)  # refuses a bad window now and not with the first request
        self.min_n = min_n
        self.fallback = fallback
        self.window = window
        self.corpus = corpus

    def open(self) -> Memory:
        """An empty memory; the first :meth:`propose` begins to read the prompt."""
        return Memory(NgramIndex(self.window))

    def observe(self, state: Memory, start: int, hidden: torch.Tensor) -> None:
        """Nothing to take in."""

    def passes(self, request: DraftRequest) -> tuple[int, ...]:
        """None."""
        return ()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        """Look every asked node up, its path below the root included, in what has been read of each text."""
        left = READ_AT_ONCE
        answers: list[Answer | Halt] = []
        for request in requests:
            count = request.state.index.read(request.context, max(left, READ_AT_LEAST))
            left -= count
            if count:
                request.state.forget_lookups()
            answers.append(self._answer(request))
        return answers

    def commit(self, state: Memory, context: Sequence[int], tree: TokenTree | None, path: Sequence[int]) -> None:
        """Nothing to do: drafted tokens never enter the index, and accepted ones are read with the next question."""

    def close(self, state: Memory) -> None:
        """Forget the text."""
        state.index.clear()
        state.forget_lookups()

    def _answer(self, request: DraftRequest) -> Answer:
        tree, ask = request.tree, request.ask
        lookup = Lookup(request.state, request.context, self.corpus, self.min_n, request.race)
        rescored: dict[int, float] = {}
        if ask.rescore:
            for node in range(1, len(tree)):
                lp = lookup.lp(tree.path_tokens(tree.parent[node]), tree.token[node])
                if lp is not None:
                    rescored[node] = lp
        return Answer({node: self._candidates(lookup, tree, node, ask.width) for node in ask.nodes}, rescored)

    def _candidates(self, lookup: Lookup, tree: TokenTree, node: int, width: int) -> Candidates:
        path = tree.path_tokens(node)
        found = lookup.candidates(path, width)
        if not found and self.fallback == "frequent" and node == 0:
            recent = Counter(lookup.text[-_RECENT:])
            (token, times) = recent.most_common(1)[0]
            return Candidates((token,), (math.log(times / recent.total()),), ((),), terminal=width > 1)
        terminal = len(found) < width
        found.sort(key=lambda proposal: (-proposal.lp, proposal.token))
        length = max(1, MAX_N - tree.depth[node])
        return Candidates(
            tokens=tuple(proposal.token for proposal in found),
            lps=tuple(proposal.lp for proposal in found),
            suffixes=tuple(lookup.chain(path, proposal, length) for proposal in found),
            terminal=terminal,
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """A token that may come next."""

    token: int
    lp: float  # estimated log-probability that the target agrees, < 0
    position: int  # where it was seen, in the text or in the corpus
    in_corpus: bool


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What followed one context in one place, and what that is worth."""

    followers: Followers
    unit: float  # estimated probability per occurrence
    in_corpus: bool


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """One sequence's sources at one moment. A `path` is drafted tokens that follow the end of `text`."""

    memory: Memory
    text: Sequence[int]
    corpus: CorpusIndex | None
    min_n: int
    race: Race | None = None  # by which the target will draw

    def candidates(self, path: Sequence[int], k: int) -> list[Proposal]:
        """Up to `k` distinct tokens that followed the end of `path`: by source, then most recent (corpus: frequent) first.

        A token found twice keeps the first, which is the longer match.
        """
        found: dict[int, Proposal] = {}
        for evidence in self._evidence(path):
            for token, (times, position) in evidence.followers.by_token.items():
                if token not in found:
                    lp = self._score(path, token, evidence.unit * times)
                    found[token] = Proposal(token, lp, position, evidence.in_corpus)
                    if len(found) == k:
                        return list(found.values())
        return list(found.values())

    def lp(self, path: Sequence[int], token: int) -> float | None:
        """The log-probability that :meth:`candidates` with no limit gives to one token; None if it never followed."""
        for evidence in self._evidence(path):
            if token in evidence.followers.by_token:
                return self._score(path, token, evidence.unit * evidence.followers.by_token[token][0])
        return None

    def chain(self, path: Sequence[int], head: Proposal, length: int) -> tuple[tuple[int, float], ...]:
        """Up to ``length - 1`` (token, lp) that follow `head` where it was seen; `head` follows `path`."""
        drafted = [*path, head.token]
        chain: list[tuple[int, float]] = []
        for position in range(head.position + 1, head.position + length):
            token = self._read(position, head.in_corpus, drafted)
            lp = None if token is None else self.lp(drafted, token)
            if token is None or lp is None:
                break
            chain.append((token, lp))
            drafted.append(token)
        return tuple(chain)

    def _score(self, path: Sequence[int], token: int, chance: float) -> float:
        """The log-probability that the target agrees on `token` after `path`, which it finds likely by `chance`."""
        if self.race is None:
            return math.log(chance)
        return chance_to_win(chance, float(self.race(len(path), token + 1)[token]))

    def _read(self, position: int, in_corpus: bool, drafted: list[int]) -> int | None:
        """The token at a position of the text, then of the draft behind it, or of the corpus; None at a document's end."""
        if not in_corpus:
            return self.text[position] if position < len(self.text) else drafted[position - len(self.text)]
        assert self.corpus is not None
        token = self.corpus.tokens[position]
        return token if token >= 0 else None

    def _evidence(self, path: Sequence[int]) -> Iterator[_Evidence]:
        """What followed the end of `path`, best first: in the text after five to two tokens, in the corpus, after one token."""
        tail = (*self.text[-LONGEST_CONTEXT:], *path)[-LONGEST_CONTEXT:]
        latest = self.memory.index.latest(tail[-MAX_N:])
        left = 1.0  # probability that longer matches leave to shorter ones
        for n in range(min(len(tail), MAX_N), 0, -1):
            if n == 1 and self.corpus is not None:
                elsewhere = self._followers_elsewhere(self.corpus, tail)
                if elsewhere is not None:
                    unit = left * _CORPUS_TRUST / (elsewhere.total + _CORPUS_ESCAPE[elsewhere.length])
                    yield _Evidence(elsewhere, unit, in_corpus=True)
                    left -= unit * elsewhere.total
            if n >= self.min_n and latest[n - 1]:
                followers = self._followers(tail[-n:], latest[n - 1])
                if followers is not None:
                    unit = left / (followers.total + _ESCAPE[n])
                    yield _Evidence(followers, unit, in_corpus=False)
                    left -= unit * followers.total

    def _followers(self, context: tuple[int, ...], position: int) -> Followers | None:
        known = self.memory.known
        if context not in known:
            known[context] = self.memory.index.followers(self.text, context, position)
        return known[context]

    def _followers_elsewhere(self, corpus: CorpusIndex, tail: tuple[int, ...]) -> Followers | None:
        known = self.memory.known_elsewhere
        if tail not in known:
            known[tail] = corpus.followers(tail)
        return known[tail]
