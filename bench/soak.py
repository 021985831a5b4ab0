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
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from bench.asking import Reply, ask, send_raw
from bench.server_process import ServerFailed, ServerProcess
from bench.soak_checks import Acceptance, Expected, Series, accepted_per_step, close_calls, read_metrics
from bench.soak_mix import COMPLETIONS, Malformed, Move, Offer, Question, draw, malformed, plain, questions
from bench.soak_report import checks, show_soak
from models.loading import Placement, choose_placement

PATIENCE_S = 180.0  # a client that waits longer for an answer calls it lost
SETTLE_S = 20.0  # how long a server may take to notice that everybody hung up
_KEPT = 20  # violations that are told in full
_TOP_LOGIT = 20.0  # of a large one; see `tolerance_of`


@dataclass(slots=True)
class Soak:
    """What happened. Written by the clients, read by the checks."""

    sent: Counter[str] = field(default_factory=Counter)  # by kind of move
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and how it ended
    num_compared: int = 0  # choices whose text was compared
    num_near_ties: int = 0
    num_violations: int = 0
    violations: list[str] = field(default_factory=list)  # the first ones
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, resident bytes
    scrapes: list[tuple[float, Series]] = field(default_factory=list)  # seconds, /metrics

    def blame(self, what: str) -> None:
        """Note that the server did something wrong."""
        self.num_violations += 1
        if len(self.violations) < _KEPT:
            self.violations.append(what)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a server is asked, and the answers that are known."""

    known: Sequence[Question]
    wrong: Sequence[Malformed]
    offer: Offer
    expected: Mapping[int, Sequence[Expected]]  # by number of the question, one per choice
    tolerance: float  # gap of log-probabilities that rounding may close
    is_exact: bool = True  # activations in float32: noise does not need excuses
    accepted: float | None = None  # drafted tokens per step of all questions, asked alone; None: nothing was verified


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
        model["max_model_len"],
        has_chat=chat.status_code == 200,
        has_prices=auto.status_code == 200,
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
    accepted = await _default_alone(client, known)
    return Plan(known, malformed(offer), offer, expected, tolerance, is_exact, accepted)


async def _default_alone(
    client: httpx.AsyncClient, known: Sequence[Question], take: Callable[[Question, Reply], None] = lambda question, reply: None
) -> float | None:
    """Ask every question alone under the default schedule: drafted tokens that were accepted per step."""
    before = read_metrics((await client.get("/metrics")).text)
    for question in known:
        take(question, await ask(client, question.path, dict(question.body)))
    return accepted_per_step(before, read_metrics((await client.get("/metrics")).text))


def judge(soak: Soak, plan: Plan, question: Question, reply: Reply, how: str) -> None:
    """Compare a finished answer with the known one."""
    expected, is_equal = plan.expected[question.number], True
    if len(reply.texts) != len(expected):
        soak.blame(f"question {question.number} ({how}): {len(reply.texts)} answers instead of {len(expected)}")
        return
    for index, (one, text, reason) in enumerate(zip(expected, reply.texts, reply.reasons, strict=True)):
        soak.num_compared += 1
        difference = one.differs(text, reason, plan.tolerance)
        is_equal = is_equal and difference is None
        if difference == "near tie" or (difference is not None and question.is_sampled and not plan.is_exact):
            soak.num_near_ties += 1
        elif difference is not None:
            soak.blame(f"question {question.number}, answer {index} ({how}): {difference}")
    if is_equal and reply.num_tokens != expected[0].num_tokens:
        soak.blame(f"question {question.number} ({how}): {reply.num_tokens} tokens instead of {expected[0].num_tokens}")


async def make(client: httpx.AsyncClient, soak: Soak, plan: Plan, move: Move) -> None:
    """Do one thing, and note what came of it."""
    soak.sent[move.kind] += 1
    how = f"{move.path}, {move.body.get('speculative', 'default')}{', stream' if move.body.get('stream') else ''}"
    try:
        async with asyncio.timeout(PATIENCE_S):
            reply = await _send(client, move)
    except TimeoutError:
        soak.ended[move.kind, "lost"] += 1
        soak.blame(f"{move.kind} ({how}): no answer within {PATIENCE_S:g} s")
        return
    except httpx.HTTPError as error:
        soak.ended[move.kind, "broken"] += 1
        soak.blame(f"{move.kind} ({how}): {type(error).__name__}: {error}")
        return
    if reply is None or (reply.last_s is None and reply.fault is None):
        soak.ended[move.kind, "hung up"] += 1
        return
    soak.ended[move.kind, str(reply.status)] += 1
    if move.malformed is not None:
        if reply.status != move.malformed.status or reply.error is None:
            soak.blame(f"{move.malformed.name}: {reply.status} instead of {move.malformed.status} {reply.fault or ''}")
    elif reply.status in (429, 503):
        if reply.fault is not None or reply.retry_after is None:
            soak.blame(f"{move.kind} ({how}): {reply.fault or f'{reply.status} without Retry-After'}")
    elif not reply.is_answer:  # a look at /health and the like counts as one
        soak.blame(f"{move.kind} ({how}): {reply.status} {reply.error or reply.fault}")
    elif move.question is not None:
        judge(soak, plan, move.question, reply, how)


async def _send(client: httpx.AsyncClient, move: Move) -> Reply | None:
    """The reply; None if the client gave up."""
    if move.malformed is not None:
        return await send_raw(client, move.path, move.malformed.content)
    if move.kind == "look":
        reply = Reply(time.perf_counter())
        reply.status = (await client.get(move.path)).status_code
        reply.last_s = time.perf_counter()
        return reply
    if move.kind == "short timeout":
        try:
            async with httpx.AsyncClient(base_url=client.base_url, timeout=move.patience_s, trust_env=False) as impatient:
                return await ask(impatient, move.path, move.body)
        except httpx.TimeoutException:
            return None
    try:
        async with asyncio.timeout(move.patience_s):
            return await ask(client, move.path, move.body, hang_up_after=move.hang_up_after)
    except TimeoutError:
        if move.patience_s is None:
            raise
        return None


async def hammer(
    url: str,
    soak: Soak,
    plan: Plan,
    *,
    seconds: float,
    concurrency: int,
    seed: int,
    resident: Callable[[], int],
) -> None:
    """Let `concurrency` clients do random things for so long, and watch the server meanwhile."""
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)

    async def watch(client: httpx.AsyncClient) -> None:
        while True:
            soak.memory.append((time.monotonic(), resident()))
            soak.scrapes.append((time.monotonic(), read_metrics((await client.get("/metrics")).text)))
            await asyncio.sleep(min(max(seconds / 300, 0.5), 5.0))

    async def play(client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        while time.monotonic() < end:
            await make(client, soak, plan, draw(rng, plan.known, plan.wrong, plan.offer))

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:
        watching = asyncio.create_task(watch(client))
        try:
            async with asyncio.TaskGroup() as clients:
                for number in range(concurrency):
                    clients.create_task(play(client, number))
            if watching.done():
                watching.result()  # raises what ended it early
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def ask_again(client: httpx.AsyncClient, soak: Soak, plan: Plan) -> Acceptance | None:
    """Every question alone once more, by plain decoding and under the default schedule; how drafts fare before and after."""

    def take(question: Question, reply: Reply, how: str = "alone again, default") -> None:
        if reply.is_answer:
            judge(soak, plan, question, reply, how)
        else:
            soak.blame(f"question {question.number} ({how}): {reply.status} {reply.error or reply.fault}")

    for question in plan.known:
        take(question, await ask(client, question.path, plain(question)), "alone again, plain")
    accepted = await _default_alone(client, plan.known, take)
    return None if plan.accepted is None or accepted is None else Acceptance(plan.accepted, accepted)


async def settle(client: httpx.AsyncClient) -> tuple[int, Series]:
    """Wait until nothing runs, for a while; the status of /health and the metrics then."""
    end = time.monotonic() + SETTLE_S
    while True:
        series = read_metrics((await client.get("/metrics")).text)
        if not (series["num_requests_running"] or series["num_requests_waiting"]) or time.monotonic() > end:
            return (await client.get("/health")).status_code, series
        await asyncio.sleep(0.1)


@takes_settings
def main(
    settings: Settings,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the load lasts.")] = 10.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients.")] = 8,
    seed: Annotated[int, typer.Option(help="Of what the clients do.")] = 1,
    growth_limit: Annotated[float, typer.Option(min=0, help="MB per minute in the second half of the time.")] = 1.0,
    acceptance_limit: Annotated[float, typer.Option(min=0, max=1, help="Share that acceptance may lose.")] = 0.25,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Keep a server busy, and check that it stays right."""
    if json_file is not None and not json_file.parent.is_dir():
        fail(f"{json_file}: there is no folder {json_file.parent}")
    try:
        placement = choose_placement(settings.device, settings.weights)
    except ValueError as error:
        fail(describe(error))
    soak = Soak()
    say(f"starting the server (target: {settings.target})")
    try:
        with ServerProcess.start(settings) as server:
            say(f"serving at {server.url}, process {server.pid}; asking every question alone")
            plan, health, series, rates = asyncio.run(_soak(server, soak, placement, minutes * 60, concurrency, seed))
            status = server.stop()
            written = server.written()
    except (ServerFailed, ValueError) as error:
        fail(describe(error))
    found = checks(
        soak.memory,
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
        "memory": [(round(second - soak.memory[0][0], 2), resident) for second, resident in soak.memory],
        "settings": settings.model_dump(mode="json"),
    }
    finish("soak", placement, record, json_file)
    raise typer.Exit(0 if is_right else 1)


async def _soak(
    server: ServerProcess, soak: Soak, placement: Placement, seconds: float, concurrency: int, seed: int
) -> tuple[Plan, int, Series, Acceptance | None]:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        tolerance = tolerance_of(placement.dtype, _TOP_LOGIT)
        plan = await prepare(client, tolerance, is_exact=placement.dtype == torch.float32)
        names = ", ".join(plan.offer.schedules)
        say(f"{len(plan.known)} questions, schedules {names}; {concurrency} clients for {seconds:g} s")
        await hammer(
            server.url,
            soak,
            plan,
            seconds=seconds,
            concurrency=concurrency,
            seed=seed,
            resident=server.resident_bytes,
        )
        health, series = await settle(client)
        say("asking every question alone again")
        rates = await ask_again(client, soak, plan)
    return plan, health, series, rates


if __name__ == "__main__":
    typer.run(main)
