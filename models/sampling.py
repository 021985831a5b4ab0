"""From logits to the distribution that is sampled from, and the random numbers that pick from it.

The same :func:`probabilities` serves target rows and drafter rows, so that p and q are processed alike. Every row
stands for one context; what depends on that context's history (penalties), and the bias, is in the logits already
(:mod:`engine.adjust`). The parameters of both are checked here.

Traps this file takes care of:

* a tiny temperature must not overflow: the row's maximum is subtracted *before* the division, in float32 at least;
* ties at the edge of top-k and top-p are broken by token id, so a row's support does not depend on a sorting routine;
* random numbers are a function of (seed, output position, purpose), not of a stream that batch mates or a different
  number of drafted tokens could advance. Different purposes (drawing drafts, verifying) are independent of each other,
  which rules need that compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from struct import pack
from types import MappingProxyType
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import torch

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding."""

MAX_TEMPERATURE = 2.0
"""The range of the OpenAI API; hotter than this is noise, and a caller who asks for 1e9 has made a mistake."""

MAX_PENALTY = 2.0
"""Presence and frequency penalties lie between this and its negative, as in the OpenAI API."""

MAX_BIAS = 100.0
"""The same for a bias. In practice -100 bans a token and 100 leaves no other."""

_MASS_TOLERANCE = 1e-12  # ten tokens of 0.1 reach a mass of 0.9 with nine, whatever the rounding of the sum
_BLOCK = 32768  # random numbers made at a time; even, and small enough for memory to be reused: twice as fast
_FIRST_SORTED = 1024  # on the CPU, tokens sorted at first to find the top-p set; nearly always enough


class ParamError(ValueError):
    """A sampling parameter that cannot be served; ``param`` is the field's name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
        self.message = message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples. Raises :class:`ParamError` for values outside the ranges given here."""

    temperature: float = 1.0  # 0 <= temperature <= 2; below 1e-5: greedy
    top_p: float = 1.0  # 0 < top_p <= 1; 1: off
    top_k: int = 0  # 0: off (-1 too, and is stored as 0); more than the vocabulary: as many as there are
    seed: int = 0  # any signed 64-bit integer
    min_p: float = 0.0  # 0 to 1; 0: off. Tokens less likely than this share of the likeliest one are dropped
    presence_penalty: float = 0.0  # -2 to 2, subtracted from tokens that the answer holds already; the prompt does not count
    frequency_penalty: float = 0.0  # -2 to 2, the same once for each time the answer holds the token
    repetition_penalty: float = 1.0  # above 0; divides positive and multiplies other logits of tokens in prompt or answer
    # Token id -> -100 to 100, added to the logit before anything else. Copied. Ids are checked by `check_vocab`.
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        temperature = _number("temperature", self.temperature)
        if not 0.0 <= temperature <= MAX_TEMPERATURE:
            raise ParamError(
                "temperature", f"temperature must be between 0 and {MAX_TEMPERATURE:g}, not {temperature:g}"
            )
        top_p = _number("top_p", self.top_p)
        if not 0.0 < top_p <= 1.0:
            raise ParamError("top_p", f"top_p must be above 0 and at most 1, not {top_p:g}")
        top_k = _integer("top_k", self.top_k)
        if top_k < -1:
            raise ParamError("top_k", f"top_k must be at least 0 (or -1 for off), not {top_k}")
        seed = _integer("seed", self.seed)
        if not -(2**63) <= seed < 2**63:
            raise ParamError("seed", f"seed must fit into a signed 64-bit integer, not {seed}")
        min_p = _number("min_p", self.min_p)
        if not 0.0 <= min_p <= 1.0:
            raise ParamError("min_p", f"min_p must be between 0 and 1, not {min_p:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = _number(name, getattr(self, name))
            if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
                raise ParamError(name, f"{name} must be between {-MAX_PENALTY:g} and {MAX_PENALTY:g}, not {penalty:g}")
            object.__setattr__(self, name, penalty)
        repetition_penalty = _number("repetition_penalty", self.repetition_penalty)
        if not repetition_penalty > 0.0:
            raise ParamError("repetition_penalty", f"repetition_penalty must be above 0, not {repetition_penalty:g}")
        object.__setattr__(self, "min_p", min_p)
        object.__setattr__(self, "repetition_penalty", repetition_penalty)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "top_p", top_p)
        object.__setattr__(self, "top_k", max(top_k, 0))
        object.__setattr__(self, "seed", seed)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def warm(self) -> SamplingParams:
        """The same, at temperature 1 if greedy: for what is drawn or measured on behalf of a request that draws nothing."""
        return replace(self, temperature=1.0) if self.greedy else self

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on what was written before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether the model's logits are taken as they are: without penalties and bias."""
        return not (self.logit_bias or self.penalizes)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise :class:`ParamError` if the bias names a token that a vocabulary of this size does not have."""
        beyond = max(self.logit_bias, default=-1)
        if beyond >= vocab_size:
            raise ParamError("logit_bias", f"logit_bias: token id {beyond} is outside the vocabulary of {vocab_size}")


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution each row is sampled from: temperature, then min-p, then top-k, then top-p.

    The order matters for top-p, which looks at the mass that the others left. It is that of vLLM's current sampler;
    transformers applies min-p (arXiv 2407.01082, section 3) last.

    Args:
        logits: [rows, vocab], any floating dtype; -inf marks tokens that must not appear.
        params: one request's parameters, for all rows. Penalties and bias are not looked at: they are in the logits.

    Returns:
        [rows, vocab] float32 on the same device; rows sum to 1 within float32 rounding. Min-p keeps tokens at least
        ``min_p`` times as likely as the likeliest. Tokens are ranked by (logit descending, id ascending): top-k keeps the
        first k, top-p the smallest set of first ones whose mass, among what the others left, is at least ``top_p``. Greedy
        parameters give the first-ranked token alone. A row with NaN or +inf, or with nothing but -inf, comes back as NaN:
        there is no distribution, and the caller must notice.
    """
    assert logits.ndim == 2, f"logits must be [rows, vocab], not {list(logits.shape)}"
    x = logits.float()
    top = x.amax(dim=-1, keepdim=True)
    if params.greedy:
        one_hot = torch.zeros_like(x).scatter_(1, x.argmax(dim=-1, keepdim=True), 1.0)
        return torch.where(top.isfinite(), one_hot, torch.nan)
    if params.min_p > 0.0:
        # log(p / max p) = (x - top) / temperature. What is NaN compares as false and stays.
        x = torch.where(x - top < params.temperature * math.log(params.min_p), -torch.inf, x)
    keep = _support(x, top, params)
    x = (x - top).div_(params.temperature)
    if keep is not None:
        # where, not a product or masked_fill of zeros: a NaN row must stay NaN although its `keep` means nothing.
        x = torch.where(keep | x.isnan(), x, -torch.inf)
    return torch.softmax(x, dim=-1)


def random_uniform(seed: int, position: int, purpose: str) -> float:
    """A number in [0, 1), uniform over the multiples of 2**-53, that depends on the arguments alone.

    Args:
        seed: the request's seed, a signed 64-bit integer.
        position: output position, at least 0.
        purpose: what the number decides, e.g. "verify"; different purposes are independent.
    """
    return (_keyed_bits(seed, position, purpose, num_bytes=8) >> 11) * 2.0**-53


def random_exponentials(seed: int, position: int, purpose: str, size: int) -> torch.Tensor:
    """Independent standard exponentials, one per token, that depend on the arguments alone.

    Args:
        seed, position, purpose: as for :func:`random_uniform`; equal arguments still give two independent results.
        size: how many. Token t has the same number whatever the size, so padding a vocabulary changes no draw.

    Returns:
        [size] float32 on the CPU, all in [2**-33, 22.9]. The smallest ones decide a race, and there the resolution is
        2**-32; tokens whose probability is far below that are drawn less often than they should be. They are too
        improbable to matter: together less than ``size * 2**-32``, 1e-5 for 49152 tokens.

    The bits are Philox's (a counter-based generator, whose stream numpy guarantees), so they are the same on every
    platform. The logarithm is taken in float64, where two correct libraries may differ in the last bit or so; rounding
    to float32 hides that but for one number in some hundred million, by one unit in its last place.
    """
    stream = np.random.Philox(key=_keyed_bits(seed, position, purpose, num_bytes=16))
    result = np.empty(size, dtype=np.float32)
    for start in range(0, size, _BLOCK):
        part = result[start : start + _BLOCK]
        words = stream.random_raw((len(part) + 1) // 2)  # two numbers per 64-bit word, low half first on any machine
        part[:] = _exponentials(words.astype("<u8", copy=False).view("<u4")[: len(part)])
    return torch.from_numpy(result)


def _keyed_bits(seed: int, position: int, purpose: str, *, num_bytes: int) -> int:
    digest = blake2b(pack("<qQ", seed, position) + purpose.encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "little")


def _exponentials(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """-log(1 - u) for u = (bits + 0.5) / 2**32: strictly inside (0, 1), so the result is positive and finite."""
    x = bits.astype(np.float64)
    x *= -(2.0**-32)
    x += 1 - 2.0**-33  # 1 - u, without rounding
    np.log(x, out=x)
    return np.negative(x, out=x)


def _support(x: torch.Tensor, top: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """[rows, vocab] bool: what top-k and top-p leave; None: everything."""
    vocab = x.shape[1]
    k = params.top_k if 0 < params.top_k < vocab else vocab
    if params.top_p >= 1.0:
        if k == vocab:
            return None
        ranked = torch.topk(x, k, dim=-1).values
        return _first_ranked(x, ranked, torch.full((x.shape[0],), k, device=x.device))

    def weights(values: torch.Tensor) -> torch.Tensor:
        return (values.double() - top).div_(params.temperature).exp_()

    if k < vocab:
        ranked = torch.topk(x, k, dim=-1).values
        ranked_weights = weights(ranked)
        total = ranked_weights.sum(dim=-1, keepdim=True)
    else:
        total = weights(x).sum(dim=-1, keepdim=True)
        # A full sort of a large row costs milliseconds on the CPU. On a GPU it is cheap, looking at the mass is not.
        shortcut = x.device.type == "cpu" and vocab > 2 * _FIRST_SORTED
        ranked = torch.topk(x, _FIRST_SORTED if shortcut else vocab, dim=-1).values
        ranked_weights = weights(ranked)
        if shortcut and bool((ranked_weights.sum(dim=-1) < params.top_p * total[:, 0]).any()):
            ranked = torch.sort(x, dim=-1, descending=True).values
            ranked_weights = weights(ranked)
    mass_before = (ranked_weights.cumsum(dim=-1) - ranked_weights) / total
    count = (mass_before < params.top_p - _MASS_TOLERANCE).sum(dim=-1).clamp_(min=1)
    return _first_ranked(x, ranked, count)


def _first_ranked(x: torch.Tensor, ranked: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] bool: the first ``count`` [rows] tokens of each row of ``x`` by (value descending, id ascending).

    ``ranked`` [rows, at least count] holds each row's values in descending order. Values suffice: which of several
    equal ones a sort puts first is not specified, so ties with the last value kept are counted off in id order instead.
    """
    last = ranked.gather(1, count[:, None] - 1)
    above = x > last
    tied = x == last
    room = count[:, None] - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1) <= room))


def _number(param: str, value: object) -> float:
    if not _is_number(value):
        raise ParamError(param, f"{param} must be a finite number, not {value!r}")
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _bias(value: object) -> Mapping[int, float]:
    """A checked copy that nobody can change; entries that change nothing are left out. Messages repeat no value at length."""
    if not isinstance(value, Mapping):
        raise ParamError("logit_bias", "logit_bias must map token ids to numbers")
    checked = {}
    for token, bias in value.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ParamError("logit_bias", "logit_bias must map token ids, integers from 0, to numbers")
        if not _is_number(bias) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ParamError(
                "logit_bias", f"logit_bias must hold numbers between {-MAX_BIAS:g} and {MAX_BIAS:g} only"
            )
        if bias != 0:
            checked[token] = float(bias)
    return MappingProxyType(checked)


def _integer(param: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParamError(param, f"{param} must be an integer, not {value!r}")
    return value
