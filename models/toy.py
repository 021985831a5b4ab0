"""Toy tokenizers and random models: small enough for tests and a demo, real enough to meet every code path.

Nothing is downloaded and nothing is trained: vocabularies are written down here, weights are drawn from a seed.

    tokenizer = byte_tokenizer()
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer), seed=0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["llama", "qwen2", "qwen3", "mistral", "gemma"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
}

_LOGIT_STD = 2.5  # of a row of 256 logits: the likeliest token then has a probability of about 0.2


def byte_tokenizer(
    merges: Sequence[tuple[bytes, bytes]] = (), *, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: id = byte below 256, then one id per merge, then the special tokens.

    Special tokens: <|endoftext|> (end of text, padding), <|im_start|> and <|im_end|> of the chat template. Without
    `merges` a text has as many tokens as UTF-8 bytes. A merge's two parts must be single bytes or results of earlier
    merges.
    """
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    tokens = [bytes([byte]) for byte in range(256)] + [a + b for a, b in merges]
    vocab = {spell(token): i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("two merges must not have the same result")
    model = tokenizer_models.BPE(vocab=vocab, merges=[(spell(a), spell(b)) for a, b in merges])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def sentencepiece_tokenizer(style: Literal["llama", "metaspace"] = "llama") -> PreTrainedTokenizerFast:
    """A BPE tokenizer with byte fallback that marks words by U+2581, as converted SentencePiece models do.

    The two styles differ in how decoding drops the space in front of the text: "llama" strips one space off the result,
    "metaspace" drops all of the first token's. There is no chat template.
    """
    mark = "\u2581"
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("ABCHT.,!?'\u00e9\u6f22")
    steps = ["t h", "th e", f"{mark} the", "i n", f"{mark} a", f"{mark} {mark}", f"{mark}{mark} {mark}{mark}", "e r"]
    merges = [(a, b) for a, b in (step.split(" ") for step in steps)]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), mark, *letters]
    pieces += [a + b for a, b in merges]
    model = tokenizer_models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    if style == "llama":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=mark, prepend_scheme="first", split=False)
        steps_back = [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=mark, prepend_scheme="always", split=True)
        steps_back = [
            decoders.ByteFallback(),
            decoders.Metaspace(replacement=mark, prepend_scheme="always", split=True),
        ]
    tokenizer.decoder = decoders.Sequence(steps_back)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def tiny_causal_lm(
    family: Family,
    vocab_size: int,
    seed: int,
    *,
    layers: int = 2,
    hidden: int = 32,
    max_positions: int = 2048,
    tied: bool = False,
) -> PreTrainedModel:
    """A random-weight decoder with full attention, float32, in eval mode; same arguments, same weights.

    Weights keep activations at unit scale and give logits a standard deviation of about 2.5, so that distributions are
    neither flat nor one-hot and depend on the whole context. Four query heads share two key heads; `hidden` must be a
    multiple of 8. The global random state is left alone. No token ends a text (``eos_token_id`` is None).
    """
    if hidden % 8:
        raise ValueError(f"hidden must be a multiple of 8, not {hidden}")
    config_type, model_type = _FAMILIES[family]
    extra = {"sliding_window": None} if family == "mistral" else {}
    config = config_type(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=torch.float32,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_type(config)
        _draw_weights(model)
    return model.float().eval()


@torch.no_grad()
def _draw_weights(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings().weight
    # With tied embeddings a token's own embedding in the residual stream predicts it again: layers must drown it.
    gain = 2.0 if head is model.get_input_embeddings().weight else 1.0
    for _, weight in sorted(model.named_parameters()):
        if weight is head:
            weight.normal_(std=_LOGIT_STD / math.sqrt(weight.shape[1]))
        elif weight is model.get_input_embeddings().weight:
            weight.normal_(std=1.0)
        elif weight.ndim == 2:
            weight.normal_(std=gain / math.sqrt(weight.shape[1]))
        else:  # norms and biases: near their neutral values, yet not equal to them
            weight.add_(torch.randn_like(weight), alpha=0.1)


def _byte_letters() -> list[str]:
    """The printable letter by which byte-level vocabularies spell each byte (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
