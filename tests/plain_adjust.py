"""Bias and penalties of one row, written down once more in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from models.sampling import SamplingParams


def plain_adjust(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """Bias, then repetition penalty, then frequency and presence penalty, token by token."""
    result = []
    for token, x in enumerate(logits):
        x += params.logit_bias.get(token, 0.0)
        if token in prompt or token in answer:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        for _ in range(list(answer).count(token)):
            x -= params.frequency_penalty
        if token in answer:
            x -= params.presence_penalty
        result.append(x)
    return result
