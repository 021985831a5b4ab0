"""Guessing a token that the target will draw: the drafter enters the target's own race.

Under the rule that draws from the target alone (:mod:`verify.walk`) the token after a node is ``argmin E_t / p_t``, with
exponentials E that the request's seed gives the output position. They are known before p is, and the token is theirs and p's,
whatever was drafted. So nothing is lost if drafts look at them: instead of the tokens that are likely, a drafter proposes
those that would win if its own q were p. For one guess that is the coupling by Gumbel noise of 2408.07978: right with a
probability of at least (1 - d) / (1 + d), with d the total variation between q and p, where the likeliest token is right as
often as p says.

The chance that a token wins is put at its part of the sum of all speeds, ``(q_t / E_t) / sum_u (q_u / E_u)``: of the two heads
of the embedded model at temperature 1 the best guess was given 0.36 on average and was right 0.41 and 0.46 times.

Trap: rules that compare p with q (:mod:`verify.pairs`) are exact only for drafts that were made without a look at these
numbers. They get no race.
"""

from __future__ import annotations

import math

import torch


def race_log_probs(q: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """`[nodes, vocab]`: the logarithm of every token's chance to win.

    `q` are the drafter's probabilities of the next token, as the target's are shaped for the request, and `exponentials` those
    of the positions, both `[nodes, vocab]`. -inf where q is 0; a row with a NaN stays one.
    """
    speed = q / exponentials
    return (speed / speed.sum(dim=-1, keepdim=True)).log()


def chance_to_win(chance: float, exponential: float) -> float:
    """The logarithm of the chance that a token of probability `chance`, in (0, 1), wins with its `exponential`.

    Of the others nothing is known but that they have the rest: the fastest of them arrives after an exponential time of rate
    1 - chance, and the token after exponential / chance. Averaged over exponentials it is `chance` again.
    """
    return -(1.0 - chance) * exponential / chance if chance > 0.0 else -math.inf
