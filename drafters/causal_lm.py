"""A language model as a drafter: any causal LM that shares the target's tokenizer, over its own pool of rows.

The drafter holds rows for the verified text and, during a step, for the nodes it was made to look at. After the step the rows
along the accepted path stay, the others go back; what it has not seen of the accepted text is fed together with the next
question. What it has read of a text is kept for texts that begin alike. Log-probabilities are taken at temperature 1 whatever
the request samples at (as EAGLE's are, 2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafters.base import DraftRequest, Halt
from drafters.reading import missing_nodes, read_answer
from models.attention import Segment, chain_then_tree
from models.causal_lm import CausalLM
from models.draft_vocab import DraftVocab
from models.kv_cache import RowList
from models.prefix_cache import Lease, PrefixCache
from tree.flatten import positions, visible
from tree.growth import Answer
from tree.tree import TokenTree

_CATCH_UP = 512  # most verified tokens fed at once: a long prompt must not hold up the answers of others


@dataclass(slots=True, eq=False)
class Following:
    """What the drafter remembers about one sequence."""

    rows: RowList = field(default_factory=RowList)  # of the verified text, the root included once it was fed
    node_rows: dict[int, int] = field(default_factory=dict)  # tree node -> row, in the order they were fed; no root
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)  # node (0: root) -> [vocab] row on the device
    text: Sequence[int] = ()  # the verified text, which grows; empty before the first question, or if nothing is kept
    lease: Lease | None = None  # what of `rows` is the cache's too


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence is fed in one forward."""

    text: Sequence[int]  # verified tokens the drafter has not seen
    nodes: list[int]  # tree nodes, ascending
    is_partial: bool  # the text ends before the root; there is nothing to answer from yet


class CausalLMDrafter:
    """Drafts with a `CausalLM`. `name` is its role; `ids` leads from its output columns to the target's ids, if they differ."""

    runs_model = True
    layers: tuple[int, ...] = ()  # it reads tokens, nothing of the target's

    def __init__(self, name: str, lm: CausalLM, ids: Sequence[int] | None = None) -> None:
        self.name = name
        self.lm = lm
        self._vocab = None if ids is None else DraftVocab(ids, lm.device)

    def open(self) -> Following:
        """An empty memory; the prompt is fed with the first question."""
        return Following()

    def observe(self, state: Following, start: int, hidden: torch.Tensor) -> None:
        """Nothing to take in."""

    def passes(self, request: DraftRequest) -> tuple[int, ...]:
        """One forward, if anything is missing; text it has to read sooner or later counts as one row."""
        behind = len(request.state.rows) < len(request.context)
        rows = behind + len(missing_nodes(request.tree, request.ask, request.state.node_rows))
        return (rows,) if rows else ()

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Answer | Halt]:
        """Feed what is missing of every sequence in one forward and read the candidates off it.

        A sequence far behind, as after a long prompt, is fed a part of its text and gets no candidates yet.
        """
        for request in requests:
            self._recall(request)
        answers: list[Answer | Halt | None] = [None] * len(requests)
        feeds: dict[int, Feed] = {}
        promised = 0  # rows that the sequences let in so far will take in the shared forward
        for index, request in enumerate(requests):
            feed = _missing(request, self.name)
            halt = self._obstacle(request, feed, self.lm.pool.num_available - promised)
            if halt is not None:
                answers[index] = halt
            else:
                promised += len(feed.text) + len(feed.nodes)
                feeds[index] = feed
        self._feed([(requests[index], feed) for index, feed in feeds.items() if feed.text or feed.nodes])
        for index, feed in feeds.items():
            request = requests[index]
            answers[index] = (
                Answer({}, {})
                if feed.is_partial
                else read_answer(
                    request,
                    self.name,
                    request.state.log_probs,
                    vocab=self._vocab,
                    vocab_size=self.lm.vocab_size,
                )
            )
        return [answer for answer in answers if answer is not None]

    def commit(self, state: Following, context: Sequence[int], tree: TokenTree | None, path: Sequence[int]) -> None:
        """Keep the rows along `path` as far as they were fed without a gap; free the other nodes' rows."""
        kept: list[int] = []
        if len(state.rows) == len(context):  # the root was fed, so its descendants' rows continue the text
            for node in path:
                if node not in state.node_rows:
                    break
                kept.append(state.node_rows.pop(node))
        state.rows.extend(kept)
        self._forget_nodes(state)

    def close(self, state: Following) -> None:
        """Free every row of the sequence."""
        self._forget_nodes(state)
        if state.lease is not None:
            PrefixCache.over(self.lm.pool).end(state.lease)
        self.lm.pool.release(state.rows.truncate(0))

    def num_known(self, text: list[int]) -> int:
        """All of it: hidden states are of no use here."""
        return len(text)

    def keep(self, state: Following) -> None:
        """Keep the rows of what was read of the text."""
        if state.lease is not None:
            length = min(len(state.rows), len(state.text))  # a step may keep rows beyond the end of an answer
            PrefixCache.over(self.lm.pool).share(state.lease, list(state.text[:length]), state.rows, length)

    def forget_prefixes(self) -> None:
        """Give the kept rows back."""
        PrefixCache.over(self.lm.pool).clear()

    def _recall(self, request: DraftRequest) -> None:
        """With the first question: take over the rows of a text that began like this one, all but the root's."""
        state = request.state
        if request.num_cached is None or state.lease is not None or len(state.rows):
            return
        cache, text = PrefixCache.over(self.lm.pool), list(request.context)
        state.text, state.lease = request.context, cache.begin()
        state.rows.extend(cache.take(state.lease, text, len(text) - 1))

    def _forget_nodes(self, state: Following) -> None:
        self.lm.pool.release(state.node_rows.values())
        state.node_rows.clear()
        state.log_probs.clear()

    def _obstacle(self, request: DraftRequest, feed: Feed, num_free: int) -> Halt | None:
        """Why a question cannot be answered, if so."""
        deepest = max((request.tree.depth[node] for node in (*feed.nodes, *request.ask.nodes)), default=0)
        if len(request.context) + deepest > self.lm.max_positions:
            return Halt("context")
        needed = len(request.context) - len(request.state.rows) + len(feed.nodes)
        return Halt("rows") if needed > num_free else None

    def _feed(self, fed: Sequence[tuple[DraftRequest, Feed]]) -> None:
        """One forward over every request's missing text and nodes; remembers rows and log-probabilities."""
        if not fed:
            return
        with self.lm.pool.taking(len(feed.text) + len(feed.nodes) for _, feed in fed) as taken:
            segments = [_segment(request, feed, rows) for (request, feed), rows in zip(fed, taken, strict=True)]
            scores = self.lm.forward(segments)
            log_probs = torch.log_softmax(scores.logits, dim=-1)
        for index, ((request, feed), rows) in enumerate(zip(fed, taken, strict=True)):
            state, num_text = request.state, len(feed.text)
            state.rows.extend(rows[:num_text])
            state.node_rows.update(zip(feed.nodes, rows[num_text:], strict=True))
            scored = [0, *feed.nodes] if num_text and not feed.is_partial else feed.nodes
            state.log_probs.update(zip(scored, log_probs[scores.offsets[index] : scores.offsets[index + 1]], strict=True))


def _missing(request: DraftRequest, name: str) -> Feed:
    """What to feed before the question can be answered, or a part of the text if that is a lot."""
    state, context = request.state, request.context
    start = len(state.rows)
    if len(context) - start > _CATCH_UP:
        return Feed(context[start : start + _CATCH_UP], [], is_partial=True)
    return Feed(context[start:], missing_nodes(request.tree, request.ask, state.node_rows), is_partial=False)


def _segment(request: DraftRequest, feed: Feed, rows: list[int]) -> Segment:
    """Missing text in causal order (its last token is the root unless the feed is partial), then nodes below it."""
    state, tree = request.state, request.tree
    start, root, num_text = len(state.rows), len(request.context) - 1, len(feed.text)
    earlier = list(state.node_rows)
    assert not (num_text and earlier), "nodes were fed before their root"
    mask = visible(tree, feed.nodes, [*earlier, *feed.nodes])
    return Segment(
        tokens=[*feed.text, *(tree.token[node] for node in feed.nodes)],
        positions=[*range(start, start + num_text), *positions(tree, feed.nodes, root)],
        prefix=state.rows.view(),
        rows=rows,
        wanted=() if feed.is_partial else range(max(num_text - 1, 0), len(rows)),
        tree_rows=[state.node_rows[node] for node in earlier],
        visible=chain_then_tree(num_text, mask) if num_text else mask,
    )
