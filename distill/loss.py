"""How far a student is from its target at a batch of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import smooth_l1_loss


@dataclass(frozen=True, slots=True, eq=False)
class Teaching:
    """What the target thought at `n` positions, in the student's ids. See `distill.shards.Shard` for the sources."""

    top_ids: torch.Tensor  # int64 [n, top]; -1: not in the student's vocabulary
    top_lps: torch.Tensor  # float [n, top]
    final: torch.Tensor  # float [n, hidden]: what the target's output matrix multiplied


def divergence(logits: torch.Tensor, teaching: Teaching) -> torch.Tensor:
    """KL(target || student) `[n]`, the target known by its likeliest tokens and the mass of all others together.

    Tokens outside the student's vocabulary count to that rest, to which the student gives what it has left.
    """
    lps = logits.float().log_softmax(dim=-1)
    # What the target excludes entirely is minus infinity there, and 0 * inf is not 0.
    known = (teaching.top_ids >= 0) & torch.isfinite(teaching.top_lps)
    p = teaching.top_lps.float().exp().masked_fill(~known, 0.0)
    q_lps = lps.gather(1, teaching.top_ids.clamp(min=0)).masked_fill(~known, 0.0)
    p_rest = (1.0 - p.sum(dim=-1)).clamp(min=1e-6)
    q_rest = (1.0 - (q_lps.exp() * known).sum(dim=-1)).clamp(min=1e-6)
    inside = (p * (teaching.top_lps.float() - q_lps)).masked_fill(~known, 0.0).sum(dim=-1)
    return inside + p_rest * (p_rest.log() - q_rest.log())


def regression(hidden: torch.Tensor, teaching: Teaching) -> torch.Tensor:
    """Smooth L1 distance `[n]` between the two vectors that the shared output rows multiply."""
    return smooth_l1_loss(hidden.float(), teaching.final.float(), reduction="none").mean(dim=-1)


def agreement(logits: torch.Tensor, teaching: Teaching) -> torch.Tensor:
    """Whether the student's first choice is the target's, bool `[n]`."""
    return logits.argmax(dim=-1) == teaching.top_ids[:, 0]
