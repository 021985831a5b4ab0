"""Rows of keys and values: who owns them, that nothing leaks, and that nobody else's rows are ever read."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import causal_lm
from models.attention import Segment
from models.attention_plan import make_plan
from models.causal_lm import CausalLM
from models.kv_cache import OutOfRows, RowList, RowPool
from tests.plain_forward import Text, gap, pair, plain_logits, random_text, random_tree
from tree.tree import TokenTree

OPERATIONS = st.lists(st.tuples(st.sampled_from(["take", "give", "give some"]), st.integers(0, 9)), max_size=60)


@given(st.integers(1, 20), OPERATIONS)
def test_a_row_has_one_owner(num_rows: int, operations: list[tuple[str, int]]) -> None:
    """A row handed to two sequences mixes their texts, without an error."""
    pool = RowPool(1, num_rows, 1, 1)
    owned: list[list[int]] = []
    for operation, number in operations:
        if operation == "take":
            free = pool.num_free
            try:
                owned.append(pool.allocate(number))
                assert len(owned[-1]) == number
            except OutOfRows:
                assert number > free == pool.num_free, "refused although there was room, or took some"
        elif owned:
            rows = owned.pop(number % len(owned))
            kept = rows[number:] if operation == "give some" else []
            pool.release(rows[: len(rows) - len(kept)] if not kept else rows[:number])
            if kept:
                owned.append(kept)
        flat = [row for rows in owned for row in rows]
        assert len(set(flat)) == len(flat) == pool.num_used == num_rows - pool.num_free
        assert all(0 <= row < num_rows for row in flat)
        pool.check()
    pool.release(row for rows in owned for row in rows)
    assert pool.num_used == 0
    pool.check()


def test_releasing_twice_is_our_fault_and_raises() -> None:
    """Otherwise the row would be handed to two sequences next."""
    pool = RowPool(1, 4, 1, 1)
    rows = pool.allocate(2)
    pool.release(rows)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(rows[:1])
    with pytest.raises(AssertionError):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="num_rows"):
        RowPool(1, 0, 1, 1)


@given(st.lists(st.one_of(st.integers(0, 400), st.floats(0, 1.2)), max_size=12))
def test_a_row_list_is_a_list(operations: list[int | float]) -> None:
    """Extends by that many rows (int) or truncates to that share of the length (float), next to a plain list."""
    rows, model, number = RowList(), [], 0
    for operation in operations:
        if isinstance(operation, int):
            new = list(range(number, number + operation))
            number += operation
            rows.extend(new)
            model.extend(new)
        else:
            length = int(operation * len(model))
            assert rows.truncate(length) == model[length:]
            del model[length:]
        assert len(rows) == len(model) and rows.view().tolist() == model


def test_truncating_to_a_negative_length_is_our_fault() -> None:
    """Cropping by negative numbers is where caches elsewhere kept stale rows."""
    rows = RowList()
    rows.extend([4, 5])
    with pytest.raises(AssertionError):
        rows.truncate(-1)
    assert rows.truncate(7) == [] and len(rows) == 2
    assert rows.truncate(0) == [4, 5] and len(rows) == 0


def _step(rng: random.Random, lm: CausalLM, text: Text, tree: TokenTree) -> torch.Tensor:
    """Verify `tree`, accept a random path, keep its rows; returns the verified logits."""
    segment = text.segment(lm, tree)
    num_pending = len(segment.rows) - len(tree) + 1
    logits = lm.forward([segment]).logits
    path = tree.path(rng.randrange(len(tree)))
    row_of = dict(zip(range(1, len(tree)), segment.rows[num_pending:], strict=True))
    text.rows.extend([*segment.rows[:num_pending], *(row_of.pop(node) for node in path)])
    lm.pool.release(row_of.values())
    text.tokens.extend([*(tree.token[node] for node in path), rng.randrange(67)])
    return logits


def test_two_hundred_rounds_of_grow_verify_commit_keep_the_books_and_the_logits() -> None:
    """A row kept of a rejected branch, or one moved to a wrong position, shows as a text that drifts away slowly."""
    rng = random.Random(0)
    plain, lm = pair(num_rows=900, max_positions=2048)
    texts: list[Text] = []
    for number in range(200):
        if len(texts) < 3:
            texts.append(random_text(rng, rng.randrange(1, 12)))
        text = rng.choice(texts)
        logits = _step(rng, lm, text, random_tree(rng, text.tokens[-1], rng.randrange(1, 10)))
        assert lm.pool.num_used == sum(len(other.rows) for other in texts)
        assert len(text.rows) == len(text.tokens) - 1 or len(text.rows) < len(text.tokens)
        if number % 10 == 0:  # the root's row is the next-token row of everything committed so far
            tree = random_tree(rng, text.tokens[-1], 1)
            segment = text.segment(lm, tree)
            logits = lm.forward([segment]).logits
            lm.pool.release(segment.rows)
            assert gap(logits, plain_logits(plain, text.tokens)[-1:]) <= 1e-4, (
                f"round {number}, {len(text.tokens)} tokens"
            )
        if len(text.tokens) > 200 or rng.random() < 0.02:
            texts.remove(text)
            lm.pool.release(text.rows.truncate(0))
    for text in texts:
        lm.pool.release(text.rows.truncate(0))
    assert lm.pool.num_used == 0
    lm.pool.check()


def test_a_step_without_any_accepted_token_leaves_no_stale_row() -> None:
    """A one-token prompt whose every draft is rejected: the edge values where caches elsewhere kept everything."""
    rng = random.Random(1)
    plain, lm = pair()
    text = Text([7])
    for _ in range(12):
        tree = random_tree(rng, text.tokens[-1], 6)
        segment = text.segment(lm, tree)
        logits = lm.forward([segment]).logits
        assert gap(logits[:1], plain_logits(plain, text.tokens)[-1:]) <= 1e-4
        text.rows.extend(segment.rows[:1])
        lm.pool.release(segment.rows[1:])
        text.tokens.append(rng.randrange(67))
    assert lm.pool.num_used == 12


def test_used_rows_give_the_same_answer_as_fresh_ones() -> None:
    """First and third of three texts are the same; the second one's rows lie in between in the pool."""
    rng = random.Random(2)
    _, lm = pair(num_rows=24)
    first, other = random_text(rng, 20), random_text(rng, 24)
    answers = []
    for text in (first, other, Text(list(first.tokens))):
        text.prefill(lm, (8,))
        tree = random_tree(random.Random(3), text.tokens[-1], 1)
        segment = text.segment(lm, tree)
        answers.append(lm.forward([segment]).logits)
        lm.pool.release([*segment.rows, *text.rows.truncate(0)])
    assert torch.equal(answers[0], answers[2])


def test_nan_in_rows_of_others_and_in_free_rows_changes_nothing() -> None:
    """Bitwise: one sequence's broken numbers, or what a finished one left behind, must not reach another."""
    rng = random.Random(3)
    _, lm = pair()
    texts = [random_text(rng, 9), random_text(rng, 14)]
    for text in texts:
        text.prefill(lm, (4,))
    trees = [random_tree(rng, text.tokens[-1], 7) for text in texts]
    segments = [text.segment(lm, tree) for text, tree in zip(texts, trees, strict=True)]
    clean = lm.forward(segments).of(0).clone()
    mine = [*texts[0].rows.view().tolist()]
    poisoned = [row for row in range(lm.pool.num_rows) if row not in mine]  # the other's prefix, its tree's, free ones
    lm.pool.keys[:, poisoned] = float("nan")
    lm.pool.values[:, poisoned] = float("nan")
    scores = lm.forward(segments)
    assert torch.equal(scores.of(0), clean)
    assert bool(torch.isnan(scores.of(1)).all()), "the poison was not where it was thought to be"


def test_nan_in_rows_outside_the_batch_changes_nothing_in_one_masked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's layout reads the rows of all sequences of the batch, and no others."""
    monkeypatch.setattr(causal_lm, "make_plan", lambda s, p, m, **_: make_plan(s, p, m, union=True))
    rng = random.Random(4)
    _, lm = pair()
    texts = [random_text(rng, length) for length in (5, 8, 6)]
    for text in texts:
        text.prefill(lm, ())
    trees = [random_tree(rng, text.tokens[-1], 5) for text in texts]
    segments = [text.segment(lm, tree) for text, tree in zip(texts[:2], trees, strict=False)]
    clean = lm.forward(segments).logits.clone()
    mine = {row for text in texts[:2] for row in text.rows.view().tolist()}
    poisoned = [row for row in range(lm.pool.num_rows) if row not in mine]
    lm.pool.keys[:, poisoned] = float("nan")
    lm.pool.values[:, poisoned] = float("nan")
    assert torch.equal(lm.forward(segments).logits, clean)


def test_the_order_of_rows_in_memory_means_nothing() -> None:
    """Attention gathers by index: scattered rows answer as dense ones do."""
    rng = random.Random(5)
    plain, lm = pair(num_rows=64)
    order = list(range(64))
    rng.shuffle(order)
    tokens = [rng.randrange(67) for _ in range(12)]
    rows = RowList()
    for position, token in enumerate(tokens):
        logits = lm.forward([Segment([token], [position], rows.view(), order[position : position + 1], (0,))]).logits
        rows.extend(order[position : position + 1])
    assert gap(logits, plain_logits(plain, tokens)[-1:]) <= 1e-4
