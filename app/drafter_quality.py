"""How often is a drafter right, how much does it give the right token, and does it know how right it is?

Measured along texts that the target wrote greedily: at every token of an answer the drafter is asked for the next one (depth
1), and at every `stride`-th also for those behind it, given that everything drafted before was right (depth 2 and up; see
:mod:`app.teacher_forcing`). An answer's first token is left out: it comes with the target's pass over the prompt and is never
drafted. Nothing depends on how trees are grown.

*top-1*, *top-4*: how often the target's token is the drafter's best, or among its best four. *log-loss*: mean of -log q, q
being the drafter's probability of the target's token, in nats; what is below `FLOOR` counts as `FLOOR`, since one impossible
token would make the mean infinite, and tokens of probability 0 are counted. *Calibration*: how likely the drafter held its
best token, against how often that was the target's; the expected calibration error is the mean distance of the two over bins
(1706.04599, section 2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from app.teacher_forcing import Memory, Trail
from drafters.base import Drafter, DraftRequest, Halt
from tree.growth import Answer, Candidates

FLOOR = 1e-6
"""Least probability that enters the log-loss."""

NUM_BINS = 10
_WIDTH = 4  # candidates asked for per node


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's greedy answer, its end token included."""

    tokens: tuple[int, ...]
    num_prompt: int  # at least 1


@dataclass(slots=True)
class Bin:
    """Positions at which the drafter's best token had a probability of one tenth of the scale."""

    count: int = 0
    hits: int = 0  # it was the target's
    sum_confidence: float = 0.0

    @property
    def agreed(self) -> float:
        """How often the best token was the target's."""
        return self.hits / self.count

    @property
    def confidence(self) -> float:
        """Mean probability that the drafter gave it."""
        return self.sum_confidence / self.count


@dataclass(slots=True)
class DepthQuality:
    """Counts at one depth. Ratios are None where there is nothing to divide by."""

    depth: int
    positions: int = 0
    answered: int = 0  # with a candidate at all
    top1_hits: int = 0
    top4_hits: int = 0
    impossible: int = 0  # the drafter gave the target's token no probability
    sum_loss: float = 0.0  # nats, floored
    bins: list[Bin] = field(default_factory=lambda: [Bin() for _ in range(NUM_BINS)])  # of answered positions

    def add(self, token: int, candidates: Candidates, lp: float | None) -> None:
        """Count one position: the target's token, the drafter's candidates, its log-probability of that token.

        None, from a drafter that cannot tell, stands for the candidate's, or for no probability if it is none.
        """
        best = candidates.tokens[:_WIDTH]
        if lp is None:
            lp = dict(zip(candidates.tokens, candidates.lps, strict=True)).get(token, -math.inf)
        self.positions += 1
        self.top4_hits += token in best
        self.impossible += lp == -math.inf
        self.sum_loss -= max(lp, math.log(FLOOR))
        if best:
            confidence, hit = math.exp(candidates.lps[0]), token == best[0]
            self.answered += 1
            self.top1_hits += hit
            filled = self.bins[min(int(confidence * NUM_BINS), NUM_BINS - 1)]
            filled.count += 1
            filled.hits += hit
            filled.sum_confidence += confidence

    @property
    def top1(self) -> float | None:
        """Share of positions at which the drafter's best token is the target's."""
        return _ratio(self.top1_hits, self.positions)

    @property
    def top4(self) -> float | None:
        """Share of positions at which the target's token is among the drafter's best four."""
        return _ratio(self.top4_hits, self.positions)

    @property
    def log_loss(self) -> float | None:
        """Mean -log q of the target's token, nats."""
        return _ratio(self.sum_loss, self.positions)

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error of the best token, 0 to 1, over answered positions."""
        gaps = sum(b.count * abs(b.agreed - b.confidence) for b in self.bins if b.count)
        return _ratio(gaps, self.answered)


@dataclass(slots=True)
class Quality:
    """What was measured of one drafter."""

    drafter: str
    runs_model: bool
    depths: list[DepthQuality]  # from depth 1
    halts: Counter[str] = field(default_factory=Counter)  # texts given up before their end, by reason


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    depth: int = 5  # deepest
    stride: int = 4  # depths beyond the first are measured at every `stride`-th position
    max_texts: int = 8  # followed at the same time
    max_rows: int | None = None  # texts followed at the same time have as many tokens and questions in all; None: no limit


def measure(
    drafter: Drafter,
    texts: Sequence[Text],
    extent: Extent,
    memory_of: Callable[[Text, tuple[int, ...]], Memory],
    on_position: Callable[[], None] = lambda: None,
) -> Quality:
    """Lead a drafter along all texts.

    Args:
        memory_of: (text, layers) -> what the target keeps of it; asked for drafters that read the target's layers.
        on_position: told of every position that is done; there are ``num_positions(texts)`` unless the drafter gives up.
    """
    quality = Quality(drafter.name, drafter.runs_model, [DepthQuality(depth) for depth in range(1, extent.depth + 1)])
    for group in _groups([text for text in texts if num_positions([text])], extent):
        trails: list[Trail] = []
        try:
            for text in group:
                memory = memory_of(text, drafter.layers) if drafter.layers else None
                trails.append(Trail(drafter, text.tokens, text.num_prompt, memory))
            _follow(trails, quality, extent, on_position)
        finally:
            for trail in trails:
                trail.close()
    return quality


def num_positions(texts: Sequence[Text]) -> int:
    """Positions that are measured at depth 1: answer tokens but each answer's first."""
    return sum(max(len(text.tokens) - text.num_prompt - 1, 0) for text in texts)


def _follow(trails: Sequence[Trail], quality: Quality, extent: Extent, on_position: Callable[[], None]) -> None:
    """Ask about the next position of every text in one call, until all are at their end."""
    going = list(trails)
    for _ in range(max(trail.num_reads for trail in trails)):  # read the prompts; nothing is counted
        questions = [trail.ask_along_truth(0, _WIDTH) for trail in going]
        going = [trail for trail, _, _ in _propose(going, questions, quality)]
    step = 0
    while going:
        depth = extent.depth if step % extent.stride == 0 else 1
        questions = [trail.ask_along_truth(min(depth, trail.num_left), _WIDTH) for trail in going]
        answered = _propose(going, questions, quality)
        for trail, question, answer in answered:
            for node in range(1, len(question.tree)):
                candidates = answer.candidates.get(node - 1, Candidates())
                quality.depths[node - 1].add(question.tree.token[node], candidates, answer.rescored.get(node))
            on_position()
            trail.advance()
        going = [trail for trail, _, _ in answered if trail.num_left]
        step += 1


def _propose(
    trails: Sequence[Trail], questions: Sequence[DraftRequest], quality: Quality
) -> list[tuple[Trail, DraftRequest, Answer]]:
    """Those who got an answer. A drafter that gives a text up is not asked about it again, as in the engine."""
    answered = []
    answers = trails[0].drafter.propose(questions) if trails else []
    for trail, question, answer in zip(trails, questions, answers, strict=True):
        if isinstance(answer, Halt):
            quality.halts[answer.reason] += 1
            trail.close()
        else:
            answered.append((trail, question, answer))
    return answered


def _groups(texts: Sequence[Text], extent: Extent) -> Iterator[list[Text]]:
    """Texts in order, as many at a time as fit."""
    group: list[Text] = []
    num_rows = 0
    for text in texts:
        needed = len(text.tokens) + extent.depth
        is_full = extent.max_rows is not None and num_rows + needed > extent.max_rows
        if group and (len(group) == extent.max_texts or is_full):
            yield group
            group, num_rows = [], 0
        group.append(text)
        num_rows += needed
    if group:
        yield group


def _ratio(part: float, whole: int) -> float | None:
    return part / whole if whole else None
