"""The body of an answer, streamed or whole, from the deltas of its choices; endpoints differ in their :class:`Dialect` only."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.answer_trace import ChoiceTrace
from app.bridge import DeltaStream
from app.call import Call
from app.choice import Choice
from app.errors import RequestFailed, TimedOut, describe
from app.request_stats import answer_metrics, usage
from app.serving import Serving
from app.sse import DONE, event
from app.token_text import TokenTexts
from app.tool_reading import CallPiece
from engine.request import EngineStopped, TokenLogprob

_log = logging.getLogger(__name__)


class Dialect(Protocol):
    """How one endpoint spells its answers. Log-probabilities are None where none were asked for or none are due."""

    id_prefix: str
    object: str  # of a whole answer
    chunk_object: str  # of a piece of a streamed one
    prompt_param: str
    default_limit: int | None  # tokens of an answer to a body that sets no limit; None: all the room there is

    def choice(
        self, index: int, text: str, reason: str, logprobs: dict[str, Any] | None, calls: Sequence[CallPiece] = ()
    ) -> dict[str, Any]:
        """A whole choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the chunk that precedes all text, if there is one."""

    def piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None, calls: Sequence[CallPiece] = ()
    ) -> dict[str, Any]:
        """The choice of a chunk that carries text, calls, or both."""

    def ending(self, index: int, reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """The choice of the chunk that carries the finish reason, and what tokens without text of their own leave."""

    def logprobs(self, tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
        """The log-probabilities of a few tokens."""


@dataclass(frozen=True, slots=True)
class AnswerBody:
    """One HTTP call's answer in the making."""

    dialect: Dialect
    model: str
    budget: int
    stream: DeltaStream
    num_prompt_tokens: int
    choices: list[Choice]
    texts: TokenTexts
    has_logprobs: bool
    num_drawn: int  # choices per prompt
    num_kept: int  # of these the best are given back
    traces: list[ChoiceTrace]  # one per choice, if asked for
    call: Call
    id: str
    created: int

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def usage(self) -> dict[str, Any]:
        # A prompt counts once however many answers it gets; so does what the first of them found of it.
        first = [choice.stats for choice in self.choices[:: self.num_drawn]]
        num_cached = sum(stats.num_cached_tokens for stats in first if stats is not None)
        return usage(self.num_prompt_tokens, sum(choice.num_output_tokens for choice in self.choices), num_cached)

    def running_usage(self) -> dict[str, Any]:
        """Up to now. What the cache gave to the prompt is told with the end."""
        return {name: count for name, count in self.usage().items() if name != "prompt_tokens_details"}

    def metrics(self, choices: Sequence[Choice]) -> dict[str, Any]:
        stats = [choice.stats for choice in choices if choice.stats is not None]
        return {"metrics": answer_metrics(stats, self.budget)} if stats else {}

    def kept(self) -> list[int]:
        """The choices to give back, prompt by prompt: all in their order, or the best ones, best first."""
        prompts = [range(i, i + self.num_drawn) for i in range(0, len(self.choices), self.num_drawn)]
        if self.num_kept == self.num_drawn:
            return [index for indices in prompts for index in indices]
        ranked = (sorted(indices, key=lambda index: -self.choices[index].mean_logprob) for indices in prompts)
        return [index for indices in ranked for index in indices[: self.num_kept]]

    def graft(self, index: int) -> dict[str, Any]:
        """What there is to tell of a choice's drafting since the last call, if it was asked for."""
        return {"graft": self.traces[index].give()} if self.traces else {}

    def _count(self) -> None:
        """Tell the call's record what has arrived."""
        self.call.num_output_tokens = sum(choice.num_output_tokens for choice in self.choices)

    async def whole(self) -> dict[str, Any]:
        """The body of a whole answer."""
        pieces: list[list[str]] = [[] for _ in self.choices]
        tokens: list[list[TokenLogprob]] = [[] for _ in self.choices]
        calls: list[list[CallPiece]] = [[] for _ in self.choices]
        async for index, delta in self.stream:
            piece = self.choices[index].take(delta)
            if self.traces:
                self.traces[index].take(delta)
            self._count()
            pieces[index].append(piece.text)
            tokens[index].extend(piece.logprobs)
            calls[index].extend(piece.calls)
        choices = [
            self.dialect.choice(
                place,
                "".join(pieces[index]),
                self.choices[index].reason,
                self.dialect.logprobs(tokens[index], self.texts) if self.has_logprobs else None,
                calls[index],
            )
            | self.graft(index)
            for place, index in enumerate(self.kept())
        ]
        return {
            **self.head(self.dialect.object),
            "choices": choices,
            "usage": self.usage(),
            **self.metrics(self.choices),
        }

    async def events(self, serving: Serving, *, wants_usage: bool, is_running: bool) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer, the closing one included, whatever happens.

        With `wants_usage` a last chunk says what was used, with `is_running` every chunk what was used so far.
        """
        head = self.head(self.dialect.chunk_object)

        def chunk(choice: dict[str, Any], **more: Any) -> bytes:
            used = {"usage": self.running_usage() if is_running else None} if wants_usage else {}
            return event({**head, "choices": [choice], **used, **more})

        def logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
            return self.dialect.logprobs(tokens, self.texts) if tokens else None

        try:
            for index in range(len(self.choices)):
                if (opening := self.dialect.opening(index)) is not None:
                    yield chunk(opening)
            async for index, delta in self.stream:
                choice = self.choices[index]
                piece = choice.take(delta)
                if self.traces:
                    self.traces[index].take(delta)
                self._count()
                tokens = piece.logprobs
                if piece.text or piece.calls:
                    said = self.dialect.piece(index, piece.text, logprobs(tokens), piece.calls)
                    yield chunk(said | self.graft(index))
                    tokens = []
                if delta.finish_reason is not None:
                    # With a usage chunk to come the numbers ride that one, as the sum over all choices.
                    metrics = {} if wants_usage else self.metrics([choice])
                    ending = self.dialect.ending(index, choice.reason, logprobs(tokens)) | self.graft(index)
                    yield chunk(ending, **metrics)
            if wants_usage:
                yield event({**head, "choices": [], "usage": self.usage(), **self.metrics(self.choices)})
        except Exception as error:
            self.stream.close()  # before the slow part: the other choices are decoded for nobody now
            if not isinstance(error, RequestFailed | EngineStopped | TimedOut):
                _log.exception("answer %s broke off", self.id)
            problem = describe(error)
            serving.metrics.count_error(problem.status)  # the status line said 200 long ago
            self.call.error = problem.code or problem.type
            yield event(problem.body())
        yield DONE
