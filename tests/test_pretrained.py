"""The drafters that come with the embedded model, on that model."""

from __future__ import annotations

import pytest

from app.build import build
from app.config import Settings
from app.drafting import PRETRAINED
from app.local import Question, ask_all, running
from app.prompt_sets import encode
from app.protocol import Message
from app.serving import LoadedEngine
from app.target import with_local_target
from models.sampling import SamplingParams

pytestmark = [pytest.mark.weights, pytest.mark.slow]

DRAFTING = ("chain-small", "chain-medium", "adaptive", "guided", "treegraft", "nde")
ASKED = ("Name three rivers in France.", "Write a Python function that adds two numbers.", "Why is the sky blue?")


@pytest.fixture(scope="module")
def loaded() -> LoadedEngine:
    settings = with_local_target(Settings(costs="none", max_num_seqs=1, max_model_len=256), lambda _: None)
    assert settings.small == settings.medium == PRETRAINED, "they are what an unnamed drafter of the embedded model is"
    return build(settings, lambda _: None)


def test_they_agree_with_their_target_and_change_nothing(loaded: LoadedEngine) -> None:
    """A head whose weights do not belong to this model guesses hardly anything right: its chain would be rejected at once."""
    prompts = [encode(loaded.tokenizer, [Message.model_validate({"role": "user", "content": text})]) for text in ASKED]
    answers = {}
    with running(loaded.engine):
        for schedule in ("ar", *DRAFTING):
            questions = [Question(ids, 32, SamplingParams(temperature=0.0), schedule) for ids in prompts]
            answers[schedule] = ask_all(loaded.engine, questions, concurrency=1)
    for schedule in DRAFTING:
        assert [a.token_ids for a in answers[schedule]] == [a.token_ids for a in answers["ar"]], schedule
        steps = sum(answer.stats.num_steps for answer in answers[schedule])
        tokens = sum(answer.stats.num_output_tokens for answer in answers[schedule])
        assert tokens / steps > 1.35, f"{schedule} makes {tokens / steps:.2f} tokens per step"
