"""A language model as a drafter: any causal LM that shares the target's tokenizer, over its own pool of rows.

The drafter holds rows for the verified text and, during a step, for the nodes it was made to look at. After the step the rows
along the accepted path stay, the others go back; what it has not seen of the accepted text is fed together with the next
question. Log-probabilities are taken at temperature 1 whatever the request samples at (as EAGLE's are, 2406.16858).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafters.base import DraftRequest, Halt
from models.attention import Segment, chain_then_tree
from models.causal_lm import CausalLM
from models.kv_cache import RowList
from tree.flatten import visible
from tree.growth import Answer, Ask, Candidates
from tree.tree import TokenTree

_CATCH_UP = 512  # most verified tokens fed at once; bounds the memory of a forward over a long prompt


@dataclass(slots=True, eq=False)
class Following:
    """What the drafter remembers about one sequence."""

    rows: RowList = field(default_factory=RowList)  # of the verified text, the root included once it was fed
    node_rows: dict[int, int] = field(default_factory=dict)  # tree node -> row, in the order they were fed; no root
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)  # node (0: root) -> [vocab] row on the device


class CausalLMDrafter:
    """Drafts with a `CausalLM`. `name` is its role."""

    runs_model = True

    def __init__(self, name: str, lm: CausalLM) -> None:
        self.name = name
        self.lm = lm

    def open(self) -> Following:
        """An empty memory; the prompt is fed with the first question."""
        return Following()

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        """Feed what is missing of every sequence in one forward and read the candidates off it."""
        answers: list[Answer | Halt | None] = [None] * len(requests)
        live: list[int] = []
        spoken_for = 0  # rows that the sequences let in so far will take in the shared forward
        for index, request in enumerate(requests):
            admitted = self._catch_up(request, spoken_for)
            if isinstance(admitted, Halt):
                answers[index] = admitted
            else:
                spoken_for += admitted
                live.append(index)
        self._feed([requests[index] for index in live])
        for index in live:
            answers[index] = _read(requests[index], self.name)
        return [answer for answer in answers if answer is not None]

    def commit(self, state: Following, context: Sequence[int], tree: TokenTree | None, path: Sequence[int]) -> None:
        """Keep the rows along `path` as far as they were fed without a gap; free the other nodes' rows."""
        kept: list[int] = []
        if len(state.rows) == len(context):  # the root was fed, so its descendants' rows continue the text
            for node in path:
                if node not in state.node_rows:
                    break
                kept.append(state.node_rows.pop(node))
        state.rows.extend(kept)
        self._forget_nodes(state)

    def close(self, state: Following) -> None:
        """Free every row of the sequence."""
        self._forget_nodes(state)
        self.lm.pool.release(state.rows.truncate(0))

    def _forget_nodes(self, state: Following) -> None:
        self.lm.pool.release(state.node_rows.values())
        state.node_rows.clear()
        state.log_probs.clear()

    def _catch_up(self, request: DraftRequest, spoken_for: int) -> int | Halt:
        """Feed the far part of a long prompt; how many rows the rest of the question takes, or why it cannot be answered.

        `spoken_for` rows of the pool are promised to other sequences of the same call.
        """
        state, context = request.state, request.context
        nodes = _missing_nodes(request, self.name)
        deepest = max((request.tree.depth[node] for node in (*nodes, *request.ask.nodes)), default=0)
        if len(context) + deepest > self.lm.max_positions:
            return Halt("context")
        if len(context) - len(state.rows) + len(nodes) > self.lm.pool.num_free - spoken_for:
            return Halt("rows")
        while len(context) - len(state.rows) > _CATCH_UP:
            start, end = len(state.rows), len(state.rows) + _CATCH_UP
            rows = self.lm.pool.allocate(_CATCH_UP)
            try:
                self.lm.forward([Segment(context[start:end], range(start, end), state.rows.view(), rows, ())])
            except BaseException:
                self.lm.pool.release(rows)
                raise
            state.rows.extend(rows)
        return len(context) - len(state.rows) + len(nodes)

    def _feed(self, requests: Sequence[DraftRequest]) -> None:
        """One forward over every request's missing text and nodes; remembers rows and log-probabilities."""
        fed: list[tuple[DraftRequest, list[int], Segment]] = []
        for request in requests:
            nodes = _missing_nodes(request, self.name)
            segment = self._segment(request, nodes)
            if segment is not None:
                fed.append((request, nodes, segment))
        if not fed:
            return
        try:
            scores = self.lm.forward([segment for _, _, segment in fed])
        except BaseException:
            for _, _, segment in fed:  # no state knows of these rows yet
                self.lm.pool.release(segment.rows)
            raise
        log_probs = torch.log_softmax(scores.logits, dim=-1)
        for index, (request, nodes, segment) in enumerate(fed):
            state = request.state
            num_text = len(segment.rows) - len(nodes)
            state.rows.extend(segment.rows[:num_text])
            state.node_rows.update(zip(nodes, segment.rows[num_text:], strict=True))
            scored = [0, *nodes] if num_text else nodes
            state.log_probs.update(zip(scored, log_probs[scores.offsets[index] : scores.offsets[index + 1]], strict=True))

    def _segment(self, request: DraftRequest, nodes: list[int]) -> Segment | None:
        """Missing text (its last token is the root), then `nodes`; None if nothing is missing."""
        state, tree, context = request.state, request.tree, request.context
        start = len(state.rows)
        text = context[start:]
        if not text and not nodes:
            return None
        earlier = list(state.node_rows)
        assert not (text and earlier), "nodes were fed before their root"
        mask = visible(tree, nodes, [*earlier, *nodes])
        root = len(context) - 1
        return Segment(
            tokens=[*text, *(tree.token[node] for node in nodes)],
            positions=[*range(start, len(context)), *(root + tree.depth[node] for node in nodes)],
            prefix=state.rows.view(),
            rows=self.lm.pool.allocate(len(text) + len(nodes)),
            wanted=range(max(len(text) - 1, 0), len(text) + len(nodes)),
            tree_rows=[state.node_rows[node] for node in earlier],
            visible=chain_then_tree(len(text), mask) if text else mask,
        )


def _missing_nodes(request: DraftRequest, name: str) -> list[int]:
    """Nodes to feed, ascending: those asked about with their ancestors; the whole tree if it is to be rescored."""
    tree, ask, state = request.tree, request.ask, request.state
    if ask.rescore:
        # A leaf's row only serves to expand it; every node that has children, or is asked about, is needed.
        parents = {tree.parent[node] for node in range(1, len(tree)) if tree.scorer[node] != name}
        targets = parents.union(ask.nodes)
    else:
        targets = set(ask.nodes)
    missing: set[int] = set()
    for node in targets:
        while node > 0 and node not in state.node_rows and node not in missing:
            missing.add(node)
            node = tree.parent[node]
    return sorted(missing)


def _read(request: DraftRequest, name: str) -> Answer | Halt:
    """Candidates of the asked nodes and, on request, this drafter's scores of nodes that others scored."""
    state, tree, ask = request.state, request.tree, request.ask
    rows = torch.stack([state.log_probs[node] for node in ask.nodes])
    best = rows.topk(min(ask.width, rows.shape[1]), dim=-1)
    edges = _edges_to_score(ask, tree, state, name)
    values = [best.values.flatten()]
    if edges:
        parents = torch.stack([state.log_probs[tree.parent[node]] for node in edges])
        tokens = torch.tensor([[tree.token[node]] for node in edges], device=parents.device)
        values.append(parents.gather(1, tokens.clamp(max=parents.shape[1] - 1)).flatten())
    width = best.values.shape[1]
    flat, ids = torch.cat(values).tolist(), best.indices.tolist()
    if any(math.isnan(value) for value in flat):
        return Halt("nan")
    candidates = {
        node: _candidates(ids[row], flat[row * width : (row + 1) * width]) for row, node in enumerate(ask.nodes)
    }
    scored = dict(zip(edges, flat[len(ask.nodes) * width :], strict=True))
    unknown = rows.shape[1]  # a drafter with a smaller vocabulary gives ids beyond it no probability
    return Answer(candidates, {node: lp if tree.token[node] < unknown else -math.inf for node, lp in scored.items()})


def _edges_to_score(ask: Ask, tree: TokenTree, state: Following, name: str) -> list[int]:
    if not ask.rescore:
        return []
    return [v for v in range(1, len(tree)) if tree.scorer[v] != name and tree.parent[v] in state.log_probs]


def _candidates(ids: list[int], lps: list[float]) -> Candidates:
    """Finite candidates, log-probability descending and token id ascending."""
    pairs = sorted((-lp, token) for token, lp in zip(ids, lps, strict=True) if math.isfinite(lp))
    return Candidates(tuple(token for _, token in pairs), tuple(min(-negative, 0.0) for negative, _ in pairs))
