"""Drafting: every running sequence grows its tree, layer by layer, in drafter forwards shared by all that need one.

At each drafting step every sequence's plan names a drafter or stops; sequences that named the same drafter are answered by one
call. A drafter that gives up on a sequence is not asked for it again, and a drafter that breaks is given up for everyone who
asked it: drafting may fail, the request may not.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from drafters.base import Drafter, DraftRequest, Halt
from engine.noise import DraftNoise
from engine.sequence import Sequence
from scheduler.schedule import Action, Signals
from tree.growth import Answer, Ask, Growth
from tree.policies.sampled import SampledPolicy

log = logging.getLogger(__name__)

_MOST_TURNED_AWAY = 64  # decisions in a row that found nothing to do: a plan may name one drafter for ever


@dataclass(slots=True, eq=False)
class Draft:
    """One sequence's tree in the making."""

    sequence: Sequence
    growth: Growth
    step: int = 0  # drafting steps decided
    is_over: bool = False  # an answer could not be used; no further questions in this step
    exhausted: set[str] = field(default_factory=set)  # drafters with nothing to do since the tree last changed
    forwards: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    halts: list[tuple[str, str]] = field(default_factory=list)  # drafters that gave up in this step, and why
    draft_s: float = 0.0


def grow_trees(
    sequences: list[Sequence],
    drafters: Mapping[str, Drafter],
    *,
    vocab_size: int,
) -> list[Draft]:
    """Grow one tree per sequence, in order. A sequence whose plan stops at once gets a tree of its root alone.

    So does one whose prompt is not in the cache yet: its first token should not wait for a drafter to read the prompt too.
    """
    drafts = [Draft(sequence, _begin(sequence, vocab_size)) for sequence in sequences]
    growing = drafts
    while growing:
        asked: dict[str, list[tuple[Draft, Ask]]] = defaultdict(list)
        for draft in growing:
            question = _next_question(draft)
            if question is not None:
                asked[question[0]].append((draft, question[1]))
        for name, questions in asked.items():
            _propose(drafters[name], questions)
        growing = [draft for questions in asked.values() for draft, _ in questions]
    return drafts


def _begin(sequence: Sequence, vocab_size: int) -> Growth:
    policy, stop_tokens = sequence.schedule.policy, sequence.end_tokens
    max_depth = max(sequence.max_depth, 0) if sequence.num_pending == 1 else 0
    if isinstance(policy, SampledPolicy):
        uniform = DraftNoise(sequence.request.sampling.seed, sequence.num_output)
        return policy.begin(
            sequence.tokens[-1], stop_tokens=stop_tokens, max_depth=max_depth, vocab_size=vocab_size, uniform=uniform
        )
    return policy.begin(sequence.tokens[-1], stop_tokens=stop_tokens, max_depth=max_depth, vocab_size=vocab_size)


def _next_question(draft: Draft) -> tuple[str, Ask] | None:
    """The drafter that goes on with this tree and what it is asked; None when drafting is over."""
    schedule, halts = draft.sequence.schedule, draft.sequence.stats.halts
    turned_away = 0
    while not draft.is_over and turned_away < _MOST_TURNED_AWAY:
        signals = Signals(step=draft.step, num_nodes=len(draft.growth.tree), budget=schedule.budget)
        action = schedule.plan.decide(signals)
        if action is Action.STOP:
            return None
        draft.step += 1
        name = schedule.drafters[action]
        if name not in halts and name not in draft.exhausted:
            ask = draft.growth.ask(name)
            if ask is not None:
                return name, ask
        draft.exhausted.add(name)
        turned_away += 1
        # Every drafter of the schedule was turned away since the tree last changed: no later answer can differ.
        if draft.exhausted.issuperset(schedule.drafters.values()):
            return None
    return None


def commit_drafters(draft: Draft, drafters: Mapping[str, Drafter], path: SequenceOf[int]) -> None:
    """Tell every drafter that follows the sequence which path was accepted, before its tokens are appended."""
    sequence = draft.sequence
    for name, state in list(sequence.drafter_states.items()):
        try:
            drafters[name].commit(state, sequence.tokens, draft.growth.tree, path)
        except Exception:
            log.exception("drafter %s failed to commit", name)
            _halt(sequence, drafters[name], "error")
            draft.halts.append((name, "error"))


def show_hidden(
    sequence: Sequence, drafters: Mapping[str, Drafter], start: int, hidden: Mapping[int, torch.Tensor], rows: SequenceOf[int]
) -> list[tuple[str, str]]:
    """Hand the target's hidden states of verified tokens, `start` and up, to the drafters that go on from them.

    `hidden[layer][rows[i]]` belongs to token ``start + i``. Returns the drafters that broke, and why.
    """
    broken = []
    for name in sequence.schedule.drafters.values():
        drafter = drafters[name]
        if not drafter.layers or name in sequence.stats.halts:
            continue
        try:
            stacked = torch.stack([hidden[layer][list(rows)] for layer in drafter.layers], dim=1)
            drafter.observe(_state(sequence, drafter), start, stacked)
        except Exception:
            log.exception("drafter %s failed to take in hidden states", name)
            _halt(sequence, drafter, "error")
            broken.append((name, "error"))
    return broken


def close_drafters(sequence: Sequence, drafters: Mapping[str, Drafter]) -> None:
    """Give back what the drafters hold for a sequence."""
    while sequence.drafter_states:
        name, state = sequence.drafter_states.popitem()
        _close(drafters[name], state)


def _propose(drafter: Drafter, questions: list[tuple[Draft, Ask]]) -> None:
    """Put the questions to the drafter in one call and its answers into the trees."""
    start = time.perf_counter()
    try:
        requests = [
            DraftRequest(
                _state(draft.sequence, drafter),
                draft.sequence.tokens,
                draft.growth.tree,
                ask,
                draft.sequence.request.sampling,
                draft.sequence.rows.view(),
            )
            for draft, ask in questions
        ]
        answers = drafter.propose(requests)
        assert len(answers) == len(questions), f"{len(answers)} answers to {len(questions)} questions"
    except Exception:  # whatever broke in a drafter must not fail a request; the sequences go on without it
        log.exception("drafter %s failed; %d sequences go on without it", drafter.name, len(questions))
        answers = [Halt("error")] * len(questions)
    share = (time.perf_counter() - start) / len(questions)
    for (draft, _), answer in zip(questions, answers, strict=True):
        draft.draft_s += share
        if isinstance(answer, Halt):
            _halt(draft.sequence, drafter, answer.reason)
            draft.halts.append((drafter.name, answer.reason))
            continue
        draft.forwards[drafter.name] += drafter.runs_model
        _attach(draft, drafter, answer)


def _attach(draft: Draft, drafter: Drafter, answer: Answer) -> None:
    """Put an answer into the tree. One that makes no sense ends drafting there; the tree as it stands is still a tree."""
    before = len(draft.growth.tree)
    try:
        draft.growth.attach(drafter.name, answer)
    except Exception:
        log.exception("drafter %s gave an answer that cannot be used", drafter.name)
        _halt(draft.sequence, drafter, "error")
        draft.halts.append((drafter.name, "error"))
        draft.is_over = True
        return
    if len(draft.growth.tree) > before or answer.rescored:
        draft.exhausted.clear()
    else:  # asking again in this step would repeat the work: a lookup without a match, or one more piece of a long prompt
        draft.exhausted.add(drafter.name)


def _state(sequence: Sequence, drafter: Drafter) -> object:
    if drafter.name not in sequence.drafter_states:
        sequence.drafter_states[drafter.name] = drafter.open()
    return sequence.drafter_states[drafter.name]


def _halt(sequence: Sequence, drafter: Drafter, reason: str) -> None:
    """The drafter gives this sequence up: say so once, free what it holds."""
    sequence.stats.halts[drafter.name] = reason
    log.warning("drafter %s stops for request %s: %s", drafter.name, sequence.request.id, reason)
    if drafter.name in sequence.drafter_states:
        _close(drafter, sequence.drafter_states.pop(drafter.name))


def _close(drafter: Drafter, state: object) -> None:
    try:
        drafter.close(state)
    except Exception:
        log.exception("drafter %s failed to give back what it held", drafter.name)
