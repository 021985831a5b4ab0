"""The load of a soak: clients that do random things, what came of each, and what a watcher saw of the server meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from bench.asking import Reply, ask, send_raw
from bench.soak_checks import Expected, Series, read_metrics
from bench.soak_mix import Malformed, Move, Offer, Question, draw

SETTLE_S = 20.0  # how long a server may take to notice that everybody hung up
PATIENCE_S = 180.0  # a client that waits longer for an answer calls it lost
_KEPT = 20  # violations that are told in full
_RESTS, _LEAST_WORK_S = 12, 5.0  # how often the clients rest, and how long they work in between at least
_REST_S = 4.0  # by then a server that has nothing to do has given its free memory back


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
    at_rest: list[tuple[float, int]] = field(default_factory=list)  # the same, while nobody asked for anything
    scrapes: list[tuple[float, Series]] = field(default_factory=list)  # seconds, /metrics, at rest

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


async def scrape(client: httpx.AsyncClient) -> Series:
    """What /metrics says now."""
    return read_metrics((await client.get("/metrics")).text)


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
    """Let `concurrency` clients do random things for so long, rests not counted, and watch the server meanwhile.

    Memory that was freed stays with a busy process, more of it or less; what it keeps for good shows when nobody asks.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    num_rests = max(min(_RESTS, int(seconds / _LEAST_WORK_S)), 1)

    async def watch() -> None:
        while True:
            soak.memory.append((time.monotonic(), resident()))
            await asyncio.sleep(min(max(seconds / 300, 0.5), 5.0))

    async def play(client: httpx.AsyncClient, rng: random.Random, end: float) -> None:
        while time.monotonic() < end:
            await make(client, soak, plan, draw(rng, plan.known, plan.wrong, plan.offer))

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:
        watching = asyncio.create_task(watch())
        dice = [random.Random(f"{seed}-{number}") for number in range(concurrency)]
        try:
            for _ in range(num_rests):
                end = time.monotonic() + seconds / num_rests
                async with asyncio.TaskGroup() as clients:
                    for rng in dice:
                        clients.create_task(play(client, rng, end))
                await settle(client)
                await asyncio.sleep(_REST_S)
                soak.at_rest.append((time.monotonic(), resident()))
                soak.scrapes.append((time.monotonic(), await scrape(client)))
            if watching.done():
                watching.result()  # raises what ended it early
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def settle(client: httpx.AsyncClient) -> Series:
    """Wait until nothing runs, for a while; the metrics then."""
    end = time.monotonic() + SETTLE_S
    while True:
        series = await scrape(client)
        if not (series["num_requests_running"] or series["num_requests_waiting"]) or time.monotonic() > end:
            return series
        await asyncio.sleep(0.1)
