"""Many texts in step: what the training data says of the target must be what transformers says, up to bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel

from models.lockstep import LockstepLM, LockstepStep

TinyModel = Callable[..., PreTrainedModel]
LENGTH, TEXTS, CAPTURED = 12, 5, (0, 2)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma")


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 259, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(3))


def run(lm: LockstepLM, tokens: torch.Tensor) -> list[LockstepStep]:
    return [lm.step(tokens[:, position]) for position in range(tokens.shape[1])]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module", params=FAMILIES)
def both(
    request: pytest.FixtureRequest, tiny_model: TinyModel, tokens: torch.Tensor
) -> tuple[list[LockstepStep], torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Our steps; transformers' logits, hidden states (the last one behind the norm), and output matrix."""
    model = tiny_model(request.param, 259, 2, layers=4)
    with torch.inference_mode():
        wanted = model(tokens, output_hidden_states=True)
    lm = LockstepLM(deepcopy(model), num_texts=TEXTS, max_length=LENGTH, capture=CAPTURED)
    rows = model.get_output_embeddings().weight.detach()
    return run(lm, tokens), wanted.logits, wanted.hidden_states, rows


def test_logits_are_those_of_transformers(both: tuple) -> None:
    """Otherwise students learn from a model that is not served."""
    steps, logits, _, _ = both
    for position, step in enumerate(steps):
        assert step.logits.dtype == torch.float32
        assert relative(step.logits, logits[:, position]) < 0.03, f"position {position}"


def test_next_tokens_are_those_of_transformers(both: tuple) -> None:
    """Greedy answers would be another model's. Where the best two are closer than the rounding, either may come."""
    steps, logits, _, _ = both
    for position, step in enumerate(steps):
        best = logits[:, position].topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > 0.25
        assert clear.any()
        assert torch.equal(step.logits.argmax(-1)[clear], best.indices[clear, 0]), f"position {position}"


def test_features_are_what_the_captured_layers_give(both: tuple) -> None:
    """A head fed with another layer's states in training than at serving drafts nonsense."""
    steps, _, hidden, _ = both
    for position, step in enumerate(steps):
        assert set(step.features) == set(CAPTURED)
        for layer in CAPTURED:
            assert relative(step.features[layer], hidden[layer + 1][:, position]) < 0.03, f"layer {layer}"
            for other in (layer, layer + 2):  # negative control: what enters the layer, and the one after
                assert relative(step.features[layer], hidden[other][:, position]) > 0.1, f"layer {layer} against {other}"


def test_final_is_what_the_output_matrix_multiplies(both: tuple) -> None:
    """The regression loss compares with it, and the student multiplies the same matrix."""
    steps, logits, hidden, rows = both
    for position, step in enumerate(steps):
        assert relative(step.final, hidden[-1][:, position]) < 0.03
        assert relative(step.final.float() @ rows.T, logits[:, position]) < 0.03


def test_texts_do_not_see_each_other(tiny_model: TinyModel, tokens: torch.Tensor) -> None:
    """Fewer texts than places, as in the last shard of a given text, and other neighbors must change nothing."""
    model = tiny_model("llama", 259, 2, layers=4)
    lm = LockstepLM(deepcopy(model), num_texts=TEXTS, max_length=LENGTH, capture=CAPTURED)
    together = run(lm, tokens)
    lm.restart()
    apart = run(lm, tokens[3:4])
    for a, b in zip(together, apart, strict=True):
        assert relative(b.logits, a.logits[3:4]) < 0.01
        assert relative(b.features[2], a.features[2][3:4].float()) < 0.01


def test_restarted_texts_forget_the_earlier_ones(tiny_model: TinyModel, tokens: torch.Tensor) -> None:
    """A shard would depend on the shard before it, and on whether the run was interrupted between them."""
    model = tiny_model("llama", 259, 2, layers=4)
    lm = LockstepLM(deepcopy(model), num_texts=TEXTS, max_length=LENGTH)
    fresh = run(lm, tokens)
    lm.restart()
    run(lm, tokens.flip(0)[:, :7])
    lm.restart()
    for a, b in zip(fresh, run(lm, tokens), strict=True):
        assert torch.equal(a.logits, b.logits) and torch.equal(a.final, b.final)


def test_full_texts_are_refused(tiny_model: TinyModel, tokens: torch.Tensor) -> None:
    """Silently writing over the last position would give plausible nonsense."""
    lm = LockstepLM(deepcopy(tiny_model("llama", 259, 2, layers=4)), num_texts=TEXTS, max_length=4)
    run(lm, tokens[:, :4])
    with pytest.raises(IndexError, match="full at 4 tokens"):
        lm.step(tokens[:, 4])
