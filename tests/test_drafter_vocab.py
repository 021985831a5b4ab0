"""A drafter with another tokenizer is refused, with one that is merely padded differently it is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from drafters.vocab import HasVocab, VocabMatch, VocabMismatch, check_same_vocab
from models import toy


def tokenizer(*tokens: str, **extra: int) -> HasVocab:
    vocab = {token: i for i, token in enumerate(tokens)} | extra
    return SimpleNamespace(get_vocab=lambda: dict(vocab))  # type: ignore[return-value]


@pytest.mark.parametrize(("target_rows", "drafter_rows"), [(259, 259), (320, 259), (259, 320), (384, 320)])
def test_padding_is_no_difference(byte_tokenizer: PreTrainedTokenizerFast, target_rows: int, drafter_rows: int) -> None:
    """Models of one family pad their embeddings to different sizes; refusing them would refuse most pairs."""
    match = check_same_vocab(byte_tokenizer, toy.byte_tokenizer(), target_rows, drafter_rows)
    assert match == VocabMatch(num_tokens=259, target_rows=target_rows, drafter_rows=drafter_rows)


def test_the_first_differing_id_is_named_with_both_tokens() -> None:
    """Such a drafter runs without an error and is never right; the message must say why it was refused."""
    with pytest.raises(VocabMismatch, match=r"token id 1: 'b' for the target, 'x' for the drafter"):
        check_same_vocab(tokenizer("a", "b", "c"), tokenizer("a", "x", "y"), 3, 3)


def test_a_missing_token_is_a_difference() -> None:
    """The longer vocabulary's extra tokens would be unknown to the other model."""
    with pytest.raises(VocabMismatch, match=r"token id 2: 'c' for the target, no token for the drafter"):
        check_same_vocab(tokenizer("a", "b", "c"), tokenizer("a", "b"), 64, 64)
    with pytest.raises(VocabMismatch, match=r"token id 2: no token for the target, 'c' for the drafter"):
        check_same_vocab(tokenizer("a", "b"), tokenizer("a", "b", "c"), 64, 64)


def test_added_and_special_tokens_are_compared() -> None:
    """Chat models differ in just these, and in them a wrong id ends or starts a turn."""
    other = toy.byte_tokenizer()
    other.add_tokens(["<tool>"])
    with pytest.raises(VocabMismatch, match=r"token id 259: no token for the target, '<tool>' for the drafter"):
        check_same_vocab(toy.byte_tokenizer(), other, 320, 320)
    swapped = SimpleNamespace(get_vocab=tokenizer("a", "b").get_vocab, get_added_vocab=lambda: {"<|end|>": 2})
    with pytest.raises(VocabMismatch, match="token id 2"):
        check_same_vocab(tokenizer("a", "b"), swapped, 3, 3)


def test_byte_level_and_sentencepiece_differ(
    byte_tokenizer: PreTrainedTokenizerFast, sentencepiece_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The common mistake: a small model of another family."""
    with pytest.raises(VocabMismatch, match=r"token id 0: .* for the target, '<unk>' for the drafter"):
        check_same_vocab(byte_tokenizer, sentencepiece_tokenizer, 512, 512)


@pytest.mark.parametrize(("rows", "role"), [((258, 259), "target"), ((259, 258), "drafter")])
def test_a_token_without_an_embedding_row_is_refused(
    byte_tokenizer: PreTrainedTokenizerFast, rows: tuple[int, int], role: str
) -> None:
    """The first prompt that holds it would index out of range."""
    with pytest.raises(VocabMismatch, match=rf"the {role} model has 258 embedding rows.*token id 258: '<\|im_end\|>'"):
        check_same_vocab(byte_tokenizer, byte_tokenizer, *rows)


def test_gaps_in_the_ids_are_no_difference() -> None:
    """Some tokenizers leave ids out; the count is that of ids, not of tokens."""
    pair = tokenizer("a", "b", z=9), tokenizer("a", "b", z=9)
    assert check_same_vocab(*pair, 16, 10).num_tokens == 10
