"""What a drafter is to the engine: it follows a sequence and, asked about nodes of a draft tree, answers with candidates.

A drafter owns what it needs to remember about a sequence (cache rows, an index) in a state object that the engine keeps
beside the sequence and hands back. It never fails a request: a drafter that cannot go on for a sequence answers with
:class:`Halt` and is not asked again for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from models.kv_cache import RowPool
from models.sampling import SamplingParams
from tree.growth import Answer, Ask
from tree.tree import TokenTree

Race = Callable[[int, int], torch.Tensor]
"""(depth of a node, size) -> the `[size]` standard exponentials, on the CPU, with which the target will race for the token
after the node (:mod:`drafters.race`). Nobody may write to them."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence's question in one drafting step."""

    state: Any  # what `open` returned for this sequence
    context: Sequence[int]  # verified tokens so far, prompt included; the last one is the root of `tree`
    tree: TokenTree
    ask: Ask
    sampling: SamplingParams | None = None  # how the request samples, for asks that want rows to draw from
    target_rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The target's cache rows of the verified tokens it has been fed, in order; all but the root while decoding."""
    num_cached: int | None = None
    """Tokens at the beginning whose rows the target had from another text, so their hidden states do not come in. None: the
    server keeps nothing of texts that are over, and neither does the drafter."""
    race: Race | None = None
    """How the target will draw the tokens that are to be guessed. None: it will not draw, or by a rule whose law needs drafts
    that know nothing of its numbers."""


@dataclass(frozen=True, slots=True)
class Halt:
    """A drafter's refusal to go on with one sequence; `reason` is a short, bounded word (a metric label)."""

    reason: str  # "context", "nan", "features", "error"; or "rows", after which it is asked again some tokens later


class Drafter(Protocol):
    """Proposes tokens for the nodes of draft trees."""

    name: str  # its role in schedules and metrics: "ngram", "small", "medium"
    runs_model: bool  # False: free of forwards, not worth batching
    layers: tuple[int, ...]  # of the target, whose outputs it wants to `observe`; empty for most

    def open(self) -> Any:
        """State for a new sequence; cheap, nothing is computed before the first `propose`."""

    def observe(self, state: Any, start: int, hidden: torch.Tensor) -> None:
        """The target's hidden states `[n, len(layers), hidden]` of the verified tokens `start` to `start + n - 1`.

        Called for every verified token in order, and only if `layers` names some. The first one is token 0, or a later one if
        the target had rows of the tokens in front of it from another text, or if the drafter was out of rows for a while.
        """

    def passes(self, request: DraftRequest) -> tuple[int, ...]:
        """Rows of each forward that answering would take, one after the other; empty if it takes none."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        """Answer several sequences' questions together."""

    def commit(self, state: Any, context: Sequence[int], tree: TokenTree | None, path: Sequence[int]) -> None:
        """The step is over: keep what belongs to the accepted `path` of `tree`, forget the other nodes.

        `context` is the verified text *before* this step's tokens were appended (its last token is the tree's root).
        """

    def close(self, state: Any) -> None:
        """The sequence is over; give back everything its state holds. Safe to call twice."""


class Pooled(Protocol):
    """A model with a pool of cache rows."""

    @property
    def pool(self) -> RowPool: ...


@runtime_checkable
class KeepsRows(Protocol):
    """A drafter whose model has cache rows of its own."""

    @property
    def lm(self) -> Pooled: ...


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A drafter that keeps rows of texts that are over, for texts that begin alike."""

    def num_known(self, text: list[int]) -> int:
        """Tokens at the beginning of a new text whose hidden states the drafter can do without."""

    def keep(self, state: Any) -> None:
        """The text is over, or put off, in good order: keep its rows; `close` follows."""

    def forget_prefixes(self) -> None:
        """Give all kept rows back that no text in flight stands on."""
