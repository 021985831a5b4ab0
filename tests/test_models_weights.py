"""The embedded model, with its real weights: trees, packing and trunks at the size that is served."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from drafters.causal_lm import CausalLMDrafter
from models.causal_lm import CausalLM
from models.embedded import embedded_target
from models.loading import choose_placement, load_model, load_tokenizer, prepare
from models.packed import fp16_packing_available
from models.refusal import check_attention
from models.truncated import truncate
from tests.plain_forward import Text, gap, node_logits
from tests.test_drafter_causal_lm import Follower
from tree.tree import TokenTree

pytestmark = pytest.mark.weights

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    if n < 2:\n        return n\n    return", "1, 2, 3, 4,")


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded_target(lambda line: None)


@pytest.fixture(scope="module")
def plain(folder: Path) -> nn.Module:
    """The model as transformers loads it, float32, nothing swapped."""
    return load_model(folder, choose_placement("cpu", "fp32"))


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, CausalLM]]:
    """The model as it is served."""
    if request.param == "fp16" and not fp16_packing_available():
        pytest.skip("no FBGEMM kernels")
    placement = choose_placement("cpu", request.param)
    yield request.param, CausalLM(prepare(load_model(folder, placement), placement), num_rows=512)


def _trees(folder: Path, plain: nn.Module, vocab: int) -> tuple[list[Text], list[TokenTree]]:
    """Prompts and trees of likely and of random tokens."""
    rng = random.Random(0)
    tokenizer = load_tokenizer(folder)
    texts = [Text(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    trees = []
    for text in texts:
        tree = TokenTree(text.tokens[-1])
        with torch.inference_mode():
            best = plain(torch.tensor([text.tokens]), use_cache=False).logits[0, -1].topk(3).indices.tolist()
        for token in best:
            tree.add(0, token, -1.0, "small")
        while len(tree) < 7:
            tree.add(rng.randrange(len(tree)), rng.randrange(vocab), -1.0, "small")
        trees.append(tree)
    return texts, trees


def test_tree_logits_are_the_plain_models(served: tuple[str, CausalLM], plain: nn.Module, folder: Path) -> None:
    """float32 as it is; float16 against a plain model whose linear weights are rounded alike.

    Sums in another order move logits, whose largest are near 40, by 1e-4; other processors may need a little more. Weights
    in half precision that were not rounded in the plain model too would move them by 2e-2.
    """
    weights, lm = served
    check_attention(lm, "embedded")
    model = plain
    if weights == "fp16":
        model = load_model(folder, choose_placement("cpu", "fp32"))
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())  # untied: the embedding is not rounded
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.half().float()
    texts, trees = _trees(folder, plain, lm.vocab_size)
    for text in texts:
        text.prefill(lm, (4,))
    scores = lm.forward([text.segment(lm, tree) for text, tree in zip(texts, trees, strict=True)])
    for index, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        want = node_logits(model, text.tokens, tree)
        difference = gap(scores.of(index), want)
        assert difference <= 5e-4, f"{PROMPTS[index]!r}: logits differ by {difference:.2g}"
        if weights == "fp16":  # the control: against unrounded weights the difference is that of the rounding
            assert gap(scores.of(index), node_logits(plain, text.tokens, tree)) > 5 * difference


def test_a_rows_logits_do_not_depend_on_its_batch_mates(
    served: tuple[str, CausalLM], plain: nn.Module, folder: Path
) -> None:
    """Relative to the largest logit, 1e-5 is rounding of float32 sums; a scale taken over the batch would be far more."""
    _, lm = served
    texts, trees = _trees(folder, plain, lm.vocab_size)
    trees[1] = TokenTree(texts[1].tokens[-1])  # a single row, for which libraries have code of its own
    for text in texts:
        text.prefill(lm, ())
    segments = [text.segment(lm, tree) for text, tree in zip(texts, trees, strict=True)]
    together = lm.forward(segments)
    for index, segment in enumerate(segments):
        alone = lm.forward([segment]).logits
        assert gap(together.of(index), alone) <= 1e-5 * float(alone.abs().max())
    lm.pool.release(row for segment in segments for row in segment.rows)
    lm.pool.release(row for text in texts for row in text.rows.truncate(0))


@pytest.mark.parametrize("served", ["fp32"], indirect=True)  # compared with plain weights
def test_a_truncated_drafter_drafts_what_its_layers_say(
    served: tuple[str, CausalLM], plain: nn.Module, folder: Path
) -> None:
    """The default medium drafter over the real weights; with every layer it is the target."""
    _, lm = served
    texts, _ = _trees(folder, plain, lm.vocab_size)
    num_layers = len(plain.model.layers)
    drafter = CausalLMDrafter("medium", truncate(lm, num_layers - 2, 2, num_rows=128))
    follower = Follower(drafter, plain, texts[0].tokens)
    for node in (0, 1):
        request = follower.request([node], width=2)
        answer = drafter.propose([request])[0]
        assert not hasattr(answer, "reason")
        found = answer.candidates[node]
        want = follower.row(node).topk(2)
        assert found.tokens == tuple(want.indices.tolist())
        assert found.lps == pytest.approx(want.values.tolist(), abs=2e-3)
        follower.attach(answer)
    follower.close()
    assert drafter.lm.pool.num_used == 0
