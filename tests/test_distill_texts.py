"""Which texts a student learns from and in which order; what is held out is never among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distill.batches import Batch, Texts
from distill.dialogue import Kind
from distill.shards import Shard, read, shard_path, write
from tests.distill_world import made_up_shard

LENGTH, TEXTS = 12, 5


def distinct(shard: int, texts: int = TEXTS) -> torch.Tensor:
    """Texts that begin differently, in every shard."""
    return 1000 * shard + torch.arange(texts * LENGTH).view(texts, LENGTH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(3):
        write(made_up_shard(distinct(index), seed=index), shard_path(tmp_path, index))
    return tmp_path


def ids_of(batch: Batch) -> list[int]:
    """A text's first token tells it apart."""
    return batch.tokens[:, 0].tolist()


def test_what_is_held_out_is_never_trained_on(folder: Path) -> None:
    """Agreement on texts that were learned by heart says nothing about new ones."""
    texts = Texts(folder, held_out=4, seed=0)
    kept_apart = [token for batch in texts.held_out_batches(3) for token in ids_of(batch)]
    assert len(set(kept_apart)) == 4
    trained = {token for index in range(40) for token in ids_of(texts.training_batch(index, 2))}
    assert not trained & set(kept_apart)
    assert trained | set(kept_apart) == {int(t) for index in range(3) for t in distinct(index)[:, 0]}, "none is lost"


def test_the_same_texts_are_held_out_when_data_is_added(folder: Path) -> None:
    """Otherwise a longer run would be judged on texts that the shorter one has learned."""
    before = [b.tokens for b in Texts(folder, held_out=4, seed=0).held_out_batches(8)]
    write(made_up_shard(distinct(3), seed=3), shard_path(folder, 3))
    after = Texts(folder, held_out=4, seed=1)
    assert all(torch.equal(a, b.tokens) for a, b in zip(before, after.held_out_batches(8), strict=True))
    assert len(after.training) == 16


def test_a_beginning_that_was_seen_before_is_dropped(folder: Path) -> None:
    """A greedy answer to the same question is the same answer: a held-out text would be in training as well."""
    again = distinct(9)
    again[0] = distinct(0)[0]  # word for word a held-out text
    again[1, : LENGTH // 2] = distinct(0)[1, : LENGTH // 2]  # only the answer differs
    again[2, : LENGTH // 2 - 1] = distinct(0)[2, : LENGTH // 2 - 1]  # the question differs in its last token
    write(made_up_shard(again, seed=3), shard_path(folder, 3))
    texts = Texts(folder, held_out=4, seed=0)
    assert [row for shard, row in texts.training if shard == 3] == [2, 3, 4]


def test_given_texts_are_told_apart_by_all_of_them(tmp_path: Path) -> None:
    """They are answers from the first token on, so that their questions are all alike: empty."""
    tokens = distinct(0)
    tokens[:, : LENGTH - 1] = 7
    tokens[4] = tokens[3]
    kinds = torch.full((TEXTS, LENGTH), int(Kind.ANSWER), dtype=torch.uint8)
    write(made_up_shard(tokens, kinds), shard_path(tmp_path, 0))
    texts = Texts(tmp_path, held_out=1, seed=0)
    assert texts.held_out == [(0, 0)] and texts.training == [(0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("size", [1, 2, 3, 11])
def test_every_text_comes_at_most_once_per_epoch(folder: Path, size: int) -> None:
    """Exactly once where the batches divide the texts; else a few wait for the next epoch, others each time."""
    texts = Texts(folder, held_out=4, seed=0)
    per_epoch = 11 // size
    orders = []
    for epoch in range(2):
        seen = [t for i in range(per_epoch) for t in ids_of(texts.training_batch(epoch * per_epoch + i, size))]
        assert len(seen) == len(set(seen)) == per_epoch * size
        orders.append(seen)
    assert size == 11 or orders[0] != orders[1], "another order in every epoch"


def test_the_order_is_found_again(folder: Path) -> None:
    """A resumed run would see some texts twice and others never."""
    first, again, other = (Texts(folder, held_out=4, seed=seed) for seed in (0, 0, 1))
    order = [ids_of(first.training_batch(index, 2)) for index in range(12)]
    assert [ids_of(again.training_batch(index, 2)) for index in reversed(range(12))] == order[::-1]
    assert [ids_of(other.training_batch(index, 2)) for index in range(12)] != order, "the seed counts"


def test_a_batch_holds_what_the_shards_hold(folder: Path) -> None:
    """A row of one text with the teaching of another would train, and teach nothing."""
    texts = Texts(folder, held_out=4, seed=0)
    batch = texts.batch([(2, 1), (0, 4)])
    shards: list[Shard] = [read(shard_path(folder, index)) for index in range(3)]
    for place, (shard, row) in enumerate([(2, 1), (0, 4)]):
        assert torch.equal(batch.tokens[place], shards[shard].tokens[row].long())
        assert torch.equal(batch.is_answer[place], shards[shard].kinds[row] == Kind.ANSWER)
        assert torch.equal(batch.top_ids[place], shards[shard].top_ids[row].long())
        assert torch.equal(batch.top_lps[place], shards[shard].top_lps[row].float())
        assert torch.equal(batch.features[place], shards[shard].features[row])
        assert torch.equal(batch.final[place], shards[shard].final[row])
    assert batch.num_tokens == 2 * LENGTH
    texts.use_layers([1])
    assert torch.equal(texts.batch([(2, 1)]).features, batch.features[:1, :, [1]])


@pytest.mark.parametrize(("shards", "named"), [(0, "holds no training data"), (1, "5 different texts, 5 of which")])
def test_too_little_data_is_refused(tmp_path: Path, shards: int, named: str) -> None:
    """Training would end in a traceback, or measure on nothing."""
    for index in range(shards):
        write(made_up_shard(distinct(index)), shard_path(tmp_path, index))
    with pytest.raises(ValueError, match=named):
        Texts(tmp_path, held_out=5, seed=0)


def test_the_draft_vocabulary_is_what_the_target_answers_with(tmp_path: Path) -> None:
    """Golden: tokens of answers, and the four likeliest at each of their places; of users' messages nothing."""
    shard = made_up_shard(torch.tensor([[90, 90, 90, 5, 6, 6]]), layers=1)
    shard.top_ids[0, :3] = 91
    shard.top_ids[0, 3:, 4:] = 92
    shard.top_ids[0, 3:, :4] = torch.tensor([[6, 5, 8, 9], [6, 2, 8, 9], [6, 5, 1, 9]])
    write(shard, shard_path(tmp_path, 0))
    short = made_up_shard(torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.zeros(1, 6, dtype=torch.uint8), layers=1)
    write(short, shard_path(tmp_path, 1))  # the user is still speaking when the text ends
    texts = Texts(tmp_path, held_out=1, seed=0)
    # 6: 3 + 2, 9: 3, 5: 2 + 1, 8: 2
    assert texts.frequent_ids(3).tolist() == [5, 6, 9]
    assert texts.frequent_ids(4).tolist() == [5, 6, 8, 9]
    assert texts.frequent_ids(100).tolist() == list(range(10)), "no more than there are"
    assert texts.frequent_ids(4).dtype == torch.int64


def test_texts_too_short_for_an_answer_are_refused(tmp_path: Path) -> None:
    """There would be nothing to learn, and no vocabulary to learn it in."""
    kinds = torch.full((2, LENGTH), int(Kind.USER), dtype=torch.uint8)
    write(made_up_shard(distinct(0, 2), kinds), shard_path(tmp_path, 0))
    with pytest.raises(ValueError, match="long enough to hold an answer"):
        Texts(tmp_path, held_out=1, seed=0).frequent_ids(4)
