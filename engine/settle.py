"""The end of a step for one sequence: the rule decides, prices learn from it, the path is committed and everything counted.

A fault here is the sequence's own: it ends with an error, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from drafters.base import Drafter
from engine.commit import Block, commit, count_step
from engine.constraint import ConstraintError
from engine.decide import decide
from engine.request import StepStats
from engine.score import Scored
from engine.trace import traced
from models.kv_cache import RowPool
from scheduler.auto_budget import AutoBudget

log = logging.getLogger(__name__)

FAILED = "The engine failed while it worked on this request."


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step brought one sequence."""

    block: Block
    counted: StepStats


def settle(
    scored: Scored, share: float, *, pool: RowPool, drafters: Mapping[str, Drafter], auto: AutoBudget | None
) -> Settled | str:
    """Verify and commit; `share` are the sequence's seconds of the verification. What the caller is told if that fails."""
    sequence = scored.draft.sequence
    try:
        if not scored.is_sound:
            raise ArithmeticError("the target's logits are NaN or infinite")
        start = time.perf_counter()
        verdict = decide(scored)
        rule_s = time.perf_counter() - start
        if auto is not None:
            auto.verified(scored.draft.growth.tree, scored.nodes, verdict.path, sequence.record)
        block = commit(scored, verdict, pool, drafters)
        if sequence.stats.num_steps < sequence.request.trace_steps:
            block = replace(block, trace=traced(scored, verdict, len(block.token_ids), share))
    except ConstraintError as error:
        log.warning("request %s ends with an error: %s", sequence.request.id, error)
        pool.release(scored.rows)
        return f"The grammar cannot be followed: {error}."
    except Exception:
        log.exception("request %s ends with an error", sequence.request.id)
        pool.release(scored.rows)
        return FAILED
    counted = count_step(scored, verdict, block, verify_s=share, rule_s=rule_s)
    counted.num_prompt_tokens = sequence.newly_read()
    return Settled(block, counted)
