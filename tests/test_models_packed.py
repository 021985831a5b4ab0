"""Swapped modules compute what the originals do, up to the rounding they are allowed."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from models import loading, packed, toy
from models.causal_lm import CausalLM
from models.loading import Placement, choose_placement, load_model, prepare, prepare_drafter
from models.packed import (
    ByteLinear,
    FusedRMSNorm,
    GatedMLP,
    HalfLinear,
    PackedLinear,
    byte_packing_available,
    fp16_packing_available,
    fp32_packing_available,
    fuse_norms,
    pack_linears,
)
from tests.plain_forward import VOCAB, gap, node_logits, pair, plain_logits, random_text, random_tree

FAMILIES: tuple[toy.Family, ...] = ("llama", "qwen2", "qwen3", "mistral", "gemma")
KINDS = [
    pytest.param(HalfLinear, marks=pytest.mark.skipif(not fp16_packing_available(), reason="no FBGEMM kernels")),
    pytest.param(PackedLinear, marks=pytest.mark.skipif(not fp32_packing_available(), reason="no oneDNN packing")),
]


def _rounded(model: nn.Module) -> nn.Module:
    """The model with the weights that packing rounds rounded to half precision, an untied output layer included."""
    twin = copy.deepcopy(model)
    head = twin.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.half().float()
    return twin


def _linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module) is nn.Linear]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_norm_is_the_norm(family: toy.Family) -> None:
    """Both kinds: `weight` times, and Gemma's `1 + weight` times. The wrong one would scale every layer."""
    model = toy.tiny_causal_lm(family, VOCAB, 0)
    fused = copy.deepcopy(model)
    norms = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")}
    assert fuse_norms(fused) == len(norms) > 0
    x = torch.randn(3, 5, 32) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    for name, norm in norms.items():
        twin = fused.get_submodule(name)
        assert isinstance(twin, FusedRMSNorm)
        rows = x[..., : norm.weight.numel()]
        with torch.inference_mode():
            want, got = norm(rows), twin(rows)
        assert float(((got - want).abs() / want.abs().amax(dim=-1, keepdim=True)).max()) <= 1e-6
    assert fuse_norms(fused) == 0, "fused twice"
    assert gap(plain_logits(fused, range(9)), plain_logits(model, range(9))) <= 5e-5


def test_a_norm_of_another_kind_stays() -> None:
    """Recognized by what it computes, not by its name."""

    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.full((8,), 2.0)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight**2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    model = nn.Sequential(OddRMSNorm())
    assert fuse_norms(model) == 0 and isinstance(model[0], OddRMSNorm)


def test_half_precision_norms_stay() -> None:
    """They round in between; a fused one would not, and is slower for mixed types."""
    assert fuse_norms(toy.tiny_causal_lm("llama", VOCAB, 0).bfloat16()) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_is_the_linear(kind: type[HalfLinear] | type[PackedLinear], bias: bool) -> None:
    """For every number of rows, and inputs that lie in memory in any order."""
    layer = nn.Linear(48, 40, bias=bias)
    exact = copy.deepcopy(layer)
    if kind is HalfLinear:
        exact.weight.data = exact.weight.data.half().float()
    twin = kind(layer.weight, layer.bias)
    assert (twin.in_features, twin.out_features) == (48, 40)
    with torch.inference_mode():
        for rows in (0, 1, 2, 7, 8, 9, 16, 33):
            for x in (torch.randn(1, rows, 48), torch.randn(48, rows).t(), torch.randn(rows, 2, 96)[..., ::2]):
                got, want = twin(x), exact(x)
                assert got.shape == want.shape and got.dtype == torch.float32
                assert rows == 0 or gap(got, want) <= 1e-5, f"{rows} rows differ by {gap(got, want):.2g}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_model(
    kind: type[HalfLinear] | type[PackedLinear], family: toy.Family, tied: bool
) -> None:
    """Every linear layer and gated MLP is swapped, biases survive, and only weights are rounded."""
    model = toy.tiny_causal_lm(family, VOCAB, 0, tied=tied)
    twin = copy.deepcopy(model)
    assert pack_linears(twin, kind) == 2 * (4 + 1) + 1  # per layer q, k, v, o and the MLP; the output layer
    assert not _linears(twin) and sum(isinstance(m, GatedMLP) for m in twin.modules()) == 2
    tokens = list(range(12))
    want = plain_logits(_rounded(model) if kind is HalfLinear else model, tokens)
    # Linear weights alone were rounded: with them rounded in the plain model too, float32 rounding is left.
    assert gap(plain_logits(twin, tokens), want) <= 2e-4
    assert pack_linears(twin, kind) == 0, "packed twice"


@pytest.mark.parametrize("kind", KINDS)
def test_tied_embeddings_survive_packing(kind: type[HalfLinear] | type[PackedLinear]) -> None:
    """The output layer is packed; the embedding, which was the same tensor, is looked up in full precision."""
    model = toy.tiny_causal_lm("llama", VOCAB, 0, tied=True)
    before = model.get_input_embeddings().weight.detach().clone()
    pack_linears(model, kind)
    assert isinstance(model.lm_head, kind)
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_one_module_in_two_places_stays_one(kind: type[HalfLinear] | type[PackedLinear]) -> None:
    """Shared layers would be packed, and kept in memory, twice; under one parent the second would stay as it was."""
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Sequential(shared)})
    assert pack_linears(model, kind) == 1
    assert model["a"] is model["b"] is model["c"][0] and isinstance(model["a"], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_that_only_looks_like_one_keeps_its_own_code(kind: type[HalfLinear] | type[PackedLinear]) -> None:
    """Same names of children, another formula: its layers are packed, the formula stays."""

    class OddMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
            self.down_proj, self.act_fn = nn.Linear(16, 8, bias=False), nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).relu())

    model = nn.Sequential(OddMLP())
    assert pack_linears(model, kind) == 3 and isinstance(model[0], OddMLP)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_over_a_packed_model_gives_the_packed_models_plain_logits(
    kind: type[HalfLinear] | type[PackedLinear],
) -> None:
    """Packing and tree attention together, against the packed model's own plain forward."""
    rng = random.Random(0)
    plain, lm = pair("qwen2")
    for model in (plain, lm.model):
        fuse_norms(model)
        pack_linears(model, kind)
    texts = [random_text(rng, 9), random_text(rng, 3)]
    for text in texts:
        text.prefill(lm, (4,))
    trees = [random_tree(rng, text.tokens[-1], 9) for text in texts]
    scores = lm.forward([text.segment(lm, tree) for text, tree in zip(texts, trees, strict=True)])
    for index, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        assert gap(scores.of(index), node_logits(plain, text.tokens, tree)) <= 1e-4


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_a_rows_logits_do_not_depend_on_its_batch_mates(kind: type[HalfLinear] | type[PackedLinear] | None) -> None:
    """One prompt's answer must not change because another arrived; beyond rounding of float32 sums, it does not."""
    rng = random.Random(1)
    _, lm = pair()
    if kind is not None:
        pack_linears(lm.model, kind)
    texts = [random_text(rng, length) for length in (6, 11, 30, 2, 17)]
    for text in texts:
        text.prefill(lm, ())
    trees = [random_tree(rng, text.tokens[-1], 6) for text in texts]
    segments = [text.segment(lm, tree) for text, tree in zip(texts, trees, strict=True)]
    alone = [lm.forward([segment]).logits for segment in segments]
    together = lm.forward(segments)
    for index, logits in enumerate(alone):
        assert gap(together.of(index), logits) <= 1e-5


def test_prepare_does_what_the_placement_says(tmp_path: Path) -> None:
    """And leaves a model on an accelerator as it is."""
    toy.tiny_causal_lm("llama", VOCAB, 0).save_pretrained(tmp_path)
    kinds = {"fp16": HalfLinear, "fp32": PackedLinear}
    for weights in ("fp16", "fp32", "bf16"):
        if weights == "fp16" and not fp16_packing_available():
            continue
        placement = choose_placement("cpu", weights)
        model = prepare(load_model(tmp_path, placement), placement)
        CausalLM(model, num_rows=8)
        if weights == "bf16":
            assert model.lm_head.weight.dtype == torch.bfloat16
        elif weights == "fp16" or fp32_packing_available():
            assert isinstance(model.lm_head, kinds[weights])
    model = load_model(tmp_path, PLAIN := choose_placement("cpu", "fp32"))
    kept = list(model.modules())
    assert PLAIN.dtype == torch.float32
    prepare(model, Placement(torch.device("meta"), "fp16"))
    assert list(model.modules()) == kept


def test_without_the_private_operations_float32_layers_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build of torch may lack them, or give other numbers; the server must start all the same."""
    placement = choose_placement("cpu", "fp32")

    class Wrong(PackedLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.001 * super().forward(x)

    class Absent(PackedLinear):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    for kind in (Wrong, Absent):
        monkeypatch.setattr(packed, "PackedLinear", kind)
        assert not packed.fp32_packing_available()
        model = prepare(toy.tiny_causal_lm("llama", VOCAB, 0), placement)
        assert type(model.lm_head) is nn.Linear
    monkeypatch.setattr(loading, "fp16_packing_available", lambda: False)
    assert choose_placement("cpu", "auto").weights == "fp32"
    with pytest.raises(ValueError, match="use 'fp32'"):
        choose_placement("cpu", "fp16")


def test_eight_bits_are_close_and_only_for_drafters() -> None:
    """A drafter may be a percent off; a target in eight bits would write another text with every batch."""
    if not byte_packing_available():
        pytest.skip("no eight-bit kernels here")
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(64, 96, generator=generator), torch.randn(5, 96, generator=generator)
    with torch.inference_mode():
        want, got = x @ weight.T, ByteLinear(weight, None)(x)
    assert 0 < (want - got).norm() / want.norm() < 0.03
    placement = Placement(torch.device("cpu"), "fp16")
    layer = nn.Sequential(nn.Linear(96, 64, bias=False))
    assert type(prepare(copy.deepcopy(layer), placement)[0]) is not ByteLinear
    assert type(prepare_drafter(copy.deepcopy(layer), placement)[0]) is ByteLinear
    exact = Placement(torch.device("cpu"), "fp32")
    assert type(prepare_drafter(copy.deepcopy(layer), exact)[0]) is not ByteLinear, "fp32 promises exact weights"
