"""One request in flight: everything the engine knows about it, in one place."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.adjust import Tally
from engine.constraint import Constraint
from engine.noise import TargetNoise
from engine.request import DrafterCount, Request, RequestStats, TokenLogprob
from engine.text import TextStream
from models.kv_cache import RowList
from models.prefix_cache import Lease
from scheduler.acceptance import TextRecord
from scheduler.schedule import Schedule
from tree.tree import TokenTree
from verify import EVERY_VERIFIER
from verify.walk import TargetWalk


@dataclass(frozen=True, slots=True, eq=False)
class TreeRecord:
    """A draft tree as it was verified: kept for people who want to look at it. The rows it was drawn from are not kept."""

    tree: TokenTree
    nodes: tuple[int, ...]  # verified, root first
    path: tuple[int, ...]  # accepted
    extra: int  # the target's own token


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned and written by the engine thread alone.

    `tokens` is the verified text, prompt first; its last token is the root of the next tree. `rows` are the target's cache
    rows of `tokens` as far as it has been forwarded: all but the last token while decoding, less during prefill. A sequence
    that had to give way has none and reads its text again, answer included.
    """

    request: Request
    asked: Schedule  # what the request named, or the server's default
    schedule: Schedule  # what it decodes with now; another one while that is no gain, see `engine.steering`
    text: TextStream
    max_total: int  # tokens, prompt included, at which the answer ends
    end_tokens: frozenset[int]  # tokens that end the answer
    vocab_size: int  # length of the target's rows
    tokens: list[int]
    stats: RequestStats
    rows: RowList = field(default_factory=RowList)
    drafter_states: dict[str, Any] = field(default_factory=dict)
    retry_at: dict[str, int] = field(default_factory=dict)  # drafter that ran out of rows -> length of text to ask it again at
    trees: deque[TreeRecord] = field(default_factory=deque)
    record: TextRecord = field(default_factory=TextRecord)  # how drafters have fared on this text
    accepted_mean: float = 0.0  # drafted tokens accepted per step, lately
    last_entropy: float | None = None  # nats, of the target where the last token stands; kept for a selector of shapes
    constraint: Constraint | None = None  # where the answer is in its grammar, if it has one
    has_begun: bool = False  # its rows may come in; before, it may wait for those of another
    lease: Lease | None = None  # what of `rows` is the cache's too; None: nothing is cached
    num_cached: int = 0  # rows that were there when it began
    donor: Sequence | None = None  # who is reading the first `num_awaited` tokens of this text, too
    num_awaited: int = 0
    num_read: int = 0  # tokens of the prompt that were counted as read
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the second token of the prompt, and so on
    exponentials: dict[int, torch.Tensor] = field(default_factory=dict)  # of output positions to come, as far as they were made
    tally: Tally | None = None  # what penalties count in `tokens`; None until `tallied` is asked for it

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        """Tokens generated so far; also the output position of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def rule_name(self) -> str:
        """The decision rule of this request's temperature."""
        return rule_name(self.schedule, self.request)

    @property
    def noise(self) -> TargetNoise:
        """The target's random numbers for a tree at the end of the text."""
        return TargetNoise(self.request.sampling.seed, self.num_output, self.vocab_size, self.exponentials)

    @property
    def is_raced(self) -> bool:
        """Whether drafters may know the numbers by which the target will draw: its token depends on nothing that they do."""
        return self.rule_name == TargetWalk.name

    @property
    def num_required(self) -> int:
        """Tokens that must still be written before one may end the answer."""
        return max(self.request.min_tokens - self.num_output, 0)

    @property
    def pending(self) -> list[int]:
        """Verified tokens the target has not been fed yet; at least the root."""
        return self.tokens[len(self.rows) :]

    @property
    def num_pending(self) -> int:
        """Length of `pending`; 1 while decoding."""
        return len(self.tokens) - len(self.rows)

    @property
    def max_depth(self) -> int:
        """Deepest draft that can still be emitted: a step emits its path and one token more."""
        return self.max_total - len(self.tokens) - 1

    @property
    def is_rated(self) -> bool:
        """Whether log-probabilities of the prompt are still to come; they need a row of logits for each of its tokens."""
        return self.request.prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt - 1

    def is_without(self, drafter: str) -> bool:
        """Whether a drafter has given the sequence up, or has no rows for it for the time being."""
        return drafter in self.stats.halts and len(self.tokens) < self.retry_at.get(drafter, len(self.tokens) + 1)

    def awaits_rows(self, running: SequenceOf[Sequence]) -> bool:
        """Whether another running sequence is still reading what this one will take over."""
        donor = self.donor
        return donor is not None and len(donor.rows) < self.num_awaited and any(other is donor for other in running)

    def newly_read(self) -> int:
        """Tokens of the prompt that have rows for the first time, cached ones included, since the last call."""
        count = max(min(len(self.rows), self.num_prompt) - self.num_read, 0)
        self.num_read += count
        return count

    def tallied(self, logits: torch.Tensor) -> Tally:
        """The tally of `tokens` as they are now, for logits ``[rows, vocab]``; a call costs as much as was appended."""
        if self.tally is None:
            self.tally = Tally.begin(self.request.sampling, logits.shape[-1], logits.device)
        self.tally.follow(self.tokens, self.num_prompt)
        return self.tally


def open_sequence(
    request: Request,
    schedule: Schedule,
    text: TextStream,
    *,
    stop_tokens: frozenset[int],
    max_model_len: int,
    vocab_size: int,
) -> Sequence:
    """A sequence that has not been fed yet; `stop_tokens` are the model's own, `vocab_size` is the length of its rows."""
    prompt = list(request.prompt)
    ends = end_tokens(request, stop_tokens)
    allowed = max_model_len if request.max_tokens is None else min(max_model_len, len(prompt) + request.max_tokens)
    return Sequence(
        request=request,
        asked=schedule,
        schedule=schedule,
        text=text,
        max_total=allowed,
        end_tokens=ends,
        vocab_size=vocab_size,
        tokens=prompt,
        stats=RequestStats(
            schedule=schedule.name,
            num_prompt_tokens=len(prompt),
            is_auto=schedule.is_auto,
            drafters={name: DrafterCount() for name in schedule.drafters.values()},
            arrived_s=time.monotonic(),
            arm=request.arm,
            is_lossy=not EVERY_VERIFIER[rule_name(schedule, request)].lossless,
        ),
        trees=deque(maxlen=request.keep_trees),
        constraint=None if request.grammar is None else Constraint(request.grammar, ends),
    )


def rule_name(schedule: Schedule, request: Request) -> str:
    """The decision rule that `schedule` has for the temperature of `request`."""
    return schedule.greedy_verifier if request.sampling.greedy else schedule.sampling_verifier


def end_tokens(request: Request, stop_tokens: frozenset[int]) -> frozenset[int]:
    """The tokens that end this request's answer; `stop_tokens` are the model's own."""
    return request.stop_token_ids if request.ignore_eos else stop_tokens | request.stop_token_ids


def rows_needed(num_prompt: int, max_tokens: int | None, budget: int, max_model_len: int) -> int:
    """Rows of the target's pool that a request can use at most: its whole text and one tree."""
    total = max_model_len if max_tokens is None else min(max_model_len, num_prompt + max_tokens)
    return total + budget
