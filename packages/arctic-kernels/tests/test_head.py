"""The chunked head against a plain float64 one, in value, gradient and memory.

Suffix legend: as in :mod:`arctic_kernels.head`.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_kernels.head import HeadOutput, bytes_per_row, linear_logprob_entropy, logprob_entropy

ONE_ROW = 1  # a budget below one row's need: row by row
WHOLE = 1 << 40


class Case:
    """Random inputs, rounded to ``dtype``, and weights of a scalar made of all outputs."""

    def __init__(self, rows: int = 7, vocabulary: int = 43, width: int = 8, candidates: int = 3, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(rows, width, generator=g, dtype=torch.float64)
        self.weight = torch.randn(vocabulary, width, generator=g, dtype=torch.float64)
        self.bias = torch.randn(vocabulary, generator=g, dtype=torch.float64)
        self.labels = torch.randint(0, vocabulary, (rows,), generator=g)
        self.ids = torch.rand(rows, vocabulary, generator=g).argsort(dim=1)[:, :candidates]
        self.temperatures = 0.3 + 1.5 * torch.rand(rows, generator=g, dtype=torch.float64)
        self.u = torch.randn(rows, generator=g, dtype=torch.float64)
        self.v = torch.randn(rows, generator=g, dtype=torch.float64)
        self.w = torch.randn(rows, candidates, generator=g, dtype=torch.float64)

    def leaves(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(dtype).requires_grad_() for x in (self.hidden, self.weight, self.bias))

    def scalar(self, output: HeadOutput) -> torch.Tensor:
        """Differentiates each output that there is."""
        total = (self.u * output.logprobs_R).sum()
        if output.entropy_R is not None:
            total = total + (self.v * output.entropy_R).sum()
        if output.topk_logprobs_RK is not None and output.topk_logprobs_RK.requires_grad:
            total = total + (self.w * output.topk_logprobs_RK).sum()
        return total

    def run(self, function: Callable[..., HeadOutput], dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        """Outputs, then gradients of hidden states, weight and bias, all in float64."""
        leaves = self.leaves(dtype)
        output = function(leaves[0], leaves[1], self.labels, bias_V=leaves[2], ids_RK=self.ids, **options)
        gradients = torch.autograd.grad(self.scalar(output), leaves)
        assert [x.dtype for x in gradients] == [dtype] * 3
        return [x.detach().double() for x in (*output[:3], *gradients) if x is not None]

    def oracle(self, dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        """The same in float64, from the inputs as ``dtype`` rounds them."""
        leaves = tuple(x.detach().double().requires_grad_() for x in self.leaves(dtype))
        output = plain(leaves[0], leaves[1], self.labels, bias_V=leaves[2], ids_RK=self.ids, **options)
        return [x.detach() for x in (*output[:3], *torch.autograd.grad(self.scalar(output), leaves))]


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    bias_V: torch.Tensor | None = None,
    ids_RK: torch.Tensor,
    scale: float = 1.0,
    softcap: float | None = None,
) -> HeadOutput:
    """The formulas, by torch's own functions and autograd."""
    x = scale * (hidden @ weight.T + (0 if bias_V is None else bias_V))
    if softcap is not None:
        x = softcap * (x / softcap).tanh()
    logp = (x / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)).log_softmax(-1)
    return HeadOutput(
        logp.gather(1, labels[:, None])[:, 0], torch.special.entr(logp.exp()).sum(-1), logp.gather(1, ids_RK), ids_RK
    )


def close(actual: list[torch.Tensor], expected: list[torch.Tensor], atol: float) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("options", [{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 1.5, "softcap": 4.0}], ids=str)
@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0, "per row"])
@pytest.mark.parametrize("budget", [ONE_ROW, WHOLE], ids=["one row", "whole"])
def test_value_and_gradient_in_float64_and_float32(budget: int, temperature: float | str, options: dict[str, float]) -> None:
    case = Case()
    options = {"temperature": case.temperatures if temperature == "per row" else temperature, **options}
    close(
        case.run(linear_logprob_entropy, torch.float64, budget_bytes=budget, **options),
        case.oracle(torch.float64, **options),
        1e-11,
    )
    single = case.run(linear_logprob_entropy, torch.float32, budget_bytes=budget, **options)
    expected = case.oracle(torch.float32, **options)
    close(single[:3], expected[:3], 4e-5)  # log-probs down to -150 at temperature 0.1
    size = max(1.0, float(max(x.abs().max() for x in expected[3:])))
    close(single[3:], expected[3:], 1e-5 * size)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
def test_bfloat16_log_probs_are_within_a_thousandth(temperature: float) -> None:
    """Logits of bfloat16 products are not rounded to bfloat16, which alone would cost up to 0.1 nats here."""
    case = Case(rows=19, vocabulary=301, width=64)
    actual = case.run(linear_logprob_entropy, torch.bfloat16, temperature=temperature, budget_bytes=40_000)
    expected = case.oracle(torch.bfloat16, temperature=temperature)
    close(actual[:3], expected[:3], 1e-3)
    for mine, theirs in zip(actual[3:], expected[3:], strict=True):  # gradients are rounded to 8 bits
        assert (mine - theirs).norm() <= 4e-3 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 1e-3), (torch.float32, 5e-5)], ids=str)
@pytest.mark.parametrize("budget", [40_000, WHOLE])
def test_on_a_gpu(dtype: torch.dtype, atol: float, budget: int) -> None:
    """There the products of bfloat16 matrices come out in float32 without widened copies."""
    case = Case(rows=24, vocabulary=304, width=64)
    expected = case.oracle(dtype, temperature=0.7)
    for name, value in vars(case).items():
        setattr(case, name, value.cuda())
    actual = [x.cpu() for x in case.run(linear_logprob_entropy, dtype, temperature=0.7, budget_bytes=budget)]
    close(actual[:3], expected[:3], atol)
    for mine, theirs in zip(actual[3:], expected[3:], strict=True):
        assert (mine - theirs).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-4) * theirs.norm()


def test_gradcheck() -> None:
    case = Case(rows=3, vocabulary=5, width=2, candidates=2)
    hidden, weight, bias = case.leaves(torch.float64)

    def scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = linear_logprob_entropy(
            hidden,
            weight,
            case.labels,
            bias_V=bias,
            ids_RK=case.ids,
            temperature=case.temperatures,
            softcap=2.0,
            budget_bytes=1,
        )
        return output[:3]

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_budget_does_not_change_the_result(dtype: torch.dtype) -> None:
    case = Case(rows=23, vocabulary=97, width=16)
    need = bytes_per_row(97, dtype)
    runs = [case.run(linear_logprob_entropy, dtype, budget_bytes=budget) for budget in (ONE_ROW, 5 * need, 8 * need, WHOLE)]
    for run in runs[:-1]:
        close(run[:3], runs[-1][:3], 1e-13 if dtype == torch.float64 else 5e-6)
        for mine, theirs in zip(run[3:], runs[-1][3:], strict=True):
            size = float(theirs.abs().max())
            atol = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype] * size
            torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    vocabulary=st.integers(2, 40),
    temperature=st.floats(0.1, 2.0),
    seed=st.integers(0, 1000),
    budget=st.integers(1, 8000),
)
def test_any_shape_and_budget(rows: int, vocabulary: int, temperature: float, seed: int, budget: int) -> None:
    case = Case(rows, vocabulary, 4, min(3, vocabulary), seed)
    actual = case.run(linear_logprob_entropy, torch.float64, temperature=temperature, budget_bytes=budget)
    close(actual, case.oracle(torch.float64, temperature=temperature), 1e-10)


@pytest.mark.parametrize("budget", [ONE_ROW, WHOLE])
def test_forbidden_tokens_behave_as_if_the_vocabulary_were_smaller(budget: int) -> None:
    case = Case()
    kept = torch.arange(0, 43, 2)
    case.labels = kept[case.labels % len(kept)]
    case.ids = kept[torch.rand(7, len(kept)).argsort(dim=1)[:, :3]]
    small = Case()
    for name in ("weight", "bias"):
        setattr(small, name, getattr(case, name)[kept])
    small.labels, small.ids = case.labels // 2, case.ids // 2
    case.bias = torch.full_like(case.bias, -torch.inf).index_copy(0, kept, case.bias[kept])
    many, few = case.run(linear_logprob_entropy, torch.float64, budget_bytes=budget), small.oracle(torch.float64)
    close(many[:4], few[:4], 1e-12)
    for mine, theirs in zip(many[4:], few[4:], strict=True):
        torch.testing.assert_close(mine[kept], theirs, rtol=0, atol=1e-12)
        forbidden = torch.ones(43, dtype=torch.bool).index_fill(0, kept, False)
        assert not mine[forbidden].any()


def test_very_large_logits_stay_finite() -> None:
    case = Case()
    case.hidden *= 1e4
    for x in case.run(linear_logprob_entropy, torch.float32, temperature=0.1):
        assert x.isfinite().all()


@pytest.mark.parametrize("budget", [ONE_ROW, WHOLE])
def test_most_likely_tokens(budget: int) -> None:
    case = Case()
    hidden, weight, _ = case.leaves(torch.float64)
    output = linear_logprob_entropy(hidden, weight, case.labels, topk=5, temperature=0.7, budget_bytes=budget, entropy=False)
    expected = ((hidden @ weight.T) / 0.7).log_softmax(-1).topk(5, dim=-1)
    assert output.entropy_R is None
    assert torch.equal(output.topk_ids_RK, expected.indices)
    torch.testing.assert_close(output.topk_logprobs_RK, expected.values.detach(), rtol=0, atol=1e-12)
    assert not output.topk_logprobs_RK.requires_grad
    output.logprobs_R.sum().backward()  # beside it the labels are differentiable as ever
    assert hidden.grad.any()


def test_ties_among_the_most_likely() -> None:
    """Equal logits: any of them may be reported, none twice."""
    hidden = torch.ones(2, 1)
    weight = torch.tensor([[0.0], [1.0], [1.0], [2.0], [1.0]])
    output = linear_logprob_entropy(hidden, weight, torch.zeros(2, dtype=torch.long), topk=3, budget_bytes=1)
    logp = (hidden @ weight.T).log_softmax(-1)
    torch.testing.assert_close(output.topk_logprobs_RK, logp.topk(3).values, rtol=0, atol=1e-6)
    for row, ids in enumerate(output.topk_ids_RK.tolist()):
        assert ids[0] == 3
        assert len(set(ids)) == 3
        torch.testing.assert_close(logp[row, ids], output.topk_logprobs_RK[row], rtol=0, atol=1e-6)


def test_a_candidate_equal_to_the_label_or_given_twice_adds_its_gradient() -> None:
    case = Case()
    case.ids = torch.stack([case.labels, case.ids[:, 0], case.ids[:, 0]], dim=1)
    close(case.run(linear_logprob_entropy, torch.float64, budget_bytes=1), case.oracle(torch.float64), 1e-12)


def test_no_rows_stay_connected() -> None:
    leaves = Case(rows=0).leaves(torch.float32)
    output = linear_logprob_entropy(leaves[0], leaves[1], torch.zeros(0, dtype=torch.long), bias_V=leaves[2], topk=4)
    assert output.logprobs_R.shape == output.entropy_R.shape == (0,)
    assert output.topk_ids_RK.shape == (0, 4)
    (output.logprobs_R.sum() + output.entropy_R.sum()).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_gradients_only_where_wanted() -> None:
    case = Case()
    hidden, weight, bias = (x.detach() for x in case.leaves(torch.float32))
    for wanted in (hidden, weight, bias):
        for x in (hidden, weight, bias):
            x.requires_grad_(x is wanted).grad = None
        linear_logprob_entropy(hidden, weight, case.labels, bias_V=bias).entropy_R.sum().backward()
        assert [x.grad is not None for x in (hidden, weight, bias)] == [x is wanted for x in (hidden, weight, bias)]


def test_a_bfloat16_weight_may_collect_its_gradient_in_float32() -> None:
    """The sum over chunks is not rounded to bfloat16 where the parameter does not ask for it."""
    case = Case(rows=64, vocabulary=50, width=16)
    hidden, weight, _ = case.leaves(torch.bfloat16)
    weight.grad_dtype = torch.float32
    linear_logprob_entropy(hidden, weight, case.labels, entropy=False, budget_bytes=1).logprobs_R.sum().backward()
    exact = weight.detach().double().requires_grad_()
    plain(hidden.detach().double(), exact, case.labels, ids_RK=case.ids).logprobs_R.sum().backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=0, atol=1e-4)


def test_logits_in_value_and_gradient() -> None:
    case = Case()
    logits = (3 * torch.randn(7, 43, dtype=torch.float64, generator=torch.Generator().manual_seed(1))).requires_grad_()
    eye = torch.eye(43, dtype=torch.float64)
    expected = plain(logits, eye, case.labels, temperature=case.temperatures, ids_RK=case.ids)
    theirs = torch.autograd.grad(case.scalar(expected), logits)[0]
    for budget in (ONE_ROW, WHOLE):
        before = logits.detach().clone()
        output = logprob_entropy(logits, case.labels, temperature=case.temperatures, ids_RK=case.ids, budget_bytes=budget)
        close([*output[:3]], [*expected[:3]], 1e-12)
        close([torch.autograd.grad(case.scalar(output), logits)[0]], [theirs], 1e-12)
        assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": torch.ones(3)}, "temperature"),
        ({"topk": 44}, "topk"),
        ({"topk": 2, "ids_RK": torch.zeros(7, 1, dtype=torch.long)}, "topk"),
        ({"ids_RK": torch.zeros(6, 1, dtype=torch.long)}, "rows"),
        ({"labels_R": torch.zeros(6, dtype=torch.long)}, "rows"),
        ({"weight_VD": torch.zeros(43, 9)}, "fit"),
        ({"weight_VD": torch.zeros(43, 8, dtype=torch.bfloat16)}, "fit"),
        ({"hidden_RD": torch.zeros(7, 8, dtype=torch.float16)}, "float16"),
        ({"bias_V": torch.zeros(42)}, "bias_V"),
        ({"softcap": 0.0}, "softcap"),
        ({"budget_bytes": 0}, "budget_bytes"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], text: str) -> None:
    case = Case()
    arguments = {"hidden_RD": case.hidden.float(), "weight_VD": case.weight.float(), "labels_R": case.labels} | changes
    with pytest.raises(ValueError, match=text):
        linear_logprob_entropy(**arguments)


def peak_bytes(work: Callable[[], object]) -> int:
    """Most memory that torch's CPU allocator handed out beyond what was in use before."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = work()
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    del kept
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def test_the_measure_of_memory_is_right() -> None:
    assert peak_bytes(lambda: (torch.zeros(1000, 250) + 1).exp_().sum()) == pytest.approx(2e6, rel=0.01)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "budget", "dtype", "options"),
    [
        (4096, 50_000, 16 * 2**20, torch.float32, {}),  # all logits would take 819 MB
        (512, 20_000, 2**20, torch.bfloat16, {}),
        (512, 20_000, 2**20, torch.float32, {"softcap": 5.0, "scale": 0.5}),
        (512, 20_000, 2**20, torch.bfloat16, {"topk": 4}),
    ],
    ids=str,
)
def test_memory_stays_within_the_budget(
    rows: int, vocabulary: int, budget: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    width = 4
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), generator=g)

    def work() -> None:
        output = linear_logprob_entropy(hidden, weight, labels, budget_bytes=budget, **options)
        (output.logprobs_R.sum() + output.entropy_R.sum()).backward()

    # Beside the temporaries of a chunk: the gradient of the weight, in float32 and as rounded, and a few vectors of rows.
    assert 2 * budget < rows * vocabulary * dtype.itemsize
    outside = vocabulary * width * (4 + dtype.itemsize) + 100 * rows
    assert peak_bytes(work) <= budget + outside


@pytest.mark.parametrize("given", [False, True], ids=["most likely", "given"])
def test_candidates_count_in_the_budget(given: bool) -> None:
    rows, vocabulary, budget = 128, 20_000, 2**21
    hidden, weight = torch.randn(rows, 4), torch.randn(vocabulary, 4)
    labels = torch.zeros(rows, dtype=torch.long)
    ids = torch.arange(vocabulary).repeat(rows, 1)

    @torch.no_grad()
    def work() -> HeadOutput:
        wanted: dict[str, Any] = {"ids_RK": ids} if given else {"topk": vocabulary}
        return linear_logprob_entropy(hidden, weight, labels, budget_bytes=budget, **wanted)

    outputs = rows * vocabulary * 12 + 200 * rows  # log-probs in float32, ids in int64
    assert peak_bytes(work) <= budget + outputs
