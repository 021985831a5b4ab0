"""Two drafters share one tree, and nothing that either of them built is lost."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree.graft import GraftGrowth, TreeGraft
from tree.growth import Answer, Ask, Candidates, Policy
from tree.tree import TokenTree

Path = tuple[int, ...]
Drafter = Callable[[Path], Sequence[float]]
NAMES = {"S": "small", "M": "medium"}


def candidates(row: Sequence[float], width: int) -> Candidates:
    """The best `width` tokens of a row of probabilities, as a drafter would give them."""
    best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:width]
    return Candidates(tuple(best), tuple(math.log(row[t]) for t in best))


def answer(tree: TokenTree, ask: Ask, q: Drafter) -> Answer:
    """What a drafter with rows `q` answers; rescoring covers the whole tree."""
    found = {v: candidates(q(tuple(tree.path_tokens(v))), ask.width) for v in ask.nodes}
    if not ask.rescore:
        return Answer(found, {})
    rescored = {
        u: math.log(q(tuple(tree.path_tokens(tree.parent[u])))[tree.token[u]]) for u in range(1, len(tree))
    }
    return Answer(found, rescored)


def random_drafter(seed: str, vocab: int) -> Drafter:
    """A drafter whose row after a path depends on nothing but the seed and the path."""

    def q(path: Path) -> list[float]:
        rng = random.Random(f"{seed} {path}")
        weights = [math.exp(1.5 * rng.gauss(0, 1)) for _ in range(vocab)]
        return [w / sum(weights) for w in weights]

    return q


def drafters(seed: int, vocab: int) -> dict[str, Drafter]:
    """Two drafters that disagree."""
    return {"small": random_drafter(f"s{seed}", vocab), "medium": random_drafter(f"m{seed}", vocab)}


def snapshot(tree: TokenTree) -> tuple[Any, ...]:
    """What a merge must never change about existing nodes."""
    return copy.deepcopy((tree.token, tree.parent, tree.depth, tree.creator, tree.children))


def assert_only_grown(before: tuple[Any, ...], tree: TokenTree) -> None:
    """The invariants of a merge that does not destroy."""
    tree.check()
    old = len(before[0])
    for was, now in zip(before[:4], (tree.token, tree.parent, tree.depth, tree.creator), strict=True):
        assert now[:old] == was, "an existing node changed"
    for node in range(old):
        assert before[4][node].items() <= tree.children[node].items(), "an existing edge is gone"
        assert list(before[4][node]) == list(tree.children[node])[: len(before[4][node])], "children were reordered"


def step(growth: GraftGrowth, drafter: str, q: Drafter) -> Ask | None:
    """One drafting step with all merge invariants checked."""
    ask = growth.ask(drafter)
    if ask is not None:
        before = snapshot(growth.tree)
        growth.attach(drafter, answer(growth.tree, ask, q))
        assert_only_grown(before, growth.tree)
    return ask


def grow(policy: TreeGraft, word: str, q: dict[str, Drafter], vocab: int, **limits: Any) -> GraftGrowth:
    """Grow by a word over S and M; a step without anything to do is passed over."""
    growth = policy.begin(0, vocab_size=vocab, **limits)
    for letter in word:
        step(growth, NAMES[letter], q[NAMES[letter]])
    return growth


def path_of(growth: GraftGrowth, node: int) -> Path:
    return tuple(growth.tree.path_tokens(node))


def scores(growth: GraftGrowth) -> dict[Path, float]:
    """Path -> path probability, root included."""
    return {path_of(growth, v): math.exp(growth.tree.score[v]) for v in range(len(growth.tree))}


# ------------------------------------------------------------------------------------------------------------- golden


def test_golden_trace() -> None:
    """Hand-checked (W = 2, m = 2, schedule M S M): pools, rescored scores, frontier, and that nothing is removed."""
    a, b = 0, 1
    q = {"medium": lambda path: (0.7, 0.2, 0.1), "small": lambda path: (0.3, 0.6, 0.1)}
    growth = TreeGraft(steps=3, frontier=2, width=2).begin(9, vocab_size=3)

    ask = step(growth, "medium", q["medium"])
    assert ask == Ask(nodes=(0,), width=2, rescore=True)
    assert scores(growth) == pytest.approx({(): 1, (a,): 0.7, (b,): 0.2})
    assert growth.visited == {0} and {path_of(growth, v) for v in growth.fresh} == {(a,), (b,)}

    ask = step(growth, "small", q["small"])
    assert ask == Ask(nodes=(1, 2), width=2) and growth.visited == {0}
    assert [path_of(growth, v) for v in growth.fresh] == [(a, b), (a, a), (b, b), (b, a)]
    assert growth.tree.score[3] == pytest.approx(math.log(0.7 * 0.6)), "mixed: the medium's parent, the small's edge"

    ask = step(growth, "medium", q["medium"])
    assert ask == Ask(nodes=(1, 2, 3, 4, 5, 6), width=2, rescore=True)
    assert scores(growth) == pytest.approx(
        {
            (): 1,
            (a,): 0.7,
            (b,): 0.2,
            (a, b): 0.14,
            (a, a): 0.49,
            (b, b): 0.04,
            (b, a): 0.14,
            (a, a, a): 0.343,
            (a, a, b): 0.098,
        }
    )
    assert growth.visited == set(range(7)) and {path_of(growth, v) for v in growth.fresh} == {(a, a, a), (a, a, b)}
    tree = growth.tree
    assert tree.creator == ["target", *["medium"] * 2, *["small"] * 4, *["medium"] * 2]
    assert tree.scorer[1:] == ["medium"] * 8 and tree.edge_lp[3] == pytest.approx(
        {"small": math.log(0.6), "medium": math.log(0.2)}
    )
    assert growth.num_grafts == 6
    assert growth.ask("small") is None and growth.ask("medium") is None, "three steps were allowed"
    assert growth.verify_nodes() == list(range(9))


# ------------------------------------------------------------------------------------------------------------- oracle


def oracle(policy: TreeGraft, word: str, q: dict[str, Drafter]) -> tuple[list[Any], set[Path], dict[Path, float]]:
    """The pool rules on plain sets of paths; returns (pool, frontier) per step, the final P, and path scores."""
    edge: dict[Path, float] = {(): 1.0}
    P: set[Path] = set()
    N: set[Path] = {()}
    seen: set[Path] = set()  # proposed by the last step, existing already
    opened: set[Path] = set()  # expanded by the small drafter
    newest, trace = 0, []

    def score(v: Path) -> float:
        return math.prod(edge[v[:i]] for i in range(len(v) + 1))

    for letter in word:
        if letter == "S":
            C = N or seen - opened
        elif policy.pool == "paper":
            C = set(edge) - P
        else:
            C = {v for v in edge if len(v) >= newest - policy.lookback}
        if not C:
            trace.append(None)
            continue
        rank = {v: -score(v) for v in C}
        if letter == "M":
            edge.update({v: q["medium"](v[:-1])[v[-1]] for v in edge if v})
            if policy.rank == "rescored":
                rank = {v: -score(v) for v in C}
            P |= C
        F = sorted(C, key=lambda v: (rank[v], len(v)))[: policy.frontier]
        row = q[NAMES[letter]]
        picks = [(*v, t) for v in F for t in sorted(range(len(row(v))), key=lambda t: -row(v)[t])[: policy.width]]
        N, seen = {u for u in picks if u not in edge}, {u for u in picks if u in edge}
        edge.update({u: row(u[:-1])[u[-1]] for u in picks if u not in edge or letter == "M"})
        if letter == "S":
            opened |= set(F)
        newest = max((len(v) for v in N), default=newest)
        trace.append((C, set(F)))
    return trace, P, {v: score(v) for v in edge}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    word=st.text("SM", min_size=1, max_size=6),
    vocab=st.integers(2, 5),
    frontier=st.integers(1, 5),
    width=st.integers(1, 4),
    pool=st.sampled_from(["paper", "lookback"]),
    lookback=st.integers(0, 3),
    rank=st.sampled_from(["rescored", "before"]),
)
def test_pools_equal_the_set_oracle(
    seed: int, word: str, vocab: int, frontier: int, width: int, pool: Any, lookback: int, rank: Any
) -> None:
    """A wrong pool reopens nodes that the medium rejected, or hides nodes from it; the tree is worse, silently."""
    policy = TreeGraft(6, frontier, width, pool=pool, lookback=lookback, rank=rank, max_nodes=10**6)
    q = drafters(seed, vocab)
    trace, P, expected = oracle(policy, word, q)
    growth = policy.begin(0, vocab_size=vocab)
    for letter, entry in zip(word, trace, strict=True):
        drafter = NAMES[letter]
        pool_before = {path_of(growth, v) for v in growth.pool(drafter)}
        ask = step(growth, drafter, q[drafter])
        if entry is None:
            assert ask is None and not pool_before
            continue
        assert ask is not None and pool_before == entry[0]
        assert ask.rescore == (letter == "M") and ask.width == min(width, vocab)
        asked = {path_of(growth, v) for v in ask.nodes}
        assert asked == (entry[0] if letter == "M" else entry[1])
    assert scores(growth) == pytest.approx(expected)
    assert {path_of(growth, v) for v in growth.visited} == P


def classic(q: Drafter, steps: int, W: int, m: int) -> dict[Path, float]:
    """The single-drafter rule: expand the W best nodes of the newest layer, keep all their m best children."""
    pool: dict[Path, float] = {(): 1.0}
    layer: dict[Path, float] = dict(pool)
    for _ in range(steps):
        parents = sorted(layer, key=lambda v: -layer[v])[:W]
        layer = {}
        for v in parents:
            for t in sorted(range(len(q(v))), key=lambda t: -q(v)[t])[:m]:
                layer[(*v, t)] = pool[v] * q(v)[t]
        pool.update(layer)
    return pool


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    steps=st.integers(1, 5),
    W=st.integers(1, 4),
    m=st.integers(1, 4),
    letter=st.sampled_from("SM"),
)
def test_one_drafter_alone_grows_the_classic_tree(seed: int, steps: int, W: int, m: int, letter: str) -> None:
    """The endpoints of every comparison; if they were not the classic trees, gains of mixing would be imaginary."""
    q = drafters(seed, 5)
    growth = grow(TreeGraft(steps, W, m, max_nodes=10**6), letter * steps, q, 5)
    assert scores(growth) == pytest.approx(classic(q[NAMES[letter]], steps, W, m))
    assert growth.num_grafts == 0


# ---------------------------------------------------------------------------------------------------------- rescoring


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), word=st.text("SM", min_size=1, max_size=5))
def test_rescoring_is_idempotent_and_equals_scoring_from_scratch(seed: int, word: str) -> None:
    """Scores that drift with the number of passes would make the cut depend on history, not on the tree."""
    q = drafters(seed, 4)
    growth = grow(TreeGraft(5, 3, 3), word, q, 4)
    tree = growth.tree
    for v in range(len(tree)):
        assert tree.score[v] == pytest.approx(math.fsum(tree.lp[i] for i in tree.path(v)), abs=1e-12)
    rescored = answer(tree, Ask((0,), 1, rescore=True), q["medium"]).rescored
    states = []
    for _ in range(2):
        for node, lp in rescored.items():
            tree.rescore(node, lp, "medium")
        tree.refresh()
        states.append((list(tree.lp), list(tree.score), list(tree.scorer), copy.deepcopy(tree.edge_lp)))
    assert states[0] == states[1]
    assert set(tree.scorer[1:]) <= {"medium"}


def test_the_small_drafter_never_overrules_the_medium() -> None:
    """The better model's opinion of an edge stands; the cheap one's is only kept on record."""
    growth = TreeGraft(steps=3, frontier=2, width=2).begin(0, vocab_size=3)
    q = drafters(1, 3)
    step(growth, "medium", q["medium"])
    step(growth, "medium", q["medium"])
    tree = growth.tree
    before = list(tree.lp)
    growth.fresh = [0]  # as if the root were in the small pool again
    ask = growth.ask("small")
    assert ask is not None
    growth.attach("small", Answer({0: Candidates((0, 1, 2), (-0.1, -0.2, -0.3))}, {}))
    tree.check()
    assert tree.lp[: len(before)] == before and set(tree.scorer[1 : len(before)]) == {"medium"}
    assert any("small" in tree.edge_lp[v] for v in (1, 2))


def test_rank_before_uses_the_scores_it_found() -> None:
    """The ablation must differ from the default where rescoring turns an order around, and only in the frontier."""
    q: dict[str, Drafter] = {"small": lambda path: (0.8, 0.1, 0.1), "medium": lambda path: (0.1, 0.8, 0.1)}
    expanded = {}
    for rank in ("rescored", "before"):
        growth = TreeGraft(steps=2, frontier=1, width=2, rank=rank).begin(0, vocab_size=3)  # type: ignore[arg-type]
        step(growth, "small", q["small"])
        growth.visited = {0}  # leave only the two children in the pool
        ask = step(growth, "medium", q["medium"])
        assert ask is not None and ask.nodes == (1, 2)
        expanded[rank] = {path_of(growth, growth.tree.parent[v]) for v in growth.fresh}
        assert growth.tree.score[1] == pytest.approx(math.log(0.1))
    assert expanded == {"rescored": {(1,)}, "before": {(0,)}}


# ------------------------------------------------------------------------------------------- pools in special places


def test_an_empty_new_layer_falls_back_to_the_picks() -> None:
    """If the medium finds all its picks in place, a following small step would have nothing and drafting would end."""
    same: Drafter = lambda path: (0.6, 0.3, 0.1)  # noqa: E731
    growth = TreeGraft(steps=6, frontier=1, width=2).begin(0, vocab_size=3)
    step(growth, "small", same)
    ask = step(growth, "medium", same)  # pool {root, 0, 1}, frontier {root}: both picks exist
    assert ask is not None and growth.fresh == [] and len(growth.tree) == 3
    assert growth.pool("small") == [1, 2], "picked again, not yet expanded by the small drafter"
    ask = growth.ask("small")
    assert ask is not None and ask.nodes == (1,)
    step(growth, "small", same)
    assert len(growth.tree) == 5 and {path_of(growth, v) for v in growth.fresh} == {(0, 0), (0, 1)}


def test_nodes_that_the_small_drafter_expanded_do_not_come_back() -> None:
    """Otherwise it would give the same answer again and the step would be wasted."""
    same: Drafter = lambda path: (0.6, 0.3, 0.1)  # noqa: E731
    growth = TreeGraft(steps=6, frontier=1, width=1).begin(0, vocab_size=3)
    step(growth, "small", same)
    step(growth, "small", same)  # root -> 0 -> 00; the small has expanded root and 0
    step(growth, "medium", same)  # frontier {root}: touches 0 only
    assert growth.fresh == [] and growth.ask("small") is None, "drafting by the small ends"
    assert growth.ask("medium") is None, "everything has been in the medium's pool"


def test_the_lookback_pool_forgets_what_was_visited() -> None:
    """The released code's rule keeps the root in the medium's pool every time; the paper's rule does not."""
    q = drafters(5, 4)
    growth = TreeGraft(steps=5, frontier=2, width=2, pool="lookback", lookback=5).begin(0, vocab_size=4)
    for _ in range(4):
        step(growth, "medium", q["medium"])
        assert growth.pool("medium") == list(range(len(growth.tree)))
    near = TreeGraft(steps=5, frontier=2, width=2, pool="lookback", lookback=1).begin(0, vocab_size=4)
    for depth in range(1, 4):
        step(near, "small", q["small"])
        assert {near.tree.depth[v] for v in near.pool("medium")} == {depth - 1, depth}


def test_the_medium_is_asked_for_its_whole_pool() -> None:
    """Its best nodes are known only after rescoring, so candidates for the whole pool must be there to choose from."""
    q = drafters(8, 5)
    growth = TreeGraft(steps=5, frontier=2, width=3).begin(0, vocab_size=5)
    step(growth, "small", q["small"])
    step(growth, "small", q["small"])
    ask = growth.ask("medium")
    assert ask is not None and ask.nodes == tuple(range(len(growth.tree))) and len(ask.nodes) > 2
    again = growth.ask("medium")
    assert again == ask, "asking changes nothing"
    other = growth.ask("small")
    assert other is not None and len(other.nodes) == 2 and not other.rescore


def test_stop_tokens_and_depth_close_nodes_for_both() -> None:
    """A closed node in a frontier would take the place of an open one and draft text after the end."""
    q = drafters(3, 3)
    stop = frozenset({1})
    growth = grow(TreeGraft(5, 4, 3), "SMSMS", q, 3, stop_tokens=stop, max_depth=3)
    tree = growth.tree
    assert 1 in tree.token and max(tree.depth) == 3
    assert all(tree.token[tree.parent[v]] != 1 for v in range(1, len(tree)) if tree.parent[v] > 0)
    for drafter in ("small", "medium"):
        assert TreeGraft().begin(0, vocab_size=3, max_depth=0).ask(drafter) is None
        all_stop = grow(TreeGraft(5, 4, 3), "S", q, 3, stop_tokens=frozenset({0, 1, 2}))
        assert all_stop.pool("small") == [] and all_stop.pool("medium") == [0]
        assert TreeGraft().with_budget(1).begin(0, vocab_size=3).ask(drafter) is None


def test_a_full_tree_takes_no_more_nodes_but_better_scores() -> None:
    """The working tree is bounded; the medium still improves which of its nodes are verified."""
    q = drafters(4, 6)
    growth = grow(TreeGraft(5, 3, 4, budget=4, max_nodes=8), "SS", q, 6)
    assert len(growth.tree) == 8 and growth.ask("small") is None
    assert step(growth, "medium", q["medium"]) is not None
    assert len(growth.tree) == 8 and set(growth.tree.scorer[1:]) == {"medium"}
    assert growth.ask("medium") is None, "no room and nothing left to rescore"
    assert len(growth.verify_nodes()) == 4


def test_tokens_the_target_does_not_have_are_dropped() -> None:
    """A padded drafter may propose ids past the tokenizer; they would index outside the target's embedding."""
    growth = TreeGraft().begin(0, vocab_size=4)
    assert growth.ask("small") is not None
    growth.attach("small", Answer({0: Candidates((7, 2), (-0.1, -1.0), (((1, -1.0),), ((9, -1.0), (1, -1.0))))}, {}))
    assert growth.tree.token == [0, 2]


def test_a_failed_answer_leaves_the_growth_usable() -> None:
    """A drafter that halts never answers; another one must be able to go on in the same step count."""
    q = drafters(6, 4)
    growth = TreeGraft(steps=1, frontier=2, width=2).begin(0, vocab_size=4)
    assert growth.ask("medium") is not None  # and then silence
    assert step(growth, "small", q["small"]) is not None
    assert growth.num_steps == 1 and growth.ask("medium") is None
    with pytest.raises(AssertionError, match="not asked"):
        growth.attach("medium", Answer({}, {}))
    with pytest.raises(ValueError, match="is not one of"):
        growth.pool("large")


def test_an_empty_answer_is_a_step() -> None:
    """A drafter that finds nothing must not be asked the same for ever."""
    growth = TreeGraft(steps=2).begin(0, vocab_size=4)
    assert growth.ask("small") is not None
    growth.attach("small", Answer({0: Candidates()}, {}))
    assert growth.ask("small") is None, "nothing new, nothing touched"
    assert growth.ask("medium") is not None, "the medium may still begin"
    assert growth.verify_nodes() == [0]


# ------------------------------------------------------------------------------------------------------ suffix chains

UNSCORED = -math.inf


def suffix(*tokens: int) -> tuple[tuple[int, float], ...]:
    """A chain whose nodes have no score yet, as prompt lookup gives it."""
    return tuple((token, UNSCORED) for token in tokens)


def test_suffix_chains_are_inserted_whole() -> None:
    """Prompt lookup finds continuations, not tokens; the rest of a match is verified if there is room."""
    growth = TreeGraft(small="ngram").begin(0, vocab_size=50)
    assert growth.ask("ngram") is not None
    growth.attach("ngram", Answer({0: Candidates((1, 2), (-0.1, -0.5), (suffix(3, 4), suffix(5)))}, {}))
    tree = growth.tree
    tree.check()
    assert {path_of(growth, v) for v in range(1, len(tree))} == {(1,), (2,), (1, 3), (1, 3, 4), (2, 5)}
    assert [path_of(growth, v) for v in growth.fresh] == [(1,), (2,)], "chain nodes are not the next layer"
    assert tree.score[tree.children[1][3]] == UNSCORED
    ask = growth.ask("ngram")
    assert ask is not None and ask.nodes == (1, 2)


def test_a_chain_node_counts_as_made_when_it_is_first_proposed() -> None:
    """Otherwise the best continuation of a match would drop out of the next layer because its chain came first."""
    growth = TreeGraft(small="ngram").begin(0, vocab_size=50)
    growth.ask("ngram")
    growth.attach("ngram", Answer({0: Candidates((1,), (-0.25,), (suffix(3, 4),))}, {}))
    growth.ask("ngram")
    growth.attach("ngram", Answer({1: Candidates((3, 7), (-0.5, -1.0), (suffix(4, 6), ()))}, {}))
    tree = growth.tree
    tree.check()
    assert [path_of(growth, v) for v in growth.fresh] == [(1, 3), (1, 7)]
    three = tree.children[1][3]
    assert tree.score[three] == -0.75, "reached, hence scored"
    assert path_of(growth, len(tree) - 1) == (1, 3, 4, 6), "the longer chain goes on below the older one"
    assert len(tree) == 6 and growth.num_grafts == 0


def test_children_of_a_terminal_node_leave_the_small_pool_only() -> None:
    """A parent with few matches keeps its chains, but lookup does not go on from them; the medium may."""
    growth = TreeGraft(small="ngram").begin(0, vocab_size=50)
    growth.ask("ngram")
    growth.attach("ngram", Answer({0: Candidates((1,), (-0.25,), (suffix(3, 4),), terminal=True)}, {}))
    assert len(growth.tree) == 4 and growth.fresh == [] and growth.ask("ngram") is None
    ask = growth.ask("medium")
    assert ask is not None and ask.nodes == (0, 1, 2, 3)
    growth.attach("medium", Answer({1: Candidates((3, 9), (-0.1, -2.0))}, {1: -0.2, 2: -0.1, 3: -0.4}))
    tree = growth.tree
    tree.check()
    assert tree.scorer[1:4] == ["medium"] * 3 and tree.score[3] == pytest.approx(-0.7), "chains got scores"
    assert [path_of(growth, v) for v in growth.fresh] == [(1, 3), (1, 9)] and growth.num_grafts == 1


def test_a_mixed_layer_goes_on_without_the_terminal_part() -> None:
    """Termination is per parent, not per step."""
    growth = TreeGraft(small="ngram").begin(0, vocab_size=50)
    growth.ask("ngram")
    growth.attach("ngram", Answer({0: Candidates((1, 2), (-0.25, -0.5))}, {}))
    growth.ask("ngram")
    few, enough = Candidates((3,), (-0.1,), terminal=True), Candidates((4, 5), (-0.1, -0.2))
    growth.attach("ngram", Answer({1: few, 2: enough}, {}))
    assert [path_of(growth, v) for v in growth.fresh] == [(2, 4), (2, 5)]


def test_the_medium_keeps_a_chain_node_it_scored() -> None:
    """A chain node that the medium scored and lookup proposes later enters the layer but keeps the better score."""
    growth = TreeGraft(steps=4, frontier=1, width=2, small="ngram").begin(0, vocab_size=50)
    growth.ask("ngram")
    growth.attach("ngram", Answer({0: Candidates((1,), (-0.25,), (suffix(3, 4),))}, {}))
    growth.ask("medium")
    growth.attach("medium", Answer({0: Candidates((1,), (-0.3,))}, {1: -0.3, 2: -0.6, 3: -0.9}))
    ask = growth.ask("ngram")
    assert ask is not None and ask.nodes == (1,), "the fallback"
    growth.attach("ngram", Answer({1: Candidates((3,), (-0.01,))}, {}))
    tree = growth.tree
    tree.check()
    assert tree.lp[2] == -0.6 and tree.scorer[2] == "medium" and tree.edge_lp[2]["ngram"] == -0.01
    assert growth.fresh == [2]


def test_chains_respect_every_limit() -> None:
    """A chain is text like any other: it ends at an end token, at the depth cap and when the tree is full."""
    wide = Answer({0: Candidates((1, 2), (-0.1, -0.5), (suffix(3, 9, 4), suffix(5, 6, 7)))}, {})
    for limits, policy, expected in (
        (
            {"stop_tokens": frozenset({9})},
            TreeGraft(),
            {(1,), (2,), (1, 3), (1, 3, 9), (2, 5), (2, 5, 6), (2, 5, 6, 7)},
        ),
        ({"max_depth": 2}, TreeGraft(), {(1,), (2,), (1, 3), (2, 5)}),
        ({"max_depth": 1}, TreeGraft(), {(1,), (2,)}),
        ({}, TreeGraft(max_nodes=4), {(1,), (2,), (1, 3)}),
    ):
        growth = policy.begin(0, vocab_size=50, **limits)  # type: ignore[arg-type]
        assert growth.ask("small") is not None
        growth.attach("small", wide)
        growth.tree.check()
        assert {path_of(growth, v) for v in range(1, len(growth.tree))} == expected


def test_unscored_chains_fill_the_rest_of_the_budget() -> None:
    """Room in the budget is paid for anyway; unscored nodes are better than none and worse than scored ones."""
    growth = TreeGraft(budget=4).begin(0, vocab_size=50)
    growth.ask("small")
    growth.attach("small", Answer({0: Candidates((1, 2), (-0.1, -5.0), (suffix(3, 4), suffix(5)))}, {}))
    assert [path_of(growth, v) for v in growth.verify_nodes()] == [(), (1,), (2,), (1, 3)]


# ------------------------------------------------------------------------------------------------------------- policy


def test_a_budget_changes_only_the_cut() -> None:
    """Load sharing must not change how a tree grows, or saved nodes would cost tree quality twice."""
    q = drafters(2, 5)
    policy: Policy = TreeGraft(3, 3, 3)
    small, large = policy.with_budget(5), policy.with_budget(50)
    assert small.budget == 5 and isinstance(small, TreeGraft) and isinstance(large, TreeGraft)
    few, many = grow(small, "SMS", q, 5), grow(large, "SMS", q, 5)
    assert few.tree.token == many.tree.token and len(few.verify_nodes()) == 5
    assert set(few.verify_nodes()) <= set(many.verify_nodes())


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"frontier": 0},
        {"width": 0},
        {"budget": 0},
        {"max_nodes": 0},
        {"lookback": -1},
        {"pool": "other"},
        {"rank": "after"},
        {"small": "medium"},
    ],
)
def test_nonsense_parameters_are_refused(bad: dict[str, Any]) -> None:
    """A bad configuration must fail at start, with the name of the key."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        TreeGraft(**bad)


def test_a_lookup_joins_the_newest_layer_and_takes_no_step() -> None:
    """The next drafter must still see what it would have seen: prompt lookup at the root may not keep it from the root."""
    growth = TreeGraft(steps=2, frontier=4, width=2, lookup="ngram").begin(0, vocab_size=8)
    asked = growth.ask("ngram")
    assert asked is not None and asked.nodes == (0,)
    growth.attach("ngram", Answer({0: Candidates((5,), (-0.1,), (((6, -0.2),),))}, {}))
    found = growth.tree.children[0][5]
    tail = growth.tree.children[found][6]
    assert growth.num_steps == 0 and growth.pool("small") == [0, found] and growth.pool("medium") == [0, found, tail]
    assert growth.pool("ngram") == [found], "it has had its say about the root"
    asked = growth.ask("small")
    assert asked is not None
    growth.attach("small", Answer({0: Candidates((5, 7), (-0.5, -1.0)), found: Candidates()}, {}))
    assert growth.num_steps == 1 and growth.pool("small") == [growth.tree.children[0][7]], "a step moves on, as ever"


def test_what_an_answer_leaves_out_was_not_considered() -> None:
    """A narrowed question: the medium must still be offered the rest of its pool."""
    growth = TreeGraft(steps=4, frontier=4, width=2).begin(0, vocab_size=8)
    assert growth.ask("small") is not None
    growth.attach("small", Answer({0: Candidates((1, 2), (-0.1, -2.0))}, {}))
    assert growth.ask("medium") is not None
    growth.attach("medium", Answer({0: Candidates((3,), (-0.3,))}, {}))
    first, second = growth.tree.children[0][1], growth.tree.children[0][2]
    assert growth.visited == {0} and {first, second} <= set(growth.pool("medium"))
