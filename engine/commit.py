"""Committing: what of a verified block becomes text, and where the request ends inside it.

The only writer of output tokens. A block is cut exactly where a decoder that makes one token at a time would have stopped:
after each token, first the end token, then stop strings, then the end of the grammar, then the limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from drafters.base import Drafter
from engine.draft import commit_drafters, show_hidden
from engine.logprobs import rate_prompt, token_logprobs
from engine.request import DrafterCount, FinishReason, StepStats, StepTimes, TokenLogprob, add_up
from engine.score import Scored
from engine.sequence import Sequence, TreeRecord
from engine.trace import StepTrace
from models.kv_cache import RowPool
from models.sampling import probabilities
from scheduler.features import moving_mean
from scheduler.selected import Selected
from tree.policies.adaptive_shape import AdaptiveShape
from verify.base import Verdict


@dataclass(frozen=True, slots=True)
class Block:
    """The tokens of one step that are part of the answer."""

    token_ids: tuple[int, ...]
    creators: tuple[str, ...]  # drafter names; "target" for its own token
    text: str
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if the request asked
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first block, if the request asked
    trace: StepTrace | None = None  # if the request asked
    times: StepTimes | None = None


def commit(scored: Scored, verdict: Verdict, pool: RowPool, drafters: Mapping[str, Drafter]) -> Block:
    """Keep the rows of the accepted path, free the others, tell the drafters, and append the block's tokens."""
    sequence, tree = scored.draft.sequence, scored.draft.growth.tree
    rate_prompt(sequence, len(sequence.rows), scored.prompt_logits)
    start, num_pending = len(sequence.rows), sequence.num_pending
    _keep_rows(scored, verdict, pool)
    commit_drafters(scored.draft, drafters, verdict.path)
    place = {node: num_pending - 1 + index for index, node in enumerate(scored.nodes)}
    fed = [*range(num_pending), *(place[node] for node in verdict.path)]
    scored.draft.halts.extend(show_hidden(sequence, drafters, start, scored.hidden, fed))
    if sequence.request.keep_trees:
        sequence.trees.append(TreeRecord(tree, tuple(scored.nodes), verdict.path, verdict.extra))
        tree.proposals.clear()  # rows over the vocabulary: a megabyte for five nodes
    sequence.accepted_mean = moving_mean(sequence.accepted_mean, len(verdict.path))
    policy = sequence.schedule.policy
    if isinstance(policy, AdaptiveShape):  # the one policy that learns from what became of its trees
        learned = policy.after(len(verdict.path), max(tree.depth))
        sequence.schedule = replace(sequence.schedule, policy=learned)
    elif isinstance(policy, Selected):
        sequence.last_entropy = _entropy(scored, verdict)
    tokens = (*(tree.token[node] for node in verdict.path), verdict.extra)
    creators = (*(tree.creator[node] for node in verdict.path), "target")
    block, offsets = _append(sequence, tokens, creators)
    sequence.exponentials = {place: made for place, made in sequence.exponentials.items() if place >= sequence.num_output}
    sequence.stats.num_trimmed = len(tokens) - len(block.token_ids)
    if sequence.request.num_logprobs is None:
        return block
    # Token i was decided by the row of the node in front of it.
    row_of = {node: row for row, node in enumerate(scored.nodes)}
    rows = [row_of[node] for node in (scored.nodes[0], *verdict.path)][: len(block.token_ids)]
    found = token_logprobs(scored.logits[rows], block.token_ids, offsets, sequence.request.num_logprobs)
    is_first = sequence.num_output == len(block.token_ids)
    return replace(block, logprobs=found, prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else ())


def _entropy(scored: Scored, verdict: Verdict) -> float:
    """Of the target's distribution that the newest token was taken from; at temperature 0, of the one at 1."""
    sampling = scored.draft.sequence.request.sampling
    row = scored.nodes.index(verdict.path[-1]) if verdict.path else 0
    p = probabilities(scored.logits[row, None], sampling.warm)
    return float(torch.special.entr(p).sum())


def _keep_rows(scored: Scored, verdict: Verdict, pool: RowPool) -> None:
    """From here on the sequence owns what it keeps, and the pool has the rest back: the result holds no rows any more."""
    sequence = scored.draft.sequence
    num_pending = sequence.num_pending
    row_of = dict(zip(scored.nodes[1:], scored.rows[num_pending:], strict=True))
    kept = [*scored.rows[:num_pending], *(row_of.pop(node) for node in verdict.path)]
    scored.rows.clear()
    sequence.rows.extend(kept)
    pool.release(row_of.values())


def _append(
    sequence: Sequence, tokens: tuple[int, ...], creators: tuple[str, ...]
) -> tuple[Block, list[int]]:
    """The block, and for each of its tokens the characters of the answer that were certain before it."""
    pieces: list[str] = []
    offsets: list[int] = []
    finish: FinishReason | None = None
    used = 0
    for token in tokens:
        used += 1
        sequence.tokens.append(token)
        offsets.append(sequence.text.num_chars)
        if token in sequence.end_tokens:
            finish = FinishReason.STOP
            break
        pushed = sequence.text.push(token)
        pieces.append(pushed.text)
        if pushed.stopped:
            finish = FinishReason.STOP
            break
        if sequence.constraint is not None:
            sequence.constraint.advance(token)
            if sequence.constraint.is_complete:
                finish = FinishReason.STOP
                break
        if len(sequence.tokens) >= sequence.max_total:
            finish = FinishReason.LENGTH
            break
    if finish is not None and not sequence.text.stopped:
        pieces.append(sequence.text.finish())
        # Text that was held back as unfinished may complete a stop string now that nothing follows.
        finish = FinishReason.STOP if sequence.text.stopped else finish
    return Block(tokens[:used], creators[:used], "".join(pieces), finish), offsets


def count_step(scored: Scored, verdict: Verdict, block: Block, *, verify_s: float, rule_s: float) -> StepStats:
    """What this step did for one sequence."""
    draft, nodes = scored.draft, scored.nodes
    written = verdict.path[: len(block.token_ids)]
    tree = draft.growth.tree
    drafters = {name: DrafterCount() for name in draft.sequence.schedule.drafters.values()}
    for name, count in drafters.items():
        count.calls, count.forwards, count.draft_s = draft.calls[name], draft.forwards[name], draft.drafter_s[name]
        if not count.calls:
            count.skips[draft.skipped(name)] = 1
    for node in nodes[1:]:
        drafters.setdefault(tree.creator[node], DrafterCount()).drafted += 1
    accepted = [creator for creator in block.creators if creator != "target"]
    for place, creator in enumerate(accepted):
        drafters[creator].accepted += 1
        add_up(drafters[creator].accepted_at, [0] * place + [1])
    return StepStats(
        schedule=draft.sequence.asked.name,
        arm=draft.sequence.request.arm,
        num_drafts=int(len(nodes) > 1),
        num_steps=1,
        num_output_tokens=len(block.token_ids),
        num_verified_nodes=len(nodes),
        num_grafts=draft.growth.num_grafts,
        num_lossy=len(set(written).intersection(verdict.promoted)),
        drafters=drafters,
        num_accepted_squared=len(accepted) ** 2,
        depths=[1] * max(tree.depth[node] for node in nodes),
        drafter_steps={name: 1 for name, count in drafters.items() if count.drafted},
        declined=dict(draft.declined),
        sized={} if draft.sized is None else {draft.sized: 1},
        halts=tuple(draft.halts),
        draft_s=draft.draft_s,
        tree_s=draft.tree_s,
        verify_s=verify_s,
        rule_s=rule_s,
    )
