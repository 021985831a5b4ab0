"""A draft head as a drafter: what it proposes is what the head says along each path, whatever it was asked before."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import drafters.draft_head
import models.head_lm
from drafters.base import DraftRequest, Halt
from drafters.draft_head import HeadDrafter
from models import toy
from models.attention_plan import make_plan
from models.draft_head import DraftHead, HeadConfig
from models.head_lm import HeadLM, borrow_output
from models.packed import PackedLinear, fp32_packing_available, pack_linears
from tests.head_oracle import Listener, ask
from tests.plain_draft_head import PlainHead, target_states
from tests.plain_forward import grow_tree
from tests.toy_heads import Combine, plain_twin, toy_head
from tree.growth import Answer, Ask
from tree.tree import TokenTree

VOCAB = 41
COMBINE: tuple[Combine, ...] = ("add", "concat")


def toy_target() -> PreTrainedModel:
    return toy.tiny_causal_lm("llama", VOCAB, 3, layers=4)


def drafter_of(
    combine: Combine = "add", *, num_rows: int = 800, name: str = "medium", **options: Any
) -> tuple[HeadDrafter, PlainHead, PreTrainedModel]:
    target = toy_target()
    head = toy_head(target, combine, num_draft=options.pop("num_draft", 30), **options)
    plain = plain_twin(head, target)
    return HeadDrafter(name, HeadLM(head, target.get_input_embeddings().weight.detach(), num_rows=num_rows)), plain, target


class HeadListener(Listener):
    """Hidden states come from transformers."""

    def __init__(self, made: tuple[HeadDrafter, PlainHead, PreTrainedModel], tokens: list[int]) -> None:
        super().__init__(*made, tokens)

    def hear(self, pieces: int = 1) -> None:
        start, end = self.state.num_heard, len(self.tokens) - 1
        if end > start:
            states = target_states(self.target, self.tokens[:end], self.plain.layers)[start:]
            for piece in states.tensor_split(pieces):
                self.drafter.observe(self.state, self.state.num_heard, piece)

    def request(self, nodes: Sequence[int], width: int = 4, rescore: bool = False) -> DraftRequest:
        return DraftRequest(self.state, self.tokens, self.tree, Ask(tuple(nodes), width, rescore))


def texts(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("combine", COMBINE)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_candidates_are_the_heads_best_along_every_path(combine: Combine, num_layers: int) -> None:
    """A mixed batch whose trees grow over several asks, with a sequence that joins in the middle."""
    rng = random.Random(0)
    made = drafter_of(combine, num_layers=num_layers)
    listeners = [HeadListener(made, tokens) for tokens in texts(rng, 2, 9, 4)]
    frontier: list[list[int]] = [[0], [0], [0]]
    for step in range(3):
        active = [0, 1] if step == 0 else [0, 1, 2]
        requests = [listeners[i].request(frontier[i], width=rng.randrange(1, 5)) for i in active]
        answers = ask([listeners[i] for i in active], requests)
        for i, answer in zip(active, answers, strict=True):
            frontier[i] = rng.sample(new := listeners[i].attach(answer), min(2, len(new)))
    for listener in listeners:
        listener.drafter.close(listener.state)
        listener.drafter.close(listener.state)  # safe to call twice
    assert made[0].lm.pool.num_used == 0
    made[0].lm.pool.check()


@pytest.mark.parametrize("combine", COMBINE)
@pytest.mark.parametrize("seed", range(3))
def test_a_tree_of_others_is_entered_layer_by_layer_and_rescored(combine: Combine, seed: int) -> None:
    """A drafted entry needs the hidden state of the one above it: deep nodes cannot be entered in one pass."""
    rng = random.Random(seed)
    made = drafter_of(combine)
    listeners = [HeadListener(made, tokens) for tokens in texts(rng, 5, 2)]
    listeners[0].attach(ask(listeners[:1], [listeners[0].request([0], width=2)])[0])
    for listener in listeners:
        grow_tree(rng, listener.tree, 12, vocab=VOCAB, drafters=("small", "medium", "ngram"))
    requests = [listener.request(range(12), rescore=True) for listener in listeners]
    answers = ask(listeners, requests)
    outside = 0
    for listener, answer in zip(listeners, answers, strict=True):
        tree = listener.tree
        assert set(answer.rescored) == {node for node in range(1, 12) if tree.scorer[node] != "medium"}
        outside += sum(lp == -math.inf for lp in answer.rescored.values())
        for node, lp in answer.rescored.items():
            tree.rescore(node, lp, "medium")
        tree.refresh()
        tree.check()
    assert outside, "no token outside the draft vocabulary was met; the test shows nothing of them"
    before = made[0].lm.num_forwards
    for listener, answer in zip(listeners, made[0].propose(requests), strict=True):
        assert isinstance(answer, Answer) and not answer.rescored, "it owns every edge now"
        assert listener.state.log_probs
    assert made[0].lm.num_forwards == before, "asking again costs no pass"


@pytest.mark.parametrize("combine", COMBINE)
def test_after_a_commit_the_targets_states_replace_the_heads_own(combine: Combine) -> None:
    """Accepted: nothing, one node, a path of which it entered all, and one of which it entered a part."""
    rng = random.Random(4)
    made = drafter_of(combine)
    listeners = [HeadListener(made, tokens) for tokens in texts(rng, 6, 3)]
    for length in (0, 1, 3, 4):
        for listener in listeners:
            nodes, path = [0], []
            for _ in range(3):
                answer = ask([listener], [listener.request([nodes[-1]], width=2)])[0]
                nodes.append(listener.attach(answer)[-1])
                path.append(nodes[-1])
            path.append(listener.tree.add(path[-1], 7 if 7 not in listener.tree.children[path[-1]] else 8, -1.0, "small"))
            listener.commit(path[:length], rng.randrange(VOCAB))
            assert not listener.state.node_rows and not listener.state.log_probs
    ask(listeners, [listener.request([0]) for listener in listeners])
    assert made[0].lm.pool.num_used == sum(len(listener.tokens) - 1 for listener in listeners)


@pytest.mark.parametrize("combine", COMBINE)
def test_a_long_text_is_entered_in_pieces(combine: Combine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others must not wait for a long prompt; no candidates come before its end, and then the right ones."""
    monkeypatch.setattr(drafters.draft_head, "_CATCH_UP", 7)
    rng = random.Random(5)
    made = drafter_of(combine)
    long, exact, short = (HeadListener(made, tokens) for tokens in texts(rng, 20, 8, 3))
    requests = [listener.request([0]) for listener in (long, exact, short)]
    answers = made[0].propose(requests)
    assert answers[0] == Answer({}, {}), "7 of 19 entries"
    for listener, request, answer in zip((exact, short), requests[1:], answers[1:], strict=True):
        listener.check(answer, request.ask)
    assert made[0].propose(requests[:1]) == [Answer({}, {})]
    ask([long], requests[:1])
    assert len(long.state.rows) == 19 and not long.state.fused


def test_hidden_states_may_come_in_pieces_of_any_size() -> None:
    """Prompts reach the target in chunks, which need not be those in which the head enters the text."""
    rng = random.Random(6)
    made = drafter_of("add")
    listener = HeadListener(made, texts(rng, 1)[0])
    listener.tokens = [*listener.tokens, *texts(rng, 13)[0]]
    listener.tree = TokenTree(listener.tokens[-1])
    listener.hear(pieces=5)
    ask([listener], [listener.request([0])])


@pytest.mark.parametrize("combine", COMBINE)
def test_a_text_of_one_token_has_no_candidates_until_the_target_has_read_it(combine: Combine) -> None:
    """There is no hidden state to go on from; that is no reason to give the sequence up."""
    made = drafter_of(combine)
    listener = HeadListener(made, [5])
    assert made[0].propose([listener.request([0])]) == [Answer({}, {})]
    listener.commit([], 9)
    ask([listener], [listener.request([0])])


def test_it_stops_where_its_context_ends() -> None:
    """Positions beyond the trained ones would give nonsense at full price."""
    made = drafter_of("add", max_positions=8)
    listener = HeadListener(made, texts(random.Random(7), 7)[0])
    first = listener.attach(ask([listener], [listener.request([0])])[0])  # entries 0 to 5
    second = listener.attach(ask([listener], [listener.request([first[0]])])[0])  # position 6
    third = listener.attach(ask([listener], [listener.request([second[0]])])[0])  # position 7, the last
    assert made[0].propose([listener.request([third[0]])]) == [Halt("context")]


def test_it_stops_without_rows_and_others_go_on() -> None:
    """Rows are promised in the order of asking; what one cannot have must not fail the other."""
    made = drafter_of("add", num_rows=10)
    fits, not_any_more = (HeadListener(made, tokens) for tokens in texts(random.Random(8), 7, 9))
    requests = [fits.request([0]), not_any_more.request([0])]
    answers = made[0].propose(requests)
    fits.check(answers[0], requests[0].ask)
    assert answers[1] == Halt("rows")
    made[0].close(fits.state)
    made[0].close(not_any_more.state)
    assert made[0].lm.pool.num_used == 0


def test_it_stops_when_hidden_states_are_missing() -> None:
    """A target that captures nothing cannot be listened to; guessing would be worse than saying so."""
    made = drafter_of("add")
    listener = HeadListener(made, [1, 2, 3])
    listener.tokens = [*listener.tokens, 4]
    listener.tree = TokenTree(4)
    assert made[0].propose([listener.request([0])]) == [Halt("features")]


def test_a_pass_that_fails_takes_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no state knows of would be lost for good."""
    made = drafter_of("add")
    listener = HeadListener(made, [1, 2, 3])

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(made[0].lm, "forward", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        made[0].propose([listener.request([0])])
    assert made[0].lm.pool.num_used == 0


def test_nan_is_a_halt_not_a_candidate() -> None:
    """NaN scores must not reach the tree."""
    made = drafter_of("add")
    listener = HeadListener(made, [1, 2, 3])
    with torch.no_grad():
        made[0].lm.head.output.weight[3] = float("nan")
    assert made[0].propose([listener.request([0])]) == [Halt("nan")]


@pytest.mark.parametrize("flaw", ["feature", "position", "sibling"])
def test_the_oracle_sees_a_flaw(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a shifted feature, a shifted position, or a mask that shows a sibling must not pass."""
    made = drafter_of("add")
    rng = random.Random(9)
    listener = HeadListener(made, texts(rng, 6)[0])
    if flaw == "feature":
        listener.state.fused = [block.roll(1, dims=0) for block in listener.state.fused]
    nodes = listener.attach(ask([listener], [listener.request([0])])[0] if flaw != "feature" else Answer({}, {}))
    segment = drafters.draft_head.Segment

    def flawed(**given: Any) -> Any:
        if flaw == "position":
            given["positions"] = [position + 1 for position in given["positions"]]
        if flaw == "sibling":
            given["visible"] = torch.ones_like(given["visible"])
        return segment(**given)

    if flaw != "feature":
        monkeypatch.setattr(drafters.draft_head, "Segment", flawed)
    with pytest.raises(AssertionError):
        ask([listener], [listener.request(nodes[:2] or [0])])


def test_on_packed_layers_it_says_the_same() -> None:
    """On a CPU the head's layers are packed; a pass that enters a piece of a text and reads nothing off it must work too."""
    if not fp32_packing_available():
        pytest.skip("this build of torch does not pack float32 layers")
    made = drafter_of("concat")
    assert pack_linears(made[0].lm.head, PackedLinear)
    long, short = (HeadListener(made, tokens) for tokens in texts(random.Random(10), 600, 5))
    assert made[0].propose([long.request([0])]) == [Answer({}, {})]
    answer = ask([short], [short.request([0])])[0]
    ask([short], [short.request(short.attach(answer)[:2])])


def test_in_one_masked_attention_for_all_it_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout that an accelerator gets: one sequence's entries must not see another's."""

    def union(segments: Any, pool: Any, slots: Any, **_: Any) -> Any:
        return make_plan(segments, pool, slots, union=True)

    monkeypatch.setattr(models.head_lm, "make_plan", union)
    made = drafter_of("concat")
    listeners = [HeadListener(made, tokens) for tokens in texts(random.Random(11), 6, 4, 9)]
    answers = ask(listeners, [listener.request([0]) for listener in listeners])
    nodes = [listener.attach(answer)[:2] for listener, answer in zip(listeners, answers, strict=True)]
    ask(listeners, [listener.request(asked) for listener, asked in zip(listeners, nodes, strict=True)])


@pytest.mark.parametrize("combine", COMBINE)
def test_in_half_precision_it_says_nearly_the_same(combine: Combine) -> None:
    """Weights, features, embeddings and rows in bfloat16, as on an accelerator: no mixed types, no lost digits but those."""
    drafter, plain, target = drafter_of(combine)
    half = HeadLM(drafter.lm.head.to(torch.bfloat16), plain.embedding.bfloat16(), num_rows=100)
    drafter = HeadDrafter("medium", half)
    tokens = texts(random.Random(12), 40)[0]
    state, tree = drafter.open(), TokenTree(tokens[-1])
    drafter.observe(state, 0, target_states(target, tokens[:-1], plain.layers).bfloat16())
    for node in (0, 1):
        answer = drafter.propose([DraftRequest(state, tokens, tree, Ask((node,), 3))])[0]
        assert isinstance(answer, Answer)
        found = answer.candidates[node]
        row = plain.row(target, tokens, tree.path_tokens(node))
        assert found.lps == pytest.approx([row[token] for token in found.tokens], abs=0.25)
        tree.add(node, found.tokens[0], found.lps[0], "medium")


def test_borrowed_output_rows_are_those_of_the_id_map() -> None:
    """A head without output rows of its own reads out with the target's, in the order of its draft ids."""
    target = toy_target()
    head = toy_head(target, "add", num_draft=9)
    rows = target.get_output_embeddings().weight
    borrow_output(head, rows)
    assert torch.equal(head.output.weight, rows[head.id_map])
    with pytest.raises(ValueError, match="hidden size is 32, the target's output rows have 7"):
        borrow_output(head, torch.zeros(VOCAB, 7))


def test_embeddings_of_another_width_are_refused() -> None:
    """They would fail in the first pass otherwise, in front of a user."""
    head = toy_head(toy_target(), "concat")
    with pytest.raises(ValueError, match="embeddings of size 32, these have size 16"):
        HeadLM(head, torch.zeros(VOCAB, 16), num_rows=8)


def test_a_config_survives_json_and_unknown_keys_do_not() -> None:
    """A typo in a stored config must not fall back to a default in silence."""
    config = toy_head(toy_target(), "concat", norm_before_residual=True).config
    assert HeadConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="unknown key 'num_layer'"):
        HeadConfig.from_dict({**config.to_dict(), "num_layer": 2})
    with pytest.raises(ValueError, match="lacks a value"):
        HeadConfig.from_dict({"target_layers": [1]})


def test_rotary_frequencies_stay_exact_in_half_precision() -> None:
    """Rounded to bfloat16 they are off by up to 0.2 %: of the angles at position 1000, half a radian and more."""
    head: DraftHead = toy_head(toy_target(), "add")
    exact = head.rotary.inv_freq.clone()
    assert not torch.equal(exact.bfloat16().float(), exact), "nothing to round"
    head.to(torch.bfloat16)
    assert head.norm.dtype == torch.bfloat16
    assert torch.equal(head.rotary.inv_freq, exact)
