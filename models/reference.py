"""An unmodified transformers model, loaded afresh: what our own decoding is compared with.

Nothing of ours takes part: transformers' attention, cache and `generate`. The one exception is stated: weights that are
served packed are packed here too, or the two models would differ by more than the decoding.

    model = PlainModel.load(folder, choose_placement("cpu", "fp32"), num_tokens=len(tokenizer))
    ids = model.generate(prompt, max_tokens=64, stop_tokens=frozenset({2}))
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from models.loading import Placement, load_model, prepare


class Arrivals(BaseStreamer):
    """Notes when tokens come: the clock (`time.perf_counter`) and the number of tokens of each block."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, int]] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: with the prompt, then with each block."""
        if self._has_prompt:
            self.blocks.append((time.perf_counter(), value.numel()))
        self._has_prompt = True

    def end(self) -> None:
        """Called by `generate` in the end."""


class PlainModel:
    """A causal LM as transformers runs it. Token ids from `num_tokens` on are padding and never written, as in serving."""

    def __init__(self, model: Any, *, num_tokens: int | None = None) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self._num_tokens = min(num_tokens or self._vocab_size, self._vocab_size)
        # A model's own defaults may hold penalties or sampling, which `generate` would mix into what it is told.
        model.generation_config = GenerationConfig()

    @classmethod
    def load(cls, source: str | Path, placement: Placement, *, num_tokens: int | None = None) -> PlainModel:
        """Load a folder or hub id; packed only if `placement` says so. Raises what `models.loading.load_model` raises."""
        model = load_model(source, placement)
        is_packed = placement.device.type == "cpu" and placement.weights == "fp16"
        return cls(prepare(model, placement) if is_packed else model, num_tokens=num_tokens)

    @property
    def vocab_size(self) -> int:
        """Rows of its output layer, padding included."""
        return self._vocab_size

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stop_tokens: Set[int] = frozenset(),
        lookup: int | None = None,
        assistant: PlainModel | None = None,
        streamer: BaseStreamer | None = None,
    ) -> list[int]:
        """Greedy continuation by transformers' `generate`, the end token included; at least one token, at most `max_tokens`.

        Args:
            lookup: speculate with so many tokens copied from the text (`prompt_lookup_num_tokens`).
            assistant: speculate with a model of the same vocabulary (assisted generation).
            streamer: is given the prompt, then the tokens as they come.
        """
        ids = torch.tensor([list(prompt)], device=self.device)
        padding = list(range(self._num_tokens, self._vocab_size))
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=sorted(stop_tokens) or None,
                pad_token_id=0,
                suppress_tokens=padding or None,
                prompt_lookup_num_tokens=lookup,
            ),
            assistant_model=None if assistant is None else assistant.model,
            streamer=streamer,
        )
        return [int(token) for token in output[0, len(prompt) :]]

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of the token after `tokens`, from one forward without a cache; float32 `[vocab]` on the CPU."""
        ids = torch.tensor([list(tokens)], device=self.device)
        logits: torch.Tensor = self.model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()
        logits[self._num_tokens :] = float("-inf")
        return logits
