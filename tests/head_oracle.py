"""Trained heads beside an oracle: what the two kinds of heads have in common in tests."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from drafters.base import DraftRequest, Halt
from models.draft_head import DraftHead
from tests.plain_draft_head import PlainHead
from tests.toy_heads import plain_twin
from tree.growth import Answer, Ask
from tree.tree import TokenTree

LP_TOLERANCE = 1e-4


class Listener(ABC):
    """One sequence, its tree and its drafter's state; answers go to the oracle."""

    def __init__(self, drafter: Any, plain: PlainHead, target: PreTrainedModel, tokens: list[int]) -> None:
        self.drafter, self.plain, self.target, self.tokens = drafter, plain, target, tokens
        self.state = drafter.open()
        self.tree = TokenTree(tokens[-1])
        self.hear()

    @abstractmethod
    def hear(self) -> None:
        """Show what the target thought of all tokens but the last one, as far as it has not been shown yet."""

    @abstractmethod
    def request(self, nodes: Sequence[int], width: int = 4, rescore: bool = False) -> DraftRequest:
        """A question about nodes of the tree."""

    def check(self, answer: Answer | Halt, ask: Ask) -> Answer:
        """The answer, after it was compared with the oracle's."""
        assert isinstance(answer, Answer), answer
        assert set(answer.candidates) == set(ask.nodes)
        for node, found in answer.candidates.items():
            row = self.plain.row(self.target, self.tokens, self.tree.path_tokens(node))
            want = sorted(row, key=lambda token: -row[token])[: ask.width]
            assert found.tokens == tuple(want), f"node {node}"
            assert found.lps == pytest.approx([row[token] for token in want], abs=LP_TOLERANCE), f"node {node}"
        for node, lp in answer.rescored.items():
            row = self.plain.row(self.target, self.tokens, self.tree.path_tokens(self.tree.parent[node]))
            assert lp == pytest.approx(row.get(self.tree.token[node], -math.inf), abs=LP_TOLERANCE), f"edge above {node}"
        assert ask.rescore or not answer.rescored
        return answer

    def attach(self, answer: Answer) -> list[int]:
        """Put the candidates into the tree; the new nodes."""
        return [
            self.tree.add(node, token, lp, self.drafter.name)
            for node, found in answer.candidates.items()
            for token, lp in zip(found.tokens, found.lps, strict=True)
            if token not in self.tree.children[node]
        ]

    def commit(self, path: Sequence[int], extra: int) -> None:
        """End the step as the engine does."""
        self.drafter.commit(self.state, self.tokens, self.tree, path)
        self.tokens = [*self.tokens, *(self.tree.token[node] for node in path), extra]
        self.tree = TokenTree(extra)
        self.hear()


def ask(listeners: Sequence[Listener], requests: Sequence[DraftRequest]) -> list[Answer]:
    """One call for all; every answer checked."""
    answers = listeners[0].drafter.propose(requests)
    assert len(answers) == len(requests)
    return [
        listener.check(answer, request.ask)
        for listener, request, answer in zip(listeners, requests, answers, strict=True)
    ]


class ComparesAnswers:
    """Mixed into a drafter: every answer is compared with the oracle, on the text and tree that the engine asked about."""

    def watch(self, head: DraftHead, target: PreTrainedModel) -> None:
        """Begin; called once."""
        self.plain: PlainHead = plain_twin(head, target)
        self.plain_target = target
        self.wrong, self.compared = 0.0, 0
        self.rows: dict[tuple[int, ...], dict[int, float]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        answers: list[Answer | Halt] = super().propose(requests)  # type: ignore[misc]
        for request, answer in zip(requests, answers, strict=True):
            assert isinstance(answer, Answer), answer
            for node, found in answer.candidates.items():
                self._compare(request, node, zip(found.tokens, found.lps, strict=True))
            for node, lp in answer.rescored.items():
                self._compare(request, request.tree.parent[node], [(request.tree.token[node], lp)])
        return answers

    def _compare(self, request: DraftRequest, node: int, scored: Iterable[tuple[int, float]]) -> None:
        text, path = tuple(request.context), tuple(request.tree.path_tokens(node))
        if (key := (len(text), *text, *path)) not in self.rows:
            self.rows[key] = self.plain.row(self.plain_target, text, path)
        for token, lp in scored:
            self.wrong = max(self.wrong, abs(lp - self.rows[key][token]))
            self.compared += 1
