"""The draft trees of an answer as the API shows them, and who wrote which piece of its text.

A choice whose body says ``"speculative": {"trace": true}`` carries ``graft``::

    {"tokens": [{"index", "text", "creator"}, …], "steps": [{"step", "nodes", "bonus", …}, …], "truncated": false}

In a stream every chunk's choice has the part that came since the one before, so the lists of all chunks, joined, are those of
a whole answer. Steps are bounded in number for each choice and in bytes for the answer; behind the bound ``truncated`` is
true and only tokens go on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

from app.token_authors import TokenAuthors
from app.token_text import TokenTexts
from engine.request import Delta
from engine.text import byte_fallback_ids
from engine.trace import NodeTrace, StepTrace

MAX_STEPS = 1024  # described for each choice
MAX_BYTES = 4 * 2**20  # of all steps of an answer together, as JSON


class Vocabulary(Protocol):
    """What is needed of a ``transformers`` tokenizer."""

    def decode(self, ids: Any, /, **options: Any) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


class Tracing:
    """Opens the traces of answers. Nothing is computed before the first one."""

    def __init__(self, tokenizer: Vocabulary, texts: TokenTexts) -> None:
        """`texts` names single tokens."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._byte_ids: frozenset[int] | None = None

    def choices(self, count: int) -> list[ChoiceTrace]:
        """Traces of one answer's choices."""
        if self._byte_ids is None:
            self._byte_ids = byte_fallback_ids(self._tokenizer.get_vocab())
        bound = ByteBound()
        return [ChoiceTrace(TokenAuthors(self._decode, self._byte_ids), self._texts, bound) for _ in range(count)]

    def _decode(self, ids: Sequence[int]) -> str:  # as the engine does
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class ByteBound:
    """Room for the steps of one answer, shared by its choices. Once something did not fit, nothing does."""

    def __init__(self, num_bytes: int = MAX_BYTES) -> None:
        self._left = num_bytes

    def admits(self, step: dict[str, Any]) -> bool:
        """Whether the step fits into what is left, which it then takes."""
        self._left -= len(json.dumps(step, separators=(",", ":")))
        return self._left >= 0


class ChoiceTrace:
    """What is to be told of one choice. :meth:`take` every delta, then :meth:`give` whenever something is sent."""

    def __init__(self, authors: TokenAuthors, texts: TokenTexts, bound: ByteBound) -> None:
        """Nothing has been booked yet."""
        self._authors = authors
        self._texts = texts
        self._bound = bound
        self._tokens: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._is_truncated = False

    def take(self, delta: Delta) -> None:
        """Book what a delta says."""
        self._tokens += [
            {"index": index, "text": text, "creator": self._authors.creator(index)}
            for text, index in self._authors.split_by_token(delta)
        ]
        if delta.trace is None:
            self._is_truncated |= bool(delta.token_ids)  # a step that the engine did not describe any more
        elif not self._is_truncated:
            step = step_object(delta.trace, self._texts)
            if self._bound.admits(step):
                self._steps.append(step)
            else:
                self._is_truncated = True

    def give(self) -> dict[str, Any]:
        """The ``graft`` object of all that has been booked since the last call."""
        given = {"tokens": self._tokens, "steps": self._steps, "truncated": self._is_truncated}
        self._tokens, self._steps = [], []
        return given


def step_object(step: StepTrace, texts: TokenTexts) -> dict[str, Any]:
    """One step as JSON; natural logarithms with four decimals."""
    return {
        "step": step.index,
        "first_token": step.first_token,
        "num_tokens": step.num_tokens,
        "nodes": [_node(node, texts) for node in step.nodes],
        "bonus": {
            "token_id": step.extra_id,
            "text": texts(step.extra_id).text,
            "target_logprob": round(step.extra_logprob, 4),
        },
        "forwards": dict(step.forwards),
        "draft_ms": round(1000 * step.draft_s, 3),
        "verify_ms": round(1000 * step.verify_s, 3),
    }


def _node(node: NodeTrace, texts: TokenTexts) -> dict[str, Any]:
    assert all(map(math.isfinite, node.logprobs.values())), "traces hold finite numbers only"
    return {
        "token_id": node.token_id,
        "text": texts(node.token_id).text,
        "parent": node.parent,
        "depth": node.depth,
        "creator": node.creator,
        "scorer": node.scorer,
        "logprobs": {name: round(lp, 4) for name, lp in node.logprobs.items()},
        "path_logprob": round(node.path_logprob, 4),
        "target_logprob": None if node.target_logprob is None else round(node.target_logprob, 4),
        "rescored": node.scorer != node.creator,
        "verified": node.is_verified,
        "accepted": node.is_accepted,
    }
