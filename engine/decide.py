"""Deciding what of a verified tree is accepted: the target's rows as the request shapes them, and its decision rule."""

from __future__ import annotations

from engine.adjust import adjusted, without_ends
from engine.rows import probability_rows
from engine.score import Scored
from verify import EVERY_VERIFIER
from verify.base import Verdict


def decide(scored: Scored) -> Verdict:
    """Bias, penalties, grammar and ends are applied to every row along its own node's path; then the rule walks the tree."""
    sequence = scored.draft.sequence
    sampling, rule = sequence.request.sampling, EVERY_VERIFIER[sequence.rule_name]
    tree, logits = scored.draft.growth.tree, scored.logits
    if not sampling.is_plain:
        paths = [tree.path_tokens(node) for node in scored.nodes]
        logits = adjusted(logits, sampling, sequence.tallied(logits), paths)
    if sequence.constraint is not None:
        logits = sequence.constraint.masked(logits, tree, scored.nodes, sequence.num_required)
    elif sequence.num_required:
        depths = [tree.depth[node] for node in scored.nodes]
        logits = without_ends(logits, sequence.end_tokens, depths, sequence.num_required)
    rows = logits if sampling.greedy else probability_rows(logits, sampling)
    return rule(tree, scored.nodes, rows, sequence.noise)
