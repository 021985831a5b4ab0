"""What one forward of the target costs: against transformers' own, and by the number of rows.

A decoding step reads every weight once, however few rows it computes, so a row more is cheap until arithmetic takes over.
How cheap decides which draft trees pay; how fast one row is decides whether plain decoding is a fair baseline.

All variants are measured in one run, one after the other in every round, each on its own cache of the same context:
our forward with 1 to 32 rows, and transformers' eager model, unmodified, with its DynamicCache and one token per step.

    python -m bench.forward
    python -m bench.forward --target Qwen/Qwen2.5-0.5B-Instruct --rounds 30 --contexts 64,512,2048
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from app.commands.options import describe, fail, takes_settings
from app.commands.serve import say
from app.config import Settings
from app.measure import Spread, finish, show, spread
from app.target import with_local_target
from models.attention import Segment, chain_then_tree
from models.causal_lm import CausalLM
from models.kv_cache import RowList
from models.loading import Placement, Weights, choose_placement, load_model, prepare
from models.packed import fp16_packing_available

WARM_UP = 3  # rounds that are thrown away
_TOKEN = 5  # any; time does not depend on it


@dataclass(slots=True)
class Variant:
    """One thing to measure and its samples."""

    who: str  # "ours" or "transformers"
    weights: str
    attention: str
    context: int
    rows: int
    run: Callable[[], object] = field(repr=False)
    undo: Callable[[], object] = lambda: None  # after each run, not timed
    seconds: list[float] = field(default_factory=list)

    def spread_ms(self) -> Spread:
        return spread([1000 * second for second in self.seconds])


@takes_settings
def main(
    settings: Settings,
    contexts: Annotated[str, typer.Option(help="Tokens before the measured ones.")] = "64,512",
    rows: Annotated[str, typer.Option(help="Rows of our forward; 1 is added.")] = "1,2,4,8,16,32",
    formats: Annotated[str | None, typer.Option(help="Weights of our forward; none: what this device serves.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Measure single forwards of the target."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated")  # its successor is too new for older versions
    try:
        lengths, counts = _numbers(contexts), sorted({1, *_numbers(rows)})
        settings = with_local_target(settings, say)
        placements = [choose_placement(settings.device, word) for word in _formats(settings, formats)]
        variants = [
            variant
            for placement in placements
            for variant in _ours(settings.target, placement, lengths, counts)
        ]
        plain = choose_placement(settings.device, "fp32")
        variants += _transformers(settings.target, plain, lengths)
    except (ValueError, OSError) as error:
        fail(describe(error))
    say(f"{len(variants)} variants, {WARM_UP} + {rounds} rounds")
    measure(variants, rounds, plain.device)
    _show(variants, counts)
    samples = [
        {name: getattr(variant, name) for name in ("who", "weights", "attention", "context", "rows", "seconds")}
        for variant in variants
    ]
    finish("forward", placements[0], {"target": Path(settings.target).name, "rounds": rounds, "samples": samples}, json_file)


@torch.inference_mode()
def measure(variants: list[Variant], rounds: int, device: torch.device) -> None:
    """Fill in `seconds`; a round visits every variant once, and every other round in reverse order."""
    for number in range(WARM_UP + rounds):
        for variant in variants if number % 2 else reversed(variants):
            _wait(device)
            start = time.perf_counter()
            variant.run()
            _wait(device)
            if number >= WARM_UP:
                variant.seconds.append(time.perf_counter() - start)
            variant.undo()


def _ours(source: str, placement: Placement, contexts: list[int], counts: list[int]) -> list[Variant]:
    """Our forward over one verified token and a chain of drafted ones below it, with the mask of a tree."""
    model = prepare(load_model(source, placement), placement)
    lm = CausalLM(model, num_rows=sum(contexts) + max(counts))
    scratch = lm.pool.allocate(max(counts))
    variants = []
    for context in contexts:
        prefix = RowList()
        prefix.extend(lm.pool.allocate(context))
        lm.forward([Segment([_TOKEN] * context, range(context), RowList().view(), prefix.view().tolist(), [])])
        for count in counts:
            tree = torch.ones(count - 1, count - 1, dtype=torch.bool).tril_()
            segment = Segment(
                tokens=[_TOKEN] * count,
                positions=range(context, context + count),
                prefix=prefix.view(),
                rows=scratch[:count],
                wanted=range(count),
                visible=chain_then_tree(1, tree) if count > 1 else None,
            )
            run = partial(lm.forward, [segment])
            variants.append(Variant("ours", placement.weights, "ragged", context, count, run))
    return variants


def _transformers(source: str, placement: Placement, contexts: list[int]) -> list[Variant]:
    """The unmodified model, one token per step, with either attention that it brings along."""
    variants = []
    for attention in ("eager", "sdpa"):
        model: Any = load_model(source, placement)
        model.set_attn_implementation(attention)
        variants += [
            Variant("transformers", placement.weights, attention, context, 1, *_step(model, context)) for context in contexts
        ]
    return variants


def _step(model: Any, context: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A decoding step behind `context` tokens, and what takes its token off the cache again."""
    device = next(model.parameters()).device
    cache = DynamicCache(config=model.config)
    step = partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)
    with torch.inference_mode():
        step(torch.full((1, context), _TOKEN, device=device))
    return partial(step, torch.full((1, 1), _TOKEN, device=device)), partial(cache.crop, -1)


def _show(variants: list[Variant], counts: list[int]) -> None:
    plain = {(v.attention, v.context): v.spread_ms().median for v in variants if v.who == "transformers"}
    ours = {(v.weights, v.context, v.rows): v.spread_ms() for v in variants if v.who == "ours"}
    one_row = [
        [
            f"{weights}, context {context}",
            str(one),
            *(f"{plain[attention, context]:.2f}" for attention in ("eager", "sdpa")),
            *(f"{plain[attention, context] / one.median:.2f}" for attention in ("eager", "sdpa")),
        ]
        for (weights, context, rows), one in ours.items()
        if rows == 1
    ]
    titles = ("ours", "ours, ms", "eager, ms", "sdpa, ms", "eager/ours", "sdpa/ours")
    show("one row, against transformers fp32 (medians; quartiles)", titles, one_row)
    by_rows = [
        [f"{weights}, context {context}", *(f"{ours[weights, context, n].median / one.median:.2f}" for n in counts)]
        for (weights, context, rows), one in ours.items()
        if rows == 1
    ]
    show("cost of n rows, in forwards of one row", ("rows", *map(str, counts)), by_rows)


def _formats(settings: Settings, given: str | None) -> list[Weights]:
    if given is not None:
        words = given.split(",")
        if unknown := set(words) - set(get_args(Weights)):
            raise ValueError(f"formats: {sorted(unknown)[0]!r} is not one of {', '.join(get_args(Weights))}")
        return words  # type: ignore[return-value]
    if choose_placement(settings.device).device.type != "cpu":
        return ["bf16", "fp32"]
    return ["fp16", "fp32"] if fp16_packing_available() else ["fp32"]


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(f"{text!r}: expected positive numbers")
    return numbers


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    typer.run(main)
