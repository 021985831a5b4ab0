"""Grammars under trees: the same answers as with one token at a time, whatever was drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.constraint import Allowed, Constraint, ConstraintError
from engine.request import FinishReason, RequestError
from models.sampling import SamplingParams
from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import World
from tests.grammar_world import Automaton, one_at_a_time, random_automaton
from tree.growth import Answer, Candidates
from tree.policies.sampled import Iid
from tree.tree import TokenTree

TinyModel = Callable[..., PreTrainedModel]

SCHEDULES = ("ar", "ngram", "small", "medium", "talon", "treegraft")
VOCAB, LENGTH = 40, 16
ENDS = frozenset({0, 7, 31})
GRAMMARS = [random_automaton(VOCAB, seed, ends=ENDS) for seed in range(4)]

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "min_tokens": {"min_tokens": 6},
    "ignore_eos": {"ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": frozenset({1, 2, 4, 5, 6, 14, 16})},
    "all": {"ignore_eos": True, "stop_token_ids": frozenset({9, 10, 11, 16, 17, 18}), "min_tokens": 4},
}


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, 20))] for _ in range(count)]


def ends_of(rule: dict[str, Any]) -> frozenset[int]:
    return (frozenset() if rule.get("ignore_eos") else ENDS) | rule.get("stop_token_ids", frozenset())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", RULES)
def test_answers_are_those_of_one_token_at_a_time(tiny_model: TinyModel, name: str, temperature: float) -> None:
    """A grammar that only the root obeys lets forbidden drafts through; one state for all nodes forbids right ones."""
    rule, sampling = RULES[name], SamplingParams(temperature=temperature, seed=5)
    target, hostile = tiny_model("llama", VOCAB, 1), tiny_model("llama", VOCAB, 9)
    asked = prompts(len(GRAMMARS), 11)
    wanted = [
        one_at_a_time(target, p, g, sampling, ends=ends_of(rule), length=LENGTH, min_tokens=rule.get("min_tokens", 0))
        for p, g in zip(asked, GRAMMARS, strict=True)
    ]
    with World(target, small=hostile, medium=target, stop_tokens=ENDS) as world:
        for schedule in SCHEDULES:
            pending = [
                world.submit(p, schedule, temperature=temperature, seed=5, max_tokens=LENGTH, grammar=g, **rule)
                for p, g in zip(asked, GRAMMARS, strict=True)
            ]
            replies = [one.result() for one in pending]
            assert [reply.tokens for reply in replies] == wanted, schedule
            for reply, grammar in zip(replies, GRAMMARS, strict=True):
                assert_ended_well(reply.tokens, reply.finish, grammar, ends_of(rule))
            if schedule in ("medium", "treegraft"):
                assert sum(reply.stats.num_accepted for reply in replies) > 0, f"{schedule} accepted nothing"


def assert_ended_well(tokens: Sequence[int], finish: FinishReason, grammar: Automaton, ends: frozenset[int]) -> None:
    """With reason stop the text is one of the grammar, or was cut by a token that the grammar allowed."""
    place: Automaton | None = grammar
    for token in tokens:
        assert place is not None
        if token in ends:
            assert place.is_accepting or place.allowed()[token]
            assert finish is FinishReason.STOP
            return
        place = place.after(token)
    assert place is not None, "the answer left the grammar"
    is_over = place.is_accepting and not set(np.flatnonzero(place.allowed())) - ends
    assert finish is (FinishReason.STOP if is_over else FinishReason.LENGTH)


@pytest.mark.parametrize("policy", [Iid(2, 3)])
@pytest.mark.parametrize("rule", ["traversal", "specinfer", "naive"])
def test_ratio_rules_stay_inside_the_grammar(tiny_model: TinyModel, policy: Any, rule: str) -> None:
    """They weigh the target against what was drawn; both rows must be those of the grammar."""
    target, hostile = tiny_model("llama", VOCAB, 1), tiny_model("llama", VOCAB, 9)
    drawn = Schedule(
        "drawn", "test", policy, Word("M*"), {Action.MEDIUM: "medium"}, sampling_verifier=rule
    )
    for medium in (target, hostile):
        with World(target, medium=medium, stop_tokens=ENDS, schedules=[drawn]) as world:
            for seed in range(6):
                grammar = GRAMMARS[seed % len(GRAMMARS)]
                reply = world.run([1, 2], "drawn", temperature=1.0, seed=seed, max_tokens=LENGTH, grammar=grammar)
                assert_ended_well(reply.tokens, reply.finish, grammar, ENDS)


@pytest.mark.parametrize("wrong", ["root only", "root for all"])
def test_another_path_than_the_nodes_own_would_be_noticed(
    tiny_model: TinyModel, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: the root's state for every node, and no state at all below the root."""
    masked = Constraint.masked

    def judge(self: Constraint, logits: torch.Tensor, tree: TokenTree, nodes: list[int], required: int) -> torch.Tensor:
        if wrong == "root for all":
            return torch.cat([masked(self, logits[i : i + 1], tree, [0], required) for i in range(len(nodes))])
        return torch.cat([masked(self, logits[:1], tree, [0], required), logits[1:]])

    target = tiny_model("llama", VOCAB, 1)
    asked = prompts(len(GRAMMARS), 11)
    with World(target, medium=target, stop_tokens=ENDS) as world:
        wanted = [world.run(p, "ar", max_tokens=LENGTH, grammar=g) for p, g in zip(asked, GRAMMARS, strict=True)]
        monkeypatch.setattr(Constraint, "masked", judge)
        got = [world.run(p, "medium", max_tokens=LENGTH, grammar=g) for p, g in zip(asked, GRAMMARS, strict=True)]
    assert [reply.tokens for reply in got] != [reply.tokens for reply in wanted]


def test_no_row_is_spent_on_what_the_grammar_forbids(tiny_model: TinyModel) -> None:
    """A hostile drafter's proposals are dropped before the target sees them: every verified path is one of the grammar."""
    target, hostile = tiny_model("llama", VOCAB, 1), tiny_model("llama", VOCAB, 9)
    num_nodes = 0
    with World(target, small=hostile, medium=hostile, stop_tokens=ENDS) as world:
        for prompt, grammar in zip(prompts(len(GRAMMARS), 3), GRAMMARS, strict=True):
            reply = world.run(prompt, "treegraft", max_tokens=LENGTH, grammar=grammar, keep_trees=99)
            place: Automaton | None = grammar
            for record in reply.deltas[-1].trees:
                assert place is not None
                for node in record.nodes[1:]:  # type: ignore[attr-defined]
                    path = record.tree.path_tokens(node)  # type: ignore[attr-defined]
                    there: Automaton | None = place
                    for token in path[:-1]:
                        there = there and there.after(token)
                    assert there is not None and (there.after(path[-1]) or there.is_accepting), "a forbidden node"
                    num_nodes += 1
                for node in record.path:  # type: ignore[attr-defined]
                    place = place and place.after(record.tree.token[node])  # type: ignore[attr-defined]
                place = place and place.after(record.extra)  # type: ignore[attr-defined]
    assert num_nodes > 0


def test_a_place_is_computed_once(tiny_model: TinyModel) -> None:
    """Masks are the cost of a grammar: drafting, verifying and committing must share them, and steps must hand them on."""
    moves = tuple({i % 7 + 8: i + 1} for i in range(30))
    grammar = Automaton((*moves, {}), frozenset({30}), VOCAB)
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target, stop_tokens=ENDS) as world:
        for schedule in ("ar", "medium"):
            grammar.asked.clear()
            reply = world.run([1, 2], schedule, max_tokens=99, grammar=grammar)
            assert len(reply.tokens) == 30 and reply.finish is FinishReason.STOP
            for state in range(1, 30):
                assert grammar.asked.count(state) == 1, f"state {state} was computed {grammar.asked.count(state)} times"


def test_a_text_that_cannot_go_on_fails_and_says_so(tiny_model: TinyModel) -> None:
    """The grammar leads into a state without a way out: alike under every schedule, and others are not disturbed."""
    dead = Automaton(({8: 1}, {9: 2}, {}), frozenset(), VOCAB)
    target = tiny_model("llama", VOCAB, 1)
    with World(target, medium=target, stop_tokens=ENDS) as world:
        for schedule in ("ar", "medium"):
            other = world.submit([3, 4], schedule)
            reply = world.run([1, 2], schedule, grammar=dead)
            assert reply.finish is FinishReason.ERROR
            assert reply.error is not None and "grammar" in reply.error
            assert other.result().finish is not FinishReason.ERROR


def test_a_start_that_only_ends_can_follow_is_refused(tiny_model: TinyModel) -> None:
    """There would be nothing to answer."""
    grammar = Automaton(({8: 0}, {}), frozenset({0}), VOCAB)
    with World(tiny_model("llama", VOCAB, 1)) as world, pytest.raises(RequestError) as error:
        world.submit([1], grammar=grammar, stop_token_ids=frozenset({8}))
    assert error.value.param == "stop_token_ids"


def test_bias_cannot_break_a_grammar_and_logprobs_are_the_models_own(tiny_model: TinyModel) -> None:
    """The mask is the last word on what may follow; reported numbers are those of the unmasked model."""
    target = tiny_model("llama", VOCAB, 1)
    grammar = GRAMMARS[0]
    with World(target, medium=target, stop_tokens=ENDS) as world:
        for schedule in ("ar", "medium"):
            reply = world.run([1, 2], schedule, max_tokens=LENGTH, grammar=grammar, num_logprobs=0)
            assert_ended_well(reply.tokens, reply.finish, grammar, ENDS)
            text = [1, 2]
            for one in [one for delta in reply.deltas for one in delta.logprobs]:
                with torch.inference_mode():
                    own = torch.log_softmax(target(torch.tensor([text])).logits[0, -1].float(), -1)
                assert one.logprob == pytest.approx(own[one.token_id].item(), abs=1e-3)
                text.append(one.token_id)


class Hard:
    """A place behind which it is too hard to say what may follow."""

    is_accepting = False

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def allowed(self) -> Allowed:
        if self.depth > 1:
            raise ConstraintError("too hard")
        return np.ones(8, dtype=np.bool_)

    def after(self, token: int) -> Hard | None:
        return Hard(self.depth + 1)


def test_what_is_too_hard_stops_a_path_and_not_the_request() -> None:
    """A drafted path may lead where the text never goes; only when it does, the request fails."""
    constraint = Constraint(Hard(0), ends=())
    tree = TokenTree(0)
    node = tree.add(tree.add(0, 1, -1.0, "d"), 2, -1.0, "d")
    assert constraint.row([1, 2]) is None
    logits = torch.zeros(2, 8)
    assert constraint.masked(logits, tree, [0, node], 0).isfinite().all()
    constraint.advance(1)
    with pytest.raises(ConstraintError, match="too hard"):
        constraint.advance(2)


def test_a_drafters_answer_is_cut_to_the_grammar() -> None:
    """Candidates, chains below them, and rows to draw from."""
    grammar = Automaton(({1: 1, 2: 2}, {3: 0}, {}), frozenset({0, 2}), 8)
    constraint = Constraint(grammar, ends=[7])
    tree = TokenTree(0)
    chain = ((3, -0.1), (2, -0.2), (5, -0.3))
    candidates = Candidates((4, 1, 7, 99), (-1.0, -2.0, -3.0, -4.0), ((), chain, (), ()))
    row = torch.arange(1.0, 10.0)
    got = constraint.admit(Answer({0: candidates}, {0: -1.0}, {0: row}), tree)
    assert got.candidates[0] == Candidates((1, 7), (-2.0, -3.0), (((3, -0.1), (2, -0.2)), ()))
    assert got.rows[0].tolist() == [0, 2, 3, 0, 0, 0, 0, 8, 0]
    assert row.tolist() == list(range(1, 10)), "a row belongs to its drafter"
    assert got.rescored == {0: -1.0}
