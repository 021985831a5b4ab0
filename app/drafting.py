"""From the name of a drafter in the settings to a drafter: what each kind of name stands for, and how it is loaded.

    "ngram"                  prompt lookup
    "truncated[:F+L]"        first and last layers of the target itself
    "pretrained"             the drafter of this role that is shipped for the embedded target
    a folder or hub id       a drafter made by `graftserve distill`, an EAGLE-3 head, or a model in transformers format
    "auto"                   pretrained for the embedded target; else ngram as the small and truncated as the medium drafter
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn

from app.config import EMBEDDED
from drafters.base import Drafter
from drafters.causal_lm import CausalLMDrafter
from drafters.draft_head import HeadDrafter
from drafters.eagle3 import check_eagle3
from drafters.tail import TailDrafter
from drafters.vocab import check_same_vocab, tokenizer_hash
from models.causal_lm import CausalLM, decoder_layers
from models.draft_files import is_drafter_folder, load_drafter
from models.draft_head import DraftHead
from models.eagle3 import Eagle3Checkpoint, place_eagle3
from models.eagle3_config import is_eagle3
from models.head_lm import HeadLM
from models.loading import Placement, load_model, load_tokenizer, prepare_drafter
from models.refusal import check_attention
from models.tail_lm import TailLM
from models.truncated import truncate

AUTO, NGRAM, TRUNCATED, PRETRAINED = "auto", "ngram", "truncated", "pretrained"
_TAIL_ROWS = 512  # per sequence: as many as a working tree has nodes
SHIPPED = Path(__file__).resolve().parent.parent / "drafters" / "pretrained"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedDrafter:
    """A drafter's model, ready to compute."""

    name: str
    module: nn.Module
    ids: list[int] | None = None  # the target's id of each of its output columns; None: they are the same
    eagle3: Eagle3Checkpoint | None = None  # its head is `module`, not placed yet

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it needs."""
        return self.module.config.target_layers if isinstance(self.module, DraftHead) else ()

    def row_bytes(self, element_size: int) -> int:
        """Bytes of one row of its cache."""
        config: Any = self.module.config
        if isinstance(self.module, DraftHead):
            return 2 * config.num_layers * config.num_kv_heads * config.head_dim * element_size
        return lm_row_bytes(config.get_text_config(), element_size)


def resolve(name: str | None, role: str, target: str) -> str | None:
    """What `name` stands for once "auto" is decided; `target` as the settings name it."""
    if name != AUTO:
        return name
    if target == EMBEDDED and (SHIPPED / role).is_dir():
        return PRETRAINED
    return NGRAM if role == "small" else TRUNCATED


def shipped_for(names: Mapping[str, str], file_name: str) -> Path | None:
    """What was fitted for these resolved drafters, by role, under that name; None if nothing comes with the program."""
    file = SHIPPED / file_name
    return file if set(names.values()) == {PRETRAINED} and len(names) == 2 and file.is_file() else None


def load(name: str, role: str, target: nn.Module, tokenizer: Any, placement: Placement) -> LoadedDrafter | None:
    """The model behind a resolved `name`; None if it has none of its own. `target` is not packed yet.

    ValueError, its subclasses included, for a drafter that does not fit the target.
    """
    if name == NGRAM or is_truncated(name):
        return None
    path = SHIPPED / role if name == PRETRAINED else Path(name)
    if name == PRETRAINED and not is_drafter_folder(path):
        raise ValueError(f"{role} = {PRETRAINED!r}: no drafter of this role is shipped; make one with `graftserve distill`")
    if is_drafter_folder(path):
        module, ids = load_drafter(path, target, tokenizer_hash=tokenizer_hash(tokenizer), dtype=placement.dtype)
        return LoadedDrafter(name, prepare_drafter(module, placement), ids.tolist())
    if _names_eagle3(name):
        checkpoint = check_eagle3(name, target=target, tokenizer=tokenizer)
        return LoadedDrafter(name, checkpoint.head, eagle3=checkpoint)
    model = prepare_drafter(load_model(name, placement), placement)
    check_same_vocab(tokenizer, load_tokenizer(name), vocab_size(target), vocab_size(model))
    return LoadedDrafter(name, model)


def make(
    role: str,
    name: str,
    loaded: LoadedDrafter | None,
    target: CausalLM,
    placement: Placement,
    *,
    num_rows: int,
    max_num_seqs: int,
) -> Drafter | None:
    """The drafter of a role, with `num_rows` cache rows if it keeps any; None for prompt lookup, which is there anyway."""
    if loaded is None:
        if not is_truncated(name):
            return None
        first, last = _layers(name, role, len(decoder_layers(target.model)))
        return CausalLMDrafter(role, truncate(target, first, last, num_rows=num_rows))
    if isinstance(loaded.module, DraftHead):
        embedding = target.model.get_input_embeddings().weight.detach()  # type: ignore[operator]
        if loaded.eagle3 is not None:
            return HeadDrafter(role, place_eagle3(loaded.eagle3, embedding, placement, num_rows=num_rows))
        if loaded.module.config.context == "target":
            rows = _TAIL_ROWS * max_num_seqs
            return TailDrafter(role, TailLM(loaded.module, embedding, target.pool, num_rows=rows))
        return HeadDrafter(role, HeadLM(loaded.module, embedding, num_rows=num_rows))
    num_tokens = None if loaded.ids is not None else target.num_tokens
    lm = CausalLM(loaded.module, num_rows=num_rows, num_tokens=num_tokens)
    check_attention(lm, f"{role} drafter {loaded.name}")
    return CausalLMDrafter(role, lm, loaded.ids)


def _names_eagle3(name: str) -> bool:
    """Whether the config of a folder or hub id is that of an EAGLE-3 head; False if there is none to be read."""
    folder = Path(name)
    try:
        config = folder / "config.json" if folder.exists() or name.count("/") != 1 else hf_hub_download(name, "config.json")
        values = json.loads(Path(config).read_text("utf-8"))
    except (OSError, ValueError, EntryNotFoundError):  # whoever reads it as a model says what is wrong
        return False
    return isinstance(values, dict) and is_eagle3(values)


def is_truncated(name: str | None) -> bool:
    """Whether a name means layers of the target itself."""
    return name is not None and (name == TRUNCATED or name.startswith(f"{TRUNCATED}:"))


def lm_row_bytes(config: Any, element_size: int) -> int:
    """Bytes of one row of a decoder's cache; `config` is that of its text part."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * kv_heads * head_dim * element_size)


def vocab_size(model: Any) -> int:
    """Rows of the embedding, padding included."""
    return int(model.config.get_text_config().vocab_size)


def _layers(name: str, role: str, num_layers: int) -> tuple[int, int]:
    """Layers of "truncated" (the first half and the last third) or of "truncated:FIRST+LAST"."""
    if name == TRUNCATED:
        return max(num_layers // 2, 1), num_layers // 3
    match = re.fullmatch(rf"{TRUNCATED}:(\d+)\+(\d+)", name)
    if match is None:
        raise ValueError(f"{role} = {name!r}: expected {TRUNCATED!r} or '{TRUNCATED}:FIRST+LAST', e.g. {TRUNCATED}:8+2")
    return int(match[1]), int(match[2])
