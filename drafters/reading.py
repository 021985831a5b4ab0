"""From rows of log-probabilities to the answer that a tree policy asked for; the same for every drafter that runs a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from drafters.base import DraftRequest, Halt, Race
from drafters.race import race_log_probs
from models.draft_vocab import DraftVocab
from models.sampling import SamplingParams, probabilities
from tree.growth import Answer, Ask, Candidates
from tree.tree import TokenTree


def missing_nodes(tree: TokenTree, ask: Ask, known: Mapping[int, object]) -> list[int]:
    """Nodes that a drafter has to look at before it can answer, ascending, ancestors included.

    Those asked about. Rescoring needs no more: what hangs below other nodes is rescored when these are asked about. `known`
    holds what it has looked at already.
    """
    missing: set[int] = set()
    for node in ask.nodes:
        while node > 0 and node not in known and node not in missing:
            missing.add(node)
            node = tree.parent[node]
    return sorted(missing)


def layers_of(request: DraftRequest, known: Mapping[int, object]) -> tuple[int, ...]:
    """How many nodes have to be looked at per layer, top down, by a drafter that takes a forward for each layer.

    `known` holds what it has looked at already, the root among them if it has.
    """
    counts: dict[int, int] = {}
    for node in missing_nodes(request.tree, request.ask, known):
        depth = request.tree.depth[node]
        counts[depth] = counts.get(depth, 0) + 1
    root = () if 0 in known else (1,)
    return root + tuple(counts[depth] for depth in sorted(counts))


def read_answer(
    request: DraftRequest,
    name: str,
    log_probs: Mapping[int, torch.Tensor],
    *,
    vocab: DraftVocab | None = None,
    vocab_size: int = 0,
) -> Answer | Halt:
    """Candidates of the asked nodes and, on request, the drafter's scores of nodes that others scored.

    Where the target will draw by numbers that are known, scores are chances to win (:mod:`drafters.race`). Where children are
    to be drawn, also the rows to draw from: shaped like the target's for the request, since the closer the two distributions
    are the more is accepted; a greedy request draws at temperature 1.

    Args:
        log_probs: node -> `[vocab]` row on the device, for every asked node.
        vocab: of a drafter with a vocabulary of its own; None: an entry's place in a row is the target's id.
        vocab_size: of the target; the length of rows to draw from, where there is a `vocab`.
    """
    tree, ask, sampling = request.tree, request.ask, request.sampling or SamplingParams()
    edges = _edges_to_score(ask, tree, log_probs, name)
    place = {node: index for index, node in enumerate(dict.fromkeys((*ask.nodes, *(tree.parent[node] for node in edges))))}
    drafted = torch.stack([log_probs[node] for node in place])
    rows = drafted if request.race is None else _raced(drafted, place, request, request.race, vocab, vocab_size)
    size = rows.shape[1]
    best = rows[: len(ask.nodes)].topk(min(ask.width, size), dim=-1)
    values = [best.values.flatten()]
    columns = [_column(tree.token[node], size, vocab) for node in edges]
    if edges:
        above = torch.tensor([place[tree.parent[node]] for node in edges], device=rows.device)
        values.append(rows[above, torch.tensor([max(column, 0) for column in columns], device=rows.device)])
    width = best.values.shape[1]
    flat, found = torch.cat(values).tolist(), best.indices.tolist()
    if any(math.isnan(value) for value in flat):
        return Halt("nan")
    candidates = {}
    for row, node in enumerate(ask.nodes):
        tokens = found[row] if vocab is None else [vocab.ids[column] for column in found[row]]
        candidates[node] = _candidates(tokens, flat[row * width : (row + 1) * width])
    scored = zip(edges, columns, flat[len(ask.nodes) * width :], strict=True)
    # A token that the drafter has no entry for gets no probability from it.
    rescored = {node: lp if column >= 0 else -math.inf for node, column, lp in scored}
    if not ask.wants_rows:
        return Answer(candidates, rescored)
    q = _rows_to_draw_from(drafted[: len(ask.nodes)], sampling, vocab, vocab_size)
    return Answer(candidates, rescored, dict(zip(ask.nodes, q, strict=True)))


def _rows_to_draw_from(
    log_probs: torch.Tensor, sampling: SamplingParams, vocab: DraftVocab | None, vocab_size: int
) -> torch.Tensor:
    """`[nodes, vocab]` probabilities that nobody writes to again."""
    p = probabilities(log_probs, _shape(sampling))
    return p if vocab is None else vocab.spread(p, vocab_size)


def _raced(
    log_probs: torch.Tensor,
    nodes: Iterable[int],
    request: DraftRequest,
    race: Race,
    vocab: DraftVocab | None,
    vocab_size: int,
) -> torch.Tensor:
    """`[nodes, columns]`: chances to win the target's race, in logarithms."""
    depths = [request.tree.depth[node] for node in nodes]
    size = log_probs.shape[1] if vocab is None else vocab_size
    exponentials = torch.stack([race(depth, size) for depth in depths]).to(log_probs.device)
    q = probabilities(log_probs, _shape(request.sampling or SamplingParams()))
    return race_log_probs(q, exponentials if vocab is None else vocab.known(exponentials))


def _shape(sampling: SamplingParams) -> SamplingParams:
    """What of a request's sampling a drafter's rows are shaped by."""
    warm = sampling.warm
    return SamplingParams(temperature=warm.temperature, top_p=warm.top_p, top_k=warm.top_k, min_p=warm.min_p)


def _column(token: int, size: int, vocab: DraftVocab | None) -> int:
    """Where a row has the target's `token`; -1: nowhere."""
    if vocab is not None:
        return vocab.columns.get(token, -1)
    return token if token < size else -1


def _edges_to_score(ask: Ask, tree: TokenTree, log_probs: Mapping[int, torch.Tensor], name: str) -> list[int]:
    if not ask.rescore:
        return []
    return [v for v in range(1, len(tree)) if tree.scorer[v] != name and tree.parent[v] in log_probs]


def _candidates(ids: Sequence[int], lps: Sequence[float]) -> Candidates:
    """Finite candidates, log-probability descending and token id ascending."""
    pairs = sorted((-lp, token) for token, lp in zip(ids, lps, strict=True) if math.isfinite(lp))
    return Candidates(tuple(token for _, token in pairs), tuple(min(-negative, 0.0) for negative, _ in pairs))
