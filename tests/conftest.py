"""What tests share: no model hub, toy tokenizers, and tiny random models that are built once."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRAFTSERVE_COSTS", "none")  # measuring what forwards cost takes half a minute per model

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from models import toy

# Machines that run tests are shared: no deadlines. Derandomized: a failure must not come and go.
settings.register_profile(
    "graftserve", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
settings.load_profile("graftserve")


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens (id = byte), <|endoftext|>, <|im_start|>, <|im_end|>; a chat template."""
    return toy.byte_tokenizer()


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Metaspace and byte fallback, as converted SentencePiece models have them."""
    return toy.sentencepiece_tokenizer()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model(family="llama", vocab_size=259, seed=0, **options)``; one object per set of arguments."""

    @cache
    def build(family: toy.Family = "llama", vocab_size: int = 259, seed: int = 0, **options: int) -> PreTrainedModel:
        return toy.tiny_causal_lm(family, vocab_size, seed, **options)

    return build


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    """A tiny model and its tokenizer in transformers format. Nobody may write to it.

    Its answers are random bytes: split characters, controls, invalid ones.
    """
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama", 259, 1).save_pretrained(path)
    toy.byte_tokenizer().save_pretrained(path)
    return path
