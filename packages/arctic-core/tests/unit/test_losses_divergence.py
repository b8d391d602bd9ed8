"""Exact divergences of whole distributions against sums written out in float64, in value and gradient."""

import math
from collections.abc import Callable

import pytest
import torch

from arctic_core.losses.divergence import full_entropy, full_jsd, full_kl, jsd

ROWS, VOCABULARY = 6, 9


def draw(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (2.0 * torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    return p.to(dtype).requires_grad_(), q.to(dtype).requires_grad_()


def kl_sum(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Over the tokens to which ``p`` gives something, one by one."""
    return sum((a * (a / b).log() for a, b in zip(p, q, strict=True) if a > 0), torch.zeros((), dtype=torch.float64))


def jsd_sum(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    m = beta * q + (1 - beta) * p
    return beta * kl_sum(q, m) + (1 - beta) * kl_sum(p, m)


FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "kl": (full_kl, kl_sum),
    "reverse": (lambda p, q: full_kl(q, p), lambda p, q: kl_sum(q, p)),
    "jsd": (full_jsd, lambda p, q: jsd_sum(p, q, 0.5)),
    "jsd_0.2": (lambda p, q: full_jsd(p, q, 0.2), lambda p, q: jsd_sum(p, q, 0.2)),
    "entropy": (lambda p, q: full_entropy(p) + 0 * full_entropy(q), lambda p, q: -kl_sum(p, torch.ones_like(p))),
}


def both(name: str, p: torch.Tensor, q: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``[value, gradient to p, gradient to q]`` of ours and of the oracle, which works in float64."""
    function, oracle = FUNCTIONS[name]
    weights = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    mine = function(p, q)
    assert mine.shape == (ROWS,)
    wide = [x.detach().double().requires_grad_() for x in (p, q)]
    theirs = torch.stack([oracle(a, b) for a, b in zip(wide[0].softmax(-1), wide[1].softmax(-1), strict=True)])
    results = []
    for value, leaves in ((mine, (p, q)), (theirs, wide)):
        grads = torch.autograd.grad((weights * value).sum(), leaves, materialize_grads=True)
        results.append([value.detach().double(), *(grad.double() for grad in grads)])
    return results[0], results[1]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_equal_to_the_sums_written_out(name: str, dtype: torch.dtype, atol: float) -> None:
    """bfloat16 logits are what they are: only the gradient is rounded to bfloat16, the value is computed in float32."""
    mine, theirs = both(name, *draw(1, dtype))
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=min(atol, 2e-6))
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_impossible_tokens_add_nothing(name: str) -> None:
    """Tokens that neither side can produce, as of a padded vocabulary, at other places in each row."""
    p, q = (x.detach().clone() for x in draw(2))
    for row in range(ROWS):
        p[row, row], q[row, row] = -math.inf, -math.inf
        p[row, -1 - row % 3], q[row, -1 - row % 3] = -math.inf, -math.inf
    mine, theirs = both(name, p.requires_grad_(), q.requires_grad_())
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert (mine[1][p == -math.inf] == 0).all()


@pytest.mark.parametrize("name", ["kl", "jsd", "jsd_0.2"])
def test_only_the_second_may_produce_a_token(name: str) -> None:
    p, q = draw(3)
    mine, theirs = both(name, p.detach().index_fill(1, torch.tensor([2, 5]), -math.inf).requires_grad_(), q)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_an_infinite_divergence_is_shown() -> None:
    p, q = (x.detach() for x in draw(4))
    q[0, 0] = -math.inf
    values = full_kl(p, q)
    assert values[0] == math.inf
    assert values[1:].isfinite().all()
    disjoint = torch.tensor([[0.0, -math.inf]]), torch.tensor([[-math.inf, 0.0]])
    torch.testing.assert_close(full_jsd(*disjoint), torch.tensor([math.log(2)]), rtol=0, atol=1e-7)
    p[0, 0] = -2000.0  # rounds to a probability of 0 beside q's: no mass is missed
    assert full_kl(p, q).isfinite().all()


def test_equal_distributions_are_at_zero_with_zero_gradient() -> None:
    for name in ("kl", "reverse", "jsd", "jsd_0.2"):
        p, q = (draw(5, torch.float32)[0].detach().requires_grad_() for _ in range(2))
        value = FUNCTIONS[name][0](p, q)
        for tensor in (value, *torch.autograd.grad(value.sum(), (p, q))):
            torch.testing.assert_close(tensor, torch.zeros_like(tensor), rtol=0, atol=1e-6)


def test_logits_and_log_probs_give_the_same() -> None:
    p, q = draw(6)
    for shift in (0.0, 50.0):
        torch.testing.assert_close(full_kl(p + shift, q.log_softmax(-1)), full_kl(p, q), rtol=0, atol=1e-12)
    assert full_kl(p[:0], q[:0]).shape == (0,)
    peaked = torch.tensor([[0.0, -1e5, -3e38]], requires_grad=True)
    (grad,) = torch.autograd.grad(full_entropy(peaked).sum(), peaked)
    assert grad.tolist() == [[0.0, 0.0, 0.0]]


def test_the_share_of_the_mixture_is_the_teachers() -> None:
    """Towards the ends the divergence is one of the KLs to first order, which tells which argument beta belongs to."""
    student, teacher = (x.detach() for x in draw(7))
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    torch.testing.assert_close(jsd(p, q, 1e-8) / 1e-8, full_kl(teacher, student), rtol=0, atol=1e-4)
    torch.testing.assert_close(jsd(p, q, 1 - 1e-8) / 1e-8, full_kl(student, teacher), rtol=0, atol=1e-4)
