"""A drafter made of some of the target's own layers: nothing copied, nothing changed, the right layers in the right order."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from models import toy
from models.attention import Segment
from models.causal_lm import CausalLM, decoder_layers
from models.packed import fuse_norms, pack_linears
from models.truncated import truncate
from tests.plain_forward import NOTHING, VOCAB, gap, node_logits, pair, plain_logits, random_text, random_tree


def _forward(lm: CausalLM, tokens: list[int]) -> torch.Tensor:
    rows = lm.pool.allocate(len(tokens))
    logits = lm.forward([Segment(tokens, range(len(tokens)), NOTHING, rows, range(len(tokens)))]).logits
    lm.pool.release(rows)
    return logits


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
@pytest.mark.parametrize(("first", "last"), [(2, 1), (0, 2), (3, 0), (1, 0)])
def test_it_computes_the_chosen_layers_in_order(family: toy.Family, first: int, last: int) -> None:
    """Trees over several forwards too: a wrong cache slot shows only when rows are read back."""
    rng = random.Random(0)
    plain, lm = pair(family, layers=5)
    chosen = [*range(first), *range(5 - last, 5)]
    plain.model.layers = nn.ModuleList(plain.model.layers[i] for i in chosen)
    plain.config.num_hidden_layers = len(chosen)
    short = truncate(lm, first, last, num_rows=64)
    assert short.pool.keys.shape[0] == len(chosen) and sorted(short.slots) == chosen
    text = random_text(rng, 8)
    text.prefill(short, (3,))
    tree = random_tree(rng, text.tokens[-1], 8)
    logits = short.forward([text.segment(short, tree)]).logits
    for layer, attention in enumerate(plain.model.layers):
        attention.self_attn.layer_idx = layer
    assert gap(logits, node_logits(plain, text.tokens, tree)) <= 1e-4


@pytest.mark.parametrize("packed", [False, True])
def test_with_every_layer_it_is_the_model(packed: bool) -> None:
    """The borderline that checks everything at once, bitwise."""
    _, lm = pair(layers=3)
    if packed:
        fuse_norms(lm.model)
        pack_linears(lm.model)
    for first in (0, 1, 3):
        short = truncate(lm, first, 3 - first, num_rows=16)
        assert torch.equal(_forward(short, [3, 1, 4, 1, 5]), _forward(lm, [3, 1, 4, 1, 5]))


def test_every_module_and_parameter_is_shared() -> None:
    """A copy would cost the memory of a second model."""
    _, lm = pair(layers=4, tied=True)
    short = truncate(lm, 1, 1, num_rows=16)
    ours = {id(parameter): parameter.data_ptr() for parameter in lm.model.parameters()}
    for parameter in short.model.parameters():
        assert ours.get(id(parameter)) == parameter.data_ptr()
    layers = decoder_layers(lm.model)
    assert [id(layer) for layer in decoder_layers(short.model)] == [id(layers[0]), id(layers[3])]
    assert short.model.get_output_embeddings() is lm.model.get_output_embeddings()
    assert short.model.get_input_embeddings() is lm.model.get_input_embeddings()


def test_the_original_is_left_alone() -> None:
    """The target must not lose its layers to its drafter, nor its rows to the drafter's forwards."""
    plain, lm = pair(layers=4, num_tokens=60)
    modules = {name: id(module) for name, module in lm.model.named_modules()}
    short = truncate(lm, 1, 1, num_rows=16)
    assert {name: id(module) for name, module in lm.model.named_modules()} == modules
    assert short.num_tokens == 60 and lm.pool is not short.pool
    text = random_text(random.Random(1), 9, 60)
    text.prefill(lm, ())
    keys = lm.pool.keys.clone()
    assert bool((_forward(short, text.tokens)[:, 60:] == float("-inf")).all())
    assert torch.equal(lm.pool.keys, keys)
    tree = random_tree(random.Random(2), text.tokens[-1], 5, vocab=60)
    want = node_logits(plain, text.tokens, tree)[:, :60]
    assert gap(lm.forward([text.segment(lm, tree)]).logits[:, :60], want) <= 1e-4


def test_a_drafters_forward_does_not_reach_what_the_target_captured() -> None:
    """They share layers, and with them the hooks that remember hidden states."""
    _, lm = pair(layers=3, capture=(0, 2))
    short = truncate(lm, 1, 1, num_rows=16)
    scores = lm.forward([Segment([1, 2, 3], range(3), NOTHING, lm.pool.allocate(3), ())])
    before = {layer: hidden.clone() for layer, hidden in scores.hidden.items()}
    _forward(short, [9, 8, 7, 6])
    again = lm.forward([Segment([1, 2, 3], range(3), NOTHING, lm.pool.allocate(3), ())])
    for layer, hidden in before.items():
        assert torch.equal(scores.hidden[layer], hidden) and torch.equal(again.hidden[layer], hidden)


def test_it_works_for_decoders_of_another_build() -> None:
    """Layers may have another name than `layers`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    want = plain_logits(model, [1, 2, 3])
    lm = CausalLM(model, num_rows=16)
    assert gap(_forward(truncate(lm, 2, 1, num_rows=16), [1, 2, 3]), want) <= 1e-4
    assert gap(_forward(truncate(lm, 1, 1, num_rows=16), [1, 2, 3]), want) > 1e-3


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 2), (-1, 2), (2, -1), (5, 0)])
def test_impossible_choices_are_refused(first: int, last: int) -> None:
    """No layer at all, more than there are, or negative counts that would slice."""
    _, lm = pair(layers=4)
    with pytest.raises(ValueError, match="truncated drafter"):
        truncate(lm, first, last, num_rows=16)
