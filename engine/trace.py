"""One step of one request as it happened: the draft tree, what the target thought of it, what was kept, and the price.

Made only for requests that ask (``Request.trace_steps``), after the commit, from values that the step had at hand anyway;
the one thing computed for it is the target's log-probability of the verified nodes. A trace is a copy: it keeps no tree,
no rows and no tensor alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.logprobs import LEAST
from engine.score import Scored
from verify.base import Verdict


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """One node of a draft tree; natural logarithms, -9999 at least."""

    token_id: int
    parent: int  # index of a node, which precedes this one; -1: this is the root, the last token of the text so far
    depth: int
    creator: str  # drafter that proposed it first; "target" for the root
    scorer: str  # drafter whose log-probability counts; another than the creator if it was rescored
    logprobs: Mapping[str, float]  # of the token after its parent, by each drafter that gave one; empty for the root
    path_logprob: float  # sum of the scorers' log-probabilities from the root
    target_logprob: float | None  # the target's own; None where it was not asked, and for the root
    is_verified: bool
    is_accepted: bool


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One draft-verify-commit round of one request."""

    index: int  # of the steps that emitted, from 0
    first_token: int  # output position of the first token it emitted
    num_tokens: int  # emitted; less than the accepted nodes plus one only where the request ended inside the block
    nodes: tuple[NodeTrace, ...]  # parents first; the root is node 0
    extra_id: int  # the target's own token behind the accepted path
    extra_logprob: float  # the target's
    forwards: Mapping[str, int]  # of drafters with a model, by name
    draft_s: float  # this request's share, as everywhere
    verify_s: float


def traced(scored: Scored, verdict: Verdict, num_tokens: int, verify_s: float) -> StepTrace:
    """The step that has just appended `num_tokens` tokens to its answer, described; it has not been counted yet."""
    sequence = scored.draft.sequence
    return trace_step(
        scored,
        verdict,
        index=sequence.stats.num_steps,
        first_token=sequence.num_output - num_tokens,
        num_tokens=num_tokens,
        verify_s=verify_s,
    )


def trace_step(
    scored: Scored, verdict: Verdict, *, index: int, first_token: int, num_tokens: int, verify_s: float
) -> StepTrace:
    """Describe a step that has been committed; `index` to `verify_s` as in :class:`StepTrace`."""
    tree = scored.draft.growth.tree
    row_of = {node: row for row, node in enumerate(scored.nodes)}
    accepted = {0, *verdict.path}
    last = verdict.path[-1] if verdict.path else 0
    below = scored.nodes[1:]
    *own, extra = _logprobs(
        scored.logits,
        [*(row_of[tree.parent[node]] for node in below), row_of[last]],
        [*(tree.token[node] for node in below), verdict.extra],
    )
    target = dict(zip(below, own, strict=True))
    nodes = tuple(
        NodeTrace(
            token_id=tree.token[node],
            parent=tree.parent[node],
            depth=tree.depth[node],
            creator=tree.creator[node],
            scorer=tree.scorer[node],
            logprobs={name: max(lp, LEAST) for name, lp in tree.edge_lp[node].items()},
            path_logprob=max(tree.score[node], LEAST),
            target_logprob=target.get(node),
            is_verified=node in row_of,
            is_accepted=node in accepted,
        )
        for node in range(len(tree))
    )
    return StepTrace(
        index=index,
        first_token=first_token,
        num_tokens=num_tokens,
        nodes=nodes,
        extra_id=verdict.extra,
        extra_logprob=extra,
        forwards=dict(scored.draft.forwards),
        draft_s=scored.draft.draft_s,
        verify_s=verify_s,
    )


def _logprobs(logits: torch.Tensor, rows: list[int], tokens: list[int]) -> list[float]:
    """What the rows of `logits` ``[n, vocab]`` say of one token each; the model's own, before anything shapes it."""
    row, token = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
    lp = torch.log_softmax(logits.float(), dim=-1)[row, token]
    return [max(value, LEAST) for value in lp.tolist()]
