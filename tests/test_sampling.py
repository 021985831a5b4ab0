"""The distribution that is sampled from is the one asked for, and the random numbers are good and repeatable."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from models import sampling
from models.sampling import ParamError, SamplingParams, probabilities, random_exponentials, random_uniform


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min-p, top-k, top-p of one row, the slow way; gives the example up where rounding would decide."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature < 1e-5:
        return [float(i == order[0]) for i in range(len(logits))]
    weights = [math.exp((x - max(logits)) / params.temperature) for x in logits]
    likely = [i for i in order if weights[i] >= params.min_p]  # the likeliest token's weight is 1
    if params.min_p > 0:
        assume(all(abs(weight / params.min_p - 1) > 1e-5 for weight in weights if weight < 1))
    kept = likely[: params.top_k or len(order)]
    total = math.fsum(weights[i] for i in kept)
    mass, nucleus = 0.0, []
    for i in kept:
        if params.top_p < 1:
            assume(abs(mass - params.top_p) > 1e-9)
            if mass > params.top_p:
                break
        nucleus.append(i)
        mass = math.fsum([mass, weights[i] / total])
    total = math.fsum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


# A coarse grid makes ties common.
LOGITS = st.lists(st.one_of(st.integers(-4, 4).map(lambda i: i / 2), st.just(-math.inf)), min_size=1, max_size=12)


@settings(max_examples=500)
@given(
    st.lists(LOGITS, min_size=1, max_size=1),
    st.sampled_from([0.0, 1e-6, 1e-5, 0.2, 0.7, 1.0, 1.2, 2.0]),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.integers(0, 14),
    st.one_of(st.just(0.0), st.sampled_from([1e-300, 0.05, 0.3, 1.0]), st.floats(0.001, 1.0)),
)
def test_rows_equal_a_plain_python_reference(
    rows: list[list[float]], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """A wrong support or mass changes what the model says, and no verifier can notice."""
    logits = rows[0]
    assume(max(logits) > -math.inf)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    expected = torch.tensor(reference(logits, params), dtype=torch.float32)
    row = probabilities(torch.tensor([logits]), params)[0]
    assert row.dtype == torch.float32
    torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(row > 0, expected > 0)


def test_top_p_and_top_k_look_at_what_min_p_left() -> None:
    """0.75 of (0.4, 0.3, 0.2) is two tokens, of the whole row three; the other order would keep the third."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert probabilities(logits, SamplingParams(top_p=0.75))[0].count_nonzero() == 3
    assert probabilities(logits, SamplingParams(top_p=0.75, min_p=0.4))[0].count_nonzero() == 2
    assert probabilities(logits, SamplingParams(top_k=3, min_p=0.6))[0].count_nonzero() == 2


def test_min_p_keeps_all_that_tie_with_the_likeliest() -> None:
    """A threshold, not a rank: of equally likely tokens all are kept or none, and the likeliest always is."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.999], [-math.inf, -50.0, -math.inf, -math.inf]])
    p = probabilities(logits, SamplingParams(min_p=1.0))
    assert p.tolist() == [[0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.7, "temperature": 0.5, "min_p": 0.05}],
)
def test_a_row_does_not_depend_on_the_rows_beside_it(params: dict[str, float]) -> None:
    """Otherwise tree nodes would be judged by what else is in the tree."""
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(0)).mul(2).round(decimals=0)
    together = probabilities(logits, SamplingParams(**params))  # type: ignore[arg-type]
    alone = torch.cat([probabilities(row[None], SamplingParams(**params)) for row in logits])  # type: ignore[arg-type]
    assert torch.equal(together, alone)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("scale", [0.5, 3.0, 6.0])
def test_large_vocabularies_take_the_same_tokens_as_a_full_sort(top_p: float, scale: float) -> None:
    """The shortcut that avoids sorting a whole row must not lose the tail of a flat one; ties included."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)).mul(scale).round(decimals=1)
    kept = probabilities(logits, SamplingParams(top_p=top_p)) > 0
    for row, support in zip(logits, kept, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))
        p = torch.softmax(row.double(), 0)
        mass, size = 0.0, 0
        while mass < top_p - 1e-12:
            mass += p[order[size]].item()
            size += 1
        assert sorted(order[:size]) == support.nonzero()[:, 0].tolist()


def test_ties_at_the_edge_are_broken_by_token_id() -> None:
    """Otherwise the support depends on a sorting routine, and a seed means another text on another machine."""
    flat = torch.zeros(1, 10)
    assert probabilities(flat, SamplingParams(top_k=3))[0].nonzero()[:, 0].tolist() == [0, 1, 2]
    # Nine tokens of 0.1 have a mass of 0.9, although their floating-point sum is below it.
    assert probabilities(flat, SamplingParams(top_p=0.9))[0].nonzero()[:, 0].tolist() == list(range(9))
    assert probabilities(flat[:, :2], SamplingParams(top_p=0.5))[0].tolist() == [1.0, 0.0]
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]])
    assert probabilities(logits, SamplingParams(top_k=3))[0].nonzero()[:, 0].tolist() == [0, 1, 3]


def test_top_p_looks_at_what_top_k_left() -> None:
    """The order of the two matters: 0.5 of (0.4, 0.3) is one token, 0.5 of the whole row is two."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert probabilities(logits, SamplingParams(top_k=2, top_p=0.5))[0].count_nonzero() == 1
    assert probabilities(logits, SamplingParams(top_p=0.5))[0].count_nonzero() == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_pick_the_argmax_and_stay_finite(temperature: float, dtype: torch.dtype) -> None:
    """Dividing first overflows half precision, and the answer is blank or noise."""
    logits = torch.tensor([[3.0, 60.0, -2.0, 59.0], [-60000.0, -50000.0, -65000.0, -math.inf]]).to(dtype)
    for extra in ({}, {"top_k": 2}, {"top_p": 0.9}):
        p = probabilities(logits, SamplingParams(temperature=temperature, **extra))  # type: ignore[arg-type]
        assert p.tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]


def test_extreme_logits_stay_finite() -> None:
    """Subtracting the maximum late would turn the float32 range into inf - inf."""
    logits = torch.tensor([[3e38, -3e38, 0.0]])
    assert probabilities(logits, SamplingParams(temperature=1e-5)).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}],
)
@pytest.mark.parametrize("bad", [[1.0, math.nan, 0.0], [1.0, math.inf, 0.0], [-math.inf] * 3])
def test_rows_without_a_distribution_are_nan_and_harm_no_other(bad: list[float], params: dict[str, float]) -> None:
    """A broken row that looks like a distribution would be served as text."""
    p = probabilities(torch.tensor([bad, [1.0, 2.0, 3.0]]), SamplingParams(**params))  # type: ignore[arg-type]
    assert p[0].isnan().all()
    assert p[1].sum().item() == pytest.approx(1, abs=1e-6)


def test_logits_are_left_as_they_were() -> None:
    """The same rows are read again, for log-probabilities."""
    logits = torch.randn(2, 9)
    copy = logits.clone()
    probabilities(logits, SamplingParams(temperature=0.7, top_k=4, top_p=0.8))
    assert torch.equal(logits, copy)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", v) for v in (-0.1, -1, 2.1, 1e9, math.nan, math.inf, "1", None, True)),
        *(("top_p", v) for v in (0, 0.0, -0.1, 1.0001, math.nan, "1", None)),
        *(("top_k", v) for v in (-2, 1.5, "1", None, True)),
        *(("seed", v) for v in (2**63, -(2**63) - 1, 1.0, "1", None)),
        *(("min_p", v) for v in (-0.01, 1.01, math.nan, "0", None, True)),
        *(("presence_penalty", v) for v in (-2.01, 2.01, math.nan, math.inf, "0", None, True, 10**400)),
        *(("frequency_penalty", v) for v in (-2.01, 2.01, math.nan, -math.inf, "0", None, True)),
        *(("repetition_penalty", v) for v in (0, -0.0, -1.0, math.nan, math.inf, "1", None, True)),
        *(("logit_bias", v) for v in (None, [(1, 2.0)], {"1": 2.0}, {-1: 2.0}, {True: 2.0}, {1.0: 2.0})),
        *(("logit_bias", {3: v}) for v in (100.1, -100.1, math.nan, math.inf, "1", None, True, 10**400)),
    ],
)
def test_impossible_values_are_refused_by_name(field: str, value: object) -> None:
    """A caller must learn which parameter is wrong; a value that is quietly bent is a wrong answer."""
    with pytest.raises(ParamError) as error:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert error.value.param == field
    assert field in str(error.value)


def test_possible_values_are_taken() -> None:
    """Clients send -1 for "no top-k" and any number above the vocabulary for the same."""
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(temperature=0).temperature == 0.0
    assert SamplingParams(seed=-(2**63)).seed == -(2**63)
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(probabilities(logits, SamplingParams(top_k=10**9)), probabilities(logits, SamplingParams()))
    assert SamplingParams(temperature=9e-6).greedy and not SamplingParams(temperature=1e-5).greedy


def test_parameters_are_plain_until_something_changes_the_logits() -> None:
    """Requests without penalties must not pay for them; what only cuts the distribution changes no logit."""
    assert SamplingParams(temperature=0.3, top_p=0.5, top_k=3, min_p=0.2, logit_bias={4: 0}).is_plain
    assert not SamplingParams(logit_bias={4: 1}).is_plain and not SamplingParams(logit_bias={4: 1}).penalizes
    for name, value in (("presence_penalty", -1), ("frequency_penalty", 0.1), ("repetition_penalty", 0.9)):
        assert SamplingParams(**{name: value}).penalizes and not SamplingParams(**{name: value}).is_plain  # type: ignore[arg-type]


def test_a_bias_is_copied_and_cannot_be_changed() -> None:
    """A caller who reuses the dictionary would change a request in flight."""
    mine = {4: 1}
    params = SamplingParams(logit_bias=mine)
    mine[5] = 100
    assert dict(params.logit_bias) == {4: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[4] = 2.0  # type: ignore[index]
    assert params == SamplingParams(logit_bias={4: 1.0}) != SamplingParams()
    assert len({params, SamplingParams(logit_bias={4: 1.0})}) == 1


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    """Such an id has written into a neighbor's row elsewhere."""
    SamplingParams(logit_bias={9: 1.0}).check_vocab(10)
    SamplingParams().check_vocab(0)
    with pytest.raises(ParamError, match="token id 9 is outside the vocabulary of 9") as error:
        SamplingParams(logit_bias={9: 1.0}).check_vocab(9)
    assert error.value.param == "logit_bias"


GOLDEN = {
    (0, 0, "verify"): 0.5439143796874683,
    (0, 1, "verify"): 0.8653639471846583,
    (7, 0, "draft"): 0.7356487006428967,
    (-1, 123456, "verify"): 0.779105306824082,
    (2**63 - 1, 0, ""): 0.052290853042908036,
}


GOLDEN_EXPONENTIALS = {
    (0, 0, "target-race"): [0.0727117657661438, 0.05684606358408928, 0.24831287562847137, 1.007760763168335],
    (0, 1, "target-race"): [0.2611920237541199, 1.566680908203125, 1.3057162761688232, 1.2504059076309204],
    (-1, 123456, "target-race"): [0.07756327092647552, 0.5449855923652649, 0.07643167674541473, 0.44210755825042725],
    (2**63 - 1, 0, ""): [1.1106517314910889, 0.6477606892585754, 0.11547763645648956, 1.7484934329986572],
}
GOLDEN_LATE = [1.0536861419677734, 1.0044523477554321]


def test_random_numbers_are_the_ones_written_down_here() -> None:
    """A seed promised a text; another number generator would break the promise with an update."""
    assert {key: random_uniform(*key) for key in GOLDEN} == GOLDEN
    assert {key: random_exponentials(*key, 4).tolist() for key in GOLDEN_EXPONENTIALS} == GOLDEN_EXPONENTIALS
    assert random_exponentials(7, 0, "target-race", 40000)[-2:].tolist() == GOLDEN_LATE


def test_random_numbers_do_not_depend_on_the_process() -> None:
    """Python salts its own hashes; two workers must still agree."""
    code = (
        "from models.sampling import random_exponentials, random_uniform\n"
        "print(repr(random_uniform(7, 3, 'verify')), random_exponentials(7, 3, 'verify', 9).double().sum().item())"
    )
    root = Path(__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    exponentials = random_exponentials(7, 3, "verify", 9).double().sum().item()
    assert [float(number) for number in out.stdout.split()] == [random_uniform(7, 3, "verify"), exponentials]


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum().item() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["position", "seed"])
def test_random_numbers_are_uniform(vary: str) -> None:
    """Chi-square over 100 cells, 99 degrees of freedom: false alarm with 1.2e-6, and never by chance of the day."""
    values = [
        random_uniform(5, i, "verify") if vary == "position" else random_uniform(i, 0, "verify") for i in range(20000)
    ]
    assert all(0 <= u < 1 for u in values)
    assert chi_square(torch.histc(torch.tensor(values, dtype=torch.float64), 100, 0, 1)) < 180


@pytest.mark.parametrize("pair", ["next position", "other purpose", "next seed"])
def test_random_numbers_are_independent(pair: str) -> None:
    """Losslessness needs it. Chi-square over 10 by 10 cells of pairs, 99 degrees of freedom, false alarm 1.2e-6."""
    other = {"next position": (5, 1, "verify"), "other purpose": (5, 0, "draft"), "next seed": (6, 0, "verify")}[pair]
    cells = torch.zeros(100)
    for i in range(0, 40000, 2):
        u = random_uniform(5, i, "verify")
        v = random_uniform(other[0], i + other[1], other[2])
        cells[int(u * 10) * 10 + int(v * 10)] += 1
    assert chi_square(cells) < 180


def test_the_independence_test_can_fail() -> None:
    """Negative control: one number used twice."""
    cells = torch.zeros(100)
    for i in range(2000):
        u = random_uniform(5, i, "verify")
        cells[int(u * 10) * 10 + int(u * 10)] += 1
    assert chi_square(cells) > 180


# ---------------------------------------------------------------------------------------------- vectors of exponentials


def exponentials(position: int, size: int = 49152, purpose: str = "target-race", seed: int = 5) -> torch.Tensor:
    return random_exponentials(seed, position, purpose, size)


def test_exponentials_are_what_a_race_needs() -> None:
    """Zero would win against every probability, infinity could never win."""
    numbers = exponentials(0)
    assert numbers.shape == (49152,) and numbers.dtype == torch.float32 and numbers.device.type == "cpu"
    assert numbers.min() > 0 and numbers.isfinite().all()
    assert exponentials(0, 0).shape == (0,)


def test_the_extreme_bits_give_positive_and_finite_numbers() -> None:
    """Once in 2**32 numbers the bits are all 0 or all 1; -log(1 - u) must not be 0 or infinite then."""
    extreme = sampling._exponentials(np.array([0, 1, 2**32 - 1], dtype=np.uint32)).tolist()
    assert extreme == pytest.approx([2.0**-33, 3 * 2.0**-33, 33 * math.log(2)], rel=1e-9)
    bits = np.random.Philox(key=1).random_raw(1000).view(np.uint32)
    expected = [-math.log1p(-(int(k) + 0.5) * 2.0**-32) for k in bits]
    assert sampling._exponentials(bits).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3, 1001, 32767, 32768, 32769, 49152])
def test_a_tokens_number_does_not_depend_on_the_size(size: int) -> None:
    """A padded vocabulary must not change the text."""
    assert torch.equal(exponentials(3, size), exponentials(3, 70000)[:size])


def kolmogorov(values: torch.Tensor) -> float:
    """sqrt(n) times the largest distance from the uniform law; above x with a probability of about 2 exp(-2 x^2)."""
    values = values.double().sort().values
    steps = torch.arange(1, len(values) + 1) / len(values)
    return math.sqrt(len(values)) * max((steps - values).max().item(), (values - steps).max().item() + 1 / len(values))


@pytest.mark.parametrize("vary", ["token", "position", "seed"])
def test_exponentials_follow_their_law(vary: str) -> None:
    """Kolmogorov-Smirnov at 2.7: false alarm with 1e-6, and never by chance of the day."""
    values = {
        "token": lambda: exponentials(0),
        "position": lambda: torch.cat([exponentials(i, 1) for i in range(20000)]),
        "seed": lambda: torch.cat([exponentials(0, 1, seed=i) for i in range(20000)]),
    }[vary]()
    assert kolmogorov(-torch.expm1(-values.double())) < 2.7
    assert kolmogorov(-torch.expm1(-values.double() * 1.1)) > 2.7, "the test cannot fail"


def test_small_exponentials_follow_their_law_too() -> None:
    """Only the smallest numbers win a race, and few bits would be coarse just there. False alarm: 1e-6 each."""
    values = torch.cat([exponentials(position) for position in range(200)])
    small = values[values < 1e-4]
    expected = len(values) * -math.expm1(-1e-4)
    assert abs(len(small) - expected) < 4.9 * math.sqrt(expected)
    assert kolmogorov(-torch.expm1(-small.double()) / -math.expm1(-1e-4)) < 2.7
    assert len(small.unique()) > 0.99 * len(small)


@pytest.mark.parametrize("pair", ["next position", "other purpose", "next seed", "next token", "the uniform", "itself"])
def test_exponentials_are_independent(pair: str) -> None:
    """Losslessness needs it. Chi-square over 10 by 10 cells, 99 degrees of freedom, false alarm 1.2e-6; one control."""
    one = exponentials(1)
    other = {
        "next position": lambda: exponentials(2),
        "other purpose": lambda: exponentials(1, purpose="draft"),
        "next seed": lambda: exponentials(1, seed=6),
        "next token": lambda: one[1::2],
        "the uniform": lambda: -torch.log1p(-torch.tensor([random_uniform(5, i, "target-race") for i in range(10000)])),
        "itself": lambda: one,
    }[pair]()
    if pair == "next token":  # pairs that come from the two halves of one word
        one = one[::2]
    if pair == "the uniform":
        one = torch.cat([exponentials(i, 1) for i in range(10000)])
    u, v = (-torch.expm1(-values.double()) for values in (one, other))
    cells = torch.bincount((u * 10).long() * 10 + (v * 10).long(), minlength=100).double()
    assert (chi_square(cells) < 180) == (pair != "itself")
