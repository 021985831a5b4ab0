"""What is there once the models are loaded, and how a route gets at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request as HttpRequest

from app.answer_trace import Tracing
from app.bridge import Engine
from app.experiments.live import Experiments
from app.guided import Grammars
from app.metrics import Metrics
from app.pace import Pace
from app.prompts import Tokenizer
from app.spans import Spans
from app.token_text import TokenTexts
from app.tool_formats import ToolForms
from engine.request import EngineStopped


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What loading returns: an engine that was not started yet, and the target's tokenizer."""

    engine: Engine
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Serving:
    """Everything a route needs to answer."""

    engine: Engine
    tokenizer: Tokenizer
    metrics: Metrics
    model: str  # name in the API
    created: int  # Unix time at which the model was ready
    experiments: Experiments
    spans: Spans | None = None  # where requests are reported to, if anywhere
    pace: Pace = field(default_factory=Pace)
    request_timeout_s: float | None = None  # None: no limit
    texts: TokenTexts = field(init=False)  # read on the event loop only
    grammars: Grammars = field(init=False)
    tool_forms: ToolForms = field(init=False)
    tracing: Tracing = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", TokenTexts(self.tokenizer))
        grammars = Grammars(self.tokenizer, vocab_size=self.engine.vocab_size, stop_tokens=self.engine.stop_tokens)
        object.__setattr__(self, "grammars", grammars)
        object.__setattr__(self, "tool_forms", ToolForms(self.tokenizer))
        object.__setattr__(self, "tracing", Tracing(self.tokenizer, self.texts))


def require_serving(request: HttpRequest) -> Serving:
    """The loaded service. Raises EngineStopped while there is none."""
    serving: Serving | None = request.app.state.serving
    if serving is None:
        state = "could not be loaded" if request.app.state.failure is not None else "is still loading"
        raise EngineStopped(f"The model {state}.")
    return serving


Ready = Annotated[Serving, Depends(require_serving)]
