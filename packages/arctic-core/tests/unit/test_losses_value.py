"""The value loss against a loop in float64, in value and gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.config.losses import ValueLossConfig
from arctic_core.errors import DataError
from arctic_core.losses.value import explained_variance, value_loss


def draw(seed: int, size: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values, returns, old = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    return values.requires_grad_(), returns, values.detach() + 0.4 * old, torch.rand(size, generator=generator) < 0.7


def loop(v: torch.Tensor, returns: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, clip: float | None) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i in mask.nonzero()[:, 0].tolist():
        worst = (v[i] - returns[i]) ** 2
        if clip is not None and abs((v[i] - old[i]).item()) > clip:
            held = old[i] + clip * torch.sign(v[i].detach() - old[i])
            if (held - returns[i]) ** 2 > worst:
                worst = (held - returns[i]) ** 2
        total = total + worst / 2
    return total


@pytest.mark.parametrize("clip", [None, 0.05, 0.3, 10.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_the_loop(clip: float | None, seed: int) -> None:
    values, returns, old, mask = draw(seed)
    loss = value_loss(values, returns, old, mask, ValueLossConfig(clip=clip)).loss
    expected = loop(values, returns, old, mask, clip)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    mine, theirs = (torch.autograd.grad(x, values, materialize_grads=True)[0] for x in (loss, expected))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_metrics() -> None:
    values, returns, old, mask = draw(3)
    metrics = value_loss(values, returns, old, mask, ValueLossConfig(clip=0.1)).metrics
    v, r, o = values.detach()[mask], returns[mask], old[mask]
    assert {count for _, count in metrics.values()} == {int(mask.sum())}
    worse = (v.clamp(o - 0.1, o + 0.1) - r).abs() > (v - r).abs()
    assert metrics["clip_fraction"][0] == int(worse.sum()) > 0
    for name, expected in (("return", r), ("return_squared", r**2), ("error", r - v), ("error_squared", (r - v) ** 2)):
        assert metrics[name][0] == pytest.approx(expected.sum().item(), abs=1e-12)
    assert explained_variance(metrics) == pytest.approx((1 - (r - v).var() / r.var()).item(), abs=1e-12)


def test_explained_variance_adds_up_over_parts_and_survives_an_offset() -> None:
    values, returns, old, _ = (x.detach() for x in draw(4))
    values, returns, old = (x + 1000.0 for x in (values, returns, old))
    mask = torch.ones(24, dtype=torch.bool)
    parts = [value_loss(values[s], returns[s], old[s], mask[s], ValueLossConfig()).metrics for s in (slice(0, 5), slice(5, 24))]
    added = {name: (parts[0][name][0] + parts[1][name][0], parts[0][name][1] + parts[1][name][1]) for name in parts[0]}
    assert explained_variance(added) == pytest.approx((1 - (returns - values).var() / returns.var()).item(), abs=1e-7)
    same = value_loss(values, torch.ones(24), None, mask, ValueLossConfig(clip=None)).metrics
    assert math.isnan(explained_variance(same))
    assert math.isnan(explained_variance(value_loss(values, returns, old, ~mask, ValueLossConfig()).metrics))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_slots_may_hold_anything(poison: float) -> None:
    values, returns, old, mask = draw(5)
    for keep in (mask, torch.zeros_like(mask)):
        dirty = [x.detach().masked_fill(~keep, poison) for x in (values, returns, old)]
        dirty[0].requires_grad_()
        config = ValueLossConfig(clip=0.2)
        mine, clean = value_loss(*dirty, keep, config), value_loss(values, returns, old, keep, config)
        assert torch.equal(mine.loss, clean.loss)
        assert mine.metrics == clean.metrics
        grads = [torch.autograd.grad(out.loss, leaf)[0] for out, leaf in ((mine, dirty[0]), (clean, values))]
        assert torch.equal(*grads)
        assert (grads[0][~keep] == 0).all()
    assert mine.loss == 0


def test_empty_batch_and_ties() -> None:
    empty = torch.zeros(0, requires_grad=True)
    out = value_loss(empty, empty.detach(), empty.detach(), torch.zeros(0, dtype=torch.bool), ValueLossConfig())
    assert out.loss.item() == 0
    assert torch.autograd.grad(out.loss, empty)[0].shape == (0,)
    values = torch.tensor([1.0, 0.5], requires_grad=True)  # the held prediction is as far from the target as the free one
    out = value_loss(
        values, torch.tensor([0.75, 0.5]), torch.tensor([0.0, 0.0]), torch.tensor([True, True]), ValueLossConfig(clip=0.5)
    )
    assert out.metrics["clip_fraction"] == (0.0, 2.0)
    assert torch.autograd.grad(out.loss, values)[0].tolist() == [0.25, 0.0]


def test_bfloat16_predictions_and_no_gradient_to_targets() -> None:
    values, returns, old, mask = draw(6)
    low = values.detach().bfloat16().requires_grad_()
    targets, olds = returns.float().requires_grad_(), old.float().requires_grad_()
    out = value_loss(low, targets, olds, mask, ValueLossConfig())
    expected = loop(low.detach().double(), targets.detach().double(), olds.detach().double(), mask, 0.2)
    torch.testing.assert_close(out.loss.double(), expected, rtol=0, atol=1e-5)
    grads = torch.autograd.grad(out.loss, (low, targets, olds), allow_unused=True)
    assert grads[0] is not None
    assert grads[0].isfinite().all()
    assert grads[1:] == (None, None)


def test_wrong_arguments_are_named() -> None:
    values, returns, old, mask = draw(7)
    with pytest.raises(DataError, match="old_values_R"):
        value_loss(values, returns, None, mask, ValueLossConfig())
    with pytest.raises(DataError, match="returns"):
        value_loss(values, returns[:-1], old, mask, ValueLossConfig())
    with pytest.raises(DataError, match="bool mask"):
        value_loss(values, returns, old, mask.float(), ValueLossConfig())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(0, 12), cut=st.integers(0, 12), clip=st.sampled_from([None, 0.1, 1.0]))
def test_no_cut_and_no_order_changes_anything(seed: int, size: int, cut: int, clip: float | None) -> None:
    values, returns, old, mask = draw(seed, size)
    config = ValueLossConfig(clip=clip)
    whole = value_loss(values, returns, old, mask, config)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    parts = [value_loss(values[s], returns[s], old[s], mask[s], config) for s in (order[:cut], order[cut:])]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss, rtol=0, atol=1e-12)
    for name, (total, count) in whole.metrics.items():
        assert sum(part.metrics[name][0] for part in parts) == pytest.approx(total, abs=1e-12)
        assert sum(part.metrics[name][1] for part in parts) == count
    mine, theirs = (torch.autograd.grad(x, values)[0] for x in (parts[0].loss + parts[1].loss, whole.loss))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
