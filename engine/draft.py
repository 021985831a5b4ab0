"""Drafting: every running sequence grows its tree, layer by layer, in drafter forwards shared by all that need one.

At each drafting step every sequence asks one drafter or stops (`engine.question`); those that ask the same one are answered by
one call. A drafter that gives up on a sequence is not asked for it again, and a drafter that breaks is given up for everyone
who asked it: drafting may fail, the request may not. Only a drafter that is short of rows is asked again some tokens later,
since others give theirs back.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from drafters.base import Drafter, Halt, KeepsPrefixes
from engine.noise import DraftNoise
from engine.question import Draft, next_question, offer, request, state_of
from engine.sequence import Sequence
from scheduler.auto_budget import TARGET, AutoBudget, Offer
from scheduler.selected import Facts, Selected
from tree.growth import Answer, Ask, Growth
from tree.policies.sampled import SampledPolicy

log = logging.getLogger(__name__)

_RETRY_AFTER = 64  # tokens of text; sooner, sequences would take turns at reading each other's rows away


def grow_trees(
    sequences: list[Sequence],
    drafters: Mapping[str, Drafter],
    *,
    vocab_size: int,
    auto: AutoBudget | None = None,
) -> list[Draft]:
    """Grow one tree per sequence, in order. A sequence whose plan stops at once gets a tree of its root alone.

    So does one that has just read its prompt, or found it in the cache: its first token should not wait for a drafter to read
    the prompt too. Schedules that leave their budget to `auto` make only calls that pay.
    """
    drafts = [_begin(sequence, vocab_size, auto) for sequence in sequences]
    growing = drafts
    while growing:
        asked: dict[str, list[tuple[Draft, Ask]]] = defaultdict(list)
        for draft in growing:
            start = time.perf_counter()
            question = next_question(draft, drafters, auto, sharing=len(growing))
            draft.tree_s += time.perf_counter() - start
            if question is not None:
                asked[question[0]].append((draft, question[1]))
        for name, questions in asked.items():
            _propose(drafters[name], questions, auto)
        growing = [draft for questions in asked.values() for draft, _ in questions]
    return drafts


def _begin(sequence: Sequence, vocab_size: int, auto: AutoBudget | None) -> Draft:
    start = time.perf_counter()
    is_reading = sequence.num_pending > 1 or 0 < sequence.num_cached == len(sequence.rows)
    hindrance = "prompt" if is_reading else "end" if sequence.max_depth < 1 else None
    growth = _growth(sequence, vocab_size, 0 if hindrance else sequence.max_depth, auto)
    return Draft(sequence, growth, hindrance=hindrance, tree_s=time.perf_counter() - start)


def _growth(sequence: Sequence, vocab_size: int, max_depth: int, auto: AutoBudget | None) -> Growth:
    policy, stop_tokens = sequence.schedule.policy, sequence.end_tokens
    if isinstance(policy, Selected):
        policy = replace(policy, facts=_facts(sequence, auto))
    if isinstance(policy, SampledPolicy):
        uniform = DraftNoise(sequence.request.sampling.seed, sequence.num_output)
        return policy.begin(
            sequence.tokens[-1], stop_tokens=stop_tokens, max_depth=max_depth, vocab_size=vocab_size, uniform=uniform
        )
    return policy.begin(sequence.tokens[-1], stop_tokens=stop_tokens, max_depth=max_depth, vocab_size=vocab_size)


def _facts(sequence: Sequence, auto: AutoBudget | None) -> Facts:
    """What the selector of a tree's shape may know before the step."""
    sampling, context = sequence.request.sampling, len(sequence.tokens)
    (name,) = sequence.schedule.drafters.values()
    draft_ms = target_ms = None
    if auto is not None and name in auto.costs.profile.models:
        draft_ms, target_ms = (auto.costs.profile.ms(model, 1, context=context) for model in (name, TARGET))
    return Facts(sequence.last_entropy, context, sampling.temperature, sampling.top_p, draft_ms, target_ms)


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
    index = torch.as_tensor(rows)
    picked: dict[int, torch.Tensor] = {}  # by layer, for all drafters that look at it
    for name in sequence.asked.drafters.values():
        drafter = drafters[name]
        # One that waits for rows goes on hearing, or it could not go on when there are some.
        if not drafter.layers or (sequence.is_without(name) and name not in sequence.retry_at):
            continue
        try:
            for layer in drafter.layers:
                if layer not in picked:
                    picked[layer] = hidden[layer].index_select(0, index.to(hidden[layer].device))
            stacked = torch.stack([picked[layer] for layer in drafter.layers], dim=1)
            drafter.observe(state_of(sequence, drafter), start, stacked)
        except Exception:
            log.exception("drafter %s failed to take in hidden states", name)
            _halt(sequence, drafter, "error")
            broken.append((name, "error"))
    return broken


def close_drafters(sequence: Sequence, drafters: Mapping[str, Drafter], *, keep: bool = False) -> None:
    """Give back what the drafters hold for a sequence; with `keep`, leave it to texts that begin alike."""
    while sequence.drafter_states:
        name, state = sequence.drafter_states.popitem()
        if keep:
            _keep(drafters[name], state)
        _close(drafters[name], state)


def _propose(drafter: Drafter, questions: list[tuple[Draft, Ask]], auto: AutoBudget | None) -> None:
    """Put the questions to the drafter in one call and its answers into the trees."""
    start = time.perf_counter()
    offers: list[Offer] = []
    try:
        requests = [request(draft, ask, drafter) for draft, ask in questions]
        if auto is not None and drafter.runs_model:
            offers = [offer(draft, ask, drafter) for draft, ask in questions]
            start = time.perf_counter()
        answers = drafter.propose(requests)
        assert len(answers) == len(questions), f"{len(answers)} answers to {len(questions)} questions"
    except Exception:  # whatever broke in a drafter must not fail a request; the sequences go on without it
        log.exception("drafter %s failed; %d sequences go on without it", drafter.name, len(questions))
        answers = [Halt("error")] * len(questions)
    seconds = time.perf_counter() - start
    if auto is not None and offers:
        auto.called(offers, 1000 * seconds)
    share = seconds / len(questions)
    for (draft, _), answer in zip(questions, answers, strict=True):
        draft.calls[drafter.name] += 1
        draft.drafter_s[drafter.name] += share
        if isinstance(answer, Halt):
            _halt(draft.sequence, drafter, answer.reason)
            draft.halts.append((drafter.name, answer.reason))
            continue
        draft.forwards[drafter.name] += drafter.runs_model
        start = time.perf_counter()
        _attach(draft, drafter, answer)
        draft.tree_s += time.perf_counter() - start
    if auto is not None:
        for made in offers:
            auto.drafted(made)


def _attach(draft: Draft, drafter: Drafter, answer: Answer) -> None:
    """Put an answer into the tree. One that makes no sense ends drafting there; the tree as it stands is still a tree."""
    before = len(draft.growth.tree)
    draft.chances = None
    try:
        constraint = draft.sequence.constraint
        draft.growth.attach(drafter.name, answer if constraint is None else constraint.admit(answer, draft.growth.tree))
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


def _halt(sequence: Sequence, drafter: Drafter, reason: str) -> None:
    """The drafter gives this sequence up, or for want of rows puts it off: say so, free what it holds."""
    if reason == "rows":
        sequence.retry_at[drafter.name] = len(sequence.tokens) + _RETRY_AFTER
    else:
        sequence.retry_at.pop(drafter.name, None)
    if sequence.stats.halts.get(drafter.name) != reason:
        log.warning("drafter %s stops for request %s: %s", drafter.name, sequence.request.id, reason)
    sequence.stats.halts[drafter.name] = reason
    if drafter.name in sequence.drafter_states:
        state = sequence.drafter_states.pop(drafter.name)
        if reason == "rows":
            _keep(drafter, state)
        _close(drafter, state)


def _close(drafter: Drafter, state: object) -> None:
    try:
        drafter.close(state)
    except Exception:
        log.exception("drafter %s failed to give back what it held", drafter.name)


def _keep(drafter: Drafter, state: object) -> None:
    if isinstance(drafter, KeepsPrefixes):
        try:
            drafter.keep(state)
        except Exception:
            log.exception("drafter %s kept nothing of a text", drafter.name)
