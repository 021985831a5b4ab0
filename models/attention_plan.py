"""How the segments of a forward are laid out for attention: which queries read which rows, in how few calls.

On an accelerator one masked call covers everything: more arithmetic, one kernel per layer. The price of that union: a masked
NaN is still a NaN (0 * NaN), so one sequence's broken numbers reach the whole batch, though never a later one's rows.

On a CPU arithmetic is dear and so is every call, about as much as attending to a hundred rows. Short segments with contexts
of similar length share a call, padded to the longest: with queries of their own that are computed twice, and with rows of their
own that are masked, so that no sequence reads another's numbers. The query heads that share keys and values are folded into
the queries, which reads the keys once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from models.kv_cache import RowPool

if TYPE_CHECKING:
    from models.attention import Segment

_MOST_QUERIES = 32  # of a segment that shares a call, or is folded: beyond, arithmetic decides
_MOST_ROWS = 2048  # read by one call of several segments: beyond, calls cost little beside the reading
_LONGER, _MORE = 1.25, 16  # a context may be so many times, and rows, longer than the shortest that it shares a call with


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One attention call: `sequences` with the same number of queries each, and of rows that they attend to."""

    sequences: int
    rows: torch.Tensor  # int64 [sequences * num_rows]
    mask: torch.Tensor | None  # [sequences, 1, fold * num_queries, num_rows], added to the scores; None: all is seen
    queries: torch.Tensor | None  # int64 [sequences * num_queries] in the flattened forward; None: all of it, in order
    fold: int = 1  # query heads per key head that count as further queries


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything the layers of one forward share: where to write, what to read."""

    pool: RowPool
    slots: dict[int, int]  # the model's layer index -> layer of the pool
    write_rows: torch.Tensor  # int64 [total]
    batches: tuple[Batch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A segment's queries `[start, end)` of the flattened forward, the rows they attend to, the mask between the two."""

    start: int
    end: int
    rows: np.ndarray  # int64 [num_rows]
    mask: torch.Tensor | None  # bool [end - start, num_rows]; None: all is seen


def make_plan(segments: Sequence[Segment], pool: RowPool, slots: dict[int, int], *, union: bool, group: int = 1) -> Plan:
    """Lay out a forward over `segments`: with `union` in one call, as accelerators like it, else as CPUs do.

    `group` is the number of query heads per key head.
    """
    spans, start = [], 0
    for segment in segments:
        end = start + len(segment.tokens)
        spans.append(_Span(start, end, segment.visible_rows(), segment.mask()))
        start = end
    if union:
        batches = [_alone(_union(spans) if len(spans) > 1 else spans[0], start, 1)]
    else:
        batches = [
            _alone(together[0], start, group) if len(together) == 1 else _together(together, start, group)
            for together in _grouped(spans)
        ]
    device, dtype = pool.keys.device, pool.keys.dtype
    write = torch.tensor([row for segment in segments for row in segment.rows], dtype=torch.int64)
    return Plan(pool, slots, write.to(device), tuple(_placed(batch, device, dtype) for batch in batches))


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a bool `mask` is True, -inf elsewhere. Attention would make the same of it, but once in every layer."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _grouped(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Spans that share a call, each group in the order of the forward."""
    short = sorted((span for span in spans if span.end - span.start <= _MOST_QUERIES), key=lambda span: len(span.rows))
    group: list[_Span] = []
    for span in short:
        fits = group and (len(group) + 1) * len(span.rows) <= _MOST_ROWS
        if group and not (fits and len(span.rows) <= _LONGER * len(group[0].rows) + _MORE):
            yield sorted(group, key=lambda member: member.start)
            group = []
        group.append(span)
    if group:
        yield sorted(group, key=lambda member: member.start)
    yield from ([span] for span in spans if span.end - span.start > _MOST_QUERIES)


def _alone(span: _Span, total: int, group: int) -> Batch:
    """A call for one span of a forward over `total` tokens."""
    count = span.end - span.start
    mask = None if span.mask is None else span.mask[None, None]
    queries = None if count == total else torch.arange(span.start, span.end)
    return Batch(1, torch.from_numpy(span.rows), mask, queries, group if count <= _MOST_QUERIES else 1)


def _together(spans: Sequence[_Span], total: int, group: int) -> Batch:
    """A call for several spans, padded: a query and a row of a span's own stand in for what it has fewer of."""
    counts, lengths = [span.end - span.start for span in spans], [len(span.rows) for span in spans]
    count, length = max(counts), max(lengths)
    queries = torch.tensor([min(span.start + index, span.end - 1) for span in spans for index in range(count)])
    rows = np.empty((len(spans), length), dtype=np.int64)
    mask = torch.zeros(len(spans), 1, count, length, dtype=torch.bool)
    for index, span in enumerate(spans):
        rows[index] = span.rows[-1]
        rows[index, : lengths[index]] = span.rows
        own = mask[index, 0, :, : lengths[index]]
        if span.mask is None:
            own.fill_(True)
        else:
            own[: counts[index]] = span.mask
            own[counts[index] :] = span.mask[-1]
    is_whole = len(queries) == total and min(counts) == count  # then the queries are the forward, in order
    return Batch(
        len(spans),
        torch.from_numpy(rows.reshape(-1)),
        None if bool(mask.all()) else mask,
        None if is_whole else queries,
        group,
    )


def _union(spans: Sequence[_Span]) -> _Span:
    """One span over all queries and all rows, block-diagonal: no sequence sees another's rows."""
    rows = np.concatenate([span.rows for span in spans])
    mask = torch.zeros(spans[-1].end, len(rows), dtype=torch.bool)
    offset = 0
    for span in spans:
        mask[span.start : span.end, offset : offset + len(span.rows)] = True if span.mask is None else span.mask
        offset += len(span.rows)
    return _Span(0, spans[-1].end, rows, mask)


def _placed(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """The batch as the layers use it: on their device, its mask folded and added to scores."""
    mask = None if batch.mask is None else additive(batch.mask, dtype)
    if mask is not None and batch.fold > 1:
        mask = mask.repeat(1, 1, batch.fold, 1)
    return Batch(
        batch.sequences,
        batch.rows.to(device),
        None if mask is None else mask.to(device),
        None if batch.queries is None else batch.queries.to(device),
        batch.fold,
    )
