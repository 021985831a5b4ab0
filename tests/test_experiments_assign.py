"""Who gets which arm: the right shares, the same arm for the same key, and as few moves as can be."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from app.experiments.assign import choose, unit_of
from app.experiments.experiment import Arm, Experiment, with_weights
from app.protocol import CompletionBody
from app.stickiness import stickiness_key

ROOT = Path(__file__).resolve().parent.parent
KEYS = [f"session:{number}" for number in range(2000)]


def experiment(**weights: float) -> Experiment:
    arms = tuple(Arm(name, "ar", weight=weight) for name, weight in weights.items())
    return Experiment("trial", arms, arms[0].name, "0123456789abcdef" * 2, 0.0)


def arms_of(trial: Experiment) -> list[str]:
    return [choose(trial, key).name for key in KEYS]


@pytest.mark.parametrize(("a", "b"), [(1, 1), (9, 1), (0.2, 0.8)])
def test_shares_of_keys_are_the_shares_of_weights(a: float, b: float) -> None:
    """Equal shares within 47 to 53 % of 2,000 keys: 2.7 standard deviations; the salt is fixed, so it cannot come and go."""
    share = arms_of(experiment(a=a, b=b)).count("a") / len(KEYS)
    assert abs(share - a / (a + b)) < 0.03, share


def test_requests_without_a_key_are_drawn_by_weight() -> None:
    """Four standard deviations of 4,000 draws: a false alarm in 16,000 runs."""
    trial = experiment(a=3, b=1)
    drawn = [choose(trial, None).name for _ in range(4000)]
    assert abs(drawn.count("a") / 4000 - 0.75) < 4 * (0.75 * 0.25 / 4000) ** 0.5
    alone = dataclasses.replace(trial, sticky=False)
    assert len({choose(alone, "session:1").name for _ in range(100)}) == 2


def test_an_arm_without_weight_gets_nobody() -> None:
    """The guard stops arms that way."""
    assert set(arms_of(experiment(a=1, b=0, c=1))) == {"a", "c"}


def test_weights_move_as_few_keys_as_can_be_and_only_to_the_arm_that_grew() -> None:
    """A key that changes its arm for nothing sees its answers' speed jump, and blurs the comparison."""
    before = arms_of(experiment(a=50, b=50))
    after = arms_of(with_weights(experiment(a=50, b=50), {"a": 60, "b": 40}))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {("b", "a")}
    assert 0.08 < len(moved) / len(KEYS) < 0.12, len(moved)
    assert arms_of(with_weights(experiment(a=50, b=50), {"a": 5, "b": 5})) == before, "only ratios count"


def test_a_third_arm_takes_keys_from_both_and_gives_none_to_the_others() -> None:
    """Hashing into intervals of a line would move keys between the old arms too."""
    before, after = arms_of(experiment(a=1, b=1)), arms_of(experiment(a=1, b=1, c=1))
    assert all(new in (old, "c") for old, new in zip(before, after, strict=True))
    assert 0.29 < after.count("c") / len(KEYS) < 0.38


def test_the_same_key_gets_the_same_arm_in_another_process() -> None:
    """Python's own hash differs from process to process; a restart would move half of the keys."""
    program = (
        "import json, sys; from app.experiments.assign import choose; from app.experiments.experiment import from_json\n"
        "trial, keys = json.load(sys.stdin); print(json.dumps([choose(from_json(trial), key).name for key in keys]))"
    )
    trial = experiment(a=1, b=2)
    given = json.dumps([trial.to_json(), KEYS])
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, input=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == arms_of(trial)


def test_another_experiment_or_salt_mixes_the_keys_anew() -> None:
    """Else the same people would get all the new schedules, and their quirks would go into every comparison."""
    trial = experiment(a=1, b=1)
    for other in (dataclasses.replace(trial, name="other"), dataclasses.replace(trial, salt="ff" * 16)):
        same = sum(old == new for old, new in zip(arms_of(trial), arms_of(other), strict=True))
        assert 0.45 < same / len(KEYS) < 0.55
        assert unit_of(trial, "session:1") != unit_of(other, "session:1")
    assert unit_of(trial, "session:1") == unit_of(trial, "session:1")
    assert len({unit_of(trial, key) for key in KEYS}) == len(KEYS)


def test_session_then_user_then_key_and_never_one_for_the_other() -> None:
    """The order is what callers are told; a user named like a session is somebody else."""

    def key(headers: dict[str, str], user: str | None, api_key: str | None) -> str | None:
        return stickiness_key(Headers(headers), CompletionBody(prompt="x", user=user), api_key)

    session = {"X-Session-Id": "s"}
    assert key(session, "u", "k") == key(session, None, None)
    assert key({}, "u", "k") == key({}, "u", None)
    assert key({}, None, None) is None
    assert len({key(session, None, None), key({}, "s", None), key({}, None, "s")}) == 3
    assert "secret-key" not in str(key({}, None, "secret-key"))
