"""What the text so far does to the target's logits, per node: bias, penalties, and the ban on ending too early.

A row of logits belongs to a context, the text so far and the node's own path from the root, and is adjusted for just that
context. Adjusting all nodes of a tree by the root's text would judge the second of two drafted repetitions like the first,
and the answer would depend on what was drafted.

Definitions, for token t with logit x, in this order (it is vLLM's):

* bias: ``x += logit_bias[t]``;
* repetition penalty (CTRL, arXiv 1909.05858, section 4.1), if t is in the prompt or the answer: ``x / r`` where x > 0, else
  ``x * r``;
* frequency penalty: ``x -= f * n``, and presence penalty: ``x -= p`` if n > 0, where n counts t in the *answer* only. Both
  are the OpenAI API's.

Traps: the tree's root is part of the text already, so the root's own path is empty; a penalty of several hundred digits
overflows float32, so the few logits concerned are computed in float64 and end inside the range of float32; what was NaN or
infinite before stays so, as it is the mark of a broken or forbidden entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from models.sampling import SamplingParams

_LIMIT = torch.finfo(torch.float32).max


@dataclass(slots=True, eq=False)
class Tally:
    """What of one text the penalties look at, on one device. Grows with the text: :meth:`follow` reads only what is new."""

    bias: torch.Tensor  # [vocab] float64
    in_prompt: torch.Tensor  # [vocab] bool
    num_in_answer: torch.Tensor  # [vocab] int64
    num_followed: int = 0  # tokens of the text counted so far

    @classmethod
    def begin(cls, params: SamplingParams, vocab_size: int, device: torch.device | str = "cpu") -> Tally:
        """The tally of an empty text. Raises ParamError for a bias outside the vocabulary."""
        params.check_vocab(vocab_size)
        bias = torch.zeros(vocab_size, dtype=torch.float64)
        if params.logit_bias:
            bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)
        return cls(
            bias.to(device),
            torch.zeros(vocab_size, dtype=torch.bool, device=device),
            torch.zeros(vocab_size, dtype=torch.int64, device=device),
        )

    def follow(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Count what was appended to the text since the last call.

        Args:
            tokens: the whole text; it may only have grown at its end.
            num_prompt: how many of its first tokens are the prompt.
        """
        assert self.num_followed <= len(tokens), f"{self.num_followed} tokens were counted, the text has {len(tokens)}"
        device = self.bias.device
        if self.num_followed < num_prompt:
            prompt = tokens[self.num_followed : num_prompt]
            self.in_prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        answer = tokens[max(self.num_followed, num_prompt) :]
        if answer:
            index = torch.tensor(answer, device=device)
            self.num_in_answer.index_add_(0, index, torch.ones_like(index))
        self.num_followed = len(tokens)


def adjusted(
    logits: torch.Tensor, params: SamplingParams, tally: Tally, paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Logits with bias and penalties, each row by its own context.

    Args:
        logits: [rows, vocab], any floating dtype; left as they are.
        params: one request's parameters.
        tally: of the text up to the root, root included.
        paths: per row, the tokens from below the root down to the node that the row belongs to; part of the answer.

    Returns:
        [rows, vocab] float32, a new tensor on the same device.
    """
    vocab_size = len(tally.bias)
    assert logits.shape == (len(paths), vocab_size), f"{len(paths)} paths, {vocab_size} tokens, {list(logits.shape)} logits"
    x = logits.to(torch.float32, copy=True)
    concerned = tally.bias != 0
    if params.penalizes:
        concerned |= tally.num_in_answer > 0
    if params.repetition_penalty != 1.0:
        concerned |= tally.in_prompt
    ids = concerned.nonzero()[:, 0]
    x[:, ids] = _adjust(x[:, ids], tally.bias[ids], tally.in_prompt[ids], tally.num_in_answer[ids], params)
    if params.penalizes:
        along = [(row, token, n) for row, path in enumerate(paths) for token, n in Counter(path).items()]
        if along:
            # Once more from the model's own logits, as adjusting does not add up.
            rows, tokens, more = torch.tensor(along, device=x.device).unbind(1)
            counts = tally.num_in_answer[tokens] + more
            raw = logits[rows, tokens].float()
            x[rows, tokens] = _adjust(raw, tally.bias[tokens], tally.in_prompt[tokens], counts, params)
    return x


def without_ends(
    logits: torch.Tensor, ends: Collection[int], depths: Sequence[int], num_required: int
) -> torch.Tensor:
    """Logits in which tokens that end the answer are impossible as long as more have to come.

    Args:
        logits: [rows, vocab], any floating dtype; left as they are.
        ends: token ids inside the vocabulary.
        depths: per row, the depth of its node below the root: the row decides the token after that many more.
        num_required: tokens that must follow the root before one may end the answer.

    Returns:
        [rows, vocab] with -inf at `ends` in the rows that decide one of the next `num_required` tokens; `logits` itself if
        there is none.
    """
    early = [row for row, depth in enumerate(depths) if depth < num_required]
    if not early or not ends:
        return logits
    x = logits.clone()
    rows, ids = (torch.tensor(sorted(part), device=x.device) for part in (early, ends))
    x[rows[:, None], ids] = -torch.inf
    return x


def _adjust(
    logits: torch.Tensor, bias: torch.Tensor, in_prompt: torch.Tensor, counts: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """float32 like `logits`, whose last dimension the others share: the formulas of this module, for entries of any rows."""
    x = logits.double() + bias
    if params.repetition_penalty != 1.0:
        divided = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
        x = torch.where(in_prompt | (counts > 0), divided, x)
    x = x - (params.frequency_penalty * counts.double() + params.presence_penalty * (counts > 0).double())
    return torch.where(logits.isfinite(), x.clamp(-_LIMIT, _LIMIT).float(), logits)
