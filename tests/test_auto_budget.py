"""The price-aware budget: what it calls and verifies at given prices, against all alternatives, and what it learns."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.acceptance import LiveAcceptance, TextRecord
from scheduler.auto_budget import TARGET, AutoBudget, Offer, Question
from scheduler.cost import CostProfile, LatencyModel, Origin
from scheduler.drift import LiveCosts
from scheduler.sizing import may_pay, open_masses
from tests.plain_forward import grow_tree
from tree.tree import TokenTree


def budget(call_ms: float = 4.0, row_ms: float = 1.0, base_ms: float = 20.0) -> AutoBudget:
    """A target of `base_ms` and `row_ms` per further row; a drafter "medium" of `call_ms`, whatever its rows."""
    models = {
        TARGET: LatencyModel((1, 65), (base_ms, base_ms + 64 * row_ms)),
        "medium": LatencyModel((1, 64), (call_ms, call_ms + 1e-6)),
    }
    auto = AutoBudget(LiveCosts(CostProfile(models, Origin("none", "none", "none", "1", "never"))))
    auto.begin(sequences=1, context=0, base_rows=1)
    return auto


def root_offer(passes: tuple[int, ...] = (1,), **options: int) -> Offer:
    return Offer("medium", TokenTree(1), (0,), passes, 0, **options)


def best_of(auto: AutoBudget, *offers: Offer, sharing: int = 1) -> Offer | None:
    """Which call is made, if each offer is all that can be asked."""
    return auto.best_call("m", [Question(offer.nodes, [offer]) for offer in offers], sharing=sharing)


def test_a_call_that_costs_more_than_any_token_is_not_made() -> None:
    """At 25 ms a call can add one token at most, for which plain decoding takes 20."""
    assert best_of(budget(call_ms=25.0), root_offer()) is None


def test_a_cheap_call_is_made_and_a_free_drafter_is_always_asked() -> None:
    offer = root_offer()
    assert best_of(budget(call_ms=1.0), offer) is offer
    free = replace(offer, drafter="ngram", passes=())
    assert best_of(budget(call_ms=1e3), free) is free, "it has no price"


def test_of_two_drafters_the_one_is_called_that_is_worth_more() -> None:
    """The better one where the price allows, the cheaper one where it does not, though both would pay."""
    for dear, expected in ((4.0, "medium"), (9.0, "small")):
        auto = budget(call_ms=dear)
        auto.costs.profile.models["small"] = LatencyModel((1, 64), (3.0, 3.0 + 1e-6))  # type: ignore[index]
        auto = AutoBudget(LiveCosts(auto.costs.profile))
        auto.begin(sequences=1, context=0, base_rows=1)
        good, fair = root_offer(), replace(root_offer(), drafter="small")
        good.tree.add(0, 1, math.log(0.7), "medium")
        fair.tree.add(0, 1, math.log(0.5), "small")
        for _ in range(300):
            auto.drafted(good)
            auto.drafted(fair)
        best = best_of(auto, replace(fair, tree=TokenTree(1)), replace(good, tree=TokenTree(1)))
        assert best is not None and best.drafter == expected


def test_sequences_share_the_price_of_a_call() -> None:
    """Eight sequences share the target's forward and the drafter's: what pays for one pays for eight.

    Time is worth eight times as much then, so a price that was not shared could never be paid.
    """
    offer = root_offer()
    assert best_of(budget(call_ms=8.0, row_ms=0.1), offer) is offer
    auto = budget(call_ms=8.0, row_ms=0.1)
    auto.begin(sequences=8, context=0, base_rows=8)
    assert best_of(auto, offer, sharing=8) is offer
    assert best_of(auto, offer) is None, "negative control: the price for one of them alone"


def test_only_the_promising_top_of_a_deep_chain_is_asked_about() -> None:
    """A drafter that takes a forward per layer should not walk down a chain of unlikely guesses to rescore its end."""
    tree, above = TokenTree(1), 0
    for depth in range(6):
        above = tree.add(above, depth, math.log(0.2), "ngram")
    options = [Offer("medium", tree, tuple(range(depth + 1)), (1,) * (depth + 1), 0) for depth in range(7)]
    question = Question(tuple(range(len(tree))), options)
    assert budget(call_ms=3.0).best_call("m", [question]) is options[0]
    free = budget(call_ms=1e-5).best_call("m", [question])
    assert free is not None and len(free.nodes) > 1, "negative control: at no price it looks further"


@given(seed=st.integers(0, 10**6), price=st.floats(0.01, 100.0))
def test_what_cannot_pay_is_not_looked_at_and_loses_nothing(seed: int, price: float) -> None:
    """Parts behind one that could not pay for the whole question are not even made, and none of them would have been asked."""
    tree = TokenTree(1)
    grow_tree(random.Random(seed), tree, 9, drafters=("medium",))
    auto = budget(call_ms=price)
    layers = [tuple(node for node in range(len(tree)) if tree.depth[node] <= deepest) for deepest in range(max(tree.depth) + 1)]
    parts = [Offer("medium", tree, nodes, (1,) * (index + 1), 0) for index, nodes in enumerate(layers)]
    made: list[Offer] = []

    def lazily() -> Iterator[Offer]:
        for part in parts:
            made.append(part)
            yield part

    found = auto.best_call("m", [Question(layers[-1], lazily())])
    assert found == best_of(auto, *parts), "each part as a question of its own"
    known = auto.best_call("m", [Question(layers[-1], parts)], chances=auto.chances(tree))
    assert found == known, "chances that are handed in are those that it would reckon"
    whole = sum(open_masses(auto.chances(tree), tree.parent))
    paying = [part for part in parts if may_pay(whole, auto.rate("m"), price * len(part.passes))]
    assert made == parts[: len(paying) + 1]


@given(seed=st.integers(0, 10**6), row_ms=st.floats(0.05, 20.0), rate=st.floats(1.0, 3.0))
def test_the_chosen_nodes_are_the_best_tree_there_is(seed: int, row_ms: float, rate: float) -> None:
    """Against every ancestor-closed set of nodes: none makes more of tokens - R * ms."""
    rng = random.Random(seed)
    tree = TokenTree(1)
    grow_tree(rng, tree, 7, drafters=("medium",))
    auto = budget(row_ms=row_ms)
    for _ in range(200):
        auto.stepped("m", tokens=10, ms=200.0 / rate)
    paths = auto.acceptance.acceptance.paths(tree)
    worth = {}
    for size in range(7):
        for below in itertools.combinations(range(1, 7), size):
            if all(tree.parent[node] in (0, *below) for node in below):
                ms = auto.costs.ms(TARGET, 1 + size)
                worth[below] = 1 + sum(paths[node] for node in below) - auto.rate("m") * ms
    ((root, *chosen),) = auto.choose([(range(7), paths)], ["m"])
    assert root == 0 and worth[tuple(chosen)] == pytest.approx(max(worth.values()), abs=1e-9)


def test_trees_of_fixed_size_make_rows_dearer_for_the_others() -> None:
    """Where the price of a row jumps, what is forwarded anyway decides who pays the jump."""
    curve = LatencyModel((1, 8, 9, 64), (20.0, 20.01, 60.0, 60.01))
    profile = CostProfile({TARGET: curve}, Origin("none", "none", "none", "1", "never"))
    tree = TokenTree(1)
    for token in range(4):
        tree.add(0, token, math.log(0.24), "medium")
    chosen = []
    for others in (0, 6):
        auto = AutoBudget(LiveCosts(profile))
        auto.begin(sequences=1, context=0, base_rows=1)
        auto.add_rows(others)
        chosen.append(len(auto.choose([(range(5), auto.chances(tree))], ["m"])[0]))
    assert chosen == [5, 2], "one row is left before the jump"


def test_the_speed_up_is_what_plain_decoding_would_have_taken_over_what_was_taken() -> None:
    auto = budget()
    assert auto.speedup("m") == 1.0, "nothing is known yet"
    for _ in range(600):
        auto.stepped("m", tokens=3, ms=30.0)
    assert auto.speedup("m") == pytest.approx(2.0, rel=0.02) and auto.speedup("other") == 1.0
    for _ in range(600):
        auto.stepped("m", tokens=1, ms=40.0)
    assert auto.speedup("m") == pytest.approx(0.5, rel=0.05)
    assert auto.rate("m") == pytest.approx(1 / 20), "time is worth at least what plain decoding makes of it"
    auto.stepped("m", tokens=1, ms=math.nan)
    assert auto.speedup("m") == pytest.approx(0.5, rel=0.05), "a broken clock teaches nothing"


def test_plain_decoding_has_its_overhead_too() -> None:
    """Else a schedule that takes as long per token as plain decoding would look slower than it, and its breaker would open."""
    auto = budget(base_ms=20.0)
    assert auto.plain_ms == pytest.approx(20.0)
    for _ in range(300):
        auto.forwarded(1, 20.0)
        auto.went_plainly(1, 21.0)
    assert auto.plain_ms == pytest.approx(21.0, rel=0.001)
    for _ in range(300):
        auto.stepped("m", tokens=1, ms=21.0)
    assert auto.speedup("m") == pytest.approx(1.0, rel=0.001)
    auto.begin(sequences=4, context=0, base_rows=4)
    assert 4 * auto.plain_ms == pytest.approx(23.0 + 4.0, rel=0.001), "four sequences have four times as much of it"


def test_a_drafter_that_gives_nothing_is_called_less_and_less_and_then_again() -> None:
    """What children were worth lately decides; it is learned in both directions."""
    auto = budget(call_ms=6.0)
    barren, fertile = root_offer(), root_offer()
    fertile.tree.add(0, 1, math.log(0.9), "medium")
    assert best_of(auto, root_offer()) is not None
    for _ in range(100):
        auto.drafted(barren)
    assert best_of(auto, root_offer()) is None
    for _ in range(100):
        auto.drafted(fertile)
    assert best_of(auto, root_offer()) is not None


def test_one_texts_record_speaks_for_that_text_only() -> None:
    """Prompt lookup is right in code and wrong in prose at the same score."""
    live, code, prose = LiveAcceptance(), TextRecord(), TextRecord()
    tree = TokenTree(1)
    child = tree.add(0, 2, math.log(0.5), "ngram")
    for _ in range(40):
        live.observe_tree(tree, [0, child], [child], code)
        live.observe_tree(tree, [0, child], [], prose)
    before = live.acceptance.paths(tree)[child]
    assert before == pytest.approx(0.5, abs=0.1), "the common curve has seen both"
    assert live.acceptance.paths(tree, code)[child] > 0.8 and live.acceptance.paths(tree, prose)[child] < 0.15
    assert code.factor("medium") == 1.0, "another drafter's record is its own"


def test_prices_follow_the_clock() -> None:
    auto = budget(call_ms=4.0)
    for _ in range(400):
        auto.called([root_offer()], 8.0)
        auto.forwarded(1, 40.0)
    assert auto.costs.ms("medium", 1) == pytest.approx(8.0, rel=0.02)
    assert auto.costs.ms(TARGET, 1) == pytest.approx(40.0, rel=0.02)
