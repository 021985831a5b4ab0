"""The forward over tree segments against an unmodified transformers model, one path at a time."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import causal_lm, toy
from models.attention import Segment
from models.attention_plan import make_plan
from models.causal_lm import CausalLM
from tests.plain_forward import (
    NOTHING,
    VOCAB,
    gap,
    grow_tree,
    node_logits,
    pair,
    plain_logits,
    random_text,
    random_tree,
)

TOLERANCE = 1e-4  # of logits with a spread of 2.5, float32
FAMILIES: list[tuple[toy.Family, bool]] = [
    ("llama", False),
    ("qwen2", False),
    ("qwen3", False),
    ("mistral", False),
    ("gemma", False),
    ("gemma", True),
    ("llama", True),
]


@pytest.fixture(params=[False, True], ids=["per-segment", "union"])
def union(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Lay forwards out as on a CPU, or as on an accelerator."""

    def plan(segments, pool, slots, *, union, group):  # type: ignore[no-untyped-def]
        return make_plan(segments, pool, slots, union=request.param, group=group)

    monkeypatch.setattr(causal_lm, "make_plan", plan)
    return bool(request.param)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_every_node_sees_its_own_path_and_nothing_else(family: toy.Family, tied: bool, union: bool) -> None:
    """Otherwise the verifier compares drafts with the wrong distribution and the served text is not the model's."""
    rng = random.Random(f"{family}{tied}")
    plain, lm = pair(family, tied=tied)
    for _ in range(2):
        texts = [random_text(rng, rng.randrange(1, 24)) for _ in range(3)]
        trees = [random_tree(rng, text.tokens[-1], rng.randrange(1, 14)) for text in texts]
        for text in texts:
            # Some prompts whole, some in pieces, some left for the tree's own forward to catch up on.
            text.prefill(lm, rng.choice([(), (1, 2), (3, 3, 3)])) if rng.random() < 0.7 else None
        scores = lm.forward([text.segment(lm, tree) for text, tree in zip(texts, trees, strict=True)])
        for index, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            difference = gap(scores.of(index), node_logits(plain, text.tokens, tree))
            assert difference <= TOLERANCE, f"sequence {index}: logits differ by {difference:.2g}"


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_tree_fed_layer_by_layer_gives_the_same_logits(family: toy.Family, union: bool) -> None:
    """A drafter grows its tree over several forwards; earlier nodes must be seen through their rows, by descendants only."""
    rng = random.Random(4)
    plain, lm = pair(family)
    texts = [random_text(rng, length) for length in (1, 7, 19)]
    trees = [random_tree(rng, text.tokens[-1], 1) for text in texts]
    fed: list[dict[int, int]] = [{} for _ in texts]
    for text in texts:
        text.prefill(lm, (4,))
    for size in (3, 8, 15):
        segments = []
        for index, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            start = len(fed[index])
            grow_tree(rng, tree, size)
            segments.append(text.layer(lm, tree, range(start, size), fed[index]))
        scores = lm.forward(segments)
        for index, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            want = node_logits(plain, text.tokens, tree)[size - len(segments[index].tokens) :]
            assert gap(scores.of(index), want) <= TOLERANCE


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_one_masked_attention_equals_one_per_segment(shapes: list[tuple[int, int]], rng: random.Random) -> None:
    """The two layouts are two pieces of code for one thing; only the CPU's is exercised by most tests."""
    results = []
    state = rng.getstate()
    lm = CausalLM(toy.tiny_causal_lm("qwen2", VOCAB, 0, layers=1), num_rows=128)
    for layout in (False, True):
        rng.setstate(state)
        texts = [random_text(rng, length) for length, _ in shapes]
        for text in texts:
            text.prefill(lm, ())
        trees = [random_tree(rng, text.tokens[-1], size) for text, (_, size) in zip(texts, shapes, strict=True)]
        segments = [text.segment(lm, tree) for text, tree in zip(texts, trees, strict=True)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                causal_lm, "make_plan", lambda s, p, m, layout=layout, **_: make_plan(s, p, m, union=layout)
            )
            results.append(lm.forward(segments).logits)
        lm.pool.release(row for segment in segments for row in segment.rows)
        lm.pool.release(row for text in texts for row in text.rows.truncate(0))
    assert gap(results[0], results[1]) <= 1e-5


def test_prompt_chunks_of_any_size_give_the_same_rows() -> None:
    """Prefill is cut where other sequences leave room; the cut must not be visible."""
    rng = random.Random(1)
    plain, lm = pair()
    text = random_text(rng, 40)
    want = plain_logits(plain, text.tokens)[-1:]
    for chunks in ((), (1,) * 39, (16, 16), (38,)):
        text.rows = type(text.rows)()
        text.prefill(lm, chunks)
        tree = random_tree(rng, text.tokens[-1], 1)
        assert gap(lm.forward([text.segment(lm, tree)]).logits, want) <= TOLERANCE


def test_negative_control_a_node_that_sees_its_sibling_is_noticed() -> None:
    """If a wrong mask went unnoticed, the tests above would prove nothing."""
    rng = random.Random(2)
    plain, lm = pair()
    text = random_text(rng, 6)
    tree = random_tree(rng, text.tokens[-1], 1)
    for token in (5, 9):
        tree.add(0, token, -1.0, "small")
    text.prefill(lm, ())
    segment = text.segment(lm, tree)
    assert segment.visible is not None
    segment.visible[2, 1] = True
    assert gap(lm.forward([segment]).logits, node_logits(plain, text.tokens, tree)) > 100 * TOLERANCE


def test_negative_control_siblings_with_flat_positions_are_noticed() -> None:
    """Siblings share a position; numbering them by their row instead must not pass."""
    rng = random.Random(3)
    plain, lm = pair()
    text = random_text(rng, 6)
    tree = random_tree(rng, text.tokens[-1], 1)
    for token in (5, 9):
        tree.add(0, token, -1.0, "small")
    text.prefill(lm, ())
    segment = text.segment(lm, tree)
    wrong = Segment(segment.tokens, [5, 6, 7], segment.prefix, segment.rows, segment.wanted, (), segment.visible)
    assert gap(lm.forward([wrong]).logits, node_logits(plain, text.tokens, tree)) > 10 * TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_captured_hidden_states_are_the_plain_models(family: toy.Family) -> None:
    """Drafters that read the target's features would be fed something else than they were trained on."""
    rng = random.Random(5)
    plain, lm = pair(family, layers=3, capture=(0, 1, 2))
    plain.config._attn_implementation = "eager"
    texts = [random_text(rng, length) for length in (4, 9)]
    segments = [
        Segment(text.tokens, range(len(text.tokens)), NOTHING, lm.pool.allocate(len(text.tokens)), ()) for text in texts
    ]
    scores = lm.forward(segments)
    assert scores.logits.shape[0] == 0 and set(scores.hidden) == {0, 1, 2} and scores.starts == (0, 4)
    for start, text in zip(scores.starts, texts, strict=True):
        with torch.inference_mode():
            states = plain(torch.tensor([text.tokens]), output_hidden_states=True, use_cache=False).hidden_states
            for layer in (0, 1):  # entry 0 is the embedding
                assert gap(scores.hidden[layer][start : start + len(text.tokens)], states[layer + 1][0]) <= TOLERANCE
            last = plain.model.norm(
                scores.hidden[2][start : start + len(text.tokens)]
            )  # transformers norms the last one
            assert gap(last, states[3][0]) <= TOLERANCE


def test_capture_refuses_a_layer_that_does_not_exist() -> None:
    """A typo in a drafter's list of layers would surface as a KeyError in the middle of serving."""
    with pytest.raises(ValueError, match="layer 2 of a model with 2"):
        pair(capture=(2,))


def test_capturing_again_does_not_change_earlier_results() -> None:
    """Scores of a step are read after the next forward may have begun."""
    _, lm = pair(capture=(1,))
    first = lm.forward([Segment([1, 2], [0, 1], NOTHING, lm.pool.allocate(2), ())])
    before = first.hidden[1].clone()
    lm.forward([Segment([3, 4, 5], [0, 1, 2], NOTHING, lm.pool.allocate(3), ())])
    assert torch.equal(first.hidden[1], before)


@pytest.mark.parametrize("num_tokens", [VOCAB, 50, 3])
def test_padding_ids_have_no_probability(num_tokens: int) -> None:
    """An embedding is padded to a round size; an id without a token must never be drafted or emitted."""
    plain, lm = pair(num_tokens=num_tokens)
    tokens = [1, 2, 0]
    logits = lm.forward([Segment(tokens, range(3), NOTHING, lm.pool.allocate(3), range(3))]).logits
    assert bool((logits[:, num_tokens:] == float("-inf")).all())
    assert gap(logits[:, :num_tokens], plain_logits(plain, tokens)[:, :num_tokens]) <= TOLERANCE


def test_more_tokens_than_rows_of_the_embedding_are_no_padding() -> None:
    """`num_tokens` beyond the model's vocabulary, or none, leaves every logit alone."""
    for num_tokens in (None, VOCAB + 5):
        _, lm = pair(num_tokens=num_tokens)
        assert lm.num_tokens == VOCAB
        logits = lm.forward([Segment([1], [0], NOTHING, lm.pool.allocate(1), (0,))]).logits
        assert bool(torch.isfinite(logits).all())


def test_forwards_and_their_rows_are_counted() -> None:
    """Benches report causes by these counters."""
    _, lm = pair()
    lm.forward(
        [
            Segment([1, 2], [0, 1], NOTHING, lm.pool.allocate(2), ()),
            Segment([3], [0], NOTHING, lm.pool.allocate(1), (0,)),
        ]
    )
    assert (lm.num_forwards, lm.num_rows_forwarded) == (1, 3)


def test_a_mask_of_the_wrong_shape_is_our_fault() -> None:
    """A mask one column short would be broadcast or cut somewhere deep inside."""
    _, lm = pair()
    segment = Segment([1, 2], [0, 1], NOTHING, lm.pool.allocate(2), (), visible=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(AssertionError, match="mask"):
        lm.forward([segment])
    with pytest.raises(AssertionError, match="tree rows need a mask"):
        lm.forward([Segment([1], [0], NOTHING, [0], (), tree_rows=[5])])
    with pytest.raises(AssertionError, match="ragged"):
        lm.forward([Segment([1], [0, 1], NOTHING, [0], ())])
    with pytest.raises(AssertionError, match="empty"):
        lm.forward([])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_run_and_stay_close(dtype: torch.dtype) -> None:
    """Rows take the model's type; a mixed-up type fails at the first forward on an accelerator."""
    plain, _ = pair()
    model = toy.tiny_causal_lm("llama", VOCAB, 0).to(dtype)
    lm = CausalLM(model, num_rows=64)
    assert lm.pool.keys.dtype == dtype
    tokens = [3, 1, 4, 1, 5]
    logits = lm.forward([Segment(tokens, range(5), NOTHING, lm.pool.allocate(5), range(5))]).logits
    assert logits.dtype == torch.float32
    assert gap(logits, plain_logits(plain, tokens)) < 0.5
