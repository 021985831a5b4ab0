"""Every tree policy on the model that is served by default writes, at temperature 0, what plain decoding writes."""

from __future__ import annotations

from typing import Any

import pytest

from app.build import build
from app.config import ScheduleDefinition, Settings
from app.local import Question, ask_all, running
from app.prompt_sets import encode
from app.protocol import Message
from models.embedded import embedded_target
from scheduler.definitions import POLICY_TYPES

pytestmark = [pytest.mark.weights, pytest.mark.slow]

NUM_TOKENS = 24
PROMPTS = ("Count: one, two, three, one, two, three, one,", "List the days of the week.")
BOTH: dict[str, Any] = {"drafters": {"S": "ngram", "M": "medium"}}

DEFINITIONS: dict[str, dict[str, Any]] = {
    "chain": {"options": {"length": 3}, "plan": "MMS", **BOTH},
    "fixed": {"options": {"width": 2, "depth": 2}, "plan": "MS", **BOTH},
    "template": {"options": {"paths": [[0], [1], [0, 0], [0, 1]]}, "plan": "MM"},
    "eagle": {"options": {"width": 2, "depth": 2, "budget": 6}, "plan": "MM"},
    "talon": {"options": {"budget": 6, "first_width": 2}, "plan": "MMS", **BOTH},
    "opt_tree": {"options": {"budget": 6}, "plan": "MM"},
    "sequoia": {"options": {"acceptance": [0.6, 0.2], "size": 6, "depth": 2}, "plan": "MM"},
    "adaptive_shape": {"options": {}, "plan": "MMM"},
    "iid": {"options": {"num_paths": 2, "length": 2}, "plan": "M*"},
    "delayed": {"options": {"num_paths": 2, "trunk": 1, "branch": 2}, "plan": "M*"},
    "without_replacement": {"options": {"widths": [2, 1]}, "plan": "M*"},
    "one_sampled": {"options": {"width": 2, "frontier": 2, "depth": 2, "budget": 6}, "plan": "M*"},
    "treegraft": {"options": {"frontier": 2, "width": 2, "budget": 6}, "plan": "SMS", **BOTH},
    "prune_graft": {"options": {"base": {"policy": "eagle", "width": 2, "depth": 2, "budget": 6}}, "plan": "MMS", **BOTH},
}


def test_every_policy_writes_what_plain_decoding_writes() -> None:
    """In float32, where near ties are too rare to meet in so few tokens. All answers are in flight together: the batch in
    which a token is decided must not matter either."""
    assert set(DEFINITIONS) == set(POLICY_TYPES), "a policy is missing here"
    defined = {f"the {name}": ScheduleDefinition(policy=name, **parts) for name, parts in DEFINITIONS.items()}
    settings = Settings(
        target=str(embedded_target(lambda line: None)),
        small="ngram",
        medium="truncated",
        weights="fp32",
        device="cpu",
        budget=8,
        max_model_len=128,
        max_num_seqs=8,
        define=defined,
    )
    loaded = build(settings, lambda line: None)
    asked = [encode(loaded.tokenizer, [Message(role="user", content=prompt)]) for prompt in PROMPTS]
    names = ["ar", *defined]
    with running(loaded.engine):
        questions = [Question(ids, NUM_TOKENS, schedule=name) for name in names for ids in asked]
        answers = ask_all(loaded.engine, questions, concurrency=8)
    by_name = {name: answers[len(asked) * i : len(asked) * (i + 1)] for i, name in enumerate(names)}
    plain = [answer.token_ids for answer in by_name.pop("ar")]
    assert all(len(ids) >= 10 for ids in plain), "too short to prove anything"
    for name, answered in by_name.items():
        assert [answer.token_ids for answer in answered] == plain, name
        assert not any(answer.stats.halts for answer in answered)
        assert sum(answer.stats.num_accepted for answer in answered) > 0, f"{name} proves nothing: no draft was accepted"
