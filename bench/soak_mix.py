"""What a soak asks: a fixed set of questions whose answers are known, and a random mix of ways to ask them, or to be rude.

Everything is drawn from a generator that is passed in, so the same seed asks the same things in the same order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.prompts_builtin import PROMPTS
from scheduler.registry import PLAIN

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BUDGETS: tuple[int | str | None, ...] = (None, None, 1, 2, 5, 16, 48, "auto")
WEIGHTS = {
    "answer": 50,  # a question whose answer is known
    "free": 8,  # drawn without a seed, so that only its form is known
    "hang up early": 8,  # at a random moment, mostly before the first token
    "hang up in the stream": 12,  # after some chunks
    "short timeout": 6,  # the client waits less than an answer takes
    "malformed": 12,
    "look": 4,  # models, schedules, health, tokenize
}
Kind = Literal["answer", "free", "hang up early", "hang up in the stream", "short timeout", "malformed", "look"]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, without the way it is asked (schedule, stream). The answer is determined: T = 0, or a seed."""

    number: int
    path: str
    body: Mapping[str, Any]

    @property
    def is_sampled(self) -> bool:
        """Whether noise decides, so that log-probabilities alone cannot tell a near tie."""
        return float(self.body["temperature"]) > 0

    @property
    def num_choices(self) -> int:
        """Answers it asks for."""
        return int(self.body.get("n") or 1)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A body that must be refused."""

    name: str
    path: str
    content: bytes
    status: int = 400


@dataclass(frozen=True, slots=True)
class Move:
    """One thing a client does."""

    kind: Kind
    path: str
    body: Mapping[str, Any]
    question: Question | None = None  # whose answer is known
    patience_s: float | None = None  # the client gives up then
    hang_up_after: int | None = None  # chunks of the stream
    malformed: Malformed | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be asked of a server."""

    schedules: Sequence[str]
    max_model_len: int
    has_chat: bool = True
    has_prices: bool = True  # without them it refuses the budget "auto"
    default: str = PLAIN  # the schedule of requests that name none
    drawing: frozenset[str] = frozenset()  # schedules under which a seed gives another text than under plain decoding

    @property
    def budgets(self) -> Sequence[int | str | None]:
        """Budgets to choose from."""
        return BUDGETS if self.has_prices else [budget for budget in BUDGETS if budget != "auto"]


def questions(offer: Offer) -> list[Question]:
    """The questions: short and long, both endpoints, stop strings, several answers, temperature 0 and seeds."""
    room = offer.max_model_len - 400  # tokens of the longest answer and of a template; a byte of text is at most one token
    if room < 100:
        raise ValueError(f"a soak needs a context of at least 500 tokens, the server has {offer.max_model_len}")

    def text(*parts: str) -> str:
        return "\n".join(parts).encode()[:room].decode("utf-8", "ignore")

    asked: list[tuple[str, str, dict[str, Any]]] = []
    for index, prompt in enumerate(PROMPTS[:8]):
        asked.append((COMPLETIONS, text(prompt), {"max_tokens": 16 + 6 * index}))
    for index, prompt in enumerate(PROMPTS[8:14]):
        asked.append((CHAT, text(prompt), {"max_tokens": 48 - 6 * index}))
    asked.append((COMPLETIONS, text("One, two, one, two, one, two, one,"), {"max_tokens": 60}))
    asked.append((COMPLETIONS, text(*PROMPTS[:12]), {"max_tokens": 40}))
    asked.append((COMPLETIONS, text(*PROMPTS[4:], *PROMPTS), {"max_tokens": 24}))
    asked.append((CHAT, text(*PROMPTS[3:15]), {"max_tokens": 32}))
    for index, stop in enumerate((["th", "qu", "\n\n"], [" a"], ["."])):
        asked.append((COMPLETIONS if index else CHAT, text(PROMPTS[14 + index]), {"max_tokens": 64, "stop": stop}))
    asked.append((COMPLETIONS, text(PROMPTS[17]), {"max_tokens": 32, "n": 2}))
    asked.append((CHAT, text(PROMPTS[18]), {"max_tokens": 24, "n": 3}))
    for index in range(3):
        sampling = {"temperature": 0.7 + 0.2 * index, "seed": 40 + index}
        asked.append((COMPLETIONS, text(PROMPTS[index]), {"max_tokens": 40, **sampling}))
        asked.append((CHAT, text(PROMPTS[10 + index]), {"max_tokens": 32, "n": 1 + index, **sampling}))
    return [
        Question(number, path, {**_prompt(path, prompt), "temperature": 0, **options})
        for number, (path, prompt, options) in enumerate(asked)
        if offer.has_chat or path == COMPLETIONS
    ]


def malformed(offer: Offer) -> list[Malformed]:
    """Bodies that must be refused, each with its status."""
    fine = {"prompt": "abc", "max_tokens": 4}

    def completion(name: str, status: int = 400, **wrong: Any) -> Malformed:
        return Malformed(name, COMPLETIONS, json.dumps({**fine, **wrong}).encode(), status)

    bodies = [
        Malformed("no JSON", COMPLETIONS, b'{"prompt": "abc", '),
        Malformed("no object", COMPLETIONS, b"[1, 2]"),
        Malformed("nothing", COMPLETIONS, b""),
        Malformed("no prompt", COMPLETIONS, b"{}"),
        completion("an unknown field", temprature=1),
        completion("a negative temperature", temperature=-1),
        completion("top_p of 0", top_p=0),
        completion("max_tokens of 0", max_tokens=0),
        completion("an unknown schedule", speculative={"schedule": "no-such-schedule"}),
        completion("a budget of 0", speculative={"budget": 0}),
        completion("a budget for plain decoding", speculative={"schedule": PLAIN, "budget": 4}),
        completion("a token outside of the vocabulary", prompt=[10**9]),
        completion("an empty prompt", prompt=""),
        completion("more than the context holds", max_tokens=offer.max_model_len + 1),
        completion("an empty stop string", stop=[""]),
        completion("stream options without a stream", stream_options={"include_usage": True}),
        completion("another model", status=404, model="no-such-model"),
    ]
    if offer.has_chat:
        bodies += [
            Malformed("no message", CHAT, b'{"messages": []}'),
            Malformed("an unknown role", CHAT, b'{"messages": [{"role": "nobody", "content": "abc"}]}'),
        ]
    return bodies


def draw(rng: random.Random, known: Sequence[Question], wrong: Sequence[Malformed], offer: Offer) -> Move:
    """The next thing that one client does."""
    kind: Kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]  # type: ignore[assignment]
    if kind == "malformed":
        nonsense = rng.choice(wrong)
        return Move(kind, nonsense.path, {}, malformed=nonsense)
    if kind == "look":
        return Move(kind, rng.choice(("/health", "/v1/models", "/v1/schedules", "/metrics")), {})
    question = rng.choice(known)
    how = {**_speculation(rng, offer, question), **_streaming(rng.random() < 0.5 or kind == "hang up in the stream")}
    if kind == "answer":
        return Move(kind, question.path, {**question.body, **how}, question)
    open_ended = {key: value for key, value in question.body.items() if key not in ("seed", "stop")}
    body = {**open_ended, "temperature": rng.choice((0, 0.6, 1.0, 1.3)), **how}
    if kind == "free":
        body |= {"top_p": rng.choice((0.5, 0.9, 1.0)), "top_k": rng.choice((0, 5, 50)), "max_tokens": rng.randint(1, 80)}
        return Move(kind, question.path, body)
    body["max_tokens"] = rng.randint(60, min(400, offer.max_model_len // 4))  # long enough to be cut short
    if kind == "hang up in the stream":
        return Move(kind, question.path, body, hang_up_after=rng.randint(1, 30))
    slowest = 0.15 if kind == "hang up early" else 0.6
    return Move(kind, question.path, body, patience_s=rng.uniform(0.001, slowest))


def plain(question: Question, *, evidence: int = 0) -> dict[str, Any]:
    """The body that asks for the answer by plain decoding; `evidence` alternatives of each token, if it is that many."""
    asked = {**question.body, "speculative": {"schedule": PLAIN}}
    if not evidence:
        return asked
    return asked | ({"logprobs": evidence} if question.path == COMPLETIONS else {"logprobs": True, "top_logprobs": evidence})


def _prompt(path: str, prompt: str) -> dict[str, Any]:
    return {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}


def _speculation(rng: random.Random, offer: Offer, question: Question) -> dict[str, Any]:
    known = [name for name in offer.schedules if not (question.is_sampled and name in offer.drawing)]
    schedule = rng.choice([None, *known])
    if schedule is None:
        return {}
    # Plain decoding takes none, and what is drawn at random is never sized by price.
    offered = [budget for budget in offer.budgets if budget != "auto" or schedule not in offer.drawing]
    budget = None if schedule == PLAIN else rng.choice(offered)
    return {"speculative": {"schedule": schedule} | ({} if budget is None else {"budget": budget})}


def _streaming(wanted: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if wanted else {}
