"""Faults that other speculative servers had with stops, limits and streams, tried on this one, engine and edge together.

trial                                                   test
A3  tokens delivered and tokens billed disagree         test_a3_delivered_billed_and_counted_tokens_agree
A4  more tokens than max_tokens                         test_a4_never_more_than_asked_for
A5  text cut at a stop string, tokens not               test_a5_a_stop_string_cuts_tokens_and_logprobs_too
A6  min_tokens skipped on verified positions            test_a6_min_tokens_hold_on_drafted_positions; test_engine_ends.py
E1  a character split over tokens in a stream           test_e1_a_stream_has_no_replacement_characters_of_its_own
E3  leading spaces eaten or doubled                     test_text_stream.py (test_leading_spaces_are_those_of_the_plain_decode)
E5  a stop string that begins in what was sent          test_e5_a_stream_is_never_longer_than_the_whole_answer
E6  shape of the usage chunk                            test_e6_the_usage_chunk_comes_once_and_only_when_asked_for
E7  an error inside a stream looks like success         test_e7_bad_parameters_are_a_status_not_a_stream,
                                                        test_http_rows.py (test_a_stream_that_breaks_in_the_middle_says_so_once)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.real_server import Real, real_server

TinyModel = Callable[..., PreTrainedModel]
OFF = {"enabled": False}
# The medium drafter is the target itself, the small one a stranger: one has nearly all accepted, the other nearly nothing.
SCHEDULES = ["chain-medium", "small", "treegraft"]


@pytest.fixture(scope="module")
def real(tiny_model: TinyModel) -> Iterator[Real]:
    target = tiny_model("llama", 259, 5, max_positions=600)
    with real_server(target, small=tiny_model("llama", 259, 99, max_positions=600), medium=target, num_rows=12_000) as real:
        yield real


def tokens(choice: dict[str, Any]) -> list[str]:
    """The tokens of a choice, by their log-probabilities."""
    return list(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a3_delivered_billed_and_counted_tokens_agree(real: Real, schedule: str) -> None:
    """Whole blocks are accepted at once; a bill written before the cut charges tokens that nobody got."""
    before = real.total("generation_tokens_total")
    for limit in (1, 2, 3, 4, 5, 8, 13, 20):
        body = real.ask("abc", max_tokens=limit, logprobs=1, speculative={"schedule": schedule})
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "length"
        assert len(tokens(choice)) == body["usage"]["completion_tokens"] == limit
    assert real.total("generation_tokens_total") - before == 56


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a4_never_more_than_asked_for(real: Real, schedule: str) -> None:
    """A budget looked at only at the top of the loop is overrun by a block; 0 tokens are refused by name."""
    for prompt in range(8):
        for limit in (1, 2):
            body = real.ask([prompt + 40, 66, prompt], max_tokens=limit, speculative={"schedule": schedule})
            assert body["usage"]["completion_tokens"] == limit
    refused = real.complete(max_tokens=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def stop_of(real: Real) -> tuple[str, str]:
    """Two characters from the middle of the plain answer, and what comes before them."""
    text = real.text("abc", max_tokens=60, speculative=OFF)
    for place in range(20, 50):
        pair = text[place : place + 2]
        if "\ufffd" not in pair and text.index(pair) == place:
            return pair, text[:place]
    raise AssertionError(f"no readable pair in {text!r}")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stream", [False, True])
def test_a5_a_stop_string_cuts_tokens_and_logprobs_too(real: Real, schedule: str, stream: bool) -> None:
    """A cut by characters that is not mapped back to tokens leaves tokens behind the end of the text."""
    stop, expected = stop_of(real)
    asked: dict[str, Any] = {"max_tokens": 60, "stop": [stop], "logprobs": 2, "speculative": {"schedule": schedule}}
    if stream:
        choices = [event["choices"][0] for event in real.events("abc", **asked)]
    else:
        choices = real.ask("abc", **asked)["choices"]
    text = "".join(choice["text"] for choice in choices)
    offsets = [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
    assert (text, choices[-1]["finish_reason"]) == (expected, "stop")
    assert all(offset <= len(text) for offset in offsets)
    plain = real.ask("abc", **{**asked, "speculative": OFF})
    assert len(offsets) == plain["usage"]["completion_tokens"] == len(tokens(plain["choices"][0]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a6_min_tokens_hold_on_drafted_positions(real: Real, schedule: str) -> None:
    """An end token that a draft proposes early must be banned there as anywhere."""
    first = real.ask("abc", max_tokens=12, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    ends = [token for token in range(32, 127) if chr(token) in first[2:8]]
    assert ends, first
    asked = {"max_tokens": 40, "stop_token_ids": ends}
    early = real.ask("abc", **asked, speculative={"schedule": schedule})
    late = real.ask("abc", **asked, min_tokens=20, speculative={"schedule": schedule})
    assert early["usage"]["completion_tokens"] < 20 <= late["usage"]["completion_tokens"]
    assert late["choices"] == real.ask("abc", **asked, min_tokens=20, speculative=OFF)["choices"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_e1_a_stream_has_no_replacement_characters_of_its_own(real: Real, schedule: str) -> None:
    """Each byte of a character is a token here; a decoder that does not wait writes U+FFFD between them."""
    emoji = "😊🇫🇷漢字é"
    bias = {str(token): -100 for token in range(259) if token not in set(emoji.encode())}
    asked = {"max_tokens": 24, "logit_bias": bias, "speculative": {"schedule": schedule}}
    whole = real.text(emoji, **asked)
    text = "".join(event["choices"][0]["text"] for event in real.events(emoji, **asked))
    assert text == whole
    assert text.count("\ufffd") == whole.count("\ufffd")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_e5_a_stream_is_never_longer_than_the_whole_answer(real: Real, schedule: str) -> None:
    """What was sent cannot be taken back, so nothing that may still become a stop string may be sent."""
    text = real.text("abc", max_tokens=30, speculative=OFF)
    for start in range(5, 24, 9):
        for length in (2, 5):
            asked = {"max_tokens": 30, "stop": [text[start : start + length], "><"], "speculative": {"schedule": schedule}}
            whole = real.text("abc", **asked)
            pieces = [event["choices"][0]["text"] for event in real.events("abc", **asked)]
            assert "".join(pieces) == whole
            assert all(whole.startswith("".join(pieces[:count])) for count in range(len(pieces)))


def test_e6_the_usage_chunk_comes_once_and_only_when_asked_for(real: Real) -> None:
    """Clients index choices[0]: a chunk without choices that nobody asked for ends them."""
    plain = real.events("abc", max_tokens=9, n=2)
    assert all(event["choices"] and "usage" not in event for event in plain)
    asked = real.events("abc", max_tokens=9, n=2, stream_options={"include_usage": True})
    assert [event["choices"] == [] for event in asked] == [False] * (len(asked) - 1) + [True]
    assert all(event["usage"] is None for event in asked[:-1])
    bill = {"prompt_tokens": 3, "completion_tokens": 18, "total_tokens": 21}
    assert bill.items() <= asked[-1]["usage"].items()
    refused = real.complete(stream_options={"include_usage": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("bad", [{"top_p": -1}, {"prompt": []}, {"max_tokens": 10**6}, {"model": "x"}, {"stop": [""]}])
def test_e7_bad_parameters_are_a_status_not_a_stream(real: Real, bad: dict[str, Any]) -> None:
    """A validation error inside a 200 is read as an answer."""
    response = real.complete(**{"prompt": "abc", **bad, "stream": True})
    assert response.status_code in (400, 404)
    assert response.headers["content-type"] == "application/json"
