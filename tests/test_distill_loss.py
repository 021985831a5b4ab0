"""What a student is punished for: against exact divergences over whole vocabularies, and at the edges of float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distill.loss import Teaching, agreement, divergence, regression
from distill.regress import Regression

ROWS = 6


def teaching_of(p: torch.Tensor, to_draft: torch.Tensor, top: int) -> Teaching:
    """What shards keep of `p` `[rows, vocab]`: the `top` likeliest, in the student's ids."""
    best = p.log().topk(top, dim=-1)
    return Teaching(to_draft[best.indices], best.values.float(), torch.zeros(len(p), 1))


def exact(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) over the last dimension, float64."""
    return (p * (p.clamp(min=1e-300).log() - q.clamp(min=1e-300).log())).sum(-1)


def merged(p: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """`p` with all columns outside `known` `[rows, vocab]` put together in one."""
    return torch.cat((p * known, (p * ~known).sum(-1, keepdim=True)), dim=-1)


@given(st.integers(0, 10_000), st.integers(4, 40), st.floats(0.2, 1.0), st.floats(0.1, 1.0), st.floats(0.5, 6.0))
def test_divergence_is_exact_with_what_is_unknown_put_together(
    seed: int, vocab: int, share_in: float, share_top: float, scale: float
) -> None:
    """Against the whole vocabulary: never more than the full divergence, and equal to it where nothing is put together."""
    rng = torch.Generator().manual_seed(seed)
    p = (scale * torch.randn(ROWS, vocab, generator=rng, dtype=torch.float64)).softmax(-1)
    size = max(2, int(vocab * share_in))
    ids = torch.randperm(vocab, generator=rng)[:size].sort().values
    to_draft = torch.full((vocab,), -1).index_put((ids,), torch.arange(size))
    logits = scale * torch.randn(ROWS, size, generator=rng, dtype=torch.float64)
    q = torch.zeros(ROWS, vocab, dtype=torch.float64)
    q[:, ids] = logits.softmax(-1)

    top = max(1, int(vocab * share_top))
    found = divergence(logits.float(), teaching_of(p, to_draft, top)).double()
    known = torch.zeros(ROWS, vocab, dtype=torch.bool)
    known.scatter_(1, p.topk(top).indices, True)
    known &= to_draft >= 0
    p_parts, q_parts = merged(p, known), merged(q, known)
    # Neither rest is taken as less than one in a million, so that their logarithms exist.
    rest_p, rest_q = (parts[:, -1].clamp(min=1e-6) for parts in (p_parts, q_parts))
    wanted = exact(p_parts[:, :-1], q_parts[:, :-1]) + rest_p * (rest_p.log() - rest_q.log())
    assert torch.allclose(found, wanted, atol=2e-4 + 1e-4 * scale), (found, wanted)
    if size == vocab:
        full = exact(p, q)
        assert torch.all(found <= full + 1e-3), "putting tokens together can only hide differences"
        if top == vocab:
            assert torch.allclose(found, full, atol=1e-3)


def test_tokens_outside_the_draft_vocabulary_are_not_blamed_on_others() -> None:
    """Golden: of (0.5, 0.3, 0.2) the student has no second token; its (0.7, 0.3) leaves nothing for it."""
    teaching = Teaching(torch.tensor([[0, -1, 1]]), torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.zeros(1, 1))
    found = divergence(torch.tensor([[0.7, 0.3]]).log(), teaching)
    wanted = 0.5 * math.log(0.5 / 0.7) + 0.2 * math.log(0.2 / 0.3) + 0.3 * math.log(0.3 / 1e-6)
    assert found.item() == pytest.approx(wanted, abs=2e-2)
    # A token that the student knows and the target's list does not: the rest meets the rest.
    room = divergence(torch.tensor([[0.5, 0.2, 0.3]]).log(), teaching)
    assert room.item() == pytest.approx(0.0, abs=1e-5)


def test_the_gradient_is_that_of_the_exact_divergence() -> None:
    """A value that is right with a gradient that is not would train something else."""
    rng = torch.Generator().manual_seed(0)
    p = torch.randn(ROWS, 12, generator=rng, dtype=torch.float64).softmax(-1)
    logits = torch.randn(ROWS, 12, generator=rng, requires_grad=True)
    divergence(logits, teaching_of(p, torch.arange(12), 5)).sum().backward()
    twin = logits.detach().double().requires_grad_()
    known = torch.zeros(ROWS, 12, dtype=torch.bool).scatter_(1, p.topk(5).indices, True)
    exact(merged(p, known), merged(twin.softmax(-1), known)).sum().backward()
    assert logits.grad is not None and twin.grad is not None
    assert torch.allclose(logits.grad.double(), twin.grad, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e2, 1e4, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite_at_extremes(scale: float, dtype: torch.dtype) -> None:
    """One such position would end hours of training."""
    logits = torch.tensor([[1.0, -1, 0, 0], [-1, 1, 0, 0], [0, 0, 1, -1]], dtype=dtype) * scale
    logits = logits.detach().requires_grad_()
    inf = float("inf")
    teaching = Teaching(
        torch.tensor([[0, 1, -1], [0, 1, 2], [-1, -1, -1]]),
        torch.tensor([[0.0, -inf, -inf], [-60.0, -65504.0, -1e-4], [-0.1, -3.0, -4.0]]).half(),
        torch.zeros(3, 1),
    )
    loss = divergence(logits, teaching)
    assert torch.isfinite(loss).all(), loss
    loss.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all(), logits.grad


def test_the_first_choice_decides_agreement() -> None:
    """A first choice outside the draft vocabulary can never be met, and must not be taken for id 0 or the last."""
    logits = torch.tensor([[3.0, 1, 2], [3, 1, 2], [1, 2, 3], [1, 2, 3]])
    teaching = Teaching(torch.tensor([[0, 1], [1, 0], [-1, 2], [2, -1]]), torch.zeros(4, 2), torch.zeros(4, 1))
    assert agreement(logits, teaching).tolist() == [True, False, False, True]


def test_regression_is_the_smooth_distance_per_number() -> None:
    """Golden: quadratic below a distance of one, linear above; a mean, so that its weight means the same at every size."""
    teaching = Teaching(torch.zeros(2, 1).long(), torch.zeros(2, 1), torch.tensor([[1.0, 1.0], [0.0, 0.0]]).bfloat16())
    found = regression(torch.tensor([[1.0, 1.5], [3.0, -1.0]]), teaching)
    assert found.tolist() == pytest.approx([0.125 / 2, (2.5 + 0.5) / 2])


def test_normal_equations_find_the_ridge_optimum_batch_by_batch() -> None:
    """Against least squares on the whole, with the ridge written as rows of its own."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(200, 7, generator=rng) * torch.tensor([1.0, 10, 0.1, 1, 1, 1, 0.0])
    y = x @ torch.randn(7, 3, generator=rng) + 0.1 * torch.randn(200, 3, generator=rng)
    fit = Regression(7, 3)
    for start in range(0, 200, 30):
        fit.add(x[start : start + 30], y[start : start + 30])
    found = fit.solve()
    ridge = (1e-3 * (x.double() ** 2).sum(0) + 1e-6 * 200).sqrt()
    rows = np.vstack([x.double().numpy(), np.diag(ridge.numpy())])
    wanted = np.linalg.lstsq(rows, np.vstack([y.double().numpy(), np.zeros((7, 3))]), rcond=None)[0]
    assert torch.allclose(found.double(), torch.from_numpy(wanted), atol=1e-3)
    assert torch.all(found[6] == 0), "an input that is always zero gets no weight"


def test_a_regression_without_rows_is_refused() -> None:
    """It would return zeros, and a head that begins with those never recovers."""
    with pytest.raises(ValueError, match="at least one row"):
        Regression(3, 2).solve()
