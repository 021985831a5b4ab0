"""Answers of lossy rules say so wherever a client or operator may look, with the true number of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from app.serving import LoadedEngine
from scheduler.schedule import Action, Schedule, Word
from tests.engine_world import World
from tests.http_engine import Server, serve
from tree.growth import Policy
from tree.policies.chain import Chain
from tree.policies.eagle import Eagle

TinyModel = Callable[..., PreTrainedModel]
PROMPT = "some text"


def schedule(name: str, policy: Policy, greedy_verifier: str) -> Schedule:
    return Schedule(name, "test", policy, Word("M*"), {Action.MEDIUM: "medium"}, greedy_verifier)


SCHEDULES = [
    schedule("bold", Eagle(width=2, depth=3, budget=8), "margin"),
    schedule("patient", Chain(9), "fly"),
    schedule("strict", Eagle(width=2, depth=3, budget=8), "greedy"),
]


@pytest.fixture(scope="module")
def target(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama", 259, 2)


@pytest.fixture(scope="module", name="server")
def _server(tiny_model: TinyModel, target: PreTrainedModel) -> Iterator[Server]:
    """The drafter is the target with a little noise: right often enough that a window of five matches comes up."""
    world = World(target, medium=nearly(target), schedules=SCHEDULES, num_rows=4000, allow_lossy=True)
    engine: Any = world.engine
    with serve(load=lambda: LoadedEngine(engine, world.tokenizer)) as server:
        yield server
    world.check_books()


def nearly(model: PreTrainedModel) -> PreTrainedModel:
    other = type(model)(model.config)
    noise = torch.Generator().manual_seed(2)
    for name, weight in model.state_dict().items():
        spread = 0.2 * weight.std() if weight.ndim > 1 else 0.0
        other.state_dict()[name].copy_(weight + spread * torch.randn(weight.shape, generator=noise))
    return other.eval()


def answer(server: Server, name: str, **body: Any) -> dict[str, Any]:
    wanted = {"speculative": {"schedule": name}, "logprobs": 0, "max_tokens": 60, **body}
    found = server.complete(prompt=PROMPT, **wanted)
    assert found.status_code == 200, found.text
    return found.json()


def against_the_target(target: PreTrainedModel, ids: list[int]) -> int:
    """Tokens behind the prompt that are not the target's first choice."""
    with torch.inference_mode():
        best = target(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    return sum(ids[i] != best[i - 1] for i in range(len(PROMPT), len(ids)))


@pytest.mark.parametrize("name", ["bold", "patient", "strict", "ar"])
def test_an_answer_says_how_many_of_its_tokens_the_target_would_not_have_chosen(
    server: Server, target: PreTrainedModel, name: str
) -> None:
    """Counted again by plain transformers, for answers of all lengths: what a limit cut off was not written."""
    before, told = counted(server, name), 0
    for length in (1, 2, 3, 5, 8, 13, 21, 34, 60):
        body = answer(server, name, max_tokens=length)
        graft = body["metrics"]["graft"]
        ids = [*PROMPT.encode(), *token_ids(body)]
        assert len(ids) == len(PROMPT) + length
        assert graft["lossy"] is (name in ("bold", "patient"))
        assert graft["num_lossy_tokens"] == against_the_target(target, ids), f"{length} tokens"
        told += graft["num_lossy_tokens"]
    assert counted(server, name) - before == told
    assert (told > 0) is (name in ("bold", "patient")), "negative control: lossless schedules overrule nothing"


def counted(server: Server, name: str) -> float:
    """The counter of a schedule, whatever other labels it has."""
    start = "graftserve_spec_decode_lossy_tokens_total{"
    found = [value for key, value in server.metrics().items() if key.startswith(start) and f'schedule="{name}"' in key]
    assert found, "no series"
    return sum(found)


def token_ids(body: dict[str, Any]) -> list[int]:
    """From the texts of single tokens; the tokenizer has one token per byte."""
    found = []
    for piece in body["choices"][0]["logprobs"]["tokens"]:
        special = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
        if piece in special:
            found.append(special[piece])
        elif piece.startswith("bytes:"):
            found.append(int(piece.removeprefix("bytes:").replace("\\x", ""), 16))
        else:
            (byte,) = piece.encode()
            found.append(byte)
    return found


def test_a_stream_says_it_with_its_last_chunk(server: Server) -> None:
    """Clients that stream must not be served unmarked text."""
    found = server.complete(prompt=PROMPT, speculative={"schedule": "bold"}, max_tokens=60, stream=True).text
    chunks = [json.loads(event.removeprefix("data: ")) for event in found.split("\n\n")[:-2]]
    graft = chunks[-1]["metrics"]["graft"]
    assert graft["lossy"] is True and graft["num_lossy_tokens"] > 0


def test_above_zero_the_same_schedule_is_lossless(server: Server) -> None:
    """The lossy rules decide at temperature 0 only; sampled answers of such a schedule lose nothing."""
    hot = answer(server, "bold", temperature=1, seed=5)
    assert hot["metrics"]["graft"]["lossy"] is False and hot["metrics"]["graft"]["num_lossy_tokens"] == 0
    assert token_ids(hot) == token_ids(answer(server, "ar", temperature=1, seed=5))


def test_the_list_of_schedules_names_the_lossy_ones_and_none_is_the_default(server: Server) -> None:
    """Whoever chooses a schedule by its name should know."""
    listed = {entry["name"]: entry for entry in server.client.get("/v1/schedules").json()["data"]}
    assert {name for name, entry in listed.items() if not entry["lossless"]} == {"bold", "patient"}
    (default,) = [entry for entry in listed.values() if entry["default"]]
    assert default["lossless"]
