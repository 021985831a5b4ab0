"""A grammar for tests of the engine, an automaton in plain Python, and decoding with it one token at a time."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.constraint import Allowed
from engine.noise import TargetNoise
from models.sampling import SamplingParams, probabilities
from verify.walk import race


@dataclass(frozen=True)
class Automaton:
    """A place in a finite automaton over token ids; :class:`engine.constraint.Grammar`."""

    moves: tuple[Mapping[int, int], ...]  # by state: token -> next state
    accepting: frozenset[int]
    vocab_size: int
    state: int = 0
    asked: list[int] = field(default_factory=list, compare=False)  # states whose row was computed, shared by all places
    _row: list[Allowed] = field(default_factory=list, compare=False)  # this place's, once it was asked for

    @property
    def is_accepting(self) -> bool:
        return self.state in self.accepting

    def allowed(self) -> Allowed:
        if not self._row:
            self.asked.append(self.state)
            row = np.zeros(self.vocab_size, dtype=np.bool_)
            row[list(self.moves[self.state])] = True
            self._row.append(row)
        return self._row[0]

    def after(self, token: int) -> Automaton | None:
        state = self.moves[self.state].get(token)
        return None if state is None else Automaton(self.moves, self.accepting, self.vocab_size, state, self.asked)


def random_automaton(vocab_size: int, seed: int, *, ends: Collection[int], states: int = 6) -> Automaton:
    """Every state has a few tokens that go on, different ones in different states; one state goes nowhere, and accepts."""
    rng = random.Random(seed)
    tokens = [token for token in range(vocab_size) if token not in ends]
    moves = [{token: rng.randrange(states) for token in rng.sample(tokens, vocab_size // 3)} for _ in range(states - 1)]
    return Automaton((*moves, {}), frozenset({states - 1, 1, 3}), vocab_size)


def one_at_a_time(
    model: PreTrainedModel,
    prompt: list[int],
    grammar: Automaton,
    sampling: SamplingParams,
    *,
    ends: Collection[int],
    length: int,
    min_tokens: int = 0,
) -> list[int]:
    """transformers' logits of the whole text for each token anew, and the grammar's rules in other words."""
    answer: list[int] = []
    state = grammar.state
    vocab_size = grammar.vocab_size
    while len(answer) < length:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].clone()
        logits = logits.clone()
        going_on = set(grammar.moves[state])
        usable = going_on | (set(ends) if state in grammar.accepting else set())
        if len(answer) < min_tokens and going_on - set(ends):
            usable -= set(ends)
        banned = [token for token in range(vocab_size) if token not in usable]
        logits = torch.where(torch.isin(torch.arange(vocab_size), torch.tensor(banned)), -torch.inf, logits)
        row = probabilities(logits[None], sampling)[0]
        noise = TargetNoise(sampling.seed, len(answer)).exponentials(0, vocab_size)
        token = int(row.argmax()) if sampling.greedy else int(race(row, noise))
        answer.append(token)
        if token in ends:
            break
        state = grammar.moves[state][token]
        if state in grammar.accepting and not set(grammar.moves[state]) - set(ends):
            break
    return answer
