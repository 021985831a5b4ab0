"""The composition root: from settings to an engine with its models, drafters and schedules.

    loaded = build(settings, print)     # LoadedEngine; start loaded.engine, then submit
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from app.config import Settings
from app.serving import LoadedEngine
from drafters.base import Drafter
from drafters.causal_lm import CausalLMDrafter
from drafters.ngram import NgramDrafter
from drafters.vocab import check_same_vocab
from engine.admission import Limits
from engine.engine import Engine
from engine.text import byte_fallback_ids
from models.causal_lm import CausalLM, decoder_layers
from models.loading import Placement, choose_placement, load_model, load_tokenizer, prepare
from models.refusal import check_attention
from models.threads import no_helpers
from models.truncated import truncate
from scheduler.registry import build_schedules, check_budget

NGRAM, TRUNCATED = "ngram", "truncated"
_MAX_BUDGET = 511  # nodes per tree, root included; what a working tree holds at most
_MEMORY_SHARE = 0.4  # of the memory that is free, for the rows of all models together

Progress = Callable[[str], None]


def build(settings: Settings, progress: Progress) -> LoadedEngine:
    """Load everything the settings name; their target is a folder or hub id here.

    Raises ValueError, its subclasses included, for what the user can mend.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with no_helpers():
        return _build(settings, progress)


def _build(settings: Settings, progress: Progress) -> LoadedEngine:
    placement = choose_placement(settings.device, settings.weights)
    source = settings.target
    progress(f"loading {_model_id(source)} ({placement.device.type}, {placement.weights})")
    tokenizer = load_tokenizer(source)
    target_model = prepare(load_model(source, placement), placement)
    target_size = _vocab_size(target_model)
    num_tokens = check_same_vocab(tokenizer, tokenizer, target_size, target_size).num_tokens

    drafter_models = {}
    for role in ("small", "medium"):
        name = getattr(settings, role)
        if name not in (None, NGRAM) and not _is_truncated(name):
            progress(f"loading the {role} drafter {name}")
            model = prepare(load_model(name, placement), placement)
            check_same_vocab(tokenizer, load_tokenizer(name), target_size, _vocab_size(model))
            drafter_models[role] = model

    limits = Limits(settings.max_num_seqs, settings.max_waiting, settings.prefill_chunk, settings.stall_s)
    budget = settings.budget or default_budget(placement)
    check_budget(budget, _MAX_BUDGET)
    num_rows = settings.kv_rows or _fitting_rows(settings, target_model, drafter_models, budget, placement)
    max_model_len = min(settings.max_model_len or num_rows, num_rows - budget)
    if max_model_len < 2:
        raise ValueError(f"kv_rows = {num_rows} has no room for a text beside a tree of budget = {budget} nodes")
    target = CausalLM(target_model, num_rows=num_rows, num_tokens=num_tokens)
    check_attention(target, settings.target)

    drafters: dict[str, Drafter] = {NGRAM: NgramDrafter()}
    for role in ("small", "medium"):
        lm = _drafter_lm(getattr(settings, role), role, drafter_models, target, num_rows, num_tokens)
        if lm is not None:
            drafters[role] = CausalLMDrafter(role, lm)
    schedules = build_schedules(
        small="small" if "small" in drafters else NGRAM,
        medium="medium" if "medium" in drafters else None,
        budget=budget,
        min_probability=_worth_a_row(placement),
        width=4 if placement.device.type == "cpu" else 10,
        word=settings.plan,
    )
    engine = Engine(
        target=target,
        drafters=drafters,
        schedules=schedules,
        default_schedule=settings.schedule or _default_schedule(settings, drafters),
        decode=functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        stop_tokens=_stop_tokens(tokenizer, target_model),
        byte_ids=byte_fallback_ids(tokenizer.get_vocab()),
        model_id=_model_id(source),
        max_model_len=max_model_len,
        limits=limits,
        max_budget=_MAX_BUDGET,
    )
    progress(f"schedules: {', '.join(schedules)}; default: {engine.default_schedule}; {num_rows} cache rows")
    return LoadedEngine(engine, tokenizer)


def default_budget(placement: Placement) -> int:
    """Nodes verified per step where nobody says otherwise: rows are dear on a CPU and nearly free on an accelerator."""
    return 8 if placement.device.type == "cpu" else 64


def _worth_a_row(placement: Placement) -> float:
    """Path probability from which a node pays for its row.

    Measured on two CPU cores, a row more makes the target's forward about a tenth of a one-row forward dearer, so a node
    accepted less often than that costs more than it saves. On an accelerator rows are nearly free at these numbers.
    """
    return 0.1 if placement.device.type == "cpu" else 0.0


def _default_schedule(settings: Settings, drafters: dict[str, Drafter]) -> str:
    """Both drafters on one tree where the medium one was trained for it; a truncated stand-in does not earn its price."""
    trained = "medium" in drafters and not _is_truncated(settings.medium)
    return "treegraft" if trained else "small"


def _is_truncated(name: str | None) -> bool:
    return name is not None and (name == TRUNCATED or name.startswith(f"{TRUNCATED}:"))


def _drafter_lm(
    name: str | None, role: str, models: dict[str, Any], target: CausalLM, num_rows: int, num_tokens: int
) -> CausalLM | None:
    """The model of a drafter; None for a role that has no model of its own."""
    if role in models:
        lm = CausalLM(models[role], num_rows=num_rows, num_tokens=num_tokens)
        check_attention(lm, f"{role} drafter {name}")
        return lm
    if not _is_truncated(name):
        return None
    first, last = _layers(str(name), role, len(decoder_layers(target.model)))
    return truncate(target, first, last, num_rows=num_rows)


def _layers(name: str, role: str, num_layers: int) -> tuple[int, int]:
    """Layers of "truncated" (the first half and the last third) or of "truncated:FIRST+LAST"."""
    if name == TRUNCATED:
        return max(num_layers // 2, 1), num_layers // 3
    match = re.fullmatch(rf"{TRUNCATED}:(\d+)\+(\d+)", name)
    if match is None:
        raise ValueError(f"{role} = {name!r}: expected {TRUNCATED!r} or '{TRUNCATED}:FIRST+LAST', e.g. {TRUNCATED}:8+2")
    return int(match[1]), int(match[2])


def _vocab_size(model: Any) -> int:
    """Rows of the embedding, padding included."""
    return int(model.config.get_text_config().vocab_size)


def _fitting_rows(
    settings: Settings, target: Any, drafter_models: dict[str, Any], budget: int, placement: Placement
) -> int:
    """Rows for the longest text of every sequence, or as many as fit into a share of the free memory."""
    configs = [model.config.get_text_config() for model in (target, *drafter_models.values())]
    # A truncated drafter has at most as many layers as the target.
    configs += [configs[0]] * sum(_is_truncated(name) for name in (settings.small, settings.medium))
    row_bytes = sum(_row_bytes(config, next(target.parameters()).element_size()) for config in configs)
    longest = min(settings.max_model_len or configs[0].max_position_embeddings, configs[0].max_position_embeddings)
    wanted = settings.max_num_seqs * (longest + budget)
    fitting = int(_free_bytes(placement.device) * _MEMORY_SHARE / row_bytes)
    if fitting < longest + budget:
        raise ValueError(
            f"one answer of max_model_len = {longest} tokens needs {(longest + budget) * row_bytes / 2**30:.1f} GiB of "
            f"cache rows, {_MEMORY_SHARE:.0%} of the free memory is less; set a smaller max_model_len or set kv_rows"
        )
    return min(wanted, fitting)


def _row_bytes(config: Any, element_size: int) -> int:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * kv_heads * head_dim * element_size)


def _free_bytes(device: torch.device) -> int:
    """Memory that may still be taken on `device`, within the limit of a container if there is one."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


def _stop_tokens(tokenizer: Any, model: Any) -> frozenset[int]:
    """Tokens that end an answer, as transformers' own `generate` takes them: from the generation config if it names any."""
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()


def _model_id(source: str) -> str:
    """A folder's name, or the hub id as it is."""
    return Path(source).resolve().name if Path(source).exists() else source
