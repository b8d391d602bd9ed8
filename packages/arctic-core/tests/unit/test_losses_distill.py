"""Distillation against divergences of a small vocabulary written out in float64, in value and gradient."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.config.losses import DistillLossConfig
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.common import LOG_RATIO_LIMIT
from arctic_core.losses.distill import TAIL_FLOOR, distill_loss

VOCABULARY = 8
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
KINDS = [(divergence, beta) for divergence in DIVERGENCES for beta in ((0.5, 0.2, 0.9) if divergence == "jsd" else (0.5,))]


def divergence_of(p: torch.Tensor, q: torch.Tensor, config: DistillLossConfig) -> torch.Tensor:
    """Of student ``p`` and teacher ``q``, sums over the outcomes that the weighting side can produce; ``[R]``."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(a > 0, a * (a / b.clamp_min(1e-300)).clamp_min(1e-300).log(), torch.zeros_like(a)).sum(-1)

    if config.divergence == "reverse_kl":
        return kl(p, q)
    if config.divergence == "forward_kl":
        return kl(q, p)
    mixture = config.beta * q + (1 - config.beta) * p
    return config.beta * kl(q, mixture) + (1 - config.beta) * kl(p, mixture)


def outcomes(probs: torch.Tensor, ids: torch.Tensor, tail: str) -> torch.Tensor:
    """Of a whole distribution, the chosen tokens and what is left, summed over the tokens that are left."""
    chosen = probs.gather(-1, ids)
    if tail == "renormalize":
        return chosen / chosen.sum(-1, keepdim=True)
    rest = probs.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return torch.cat([chosen, rest], -1) if ids.shape[-1] < probs.shape[-1] else chosen


def draw_logits(seed: int, rows: int, scale: float = 1.5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = (
        torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(rows)])
        if rows
        else torch.zeros(0, 8).long()
    )
    return student.requires_grad_(), teacher, ids


def topk_inputs(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None = None) -> LossInputs:
    """From log-probs ``[R, K]``."""
    rows = len(student)
    mask = torch.ones(rows, dtype=torch.bool) if mask is None else mask
    zeros = torch.zeros(rows, dtype=student.dtype)
    return LossInputs(zeros, None, mask, torch.tensor([0, rows]), topk_logprobs_RK=student, teacher_topk_logprobs_RK=teacher)


def sampled_inputs(
    student: torch.Tensor, teacher: torch.Tensor, old: torch.Tensor | None = None, mask: torch.Tensor | None = None
) -> LossInputs:
    """From log-probs ``[R]``."""
    mask = torch.ones(len(student), dtype=torch.bool) if mask is None else mask
    offsets = torch.tensor([0, len(student)])
    return LossInputs(student, None, mask, offsets, teacher_logprobs_R=teacher, old_logprobs_R=old)


# --- top-k: the formula -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("divergence", "beta"), KINDS)
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("k", [1, 3, VOCABULARY])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-5), (torch.float32, 2e-5)])
def test_topk_equals_the_sum_over_outcomes(
    divergence: str, beta: float, tail: str, k: int, dtype: torch.dtype, atol: float
) -> None:
    """With ``K`` the whole vocabulary both sides of the comparison are the exact divergence."""
    config = DistillLossConfig.parse({"divergence": divergence, "beta": beta, "tail": tail})
    student, teacher, ids = draw_logits(k, rows=7)
    ids = ids[:, :k]
    leaf = student.detach().to(dtype).requires_grad_()
    inputs = topk_inputs(leaf.log_softmax(-1).gather(-1, ids), teacher.log_softmax(-1).gather(-1, ids).to(dtype))
    loss = distill_loss(inputs, config).loss
    p, q = (outcomes(x.softmax(-1), ids, tail) for x in (student, teacher))
    expected = divergence_of(p, q, config).sum()
    atol = 1e-12 if dtype == torch.float64 and k < VOCABULARY else atol  # a tail of 0 is held at the least mass of float32
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=atol)
    mine, theirs = torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(expected, student)[0]
    torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=atol)
    if tail == "renormalize" and k == 1:
        assert abs(loss.item()) < 1e-5
        assert mine.abs().max() < 1e-6


def test_topk_metrics() -> None:
    student, teacher, ids = draw_logits(5, rows=40)
    mask = torch.rand(40, generator=torch.Generator().manual_seed(5)) < 0.6
    logp, logq = (x.log_softmax(-1).gather(-1, ids[:, :3]) for x in (student, teacher))
    for divergence in DIVERGENCES:
        out = distill_loss(topk_inputs(logp, logq, mask), DistillLossConfig.parse({"divergence": divergence}))
        p, q = (outcomes(x.softmax(-1), ids[:, :3], "bucket")[mask].detach() for x in (student, teacher))
        expected = {
            "loss": out.loss,
            "teacher_kl": divergence_of(p, q, DistillLossConfig()).sum(),
            "clamped_fraction": torch.tensor(0),
            "teacher_mass": q[:, :3].sum(),
            "student_mass": p[:, :3].sum(),
            "agreement": (p[:, :3].argmax(-1) == q[:, :3].argmax(-1)).sum(),
        }
        assert set(out.metrics) == set(expected)
        for name, (total, count) in out.metrics.items():
            assert count == int(mask.sum())
            assert total == pytest.approx(expected[name].item(), abs=1e-10), name


def test_ties_agree_whatever_their_order() -> None:
    student = torch.tensor([[-1.0, -1.0, -3.0], [-1.0, -1.0, -3.0], [-3.0, -1.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[-2.0, -1.0, -2.0], [-1.0, -2.0, -2.0], [-1.0, -2.0, -2.0]])
    assert distill_loss(topk_inputs(student, teacher), DistillLossConfig()).metrics["agreement"] == (2.0, 3.0)


# --- top-k: the edges ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("divergence", "beta"), KINDS)
@pytest.mark.parametrize("k", [3, VOCABULARY])
def test_a_rounded_teacher_stays_a_distribution(divergence: str, beta: float, k: int) -> None:
    """bfloat16 log-probs of a sharp teacher sum to more than 1 in some rows. The tail is then the least there is."""
    student, teacher, _ = draw_logits(8, rows=64, scale=4.0)
    student = (student.detach() / 4).requires_grad_()
    exact, ids = teacher.log_softmax(-1).topk(k)
    rounded = exact.bfloat16().float()
    assert (rounded.exp().sum(-1) > 1).any()
    q = rounded.double().exp()
    covered = q.sum(-1, keepdim=True).clamp_max(1 - TAIL_FLOOR)
    bucket = torch.cat([q / q.sum(-1, keepdim=True) * covered, 1 - covered], -1)
    # rounding moves each log-prob by 2^-9 of itself, which the renormalised divergence follows
    for tail, oracle_q, atol in (("bucket", bucket, 1e-3), ("renormalize", exact.softmax(-1), 0.05)):
        config = DistillLossConfig.parse({"divergence": divergence, "beta": beta, "tail": tail})
        leaf = student.detach().float().requires_grad_()
        logp = leaf.log_softmax(-1).gather(-1, ids)
        losses = torch.stack([distill_loss(topk_inputs(logp[i : i + 1], rounded[i : i + 1]), config).loss for i in range(64)])
        assert (losses > -1e-6).all()
        p = outcomes(student.softmax(-1), ids, tail)
        if tail == "bucket" and k == VOCABULARY:
            p = torch.cat([p * (1 - TAIL_FLOOR), torch.full((64, 1), TAIL_FLOOR)], -1)
        expected = divergence_of(p, oracle_q, config)
        torch.testing.assert_close(losses.double(), expected, rtol=0, atol=atol)
        mine, theirs = torch.autograd.grad(losses.sum(), leaf)[0], torch.autograd.grad(expected.sum(), student)[0]
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(("divergence", "beta"), KINDS)
def test_a_tail_near_nothing(divergence: str, beta: float) -> None:
    """Student and teacher whose ``K`` tokens hold 1 − δ, down to δ = 0 and past it; float32 against float64 on the same δ."""
    config = DistillLossConfig.parse({"divergence": divergence, "beta": beta})
    for student_tail in (0.3, 1e-3, 1e-5, 0.0):
        for teacher_tail in (0.5, 1e-2, 1e-4, 0.0, -1e-3):
            p = torch.tensor([[0.7, 0.3]], dtype=torch.float64) * (1 - student_tail)
            q = torch.tensor([[0.4, 0.6]], dtype=torch.float64) * (1 - teacher_tail)
            leaf = p.log().float().requires_grad_()
            loss = distill_loss(topk_inputs(leaf, q.log().float()), config).loss
            grad = torch.autograd.grad(loss, leaf)[0]
            assert loss.isfinite()
            assert grad.isfinite().all()
            held = [max(tail, TAIL_FLOOR) for tail in (student_tail, teacher_tail)]
            p = torch.tensor([[0.7, 0.3]], dtype=torch.float64) * (1 - held[0])
            q = torch.tensor([[0.4 * (1 - held[1]), 0.6 * (1 - held[1]), held[1]]], dtype=torch.float64)
            logp = p.log().requires_grad_()
            expected = divergence_of(torch.cat([logp.exp(), 1 - logp.exp().sum(-1, keepdim=True)], -1), q, config)
            # the mass of a tail carries float32's error of 1e-7: its log, weighted by the other side's, that over the tail
            atol = 1e-5 + 2e-7 * (held[0] / held[1] + held[1] / held[0])
            torch.testing.assert_close(loss.double(), expected[0], rtol=0, atol=atol)
            if student_tail >= 1e-3:
                theirs = torch.autograd.grad(expected.sum(), logp)[0]
                torch.testing.assert_close(grad.double(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gone", [-math.inf, -9999.0, -30.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_a_token_the_teacher_rules_out(gone: float, tail: str) -> None:
    """Reverse KL would be infinite: its log-ratio counts as the limit, the token is pushed down, and the metrics say so."""
    student = torch.tensor([[0.5, 0.3, 0.1], [0.5, 0.3, 0.1]]).log().requires_grad_()
    teacher = torch.tensor([[0.6, 0.2, 0.1], [0.6, 0.2, 0.1]]).log()
    teacher[0, 1] = gone
    out = distill_loss(topk_inputs(student, teacher), DistillLossConfig.parse({"tail": tail}))
    assert 0.3 * LOG_RATIO_LIMIT - 1 < out.loss.item() < LOG_RATIO_LIMIT
    assert out.metrics["clamped_fraction"] == (1.0, 2.0)
    (grad,) = torch.autograd.grad(out.loss, student)
    assert grad.isfinite().all()
    assert grad[0, 1] > 1
    for divergence in ("forward_kl", "jsd"):  # finite by definition: such a token adds nothing to forward KL
        config = DistillLossConfig.parse({"divergence": divergence, "tail": tail})
        leaf = student.detach().double().requires_grad_()
        out = distill_loss(topk_inputs(leaf, teacher.double()), config)
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (leaf.exp(), teacher.double().exp()))
        if tail == "renormalize":
            p, q = (x.exp() / x.exp().sum(-1, keepdim=True) for x in (leaf, teacher.double()))
        expected = divergence_of(p, q, config).sum()
        torch.testing.assert_close(out.loss, expected, rtol=0, atol=1e-10)
        assert out.metrics["clamped_fraction"] == (0.0, 2.0)
        mine, theirs = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (out.loss, expected))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_a_token_the_student_rules_out() -> None:
    logits = torch.tensor([[0.5, -math.inf, 0.1, 0.2]], requires_grad=True)
    teacher = torch.tensor([[0.5, 0.25, 0.125]]).log()
    for divergence in DIVERGENCES:
        out = distill_loss(
            topk_inputs(logits.log_softmax(-1)[:, :3], teacher), DistillLossConfig.parse({"divergence": divergence})
        )
        (grad,) = torch.autograd.grad(out.loss, logits)
        assert out.loss.isfinite()
        assert grad.isfinite().all()
        assert grad[0, 1] == 0
        assert out.metrics["clamped_fraction"][0] == (divergence == "forward_kl")


def test_forward_kl_keeps_its_gradient_where_its_value_is_bounded() -> None:
    """A student that is certain and wrong must be able to learn: the gradient on the logits is ``p − q`` however far off."""
    logits = torch.tensor([[60.0, 0.0, -5.0]], requires_grad=True)
    q = torch.tensor([[0.1, 0.7, 0.2]])
    config = DistillLossConfig(divergence="forward_kl", tail="renormalize")
    out = distill_loss(topk_inputs(logits.log_softmax(-1), q.log()), config)
    torch.testing.assert_close(torch.autograd.grad(out.loss, logits)[0], logits.detach().softmax(-1) - q, rtol=0, atol=1e-6)
    assert out.loss.item() == pytest.approx(0.9 * LOG_RATIO_LIMIT, abs=1)
    assert out.metrics["clamped_fraction"] == (1.0, 1.0)


def test_nothing_left_of_the_teacher() -> None:
    student = torch.tensor([[0.5, 0.3]]).log().requires_grad_()
    for divergence in DIVERGENCES:
        for tail in ("bucket", "renormalize"):
            config = DistillLossConfig.parse({"divergence": divergence, "tail": tail})
            out = distill_loss(topk_inputs(student, torch.full((1, 2), -math.inf)), config)
            assert out.loss.isfinite()
            assert torch.autograd.grad(out.loss, student)[0].isfinite().all()
            assert out.metrics["teacher_mass"] == (0.0, 1.0)


@pytest.mark.parametrize("source", ["topk", "sampled"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_nan_in_a_trained_slot_stays_visible(source: str, divergence: str) -> None:
    config = DistillLossConfig.parse({"source": source, "divergence": divergence})
    for student, teacher in ((math.nan, -1.0), (-1.0, math.nan)):
        shape = (2, 3) if source == "topk" else (2,)
        make = topk_inputs if source == "topk" else sampled_inputs
        inputs = make(torch.full(shape, student, requires_grad=True), torch.full(shape, teacher))
        assert distill_loss(inputs, config).loss.isnan()


# --- sampled: by enumeration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("divergence", "beta"), KINDS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sampled_is_the_divergence_in_expectation(divergence: str, beta: float, on_policy: bool, seed: int) -> None:
    """Every token of the vocabulary once, weighted by the probability that the sampling policy gives it."""
    config = DistillLossConfig.parse({"source": "sampled", "divergence": divergence, "beta": beta, "on_policy": on_policy})
    generator = torch.Generator().manual_seed(seed)
    student, teacher, old = (torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(3))
    student.requires_grad_()
    behaviour = (student.detach() if on_policy else old).softmax(-1)
    value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(student)
    for token in range(VOCABULARY):
        logp = student.log_softmax(-1)[token : token + 1]
        q, o = teacher.log_softmax(-1)[token : token + 1], old.log_softmax(-1)[token : token + 1]
        loss = distill_loss(sampled_inputs(logp, q, None if on_policy else o), config).loss
        value += behaviour[token] * loss.detach()
        gradient += behaviour[token] * torch.autograd.grad(loss, student)[0]
    exact = divergence_of(student.softmax(-1), teacher.softmax(-1), config)
    torch.testing.assert_close(value, exact.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, student)[0], rtol=0, atol=1e-13)


def test_sampled_gradient_is_the_policy_gradient_of_the_log_ratio() -> None:
    """Reverse KL: each token's advantage is ``log q − log π``, as in on-policy distillation; nothing where both agree."""
    student = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    teacher = torch.tensor([-1.0, -0.5, -3.0])
    out = distill_loss(sampled_inputs(student, teacher), DistillLossConfig(source="sampled"))
    torch.testing.assert_close(torch.autograd.grad(out.loss, student)[0], student.detach() - teacher, rtol=0, atol=1e-7)
    assert out.metrics == {"loss": (1.0, 3.0), "teacher_kl": (1.0, 3.0), "clamped_fraction": (0.0, 3.0)}
    for divergence in DIVERGENCES:
        leaf = teacher.clone().requires_grad_()
        out = distill_loss(
            sampled_inputs(leaf, teacher), DistillLossConfig.parse({"source": "sampled", "divergence": divergence})
        )
        assert out.loss == 0
        assert (torch.autograd.grad(out.loss, leaf)[0] == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_sampled_bounds_its_ratios_and_counts_them(divergence: str) -> None:
    config = DistillLossConfig.parse({"source": "sampled", "divergence": divergence, "on_policy": False})
    student = torch.tensor([-1.0, -1.0, -900.0, -1.0, -1.0, -math.inf, -1.0], requires_grad=True)
    teacher = torch.tensor([-2.0, -math.inf, -1.0, -1e30, -1.0, -math.inf, -2.0])
    old = torch.tensor([-1.5, -1.5, -900.0, -1.5, -80.0, -1.0, -math.inf])
    out = distill_loss(sampled_inputs(student, teacher, old), config)
    assert out.loss.isfinite()
    assert torch.autograd.grad(out.loss, student)[0].isfinite().all()
    assert out.metrics["clamped_fraction"] == (6.0, 7.0)
    assert all(math.isfinite(total) for total, _ in out.metrics.values())
    worst = distill_loss(sampled_inputs(student[1:2], teacher[1:2], student[1:2].detach()), config)
    torch.testing.assert_close(worst.loss.item(), LOG_RATIO_LIMIT if divergence == "reverse_kl" else worst.loss.item())
    if divergence == "reverse_kl":  # the bound keeps the push away from what the teacher rules out
        assert torch.autograd.grad(worst.loss, student)[0][1] == LOG_RATIO_LIMIT


# --- masks, cuts, order -------------------------------------------------------------------------------------------------

ALL_CONFIGS = [
    DistillLossConfig.parse({"divergence": divergence, **({"beta": 0.3} if divergence == "jsd" else {}), **options})
    for divergence in DIVERGENCES
    for options in (
        {"source": "topk", "tail": "bucket"},
        {"source": "topk", "tail": "renormalize"},
        {"source": "sampled"},
        {"source": "sampled", "on_policy": False},
    )
]


def some_inputs(seed: int, rows: int, k: int, config: DistillLossConfig) -> LossInputs:
    student, teacher, ids = draw_logits(seed, rows)
    ids = ids[:, :k]
    logp, logq = (x.detach().log_softmax(-1).gather(-1, ids) for x in (student, teacher))
    mask = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.6
    if config.source == "topk":
        return topk_inputs(logp.requires_grad_(), logq, mask)
    return sampled_inputs(logp[:, 0].clone().requires_grad_(), logq[:, 0], logp[:, 0].detach() + 0.3 * logq[:, 0], mask)


def leaf_of(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs_R if inputs.topk_logprobs_RK is None else inputs.topk_logprobs_RK


TENSORS = ("logprobs_R", "old_logprobs_R", "teacher_logprobs_R", "topk_logprobs_RK", "teacher_topk_logprobs_RK")


def select(inputs: LossInputs, rows: torch.Tensor) -> LossInputs:
    changes = {name: value[rows] for name in TENSORS if (value := getattr(inputs, name)) is not None}
    return dataclasses.replace(inputs, mask_R=inputs.mask_R[rows], cu_seqlens_B=torch.tensor([0, len(rows)]), **changes)


def gradient(out: LossOutput, inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(out.loss, leaf_of(inputs), retain_graph=True)[0]


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=str)
def test_masked_slots_may_hold_anything(config: DistillLossConfig) -> None:
    clean = some_inputs(3, 12, 4, config)
    assert 0 < int(clean.mask_R.sum()) < 12
    for mask in (clean.mask_R, torch.zeros(12, dtype=torch.bool)):
        clean = dataclasses.replace(clean, mask_R=mask)
        expected = distill_loss(clean, config)
        for poison in (math.nan, math.inf, -math.inf, 1e30, -1e30, 1e3):
            changes = {}
            for name in TENSORS:
                if (value := getattr(clean, name)) is not None:
                    keep = mask if value.ndim == 1 else mask[:, None]
                    changes[name] = value.detach().masked_fill(~keep, poison).requires_grad_()
            dirty = dataclasses.replace(clean, **changes)
            out = distill_loss(dirty, config)
            assert torch.equal(out.loss, expected.loss)
            assert out.metrics == expected.metrics
            assert torch.equal(gradient(out, dirty), gradient(expected, clean))
            assert (gradient(out, dirty)[~mask] == 0).all()
    assert expected.loss == 0
    assert all(pair == (0.0, 0.0) for pair in expected.metrics.values())


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=str)
def test_empty_batch(config: DistillLossConfig) -> None:
    for k, teacher_k in ((4, 4), (0, 0), (4, 0)):
        inputs = some_inputs(0, 0, k or 1, config)
        if config.source == "topk":
            student, teacher = torch.zeros(0, k, requires_grad=True), torch.zeros(0, teacher_k)
            inputs = dataclasses.replace(inputs, topk_logprobs_RK=student, teacher_topk_logprobs_RK=teacher)
        out = distill_loss(inputs, config)
        assert out.loss.item() == 0
        assert gradient(out, inputs).shape == leaf_of(inputs).shape
        assert all(pair == (0.0, 0.0) for pair in out.metrics.values())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 9),
    cut=st.integers(0, 9),
    k=st.integers(1, VOCABULARY),
    config=st.sampled_from(ALL_CONFIGS),
)
def test_no_cut_and_no_order_changes_anything(seed: int, rows: int, cut: int, k: int, config: DistillLossConfig) -> None:
    inputs = some_inputs(seed, rows, k, config)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    whole = distill_loss(inputs, config)
    parts = [distill_loss(select(inputs, rows_), config) for rows_ in (order[:cut], order[cut:])]
    total = LossOutput(parts[0].loss + parts[1].loss)
    torch.testing.assert_close(total.loss, whole.loss, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient(total, inputs), gradient(whole, inputs), rtol=0, atol=1e-10)
    for name, (value, count) in whole.metrics.items():
        assert sum(part.metrics[name][0] for part in parts) == pytest.approx(value, abs=1e-10)
        assert sum(part.metrics[name][1] for part in parts) == count
    if config.source == "topk":  # nor does the order of the K tokens
        shuffled = torch.randperm(k, generator=generator)
        changes = {name: getattr(inputs, name)[:, shuffled] for name in ("topk_logprobs_RK", "teacher_topk_logprobs_RK")}
        again = distill_loss(dataclasses.replace(inputs, **changes), config)
        torch.testing.assert_close(again.loss, whole.loss, rtol=0, atol=1e-10)
        torch.testing.assert_close(gradient(again, inputs), gradient(whole, inputs), rtol=0, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    p=st.lists(st.floats(-60, 0, width=32), min_size=3, max_size=3),
    q=st.lists(st.one_of(st.floats(-60, 0, width=32), st.just(-math.inf)), min_size=3, max_size=3),
    config=st.sampled_from([config for config in ALL_CONFIGS if config.source == "topk"]),
)
def test_any_log_probs_give_a_finite_loss_that_is_not_negative(p: list, q: list, config: DistillLossConfig) -> None:
    """Also ones that sum to more than 1, as no softmax gives them."""
    student = torch.tensor([p], requires_grad=True)
    out = distill_loss(topk_inputs(student, torch.tensor([q])), config)
    assert -1e-5 < out.loss.item() < LOG_RATIO_LIMIT + 1
    assert torch.autograd.grad(out.loss, student)[0].isfinite().all()
