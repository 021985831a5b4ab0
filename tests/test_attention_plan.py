"""Attention in few calls: who shares one, what padding may read, and that it is the attention of every segment alone."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.attention import Segment, attend, chain_then_tree
from models.attention_plan import Plan, make_plan
from models.kv_cache import RowPool

HEAD_DIM = 4
Shape = tuple[int, int]  # tokens in the cache, and new ones

SHAPES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9) | st.just(33)), min_size=1, max_size=6)


def layout(shapes: list[Shape], rng: random.Random, kv_heads: int = 1) -> tuple[list[Segment], RowPool]:
    """Segments with scattered rows: chunks of prompts in causal order, and trees below a root."""
    pool = RowPool(1, 4000, kv_heads, HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"))
    torch.manual_seed(rng.randrange(2**31))
    pool.keys.normal_()
    pool.values.normal_()
    free = rng.sample(range(4000), sum(map(sum, shapes)))
    segments = []
    for context, count in shapes:
        prefix, rows, free = free[:context], free[context : context + count], free[context + count :]
        visible = None
        if rng.random() < 0.6:
            parents = [rng.randrange(index) for index in range(1, count)]
            sees = torch.eye(count, dtype=torch.bool)
            for node, parent in enumerate(parents, 1):
                sees[node] |= sees[parent]
            visible = chain_then_tree(1, sees[1:, 1:])
        segments.append(Segment([0] * count, range(count), np.array(prefix, dtype=np.int64), rows, (), (), visible))
    return segments, pool


def plain(segments: list[Segment], pool: RowPool, query: torch.Tensor) -> torch.Tensor:
    """Attention of every query alone, by its definition, in float64."""
    heads, kv_heads = query.shape[1], pool.keys.shape[2]
    results, start = [], 0
    for segment in segments:
        rows, count = torch.from_numpy(segment.visible_rows()), len(segment.tokens)
        mask = segment.mask()
        for index in range(count):
            seen = rows if mask is None else rows[mask[index]]
            for head in range(heads):
                keys, values = (part[0][seen, head * kv_heads // heads].double() for part in (pool.keys, pool.values))
                weights = torch.softmax(keys @ query[0, head, start + index].double() / HEAD_DIM**0.5, 0)
                results.append(weights @ values)
        start += count
    return torch.stack(results).view(start, heads, HEAD_DIM).transpose(0, 1)[None].float()


def attended(plan: Plan, query: torch.Tensor, pool: RowPool) -> torch.Tensor:
    """By the plan; what is written to the cache is what is there."""
    own = [part[0][plan.write_rows].transpose(0, 1)[None] for part in (pool.keys, pool.values)]
    return attend(plan, 0, query, *own)


def ask(segments: list[Segment], heads: int) -> torch.Tensor:
    return torch.randn(1, heads, sum(len(segment.tokens) for segment in segments), HEAD_DIM)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([(1, 1), (1, 3), (2, 2)]), st.booleans(), st.randoms(use_true_random=False))
def test_every_layout_is_the_attention_of_each_query_alone(
    shapes: list[Shape], heads: tuple[int, int], union: bool, rng: random.Random
) -> None:
    """Padded queries, padded rows, folded heads, order: whatever goes wrong there is another text."""
    kv_heads, group = heads
    segments, pool = layout(shapes, rng, kv_heads)
    query = ask(segments, kv_heads * group)
    plan = make_plan(segments, pool, {}, union=union, group=group)
    assert torch.allclose(attended(plan, query, pool), plain(segments, pool, query), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.randoms(use_true_random=False))
def test_a_call_reads_rows_of_its_own_sequences_only(shapes: list[Shape], rng: random.Random) -> None:
    """Padding with anybody's row would let a broken number of one text into another: a masked NaN is still a NaN."""
    segments, pool = layout(shapes, rng)
    plan = make_plan(segments, pool, {}, union=False)
    owner = {row: index for index, segment in enumerate(segments) for row in segment.visible_rows().tolist()}
    of_query = [index for index, segment in enumerate(segments) for _ in segment.tokens]
    answered: list[int] = []
    for batch in plan.batches:
        queries = list(range(len(of_query))) if batch.queries is None else batch.queries.tolist()
        share, reads = len(queries) // batch.sequences, batch.rows.view(batch.sequences, -1).tolist()
        for index, rows in enumerate(reads):
            asking = {of_query[query] for query in queries[index * share : (index + 1) * share]}
            assert {owner[row] for row in rows} == asking and len(asking) == 1
        answered += set(queries)
    assert sorted(answered) == list(range(len(of_query))), "a query is answered in one call"


@pytest.mark.parametrize(
    ("shapes", "calls"),
    [
        ([(50, 1)] * 8, 1),
        ([(50, 1), (60, 5), (52, 3)], 1),
        ([(50, 1), (200, 1), (55, 2), (210, 4)], 2),  # contexts of two kinds
        ([(50, 1), (50, 33), (50, 2)], 2),  # a chunk of a prompt is large enough to be alone
        ([(1000, 1)] * 4, 2),  # reading decides, not calls
    ],
)
def test_who_shares_a_call(shapes: list[Shape], calls: int) -> None:
    segments, pool = layout([(min(context, 400), count) for context, count in shapes], random.Random(1))
    if shapes[0][0] == 1000:
        segments = [replace(segment, prefix=np.resize(segment.prefix, 1000)) for segment in segments]
    assert len(make_plan(segments, pool, {}, union=False).batches) == calls


def test_negative_control_padding_that_is_not_masked_is_seen() -> None:
    """Else the comparison above would prove nothing about padding."""
    segments, pool = layout([(10, 1), (20, 2)], random.Random(2))
    query = ask(segments, 1)
    plan = make_plan(segments, pool, {}, union=False)
    (batch,) = plan.batches
    assert batch.mask is not None
    wrong = replace(plan, batches=(replace(batch, mask=torch.zeros_like(batch.mask)),))
    assert torch.allclose(attended(plan, query, pool), plain(segments, pool, query), atol=1e-5)
    assert not torch.allclose(attended(wrong, query, pool), plain(segments, pool, query), atol=1e-3)


def test_negative_control_heads_folded_in_the_wrong_order_are_seen() -> None:
    """Queries of one head must not be taken for another's."""
    segments, pool = layout([(10, 2), (12, 2)], random.Random(3))
    query = ask(segments, 3)
    plan = make_plan(segments, pool, {}, union=False, group=3)
    (batch,) = plan.batches
    assert batch.mask is not None
    by_token = batch.mask.view(2, 1, 3, 2, -1).transpose(2, 3).reshape(batch.mask.shape)
    wrong = replace(plan, batches=(replace(batch, mask=by_token),))
    assert torch.allclose(attended(plan, query, pool), plain(segments, pool, query), atol=1e-5)
    assert not torch.allclose(attended(wrong, query, pool), plain(segments, pool, query), atol=1e-3)
