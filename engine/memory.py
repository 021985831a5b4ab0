"""Who has the target's rows: what a text begins with, what it leaves to others, and whether there is room for one more.

Rows are taken when they are needed, not set aside for the longest answer. So a sequence is let in once the rows that it and
the running ones need *soon* are there, and may have to give way later (:mod:`engine.turn`). Three things are never wrong:

* a text that runs alone can always finish, since the door refuses what the whole pool could not hold;
* at least one token of a text is fed anew, so that there are logits, and hidden states for the drafters;
* what enters the cache are rows of verified tokens, in the order of the text, with finite numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from drafters.base import Drafter, KeepsPrefixes
from engine.request import RequestStats, StepStats
from engine.sequence import Sequence
from models.kv_cache import RowPool
from models.prefix_cache import PrefixCache, common_length

log = logging.getLogger(__name__)

_SOON = 64
"""Tokens of every answer for which there must be room before one more is let in. Without it a sequence that has just given way
would be let in again and give way again; the more, the longer the rows of the others lie idle."""
_WORTH_REREADING = 64
"""Most tokens that the target reads again so that a drafter hears of them; for more, the drafter does without."""


class Memory:
    """The rows of `pool` and the beginnings kept in it, which `keeps_prefixes` turns off."""

    def __init__(self, pool: RowPool, drafters: Mapping[str, Drafter], *, keeps_prefixes: bool) -> None:
        self._pool = pool
        self._drafters = drafters
        self._cache = PrefixCache.over(pool) if keeps_prefixes else None

    @property
    def num_available(self) -> int:
        """Rows that a step may take."""
        return self._pool.num_available

    def has_room_for(self, sequence: Sequence, running: SequenceOf[Sequence]) -> bool:
        """Whether the rows needed soon are there for all of them."""
        if not running:
            return True  # the door has checked
        left = self._pool.num_available - sum(map(_needed_soon, running)) - _needed_soon(sequence)
        most = len(sequence.tokens) - 1  # rows that the cache may have of it
        if left >= 0 or self._cache is None or left + most < 0:
            return left >= 0
        num_cached, num_unused = self._cache.match(sequence.tokens, most)
        return left + num_cached - num_unused >= 0  # those in use cost nothing, the others are no longer available

    def look_around(self, sequence: Sequence, running: SequenceOf[Sequence]) -> None:
        """Find out whether a running sequence is reading what this one begins with: then that need not be read twice.

        It waits for the other one if more than half of what it would have to read comes in that way. That takes no longer
        than to read it itself, as the older one is ahead.
        """
        if self._cache is None or sequence.is_rated:
            return
        most = len(sequence.tokens) - 1
        longest, donor = 0, None
        for other in running:
            if other.num_pending > 1:
                length = common_length(other.tokens, sequence.tokens, 0, most)
                if length > longest:
                    longest, donor = length, other
        if donor is None:
            return
        num_cached, _ = self._cache.match(sequence.tokens, most)
        if 2 * (longest - num_cached) > most - num_cached:
            sequence.donor, sequence.num_awaited = donor, longest

    def begin_ready(self, running: SequenceOf[Sequence]) -> list[tuple[RequestStats, StepStats]]:
        """Let every sequence begin that has not, unless the cache will soon have more for it; returns what they found."""
        records = []
        for sequence in running:
            if sequence.has_begun or sequence.awaits_rows(running):
                continue
            self.begin(sequence)
            if self._cache is not None and sequence.stats.num_preemptions == 0:  # a prompt is looked up once, as counts go
                sequence.stats.num_cached_tokens = hits = sequence.num_cached
                step = StepStats(sequence.asked.name, arm=sequence.request.arm, num_prefix_hits=hits)
                step.num_prefix_queries, step.num_prompt_tokens = sequence.num_prompt, sequence.newly_read()
                records.append((sequence.stats, step))
        return records

    def begin(self, sequence: Sequence) -> None:
        """Take over the rows of the longest cached beginning, all but those that must be made anew."""
        assert not sequence.has_begun and not len(sequence.rows)
        sequence.has_begun, sequence.donor = True, None
        if self._cache is None:
            return
        sequence.lease = self._cache.begin()
        if sequence.is_rated:
            return  # rows of the cache come without logits
        limit, _ = self._cache.match(sequence.tokens, len(sequence.tokens) - 1)
        for name in sequence.asked.drafters.values():
            drafter = self._drafters[name]
            if limit > 0 and isinstance(drafter, KeepsPrefixes) and not sequence.is_without(name):
                known = drafter.num_known(sequence.tokens)
                limit = known if limit - _WORTH_REREADING <= known < limit else limit
        sequence.rows.extend(self._cache.take(sequence.lease, sequence.tokens, limit))
        sequence.num_cached = len(sequence.rows)

    def share(self, sequence: Sequence) -> None:
        """Let others have the rows of what was verified. What cannot be kept is not: the request goes on."""
        if self._cache is None or sequence.lease is None:
            return
        length = min(len(sequence.rows), len(sequence.tokens))  # a step may keep rows beyond the end of an answer
        try:
            self._cache.share(sequence.lease, sequence.tokens, sequence.rows, length)
        except Exception:
            log.exception("rows of request %s were not kept", sequence.request.id)

    def leave(self, sequence: Sequence, *, keep: bool) -> None:
        """Give back all that a sequence has: to the cache, with `keep`, else to the pool. Safe to call twice."""
        if keep:
            self.share(sequence)
        if self._cache is not None and sequence.lease is not None:
            self._cache.end(sequence.lease)
        self._pool.release(sequence.rows.truncate(0))
        sequence.lease, sequence.donor, sequence.has_begun, sequence.num_cached = None, None, False, 0

    def clear(self) -> None:
        """Forget what is kept, here and with the drafters."""
        if self._cache is None:
            return
        self._cache.clear()
        for drafter in self._drafters.values():
            if isinstance(drafter, KeepsPrefixes):
                drafter.forget_prefixes()


def _needed_soon(sequence: Sequence) -> int:
    """Rows that a sequence will take next: what it has to read, a tree, and a piece of its answer."""
    ahead = min(sequence.max_total - len(sequence.tokens), _SOON)
    return sequence.num_pending + sequence.schedule.budget - 1 + ahead
