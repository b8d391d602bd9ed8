"""Every built-in loss with options that matter, and a batch on which they all have something to do.

Suffix legend: ``_R`` response tokens of a batch, ``_K`` tokens scored beside each of them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from arctic_core.backends.base import ScoreOutcome
from arctic_core.data import Batch, Sample
from arctic_core.losses.evaluate import evaluate_loss
from arctic_core.protocol import NamedLoss, Scores

KL = {"kl_coef": 0.1, "entropy_coef": 0.02}
CASES = {
    "grpo": NamedLoss(name="grpo", options=KL),
    "grpo-token": NamedLoss(name="grpo", options=KL | {"sequence_reduction": "sum", "mismatch": "tis"}, normalization="token"),
    "grpo-constant": NamedLoss(
        name="grpo", options={"kl_coef": 0.1, "kl_estimator": "k2", "kl_gradient": "score"}, constant=9.0
    ),
    "grpo-sequence-ratio": NamedLoss(
        name="grpo", options=KL | {"ratio_level": "sequence", "mismatch": "mis", "mismatch_level": "sequence"}
    ),
    "dapo": NamedLoss(name="dapo", options=KL | {"mismatch": "icepop", "dual_clip": 3.0}),
    "dr_grpo": NamedLoss(name="dr_grpo", options=KL | {"kl_estimator": "k1", "kl_importance": True}, constant=64.0),
    "gspo": NamedLoss(name="gspo", options=KL | {"clip_low": 0.05, "clip_high": 0.05}),
    "cispo": NamedLoss(name="cispo", options=KL | {"clip_high": 0.1, "mismatch": "mis"}),
    "sapo": NamedLoss(name="sapo", options=KL | {"mismatch": "tis", "mismatch_level": "geometric"}),
    "rloo": NamedLoss(name="rloo", options=KL | {"sequence_reduction": "sum", "clip_high": 0.5}, normalization="sequence"),
    "reinforce_pp": NamedLoss(name="reinforce_pp", options=KL | {"kl_estimator": "k1", "kl_gradient": "score"}),
    "ppo": NamedLoss(name="ppo", options={"on_policy": True, "entropy_coef": 0.1}),
    "sft": NamedLoss(name="sft"),
    "sft-sequence": NamedLoss(name="sft", normalization="sequence"),
    "distill": NamedLoss(name="distill"),
    "distill-forward": NamedLoss(name="distill", options={"divergence": "forward_kl", "tail": "renormalize"}),
    "distill-jsd": NamedLoss(name="distill", options={"divergence": "jsd", "beta": 0.3}, normalization="sequence"),
    "distill-sampled": NamedLoss(name="distill", options={"source": "sampled", "on_policy": False}),
}
K = 4


def bare_samples() -> list[Sample]:
    """Ragged: an empty response, a one-token one, one that is masked whole, a group of one, several temperatures."""
    rng = np.random.default_rng(3)
    shapes = [("a", 3, 5), ("a", 3, 0), ("b", 4, 9), ("c", 2, 1), ("b", 4, 6), ("b", 4, 2), ("d", 1, 7)]
    rows = []
    for i, (group, prompt, response) in enumerate(shapes):
        mask = (rng.random(response) < 0.8) & (i != 5)
        row = {"token_ids": rng.integers(3, 500, prompt + response), "prompt_length": prompt, "group": group}
        rows.append(Sample(**row, loss_mask=mask, temperature=[1.0, 0.7, 1.3][i % 3]))
    return rows


def shared_samples() -> list[Sample]:
    """As many, with long prompts that a group shares, one that goes on where another ends, and responses that begin alike."""
    rng = np.random.default_rng(4)
    a, b, begun, c = (rng.integers(3, 500, size) for size in (80, 100, 70, 70))
    prompts = [a, a, b, c, b, b, np.concatenate([a, c[:20]])]
    rows = []
    for i, (group, response) in enumerate([("a", 5), ("a", 0), ("b", 80), ("c", 1), ("b", 76), ("b", 2), ("d", 7)]):
        own = rng.integers(3, 500, response)
        if response > len(begun):
            own[: len(begun)] = begun
        row = {"token_ids": np.concatenate([prompts[i], own]), "prompt_length": len(prompts[i]), "group": group}
        rows.append(Sample(**row, loss_mask=(rng.random(response) < 0.8) & (i != 5), temperature=[1.0, 0.7, 1.3][i % 3]))
    return rows


SAMPLES = {"bare": bare_samples, "shared": shared_samples}


def full_batch(logprobs_R: np.ndarray, samples: str = "bare") -> Batch:
    """The samples with every field a loss may read, near the policy's own log-probs; masked slots hold NaN."""
    rng = np.random.default_rng(5)
    batch = Batch.from_samples(SAMPLES[samples]())
    old_R = logprobs_R + 0.1 * rng.normal(size=len(logprobs_R))
    fields = {
        "advantages": rng.normal(size=len(logprobs_R)),
        "old_logprobs": old_R,
        "ref_logprobs": logprobs_R + 0.3 * rng.normal(size=len(logprobs_R)),
        "sampler_logprobs": old_R + 0.3 * rng.normal(size=len(logprobs_R)),
        "teacher_logprobs": logprobs_R + 0.3 * rng.normal(size=len(logprobs_R)),
    }
    for values in fields.values():
        values[batch.mask == 0] = np.nan
    ids_RK = np.stack([rng.permutation(512)[:K] for _ in logprobs_R])
    mass_RK = rng.dirichlet(np.ones(K + 1), len(logprobs_R))[:, :K]
    return batch.replace(**fields, topk_ids=ids_RK, teacher_topk_logprobs=np.log(mass_RK))


def needs(loss: NamedLoss) -> dict[str, bool]:
    """What ``forward`` must report for it."""
    sampled = loss.options.get("source") == "sampled"
    return {"entropy": "entropy_coef" in loss.options, "given_topk": loss.name == "distill" and not sampled}


def gradients_outside(batch: Batch, outcome: ScoreOutcome | Scores, loss: NamedLoss, divisor: float) -> list[np.ndarray | None]:
    """What the client sends back for a batch of a step whose gradient is divided by ``divisor``."""
    if isinstance(outcome, ScoreOutcome):
        outcome = Scores(*dataclasses.astuple(outcome))
    given = evaluate_loss(batch, outcome, loss).gradients(divisor)
    return [given["grad_logprobs"], given["grad_entropy"], given["grad_topk_logprobs"]]
