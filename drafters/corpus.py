"""What usually follows these tokens elsewhere? A read-only index over a corpus, one file, shared by all sequences.

Source of the idea: REST (2311.08252), which drafts from a suffix array over a datastore. Here all positions of the corpus are
sorted by the tokens that begin there, so the places where a context occurs are one range of the order, and within it places
with the same continuation are neighbors. The range's most common next tokens are estimated from a sample spread evenly over
it. The chain below a token is read from the middle one of the places that have it, which shows the majority's continuation
if there is a majority.

The file is in safetensors format and is mapped, not read: 8 bytes per token and 12 per distinct pair of tokens, on disk and in
the page cache, whatever the number of sequences. A lookup takes a fixed number of binary searches. Documents are kept apart
by a separator, across which nothing matches and nothing is drafted.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from drafters.ngram_index import Followers

LEAST_CONTEXT, LONGEST_CONTEXT = 2, 8
"""Tokens of context: one token says nothing about a corpus, and more than eight hardly more than eight."""

_SAMPLE = 64  # places of a context that are looked at
_SORTED = 16  # tokens by which places are sorted; at least the longest context and the longest chain together
_END = -1  # follows every document
_FORMAT = "graftserve corpus 1"
_TYPES = {"tokens": ("int32", 1), "order": ("int32", 1), "pairs": ("int64", 1), "begins": ("int32", 1)}
_BLOCK = 1 << 20  # characters encoded at once


class CorpusIndex:
    """Token ids of documents, and the order of their suffixes. Immutable; safe to share between threads."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over the arrays that make up the index; use :meth:`of` or :meth:`load`.

        tokens: int32 [tokens], documents, each with -1 behind it.
        order: int32 [tokens], the positions sorted by suffix.
        pairs: int64 [pairs], ascending; what two tokens begin some suffix, as :func:`_pair_key` has them.
        begins: int32 [pairs + 1]; where in `order` the suffixes begin that begin with each pair, then the end.
        """
        self._arrays = dict(arrays)
        self._text, self._order, self._pairs, self._begins = (arrays[name] for name in _TYPES)
        self._places: Sequence[int] = self._order.data  # single elements are read faster than through the array
        self.tokens: Sequence[int] = self._text.data

    def __len__(self) -> int:
        """Number of tokens, separators included."""
        return len(self._text)

    @staticmethod
    def of(documents: Iterable[Sequence[int] | np.ndarray]) -> CorpusIndex:
        """Index token ids. ValueError for a negative id, or if there are no tokens, or 2**31 and more."""
        pieces = []
        for document in documents:
            if len(document):
                pieces.append(np.append(np.asarray(document, np.int32), np.int32(_END)))
                if pieces[-1][:-1].min() < 0:
                    raise ValueError(f"a document holds the token id {pieces[-1][:-1].min()}")
        if not pieces:
            raise ValueError("there is nothing to index: no document has any token")
        tokens = np.concatenate(pieces)
        if len(tokens) >= 2**31:
            raise ValueError(f"a corpus of {len(tokens)} tokens is too large, the limit is {2**31 - 1}")
        order = _suffix_order(tokens)
        first = tokens[order].astype(np.int64)
        second = np.append(tokens, np.int32(_END))[order.astype(np.int64) + 1].astype(np.int64)
        pairs, begins = np.unique(_pair_key(first, second), return_index=True)
        return CorpusIndex(
            {"tokens": tokens, "order": order, "pairs": pairs, "begins": np.append(begins, len(tokens)).astype(np.int32)}
        )

    def save(self, path: Path, tokenizer_hash: str) -> None:
        """Write one file; `path` exists afterwards as a whole or not at all. `tokenizer_hash` as :meth:`load` will ask."""
        arrays = {name: torch.from_numpy(array.copy()) for name, array in self._arrays.items()}
        metadata = {"format": _FORMAT, "tokenizer_hash": tokenizer_hash, "crc32": str(_checksum(self._arrays))}
        partial = path.with_name(path.name + ".part")
        partial.write_bytes(save(arrays, metadata))  # `save_file` would make a file that only its owner may read
        partial.rename(path)

    @staticmethod
    def load(path: Path, tokenizer_hash: str) -> CorpusIndex:
        """Map a file that :meth:`save` wrote, after one pass over it to see that it is whole.

        Raises:
            ValueError: it is missing, truncated, altered or something else, or was built with another tokenizer.
        """
        where = f"ngram_corpus = {str(path)!r}"
        if not path.is_file():
            raise ValueError(f"{where}: there is no such file")
        try:
            with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
                metadata: dict[str, str] = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(f"{where} is not a corpus index of this version; build it with this one")
                arrays = {name: file.get_tensor(name).numpy() for name in _TYPES}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{where} is not a corpus index, or a damaged one: {error}") from error
        if metadata.get("tokenizer_hash") != tokenizer_hash:
            theirs, ours = str(metadata.get("tokenizer_hash"))[:12], tokenizer_hash[:12]
            raise ValueError(
                f"{where} was built with another tokenizer (hash {theirs}) than the target's (hash {ours}), so its ids mean "
                "other tokens; build it again with the target's tokenizer"
            )
        types = {name: (array.dtype.name, array.ndim) for name, array in arrays.items()}
        if types != _TYPES or metadata.get("crc32") != str(_checksum(arrays)):
            raise ValueError(f"{where} is damaged: its checksum does not agree; build it again")
        for array in arrays.values():
            array.flags.writeable = False
        return CorpusIndex(arrays)

    def followers(self, tail: Sequence[int]) -> Followers | None:
        """What follows the longest end of `tail`, two to eight tokens, that the corpus has; None if it has not even two.

        The most frequent token comes first. Positions are those of :attr:`tokens`.
        """
        sought = list(tail[-LONGEST_CONTEXT:])
        low, high = LEAST_CONTEXT, len(sought)
        best = self._range(sought[-low:]) if low <= high else None
        while best is not None and low < high:  # whatever has a longer end of the tail has the shorter ones too
            n = (low + high + 1) // 2
            found = self._range(sought[-n:])
            if found is None:
                high = n - 1
            else:
                best, low = found, n
        return None if best is None else self._count(*best, low)

    def _range(self, context: list[int]) -> tuple[int, int] | None:
        """The part of the order whose suffixes begin with `context`."""
        key = _pair_key(np.int64(context[0]), np.int64(context[1]))
        pair = int(np.searchsorted(self._pairs, key))
        if pair == len(self._pairs) or self._pairs[pair] != key:
            return None
        begin, stop = int(self._begins[pair]), int(self._begins[pair + 1])
        rest, n, text = context[2:], len(context), self._text
        if not rest:
            return begin, stop

        def after_pair(place: int) -> list[int]:
            return text[place + 2 : place + n].tolist()

        begin = bisect_left(self._places, rest, begin, stop, key=after_pair)
        if begin == stop or after_pair(self._places[begin]) != rest:
            return None
        return begin, bisect_right(self._places, rest, begin, stop, key=after_pair)

    def _count(self, begin: int, stop: int, n: int) -> Followers | None:
        size = min(stop - begin, _SAMPLE)
        # Midpoints of equal parts of the range; all of it if it is small.
        chosen = begin + (2 * np.arange(size, dtype=np.int64) + 1) * (stop - begin) // (2 * size)
        positions = self._order[chosen].astype(np.int64) + n
        tokens = self._text[positions].tolist()
        times = Counter(tokens)  # in order of token: neighbors in the order have the same next token
        del times[_END]
        middle = {token: positions[tokens.index(token) + (count - 1) // 2] for token, count in times.items()}
        by_token = {token: (count, int(middle[token])) for token, count in times.most_common()}
        return Followers(n, size, by_token) if by_token else None


def build_corpus(paths: Iterable[Path], encode: Callable[[str], Sequence[int]], out: Path, tokenizer_hash: str) -> int:
    """Index text files, one document each, and save the index as `out`; returns its number of tokens.

    Args:
        paths: UTF-8 text files.
        encode: the target's tokenizer, adding no special tokens; called on blocks of whole lines.
        out: the file to write.
        tokenizer_hash: stands for the tokenizer, :func:`drafters.vocab.tokenizer_hash`.

    Raises:
        ValueError: a file is not UTF-8 text, or there are no tokens.
        OSError: a file cannot be read or written.
    """
    index = CorpusIndex.of(_encoded(path, encode) for path in paths)
    index.save(out, tokenizer_hash)
    return len(index)


def _encoded(path: Path, encode: Callable[[str], Sequence[int]]) -> np.ndarray:
    pieces: list[Any] = [np.zeros(0, np.int32)]
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(_BLOCK):
                pieces.append(np.asarray(encode("".join(lines)), np.int32))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    return np.concatenate(pieces)


def _suffix_order(tokens: np.ndarray) -> np.ndarray:
    """Positions sorted by the first `_SORTED` tokens from there on, equals by position; int32.

    Prefix doubling: pairs of neighboring ranks by 1, 2, 4, ... tokens give the ranks by twice as many.
    """
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(rank, kind="stable")
    width = 1
    while width < _SORTED:
        following = np.zeros_like(rank)  # 0: the corpus ends before
        following[:-width] = rank[width:] + 1
        pair = rank * (len(tokens) + 1) + following
        order = np.argsort(pair, kind="stable")
        ordered = pair[order]
        rank[order] = np.concatenate(([0], np.cumsum(ordered[1:] != ordered[:-1])))
        width *= 2
    return order.astype(np.int32)


def _pair_key(first: Any, second: Any) -> Any:
    """Two tokens as one number that sorts as they do; int64, single or arrays."""
    return (first + 1 << 32) + second + 1


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    checksum = 0
    for name in _TYPES:
        checksum = zlib.crc32(arrays[name].data, checksum)
    return checksum
