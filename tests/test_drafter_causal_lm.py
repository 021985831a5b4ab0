"""A language model as a drafter: what it proposes is what a plain forward says, whatever it was asked before."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from drafters.base import DraftRequest, Halt
from drafters.causal_lm import CausalLMDrafter, Following
from models import toy
from models.causal_lm import CausalLM
from tests.plain_forward import VOCAB, grow_tree, pair, plain_logits, random_tree
from tree.growth import Answer, Ask
from tree.tree import TokenTree

LP_TOLERANCE = 1e-4


class Follower:
    """One sequence, its tree and its drafter's state; answers are compared with the plain model's."""

    def __init__(self, drafter: CausalLMDrafter, plain: nn.Module, tokens: list[int]) -> None:
        self.drafter, self.plain, self.tokens = drafter, plain, tokens
        self.state = drafter.open()
        self.tree = TokenTree(tokens[-1])

    def request(self, nodes: Sequence[int], width: int = 4, rescore: bool = False) -> DraftRequest:
        return DraftRequest(self.state, self.tokens, self.tree, Ask(tuple(nodes), width, rescore))

    def row(self, node: int) -> torch.Tensor:
        """The plain model's log-probabilities after `node`; padding ids have none."""
        logits = plain_logits(self.plain, [*self.tokens, *self.tree.path_tokens(node)])[-1].clone()
        logits[self.drafter.lm.num_tokens :] = -math.inf
        return torch.log_softmax(logits, dim=-1)

    def check(self, answer: Answer | Halt, ask: Ask) -> None:
        assert isinstance(answer, Answer), answer
        assert set(answer.candidates) == set(ask.nodes)
        for node, found in answer.candidates.items():
            want = self.row(node).topk(ask.width)
            assert found.tokens == tuple(want.indices.tolist()), f"node {node}"
            assert found.lps == pytest.approx(want.values.tolist(), abs=LP_TOLERANCE)
            assert list(found.lps) == sorted(found.lps, reverse=True) and max(found.lps) <= 0.0
        for node, lp in answer.rescored.items():
            want_lp = float(self.row(self.tree.parent[node])[self.tree.token[node]])
            assert lp == pytest.approx(want_lp, abs=LP_TOLERANCE), f"edge above node {node}"
        if not ask.rescore:
            assert not answer.rescored

    def attach(self, answer: Answer, name: str = "medium") -> list[int]:
        made = []
        for node, found in answer.candidates.items():
            for token, lp in zip(found.tokens, found.lps, strict=True):
                if token not in self.tree.children[node]:
                    made.append(self.tree.add(node, token, lp, name))
        return made

    def commit(self, path: Sequence[int], extra: int) -> None:
        self.drafter.commit(self.state, self.tokens, self.tree, path)
        self.tokens.extend([*(self.tree.token[node] for node in path), extra])
        self.tree = TokenTree(extra)

    def close(self) -> None:
        self.drafter.close(self.state)


def _ask(followers: Sequence[Follower], requests: Sequence[DraftRequest], *, calls: int = 1) -> list[Answer]:
    """One call for all, or several where a text is fed in pieces; every answer of the last one checked."""
    drafter = followers[0].drafter
    for _ in range(calls - 1):
        assert Answer({}, {}) in drafter.propose(requests)
    answers = drafter.propose(requests)
    assert len(answers) == len(requests)
    for follower, request, answer in zip(followers, requests, answers, strict=True):
        follower.check(answer, request.ask)
    return answers  # type: ignore[return-value]


def _drafter(
    family: toy.Family = "llama", *, name: str = "medium", **options: Any
) -> tuple[CausalLMDrafter, nn.Module]:
    plain, lm = pair(family, **options)
    return CausalLMDrafter(name, lm), plain


def _texts(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_candidates_are_the_plain_models_best_along_every_path(family: toy.Family) -> None:
    """A mixed batch whose trees grow over several asks, with a sequence that joins in the middle."""
    rng = random.Random(0)
    drafter, plain = _drafter(family)
    followers = [Follower(drafter, plain, tokens) for tokens in _texts(rng, 1, 9, 4)]
    layers: list[list[int]] = [[0], [0], [0]]
    for step in range(3):
        active = [0, 1] if step == 0 else [0, 1, 2]  # the third joins one step later
        asked = [followers[i].request(layers[i], width=rng.randrange(1, 5)) for i in active]
        answers = _ask([followers[i] for i in active], asked)
        assert drafter.lm.num_forwards == step + 1, "one forward for all sequences"
        for i, answer in zip(active, answers, strict=True):
            layers[i] = rng.sample(made := followers[i].attach(answer), min(2, len(made)))
    for follower in followers:
        follower.close()
    assert drafter.lm.pool.num_used == 0


def test_asking_again_costs_no_forward() -> None:
    """What was fed stays known until the step is over."""
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, [1, 2, 3])
    _ask([follower], [follower.request([0], width=2)])
    _ask([follower], [follower.request([0], width=5)])
    assert drafter.lm.num_forwards == 1


def test_nodes_of_another_drafter_are_fed_with_their_ancestors() -> None:
    """Grafting: it is asked about nodes below nodes that it has never seen, at any depth."""
    rng = random.Random(1)
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, _texts(rng, 6)[0])
    first = _ask([follower], [follower.request([0])])[0]
    mine = follower.attach(first)
    chain = mine[1]
    for token in (3, 1, 4, 1):
        chain = follower.tree.add(chain, token, -1.0, "small")
    other = follower.tree.add(0, next(t for t in range(VOCAB) if t not in follower.tree.children[0]), -2.0, "small")
    _ask([follower], [follower.request([chain, other, mine[0]])])
    _ask([follower], [follower.request([follower.tree.parent[chain]])])  # an ancestor that was fed on the way
    assert drafter.lm.num_forwards == 2


@pytest.mark.parametrize("seed", range(4))
def test_rescored_edges_are_the_plain_models(seed: int) -> None:
    """After earlier asks without rescoring, in a tree of several drafters; every edge that others own, none it owns."""
    rng = random.Random(seed)
    drafter, plain = _drafter()
    followers = [Follower(drafter, plain, tokens) for tokens in _texts(rng, 5, 1)]
    followers[0].attach(_ask(followers[:1], [followers[0].request([0], width=2)])[0])
    for follower in followers:
        grow_tree(rng, follower.tree, 12, drafters=("small", "medium", "ngram"))
    requests = [follower.request(range(12), rescore=True) for follower in followers]
    answers = _ask(followers, requests)
    for follower, answer in zip(followers, answers, strict=True):
        assert set(answer.rescored) == {n for n in range(1, 12) if follower.tree.scorer[n] != "medium"}
        for node, lp in answer.rescored.items():
            follower.tree.rescore(node, lp, "medium")
        follower.tree.refresh()
        follower.tree.check()
    # Now it owns every edge: the next time there is nothing left to rescore.
    for follower, answer in zip(followers, drafter.propose(requests), strict=True):
        follower.check(answer, requests[0].ask if follower is followers[0] else requests[1].ask)
        assert isinstance(answer, Answer) and not answer.rescored


def test_a_question_about_the_topmost_nodes_costs_no_look_at_the_others() -> None:
    """Whoever asks about a part of the tree wants to pay for that part only."""
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, _texts(random.Random(5), 1)[0])
    top = follower.tree.add(0, 3, -0.1, "small")
    deep = follower.tree.add(follower.tree.add(top, 4, -0.1, "small"), 5, -0.1, "small")
    request = follower.request([0, top], rescore=True)
    assert drafter.passes(request) == (2,), "the root and one node"
    (answer,) = _ask([follower], [request])
    assert set(answer.rescored) == {top, follower.tree.parent[deep]}, "the children of what it looked at, and no others"
    assert drafter.passes(request) == () and drafter.passes(follower.request([deep])) == (2,)


def test_leaves_are_not_fed_for_rescoring() -> None:
    """An edge is scored by its parent's row; a row for every leaf would double the price."""
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, [1, 2])
    inner = follower.tree.add(0, 5, -1.0, "small")
    for token in range(6):
        follower.tree.add(inner, token, -1.0, "small")
    answer = _ask([follower], [follower.request([0, inner], rescore=True)])[0]
    assert set(answer.rescored) == set(range(1, 8))
    assert drafter.lm.num_rows_forwarded == 2 + 1


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_it_catches_up_on_an_accepted_path_of_which_it_knows_a_part(known: int) -> None:
    """The target may accept nodes of another drafter below its own; the gap is fed with the next question."""
    rng = random.Random(known)
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, _texts(rng, 7)[0])
    node, path = 0, []
    _ask([follower], [follower.request([0])])
    for depth in range(3):
        node = follower.tree.add(node, 10 + depth, -1.0, "small")
        path.append(node)
        if depth < known:
            _ask([follower], [follower.request([node])])
    sibling = follower.tree.add(0, 30, -1.0, "small")
    _ask([follower], [follower.request([sibling])])
    follower.commit(path, 20)
    assert len(follower.state.rows) == 7 + known == drafter.lm.pool.num_used
    before = drafter.lm.num_rows_forwarded
    _ask([follower], [follower.request([0])])
    assert drafter.lm.num_rows_forwarded - before == 3 - known + 1
    follower.close()
    assert drafter.lm.pool.num_used == 0


def test_a_gap_in_what_it_knows_of_the_path_ends_what_it_keeps() -> None:
    """A row below a node without a row stands at the right position but the text before it has a hole."""
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, [1, 2, 3])
    _ask([follower], [follower.request([0])])
    a = follower.tree.add(0, 10, -1.0, "small")
    b = follower.tree.add(a, 11, -1.0, "small")
    _ask([follower], [follower.request([b])])
    drafter.lm.pool.release([follower.state.node_rows.pop(a)])  # cannot happen by asking: ancestors are fed along
    follower.commit([a, b], 12)
    assert len(follower.state.rows) == 3 == drafter.lm.pool.num_used
    _ask([follower], [follower.request([0])])


def test_a_step_without_a_question_is_caught_up_later() -> None:
    """A schedule may leave a drafter out for many steps."""
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, [1, 2, 3])
    for extra in (4, 5):
        node = follower.tree.add(0, extra + 10, -1.0, "small")
        follower.commit([node], extra)  # never asked yet
    assert drafter.lm.pool.num_used == 0
    _ask([follower], [follower.request([0])])
    for extra in (6, 7):
        node = follower.tree.add(0, extra + 10, -1.0, "small")
        follower.commit([node], extra)
    _ask([follower], [follower.request([0])])
    assert len(follower.state.rows) == len(follower.tokens) == drafter.lm.pool.num_used


def test_a_commit_without_a_tree_is_harmless() -> None:
    """A step in which nothing was drafted."""
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, [1, 2, 3])
    _ask([follower], [follower.request([0])])
    drafter.commit(follower.state, follower.tokens, None, ())
    follower.tokens.append(9)
    follower.tree = TokenTree(9)
    _ask([follower], [follower.request([0])])


def test_a_long_prompt_is_fed_in_pieces() -> None:
    """One forward per call whatever the lengths: a long prompt must not hold up the answers of the others."""
    rng = random.Random(2)
    drafter, plain = _drafter(num_rows=1400)
    long, short = (Follower(drafter, plain, tokens) for tokens in _texts(rng, 1100, 5))
    first = drafter.propose([long.request([0]), short.request([0])])
    assert first[0] == Answer({}, {}), "nothing to answer from yet"
    short.check(first[1], short.request([0]).ask)
    assert (drafter.lm.num_forwards, drafter.lm.pool.num_used) == (1, 512 + 5)
    _ask([long, short], [long.request([0]), short.request([0])], calls=2)
    assert drafter.lm.num_forwards == 3, "512, 512, then the rest"
    assert drafter.lm.pool.num_used == 1105
    for length in (512, 513):
        follower = Follower(drafter, plain, _texts(rng, length)[0])
        before = drafter.lm.num_forwards
        if length <= drafter.lm.pool.num_free:
            _ask([follower], [follower.request([0])], calls=1 if length == 512 else 2)
            assert drafter.lm.num_forwards - before == (1 if length == 512 else 2)
        follower.close()


def test_it_halts_where_its_own_context_ends() -> None:
    """It may be shorter than the target's; the neighbor in the batch is answered all the same."""
    drafter, plain = _drafter(max_positions=16)
    at_the_end, beyond, neighbor = (Follower(drafter, plain, [1] * length) for length in (16, 17, 3))
    answers = drafter.propose([f.request([0]) for f in (at_the_end, beyond, neighbor)])
    assert answers[1] == Halt("context")
    at_the_end.check(answers[0], at_the_end.request([0]).ask)
    neighbor.check(answers[2], neighbor.request([0]).ask)
    node = at_the_end.tree.add(0, 5, -1.0, "small")
    assert drafter.propose([at_the_end.request([node])]) == [Halt("context")]
    assert drafter.lm.pool.num_used == 16 + 3, "a refused question takes no rows"


def test_it_halts_when_rows_run_out_and_others_go_on() -> None:
    """Each fits alone, both do not: the one that came first is answered, no row leaks, nobody gets an exception."""
    drafter, plain = _drafter(num_rows=20)
    first, second, third = (Follower(drafter, plain, tokens) for tokens in _texts(random.Random(3), 12, 12, 8))
    requests = [follower.request([0]) for follower in (first, second, third)]
    answers = drafter.propose(requests)
    assert answers[1] == Halt("rows")
    first.check(answers[0], requests[0].ask)
    third.check(answers[2], requests[2].ask)
    assert drafter.lm.pool.num_used == 20
    node = first.tree.add(0, 5, -1.0, "small")
    assert drafter.propose([first.request([node])]) == [Halt("rows")]
    for follower in (first, second, third):
        follower.close()
    assert drafter.lm.pool.num_used == 0


def test_a_prompt_that_does_not_fit_is_not_even_begun() -> None:
    """Feeding a thousand tokens to find out that there is no room for the last ten is time lost for everyone."""
    drafter, plain = _drafter(num_rows=600)
    follower = Follower(drafter, plain, [1] * 700)
    assert drafter.propose([follower.request([0])]) == [Halt("rows")]
    assert drafter.lm.num_forwards == 0 and drafter.lm.pool.num_used == 0
    # A far part that is fed first must leave what a sequence before it in the call was promised.
    early, late = Follower(drafter, plain, [1] * 80), Follower(drafter, plain, [2] * 525)
    answers = drafter.propose([early.request([0]), late.request([0])])
    early.check(answers[0], early.request([0]).ask)
    assert answers[1] == Halt("rows")


def test_it_halts_on_numbers_that_are_none() -> None:
    """NaN breaks every ranking; only the sequence that meets it is given up."""
    drafter, plain = _drafter()
    with torch.no_grad():
        drafter.lm.model.model.embed_tokens.weight[66] = float("nan")
    bad, good = Follower(drafter, plain, [1, 66]), Follower(drafter, plain, [1, 2])
    answers = drafter.propose([bad.request([0]), good.request([0])])
    assert answers[0] == Halt("nan")
    good.check(answers[1], good.request([0]).ask)
    # Met on the way to a rescored edge, it counts as well.
    node = good.tree.add(0, 66, -1.0, "small")
    good.tree.add(node, 3, -1.0, "small")
    assert drafter.propose([good.request([0, node], rescore=True)]) == [Halt("nan")]
    bad.close()
    good.close()
    assert drafter.lm.pool.num_used == 0


@pytest.mark.parametrize("length", [4, 600])
def test_a_forward_that_breaks_leaks_no_row(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, say: the sequences go on without the drafter, and its rows must come back."""
    drafter, plain = _drafter(num_rows=700)
    followers = [Follower(drafter, plain, [1] * size) for size in (3, length)]

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(drafter.lm, "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            drafter.propose([follower.request([0]) for follower in followers])
    assert drafter.lm.pool.num_used == 0
    # And nothing half done is in the way.
    _ask(followers, [follower.request([0]) for follower in followers], calls=1 if length == 4 else 2)


def test_closing_twice_frees_everything_once() -> None:
    """The engine closes after a halt and again when the request ends."""
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, [1, 2, 3])
    made = follower.attach(_ask([follower], [follower.request([0])])[0])
    _ask([follower], [follower.request(made[:2])])
    assert drafter.lm.pool.num_used == 5
    follower.close()
    follower.close()
    assert drafter.lm.pool.num_used == 0
    drafter.close(drafter.open())
    drafter.lm.pool.check()
    assert isinstance(drafter.open(), Following)


@pytest.mark.parametrize("rows_of_embedding", [VOCAB + 64, 51])
def test_a_vocabulary_padded_otherwise_than_the_targets_works(rows_of_embedding: int) -> None:
    """Same tokenizer of 50 ids, embeddings of other sizes: padding is never proposed, and never crashes a gather."""
    rng = random.Random(4)
    drafter, plain = _drafter(vocab_size=rows_of_embedding, num_tokens=50)
    follower = Follower(drafter, plain, [rng.randrange(50) for _ in range(6)])
    follower.tree = random_tree(rng, follower.tokens[-1], 8, vocab=50)
    answer = _ask([follower], [follower.request([0, 3, 7], width=50, rescore=True)])[0]
    assert all(token < 50 for found in answer.candidates.values() for token in found.tokens)
    # A width beyond what the tokenizer knows brings what there is.
    wide = drafter.propose([follower.request([0], width=400)])[0]
    assert isinstance(wide, Answer) and sorted(wide.candidates[0].tokens) == list(range(50))


def test_ids_the_drafter_has_no_row_for_have_no_probability() -> None:
    """A leaf with such an id is scored -inf instead of being looked up out of bounds."""
    drafter, plain = _drafter(vocab_size=51, num_tokens=50)
    follower = Follower(drafter, plain, [1, 2])
    padding, beyond = follower.tree.add(0, 50, -1.0, "small"), follower.tree.add(0, 60, -1.0, "small")
    answer = drafter.propose([follower.request([0], rescore=True)])[0]
    assert isinstance(answer, Answer)
    assert answer.rescored == {padding: -math.inf, beyond: -math.inf}


def test_two_hundred_random_rounds_end_with_empty_books() -> None:
    """Grow, rescore, commit, skip, join, leave in any order: the answers stay right and no row is lost."""
    rng = random.Random(5)
    drafter, plain = _drafter(num_rows=1200)
    followers: list[Follower] = []
    for number in range(200):
        while len(followers) < 3:
            followers.append(Follower(drafter, plain, _texts(rng, rng.randrange(1, 10))[0]))
        asked = rng.sample(followers, rng.randrange(1, 4))
        for _ in range(rng.randrange(0, 3)):
            for follower in asked:
                grow_tree(rng, follower.tree, len(follower.tree) + rng.randrange(0, 3), drafters=("small", "medium"))
            requests = [
                follower.request(
                    rng.sample(range(len(follower.tree)), min(2, len(follower.tree))),
                    width=3,
                    rescore=rng.random() < 0.4,
                )
                for follower in asked
            ]
            if number % 5 == 0:
                answers = _ask(asked, requests)
            else:
                answers = [answer for answer in drafter.propose(requests) if isinstance(answer, Answer)]
            for follower, answer in zip(asked, answers, strict=True):
                follower.attach(answer)
        for follower in followers:
            follower.commit(follower.tree.path(rng.randrange(len(follower.tree))), rng.randrange(VOCAB))
            assert len(follower.state.rows) < len(follower.tokens)
        assert drafter.lm.pool.num_used == sum(len(follower.state.rows) for follower in followers)
        for follower in list(followers):
            if len(follower.tokens) > 150 or rng.random() < 0.03:
                followers.remove(follower)
                follower.close()
    for follower in followers:
        follower.close()
    assert drafter.lm.pool.num_used == 0
    drafter.lm.pool.check()


def test_negative_control_a_row_kept_of_a_rejected_branch_is_noticed() -> None:
    """If the checks above overlooked that, they would prove nothing."""
    drafter, plain = _drafter()
    follower = Follower(drafter, plain, [1, 2, 3])
    _ask([follower], [follower.request([0])])
    right, wrong = follower.tree.add(0, 10, -1.0, "small"), follower.tree.add(0, 40, -1.0, "small")
    _ask([follower], [follower.request([right, wrong])])
    follower.state.node_rows[right], follower.state.node_rows[wrong] = (
        follower.state.node_rows[wrong],
        follower.state.node_rows[right],
    )
    follower.commit([right], 12)
    request = follower.request([0])
    with pytest.raises(AssertionError):
        follower.check(drafter.propose([request])[0], request.ask)


def test_a_truncated_target_drafts_as_its_layers_say() -> None:
    """The default medium drafter: shares modules with the target, has its own rows."""
    from models.truncated import truncate

    plain, target = pair(layers=4)
    plain.model.layers = nn.ModuleList([plain.model.layers[0], plain.model.layers[3]])
    plain.config.num_hidden_layers = 2
    drafter = CausalLMDrafter("medium", truncate(target, 1, 1, num_rows=64))
    follower = Follower(drafter, plain, [5, 6, 7])
    made = follower.attach(_ask([follower], [follower.request([0])])[0])
    _ask([follower], [follower.request(made[:3])])
    follower.commit([made[1]], 9)
    _ask([follower], [follower.request([0])])
    follower.close()
    assert drafter.lm.pool.num_used == 0 == target.pool.num_used
    assert isinstance(target, CausalLM)
