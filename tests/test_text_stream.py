"""Text in pieces must be the text in one piece."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import TextStream, byte_fallback_ids
from models import toy

# Tokens that end in the middle of one character and begin in the middle of another, as real byte-level vocabularies
# have them.
MERGES = [
    (b"\xe2", b"\x82"),
    (b"\x82", b"\xac"),
    (b"\x82\xac", b"\xe2"),
    (b"\x80", b"\xe2"),
    (b"\xf0", b"\x9f"),
    (b"\xf0\x9f", b"\x98"),
    (b"\x8a", b"\xf0"),
    (b" ", b" "),
    (b" ", b"a"),
    (b"a", b"b"),
    (b"\x9f", b"\x98"),
]
BYTES = toy.byte_tokenizer(MERGES)
LLAMA = toy.sentencepiece_tokenizer("llama")
METASPACE = toy.sentencepiece_tokenizer("metaspace")
TOKENIZERS = {"bytes": BYTES, "llama": LLAMA, "metaspace": METASPACE}

STOPS = ["ab", "a", "aba", " ab", "  ", "€", "😊", "the", " the", "\ufffd", "\ufffd\ufffd", "a\ufffd", "t", "he"]


def decoder(name: str, skip_special_tokens: bool = True) -> Callable[[Sequence[int]], str]:
    return partial(TOKENIZERS[name].decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def byte_ids(name: str) -> frozenset[int]:
    return byte_fallback_ids(TOKENIZERS[name].get_vocab())


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text in front of the stop string completed first (of several, the longest), looked for the slow way."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stop if text[:end].endswith(s)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def stream(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stop: Sequence[str] = (), **options: object
) -> TextStream:
    """Everything pushed and finished; asserts what holds for every stream on the way."""
    out = TextStream(decode, stop, **options)  # type: ignore[arg-type]
    pieces = []
    for token_id in ids:
        result = out.push(token_id)
        pieces.append(result.text)
        assert result.stopped == out.stopped
        if result.stopped:
            break
    pieces.append(out.finish())
    assert "".join(pieces) == out.text
    assert out.finish() == ""
    return out


def id_lists(name: str) -> st.SearchStrategy[list[int]]:
    """Random ids, with the troublesome ones often: parts of characters, spaces, special tokens."""
    tokenizer = TOKENIZERS[name]
    every = st.integers(0, len(tokenizer) - 1)
    awkward_bytes = [0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x8A, 0xFF, 0x80, 0xC3, 0xA9, 0xED, 0xA0, 0x41, 0x20]
    if name == "bytes":
        awkward = awkward_bytes + list(range(256, len(tokenizer)))
    else:
        pieces = [f"<0x{byte:02X}>" for byte in awkward_bytes] + [
            "▁",
            "▁▁",
            "▁▁▁▁",
            "▁the",
            "the",
            "a",
            "b",
            "</s>",
            "<s>",
        ]
        awkward = tokenizer.convert_tokens_to_ids(pieces)
    return st.lists(st.one_of(st.sampled_from(awkward), st.sampled_from(awkward), every), max_size=60)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_the_plain_decode_of_any_ids(name: str, skip: bool) -> None:
    """Otherwise clients that stream read something else than clients that do not."""

    @settings(max_examples=300)
    @given(id_lists(name))
    def check(ids: list[int]) -> None:
        decode = decoder(name, skip)
        assert stream(decode, ids, byte_ids=byte_ids(name)).text == decode(ids)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_prefix_given_out_is_a_prefix_of_the_final_text(name: str) -> None:
    """Otherwise a piece holds text, for instance half a character's U+FFFD, that the answer does not."""

    @settings(max_examples=100)
    @given(id_lists(name))
    def check(ids: list[int]) -> None:
        decode = decoder(name)
        out = TextStream(decode, byte_ids=byte_ids(name))
        final = decode(ids)
        for token_id in ids:
            out.push(token_id)
            assert final.startswith(out.text)

    check()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_is_cut_at_the_stop_string_completed_first(name: str) -> None:
    """Otherwise a stop string leaks, or text in front of it is lost."""

    @settings(max_examples=300)
    @given(id_lists(name), st.lists(st.sampled_from(STOPS), min_size=1, max_size=4))
    def check(ids: list[int], stop: list[str]) -> None:
        decode = decoder(name)
        out = stream(decode, ids, stop, byte_ids=byte_ids(name))
        assert (out.text, out.stopped) == cut(decode(ids), stop)

    check()


@settings(max_examples=300)
@given(st.text("ab", min_size=8, max_size=40), st.lists(st.text("ab", min_size=3, max_size=6), min_size=1, max_size=2))
def test_self_overlapping_stop_strings_are_found(text: str, stop: list[str]) -> None:
    """A scan that starts afresh after a mismatch misses "aab" in "aaab"."""
    out = stream(decoder("bytes"), list(text.encode()), stop)
    assert (out.text, out.stopped) == cut(text, stop)


def test_a_stop_string_inside_its_own_repeated_beginning_is_found() -> None:
    """The case of the property above that is easiest to get wrong."""
    assert stream(decoder("bytes"), list(b"aaab."), ["aab"]).text == "a"


def test_text_is_as_early_as_it_can_be() -> None:
    """Holding back more than needed delays the reader: with one-byte tokens, a character comes with its last byte."""
    out = TextStream(decoder("bytes"), ["zz"])
    text = "Aé€😊z."
    given = [out.push(byte).text for byte in text.encode()]
    assert given == ["A", "", "é", "", "", "€", "", "", "", "😊", "", "z."]


def test_a_stop_string_over_several_tokens_leaves_no_trace() -> None:
    """The client must not see the first half of a stop string, nor lose text when the half turns out to be none."""
    assert stream(decoder("bytes"), list(b"one >< two"), ["><"]).text == "one "
    assert stream(decoder("bytes"), list(b"one > two"), ["><"]).text == "one > two"
    assert stream(decoder("bytes"), list(b"one >"), ["><"]).text == "one >"


def test_the_first_stop_string_completed_wins_and_of_equals_the_longest() -> None:
    """The cut must not depend on the order in which a request lists its stop strings."""
    for stop in (["bc", "abcd"], ["abcd", "bc"]):
        assert stream(decoder("bytes"), list(b"xabcde"), stop).text == "xa"
    for stop in (["c", "abc"], ["abc", "c"]):
        assert stream(decoder("bytes"), list(b"xabcde"), stop).text == "x"


def test_a_stop_string_completed_by_the_end_of_the_text_is_cut_off() -> None:
    """U+FFFD for an unfinished character only becomes certain at the end, and may be a stop string like any other."""
    out = stream(decoder("bytes"), list(b"ab\xe2"), ["b\ufffd"])
    assert (out.text, out.stopped) == ("a", True)


def test_an_empty_stop_string_is_refused() -> None:
    """It would end every answer before it begins."""
    with pytest.raises(ValueError, match="empty"):
        TextStream(decoder("bytes"), ["a", ""])


def test_a_token_after_a_stop_is_a_mistake() -> None:
    """Text after a stop string must have nowhere to go."""
    out = TextStream(decoder("bytes"), ["a"])
    assert out.push(ord("a")).stopped
    with pytest.raises(AssertionError):
        out.push(ord("b"))


@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_leading_spaces_are_those_of_the_plain_decode(name: str) -> None:
    """Decoding tokens one by one eats the space in front of every word."""
    ids = TOKENIZERS[name].convert_tokens_to_ids(["▁the", "▁", "▁the", "▁▁", "a", "▁the"])
    out = stream(decoder(name), ids, byte_ids=byte_ids(name))
    assert out.text == decoder(name)(ids) == "the  the  a the"
    assert "".join(decoder(name)([i]) for i in ids) != out.text  # what goes wrong otherwise


@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_unnamed_byte_tokens_still_stream_valid_text(name: str) -> None:
    """Forgetting to name them may cost exactness for broken text only, never for an emoji."""
    text = "the 😊😊 漢字 é the cat"
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False)
    assert stream(decoder(name), ids).text == decoder(name)(ids) == text


def test_byte_tokens_must_be_named_for_broken_runs() -> None:
    """Negative control: a byte token "A" becomes U+FFFD when a broken byte follows, and has been sent by then."""
    ids = LLAMA.convert_tokens_to_ids(["<0x41>", "<0xFF>", "a"])
    decode = decoder("llama")
    assert stream(decode, ids).text != decode(ids) == "\ufffd\ufffda"
    assert stream(decode, ids, byte_ids=byte_ids("llama")).text == decode(ids)


def test_byte_fallback_ids_are_all_or_none() -> None:
    """A token that merely looks like a byte must not hold text back for ever."""
    assert len(byte_ids("llama")) == 256
    assert byte_ids("bytes") == frozenset()
    assert byte_fallback_ids({"<0x0A>": 5}) == frozenset()


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("bytes", list("The quick brown fox. 漢字 😊 ".encode()) * 80),
        ("bytes", [0x80] * 3000),  # nothing but broken bytes
        ("bytes", [0xE2, *[258] * 3000]),  # no token boundary is a character's
        ("bytes", [0xE2, *[259] * 3000]),  # the same, and broken
        ("bytes", [BYTES.convert_tokens_to_ids("<|im_end|>")] * 3000),  # left out by decoding
        ("bytes", [0xF0, *[BYTES.convert_tokens_to_ids("<|im_end|>")] * 3000, 0x9F]),
        ("llama", LLAMA.convert_tokens_to_ids(["▁the", "▁▁▁▁", "a"]) * 1000),
        ("llama", LLAMA.convert_tokens_to_ids(["▁▁▁▁"]) * 3000),
        ("metaspace", METASPACE.convert_tokens_to_ids(["▁▁▁▁"]) * 3000),
        ("llama", LLAMA.convert_tokens_to_ids(["</s>"]) * 3000),
        ("llama", LLAMA.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "<0x98>", "<0x8A>", "▁"]) * 600),
        ("llama", LLAMA.convert_tokens_to_ids([*["<0xC3>", "<0xA9>"] * 1500, "a"])),  # one run
        ("llama", LLAMA.convert_tokens_to_ids([*["<0xFF>", "a", "</s>"] * 1000])),
    ],
)
def test_cost_per_token_does_not_grow_with_the_text(name: str, ids: list[int]) -> None:
    """Otherwise a long answer is quadratic. Counted in ids decoded: at most 40 per token, and the text is exact."""
    decode = decoder(name)
    cost = 0

    def counting(part: Sequence[int]) -> str:
        nonlocal cost
        cost += len(part)
        return decode(part)

    assert stream(counting, ids, byte_ids=byte_ids(name)).text == decode(ids)
    assert cost <= 40 * len(ids), f"{cost / len(ids):.1f} ids decoded per token"


@pytest.mark.parametrize("keep", [1, 2, 6])
def test_long_random_streams_are_exact(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are trimmed many times here, also to single tokens, and each time must go on reading in step."""
    monkeypatch.setattr("engine.text._KEEP", keep)
    rng = random.Random(0)
    for name in TOKENIZERS:
        decode = decoder(name)
        for vocab in (range(len(TOKENIZERS[name])), range(0x80, 0x100), range(250, len(TOKENIZERS[name]))):
            ids = rng.choices(vocab, k=1500)
            assert stream(decode, ids, byte_ids=byte_ids(name)).text == decode(ids)
