"""A head that looks at the target's own cache: what it proposes is what the oracle computes anew along each path.

The target's cache is filled by our own forward, as in the engine; the oracle takes hidden states, keys and values from
transformers' forward of an untouched twin.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import drafters.tail
from drafters.base import DraftRequest, Halt
from drafters.tail import TailDrafter
from models import tail_lm, toy
from models.attention import Segment
from models.causal_lm import CausalLM
from models.draft_head import DraftHead
from models.kv_cache import RowList, RowPool
from models.tail_lm import TailLM
from tests.head_oracle import LP_TOLERANCE, Listener, ask
from tests.plain_draft_head import PlainHead
from tests.plain_forward import grow_tree
from tests.toy_heads import forgetful_below, knowing_tail, plain_twin, tail_head
from tree.growth import Answer, Ask
from tree.tree import TokenTree

VOCAB = 41


class Setting:
    """A target behind `CausalLM`, its untouched twin, and a tail head drafting on its cache."""

    def __init__(self, *, num_rows: int = 400, made: tuple[PreTrainedModel, DraftHead] | None = None, **options: Any) -> None:
        self.target = made[0] if made else toy.tiny_causal_lm("llama", VOCAB, 3, layers=4)
        head = made[1] if made else tail_head(self.target, num_draft=options.pop("num_draft", 30), **options)
        self.plain: PlainHead = plain_twin(head, self.target)
        served = toy.tiny_causal_lm("llama", VOCAB, 3, layers=4)
        served.load_state_dict(self.target.state_dict())
        self.served = CausalLM(served, num_rows=600, capture=head.config.target_layers)
        embedding = served.get_input_embeddings().weight.detach()
        self.lm = TailLM(head, embedding, self.served.pool, num_rows=num_rows)
        self.drafter = TailDrafter("medium", self.lm)


class TailListener(Listener):
    """Has rows in the target's cache. The target is fed all tokens but the last, in two pieces; what it thought is shown."""

    def __init__(self, setting: Setting, tokens: list[int]) -> None:
        self.setting, self.rows = setting, RowList()
        super().__init__(setting.drafter, setting.plain, setting.target, tokens)

    def hear(self) -> None:
        start, end = len(self.rows), len(self.tokens) - 1
        for piece in np.array_split(np.arange(start, end), 2):
            if not len(piece):
                continue
            rows = self.setting.served.pool.allocate(2 * len(piece))
            self.setting.served.pool.release(rows[::2])  # rows of a text need not be neighbors, nor in order
            rows = rows[:0:-2]
            tokens = self.tokens[piece[0] : piece[-1] + 1]
            scores = self.setting.served.forward([Segment(tokens, piece.tolist(), self.rows.view(), rows, ())])
            self.rows.extend(rows)
            hidden = torch.stack([scores.hidden[layer] for layer in self.drafter.layers], dim=1)
            self.drafter.observe(self.state, int(piece[0]), hidden)

    def request(self, nodes: Sequence[int], width: int = 4, rescore: bool = False) -> DraftRequest:
        return DraftRequest(self.state, self.tokens, self.tree, Ask(tuple(nodes), width, rescore), target_rows=self.rows.view())


def texts(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def grown_over_several_asks(setting: Setting, rng: random.Random) -> list[TailListener]:
    """Three sequences whose trees grow over three asks, one of which joins in the middle; every answer checked."""
    listeners = [TailListener(setting, tokens) for tokens in texts(rng, 2, 9, 4)]
    frontier: list[list[int]] = [[0], [0], [0]]
    for step in range(3):
        active = [0, 1] if step == 0 else [0, 1, 2]
        before = setting.lm.num_forwards
        requests = [listeners[i].request(frontier[i], width=rng.randrange(2, 5)) for i in active]
        answers = ask([listeners[i] for i in active], requests)
        assert setting.lm.num_forwards == before + 1, "one pass for all sequences"
        for i, answer in zip(active, answers, strict=True):
            frontier[i] = rng.sample(new := listeners[i].attach(answer), min(2, len(new)))
    return listeners


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2},
        {"num_layers": 3, "num_draft": VOCAB},
        {"norm_fed_back": False, "project_fed_back": False},
        {"norm_features": False, "norm_fed_back": False},
    ],
    ids=str,
)
def test_candidates_are_the_heads_best_along_every_path(options: dict[str, Any]) -> None:
    """Heads of one to three layers, each on its own layer of the target's cache; four query heads share two key heads."""
    setting = Setting(**options)
    for listener in grown_over_several_asks(setting, random.Random(0)):
        setting.drafter.close(listener.state)
        setting.drafter.close(listener.state)  # safe to call twice
    assert setting.lm.pool.num_used == 0
    setting.lm.pool.check()


def test_rows_to_draw_from_are_the_heads_by_the_targets_ids() -> None:
    """A tree that is drawn needs the whole distribution; ids that the head has no entry for are never drawn."""
    setting = Setting()
    listener = TailListener(setting, [1, 2, 3])
    request = replace(listener.request([0]), ask=Ask((0,), 2, wants_rows=True))
    answer = setting.drafter.propose([request])[0]
    assert isinstance(answer, Answer)
    row = setting.plain.row(setting.target, listener.tokens)
    want = torch.tensor([math.exp(row[token]) if token in row else 0.0 for token in range(VOCAB)])
    assert answer.rows[0].shape == (VOCAB,) and torch.allclose(answer.rows[0].float(), want, atol=LP_TOLERANCE)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_a_tree_of_others_is_entered_layer_by_layer_and_rescored(num_layers: int, seed: int) -> None:
    """A drafted entry needs the hidden state of the one above it: deep nodes cannot be entered in one pass."""
    rng = random.Random(seed)
    setting = Setting(num_layers=num_layers)
    listeners = [TailListener(setting, tokens) for tokens in texts(rng, 5, 2)]
    listeners[0].attach(ask(listeners[:1], [listeners[0].request([0], width=2)])[0])
    for listener in listeners:
        grow_tree(rng, listener.tree, 12, vocab=VOCAB, drafters=("small", "medium", "ngram"))
    requests = [listener.request(range(12), rescore=True) for listener in listeners]
    before = setting.lm.num_forwards
    answers = ask(listeners, requests)
    outside, passes = 0, []
    for index, (listener, request, answer) in enumerate(zip(listeners, requests, answers, strict=True)):
        tree = listener.tree
        others = {node for node in range(1, 12) if tree.scorer[node] != "medium"}
        assert set(answer.rescored) == others
        deepest = max(tree.depth[node] for node in (*request.ask.nodes, *(tree.parent[node] for node in others)))
        passes.append(deepest + index)  # only the second sequence's root is still to be entered
        outside += sum(lp == -math.inf for lp in answer.rescored.values())
        for node, lp in answer.rescored.items():
            tree.rescore(node, lp, "medium")
        tree.refresh()
        tree.check()
    assert setting.lm.num_forwards - before == max(passes) > 2, "one pass per layer"
    assert outside, "no token outside the draft vocabulary was met; the test shows nothing of them"
    before = setting.lm.num_forwards
    for answer in setting.drafter.propose(requests):
        assert isinstance(answer, Answer) and not answer.rescored, "it owns every edge now"
    assert setting.lm.num_forwards == before, "asking again costs no pass"


def test_after_a_commit_the_targets_cache_takes_the_place_of_its_entries() -> None:
    """Steps in which nothing, one node, all it entered, and more than it entered is accepted; its rows all come back."""
    rng = random.Random(4)
    setting = Setting(num_layers=2)
    listeners = [TailListener(setting, tokens) for tokens in texts(rng, 6, 3)]
    for length in (0, 1, 3, 4):
        for listener in listeners:
            node, path = 0, []
            for _ in range(3):
                answer = ask([listener], [listener.request([node], width=2)])[0]
                node = listener.attach(answer)[-1]
                path.append(node)
            path.append(listener.tree.add(node, 7, -1.0, "small"))
            listener.commit(path[:length], rng.randrange(VOCAB))
            assert not listener.state.rows and not listener.state.log_probs and not listener.state.hidden
    assert setting.lm.pool.num_used == 0
    ask(listeners, [listener.request([0]) for listener in listeners])
    assert setting.lm.pool.num_used == 2, "the two roots, and nothing of the text"


def test_a_text_of_one_token_has_no_candidates_until_the_target_has_read_it() -> None:
    """There is no hidden state to go on from; that is no reason to give the sequence up, nor to let others wait."""
    setting = Setting()
    short, other = TailListener(setting, [5]), TailListener(setting, [3, 4])
    answers = setting.drafter.propose([short.request([0]), other.request([0])])
    assert answers[0] == Answer({}, {})
    other.check(answers[1], Ask((0,), 4))
    short.commit([], 9)
    ask([short], [short.request([0])])


def test_it_stops_where_its_context_ends() -> None:
    """Positions beyond those trained on would give nonsense at full price. The last one, 7, is still used."""
    setting = Setting(max_positions=8)
    listener = TailListener(setting, texts(random.Random(7), 6)[0])  # the root stands at position 5
    node = 0
    for _ in range(3):
        node = listener.attach(ask([listener], [listener.request([node])])[0])[0]
    assert setting.drafter.propose([listener.request([node])]) == [Halt("context")]


@pytest.mark.parametrize("entered", [0, 1])
def test_it_stops_without_rows_and_others_go_on(entered: int) -> None:
    """Rows are promised in the order of asking; what one cannot have must not fail the other."""
    setting = Setting(num_rows=1 + 2 * entered)
    fits, not_any_more = (TailListener(setting, tokens) for tokens in texts(random.Random(8), 7, 9))
    nodes = [0]
    if entered:  # two rows for the roots, one left, one node each
        nodes = [1]
        for listener in (fits, not_any_more):
            listener.attach(ask([listener], [listener.request([0])])[0])
    requests = [fits.request(nodes), not_any_more.request(nodes)]
    answers = setting.drafter.propose(requests)
    fits.check(answers[0], requests[0].ask)
    assert answers[1] == Halt("rows")
    for listener in (fits, not_any_more):
        setting.drafter.close(listener.state)
    assert setting.lm.pool.num_used == 0
    setting.lm.pool.check()


@pytest.mark.parametrize("missing", ["hidden", "rows", "both"])
def test_it_stops_when_it_does_not_know_what_the_target_has_read(missing: str) -> None:
    """A hidden state of the wrong token, or a cache that lacks one, gives a wrong draft and no error: say so instead."""
    setting = Setting()
    listener = TailListener(setting, [1, 2, 3])
    rows = listener.rows.view()[: -1 if missing == "rows" else None]
    tokens = [1, 2, 3] if missing == "rows" else [1, 2, 3, 4]
    if missing == "hidden":
        rows = np.append(rows, setting.served.pool.allocate(1))
    request = DraftRequest(listener.state, tokens, TokenTree(tokens[-1]), Ask((0,), 2), target_rows=rows)
    assert setting.drafter.propose([request]) == [Halt("features")]
    assert setting.lm.pool.num_used == 0


def test_hidden_states_out_of_order_are_a_fault() -> None:
    """The newest one counts, so a piece that is shown twice or left out would go unnoticed otherwise."""
    setting = Setting()
    listener = TailListener(setting, [1, 2, 3])
    for start in (1, 3):
        with pytest.raises(AssertionError, match="expected 2"):
            setting.drafter.observe(listener.state, start, torch.zeros(1, len(setting.drafter.layers), 32))


def test_nan_is_a_halt_not_a_candidate() -> None:
    """NaN scores must not reach the tree."""
    setting = Setting()
    listener = TailListener(setting, [1, 2, 3])
    with torch.no_grad():
        setting.lm.head.output.weight[3] = float("nan")
    assert setting.drafter.propose([listener.request([0])]) == [Halt("nan")]
    setting.drafter.close(listener.state)
    assert setting.lm.pool.num_used == 0


@pytest.mark.parametrize("after", [0, 1])
def test_a_pass_that_fails_takes_no_rows(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no state knows of would be lost for good; those of earlier passes stay known."""
    setting = Setting()
    listener = TailListener(setting, [1, 2, 3])
    node = listener.attach(ask([listener], [listener.request([0])])[0])[0] if after else 0

    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(setting.lm, "forward", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        setting.drafter.propose([listener.request([node])])
    assert setting.lm.pool.num_used == after
    setting.drafter.close(listener.state)
    assert setting.lm.pool.num_used == 0


class Accelerator(str):
    """Names the CPU to torch, and something else to whoever asks for its type."""

    type = "accelerator"


def test_in_one_masked_attention_for_all_it_says_the_same() -> None:
    """The layout that an accelerator gets: one sequence's entries must not see another's, nor its text."""
    setting = Setting(num_layers=2)
    setting.lm.device = Accelerator("cpu")  # type: ignore[assignment]
    rng = random.Random(11)
    listeners = grown_over_several_asks(setting, rng)
    for listener in listeners:
        grow_tree(rng, listener.tree, len(listener.tree) + 4, vocab=VOCAB, drafters=("small",))
    ask(listeners, [listener.request([len(listener.tree) - 1], rescore=True) for listener in listeners])


@pytest.mark.parametrize("of", ["their_rows", "our_rows"])
def test_the_oracle_sees_a_flaw_in_the_masked_attention(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one row of another sequence's text, or of its nodes, in everybody's sight."""
    setting = Setting()
    setting.lm.device = Accelerator("cpu")  # type: ignore[assignment]
    union = tail_lm._union

    def leaky(spans: Sequence[Any]) -> Any:
        span = union(spans)
        span.mask[:, len(spans[0].theirs) - 1 if of == "their_rows" else len(span.theirs)] = True
        return span

    monkeypatch.setattr(tail_lm, "_union", leaky)
    listeners = [TailListener(setting, tokens) for tokens in texts(random.Random(12), 6, 4)]
    with pytest.raises(AssertionError):
        ask(listeners, [listener.request([0]) for listener in listeners])


@pytest.mark.parametrize(
    "flaw", ["feature", "position", "sibling", "stranger", "one row less", "one row more", "another copy"]
)
def test_the_oracle_sees_a_flaw(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each of the faults that leave the text right and only make the head worse must not pass."""
    setting = Setting()
    listener = TailListener(setting, texts(random.Random(9), 6)[0])
    nodes = listener.attach(ask([listener], [listener.request([0])])[0])[:2]
    if flaw in ("feature", "one row more"):  # faults of the root's entry
        setting.drafter.commit(listener.state, listener.tokens, None, ())
        nodes = [0]
    if flaw == "feature":
        hidden = torch.zeros(1, len(setting.drafter.layers), 32)
        hidden[0] = torch.randn(len(setting.drafter.layers), 32, generator=torch.Generator().manual_seed(0))
        listener.state.heard = hidden
    sprout = drafters.tail.Sprout

    def flawed(**given: Any) -> Any:
        if flaw == "position":
            given["positions"] = [position + 1 for position in given["positions"]]
        elif flaw == "sibling":
            given["visible"] = torch.ones_like(given["visible"])
        elif flaw == "stranger":
            given["fused"] = given["fused"].flip(0) + 1.0
        elif flaw == "one row less":
            given["prefix"], given["beside"] = given["prefix"][1:], None
        elif flaw == "one row more":
            given["prefix"], given["beside"] = np.append(given["prefix"], given["prefix"][-1]), None
        elif flaw == "another copy":
            given["beside"].values[:, :, 0] += 1.0
        return sprout(**given)

    monkeypatch.setattr(drafters.tail, "Sprout", flawed)
    with pytest.raises(AssertionError):
        ask([listener], [listener.request(nodes)])


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_head_that_is_the_targets_last_layers_says_what_the_target_says(num_layers: int) -> None:
    """No oracle of ours needed: where the guessed input is right, the drafted rows are the target's own, at every depth."""
    target = forgetful_below(num_layers, vocab=VOCAB)
    setting = Setting(made=(target, knowing_tail(target, num_layers)))
    listener = TailListener(setting, texts(random.Random(13), 8)[0])
    grow_tree(random.Random(13), listener.tree, 8, vocab=VOCAB)
    setting.drafter.propose([listener.request(range(8))])
    target.config._attn_implementation = "eager"
    for node, found in listener.state.log_probs.items():
        whole = [*listener.tokens, *listener.tree.path_tokens(node)]
        with torch.inference_mode():
            want = target(torch.tensor([whole])).logits[0, -1].log_softmax(dim=-1)[setting.lm.head.id_map]
        assert torch.allclose(found, want, atol=LP_TOLERANCE), f"node {node}"
    assert len(listener.state.log_probs) == 8


def test_in_half_precision_it_says_nearly_the_same() -> None:
    """Weights, features, embeddings and both caches in bfloat16, as on an accelerator: no mixed types."""
    exact = Setting()
    text = texts(random.Random(14), 30)[0]
    served = CausalLM(
        toy.tiny_causal_lm("llama", VOCAB, 3, layers=4).bfloat16(), num_rows=100, capture=exact.lm.config.target_layers
    )
    embedding = served.model.get_input_embeddings().weight.detach()
    drafter = TailDrafter("medium", TailLM(exact.lm.head.to(torch.bfloat16), embedding, served.pool, num_rows=10))
    rows = served.pool.allocate(29)
    scores = served.forward([Segment(text[:-1], range(29), np.empty(0, dtype=np.int64), rows, ())])
    state, tree = drafter.open(), TokenTree(text[-1])
    drafter.observe(state, 0, torch.stack([scores.hidden[layer] for layer in drafter.layers], dim=1))
    for node in (0, 1):
        answer = drafter.propose([DraftRequest(state, text, tree, Ask((node,), 3), target_rows=np.array(rows))])[0]
        assert isinstance(answer, Answer)
        found = answer.candidates[node]
        row = exact.plain.row(exact.target, text, tree.path_tokens(node))
        assert found.lps == pytest.approx([row[token] for token in found.tokens], abs=0.3)
        tree.add(node, found.tokens[0], found.lps[0], "medium")


@pytest.mark.parametrize("shape", [(4, 1, 8), (4, 2, 16), (1, 2, 8)], ids=["kv heads", "head size", "layers"])
def test_a_head_of_another_shape_than_the_targets_cache_is_refused(shape: tuple[int, int, int]) -> None:
    """It would fail in the first pass otherwise, in front of a user."""
    head = tail_head(toy.tiny_causal_lm("llama", VOCAB, 3, layers=4), num_layers=2)
    with pytest.raises(ValueError, match="not shaped like the target's"):
        TailLM(head, torch.zeros(VOCAB, 32), RowPool(shape[0], 8, *shape[1:]), num_rows=8)


def test_the_copy_of_a_text_grows_with_it() -> None:
    """Rows come in pieces, scattered and far more than there was room for at first; the copy must be theirs, in order."""
    rng = random.Random(4)
    pool = RowPool(4, 4000, 2, 3)
    pool.keys.copy_(torch.randn(pool.keys.shape, generator=torch.Generator().manual_seed(1)))
    pool.values.copy_(torch.randn(pool.values.shape, generator=torch.Generator().manual_seed(2)))
    rows, beside = np.array(rng.sample(range(4000), 3000)), tail_lm.Beside()
    for length in (1, 2, 40, 1500, 1501, 3000):
        beside.catch_up(pool, 1, rows[:length], room=7)
        assert beside.length == length and beside.keys.shape[2] >= length + 7
        for layer in range(3):
            assert torch.equal(beside.keys[layer, :, :length], pool.keys[1 + layer][rows[:length]].transpose(0, 1))
            assert torch.equal(beside.values[layer, :, :length], pool.values[1 + layer][rows[:length]].transpose(0, 1))
