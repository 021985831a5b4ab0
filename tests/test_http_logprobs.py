"""Log-probabilities, several choices, echo and ends over HTTP, from a real engine over toy models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import PreTrainedModel

from app.serving import LoadedEngine
from tests.engine_world import World
from tests.http_engine import serve

TinyModel = Callable[..., PreTrainedModel]

SCHEDULES = ("ngram", "medium", "treegraft")  # against "ar"
LENGTH = 24
END = 256  # <|endoftext|> of the byte tokenizer
PROMPT = "some text"


@pytest.fixture(scope="module", name="client")
def _client(tiny_model: TinyModel) -> Iterator[httpx.Client]:
    target = tiny_model("llama", 259, 3)
    world = World(target, small=tiny_model("llama", 259, 9), medium=target, stop_tokens=[END], num_rows=4000)
    engine: Any = world.engine
    with serve(load=lambda: LoadedEngine(engine, world.tokenizer)) as server:
        yield server.client
    world.check_books()


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    """A whole answer, or a streamed one's chunks; read by a parser that knows no infinities."""
    where = {"messages": [{"role": "user", "content": PROMPT}]} if path == "chat/completions" else {"prompt": PROMPT}
    response = client.post(f"/v1/{path}", json={**where, "seed": 4, "max_tokens": LENGTH, **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return strict(response.text)
    events = response.text.split("\n\n")[:-2]
    return [strict(event.removeprefix("data: ")) for event in events]


def strict(text: str) -> Any:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is no JSON")

    return json.loads(text, parse_constant=refuse)


def joined(chunks: list[Any], path: str) -> list[dict[str, Any]]:
    """Per choice, what all chunks of a stream say together."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        one = found.setdefault(choice["index"], {"text": "", "logprobs": [], "reason": None})
        text = choice["text"] if path == "completions" else choice["delta"].get("content", "")
        one["text"] += text
        assert one["reason"] is None, "a chunk after the end"
        one["reason"] = choice["finish_reason"]
        if choice["logprobs"] is not None:
            one["logprobs"] += entries(choice["logprobs"])
        assert bool(text) or choice["logprobs"] is None or one["reason"], "log-probabilities without text before the end"
    return [found[index] for index in sorted(found)]


def entries(logprobs: dict[str, Any]) -> list[Any]:
    """One item per token, of either endpoint's form."""
    if "content" in logprobs:
        return list(logprobs["content"])
    lists = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    return list(zip(*lists, strict=True))


ASK: dict[str, dict[str, Any]] = {"completions": {"logprobs": 3}, "chat/completions": {"logprobs": True, "top_logprobs": 3}}


@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "n": 3}], ids=str)
def test_streamed_whole_drafted_and_plain_answers_tell_the_same(
    client: httpx.Client, path: str, options: dict[str, Any]
) -> None:
    """Same text, same numbers up to rounding, same places; only the pieces differ."""
    plain = post(client, path, **ASK[path], **options, speculative={"schedule": "ar"})
    for schedule in SCHEDULES:
        body = {**ASK[path], **options, "speculative": {"schedule": schedule}}
        whole = post(client, path, **body)
        pieces = joined(post(client, path, **body, stream=True), path)
        assert len(whole["choices"]) == len(pieces) == options.get("n", 1)
        for answer in (whole, plain):  # whoever comes second finds the prompt in the cache
            answer["usage"].pop("prompt_tokens_details", None)
        assert whole["usage"] == plain["usage"]
        total = 0
        for choice, piece, other in zip(whole["choices"], pieces, plain["choices"], strict=True):
            text = choice["text"] if path == "completions" else choice["message"]["content"]
            assert piece["text"] == text
            assert piece["reason"] == choice["finish_reason"]
            told = entries(choice["logprobs"])
            assert close(piece["logprobs"], told), "streamed and whole differ"
            assert close(entries(other["logprobs"]), told), f"{schedule} and ar differ"
            total += len(told)
        assert total == whole["usage"]["completion_tokens"]


def close(one: Any, other: Any) -> bool:
    """Equal, numbers up to the rounding of sums over more or fewer rows; keys that are nearly equal may change places."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-4)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == other)


def test_bytes_of_a_chats_tokens_are_those_of_its_text(client: httpx.Client) -> None:
    """Clients put split characters together from them; the text of such a token alone is no character."""
    choice = post(client, "chat/completions", temperature=1, logprobs=True, top_logprobs=20)["choices"][0]
    content = choice["logprobs"]["content"]
    ends = choice["finish_reason"] == "stop"
    raw = bytes(byte for entry in content[: len(content) - ends] for byte in entry["bytes"])
    assert raw.decode("utf-8", "replace") == choice["message"]["content"]
    assert any(entry["token"].startswith("bytes:\\x") for entry in content), "no split character, so nothing is tested"
    assert all(len(entry["top_logprobs"]) == 20 for entry in content)
    assert all(set(entry) == {"token", "bytes", "logprob", "top_logprobs"} for entry in content)
    for entry in content:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5


def test_log_probabilities_do_not_depend_on_what_shapes_the_draw(client: httpx.Client) -> None:
    """They are the model's own: with one token left to choose from, it would otherwise have the log-probability 0."""
    options: dict[str, Any] = {"temperature": 0, "logprobs": 2}
    first = post(client, "completions", **options)["choices"][0]["logprobs"]
    for shaped in ({"top_k": 1, "temperature": 1}, {"top_p": 0.01, "temperature": 1.5}):
        assert close(post(client, "completions", **{**options, **shaped})["choices"][0]["logprobs"], first)
    assert min(first["token_logprobs"]) < -0.1


def test_the_token_itself_is_always_among_the_likeliest_of_a_completion(client: httpx.Client) -> None:
    """As clients of this endpoint have always got it: one more than asked for if need be."""
    for count in (0, 1, 5):
        logprobs = post(client, "completions", temperature=1, logprobs=count)["choices"][0]["logprobs"]
        for token, own, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
            assert top[token] == own
            assert max(count, 1) <= len(top) <= count + 1
    silent = post(client, "completions", temperature=1)["choices"][0]
    assert silent["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_leaves_no_place_behind_the_end(client: httpx.Client, stream: bool) -> None:
    """The stop string's own tokens are counted and told of, at the end of the text that they are not part of."""
    body: dict[str, Any] = {"temperature": 0, "logprobs": 0, "speculative": {"schedule": "medium"}}
    full = post(client, "completions", **body)["choices"][0]["text"]
    stop = next(full[i : i + 3] for i in range(4, LENGTH - 4) if full.find(full[i : i + 3]) == i)
    answer = post(client, "completions", **body, stop=stop, stream=stream)
    if stream:
        told, text = joined(answer, "completions")[0]["logprobs"], joined(answer, "completions")[0]["text"]
    else:
        told, text = entries(answer["choices"][0]["logprobs"]), answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == len(told)
    assert text == full[: full.index(stop)]
    offsets = [offset for *_, offset in told]
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(text)
    for token, _, _, offset in told:
        # What is left of a broken character turns into text only with the token behind it, so both have its place.
        if offset < len(text) and text[offset] != "\ufffd" and not token.startswith("bytes:"):
            assert text[offset:].startswith(token)


def test_the_first_of_several_choices_is_the_only_one_of_one(client: httpx.Client) -> None:
    """Asking for more answers must not change the one that was there; and each must be another."""
    one = post(client, "completions", temperature=1)
    many = post(client, "completions", temperature=1, n=4, best_of=4)
    texts = [choice["text"] for choice in many["choices"]]
    assert texts[0] == one["choices"][0]["text"]
    assert len(set(texts)) == 4
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert [choice["text"] for choice in post(client, "completions", temperature=1, n=4)["choices"]] == texts
    greedy = post(client, "completions", temperature=0, n=2)["choices"]
    assert greedy[0]["text"] == greedy[1]["text"]
    unseeded = post(client, "completions", temperature=1, seed=None, n=3)["choices"]
    assert len({choice["text"] for choice in unseeded}) == 3


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client: httpx.Client) -> None:
    """Index = prompt times n plus choice, in a stream too; a client finds its answers by nothing else."""
    body: dict[str, Any] = {"temperature": 1, "n": 2, "max_tokens": 12}
    alone = [post(client, "completions", prompt=prompt, **body) for prompt in ("ab", "xyz")]
    wanted = [choice["text"] for answer in alone for choice in answer["choices"]]
    together = post(client, "completions", prompt=["ab", "xyz"], **body)
    assert [choice["text"] for choice in together["choices"]] == wanted
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert together["usage"]["prompt_tokens"] == 5
    assert together["usage"]["completion_tokens"] == sum(answer["usage"]["completion_tokens"] for answer in alone)
    ids = [list(b"ab"), list(b"xyz")]
    chunks = post(client, "completions", prompt=ids, **body, stream=True, stream_options={"include_usage": True})
    assert [choice["text"] for choice in joined(chunks, "completions")] == wanted
    assert chunks[-1]["usage"] == together["usage"]
    order = [choice["index"] for chunk in chunks for choice in chunk["choices"]]
    assert order != sorted(order), "one choice after another, so nothing interleaves"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("some text", ["some text"]),
        (["ab", "xyz"], ["ab", "xyz"]),
        (list(b"hi"), ["hi"]),
        ([[*b"hi", END], list(b"you")], ["hi<|endoftext|>", "you"]),
    ],
)
def test_an_echo_is_the_prompt_in_front(client: httpx.Client, prompt: Any, texts: list[str]) -> None:
    """As sent, or decoded with special tokens by name; once per choice, streamed or not."""
    body: dict[str, Any] = {"prompt": prompt, "temperature": 1, "n": 2, "max_tokens": 8}
    plain = [choice["text"] for choice in post(client, "completions", **body)["choices"]]
    wanted = [texts[i // 2] + text for i, text in enumerate(plain)]
    whole = post(client, "completions", **body, echo=True)
    assert [choice["text"] for choice in whole["choices"]] == wanted
    pieces = joined(post(client, "completions", **body, echo=True, stream=True), "completions")
    assert [piece["text"] for piece in pieces] == wanted


@pytest.mark.parametrize("length", [1, 2, 9, 300, 700])
@pytest.mark.parametrize("schedule", ["ar", "treegraft"])
def test_an_echo_brings_the_log_probabilities_of_the_prompt(
    client: httpx.Client, tiny_model: TinyModel, length: int, schedule: str
) -> None:
    """Against the unmodified model over the whole text; streamed or not, prompt in the cache or not, however many chunks."""
    prompt = "".join(chr(97 + (7 * i * i + i) % 26) for i in range(length))
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "speculative": {"schedule": schedule}}
    answer = post(client, "completions", **body, echo=True, logprobs=3)["choices"][0]
    told = answer["logprobs"]
    ids = [ord(letter) for letter in prompt] + [name_to_id(name) for name in told["tokens"][length:]]
    assert told["tokens"][:length] == list(prompt) and len(told["tokens"]) == length + 6
    with torch.inference_mode():
        rows = tiny_model("llama", 259, 3)(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    wanted = [float(rows[place - 1, token]) for place, token in enumerate(ids) if place]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(wanted, abs=2e-4)
    assert told["text_offset"][: length + 1] == list(range(length + 1))
    likeliest = [max(top.values()) for top in told["top_logprobs"][1:]]
    assert likeliest == pytest.approx(rows[: len(likeliest)].max(dim=-1).values.tolist(), abs=2e-4)
    again = post(client, "completions", **body, echo=True, logprobs=3)["choices"][0]
    assert close(entries(again["logprobs"]), entries(told))
    (streamed,) = joined(post(client, "completions", **body, echo=True, logprobs=3, stream=True), "completions")
    assert close(streamed["logprobs"], entries(told)) and streamed["text"] == answer["text"]
    silent = post(client, "completions", **body, logprobs=3)["choices"][0]
    assert close([entry[:3] for entry in entries(silent["logprobs"])], [entry[:3] for entry in entries(told)[length:]])


def test_offsets_of_an_echo_count_special_tokens_that_the_text_shows(client: httpx.Client) -> None:
    """A prompt of ids is shown with their names, one of text as it was sent."""
    ids = [*b"hi", END, *b"yo"]
    told = post(client, "completions", prompt=ids, echo=True, logprobs=0, max_tokens=1, temperature=0)["choices"][0]
    assert told["text"].startswith("hi<|endoftext|>yo")
    assert told["logprobs"]["text_offset"] == [0, 1, 2, 15, 16, 17]


@pytest.mark.parametrize("schedule", ["ar", *SCHEDULES])
@pytest.mark.parametrize("path", ASK)
def test_ends_are_as_asked(client: httpx.Client, path: str, schedule: str) -> None:
    """The engine's rules under their names in the body."""
    body: dict[str, Any] = {"temperature": 0, "speculative": {"schedule": schedule}}
    name = "completions" if path == "completions" else "chat/completions"

    def ids(**more: Any) -> list[int]:
        logprobs = {"logprobs": 0} if path == "completions" else {"logprobs": True}
        answer = post(client, name, **body, **logprobs, **more)
        raw = answer["choices"][0]["logprobs"]
        names = raw["tokens"] if path == "completions" else [entry["token"] for entry in raw["content"]]
        assert answer["usage"]["completion_tokens"] == len(names)
        return [name_to_id(name) for name in names]

    usual = ids()
    stop = usual[3]
    assert ids(stop_token_ids=[stop]) == usual[: usual.index(stop) + 1]
    assert len(ids(stop_token_ids=usual, min_tokens=7)) >= 8
    assert not set(ids(stop_token_ids=usual, min_tokens=7)[:7]) & set(usual)
    ended = ids(logit_bias={str(END): 100})
    assert ended == [END]
    assert ids(logit_bias={str(END): 100}, ignore_eos=True) == [END] * LENGTH
    assert ids(logit_bias={str(END): 100}, min_tokens=5)[4:] != [END]
    assert ids(logit_bias={str(END): 100}, min_tokens=5)[5] == END


def name_to_id(name: str) -> int:
    """Of the byte tokenizer."""
    special = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    return special[name] if name in special else int(name[-2:], 16) if name.startswith("bytes:") else ord(name)


def test_a_least_length_that_cannot_be_reached_is_refused(client: httpx.Client) -> None:
    """The limit counts, the default one too."""
    for path, limit in (("completions", 10), ("completions", None), ("chat/completions", 10)):
        where = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
        response = client.post(f"/v1/{path}", json={**where, "max_tokens": limit, "min_tokens": 17})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "min_tokens"


def test_the_official_client_reads_all_of_it(client: httpx.Client) -> None:
    """Its types are what most programs are written against."""
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
        messages: Any = [{"role": "user", "content": PROMPT}]
        ask: dict[str, Any] = {"model": "toy", "max_tokens": 12, "seed": 1}
        chat = api.chat.completions.create(messages=messages, n=2, logprobs=True, top_logprobs=4, **ask)
        assert [choice.index for choice in chat.choices] == [0, 1]
        for choice in chat.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert all(len(one.top_logprobs) == 4 for one in choice.logprobs.content)
        got: dict[int, list[float]] = {0: [], 1: []}
        for chunk in api.chat.completions.create(
            messages=messages, n=2, logprobs=True, top_logprobs=4, stream=True, **ask
        ):
            for piece in chunk.choices:
                if piece.logprobs is not None:
                    got[piece.index] += [one.logprob for one in piece.logprobs.content or []]
        for choice in chat.choices:
            assert choice.logprobs is not None
            assert got[choice.index] == pytest.approx([one.logprob for one in choice.logprobs.content or []], abs=1e-4)
        text = api.completions.create(prompt=["a", "b"], n=2, logprobs=3, best_of=2, **ask)
        assert [choice.index for choice in text.choices] == [0, 1, 2, 3]
        for one in text.choices:
            assert one.logprobs is not None
            assert len(one.logprobs.tokens or []) == len(one.logprobs.text_offset or []) > 0
        echo = api.completions.create(prompt="abc", echo=True, extra_body={"min_tokens": 3, "ignore_eos": True}, **ask)
        assert echo.choices[0].text.startswith("abc")
