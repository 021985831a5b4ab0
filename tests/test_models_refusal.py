"""Models that tree attention over rows cannot serve exactly are refused at load, in one line that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface

from models import attention, toy
from models.causal_lm import CausalLM
from models.loading import ModelNotFound, choose_placement, load_model, load_tokenizer
from models.refusal import UnservableModel, check_attention, check_config
from tests.plain_forward import VOCAB, pair

PLAIN = choose_placement("cpu", "fp32")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama on disk."""
    toy.tiny_causal_lm("llama", VOCAB, 0).save_pretrained(tmp_path)
    return tmp_path


def _edit(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def _refusal(source: Path | str, kind: type[Exception] = UnservableModel) -> str:
    with pytest.raises(kind) as caught:
        load_model(source, PLAIN)
    message = str(caught.value)
    assert "\n" not in message and str(source) in message, f"not one line about the model: {message!r}"
    return message


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
@pytest.mark.parametrize("tied", [False, True])
def test_full_attention_decoders_load_and_pass_the_probe(family: toy.Family, tied: bool, tmp_path: Path) -> None:
    """A refusal too eager refuses what we promise to serve."""
    toy.tiny_causal_lm(family, VOCAB, 0, tied=tied).save_pretrained(tmp_path)
    model = load_model(tmp_path, PLAIN)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    lm = CausalLM(model, num_rows=16)
    check_attention(lm, "tiny")
    assert lm.pool.num_used == 0


def test_a_decoder_of_another_build_passes_the_probe(tmp_path: Path) -> None:
    """Learned positions, other names of layers and sizes: nothing here is written for one family."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    check_attention(CausalLM(load_model(tmp_path, PLAIN), num_rows=16), "gpt2")


def test_sliding_window_is_refused_and_null_passes(tmp_path: Path) -> None:
    """Rows outside the window would still be seen: answers differ from the model's own, from some length on."""
    toy.tiny_causal_lm("mistral", VOCAB, 0).save_pretrained(tmp_path)
    load_model(tmp_path, PLAIN)
    assert "sliding_window=16" in _refusal(_edit(tmp_path, sliding_window=16))


def _config(name: str, **options: Any) -> Any:
    return getattr(transformers, name)(**(SIZES | options))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (lambda: _config("Gemma3TextConfig"), "sliding-window"),
        (lambda: _config("Gemma2Config"), "sliding-window"),
        (lambda: _config("Gemma2Config", sliding_window=None, layer_types=["full_attention"] * 2), "capped"),
        (
            lambda: _config("Qwen2Config", use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "sliding-window",
        ),
        (lambda: _config("Qwen3NextConfig"), "recurrent"),
        (lambda: transformers.T5Config(), "encoder-decoder"),
        (lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2), "recurrent"),
        (lambda: transformers.FalconMambaConfig(hidden_size=32, num_hidden_layers=2), "recurrent"),
        (
            lambda: _config("LlamaConfig", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "'dynamic'",
        ),
    ],
    ids=["gemma3", "gemma2", "softcap", "qwen2-window", "linear", "t5", "mamba", "falcon-mamba", "dynamic-rope"],
)
def test_configs_that_do_not_fit_are_named(config: Callable[[], Any], word: str) -> None:
    """A model served wrongly gives answers that look fine."""
    with pytest.raises(UnservableModel, match=word) as caught:
        check_config(config(), "some/model")
    assert str(caught.value).startswith("some/model: ") and "\n" not in str(caught.value)


def test_scalings_that_depend_on_nothing_but_the_position_pass() -> None:
    """Most long-context models use one of these."""
    for rope_type in ("linear", "llama3", "yarn"):
        rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4}
        if rope_type == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        check_config(_config("LlamaConfig", rope_parameters=rope), "scaled")


def test_t5_and_mamba_folders_are_refused_through_the_loader(tmp_path: Path) -> None:
    """The config alone decides: no weights are read, let alone half of them ignored."""
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    assert "encoder-decoder" in _refusal(tmp_path / "t5")
    assert "recurrent" in _refusal(tmp_path / "mamba")


def test_an_architecture_that_is_no_causal_lm_is_refused(folder: Path) -> None:
    """A classifier's folder loads as a language model with a random output layer."""
    message = _refusal(_edit(folder, architectures=["LlamaForSequenceClassification"]))
    assert "LlamaForSequenceClassification is not a causal language model" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    """Such a drafter's scores break every ranking, such a target answers nonsense."""
    model = toy.tiny_causal_lm("llama", VOCAB, 0)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    model.save_pretrained(tmp_path)
    message = _refusal(tmp_path)
    assert "model.layers.1.mlp.up_proj.weight" in message and "NaN or infinite" in message


def test_weights_missing_from_the_files_are_refused(folder: Path) -> None:
    """transformers fills them with random numbers and goes on."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    assert "1 weights are missing from its files, the first is model.layers.1.mlp.up_proj.weight" in _refusal(folder)


def test_files_that_cannot_be_read_are_named_in_one_line(folder: Path, tmp_path: Path) -> None:
    """A wall of traceback for a typo in a path, or a download that broke off."""
    assert "no such folder" in _refusal(tmp_path / "nowhere", ModelNotFound)
    assert "no such folder" in _refusal("./nowhere", ModelNotFound)
    assert "single GGUF file" in _refusal(tmp_path / "model.gguf", ModelNotFound)
    assert "single GGUF file" in _refusal(tmp_path / "MODEL.GGUF", ModelNotFound)
    weights = folder / "model.safetensors"
    assert "is a file" in _refusal(weights, ModelNotFound)
    _refusal("no-such-model-anywhere", ModelNotFound)

    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    _refusal(folder, ModelNotFound)
    weights.write_bytes(content)
    config = (folder / "config.json").read_text()
    assert "num_hidden_layers" in _refusal(_edit(folder, num_hidden_layers="two"), ModelNotFound)
    (folder / "config.json").write_text(config)
    _refusal(_edit(folder, quantization_config={"quant_method": "gptq", "bits": 4}), ModelNotFound)
    (folder / "config.json").write_text("{")
    _refusal(folder, ModelNotFound)
    (folder / "config.json").write_text(config)
    weights.unlink()
    _refusal(folder, ModelNotFound)


def test_tokenizers_that_cannot_be_read_are_named_in_one_line(folder: Path, byte_tokenizer: Any) -> None:
    """The tokenizers library raises bare Exceptions."""
    byte_tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).get_vocab() == byte_tokenizer.get_vocab()
    for text in ('{"model": 1}', "{"):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ModelNotFound, match="tokenizer of") as caught:
            load_tokenizer(folder)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelNotFound, match="no such folder"):
        load_tokenizer(folder / "nowhere")


class _MixesNeighbors(nn.Module):
    """A token's output depends on the token to its left in the flattened batch, as a convolution's does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 0.1 * torch.roll(x, 1, dims=1))


def test_negative_control_a_model_that_mixes_neighbors_is_caught() -> None:
    """Nothing in its config says so; only the probe can find out."""
    model = toy.tiny_causal_lm("llama", VOCAB, 0)
    model.model.layers[0].mlp = _MixesNeighbors(model.model.layers[0].mlp)
    lm = CausalLM(model, num_rows=16)
    with pytest.raises(UnservableModel, match="differs from the model's own"):
        check_attention(lm, "mixer")
    assert lm.pool.num_used == 0


def test_negative_control_attention_with_another_scale_is_caught() -> None:
    """A detail of attention that our function overlooks must not pass."""

    def tampered(module, query, key, value, mask, *, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
        return attention.ragged_attention(module, query, key, value, mask, scaling=1.1 * scaling, **kwargs)

    _, lm = pair()
    try:
        AttentionInterface.register(attention.NAME, tampered)
        with pytest.raises(UnservableModel, match="differs from the model's own"):
            check_attention(lm, "scaled")
    finally:
        AttentionInterface.register(attention.NAME, attention.ragged_attention)
    check_attention(lm, "plain")


def test_attention_that_asks_for_more_than_softmax_is_refused() -> None:
    """Sinks, caps and biases arrive as arguments; ignoring one would be silent."""
    config = _config("Gemma2Config", sliding_window=None, layer_types=["full_attention"] * 2)
    lm = CausalLM(transformers.Gemma2ForCausalLM(config).eval(), num_rows=16)
    with pytest.raises(UnservableModel, match="softcap") as caught:
        check_attention(lm, "capped")
    assert "\n" not in str(caught.value) and lm.pool.num_used == 0


def test_a_model_that_bypasses_the_attention_interface_is_refused() -> None:
    """Its own attention would see neither rows nor masks of ours."""
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    config.max_position_embeddings = 128
    lm = CausalLM(transformers.BloomForCausalLM(config).eval(), num_rows=16)
    with pytest.raises(UnservableModel, match="2 of 2 layers of BloomForCausalLM") as caught:
        check_attention(lm, "bloom")
    assert "\n" not in str(caught.value) and lm.pool.num_used == 0


def test_the_probe_leaves_the_model_as_it_found_it() -> None:
    """It switches to plain attention and must switch back."""
    _, lm = pair()
    check_attention(lm, "tiny")
    assert lm.config._attn_implementation == attention.NAME and lm.pool.num_used == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_probe(dtype: torch.dtype) -> None:
    """Its rounding is no reason to refuse."""
    check_attention(CausalLM(toy.tiny_causal_lm("llama", VOCAB, 0).to(dtype), num_rows=16), "half")


@pytest.mark.parametrize(("device", "weights"), [("nonsense", "auto"), ("cuda", "auto")])
def test_devices_that_are_not_there_are_named(device: str, weights: Any) -> None:
    """A typo must not become a slow server on the CPU."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ValueError, match=device):
        choose_placement(device, weights)
