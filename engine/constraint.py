"""What a grammar allows, per node: the text so far and the node's own path decide which tokens may follow.

A grammar is known here as a :class:`Grammar`, one place in a text of it; who writes grammars down and compiles them is not
the engine's business. A :class:`Constraint` follows one answer through it. As with penalties (:mod:`engine.adjust`) a row of
logits is masked for its own context, before any decision rule, so what is accepted under a tree is what one token at a time
would have given; and what drafters propose is masked the same way before it enters a tree, so no row is spent on a token
that cannot be accepted. Taking a token out of a drafter's row *before* children are drawn from it leaves ratio rules exact.

Rules for the ends of answers:

* A token that ends the answer may come where the grammar accepts the text before it, or where the token's own text may go on
  (an ordinary token that the request names as an end then cuts the answer, as a stop string would).
* Where the grammar accepts and nothing but an end can follow, the answer is over at once. No end token is spent on it.
* The least length (``min_tokens``) gives way where the grammar leaves nothing but ends.
* Where nothing can follow and the grammar does not accept, the request fails; a grammar over a vocabulary that can spell
  every text does not get there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tree.growth import Answer, Candidates
from tree.tree import TokenTree

Allowed = npt.NDArray[np.bool_]
"""``[vocab]``: whether each token may follow. Never written to."""


class ConstraintError(RuntimeError):
    """No answer can come of this any more; the text says why and may be shown to the caller."""


class Grammar(Protocol):
    """One place in a text of a grammar. Immutable, so that places in a draft tree, and answers, can share it."""

    @property
    def is_accepting(self) -> bool:
        """Whether the text up to here is a whole text of the grammar."""

    def allowed(self) -> Allowed:
        """``[vocab]``: tokens whose text may follow. What only ends a text is not among them. Not to be written to.

        Raises ConstraintError if that is too hard to find out.
        """

    def after(self, token: int) -> Grammar | None:
        """The place behind one token more; None if it may not follow, or if that is too hard to find out."""


class Constraint:
    """Where one answer is in its grammar, and where it would be along the paths of a draft tree.

    Every place is computed once for as long as it can be reached; growing, verifying and committing look up the same ones.
    """

    def __init__(self, start: Grammar, ends: Collection[int]) -> None:
        """At the beginning of the answer.

        Args:
            start: the place of the empty text.
            ends: token ids that end the answer.
        """
        self._ends = sorted(ends)
        self._places: dict[tuple[int, ...], Grammar | None] = {(): start}
        self._rows: dict[tuple[int, ...], Allowed | None] = {}
        self.is_complete = self._complete(start)

    def place(self, path: Sequence[int]) -> Grammar | None:
        """The place behind the answer so far and the tokens of `path`; None if the grammar does not allow them."""
        key = tuple(path)
        if key not in self._places:
            above = self.place(key[:-1])
            self._places[key] = None if above is None else above.after(key[-1])
        return self._places[key]

    def row(self, path: Sequence[int]) -> Allowed | None:
        """``[vocab]`` tokens that may follow behind `path`, ends included; None where there is nothing to decide any more.

        That is behind a forbidden token, where the answer is over, and where it cannot go on.
        """
        key = tuple(path)
        if key not in self._rows:
            try:
                self._rows[key] = self._row(self.place(key))
            except ConstraintError:  # of a path that may never be taken; if it is, `advance` meets the same error
                self._rows[key] = None
        return self._rows[key]

    def advance(self, token: int) -> None:
        """The answer grew by a token that is no end. Raises ConstraintError if it cannot go on from there."""
        place = self.place([token])
        if place is None:
            raise ConstraintError("the grammar became too complex to follow")
        for known in (self._places, self._rows):
            kept = {path[1:]: value for path, value in known.items() if path[:1] == (token,)}
            known.clear()
            known.update(kept)  # type: ignore[arg-type]
        self.is_complete = self._complete(place)

    def _complete(self, place: Grammar) -> bool:
        """Whether nothing but an end can follow. Raises ConstraintError where nothing can follow at all."""
        allowed = place.allowed()
        if place.is_accepting:
            return not _without(allowed, self._ends).any()
        if not allowed.any():
            raise ConstraintError("no token can follow the text that the grammar has led to")
        return False

    def _row(self, place: Grammar | None) -> Allowed | None:
        if place is None or self._complete(place):
            return None
        allowed = place.allowed()
        if place.is_accepting and self._ends:
            allowed = allowed.copy()
            allowed[[end for end in self._ends if end < len(allowed)]] = True
        return allowed

    def masked(self, logits: torch.Tensor, tree: TokenTree, nodes: Sequence[int], num_required: int) -> torch.Tensor:
        """Logits in which tokens that the grammar forbids, or that end the answer too early, are impossible.

        Args:
            logits: ``[len(nodes), vocab]``, any floating dtype; left as they are.
            tree: whose root is the last token of the answer so far.
            nodes: row i of `logits` decides what follows node ``nodes[i]``.
            num_required: tokens that must follow the root before one may end the answer.

        Returns:
            ``[len(nodes), vocab]``, -inf at what must not follow. Rows where nothing is to be decided stay as they are: what
            is behind them is cut off.
        """
        keep = np.ones(tuple(logits.shape), dtype=np.bool_)
        for i, node in enumerate(nodes):
            row = self.row(tree.path_tokens(node))
            if row is None:
                continue
            if tree.depth[node] < num_required:
                longer = _without(row, self._ends)
                row = longer if longer.any() else row
            keep[i, : len(row)] = row[: logits.shape[1]]
            keep[i, len(row) :] = False
        return logits.masked_fill(~torch.from_numpy(keep).to(logits.device), -torch.inf)

    def admit(self, answer: Answer, tree: TokenTree) -> Answer:
        """A drafter's answer without what the grammar forbids at each node."""
        candidates = {node: self._admit(tree.path_tokens(node), proposed) for node, proposed in answer.candidates.items()}
        rows = {node: self._weights(tree.path_tokens(node), row) for node, row in answer.rows.items()}
        return replace(answer, candidates=candidates, rows=rows)

    def _admit(self, path: list[int], proposed: Candidates) -> Candidates:
        allowed = self.row(path)
        if allowed is None:
            return replace(proposed, tokens=(), lps=(), suffixes=())
        kept = [i for i, token in enumerate(proposed.tokens) if 0 <= token < len(allowed) and allowed[token]]
        return replace(
            proposed,
            tokens=tuple(proposed.tokens[i] for i in kept),
            lps=tuple(proposed.lps[i] for i in kept),
            suffixes=tuple(self._admit_chain([*path, proposed.tokens[i]], proposed.suffixes[i]) for i in kept)
            if proposed.suffixes
            else (),
        )

    def _admit_chain(self, path: list[int], chain: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        """The beginning of `chain`, which hangs below `path`, that the grammar allows."""
        for length, (token, _) in enumerate(chain):
            allowed = self.row(path)
            if allowed is None or not 0 <= token < len(allowed) or not allowed[token]:
                return chain[:length]
            path = [*path, token]
        return chain

    def _weights(self, path: list[int], row: torch.Tensor) -> torch.Tensor:
        """A drafter's weights ``[any]``, a new tensor with 0 at what must not follow."""
        allowed = self.row(path)
        if allowed is None:
            return torch.zeros_like(row)
        keep = torch.zeros(len(row), dtype=torch.bool)
        keep[: len(allowed)] = torch.from_numpy(allowed[: len(row)])
        return torch.where(keep.to(row.device), row, torch.zeros_like(row))


def _without(allowed: Allowed, tokens: Sequence[int]) -> Allowed:
    """A copy in which `tokens` may not follow."""
    left = allowed.copy()
    left[[token for token in tokens if token < len(left)]] = False
    return left
