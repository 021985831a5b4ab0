"""The real application over a tiny model on disk: HTTP, engine, drafters and metrics as `graftserve serve` wires them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.build import build
from app.config import Settings
from models import toy
from tests.http_engine import Server, serve


def write_toy_model(folder: Path) -> Path:
    """A random model of a few thousand weights, and its tokenizer, in transformers format."""
    tokenizer = toy.byte_tokenizer()
    toy.tiny_causal_lm("llama", len(tokenizer), 3, max_positions=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serve_toy(folder: Path, **settings: Any) -> Iterator[Server]:
    """The service over that model, with prompt lookup as the small drafter and layers of the target as the medium one."""
    resolved = Settings(target=str(write_toy_model(folder)), small="ngram", medium="truncated:1+1", threads=1, **settings)
    with serve(load=lambda: build(resolved, lambda _: None)) as server:
        yield server
