"""Training-time test means what it says: what a head is asked in training is what it computes when it drafts.

The two sides share the head's weights and nothing else that matters: a student sees whole texts at once, in unrolled steps
over chains; a drafter sees one text that ends somewhere and a tree, and fills a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import distill.students
from distill.batches import Batch, Texts
from distill.beginnings import begin_head
from distill.chains import ChainAttention
from distill.dialogue import Kind
from distill.loss import agreement
from distill.shards import Shard, shard_path, write
from distill.students import HeadStudent, Prediction
from drafters.base import DraftRequest
from drafters.draft_head import HeadDrafter
from drafters.tail import TailDrafter
from models import toy
from models.attention import Segment
from models.causal_lm import CausalLM
from models.draft_head import DraftHead, HeadLayer
from models.head_lm import HeadLM
from models.tail_lm import TailLM
from tests.plain_draft_head import target_states
from tests.toy_heads import forgetful_below, plain_twin, tail_head, targets_layers, toy_head
from tree.growth import Answer, Ask
from tree.tree import TokenTree

VOCAB, LENGTH, TEXTS, DEPTHS = 41, 16, 3, 3
TOLERANCE = 2e-4
Key = tuple[int, int, int]  # text, the last token that the head is given, depth
Said = dict[Key, torch.Tensor]


def toy_target() -> PreTrainedModel:
    return toy.tiny_causal_lm("llama", VOCAB, 3, layers=4)


def batch_of(target: PreTrainedModel, layers: Sequence[int], *, first_answer: int = 0, seed: int = 0) -> Batch:
    """Random texts, all answers from `first_answer` on. `final` holds where it belongs instead of a hidden state."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (TEXTS, LENGTH), generator=generator)
    features = torch.stack([target_states(target, text, layers) for text in tokens.tolist()]).clone()
    with torch.inference_mode():
        top = target(tokens).logits.log_softmax(dim=-1).topk(32)
    at = torch.cartesian_prod(torch.arange(TEXTS), torch.arange(LENGTH)).view(TEXTS, LENGTH, 2)
    return Batch(
        tokens=tokens,
        is_answer=(torch.arange(LENGTH) >= first_answer).expand(TEXTS, -1),
        top_ids=top.indices.clone(),
        top_lps=top.values.clone(),
        features=features,
        final=at.float(),
    )


def student_of(head: DraftHead, target: PreTrainedModel, **options: Any) -> HeadStudent:
    tail = targets_layers(target, head.config) if head.config.context == "target" else ()
    embedding = target.get_input_embeddings().weight.detach()
    return HeadStudent(head, embedding, tail=tail, **{"depths": DEPTHS, "share": 1.0, "deeper": 1.0, **options})


def in_training(student: HeadStudent, batch: Batch, seed: int = 0) -> tuple[Said, Said]:
    """Log-probabilities and hidden states behind the last norm, of everything the student was asked."""
    predictions: list[Prediction] = student.predict(batch, torch.Generator().manual_seed(seed))
    assert [prediction.depth for prediction in predictions] == list(range(student.depths))
    log_probs, hidden = {}, {}
    for found in predictions:
        for index, (text, place) in enumerate(found.teaching.final.long().tolist()):
            key = (text, place, found.depth)
            assert key not in log_probs, "asked twice"
            log_probs[key] = found.logits[index].log_softmax(dim=-1)
            hidden[key] = found.hidden[index]
    return log_probs, hidden


def at_drafting(head: DraftHead, target: PreTrainedModel, batch: Batch) -> tuple[Said, Said]:
    """Log-probabilities and what is fed back, from a drafter that drafts the true text after every beginning of it."""
    served = toy.tiny_causal_lm("llama", VOCAB, 3, layers=4)
    served.load_state_dict(target.state_dict())
    lm = CausalLM(served, num_rows=TEXTS * LENGTH)
    embedding = served.get_input_embeddings().weight.detach()
    drafter: TailDrafter | HeadDrafter = (
        TailDrafter("medium", TailLM(head, embedding, lm.pool, num_rows=8))
        if head.config.context == "target"
        else HeadDrafter("medium", HeadLM(head, embedding, num_rows=LENGTH + 8))
    )
    log_probs, hidden = {}, {}
    for text, tokens in enumerate(batch.tokens.tolist()):
        rows = np.array(lm.pool.allocate(LENGTH))
        lm.forward([Segment(tokens, range(LENGTH), np.empty(0, dtype=np.int64), rows.tolist(), ())])
        for root in range(1, LENGTH):
            state, tree = drafter.open(), TokenTree(tokens[root])
            for depth, token in enumerate(tokens[root + 1 : root + DEPTHS]):
                tree.add(depth, token, -1.0, "text")
            drafter.observe(state, 0, batch.features[text, :root])
            ask = Ask(tuple(range(len(tree))), 1)
            answer = drafter.propose([DraftRequest(state, tokens[: root + 1], tree, ask, target_rows=rows[:root])])[0]
            assert isinstance(answer, Answer), answer
            for node in range(len(tree)):
                log_probs[text, root + node, node] = state.log_probs[node]
                hidden[text, root + node, node] = state.hidden[node]
            drafter.close(state)
    return log_probs, hidden


def check_alike(trained: Said, drafted: Said, wanted: set[Key]) -> None:
    assert set(trained) == wanted, f"asked at {sorted(set(trained) ^ wanted)[:3]} and not, or the other way"
    gaps = {key: float((trained[key] - drafted[key]).abs().max()) for key in trained}
    worst = max(gaps, key=gaps.__getitem__)
    assert gaps[worst] < TOLERANCE, f"text {worst[0]}, token {worst[1]}, depth {worst[2]}: off by {gaps[worst]}"


def all_keys(first: int = 1) -> set[Key]:
    """Every place from which all depths have a token to predict; the first known token is number `first` or later."""
    last = LENGTH - 1 - DEPTHS
    places = itertools.product(range(TEXTS), range(last), range(DEPTHS))
    return {(text, start + 1 + depth, depth) for text, start, depth in places if start + 1 + depth >= first}


def tail(**options: Any) -> Callable[[PreTrainedModel], DraftHead]:
    return lambda target: tail_head(target, num_draft=30, **options)


def own(combine: Any, **options: Any) -> Callable[[PreTrainedModel], DraftHead]:
    return lambda target: toy_head(target, combine, num_draft=30, **options)


HEADS = {
    "tail": tail(),
    "tail of 2": tail(num_layers=2),
    "tail, raw state fed back": tail(norm_fed_back=False, project_fed_back=False),
    "own, add": own("add"),
    "own, add, 2 layers, projected": own("add", num_layers=2, norm_fed_back=True, project_fed_back=True),
    "own, concat": own("concat"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_training_asks_what_drafting_computes(kind: str) -> None:
    """At every place and depth: the same log-probabilities, and the same thing fed back to the next depth."""
    target = toy_target()
    head = HEADS[kind](target)
    batch = batch_of(target, head.config.target_layers)
    log_probs, hidden = in_training(student_of(head, target), batch)
    drafted, fed_back = at_drafting(head, target, batch)
    check_alike(log_probs, drafted, all_keys())
    if head.config.norm_fed_back:  # what is behind the last norm is all that training shows of a hidden state
        ours = {key: state if head.back_proj is None else head.back_proj(state) for key, state in hidden.items()}
        check_alike(ours, fed_back, all_keys())


@pytest.mark.parametrize("kind", ["tail of 2", "own, add"])
@pytest.mark.parametrize("seed", range(3))
def test_places_that_are_left_out_change_nothing_for_the_others(kind: str, seed: int) -> None:
    """Shares are a matter of cost: wherever a head is still asked, it is asked the same. Only answers teach."""
    target = toy_target()
    head = HEADS[kind](target)
    batch = batch_of(target, head.config.target_layers, first_answer=5)
    student = student_of(head, target, share=0.7, deeper=0.5)
    log_probs, _ = in_training(student, batch, seed)
    drafted, _ = at_drafting(head, target, batch)
    assert set(log_probs) < all_keys(first=4), "the token after the last known one must be an answer"
    check_alike(log_probs, drafted, set(log_probs))
    count = int((LENGTH - 1 - DEPTHS) * 0.7)
    # Tokens 5 to 13 are answers that depth 0 may predict: 9 places, so none of the 8 chosen is wasted.
    per_depth = [sum(key[2] == depth for key in log_probs) for depth in range(DEPTHS)]
    assert per_depth == [TEXTS * count, TEXTS * (count // 2), TEXTS * (count // 2)]
    starts = [{(text, known - depth) for text, known, depth in log_probs if depth == d} for d in range(DEPTHS)]
    assert starts[2] == starts[1] < starts[0], "a chain goes on from a place at which it began"


FLAWS = ("starts early", "starts late", "position", "feature", "token", "stale state", "other chains")


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("kind", ["tail", "own, add"])
def test_training_that_is_off_by_one_is_seen(kind: str, flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a student that looks one token too far, or not far enough, trains a head for another task."""
    target = toy_target()
    head = HEADS[kind](target)
    batch = batch_of(target, head.config.target_layers)
    student = student_of(head, target, deeper=0.5)
    shift = {"starts early": -1, "starts late": 1}.get(flaw, 0)

    class Flawed(ChainAttention):
        def begin_step(self, starts: torch.Tensor | None) -> None:
            super().begin_step(None if starts is None else starts + shift)

        def keep(self, chosen: torch.Tensor) -> torch.Tensor:
            true = super().keep(chosen) - shift
            if flaw == "other chains":
                self._drafted = [[(k.roll(1, dims=2), v.roll(1, dims=2)) for k, v in layer] for layer in self._drafted]
                assert self._starts is not None
                self._starts = self._starts.roll(1, dims=1)
            return true

    monkeypatch.setattr(distill.students, "ChainAttention", Flawed)
    extend, fuse, feed_back = head.extend, head.fuse, head.feed_back
    if flaw == "position":
        monkeypatch.setattr(head, "extend", lambda x, e, at, attend: extend(x, e, at + (x.shape[1] < LENGTH - 1), attend))
    elif flaw == "feature":
        monkeypatch.setattr(head, "fuse", lambda features: fuse(features.roll(1, dims=1)))
    elif flaw == "token":
        student.embedding = student.embedding.roll(1, dims=0)
    elif flaw == "stale state":
        monkeypatch.setattr(head, "feed_back", lambda hidden: feed_back(hidden.roll(1, dims=1)))
    log_probs, _ = in_training(student, batch)
    monkeypatch.undo()
    drafted, _ = at_drafting(head, target, batch)
    with pytest.raises(AssertionError, match="off by"):
        check_alike(log_probs, drafted, set(log_probs))


def plain_chain(
    q: torch.Tensor,
    true: tuple[torch.Tensor, torch.Tensor],
    drafted: Sequence[tuple[torch.Tensor, torch.Tensor]],
    starts: Sequence[Sequence[int]],
) -> torch.Tensor:
    """One softmax per text, head and chain, over a list: true entries up to the start, then the chain's own."""
    texts, heads, count, dim = q.shape
    output = torch.zeros(texts, count, heads, dim, dtype=torch.float64)
    for text, head, chain in itertools.product(range(texts), range(heads), range(count)):
        shared = head * true[0].shape[1] // heads
        seen = [(true[0][text, shared, t], true[1][text, shared, t]) for t in range(starts[text][chain] + 1)]
        seen += [(k[text, shared, chain], v[text, shared, chain]) for k, v in drafted]
        scores = torch.stack([q[text, head, chain].double() @ key.double() for key, _ in seen]) / dim**0.5
        for weight, (_, value) in zip(scores.softmax(dim=0), seen, strict=True):
            output[text, chain, head] += weight * value.double()
    return output.flatten(2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("looks", [False, True])
def test_chains_see_the_true_entries_up_to_their_start_and_their_own(heads: int, kv_heads: int, looks: bool) -> None:
    """Two layers, three unrolled steps, chains dropped after the first; and a start moved by one is another result."""
    generator = torch.Generator().manual_seed(heads)
    texts, length, dim = 2, 9, 6

    def draw(count: int, how_many: int) -> torch.Tensor:
        return torch.randn(texts, how_many, count, dim, generator=generator)

    attention = ChainAttention(2)
    true = [(draw(length, kv_heads), draw(length, kv_heads)) for _ in range(2)]
    causal = [list(range(length))] * texts
    for layer, pair in enumerate(true):
        if looks:
            attention.look_at(layer, *pair)
        else:
            attention.begin_step(None)
            q = draw(length, heads)
            assert torch.allclose(attention(layer, q, *pair).double(), plain_chain(q, pair, (), causal), atol=1e-5)
    starts = torch.tensor([[0, 2, 3, 5, 8], [1, 2, 4, 6, 7]])
    drafted: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    attention.begin_step(starts)
    for step in range(3):
        if step == 1:
            chosen = torch.tensor([[0, 3, 4], [1, 2, 4]])
            starts = attention.keep(chosen)
            assert starts.tolist() == [[0, 5, 8], [2, 4, 7]]
            pick = [torch.stack([x[text, :, chosen[text]] for text in range(texts)]) for layer in drafted for x in layer[0]]
            drafted = [[(pick[0], pick[1])], [(pick[2], pick[3])]]
        for layer in range(2):
            q = draw(starts.shape[1], heads)
            drafted[layer].append((draw(starts.shape[1], kv_heads), draw(starts.shape[1], kv_heads)))
            found = attention(layer, q, *drafted[layer][-1]).double()
            assert torch.allclose(found, plain_chain(q, true[layer], drafted[layer], starts.tolist()), atol=1e-5)
            wrong = plain_chain(q, true[layer], drafted[layer], (starts - 1).tolist())
            assert ((found - wrong).abs().amax(dim=-1) > 1e-3).all(), "every chain must notice a start that is off by one"


def test_chains_need_their_true_entries_first() -> None:
    """A forgotten step 0 would train on drafted entries alone."""
    attention = ChainAttention(1)
    with pytest.raises(AssertionError, match="no chains yet"):
        attention.keep(torch.zeros(1, 1, dtype=torch.int64))
    attention.begin_step(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(AssertionError, match="step 0 comes first"):
        attention(0, *(torch.zeros(1, 1, 1, 4) for _ in range(3)))


def test_the_targets_layers_are_frozen_and_go_where_the_student_goes() -> None:
    """They are no parameters of the student, so nothing else would bring them to its device."""
    target = toy_target()
    student = student_of(tail_head(target, num_layers=2), target)
    layers: tuple[HeadLayer, ...] = student._tail
    assert not {id(p) for p in student.parameters()} & {id(p) for layer in layers for p in layer.parameters()}
    assert not any(p.requires_grad for layer in layers for p in layer.parameters())
    student.to("meta")
    assert {p.device.type for layer in layers for p in layer.parameters()} == {"meta"}


@pytest.fixture
def texts(tmp_path: Path) -> Callable[[PreTrainedModel, Sequence[int]], Texts]:
    """A data folder of 26 texts, two of which are held out; float32, so that nothing but arithmetic can differ."""

    def build(target: PreTrainedModel, layers: Sequence[int]) -> Texts:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, VOCAB, (26, 24), generator=generator)
        with torch.inference_mode():
            output = target(tokens, output_hidden_states=True, use_cache=False)
        top = output.logits.log_softmax(dim=-1).topk(32)
        write(
            Shard(
                tokens=tokens.int(),
                kinds=torch.full_like(tokens, Kind.ANSWER, dtype=torch.uint8),
                top_ids=top.indices.int(),
                top_lps=top.values.half(),
                features=torch.stack([output.hidden_states[layer + 1] for layer in layers], dim=2),
                final=output.hidden_states[-1],
            ),
            shard_path(tmp_path, 0),
        )
        return Texts(tmp_path, held_out=2, seed=0)

    return build


def ridge(inputs: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Least squares with a penalty per input, as more rows of an ordinary problem: numpy's `lstsq` in float64."""
    penalty = np.sqrt(1e-3 * (inputs**2).sum(axis=0) + 1e-6 * len(inputs))
    longer = np.concatenate((outputs, np.zeros((inputs.shape[1], outputs.shape[1]))))
    return np.linalg.lstsq(np.concatenate((inputs, np.diag(penalty))), longer, rcond=None)[0].T


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_head_begins_at_the_least_squares_optimum(texts: Callable[..., Texts], num_layers: int) -> None:
    """Inputs guess the state below the head's layers one token ahead; what is fed back, two ahead. From token 4 on."""
    target, layers = toy_target(), (0, 2) if num_layers == 1 else (0, 1)
    data = texts(target, layers)
    head, _ = begin_head(target, data, torch.arange(VOCAB), layers, num_layers=num_layers, rank=0, seed=0)
    embedding = target.get_input_embeddings().weight.detach().double().numpy()
    batch = data.batch(data.training)
    tokens, features = batch.tokens.numpy(), batch.features.double().numpy()
    scale = np.sqrt((features**2).mean(axis=-1, keepdims=True) + target.config.rms_norm_eps)
    normed = (features / scale).reshape(*features.shape[:2], -1)

    def fit(shift: int) -> np.ndarray:
        inputs = np.concatenate((normed[:, 4:-1], embedding[tokens[:, 5:]]), axis=-1)
        below = np.roll(features[:, :, -1], -shift, axis=1)[:, 4:-1]
        return ridge(inputs.reshape(-1, inputs.shape[-1]), below.reshape(-1, below.shape[-1]))

    ours = torch.cat((head.fuse_proj.weight, head.embed_proj.weight), dim=1).detach().numpy()
    assert np.abs(ours - fit(1)).max() < 2e-3
    assert np.abs(ours - fit(0)).max() > 0.1, "negative control: the state of the token itself"

    plain = plain_twin(head, target)
    own, rest = [], []
    for row in range(12):  # three of the six batches of four: a third of them and one more
        text = tokens[row].tolist()
        for start in range(4, len(text) - 2):
            own.append(plain.last_state(target, text[: start + 2]).numpy())
            guessed = plain.weights["embed_proj.weight"].numpy() @ embedding[text[start + 2]]
            rest.append(features[row, start + 2, -1] - guessed)
    assert np.abs(head.back_proj.weight.detach().numpy() - ridge(np.stack(own), np.stack(rest))).max() < 2e-3


def test_a_head_begins_with_its_targets_weights(texts: Callable[..., Texts]) -> None:
    """Layers, last norm and output rows; the frozen copies that training looks at stay as they are when the head moves."""
    target = toy_target()
    data, ids = texts(target, (0, 1)), torch.tensor([2, 3, 17, 40])
    head, frozen = begin_head(target, data, ids, (0, 1), num_layers=2, rank=0, seed=0)
    for layer, copy, source in zip(head.layers, frozen, targets_layers(target, head.config), strict=True):
        for name, weight in source.state_dict().items():
            assert torch.equal(layer.state_dict()[name], weight) and torch.equal(copy.state_dict()[name], weight), name
            assert layer.state_dict()[name].data_ptr() != copy.state_dict()[name].data_ptr(), "they must not share memory"
    assert torch.equal(head.norm, target.model.norm.weight)
    assert torch.equal(head.output.weight, target.lm_head.weight[ids]) and not head.output.weight.requires_grad
    assert head.id_map.tolist() == ids.tolist() and head.config.context == "target"


def agreements(head: DraftHead, target: PreTrainedModel, data: Texts) -> list[float]:
    """By depth, on the texts that were held out."""
    student = student_of(head, target)
    batch = data.held_out_batches(8)[0]
    predictions = student.predict(batch, torch.Generator().manual_seed(0))
    return [float(agreement(found.logits, found.teaching).float().mean()) for found in predictions]


def test_a_head_that_begins_so_agrees_more_often_than_a_random_one(texts: Callable[..., Texts]) -> None:
    """That is what the regression is for. Chance is 1 in 41."""
    target = toy_target()
    data = texts(target, (0, 1, 2))
    begun, _ = begin_head(target, data, torch.arange(VOCAB), (0, 1, 2), num_layers=1, rank=0, seed=0)
    better, chance = agreements(begun, target, data), agreements(tail_head(target), target, data)
    assert all(ours > other + 0.1 for ours, other in zip(better, chance, strict=True)), (better, chance)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_where_a_linear_guess_suffices_a_head_begins_as_good_as_its_target(
    texts: Callable[..., Texts], num_layers: int
) -> None:
    """The target's lower layers do nothing: the state below the head's is the embedding, so it knows nearly everything."""
    target, layers = forgetful_below(num_layers, vocab=VOCAB, seed=3), (0, 2) if num_layers == 1 else (0, 1)
    data = texts(target, layers)
    head, _ = begin_head(target, data, torch.arange(VOCAB), layers, num_layers=num_layers, rank=0, seed=0)
    found = agreements(head, target, data)
    assert min(found) > 0.9, found
