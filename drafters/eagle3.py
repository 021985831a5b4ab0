"""A published EAGLE-3 head as a drafter for its target (2503.01840)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from drafters.draft_head import HeadDrafter
from drafters.vocab import HasVocab, check_same_vocab
from models.eagle3 import Eagle3Checkpoint, place_eagle3, read_eagle3
from models.loading import Placement, load_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_eagle3(
    name: str, source: str | Path, *, target: nn.Module, tokenizer: HasVocab, placement: Placement, num_rows: int
) -> HeadDrafter:
    """The head of a local folder or hub id as the drafter `name`, with `num_rows` cache rows; raises what `check_eagle3` does.

    `target` is the target's transformers model, which has to be wrapped with ``capture=drafter.layers`` afterwards.
    """
    checkpoint = check_eagle3(source, target=target, tokenizer=tokenizer)
    embedding = target.get_input_embeddings().weight.detach()  # type: ignore[operator]
    return HeadDrafter(name, place_eagle3(checkpoint, embedding, placement, num_rows=num_rows))


def check_eagle3(source: str | Path, *, target: nn.Module, tokenizer: HasVocab) -> Eagle3Checkpoint:
    """Read the head of a local folder or hub id and check that it belongs to `target`.

    Raises:
        ModelNotFound: nothing there, or files that cannot be read.
        UnservableModel: not an EAGLE-3 head of this target; the message says what does not fit.
        VocabMismatch: the tokenizer beside the head, where there is one, is not the target's.
    """
    config: Any = target.config
    checkpoint = read_eagle3(source, config)
    if any((checkpoint.folder / file).exists() for file in _TOKENIZER_FILES):
        rows = int(config.get_text_config().vocab_size)
        check_same_vocab(tokenizer, load_tokenizer(checkpoint.folder), rows, rows)
    return checkpoint
