"""Endurance: a real server under a random mix of requests for minutes, and everything that must still be right then.

Eight clients ask short and long questions, whole and streamed, under every schedule, and also hang up, lose patience, and send
nonsense. Every finished answer to a question at temperature 0, or with a seed, is compared with plain decoding asked alone
beforehand, and all are asked alone once more in the end. Memory, acceptance and the server's own counters are watched.

With activations in float32, as always on a CPU, rounding hardly ever decides between two tokens. In half precision it does;
then texts above temperature 0 that differ are counted as near ties, since log-probabilities do not tell what the noise made
of them. What is checked, and the limits, are in docs/load.md. Exit status: 0 if everything was right, 1 if anything was not, 2
for what the user can mend.

    python -m bench.soak --minutes 10
    python -m bench.soak --minutes 1 --target models/toy --medium none --growth-limit 20
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import httpx
import torch
import typer

from app.commands.options import describe, fail, takes_settings
from app.commands.serve import say
from app.config import Settings
from app.measure import finish
from app.proof import tolerance_of
from bench.asking import Reply, ask
from bench.server_process import ServerFailed, ServerProcess
from bench.soak_checks import Acceptance, Expected, Series, accepted_per_step, close_calls, learned
from bench.soak_mix import COMPLETIONS, Offer, Question, malformed, plain, questions
from bench.soak_play import PATIENCE_S, Plan, Soak, hammer, judge, scrape, settle
from bench.soak_report import checks, show_soak
from models.loading import Placement, choose_placement
from scheduler.registry import PLAIN

_KV_ROWS = 8192  # soon full: a row that is used for the first time looks like a leak, and eviction wants a trial
_FILLING, _MOST_FILLING = 2000, 64  # tokens of a prompt that fills the cache, and how many at the most
_TOP_LOGIT = 20.0  # of a large one; see `tolerance_of`
_BUDGET = 8  # nodes per step, root included, when drafts are judged


async def prepare(client: httpx.AsyncClient, tolerance: float, *, is_exact: bool) -> Plan:
    """Find out what the server offers, and ask every question alone, by plain decoding.

    Raises ServerFailed if it does not answer one.
    """
    listed = (await client.get("/v1/schedules")).json()["data"]
    model = (await client.get("/v1/models")).json()["data"][0]
    chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
    auto = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "speculative": {"budget": "auto"}})
    offer = Offer(
        [entry["name"] for entry in listed],
        default=next(entry["name"] for entry in listed if entry["default"]),
        max_model_len=model["max_model_len"],
        has_chat=chat.status_code == 200,
        has_prices=auto.status_code == 200,
        drawing=frozenset(entry["name"] for entry in listed if not entry["keeps_seeded_text"]),
    )
    known = questions(offer)
    expected = {}
    for question in known:
        reply = await ask(client, question.path, plain(question, evidence=2))
        if not reply.is_answer or reply.num_tokens is None:
            raise ServerFailed(f"no answer to question {question.number}: {reply.status} {reply.error or reply.fault}")
        calls = close_calls(reply.logprobs) if reply.logprobs and not question.is_sampled else ()
        expected[question.number] = [
            Expected(text, reason or "", reply.num_tokens, calls)
            for text, reason in zip(reply.texts, reply.reasons, strict=True)
        ]
    await _fill(client, model["max_model_len"])
    plan = Plan(known, malformed(offer), offer, expected, tolerance, is_exact)
    return replace(plan, accepted=await _drafts_alone(client, plan))


async def _fill(client: httpx.AsyncClient, max_model_len: int) -> None:
    """Send prompts, each another one, until every row of the caches was used: from then on memory should not grow.

    Raises ServerFailed if one is not answered.
    """
    touched, number = -1.0, 0
    while touched < (now := await _touched(client)) and number < _MOST_FILLING:
        touched, number = now, number + 1
        rng = random.Random(f"filling {number}")
        prompt = rng.choices(range(256), k=min(max_model_len - 2, _FILLING))
        reply = await ask(client, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        if not reply.is_answer:
            raise ServerFailed(f"no answer to filling prompt {number}: {reply.status} {reply.error or reply.fault}")


async def _touched(client: httpx.AsyncClient) -> float:
    return (await scrape(client)).get("cache_rows_touched_bytes", 0.0)


async def _drafts_alone(
    client: httpx.AsyncClient, plan: Plan, take: Callable[[Question, Reply], None] = lambda question, reply: None
) -> float | None:
    """Ask every question alone under the default schedule: drafted tokens that were accepted per step.

    With a budget, since what prices make of a schedule depends on what else the machine does: with it the trees are the same
    at any time, as long as no drafter is out of step.
    """
    before, how = await scrape(client), {} if plan.offer.default == PLAIN else {"speculative": {"budget": _BUDGET}}
    for question in plan.known:
        take(question, await ask(client, question.path, {**question.body, **how}))
    return accepted_per_step(before, await scrape(client))


async def ask_again(client: httpx.AsyncClient, soak: Soak, plan: Plan) -> Acceptance | None:
    """Every question alone once more: by plain decoding, and under the default schedule; how drafts fare before and after."""

    def take(question: Question, reply: Reply, how: str = "alone again, with a budget") -> None:
        if reply.is_answer:
            judge(soak, plan, question, reply, how)
        else:
            soak.blame(f"question {question.number} ({how}): {reply.status} {reply.error or reply.fault}")

    for question in plan.known:
        take(question, await ask(client, question.path, plain(question)), "alone again, plain")
        take(question, await ask(client, question.path, dict(question.body)), "alone again, default")
    accepted = await _drafts_alone(client, plan, take)
    return None if plan.accepted is None or accepted is None else Acceptance(plan.accepted, accepted)


@takes_settings
def main(
    settings: Settings,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the load lasts.")] = 10.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients.")] = 8,
    seed: Annotated[int, typer.Option(help="Of what the clients do.")] = 1,
    growth_limit: Annotated[float, typer.Option(min=0, help="MB per minute in the second half of the time.")] = 1.0,
    acceptance_limit: Annotated[float, typer.Option(min=0, max=1, help="Share that acceptance may lose.")] = 0.05,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Keep a server busy, and check that it stays right."""
    if json_file is not None and not json_file.parent.is_dir():
        fail(f"{json_file}: there is no folder {json_file.parent}")
    if settings.kv_rows is None:
        settings = settings.model_copy(update={"kv_rows": _KV_ROWS})
    try:
        placement = choose_placement(settings.device, settings.weights)
    except ValueError as error:
        fail(describe(error))
    soak = Soak()
    say(f"starting the server (target: {settings.target})")
    try:
        with ServerProcess.start(settings) as server:
            say(f"serving at {server.url}, process {server.pid}; asking every question alone")
            plan, health, series, rates, moments = asyncio.run(_soak(server, soak, placement, minutes * 60, concurrency, seed))
            status = server.stop()
            written = server.written()
    except (ServerFailed, ValueError) as error:
        fail(describe(error))
    found = checks(
        soak.at_rest,
        soak.scrapes,
        rates,
        series,
        health=health,
        status=status,
        written=written,
        growth_limit=growth_limit,
        acceptance_limit=acceptance_limit,
        num_violations=soak.num_violations,
        num_compared=soak.num_compared,
        num_hung_up=sum(number for (_, how), number in soak.ended.items() if how == "hung up"),
    )
    show_soak(soak.sent, soak.ended, found)
    for line in soak.violations:
        say(line)
    if soak.num_violations > len(soak.violations):
        say(f"and {soak.num_violations - len(soak.violations)} more")
    is_right = all(check.is_right for check in found)
    record = {
        "is_right": is_right,
        "minutes": minutes,
        "concurrency": concurrency,
        "seed": seed,
        "schedules": list(plan.offer.schedules),
        "questions": len(plan.known),
        "sent": dict(soak.sent),
        "ended": {f"{kind}: {how}": number for (kind, how), number in sorted(soak.ended.items())},
        "compared": soak.num_compared,
        "near_ties": soak.num_near_ties,
        "violations": soak.violations,
        "checks": [check.as_json() for check in found],
        "memory": _from_start(soak, soak.memory),
        "memory_at_rest": _from_start(soak, soak.at_rest),
        "learned": {moment: learned(then) for moment, then in moments.items()},
        "settings": settings.model_dump(mode="json"),
    }
    finish("soak", placement, record, json_file)
    raise typer.Exit(0 if is_right else 1)


def _from_start(soak: Soak, samples: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    return [(round(second - soak.memory[0][0], 2), resident) for second, resident in samples]


async def _soak(
    server: ServerProcess, soak: Soak, placement: Placement, seconds: float, concurrency: int, seed: int
) -> tuple[Plan, int, Series, Acceptance | None, dict[str, Series]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        tolerance = tolerance_of(placement.dtype, _TOP_LOGIT)
        plan = await prepare(client, tolerance, is_exact=placement.dtype == torch.float32)
        names = ", ".join(plan.offer.schedules)
        say(f"{len(plan.known)} questions, schedules {names}; {concurrency} clients for {seconds:g} s")
        moments = {"before the load": await scrape(client)}
        await hammer(
            server.url,
            soak,
            plan,
            seconds=seconds,
            concurrency=concurrency,
            seed=seed,
            resident=server.resident_bytes,
        )
        series = await settle(client)
        health = (await client.get("/health")).status_code
        say("asking every question alone again")
        rates = await ask_again(client, soak, plan)
        moments |= {"after the load": series, "in the end": await scrape(client)}
    return plan, health, series, rates, moments


if __name__ == "__main__":
    typer.run(main)
