"""A head made of the target's last layers as a drafter: it looks at the target's own cache, so it has nothing to catch up on.

The root's entry joins the target's hidden state of the token before the root, which the last verification left behind, with the
embedding of the root; a node's entry takes the head's own hidden state of the entry above it instead. All entries go at the end
of a step: by then the target has been fed what was accepted.

A node can be entered only after the one above it, so a tree that another drafter grew is entered layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafters.base import DraftRequest, Halt
from drafters.reading import layers_of, missing_nodes, read_answer
from models.tail_lm import Beside, Sprout, TailLM
from tree.flatten import visible
from tree.growth import Answer
from tree.tree import TokenTree


@dataclass(slots=True, eq=False)
class Tail:
    """What the head remembers about one sequence."""

    beside: Beside | None = None  # the target's keys and values of the text, where copying them pays
    heard: torch.Tensor | None = None  # `[1, layers, target_hidden]`, of the newest token that the target has been fed
    num_heard: int = 0  # verified tokens whose hidden states came in
    rows: dict[int, int] = field(default_factory=dict)  # tree node -> row, the root included, in the order of entering
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # node -> `[hidden]`
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)  # node -> `[draft_vocab]`


class TailDrafter:
    """Drafts with a `TailLM`. `name` is its role."""

    runs_model = True

    def __init__(self, name: str, lm: TailLM) -> None:
        self.name = name
        self.lm = lm
        self.layers = lm.layers

    def open(self) -> Tail:
        """An empty memory."""
        return Tail(Beside() if self.lm.device.type == "cpu" else None)

    @torch.inference_mode()
    def observe(self, state: Tail, start: int, hidden: torch.Tensor) -> None:
        """Take in the target's hidden states `[n, layers, hidden]` of verified tokens `start` and up; the newest one counts."""
        # The first ones may begin in the middle of the text: the head looks at the target's rows, wherever those come from.
        assert start == state.num_heard or state.num_heard == 0, f"hidden states of token {start}, expected {state.num_heard}"
        state.num_heard = start + len(hidden)
        state.heard = hidden[-1:].clone()  # fused when the head is asked, which at many steps it is not

    def passes(self, request: DraftRequest) -> tuple[int, ...]:
        """A forward for every layer of nodes that have no entry yet."""
        return layers_of(request, request.state.rows)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        """Enter what is missing, one pass per layer of nodes that have no entry yet, and read the candidates off it."""
        answers: dict[int, Answer | Halt] = {}
        waiting = dict(enumerate(requests))
        while waiting:
            work: list[tuple[DraftRequest, list[int]]] = []
            promised = 0
            for index, request in list(waiting.items()):
                if len(request.context) - 1 == (request.num_cached or 0):  # the target has not been fed anything yet
                    answers[index] = Answer({}, {})
                    del waiting[index]
                    continue
                nodes = self._next_nodes(request)
                halt = self._obstacle(request, nodes, self.lm.pool.num_free - promised)
                if halt is None and nodes:
                    promised += len(nodes)
                    work.append((request, nodes))
                    continue
                answers[index] = halt or self._answer(request)
                del waiting[index]
            self._enter(work)
        return [answers[index] for index in range(len(requests))]

    def commit(self, state: Tail, context: Sequence[int], tree: TokenTree | None, path: Sequence[int]) -> None:
        """Forget all entries: from now on the target's cache holds what was accepted."""
        self.lm.pool.release(state.rows.values())
        for memory in (state.rows, state.hidden, state.log_probs):
            memory.clear()

    def close(self, state: Tail) -> None:
        """Free every row of the sequence."""
        self.commit(state, (), None, ())
        state.heard = None
        state.beside = None if state.beside is None else Beside()

    def _answer(self, request: DraftRequest) -> Answer | Halt:
        return read_answer(
            request,
            self.name,
            request.state.log_probs,
            vocab=self.lm.vocab,
            vocab_size=self.lm.vocab_size,
        )

    def _next_nodes(self, request: DraftRequest) -> list[int]:
        """The root, if it has no entry, else the topmost nodes that have none and are needed for the answer."""
        state = request.state
        if 0 not in state.rows:
            return [0]
        missing = missing_nodes(request.tree, request.ask, state.rows)
        return [node for node in missing if request.tree.parent[node] in state.hidden]

    def _obstacle(self, request: DraftRequest, nodes: Sequence[int], num_free: int) -> Halt | None:
        """Why a question cannot be answered, if so."""
        known = len(request.context) - 1
        if request.state.num_heard != known or len(request.target_rows) != known:
            return Halt("features")
        deepest = max(request.tree.depth[node] for node in (0, *nodes, *request.ask.nodes))
        if known + deepest >= self.lm.max_positions:
            return Halt("context")
        return Halt("rows") if len(nodes) > num_free else None

    def _enter(self, work: Sequence[tuple[DraftRequest, list[int]]]) -> None:
        """One pass over every sequence's new nodes; remembers rows, hidden states and log-probabilities."""
        if not work:
            return
        with self.lm.pool.taking(len(nodes) for _, nodes in work) as taken:
            for request, nodes in work:
                if request.state.beside is not None and nodes == [0]:
                    self.lm.catch_up(request.state.beside, request.target_rows)
            result = self.lm.forward([_sprout(self.lm, *item, rows) for item, rows in zip(work, taken, strict=True)])
            log_probs = torch.log_softmax(result.logits, dim=-1)
        for (request, nodes), rows, start in zip(work, taken, result.starts, strict=True):
            state, here = request.state, slice(start, start + len(nodes))
            state.rows.update(zip(nodes, rows, strict=True))
            state.hidden.update(zip(nodes, result.hidden[here], strict=True))
            state.log_probs.update(zip(nodes, log_probs[here], strict=True))


def _sprout(lm: TailLM, request: DraftRequest, nodes: list[int], rows: list[int]) -> Sprout:
    state, tree = request.state, request.tree
    earlier = list(state.rows)
    root = len(request.context) - 1
    if nodes == [0]:
        assert state.heard is not None, "checked by _obstacle"
        fused = lm.fuse(state.heard)
    else:
        fused = torch.stack([state.hidden[tree.parent[node]] for node in nodes])
    return Sprout(
        tokens=[tree.token[node] for node in nodes],
        positions=[root + tree.depth[node] for node in nodes],
        prefix=request.target_rows,
        earlier=[state.rows[node] for node in earlier],
        rows=rows,
        visible=visible(tree, nodes, [*earlier, *nodes]),
        fused=fused,
        beside=state.beside,
    )
