"""The corpus index finds the longest context, counts what follows, and refuses files that it should not draft from."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from drafters.base import DraftRequest
from drafters.corpus import LEAST_CONTEXT, LONGEST_CONTEXT, CorpusIndex, build_corpus
from drafters.ngram import NgramDrafter
from tree.growth import Answer, Ask, Candidates
from tree.tree import TokenTree

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=5).filter(any)


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


def propose(drafter: NgramDrafter, text: Sequence[int], width: int = 4) -> Candidates:
    request = DraftRequest(drafter.open(), text, TokenTree(text[-1]), Ask((0,), width))
    (answer,) = drafter.propose([request])
    assert isinstance(answer, Answer)
    return answer.candidates[0]


def brute_force(documents: list[list[int]], tail: list[int]) -> tuple[int, int, Counter[int]] | None:
    """(length, occurrences, times by next token) of the longest end of `tail` in one of the documents."""
    for n in range(min(LONGEST_CONTEXT, len(tail)), LEAST_CONTEXT - 1, -1):
        total, times = 0, Counter[int]()
        for document in documents:
            for begin in range(len(document) - n + 1):
                if document[begin : begin + n] == tail[-n:]:
                    total += 1
                    times.update(document[begin + n : begin + n + 1])
        if total:
            return (n, total, times) if times else None
    return None


@settings(max_examples=300)
@given(DOCUMENTS, st.lists(st.integers(0, 4), max_size=12))
def test_lookup_equals_a_search_of_the_documents(documents: list[list[int]], tail: list[int]) -> None:
    """A wrong range proposes what never followed; a match across two documents is no match."""
    corpus = CorpusIndex.of(documents)
    for sought in (tail, documents[0] + tail, documents[0]):
        expected, found = brute_force(documents, sought), corpus.followers(sought)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        length, total, times = expected
        assert found.length == length
        if total <= 64:  # of more a sample is taken
            assert found.total == total
            assert {token: count for token, (count, _) in found.by_token.items()} == times
        counts = [count for count, _ in found.by_token.values()]
        assert counts == sorted(counts, reverse=True)
        for token, (_, position) in found.by_token.items():
            assert corpus.tokens[position] == token
            assert list(corpus.tokens[position - length : position]) == sought[-length:]


def test_places_are_in_the_order_of_their_texts() -> None:
    """Every lookup is a binary search in this order."""
    rng = np.random.default_rng(2)
    corpus = CorpusIndex.of([rng.integers(0, 3, 200).tolist(), rng.integers(0, 3, 100).tolist(), [1] * 100])
    text = list(corpus.tokens)
    places = list(corpus._places)
    assert sorted(places) == list(range(len(text)))
    beginnings = [text[place : place + 16] for place in places]
    assert beginnings == sorted(beginnings)


def test_frequencies_of_frequent_contexts_are_estimated_from_a_bounded_sample() -> None:
    """A context with a million places must not cost more than one with a hundred."""
    rng = np.random.default_rng(3)
    nexts = rng.choice([10, 11, 12], 20_000, p=[0.6, 0.3, 0.1])
    corpus = CorpusIndex.of([np.stack([np.full(20_000, 1), np.full(20_000, 2), nexts], axis=1).ravel().tolist()])
    found = corpus.followers([5, 1, 2])
    assert found is not None and found.length == 2 and found.total == 64
    assert list(found.by_token) == [10, 11, 12]
    for token, share in ((10, 0.6), (11, 0.3), (12, 0.1)):
        # Evenly spaced places in sorted order: off by one place at each end, and the draw itself by 0.01.
        assert abs(found.by_token[token][0] / 64 - share) <= 2 / 64 + 0.01


def test_a_lookup_takes_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens for every node of every tree."""
    searches: list[int] = []
    plain = CorpusIndex._range
    monkeypatch.setattr(CorpusIndex, "_range", lambda self, context: searches.append(len(context)) or plain(self, context))
    for document in ([7] * 20_000, list(range(20_000))):
        corpus = CorpusIndex.of([document])
        for tail in (document[:20], document[:3] + [99_999] + document[:4], [99_999] * 8, [document[0]]):
            searches.clear()
            corpus.followers(tail)
            assert len(searches) <= 4, searches


def test_the_text_itself_comes_first_and_the_corpus_before_single_tokens() -> None:
    """What the conversation says is better evidence than what others wrote, except for a match of a single token."""
    drafter = NgramDrafter(corpus=CorpusIndex.of([ids("the cow"), ids("the cow"), ids("the car")]))
    text = ids("the cat; tc: the c")  # after "the c" the text had "a", after "c" also ":"
    assert propose(NgramDrafter(), text).tokens == tuple(ids("a:"))
    found = propose(drafter, text)
    assert set(found.tokens) == set(ids("ao:"))
    by_token = dict(zip(found.tokens, found.lps, strict=True))
    assert by_token[ord("a")] > by_token[ord("o")] > by_token[ord(":")]
    assert propose(drafter, text, width=1).tokens == (ord("a"),)


def test_the_corpus_speaks_where_the_text_has_nothing() -> None:
    """That is what it is for; with the chain that most of the places have."""
    documents = [ids("once upon a time"), ids("once upon a table"), ids("once upon a time")]
    drafter = NgramDrafter(corpus=CorpusIndex.of(documents))
    assert propose(NgramDrafter(), ids("zonce")) == Candidates(terminal=True)
    found = propose(drafter, ids("xyzonce"))
    assert found.tokens == (ord(" "),)
    assert [token for token, _ in found.suffixes[0]] == ids("upon")
    assert all(lp < 0 for _, lp in found.suffixes[0])
    found = propose(drafter, ids("xyz a t"))
    assert found.tokens == tuple(ids("ia"))
    assert [[token for token, _ in chain] for chain in found.suffixes] == [ids("me"), ids("ble")]  # the documents end there


def test_the_chain_is_the_one_of_the_majority() -> None:
    """One odd place out of many must not decide what is drafted after it."""
    odd = [[1, 2, 3, n, 9, 9, 9] for n in (4, 30, 31)]
    common = [[1, 2, 3, 20, 21, 22, 23]] * 5
    found = propose(NgramDrafter(corpus=CorpusIndex.of([*odd, *common])), [8, 1, 2])
    assert found.tokens == (3,)
    assert [token for token, _ in found.suffixes[0]] == [20, 21, 22, 23]


@settings(max_examples=150)
@given(DOCUMENTS, st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3))
def test_probabilities_sum_to_less_than_one_with_a_corpus_too(documents: list[list[int]], text: list[int], min_n: int) -> None:
    """Scores of different drafters share one tree; probabilities that sum to more would crowd the others out."""
    found = propose(NgramDrafter(min_n=min_n, corpus=CorpusIndex.of(documents)), text, width=100)
    assert sum(math.exp(lp) for lp in found.lps) < 1
    assert len(set(found.tokens)) == len(found.tokens)
    assert all(token >= 0 for token in found.tokens), "a document's end was proposed"
    assert all(token >= 0 and lp < 0 for chain in found.suffixes for token, lp in chain)


def test_sequences_share_the_corpus_and_keep_their_texts_apart() -> None:
    """It may be large; and one request's text must never show up in another's."""
    corpus = CorpusIndex.of([ids("abc")])
    drafter = NgramDrafter(corpus=corpus)
    states = [drafter.open(), drafter.open()]
    texts = [ids("xab"), ids("yab")]
    requests = [DraftRequest(s, t, TokenTree(t[-1]), Ask((0,), 4)) for s, t in zip(states, texts, strict=True)]
    first, second = drafter.propose(requests)
    assert first == second
    for state in states:
        drafter.close(state)
    assert corpus.followers(ids("ab")) is not None, "closing a sequence must not close the corpus"


# Files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "small.corpus"
    CorpusIndex.of([ids("the cat sat on the mat"), ids("the cow")]).save(path, "hash-a")
    return path


def same(one: CorpusIndex, other: CorpusIndex) -> bool:
    return all(np.array_equal(one._arrays[name], other._arrays[name]) for name in one._arrays)


def test_what_is_saved_is_what_is_loaded(saved: Path) -> None:
    """And nothing else lies beside it afterwards."""
    loaded = CorpusIndex.load(saved, "hash-a")
    assert same(loaded, CorpusIndex.of([ids("the cat sat on the mat"), ids("the cow")]))
    assert list(saved.parent.iterdir()) == [saved]
    assert loaded.followers(ids("the c")) is not None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_file_is_mapped_and_read_only(saved: Path) -> None:
    """Several servers on one machine share one copy of a large corpus, and nobody can change it."""
    loaded = CorpusIndex.load(saved, "hash-a")
    assert str(saved) in Path("/proc/self/maps").read_text()
    assert not any(array.flags.writeable for array in loaded._arrays.values())


def test_another_tokenizer_is_refused(saved: Path) -> None:
    """Ids would mean other words: every lookup would run without an error and never be right."""
    with pytest.raises(ValueError, match=r"ngram_corpus = '.*small\.corpus' .*another tokenizer.*hash-a.*hash-b"):
        CorpusIndex.load(saved, "hash-b")


def test_a_truncated_file_is_refused_at_any_length(saved: Path) -> None:
    """A copy that was interrupted must end the start, not a request."""
    whole = saved.read_bytes()
    for length in [0, 1, 7, 8, 9, *range(10, len(whole), 13), len(whole) - 1]:
        saved.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="ngram_corpus = "):
            CorpusIndex.load(saved, "hash-a")
    saved.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="ngram_corpus = "):
        CorpusIndex.load(saved, "hash-a")


def test_an_altered_byte_is_seen_wherever_it_is(saved: Path) -> None:
    """Positions out of the text, or an order that is none, would crash or mislead the search much later."""
    whole = saved.read_bytes()
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 1
        saved.write_bytes(altered)
        with pytest.raises(ValueError, match="ngram_corpus = "):
            CorpusIndex.load(saved, "hash-a")
    saved.write_bytes(whole)
    CorpusIndex.load(saved, "hash-a")


def test_other_files_are_refused(tmp_path: Path) -> None:
    """With a word on what is wrong."""
    with pytest.raises(ValueError, match="there is no such file"):
        CorpusIndex.load(tmp_path / "none", "h")
    with pytest.raises(ValueError, match="there is no such file"):
        CorpusIndex.load(tmp_path, "h")
    model = tmp_path / "model.safetensors"
    save_file({"tokens": torch.zeros(3)}, model, {"format": "pt"})
    with pytest.raises(ValueError, match="not a corpus index"):
        CorpusIndex.load(model, "h")
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat\n" * 20)
    with pytest.raises(ValueError, match="not a corpus index, or a damaged one"):
        CorpusIndex.load(text, "h")


def test_text_files_become_one_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is a document; large ones are encoded in blocks of whole lines."""
    monkeypatch.setattr("drafters.corpus._BLOCK", 10)
    (tmp_path / "a.txt").write_text("one two\nthree four\nfive\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("", encoding="utf-8")
    (tmp_path / "c.txt").write_text("größer", encoding="utf-8")
    blocks: list[str] = []

    def encode(text: str) -> list[int]:
        blocks.append(text)
        return ids(text)

    out = tmp_path / "out.corpus"
    count = build_corpus([tmp_path / name for name in ("a.txt", "b.txt", "c.txt")], encode, out, "h")
    loaded = CorpusIndex.load(out, "h")
    assert count == len(loaded) == 24 + 1 + 6 + 1
    assert list(loaded.tokens) == [*ids("one two\nthree four\nfive\n"), -1, *ids("größer"), -1]
    assert len(blocks) > 2 and all(block.endswith("\n") for block in blocks[:-1])


def test_what_cannot_be_indexed_is_refused(tmp_path: Path) -> None:
    """And no file is left behind."""
    binary, out = tmp_path / "binary", tmp_path / "out"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="binary is not UTF-8"):
        build_corpus([binary], ids, out, "h")
    with pytest.raises(ValueError, match="nothing to index"):
        build_corpus([], ids, out, "h")
    with pytest.raises(ValueError, match="token id -5"):
        CorpusIndex.of([[1, -5]])
    assert not out.exists()
