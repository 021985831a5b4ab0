"""``graftserve bench verifiers``: tree policies and verification rules side by side, on the models as configured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import describe, fail
from app.commands.outputs import check_outputs
from app.config import Settings


def verifiers(
    settings: Settings,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, .txt or .jsonl; none: 20 built in.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 64,
    temperatures: Annotated[str, typer.Option(metavar="T,…", help="Temperatures, 0 to 2.")] = "0,0.6,1",
    pairs: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Pairs to compare; none: all, those of --define included.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(metavar="small|medium", help="Who drafts; none: the medium drafter if there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first prompt; every other has the next one.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there too.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw acceptance by depth, tau and delta.")] = None,
) -> None:
    """Compare tree policies and rules: tokens per verification, what trees cost, where the time goes."""
    from app.build import default_budget
    from app.commands.loading import load
    from app.commands.progress import answer_bar
    from app.errors import RequestFailed
    from app.local import running
    from app.measure import finish, show
    from app.plots import draw
    from app.prompt_sets import encode, read_prompts
    from app.verifier_bench import Plan, StepLog, measure_pairs
    from app.verifier_pairs import default_pairs
    from app.verifier_report import COLUMNS, funnel_columns, funnel_rows, legend, pair_json, panels, rows
    from engine.engine import Engine
    from engine.request import RequestError
    from models.loading import choose_placement
    from models.sampling import ParamError
    from scheduler.registry import WITHOUT_PRICES

    check_outputs(json_file, plot)
    try:
        conversations = read_prompts(prompts, limit)
        placement = choose_placement(settings.device, settings.weights)
        # Trees of a given size are compared, whatever they cost, so no prices are needed.
        budget = default_budget(placement, is_most=False) if settings.budget == "auto" else settings.budget
        word = WITHOUT_PRICES if settings.plan == "auto" else settings.plan
        role, small = _roles(settings, drafter)
        defined = {**default_pairs(budget, role, small=small, word=word), **settings.define}
        names = list(defined) if pairs is None else pairs.split(",")
        if unknown := [name for name in names if name not in defined]:
            raise ValueError(f"pairs: {unknown[0]!r} is not one of {', '.join(defined)}")
        plan = Plan(names, _numbers(temperatures), max_tokens, seed)
    except ParamError as error:
        fail(f"temperatures: {error}")
    except (ValueError, OSError) as error:
        fail(describe(error))
    chosen = settings.model_copy(update={"budget": budget, "define": {name: defined[name] for name in names}})
    _, loaded = load(chosen)
    engine = loaded.engine
    assert isinstance(engine, Engine), "models can be measured in this very process only"
    log = StepLog()
    engine.subscribe(log)
    try:
        asked = [encode(loaded.tokenizer, messages) for messages in conversations]
        with running(engine), answer_bar(plan.num_answers(len(asked))) as on_answer:
            counts = measure_pairs(engine, log, asked, plan, on_answer)
    except RequestError as error:
        fail(str(error))
    except RequestFailed as error:
        typer.echo(f"graftserve: {error}", err=True)
        raise typer.Exit(1) from None

    title = f"{engine.model_id}, {placement.weights}, drafts by {role}, budget {budget}"
    show(f"{title}, {len(asked)} prompts", COLUMNS, rows(counts))
    typer.echo(legend())
    show("accepted at depth d, of the verifications with a node there", funnel_columns(counts), funnel_rows(counts))
    if plot is not None:
        draw(panels(counts), plot, title, columns=2)
    record = {
        "model": engine.model_id,
        "prompts": len(asked),
        "max_tokens": max_tokens,
        "budget": budget,
        "seed": seed,
        "settings": chosen.model_dump(mode="json"),
        "pairs": [pair_json(one) for one in counts],
    }
    finish("verifiers", placement, record, json_file)


def _roles(settings: Settings, drafter: str | None) -> tuple[str, str | None]:
    """Who drafts, and a cheaper drafter beside it if there is one. ValueError if no drafter runs a model."""
    from app.drafting import NGRAM, resolve

    names = {role: resolve(getattr(settings, role), role, settings.target) for role in ("small", "medium")}
    able = [role for role in ("medium", "small") if names[role] not in (None, NGRAM)]
    if drafter is not None and drafter not in able:
        raise ValueError(f"drafter {drafter!r} is not one that runs a model here: {', '.join(able) or 'there is none'}")
    if not able:
        raise ValueError("small and medium: rules are compared on drafters that run a model, and there is none")
    role = drafter or able[0]
    return role, None if role == "small" else "small" if "small" in able else NGRAM


def _numbers(text: str) -> tuple[float, ...]:
    """Temperatures from a list with commas. ValueError, ParamError among them, for what is none."""
    from models.sampling import SamplingParams

    found = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            raise ValueError(f"temperatures: {part!r} is not a number") from None
        found.append(SamplingParams(temperature=number).temperature)
    return tuple(dict.fromkeys(found))
