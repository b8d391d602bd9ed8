"""One hidden row, many labels: against float64 on rows written out, in value, gradient, work and memory.

Suffix legend: as in :mod:`arctic_kernels.head`.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_kernels.head import linear_logprob_entropy
from arctic_kernels.head_layer import Layer
from arctic_kernels.zorro import head as forest_head
from arctic_kernels.zorro.errors import ZorroError
from arctic_kernels.zorro.forest import PackedForest

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")]),
]


class Shared:
    """Labels of a few hidden rows, in random order; the last row has none."""

    def __init__(
        self,
        labels: int = 17,
        hidden_rows: int = 6,
        vocabulary: int = 40,
        width: int = 8,
        seed: int = 0,
        *,
        device: str = "cpu",
        heats: int = 2,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(hidden_rows, width, generator=g, dtype=torch.float64).to(device)
        self.weight = torch.randn(vocabulary, width, generator=g, dtype=torch.float64).to(device)
        self.labels = torch.randint(0, vocabulary, (labels,), generator=g).to(device)
        self.ids = torch.randint(0, vocabulary, (labels, 2), generator=g).to(device)
        self.rows = torch.randint(0, hidden_rows - 1, (labels,), generator=g).to(device)
        self.temperatures = (0.6 + 0.5 * torch.randint(0, heats, (labels,), generator=g)).double().to(device)
        self.u, self.v = torch.randn(2, labels, generator=g, dtype=torch.float64).to(device)
        self.w = torch.randn(labels, 2, generator=g, dtype=torch.float64).to(device)

    def run(self, dtype: torch.dtype, *, heat: bool = True, ids: bool = True, **options: Any) -> list[torch.Tensor]:
        """Outputs and gradients of hidden states and weight, in float64."""
        hidden, weight = (x.to(dtype).requires_grad_() for x in (self.hidden, self.weight))
        options |= {"temperature": self.temperatures if heat else 0.7, "ids_RK": self.ids if ids else None}
        output = linear_logprob_entropy(hidden, weight, self.labels, rows_R=self.rows, **options)
        assert output.entropy_R is not None
        total = (self.u * output.logprobs_R).sum() + (self.v * output.entropy_R).sum()
        results = [output.logprobs_R, output.entropy_R]
        if output.topk_logprobs_RK is not None:
            total = total + (self.w * output.topk_logprobs_RK).sum()
            results.append(output.topk_logprobs_RK)
        return [x.detach().double() for x in (*results, *torch.autograd.grad(total, (hidden, weight)))]

    def oracle(self, dtype: torch.dtype, *, heat: bool = True, ids: bool = True) -> list[torch.Tensor]:
        hidden, weight = (x.to(dtype).double().requires_grad_() for x in (self.hidden, self.weight))
        logits = hidden[self.rows] @ weight.T
        logp = (logits / (self.temperatures[:, None] if heat else 0.7)).log_softmax(-1)
        results = [logp.gather(1, self.labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)]
        total = (self.u * results[0]).sum() + (self.v * results[1]).sum()
        if ids:
            results.append(logp.gather(1, self.ids))
            total = total + (self.w * results[2]).sum()
        return [x.detach() for x in (*results, *torch.autograd.grad(total, (hidden, weight)))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heat", [False, True], ids=["one temperature", "temperatures"])
@pytest.mark.parametrize("budget", [1, 3000, 1 << 30])
def test_value_and_gradient(device: str, heat: bool, budget: int) -> None:
    case = Shared(device=device)
    for mine, theirs in zip(
        case.run(torch.float64, heat=heat, budget_bytes=budget), case.oracle(torch.float64, heat=heat), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for mine, theirs in zip(
        case.run(torch.float32, heat=heat, budget_bytes=budget), case.oracle(torch.float32, heat=heat), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heat", [False, True], ids=["one temperature", "temperatures"])
@pytest.mark.parametrize("ids", [False, True], ids=["labels", "candidates"])
def test_bfloat16(device: str, heat: bool, ids: bool) -> None:
    case = Shared(70, 20, 304, 64, device=device)
    actual = case.run(torch.bfloat16, heat=heat, ids=ids, budget_bytes=60_000)
    expected = case.oracle(torch.bfloat16, heat=heat, ids=ids)
    for mine, theirs in zip(actual[:-2], expected[:-2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)
    for mine, theirs in zip(actual[-2:], expected[-2:], strict=True):
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm()


@settings(max_examples=40, deadline=None)
@given(
    labels=st.integers(0, 12),
    hidden_rows=st.integers(2, 6),
    seed=st.integers(0, 1000),
    budget=st.integers(1, 9000),
    heats=st.integers(1, 3),
)
def test_any_rows(labels: int, hidden_rows: int, seed: int, budget: int, heats: int) -> None:
    case = Shared(labels, hidden_rows, seed=seed, heats=heats)
    for mine, theirs in zip(case.run(torch.float64, budget_bytes=budget), case.oracle(torch.float64), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_the_most_likely_tokens_follow_their_labels() -> None:
    case = Shared()
    output = linear_logprob_entropy(case.hidden, case.weight, case.labels, rows_R=case.rows, topk=3, budget_bytes=900)
    expected = (case.hidden[case.rows] @ case.weight.T).log_softmax(-1).topk(3)
    assert output.topk_ids_RK is not None
    assert torch.equal(output.topk_ids_RK, expected.indices)
    torch.testing.assert_close(output.topk_logprobs_RK, expected.values, rtol=0, atol=1e-12)


def test_a_row_is_multiplied_once_for_each_of_its_temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Shared()
    multiplied: list[int] = []
    product = Layer.logits

    def counted(layer: Layer, hidden_CD: torch.Tensor) -> torch.Tensor:
        multiplied.append(len(hidden_CD))
        return product(layer, hidden_CD)

    monkeypatch.setattr(Layer, "logits", counted)
    linear_logprob_entropy(case.hidden, case.weight, case.labels, rows_R=case.rows)
    assert sum(multiplied) == len(case.rows.unique()) == 5
    multiplied.clear()
    linear_logprob_entropy(case.hidden, case.weight, case.labels, rows_R=case.rows, temperature=case.temperatures)
    assert sum(multiplied) == len(set(zip(case.rows.tolist(), case.temperatures.tolist(), strict=True)))


def test_a_row_without_labels_has_no_gradient() -> None:
    gradient = Shared().run(torch.float64)[-2]
    assert not gradient[-1].any()
    assert gradient[:-1].any(1).all()


@pytest.mark.parametrize("row", [-1, 6])
def test_a_row_out_of_range_is_refused(row: int) -> None:
    case = Shared()
    case.rows[3] = row
    with pytest.raises(ValueError, match="6 hidden rows"):
        case.run(torch.float32)


def test_rows_that_do_not_fit_the_labels_are_refused() -> None:
    case = Shared()
    case.rows = case.rows[:-1]
    with pytest.raises(ValueError, match="rows_R"):
        case.run(torch.float32)


def test_memory_stays_within_the_budget() -> None:
    """Neither all logits nor a copy of all hidden states is made."""
    hidden_rows, vocabulary, width, budget = 3000, 4000, 256, 2 * 2**20
    hidden = torch.randn(hidden_rows, width).requires_grad_()
    weight = torch.randn(vocabulary, width).requires_grad_()
    rows = torch.arange(0, hidden_rows, 2).repeat(2)
    labels = torch.randint(0, vocabulary, rows.shape)
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = linear_logprob_entropy(hidden, weight, labels, rows_R=rows, budget_bytes=budget)
        assert output.entropy_R is not None
        (output.logprobs_R.sum() + output.entropy_R.sum()).backward()
    results: Any = profile.profiler
    events = sorted((e for e in results.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    peak = max(itertools.accumulate(e.nbytes() for e in events))
    assert peak <= budget + 4 * (hidden_rows + vocabulary) * width + 200 * len(rows)


def small_forest() -> PackedForest:
    """A prompt of two tokens with the responses ``[5, 6]`` and ``[7]``; packed 1, 2, 5, 6, 7."""
    return PackedForest.from_sequences([[1, 2, 5, 6], [1, 2, 7]], [2, 2], min_shared_tokens=1)


def test_the_row_before_a_branch_scores_the_first_token_of_each() -> None:
    assert small_forest().token_ids.tolist() == [[1, 2, 5, 6, 7]]
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 4, generator=g).double(), torch.randn(9, 4, generator=g).double()
    temperature = torch.tensor([0.5, 1.0, 2.0]).double()
    logprobs, entropy = forest_head.linear_logprob_entropy(hidden, weight, small_forest(), temperature=temperature)
    logp = ((hidden[[1, 2, 1]] @ weight.T) / temperature[:, None]).log_softmax(-1)
    torch.testing.assert_close(logprobs, logp[[0, 1, 2], [5, 6, 7]], rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1), rtol=0, atol=1e-12)
    assert forest_head.linear_logprob_entropy(hidden, weight, small_forest(), entropy=False)[1] is None


@pytest.mark.parametrize("shape", [(1, 5, 4), (4, 4)])
def test_hidden_states_of_other_tokens_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ZorroError, match="5 tokens"):
        forest_head.linear_logprob_entropy(torch.zeros(shape), torch.zeros(9, 4), small_forest())
