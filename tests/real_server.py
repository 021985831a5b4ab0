"""A whole engine over tiny random models behind the real HTTP edge, for tests that need both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from transformers import PreTrainedModel

from app.serving import LoadedEngine
from engine.engine import Engine
from tests.engine_world import World
from tests.http_engine import read_samples, serve, total_of, until

PATH = "/v1/completions"


@dataclass
class Real:
    """A running server, and the world it serves."""

    world: World
    url: str
    client: httpx.Client
    app: Any

    @property
    def engine(self) -> Engine:
        return self.world.engine

    def complete(self, prompt: Any = "abc", **body: Any) -> httpx.Response:
        """``POST /v1/completions`` at temperature 0."""
        return self.client.post(PATH, json={"prompt": prompt, "temperature": 0, **body})

    def ask(self, prompt: Any = "abc", **body: Any) -> dict[str, Any]:
        """The body of an answer that must be one."""
        response = self.complete(prompt, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def text(self, prompt: Any = "abc", **body: Any) -> str:
        """The text of the first choice."""
        return str(self.ask(prompt, **body)["choices"][0]["text"])

    def events(self, prompt: Any = "abc", **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end in [DONE]."""
        response = self.complete(prompt, stream=True, **body)
        assert response.status_code == 200, response.text
        return events(response.text)

    def samples(self) -> dict[str, float]:
        """Every sample of the metrics page."""
        return read_samples(self.client)

    def total(self, name: str, **labels: str) -> float:
        """The sum of one metric over all its series that have these labels."""
        return total_of(self.samples(), name, **labels)

    def idle(self) -> bool:
        """Nothing runs, nothing waits, and every row is free."""
        pool = self.world.lm.pool  # rows that are only kept for texts to come are nobody's
        return self.engine.num_running == self.engine.num_waiting == 0 and pool.num_available == pool.num_rows


@dataclass
class Fault:
    """A forward of the target that raises when told to: wraps the one that is there."""

    world: World
    when: Callable[[Any], bool]  # of the segments of a forward
    error: Callable[[], Exception]
    calls: int = field(default=0, init=False)

    def __enter__(self) -> Fault:
        self._forward = self.world.lm.forward

        def forward(segments: Any) -> Any:
            if self.when(segments):
                self.calls += 1
                raise self.error()
            return self._forward(segments)

        self.world.lm.forward = forward  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.world.lm.forward = self._forward  # type: ignore[method-assign]


@contextmanager
def real_server(target: PreTrainedModel, *, default: str | None = None, **options: Any) -> Iterator[Real]:
    """Serve `target`; options are those of `World`, and ``settings`` those of the edge. The books are checked at the end."""
    settings = options.pop("settings", {})
    world = World(target, **options)
    if default is not None:
        world.engine.default_schedule = default
    with serve(load=lambda: LoadedEngine(world.engine, world.tokenizer), **settings) as server:  # type: ignore[arg-type]
        yield Real(world, server.url, server.client, server.app)
        until(lambda: world.engine.num_running == world.engine.num_waiting == 0)
    world.check_books()


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of every event of a stream, which must end in [DONE]."""
    lines = [line for line in text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
