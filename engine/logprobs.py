"""Log-probabilities of the tokens that were written, read off the target's own rows.

They are those of the model, before anything that shapes what is drawn, as vLLM gives them by default: the same token has the
same log-probability at every temperature. A token that a drafter proposed has the one of the target's row it was verified
with, which is the row that plain decoding would have computed for it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from engine.request import TokenLogprob
from engine.sequence import Sequence

LEAST = -9999.0  # instead of minus infinity, which JSON cannot carry; other servers use the same number


def token_logprobs(
    logits: torch.Tensor, tokens: SequenceOf[int], offsets: SequenceOf[int], num_alternatives: int
) -> tuple[TokenLogprob, ...]:
    """What `logits` say of `tokens`.

    Args:
        logits: ``[len(tokens), vocab]`` raw rows of the target, row i of the place where ``tokens[i]`` stands; any float
            type, any device. -inf marks ids that no token has.
        tokens: token ids.
        offsets: per token, handed on as its `text_offset`.
        num_alternatives: likeliest tokens to report with each; fewer come back where the model rules the others out.
    """
    assert logits.shape[0] == len(tokens) == len(offsets), f"{list(logits.shape)}, {len(tokens)} tokens"
    lp = torch.log_softmax(logits.float(), dim=-1)
    own = lp[torch.arange(len(tokens), device=lp.device), torch.tensor(list(tokens), device=lp.device)].tolist()
    best = torch.topk(lp, min(num_alternatives, lp.shape[1]), dim=-1)
    return tuple(
        TokenLogprob(token, max(value, LEAST), _ranked(ids, values), offset)
        for token, value, ids, values, offset in zip(
            tokens, own, best.indices.tolist(), best.values.tolist(), offsets, strict=True
        )
    )


def rate_prompt(sequence: Sequence, start: int, logits: torch.Tensor | None) -> None:
    """Note what `logits` ``[n, vocab]``, the rows of tokens `start` and up, say of the prompt's tokens behind each of them.

    A text that had to give way is read again; what is known already is passed over.
    """
    if logits is None:
        return
    first = len(sequence.prompt_logprobs) + 1  # index of the next token to rate
    last = min(start + len(logits), sequence.num_prompt - 1)
    assert first >= start + 1, f"token {first} of the prompt was passed over"
    if last < first:
        return
    rows = logits[first - 1 - start : last - start]
    tokens = sequence.tokens[first : last + 1]
    count = sequence.request.num_logprobs
    assert count is not None, "checked at the door"
    sequence.prompt_logprobs += token_logprobs(rows, tokens, [0] * len(tokens), count)


def _ranked(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    """Possible tokens only, likeliest first; equal ones by id, as their order in `topk` is not specified."""
    there = [(token, max(value, LEAST)) for token, value in zip(ids, values, strict=True) if value > -torch.inf]
    return tuple(sorted(there, key=lambda pair: (-pair[1], pair[0])))
