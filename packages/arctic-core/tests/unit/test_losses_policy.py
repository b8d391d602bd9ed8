"""Every policy loss, with its options, against formulas written token by token in float64: value, gradients, metrics."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch

from arctic_core.config.losses import PolicyLossConfig
from arctic_core.errors import ConfigError, DataError
from arctic_core.losses.base import LossInputs, prepare_loss
from arctic_core.losses.common import LOG_RATIO_LIMIT
from arctic_core.plugins.manager import PluginRegistry
from arctic_core.protocol import NamedLoss

REGISTRY = PluginRegistry()
NAMES = ["grpo", "dapo", "dr_grpo", "ppo", "reinforce_pp", "gspo", "rloo", "cispo", "sapo"]
CLIPPED = ["grpo", "dapo", "dr_grpo", "ppo", "reinforce_pp", "gspo"]

COMMON_OPTIONS = [
    {},
    {"on_policy": True, "kl_coef": 0.3, "entropy_coef": 0.05},
    {"kl_coef": 0.5, "kl_estimator": "k1", "kl_gradient": "score", "kl_importance": True},
    {"kl_coef": 0.5, "kl_estimator": "k2", "kl_importance": True, "entropy_coef": -0.1},
    {"kl_coef": 0.5, "kl_estimator": "k3", "kl_gradient": "score", "entropy_coef": 0.2},
    {"mismatch": "tis", "mismatch_level": "sequence", "mismatch_high": 1.3, "kl_coef": 0.1},
    {"mismatch": "tis", "mismatch_level": "geometric", "mismatch_high": 0.9},
    {"mismatch": "mis", "mismatch_level": "sequence", "mismatch_low": 0.3, "mismatch_high": 2.5},
    {"mismatch": "mis", "mismatch_level": "geometric", "mismatch_low": 0.9, "mismatch_high": 1.1, "kl_coef": 0.1},
    {"mismatch": "mis", "mismatch_level": "geometric", "on_policy": True},
]
TOKEN_OPTIONS = [
    {"sequence_reduction": "sum"},
    {"sequence_reduction": "mean", "kl_coef": 0.2, "entropy_coef": 0.1, "kl_importance": True},
    {"mismatch": "tis", "sequence_reduction": "mean"},
    {"mismatch": "mis", "mismatch_low": 0.8, "mismatch_high": 1.5},
    {"mismatch": "icepop"},
]
CLIP_OPTIONS = [{"clip_low": 0.1, "clip_high": 0.3}, {"dual_clip": 1.1, "clip_low": 0.05, "clip_high": 0.05}]
OWN_OPTIONS = {
    "grpo": [
        *CLIP_OPTIONS,
        {"ratio_level": "sequence"},
        {"ratio_level": "sequence", "sequence_reduction": "sum", "dual_clip": 1.05, "clip_low": 0.02, "clip_high": 0.03},
    ],
    "rloo": [{"clip_low": 0.3, "clip_high": 0.3}, {"mismatch": "tis"}],
    "cispo": [{"clip_high": 0.1}, {"clip_low": 0.2, "clip_high": 0.3, "sequence_reduction": "mean"}],
    "sapo": [{"tau_positive": 3.0, "tau_negative": 5.0}],
}
CASES = [
    (name, options)
    for name in NAMES
    for options in [
        *COMMON_OPTIONS,
        *(TOKEN_OPTIONS if name != "rloo" else []),
        *OWN_OPTIONS.get(name, CLIP_OPTIONS if name in CLIPPED else []),
    ]
]


def make_inputs(seed: int = 0, spread: float = 0.4) -> LossInputs:
    """Six samples: five tokens, none, one, three that are all masked, twelve, two. Advantages differ by token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(23, generator=generator, dtype=torch.float64)

    logp, old = -draw().abs() - 0.1, draw(spread)
    mask = torch.rand(23, generator=generator) < 0.7
    mask[5], mask[6:9] = True, False
    return LossInputs(
        logprobs_R=logp.clone().requires_grad_(),
        entropy_R=draw().abs().requires_grad_(),
        mask_R=mask,
        cu_seqlens_B=torch.tensor([0, 5, 5, 6, 9, 21, 23]),
        advantages_R=draw(),
        old_logprobs_R=logp + old,
        ref_logprobs_R=logp + draw(spread),
        sampler_logprobs_R=logp + old + draw(spread),
    )


def config_of(name: str, options: dict) -> PolicyLossConfig:
    return REGISTRY.loss(name).config_model.parse(options)


def compute(name: str, inputs: LossInputs, options: dict):
    return REGISTRY.loss(name).compute(inputs, config_of(name, options))


def oracle(name: str, inputs: LossInputs, c) -> torch.Tensor:
    """The whole loss, a sample at a time, a token at a time, with python branches and products of ratios."""
    total = torch.zeros((), dtype=torch.float64)
    for start, stop in pairwise(inputs.cu_seqlens_B.tolist()):
        trained = [i for i in range(start, stop) if inputs.mask_R[i]]
        if not trained:
            continue
        policy = rloo_terms(inputs, trained, c) if name == "rloo" else token_terms(name, inputs, trained, c)
        others = [c.kl_coef * kl_oracle(inputs, i, c) - c.entropy_coef * inputs.entropy_R[i] for i in trained]
        share = 1 / len(trained) if c.sequence_reduction == "mean" else 1
        total = total + share * (sum(policy) + sum(others))
    return total


def old_of(inputs: LossInputs, i: int, c) -> torch.Tensor:
    return inputs.logprobs_R[i].detach() if c.on_policy else inputs.old_logprobs_R[i]


def ratio_of(inputs: LossInputs, i: int, c) -> torch.Tensor:
    return torch.exp(inputs.logprobs_R[i]) / torch.exp(old_of(inputs, i, c))


def token_terms(name: str, inputs: LossInputs, trained: list[int], c) -> list[torch.Tensor]:
    ratios = {i: ratio_of(inputs, i, c) for i in trained}
    if name == "gspo" or getattr(c, "ratio_level", "token") == "sequence":
        whole = math.prod(ratios.values()) ** (1 / len(trained))
        ratios = dict.fromkeys(trained, whole)
    terms = []
    for i in trained:
        r, advantage = ratios[i], inputs.advantages_R[i]
        if name == "cispo":
            weight = min(r.item(), 1 + c.clip_high)
            weight = weight if c.clip_low is None else max(weight, 1 - c.clip_low)
            term = -weight * advantage * inputs.logprobs_R[i]
        elif name == "sapo":
            tau = c.tau_positive if advantage > 0 else c.tau_negative
            term = -advantage * 4 / tau / (1 + torch.exp(-tau * (r - 1)))
        else:
            term = clipped_oracle(r, advantage, c)
        terms.append(weight_oracle(inputs, trained, i, c) * term)
    return terms


def rloo_terms(inputs: LossInputs, trained: list[int], c) -> list[torch.Tensor]:
    whole = math.prod(ratio_of(inputs, i, c) for i in trained)
    advantage = sum(inputs.advantages_R[i] for i in trained) / len(trained)
    return [weight_oracle(inputs, trained, trained[0], c) * clipped_oracle(whole, advantage, c)]


def clipped_oracle(r: torch.Tensor, advantage: torch.Tensor, c) -> torch.Tensor:
    low, high, dual = 1 - c.clip_low, 1 + c.clip_high, getattr(c, "dual_clip", None)
    if advantage > 0:
        return -advantage * (r if r < high else high)
    loss = -advantage * (r if r > low else low)
    return -dual * advantage if dual is not None and loss > -dual * advantage else loss


def weight_oracle(inputs: LossInputs, trained: list[int], i: int, c) -> float:
    if c.mismatch == "none":
        return 1.0
    which = [i] if c.mismatch_level == "token" else trained
    rho = math.prod(math.exp(old_of(inputs, j, c).item() - inputs.sampler_logprobs_R[j].item()) for j in which)
    if c.mismatch_level == "geometric":
        rho = rho ** (1 / len(trained))
    low, high = c.mismatch_bounds
    if c.mismatch == "tis":
        return min(rho, high)
    return rho if low <= rho <= high else 0.0


def kl_oracle(inputs: LossInputs, i: int, c) -> torch.Tensor:
    logp, ref = inputs.logprobs_R[i], inputs.ref_logprobs_R[i]
    d = logp - ref
    value = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[c.kl_estimator]
    if c.kl_gradient == "score":
        value = value.detach() + (d.detach() * logp - d.detach() * logp.detach())
    if c.kl_importance:
        ratio = ratio_of(inputs, i, c)
        value = value * (ratio.detach() if c.kl_gradient == "score" else ratio)
    return value


def gradients(loss: torch.Tensor, inputs: LossInputs) -> list[torch.Tensor]:
    grads = torch.autograd.grad(loss, [inputs.logprobs_R, inputs.entropy_R], allow_unused=True)
    return [torch.zeros_like(inputs.logprobs_R) if g is None else g for g in grads]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_the_formula_written_out(name: str, options: dict) -> None:
    for seed in range(3):
        inputs = make_inputs(seed)
        loss, expected = compute(name, inputs, options).loss, oracle(name, inputs, config_of(name, options))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-11)
        for mine, theirs in zip(gradients(loss, inputs), gradients(expected, inputs), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_the_cases_reach_what_they_are_for() -> None:
    """Bounds clip some and not all, corrections reject some and not all: else the comparison above would show little."""
    for name, options in CASES:
        metrics = [compute(name, make_inputs(seed), options).metrics for seed in range(3)]
        total = {key: [sum(column) for column in zip(*(m[key] for m in metrics), strict=True)] for key in metrics[0]}
        for key in ("mismatch_rejected", "mismatch_truncated"):
            if key in total and options["mismatch"] != "icepop" and not options.get("on_policy"):
                assert 0 < total[key][0] < total[key][1], (name, options)
        if "clip_low" in options:
            assert 0 < total["clip_fraction"][0] < total["clip_fraction"][1], (name, options)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_gradient_is_reinforce(name: str) -> None:
    """At ``π = π_old`` every policy loss has the gradient ``−A·∇log π``, over the response's tokens for the sequence losses."""
    inputs = make_inputs()
    inputs.advantages_R.copy_(torch.repeat_interleave(torch.randn(6).double(), inputs.cu_seqlens_B.diff()))  # by sample
    options = {} if name == "rloo" else {"sequence_reduction": "sum"}
    expected = -(inputs.advantages_R * inputs.mask_R)
    same = dataclasses.replace(inputs, old_logprobs_R=inputs.logprobs_R.detach().clone())
    for given, extra in ((inputs, {"on_policy": True}), (same, {})):
        loss = compute(name, given, options | extra).loss
        torch.testing.assert_close(gradients(loss, given)[0], expected, rtol=0, atol=1e-14)


def test_metrics_of_a_token_loss() -> None:
    inputs = make_inputs()
    output = compute("dapo", inputs, {"kl_coef": 0.1, "entropy_coef": 0.01})
    kept, m = inputs.mask_R, output.metrics
    trained = int(kept.sum())
    names = "loss policy_loss ratio clip_fraction clamped_fraction old_kl kl entropy mismatch_kl mismatch_abs_diff"
    assert set(m) == set(names.split())
    assert {count for _, count in m.values()} == {trained}
    log_ratio = (inputs.logprobs_R - inputs.old_logprobs_R)[kept].detach()
    log_rho = (inputs.old_logprobs_R - inputs.sampler_logprobs_R)[kept]
    ratio, up = log_ratio.exp(), inputs.advantages_R[kept] > 0
    beyond = (up & (ratio > 1.28)) | (~up & (ratio < 0.8))
    assert 0 < int(beyond.sum()) < trained
    assert m["clip_fraction"][0] == int(beyond.sum())
    assert m["ratio"][0] == pytest.approx(ratio.sum().item())
    assert m["old_kl"][0] == pytest.approx((ratio - 1 - log_ratio).sum().item())
    assert m["mismatch_kl"][0] == pytest.approx((log_rho.exp() - 1 - log_rho).sum().item())
    assert m["mismatch_abs_diff"][0] == pytest.approx(log_rho.abs().sum().item())
    assert m["entropy"][0] == pytest.approx(inputs.entropy_R[kept].sum().item())
    assert m["loss"][0] == output.loss.item()
    assert m["loss"][0] == pytest.approx(m["policy_loss"][0] + 0.1 * m["kl"][0] - 0.01 * m["entropy"][0])


def test_metrics_of_sequence_ratios_are_counted_by_sequences() -> None:
    inputs = make_inputs()
    trained, sequences = int(inputs.mask_R.sum()), 4
    for name in ("gspo", "rloo"):
        m = compute(name, inputs, {"mismatch": "mis", "mismatch_level": "geometric"}).metrics
        by_sequence = {"loss", "policy_loss", "ratio", "clamped_fraction", "mismatch_weight", "mismatch_rejected"}
        by_sequence |= {"clip_fraction"} if name == "rloo" else set()
        assert {key for key, (_, count) in m.items() if count == sequences} == by_sequence
        assert {count for _, count in m.values()} == {sequences, trained}
    log_ratio = (inputs.logprobs_R - inputs.old_logprobs_R).detach()
    whole = [log_ratio[a:b][inputs.mask_R[a:b]] for a, b in pairwise(inputs.cu_seqlens_B.tolist())]
    expected = sum(part.sum().exp().item() for part in whole if len(part))
    assert m["ratio"][0] == pytest.approx(expected)
    assert compute("sapo", inputs, {}).metrics["gate"][1] == trained


@pytest.mark.parametrize("gap", [60.0, -60.0, 1e3, -1e3])
@pytest.mark.parametrize("name", NAMES)
def test_huge_log_ratios_are_bounded_before_exp_and_counted(name: str, gap: float) -> None:
    """float32; the second token's advantage is 0, where an infinite ratio would give NaN."""
    logp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    far = torch.tensor([-1.0 - gap, -1.0 - gap, -1.0])
    advantages = torch.zeros(3) if name == "rloo" else torch.tensor([-1.0, 0.0, 1.0])
    inputs = LossInputs(
        logp, None, torch.ones(3).bool(), torch.tensor([0, 1, 3]), advantages, far, ref_logprobs_R=far, sampler_logprobs_R=-far
    )
    for mismatch in ("none", "tis", "mis"):
        output = compute(name, inputs, {"kl_coef": 0.1, "kl_importance": True, "mismatch": mismatch})
        assert torch.isfinite(output.loss)
        assert torch.isfinite(torch.autograd.grad(output.loss, logp)[0]).all()
        assert all(math.isfinite(value) for pair in output.metrics.values() for value in pair)
        assert output.metrics["clamped_fraction"] == ((2.0, 2.0) if name in ("gspo", "rloo") else (2.0, 3.0))
        assert output.metrics["ratio"][0] <= 3 * math.exp(LOG_RATIO_LIMIT) + 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["logprobs_R", "advantages_R", "old_logprobs_R", "ref_logprobs_R", "sampler_logprobs_R"])
def test_nan_in_a_trained_slot_stays_visible(name: str, field: str) -> None:
    inputs = make_inputs()
    values = getattr(inputs, field).detach().clone()
    values[int(inputs.mask_R.nonzero()[0])] = float("nan")
    spoiled = dataclasses.replace(inputs, **{field: values.requires_grad_()})
    for options in ({"mismatch": "tis"}, {"mismatch": "mis"}, {"mismatch": "mis", "mismatch_level": "geometric"}):
        assert torch.isnan(compute(name, spoiled, options | {"kl_coef": 0.1}).loss)


def test_registered_with_the_fields_they_need() -> None:
    for name in NAMES:
        for options, fields in (
            ({}, {"advantages", "old_logprobs"}),
            ({"on_policy": True}, {"advantages"}),
            ({"kl_coef": 0.1}, {"advantages", "old_logprobs", "ref_logprobs"}),
            ({"mismatch": "tis"}, {"advantages", "old_logprobs", "sampler_logprobs"}),
        ):
            prepared = prepare_loss(REGISTRY.loss(name), NamedLoss(name=name, options=options, constant=4.0))
            assert set(prepared.required) == fields
            assert not prepared.needs_entropy
            needed = {f"{field}_R": getattr(make_inputs(), f"{field}_R") for field in fields}
            bare = LossInputs(*(getattr(make_inputs(), f) for f in ("logprobs_R", "entropy_R", "mask_R", "cu_seqlens_B")))
            assert torch.isfinite(prepared.compute(dataclasses.replace(bare, **needed)).loss)
            for field in needed:
                with pytest.raises(DataError, match=field):
                    prepared.compute(dataclasses.replace(bare, **{**needed, field: None}))
        assert prepare_loss(
            REGISTRY.loss(name), NamedLoss(name=name, options={"entropy_coef": 0.1}, constant=4.0)
        ).needs_entropy


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("grpo", {"clip": 0.2}, "clip"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip"),
        ("grpo", {"kl_estimator": "k4"}, "kl_estimator"),
        ("ppo", {"clip_low": 1.0}, "clip_low"),
        ("ppo", {"ratio_level": "sequence"}, "ratio_level"),
        ("gspo", {"mismatch_high": 2.0}, "mismatch_high"),
        ("cispo", {"mismatch": "tis", "mismatch_low": 0.5}, "mismatch_low"),
        ("sapo", {"mismatch": "icepop", "mismatch_level": "sequence"}, "icepop"),
        ("dapo", {"mismatch": "mis", "mismatch_low": 3.0}, "below mismatch_high"),
        ("rloo", {"sequence_reduction": "mean"}, "sequence_reduction"),
        ("rloo", {"mismatch": "mis", "mismatch_level": "token"}, "mismatch_level"),
        ("rloo", {"mismatch": "icepop"}, "icepop"),
        ("rloo", {"mismatch_level": "geometric"}, "mismatch"),
    ],
)
def test_bad_options_are_named(name: str, options: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        config_of(name, options)
