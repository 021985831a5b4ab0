"""A head's layers are the target's own, part by part, for every family that a head can be made for."""

from __future__ import annotations

import pytest
import torch

from distill.beginnings import head_config
from distill.students import target_attention
from models import toy
from models.adapted import adapt, merge
from models.borrowed_layers import take_last_layers
from models.draft_head import DraftHead
from tests.plain_draft_head import target_memory

VOCAB, LENGTH, LAYERS = 40, 12, 2
FAMILIES: tuple[toy.Family, ...] = ("llama", "qwen2", "qwen3", "mistral", "gemma")


def begun(family: toy.Family, rank: int = 0) -> tuple[torch.nn.Module, DraftHead]:
    target = toy.tiny_causal_lm(family, VOCAB, 3, layers=4)
    head = DraftHead(head_config(target, VOCAB, (0, 1), num_layers=LAYERS, rank=rank)).requires_grad_(False)
    take_last_layers(head, target)
    return target, head


@pytest.mark.parametrize("family", FAMILIES)
def test_training_looks_at_the_keys_that_serving_will_find(family: toy.Family) -> None:
    """A bias or norm left behind would train a head on another context than it meets in the target's cache."""
    target, head = begun(family)
    tokens = [(7 * i) % VOCAB for i in range(LENGTH)]
    with torch.inference_mode():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        attention = target_attention(head, list(head.layers), states[2][:, :, None])
    for layer, memory in enumerate(target_memory(target, tokens, LAYERS)):
        found = attention._true[layer]
        assert found is not None
        for ours, theirs in zip(found, zip(*memory, strict=True), strict=True):  # keys, then values
            torch.testing.assert_close(ours[0].double(), torch.stack(theirs, dim=1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapted_layer_begins_as_the_target_s_and_merges_to_what_it_learned(family: toy.Family) -> None:
    """A difference that is not zero at the beginning, or lost in the file, would be another head than was trained."""
    _, head = begun(family)
    _, twin = begun(family, rank=4)
    adapt(twin.layers, 4, seed=1)
    x, at = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)), torch.arange(5)[None]

    def run(which: DraftHead) -> torch.Tensor:
        cos, sin = which.rotary(x, at)
        rotation = (cos[:, None], sin[:, None])

        def values(_layer: int, q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).flatten(2)

        y = x
        for layer in which.layers:
            y = layer(y, y, rotation, values)
        return y

    with torch.inference_mode():
        torch.testing.assert_close(run(twin), run(head))
    for name, weight in twin.named_parameters():
        if name.endswith(".up"):
            weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        learned = run(twin)
        assert (learned - run(head)).abs().max() > 1e-3
        merge(twin.layers)
        torch.testing.assert_close(run(twin), learned, atol=1e-5, rtol=1e-4)


def test_layers_with_parts_that_a_head_lacks_are_refused() -> None:
    """Silently dropped, a part would make training and serving disagree."""
    target, head = begun("llama")
    target.get_decoder().layers[-1].extra = torch.nn.Linear(3, 3)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer has extra\..*lm student"):
        take_last_layers(head, target)
    config = target.config.get_text_config()
    config.hidden_act = "relu"
    with pytest.raises(ValueError, match="activation 'relu'"):
        head_config(target, VOCAB, (0, 1), num_layers=LAYERS)
