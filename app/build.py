"""The composition root: from settings to an engine with its models, drafters and schedules.

    loaded = build(settings, print)     # LoadedEngine; start loaded.engine, then submit
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from app import drafting
from app.calibration import profile_for, read_profile
from app.config import AUTO, MEASURE_COSTS, NO_COSTS, NONE, Settings
from app.drafting import NGRAM, LoadedDrafter, is_truncated, lm_row_bytes, vocab_size
from app.heap import map_large_blocks
from app.serving import LoadedEngine
from drafters.base import Drafter
from drafters.corpus import CorpusIndex
from drafters.ngram import NgramDrafter
from drafters.vocab import check_same_vocab, tokenizer_hash
from engine.admission import Limits
from engine.engine import Engine
from engine.steering import Steering
from engine.text import byte_fallback_ids
from models.causal_lm import CausalLM
from models.loading import Placement, choose_placement, load_model, load_tokenizer, prepare
from models.refusal import check_attention
from models.threads import no_helpers
from scheduler.auto_budget import AutoBudget
from scheduler.definitions import define_schedule
from scheduler.drift import LiveCosts
from scheduler.registry import build_schedules, check_budget
from scheduler.rule import Rule
from scheduler.selector import Selector
from scheduler.tuning import Tuner, talon_grid

_MAX_BUDGET = 511  # nodes per tree, root included; what a working tree holds at most
_LEAST_EXPANDED = 0.02  # path probability below which no drafter is asked what follows, on a CPU
_MEMORY_SHARE = 0.4  # of the memory that is free, for the rows of all models together

Progress = Callable[[str], None]
Fitted = TypeVar("Fitted", Rule, Selector)


def build(settings: Settings, progress: Progress) -> LoadedEngine:
    """Load everything the settings name; their target is a folder or hub id here.

    Raises ValueError, its subclasses included, for what the user can mend.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    map_large_blocks()
    with no_helpers():
        loaded = _build(settings, progress)
    _set_prices(loaded, settings, progress)
    return loaded


def _build(settings: Settings, progress: Progress) -> LoadedEngine:
    placement = choose_placement(settings.device, settings.weights)
    source = settings.target
    progress(f"loading {_model_id(source)} ({placement.device.type}, {placement.weights})")
    tokenizer = load_tokenizer(source)
    target_model = load_model(source, placement)
    target_size = vocab_size(target_model)
    num_tokens = check_same_vocab(tokenizer, tokenizer, target_size, target_size).num_tokens

    asked = {role: drafting.resolve(getattr(settings, role), role, source) for role in ("small", "medium")}
    names = {role: name for role, name in asked.items() if name is not None}
    loaded: dict[str, LoadedDrafter | None] = {}
    for role, name in names.items():
        progress(f"{role} drafter: {name}")
        loaded[role] = drafting.load(name, role, target_model, tokenizer, placement)
    prepare(target_model, placement)

    limits = Limits(
        settings.max_num_seqs, settings.max_waiting, settings.prefill_chunk, settings.stall_s, settings.prefix_cache
    )
    has_prices = settings.costs != NO_COSTS
    budget = settings.budget if settings.budget != "auto" else default_budget(placement, is_most=has_prices)
    check_budget(budget, _MAX_BUDGET)
    num_rows = settings.kv_rows or _fitting_rows(settings, names, target_model, loaded, budget, placement)
    max_model_len = min(settings.max_model_len or num_rows, num_rows - budget)
    if max_model_len < 2:
        raise ValueError(f"kv_rows = {num_rows} has no room for a text beside a tree of budget = {budget} nodes")
    wanted = sorted({layer for drafter in loaded.values() if drafter is not None for layer in drafter.layers})
    target = CausalLM(target_model, num_rows=num_rows, num_tokens=num_tokens, capture=wanted)
    check_attention(target, settings.target)

    corpus = None if settings.ngram_corpus is None else CorpusIndex.load(settings.ngram_corpus, tokenizer_hash(tokenizer))
    drafters: dict[str, Drafter] = {NGRAM: NgramDrafter(corpus=corpus)}
    for role, name in names.items():
        drafter = drafting.make(
            role, name, loaded[role], target, placement, num_rows=num_rows, max_num_seqs=settings.max_num_seqs
        )
        if drafter is not None:
            drafters[role] = drafter
    rule, selector = _fitted(settings, names)
    schedules = build_schedules(
        small="small" if "small" in drafters else NGRAM,
        medium="medium" if "medium" in drafters else None,
        budget=budget,
        is_auto=settings.budget == "auto" and has_prices,
        min_expansion=_LEAST_EXPANDED if placement.device.type == "cpu" else 0.0,
        width=4 if placement.device.type == "cpu" else 10,
        word=None if settings.plan == "auto" else settings.plan,
        rule=rule,
        selector=selector,
    )
    for name, definition in settings.define.items():
        if name in schedules:
            raise ValueError(f"define: a schedule {name!r} is there already")
        schedules[name] = define_schedule(name, available=list(drafters), rule=rule, **definition.model_dump())
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
        allow_lossy=settings.allow_lossy,
    )
    progress(f"schedules: {', '.join(schedules)}; default: {engine.default_schedule}; {num_rows} cache rows")
    return LoadedEngine(engine, tokenizer)


def default_budget(placement: Placement, *, is_most: bool) -> int:
    """Nodes verified per step where nobody says otherwise: rows are dear on a CPU and nearly free on an accelerator.

    With `is_most` prices decide, and this only bounds what they may choose.
    """
    if placement.device.type == "cpu":
        return 16 if is_most else 8
    return 64


def _set_prices(loaded: LoadedEngine, settings: Settings, progress: Progress) -> None:
    """Give the engine what it decides by. Not inside `no_helpers`: prices are measured as they are paid."""
    engine = loaded.engine
    assert isinstance(engine, Engine), "made in this very module"
    if settings.costs == NO_COSTS or not any(schedule.is_auto for schedule in engine.schedules.values()):
        return
    if settings.costs == MEASURE_COSTS:
        profile = profile_for(loaded, settings, progress)
    else:
        profile = read_profile(Path(settings.costs))
    engine.auto = AutoBudget(LiveCosts(profile))
    budget = max(schedule.budget for schedule in engine.schedules.values() if schedule.is_auto)
    tuner = Tuner(talon_grid(budget)) if settings.tune_talon and budget > 1 else None
    engine.steering = Steering(engine.schedules, free=frozenset({NGRAM}), tuner=tuner, told=engine.outlet.on_fallback)


def _fitted(settings: Settings, names: dict[str, str]) -> tuple[Rule | None, Selector | None]:
    """What `guided` and `nde` go by; ValueError that names the setting for a file that holds no such thing."""

    def file_of(setting: str, shipped: str) -> Path | None:
        if setting == NONE:
            return None
        return drafting.shipped_for(names, shipped) if setting == AUTO else Path(setting)

    rule = _read("rule", file_of(settings.rule, "rule.json"), lambda file: Rule.from_json(file.read_text("utf-8")))
    return rule, _read("selector", file_of(settings.selector, "selector.safetensors"), Selector.load)


def _read(setting: str, file: Path | None, read: Callable[[Path], Fitted]) -> Fitted | None:
    try:
        return None if file is None else read(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{setting} = {str(file)!r}: {error}") from error


def _default_schedule(settings: Settings, drafters: dict[str, Drafter]) -> str:
    """Both drafters on one tree where the medium one was trained for it; a truncated stand-in does not earn its price."""
    trained = "medium" in drafters and not is_truncated(settings.medium)
    return "treegraft" if trained else "small"


def _fitting_rows(
    settings: Settings,
    names: dict[str, str],
    target: Any,
    loaded: dict[str, LoadedDrafter | None],
    budget: int,
    placement: Placement,
) -> int:
    """Rows for the longest text of every sequence, or as many as fit into a share of the free memory."""
    config, size = target.config.get_text_config(), next(target.parameters()).element_size()
    # A truncated drafter has at most as many layers as the target.
    row_bytes = lm_row_bytes(config, size) * (1 + sum(map(is_truncated, names.values())))
    row_bytes += sum(drafter.row_bytes(size) for drafter in loaded.values() if drafter is not None)
    longest = min(settings.max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    wanted = settings.max_num_seqs * (longest + budget)
    fitting = int(_free_bytes(placement.device) * _MEMORY_SHARE / row_bytes)
    if fitting < longest + budget:
        raise ValueError(
            f"one answer of max_model_len = {longest} tokens needs {(longest + budget) * row_bytes / 2**30:.1f} GiB of "
            f"cache rows, {_MEMORY_SHARE:.0%} of the free memory is less; set a smaller max_model_len or set kv_rows"
        )
    return min(wanted, fitting)


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
