"""Whether a drafter speaks the target's language: token ids must mean the same tokens in both.

Tokenizers are compared, not the number of logits: embedding matrices are padded to round sizes, which differ within one
model family. Rows beyond the tokenizer belong to no token; whoever reads logits masks them (``logits[..., num_tokens:]
= -inf``). A drafter with another tokenizer would run without an error and never be right, so it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class HasVocab(Protocol):
    """A tokenizer, as far as this file cares."""

    def get_vocab(self) -> Mapping[str, int]:
        """Every token and its id, added and special ones included."""


@dataclass(frozen=True, slots=True)
class VocabMatch:
    """The ids a target and a drafter have in common."""

    num_tokens: int  # ids 0 to num_tokens - 1 are the tokenizers' own; larger ones must never be drafted or emitted
    target_rows: int  # embedding rows of each model, padding included
    drafter_rows: int


class VocabMismatch(ValueError):
    """Target and drafter cannot work together; the message names the first token id that shows it."""


def check_same_vocab(
    target_tokenizer: HasVocab,
    drafter_tokenizer: HasVocab,
    target_vocab_size: int,
    drafter_vocab_size: int,
) -> VocabMatch:
    """Compare two tokenizers id by id, added and special tokens included.

    Args:
        target_tokenizer: the target's.
        drafter_tokenizer: the drafter's.
        target_vocab_size: rows of the target's embedding (``config.vocab_size``).
        drafter_vocab_size: rows of the drafter's.

    Raises:
        VocabMismatch: an id means different tokens, or exists for one of them only, or a model has no row for it.
    """
    target, drafter = _tokens_by_id(target_tokenizer), _tokens_by_id(drafter_tokenizer)
    for token_id in sorted(target.keys() | drafter.keys()):
        ours, theirs = target.get(token_id), drafter.get(token_id)
        if ours != theirs:
            raise VocabMismatch(
                "the drafter's tokenizer is not the target's; they first differ at token id "
                f"{token_id}: {_named(ours)} for the target, {_named(theirs)} for the drafter"
            )
    num_tokens = max(target, default=-1) + 1
    for role, rows in (("target", target_vocab_size), ("drafter", drafter_vocab_size)):
        if rows < num_tokens:
            first = min(token_id for token_id in target if token_id >= rows)
            raise VocabMismatch(
                f"the {role} model has {rows} embedding rows, but its tokenizer has {num_tokens} token ids; "
                f"the first one without a row is token id {first}: {_named(target[first])}"
            )
    return VocabMatch(num_tokens, target_vocab_size, drafter_vocab_size)


def tokenizer_hash(tokenizer: HasVocab) -> str:
    """SHA-256 of what every token id means, hexadecimal; equal for tokenizers that `check_same_vocab` accepts."""
    lines = (f"{token_id}\t{token!r}\n" for token_id, token in sorted(_tokens_by_id(tokenizer).items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _tokens_by_id(tokenizer: HasVocab) -> dict[int, tuple[str, ...]]:
    """Id to token; a tuple since some vocabularies spell one id in several ways."""
    vocab = dict(tokenizer.get_vocab())
    added = getattr(tokenizer, "get_added_vocab", None)  # part of get_vocab in fast tokenizers, not in every other
    if added is not None:
        vocab.update(added())
    tokens: dict[int, tuple[str, ...]] = {}
    for token, token_id in vocab.items():
        tokens[token_id] = (*tokens[token_id], token) if token_id in tokens else (token,)
    return {token_id: tuple(sorted(names)) for token_id, names in tokens.items()}


def _named(tokens: tuple[str, ...] | None) -> str:
    return "no token" if tokens is None else " or ".join(repr(token) for token in tokens)
