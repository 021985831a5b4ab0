"""A draft head as a drafter: it goes on from the hidden states that the target's own pass leaves behind.

Source: EAGLE-3 (2503.01840). Entry i of a verified text joins the target's hidden state of token i with the embedding of token
i + 1; it exists as soon as the target has been fed token i and token i + 1 is known, so the newest entry belongs to the root of
the next tree. A drafted node's entry takes the head's own hidden state of the entry above it instead. After a step the drafted
entries are thrown away and the accepted tokens are entered anew, from the target's hidden states, with the next question.

A node can be entered only after the one above it, so a tree that another drafter grew is entered layer by layer.

Entries of a text that is over are kept for texts that begin alike: entry i depends on the tokens up to i + 1, so its key is the
pair of tokens i and i + 1. Where the target has rows of a beginning of which the head has no entries, as after a request that
another drafter drafted for, the hidden states are gone: the head then begins where it begins to hear, at the right positions
but blind for what is in front. That costs acceptance in this request and never the text; such entries are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafters.base import DraftRequest, Halt
from drafters.reading import layers_of, missing_nodes, read_answer
from models.attention import Segment
from models.head_lm import HeadLM
from models.kv_cache import RowList
from models.prefix_cache import Lease, PrefixCache
from tree.flatten import visible
from tree.growth import Answer
from tree.tree import TokenTree

_CATCH_UP = 512  # most verified tokens entered at once: a long prompt must not hold up the answers of others


@dataclass(slots=True, eq=False)
class Heard:
    """What the head remembers about one sequence. An entry's row is its place in the cache."""

    rows: RowList = field(default_factory=RowList)  # of the verified text's entries, from entry `first` on
    first: int = 0  # entries in front of it are missing
    fused: list[torch.Tensor] = field(default_factory=list)  # blocks `[n, hidden]` of tokens that have no entry yet
    heard_from: int = 0  # the first verified token whose hidden states came in
    num_heard: int = 0  # verified tokens up to the last one whose hidden states came in
    has_recalled: bool = False  # it is known which entries in front of `heard_from` there are
    node_rows: dict[int, int] = field(default_factory=dict)  # tree node -> row, in the order of entering; no root
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # node (0: root) -> `[hidden]`
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)  # node (0: root) -> `[draft_vocab]`
    text: Sequence[int] = ()  # the verified text, which grows; empty before the first question, or if nothing is kept
    lease: Lease | None = None  # what of `rows` is the cache's too

    @property
    def num_entries(self) -> int:
        """Entries that the text has or has lost; the next one to make."""
        return self.first + len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What one sequence enters in one pass."""

    num_text: int  # entries of verified text, from the oldest missing one
    nodes: list[int]  # tree nodes, ascending
    is_partial: bool  # the text ends before the root; there is nothing to answer from yet


class HeadDrafter:
    """Drafts with a `HeadLM`. `name` is its role."""

    runs_model = True

    def __init__(self, name: str, lm: HeadLM) -> None:
        self.name = name
        self.lm = lm
        self.layers = lm.layers

    def open(self) -> Heard:
        """An empty memory."""
        return Heard()

    @torch.inference_mode()
    def observe(self, state: Heard, start: int, hidden: torch.Tensor) -> None:
        """Take in the target's hidden states `[n, layers, hidden]` of verified tokens `start` and up."""
        # The first ones may begin in the middle of the text; the first question shows what is known of what is in front.
        assert start == state.num_heard or state.num_heard == 0, f"hidden states of token {start}, expected {state.num_heard}"
        if state.num_heard == 0:
            state.heard_from = start
        state.fused.append(self.lm.fuse(hidden))
        state.num_heard = start + len(hidden)

    def passes(self, request: DraftRequest) -> tuple[int, ...]:
        """A forward for every layer of nodes that have no entry yet; the text it is behind counts as one row."""
        state = request.state
        behind = state.num_entries < len(request.context) - 1
        return layers_of(request, {} if behind else {0: 0, **state.node_rows})

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        """Enter what is missing, one pass per layer of nodes that have no entry yet, and read the candidates off it.

        A sequence far behind, as after a long prompt, enters a part of its text and gets no candidates yet.
        """
        for request in requests:
            self._recall(request)
        answers: dict[int, Answer | Halt] = {}
        open_ = dict(enumerate(requests))
        while open_:
            work: list[tuple[DraftRequest, Entries]] = []
            promised = 0
            for index, request in list(open_.items()):
                entries = self._next_entries(request)
                size = entries.num_text + len(entries.nodes)
                halt = self._obstacle(request, entries, self.lm.pool.num_available - promised)
                if halt is not None:
                    answers[index] = halt
                elif size == 0 and not entries.is_partial:
                    state = request.state
                    answers[index] = read_answer(
                        request,
                        self.name,
                        state.log_probs,
                        vocab=self.lm.vocab,
                        vocab_size=self.lm.vocab_size,
                    )
                else:
                    promised += size
                    work.append((request, entries))
                    if not entries.is_partial:
                        continue
                    answers[index] = Answer({}, {})
                del open_[index]
            self._enter(work)
        return [answers[index] for index in range(len(requests))]

    def commit(self, state: Heard, context: Sequence[int], tree: TokenTree | None, path: Sequence[int]) -> None:
        """Forget the drafted entries: the target's own hidden states of the accepted path replace them."""
        self._forget_nodes(state)

    def close(self, state: Heard) -> None:
        """Free every row of the sequence."""
        self._forget_nodes(state)
        state.fused.clear()
        if state.lease is not None:
            PrefixCache.over(self.lm.pool).end(state.lease)
        self.lm.pool.release(state.rows.truncate(0))

    def num_known(self, text: list[int]) -> int:
        """Tokens that have entries here: what comes behind them has to be heard."""
        keys = _keys(text, len(text) - 1)
        return PrefixCache.over(self.lm.pool).match(keys, len(keys))[0]

    def keep(self, state: Heard) -> None:
        """Keep the entries of the text, unless some are missing in front of them."""
        if state.lease is not None and state.first == 0:
            count = min(len(state.rows), len(state.text) - 1)
            PrefixCache.over(self.lm.pool).share(state.lease, _keys(state.text, count), state.rows, count)

    def forget_prefixes(self) -> None:
        """Give the kept rows back."""
        PrefixCache.over(self.lm.pool).clear()

    def _recall(self, request: DraftRequest) -> None:
        """With the first question: take over the entries of the tokens that were not heard, or do without them."""
        state = request.state
        if state.has_recalled:
            return
        state.has_recalled = True
        count = state.heard_from if state.num_heard else request.num_cached or 0
        state.first, state.num_heard = count, max(state.num_heard, count)
        if request.num_cached is None:
            return
        cache, keys = PrefixCache.over(self.lm.pool), _keys(request.context, count)
        state.text, state.lease = request.context, cache.begin()
        if cache.match(keys, count)[0] == count:
            state.rows.extend(cache.take(state.lease, keys, count))
            state.first = 0

    def _forget_nodes(self, state: Heard) -> None:
        self.lm.pool.release(state.node_rows.values())
        for memory in (state.node_rows, state.hidden, state.log_probs):
            memory.clear()

    def _next_entries(self, request: DraftRequest) -> Entries:
        """The text that has no entry yet, else the topmost nodes that have none."""
        state = request.state
        num_missing = len(request.context) - 1 - state.num_entries
        if num_missing:
            return Entries(min(num_missing, _CATCH_UP), [], is_partial=num_missing > _CATCH_UP)
        if 0 not in state.log_probs:  # the target has not been fed anything yet
            return Entries(0, [], is_partial=True)
        missing = missing_nodes(request.tree, request.ask, state.node_rows)
        return Entries(0, [node for node in missing if request.tree.parent[node] in state.hidden], is_partial=False)

    def _obstacle(self, request: DraftRequest, entries: Entries, num_free: int) -> Halt | None:
        """Why a question cannot be answered, if so."""
        state, tree = request.state, request.tree
        if state.num_heard < len(request.context) - 1:
            return Halt("features")
        deepest = max((tree.depth[node] for node in (*entries.nodes, *request.ask.nodes)), default=0)
        if len(request.context) - 1 + deepest > self.lm.max_positions:
            return Halt("context")
        return Halt("rows") if entries.num_text + len(entries.nodes) > num_free else None

    def _enter(self, work: Sequence[tuple[DraftRequest, Entries]]) -> None:
        """One pass over every sequence's new entries; remembers rows, hidden states and log-probabilities."""
        work = [(request, entries) for request, entries in work if entries.num_text or entries.nodes]
        if not work:
            return
        with self.lm.pool.taking(entries.num_text + len(entries.nodes) for _, entries in work) as taken:
            segments = [_segment(request, entries, rows) for (request, entries), rows in zip(work, taken, strict=True)]
            result = self.lm.forward(segments, [_inputs(request, entries) for request, entries in work])
            log_probs = torch.log_softmax(result.logits, dim=-1)
        for index, ((request, entries), rows) in enumerate(zip(work, taken, strict=True)):
            state, start = request.state, result.starts[index]
            if entries.num_text:
                state.rows.extend(rows)
                _drop_front(state.fused, entries.num_text)
                read = [] if entries.is_partial else [0]
                hidden = result.hidden[start + entries.num_text - 1 : start + entries.num_text]
            else:
                state.node_rows.update(zip(entries.nodes, rows, strict=True))
                read, hidden = entries.nodes, result.hidden[start : start + len(entries.nodes)]
            state.hidden.update(zip(read, hidden, strict=False))
            state.log_probs.update(zip(read, log_probs[result.offsets[index] : result.offsets[index + 1]], strict=True))


def _segment(request: DraftRequest, entries: Entries, rows: list[int]) -> Segment:
    """Missing text in causal order, or nodes below the newest entry."""
    state, tree, context = request.state, request.tree, request.context
    start, count = state.num_entries, entries.num_text
    if count:
        return Segment(
            tokens=context[start + 1 : start + 1 + count],
            positions=range(start, start + count),
            prefix=state.rows.view(),
            rows=rows,
            wanted=() if entries.is_partial else (count - 1,),
        )
    earlier, nodes = list(state.node_rows), entries.nodes
    return Segment(
        tokens=[tree.token[node] for node in nodes],
        positions=[start - 1 + tree.depth[node] for node in nodes],
        prefix=state.rows.view(),
        rows=rows,
        wanted=range(len(nodes)),
        tree_rows=[state.node_rows[node] for node in earlier],
        visible=visible(tree, nodes, [*earlier, *nodes]),
    )


def _inputs(request: DraftRequest, entries: Entries) -> torch.Tensor:
    """What takes the place of the tokens' hidden states, `[n, hidden]`."""
    state = request.state
    if not entries.num_text:
        return torch.stack([state.hidden[request.tree.parent[node]] for node in entries.nodes])
    blocks, count = [], 0
    for block in state.fused:
        blocks.append(block[: entries.num_text - count])
        count += len(blocks[-1])
        if count == entries.num_text:
            break
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _drop_front(blocks: list[torch.Tensor], count: int) -> None:
    """Remove the first `count` rows of the blocks taken together."""
    while count and count >= len(blocks[0]):
        count -= len(blocks.pop(0))
    if count:
        blocks[0] = blocks[0][count:]


def _keys(text: Sequence[int], count: int) -> list[tuple[int, int]]:
    """What the first `count` entries of a text depend on, one after the other."""
    return list(zip(text[:count], text[1 : count + 1], strict=True))
