"""Scoring that survives a forward that raises: the batch is halved until only those fail that cannot be scored alone.

A forward that ran out of memory with eight sequences often fits with four, and one that breaks over a single sequence is no
reason to fail its batch mates. Nothing was committed when a forward raises and every row was given back, so trying again
with fewer is safe; a sequence alone is tried once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from engine.question import Draft
from engine.score import Prefilled, Scored, score
from engine.sequence import Sequence
from models.attention import Segment
from models.causal_lm import CausalLM
from models.kv_cache import RowList

log = logging.getLogger(__name__)

Prefill = tuple[Sequence, int]  # a sequence and how many prompt tokens it is fed


class NothingScored(RuntimeError):
    """No sequence of a batch could be scored, not even alone; the cause is the first one's error."""


@dataclass(slots=True, eq=False)
class Parts:
    """What came of one batch."""

    fed: list[Prefilled] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)  # sequences that cannot be scored, and why
    num_passes: int = 0  # 1: the batch was scored at once
    verify_s: float = 0.0  # seconds of the forwards that succeeded


def score_apart(target: CausalLM, prefills: list[Prefill], drafts: list[Draft], chosen: list[list[int]]) -> Parts:
    """As :func:`engine.score.score`, but what cannot be scored is left out.

    If that is all of them, NothingScored is raised instead.
    """
    parts = Parts()
    _halve(target, prefills, drafts, chosen, parts)
    if parts.failed and not parts.fed and not parts.scored:
        raise NothingScored(str(parts.failed[0][1])) from parts.failed[0][1]
    return parts


@torch.inference_mode()
def can_score(target: CausalLM) -> bool:
    """Whether a forward over a single token succeeds: if so, what failed before was the fault of what was asked."""
    try:
        with target.pool.taking([1]) as (rows,):
            target.forward([Segment([0], [0], RowList().view(), rows, (0,))])
        target.pool.release(rows)
    except Exception:
        log.exception("a forward over a single token failed")
        return False
    return True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. On a CPU torch says so in words only."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _halve(target: CausalLM, prefills: list[Prefill], drafts: list[Draft], chosen: list[list[int]], parts: Parts) -> None:
    """Score the sequences, or each half of them."""
    count = len(prefills) + len(drafts)
    parts.num_passes += 1
    try:
        fed, scored, seconds = score(target, prefills, drafts, chosen)
        parts.fed += fed
        parts.scored += scored
        parts.verify_s += seconds
        return
    except Exception as error:
        log.warning("a forward over %d sequences failed: %r", count, error, exc_info=count == 1)
        failure = error.with_traceback(None)  # its frames hold the tensors that did not fit
    if count == 1:
        parts.failed.append((prefills[0][0] if prefills else drafts[0].sequence, failure))
        return
    # Prompts apart from trees first: a long prompt is the likeliest to be too much.
    cut = len(prefills) if prefills and drafts else count // 2
    rest = max(cut - len(prefills), 0)
    _halve(target, prefills[:cut], drafts[:rest], chosen[:rest], parts)
    _halve(target, prefills[cut:], drafts[rest:], chosen[rest:], parts)
