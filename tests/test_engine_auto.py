"""The engine under a price-aware budget: the same text at any price, no work that cannot pay, and who may ask for it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from engine.admission import check_rules
from engine.request import FinishReason, RequestError, RequestStats, StepStats
from engine.step_stats import by_schedule
from scheduler.auto_budget import TARGET, AutoBudget
from scheduler.cost import CostProfile, LatencyModel, Origin
from scheduler.drift import DriftRule, LiveCosts
from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import World, greedy_reference
from tree.policies.sampled import Iid

TinyModel = Callable[..., PreTrainedModel]
FREE, DEAR = 1e-3, 1e3  # milliseconds of a call, and of a further row, where the target takes 10
ALL = ("ngram", "small", "medium", "chain-small", "chain-medium", "talon", "talon-small", "adaptive", "treegraft")


def prices(ms: float) -> AutoBudget:
    """Calls and further rows at `ms`; prices do not follow the clock, so that the test's world stays as it is."""
    drafter = LatencyModel((1, 64), (ms, ms * 1.001))
    models = {TARGET: LatencyModel((1, 65), (10.0, 10.0 + 64 * ms)), "small": drafter, "medium": drafter}
    return AutoBudget(LiveCosts(CostProfile(models, Origin("none", "none", "none", "1", "never")), DriftRule(limit=1.0)))


def world(tiny_model: TinyModel, ms: float | None, **options: object) -> World:
    """The medium drafter is the target itself, the small one another model."""
    target = tiny_model("llama")
    auto = None if ms is None else prices(ms)
    return World(target, small=tiny_model("llama", seed=1), medium=target, auto=auto, **options)  # type: ignore[arg-type]


class StepLog:
    """Keeps what observers are told."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def on_step(self, steps: Sequence[StepStats]) -> None:
        self.steps.extend(steps)

    def on_finish(self, stats: RequestStats, reason: FinishReason) -> None:
        pass


@pytest.mark.parametrize("ms", [FREE, 1.0, DEAR])
def test_the_text_does_not_depend_on_prices(tiny_model: TinyModel, ms: float) -> None:
    """Every schedule, several sequences at once, at T=0 against transformers' own generate."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (3, 9, 17)]
    expected = [greedy_reference(tiny_model("llama"), prompt, 16) for prompt in prompts]
    with world(tiny_model, ms) as running:
        for schedule in ALL:
            replies = running.run_all(prompts, schedule, max_tokens=16)
            assert [reply.tokens for reply in replies] == expected, schedule
            assert all(reply.stats.is_auto for reply in replies)


@pytest.mark.parametrize(("ms", "reason"), [(FREE, "all"), (DEAR, "load")])
def test_what_bounded_a_tree_is_counted(tiny_model: TinyModel, ms: float, reason: str) -> None:
    """Free rows are all taken; where lookup has found something for nothing and a row is too dear, nothing is verified."""
    log = StepLog()
    priced = world(tiny_model, ms)
    priced.engine.subscribe(log)
    with priced as running:
        reply = running.run([5, 6] * 8, "ngram", max_tokens=24)
        running.run([5, 6] * 8, "ngram", max_tokens=24, budget=8)
    found = sum((Counter(step.sized) for step in log.steps), Counter[str]())
    assert set(found) == {reason} and found[reason] <= reply.stats.num_steps, "a number is no price"


def test_a_seeded_answer_does_not_depend_on_prices(tiny_model: TinyModel) -> None:
    replies = []
    for ms in (None, FREE, 1.0, DEAR):
        with world(tiny_model, ms) as running:
            replies.append(running.run([5, 6, 7], "treegraft", temperature=1.0, seed=3, max_tokens=16).tokens)
    assert replies[0] == replies[1] == replies[2] == replies[3]


def test_what_cannot_pay_is_not_done(tiny_model: TinyModel) -> None:
    """At prohibitive prices every schedule is plain decoding; at none the same drafter's guesses are verified."""
    with world(tiny_model, DEAR) as running:
        for schedule in ALL:
            stats = running.run([1, 2, 3, 1, 2, 3, 1], schedule, max_tokens=12).stats
            assert stats.num_verified_nodes == stats.num_steps == 12, schedule
            assert sum(count.forwards for count in stats.drafters.values()) == 0, schedule
    with world(tiny_model, FREE) as running:
        stats = running.run([1, 2, 3, 1, 2, 3, 1], "chain-medium", max_tokens=12).stats
        assert stats.num_steps < 12 and stats.drafters["medium"].accepted > 0


def test_calls_that_were_declined_are_counted_per_drafter(tiny_model: TinyModel) -> None:
    """A report of few calls must tell a plan that wanted none from prices that forbade them; so must the observers' sums."""
    dear, log = world(tiny_model, DEAR), StepLog()
    dear.engine.subscribe(log)
    with dear as running:
        # The first token comes with the prompt, and before the last one there is no room for a draft.
        assert running.run([1, 2, 3], "chain-medium", max_tokens=12).stats.declined == {"medium": 10}
        both = running.run([1, 2, 3], "treegraft", max_tokens=12).stats.declined
        assert running.run([1, 2, 3], "chain-medium", max_tokens=12, budget=4).stats.declined == {}, "a number is no price"
        assert running.run([1, 2, 3], "ar", max_tokens=12).stats.declined == {}
    assert set(both) == {"small", "medium"} and all(both.values())
    sums = Counter[tuple[str, str]]()
    for step in by_schedule(log.steps):
        sums.update({(step.schedule, name): times for name, times in step.declined.items()})
    assert sums == {("chain-medium", "medium"): 10, **{("treegraft", name): times for name, times in both.items()}}
    with world(tiny_model, FREE) as running:
        assert running.run([1, 2, 3], "chain-medium", max_tokens=4).stats.declined == {}


def test_the_passes_that_read_the_prompt_are_told_apart(tiny_model: TinyModel) -> None:
    """Else a long prompt would look like dear verification."""
    with world(tiny_model, None) as running:
        stats = running.run(list(range(40)), "chain-medium", max_tokens=12).stats
        assert 0 < stats.prompt_verify_s < stats.verify_s
        only = running.run([1, 2, 3], "chain-medium", max_tokens=1).stats
        assert only.prompt_verify_s == only.verify_s > 0


def test_a_number_holds_whatever_it_costs(tiny_model: TinyModel) -> None:
    with world(tiny_model, DEAR) as running:
        stats = running.run([1, 2, 3], "chain-medium", max_tokens=12, budget=4).stats
        assert not stats.is_auto and stats.drafters["medium"].forwards > 0
        assert stats.num_verified_nodes > 2 * stats.num_steps


def test_auto_can_be_asked_for_where_there_are_prices(tiny_model: TinyModel) -> None:
    with world(tiny_model, FREE) as running:
        assert running.run([1, 2], "talon", max_tokens=4, budget="auto").stats.is_auto
        assert not running.run([1, 2], "ar", max_tokens=4, budget="auto").stats.is_auto, "it drafts nothing to be priced"
    with world(tiny_model, None) as running:
        with pytest.raises(RequestError, match="without") as caught:
            running.submit([1, 2], "talon", budget="auto")
        assert caught.value.param == "speculative.budget"
        assert not running.run([1, 2], "talon", max_tokens=4).stats.is_auto


def test_drawn_trees_are_never_sized(tiny_model: TinyModel) -> None:
    """Leaving out drawn nodes by their price would leave another distribution: refused when defined and when asked for."""
    drawn = Schedule("drawn", "test", Iid(), Word("M*"), {Action.MEDIUM: "medium"})
    with pytest.raises(ValueError, match="drawn"):
        check_rules(replace(drawn, is_auto=True), allow_lossy=False)
    with world(tiny_model, FREE, schedules=[drawn]) as running, pytest.raises(RequestError, match="at random"):
        running.submit([1, 2], "drawn", budget="auto")


def test_the_clock_is_learned_from(tiny_model: TinyModel) -> None:
    """Real forwards of tiny models take another time than the profile says; the drift shows it."""
    auto = prices(1.0)
    auto.costs.rule = DriftRule()
    auto = AutoBudget(LiveCosts(auto.costs.profile))
    target = tiny_model("llama")
    with World(target, small=tiny_model("llama", seed=1), medium=target, auto=auto) as running:
        running.run([1, 2, 3], "treegraft", max_tokens=40)
    assert auto.costs.drift(TARGET) != 1.0 and auto.speedup("treegraft") != 1.0
    assert auto.acceptance.num_samples("medium") + auto.acceptance.num_samples("small") > 0


def test_a_number_as_budget_does_not_speak_for_the_schedule(tiny_model: TinyModel) -> None:
    """Who asks for large trees at any cost would make the schedule look slow for those who leave it to prices."""
    target = tiny_model("llama")
    for budget, is_heard in ((8, False), (None, True)):
        auto = prices(1.0)
        with World(target, small=tiny_model("llama", seed=1), medium=target, auto=auto) as running:
            running.run([1, 2, 3], "treegraft", max_tokens=40, budget=budget)
        assert (auto.speedup("treegraft") != 1.0) is is_heard
