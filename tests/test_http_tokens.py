"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.choice import missing_space
from app.token_text import TokenTexts
from models.toy import byte_tokenizer, sentencepiece_tokenizer
from tests.http_engine import MAX_MODEL_LEN, MODEL, Server, serve


@pytest.fixture(scope="module", name="server")
def _server() -> Iterator[Server]:
    with serve() as server:
        yield server


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return server.client.post(path, json=body)


def test_a_texts_tokens_are_those_of_a_completion(server: Server) -> None:
    """People count with it before they ask."""
    answer = post(server, "/tokenize", prompt="hé").json()
    assert answer == {"count": 3, "max_model_len": MAX_MODEL_LEN, "tokens": [104, 195, 169], "token_strs": None}
    server.engine.reset()
    server.complete(prompt="hé", max_tokens=1)
    assert list(server.engine.submitted[0].prompt) == answer["tokens"]
    assert post(server, "/tokenize", prompt="", model=MODEL).json()["tokens"] == []


def test_a_conversations_tokens_are_those_of_a_chat(server: Server) -> None:
    """The template's own tokens count, and are the greater part of short conversations."""
    messages = [{"role": "user", "content": "hi"}]
    answer = post(server, "/tokenize", messages=messages).json()
    server.engine.reset()
    server.chat(messages=messages, max_tokens=1)
    assert list(server.engine.submitted[0].prompt) == answer["tokens"]
    bare = post(server, "/tokenize", messages=messages, add_generation_prompt=False).json()
    assert bare["tokens"] == answer["tokens"][: bare["count"]]
    assert bare["count"] < answer["count"]


def test_tokens_are_spelled_as_in_the_vocabulary_if_asked(server: Server) -> None:
    """The field's name and form are vLLM's."""
    answer = post(server, "/tokenize", prompt="a <|im_end|>", return_token_strs=True).json()
    assert answer["token_strs"] == ["a", "Ġ", "<|im_end|>"]
    assert len(answer["tokens"]) == 3


@pytest.mark.parametrize("text", ["", "some text", "漢字 😊", "<|im_start|>user\nx<|im_end|>", " leading"])
def test_detokenize_takes_it_back(server: Server, text: str) -> None:
    """Special tokens by name, spaces where they were."""
    tokens = post(server, "/tokenize", prompt=text).json()["tokens"]
    assert post(server, "/detokenize", tokens=tokens).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**400]}, "tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    """As everywhere else."""
    response = post(server, path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert post(server, path, model="other", **(body or {"prompt": "a", "tokens": [1]})).status_code in (400, 404)


def test_another_model_is_a_404(server: Server) -> None:
    """Its tokens would be others."""
    assert post(server, "/tokenize", prompt="a", model="other").status_code == 404
    assert post(server, "/detokenize", tokens=[1], model="other").status_code == 404


def test_single_tokens_have_their_spaces_and_bytes() -> None:
    """SentencePiece drops the space in front of what it decodes; a byte of a character is no text."""
    for style in ("llama", "metaspace"):
        tokenizer = sentencepiece_tokenizer(style)  # type: ignore[arg-type]
        texts = TokenTexts(tokenizer)
        ids = {piece: tokenizer.convert_tokens_to_ids(piece) for piece in ("\u2581the", "the", "\u2581", "<0xE6>", "</s>")}
        assert [texts(i).text for i in ids.values()] == [" the", "the", " ", "bytes:\\xe6", "</s>"]
        assert texts(ids["<0xE6>"]).bytes == [0xE6]
        assert texts(ids["\u2581the"]).bytes == list(b" the")
    bytes_ = TokenTexts(byte_tokenizer([(b" ", b"\xe6"), (b"\xef", b"\xbf"), (b"\xef\xbf", b"\xbd")]))
    assert bytes_(0xE6).text == "bytes:\\xe6"
    assert bytes_(32).text == " "
    assert bytes_(256).text == "bytes:\\x20\\xe6"
    assert bytes_(258).text == "\ufffd"
    assert bytes_(258).bytes == [0xEF, 0xBF, 0xBD]
    assert all(bytes_(byte).bytes == [byte] for byte in range(256))
    assert bytes_(259).text == "<|endoftext|>"


def test_an_echo_keeps_the_space_between_prompt_and_answer() -> None:
    """Decoded alone, an answer that begins with a word has lost the space in front of it."""
    assert missing_space(" the", "the cat") == " "
    assert missing_space(" the", " the cat") == ""
    assert missing_space("  the", " the") == " "
    assert missing_space("  the", "the") == "  "
    assert missing_space("the", "the") == ""
    assert missing_space(" ", "the") == " "
    assert missing_space("bytes:\\xe6", "\u6f22") == ""
