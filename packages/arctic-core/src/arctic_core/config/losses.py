"""Options of the named losses (:attr:`arctic_core.protocol.NamedLoss.options`), one model per loss. Needs pydantic only.

Formulas and sources are in :mod:`arctic_core.losses` and in the page "Losses" of the documentation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from arctic_core.config.base import ConfigModel
from arctic_core.config.effects import Rule, refuse_without_effect

POLICY_RULES: tuple[Rule[Any], ...] = (
    Rule(
        ("clip_low", "clip_high", "dual_clip"),
        lambda loss: loss.on_policy,
        "on_policy is true: the ratio is 1 and never clipped",
        "leave it out, or leave out on_policy",
    ),
    Rule(
        ("kl_gradient",),
        lambda loss: loss.kl_coef == 0,
        "kl_coef is 0: the KL term has no gradient",
        "leave it out, or set kl_coef",
    ),
)
"""Options of policy-gradient losses that do nothing beside others."""
DISTILL_RULES: tuple[Rule[Any], ...] = (
    Rule(
        ("beta",),
        lambda loss: loss.divergence != "jsd",
        "it is for the divergence 'jsd'",
        "leave it out, or set divergence to 'jsd'",
    ),
    Rule(
        ("tail",),
        lambda loss: loss.source == "sampled",
        "source is 'sampled': there are no top-k tokens and no rest",
        "leave it out, or set source to 'topk'",
    ),
)
"""Options of distillation that do nothing beside others."""


class PolicyLossConfig(ConfigModel):
    """What all policy-gradient losses share."""

    on_policy: bool = False
    """Take the importance ratio against the policy as it is now (its value is 1, its gradient the policy gradient) instead
    of against ``old_logprobs``, which are then neither needed nor read."""
    sequence_reduction: Literal["sum", "mean"] = "sum"
    """How the trained tokens of one sequence combine: their sum, or their mean. What the result is divided by, once per
    optimizer step, is :attr:`arctic_core.protocol.NamedLoss.normalization`. The mean goes with ``sequence`` or ``constant``."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the reference; needs ``ref_logprobs`` where it is not 0."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Value of the KL term."""
    kl_gradient: Literal["own", "score"] = "own"
    """Gradient of the KL term: ``own`` differentiates the estimator as it stands; ``score`` takes the score-function
    gradient ``(log π − log π_ref)·∇log π``, that of KL(π ‖ π_ref) where the samples are the policy's."""
    kl_importance: bool = False
    """Weight the KL term of each token by its importance ratio ``π / π_old``, for samples of an older policy. ``own`` is
    differentiated with the ratio: for k1 and k3 that is the gradient of KL(π ‖ π_ref), for k2 it is not. ``score`` is weighted
    by the ratio's value, which is right for all three."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    mismatch: Literal["none", "tis", "mis", "icepop"] = "none"
    """Correction for a sampler whose probabilities differ from the trainer's, by ``ρ = π_old / π_sampler``; needs
    ``sampler_logprobs``. It weights the policy term. ``tis`` truncates ``ρ`` at ``mismatch_high``; ``mis`` and ``icepop`` give
    weight 0 to what lies outside ``[mismatch_low, mismatch_high]``, and ``icepop`` does so at token level only. What gets
    weight 0 still counts where the loss is divided."""
    mismatch_level: Literal["token", "sequence", "geometric"] = "token"
    """What ``ρ`` belongs to: a token, a sequence (product over its trained tokens), or a sequence by the geometric mean."""
    mismatch_low: float | None = Field(None, ge=0)
    """Lower bound of ``ρ``; absent means 0 for ``mis`` and 0.5 for ``icepop``. ``tis`` has none."""
    mismatch_high: float | None = Field(None, gt=0)
    """Upper bound of ``ρ``; absent means 2, and 5 for ``icepop``."""

    @model_validator(mode="after")
    def _mismatch_fits(self) -> PolicyLossConfig:
        level = type(self).model_fields["mismatch_level"].default
        given = self.mismatch_low is not None or self.mismatch_high is not None or self.mismatch_level != level
        if self.mismatch == "none" and given:
            raise ValueError("mismatch_level, mismatch_low and mismatch_high go with a mismatch correction")
        if self.mismatch == "tis" and self.mismatch_low is not None:
            raise ValueError("mismatch 'tis' has no mismatch_low")
        if self.mismatch == "icepop" and self.mismatch_level != "token":
            raise ValueError("mismatch 'icepop' works on tokens; use 'mis' for sequences")
        low, high = self.mismatch_bounds
        if low >= high:
            raise ValueError(f"mismatch_low {low} must be below mismatch_high {high}")
        refuse_without_effect(self, POLICY_RULES)
        return self

    @property
    def mismatch_bounds(self) -> tuple[float, float]:
        """``(low, high)`` with defaults filled in."""
        low, high = (0.5, 5.0) if self.mismatch == "icepop" else (0.0, 2.0)
        return (
            low if self.mismatch_low is None else self.mismatch_low,
            high if self.mismatch_high is None else self.mismatch_high,
        )

    def required_fields(self) -> tuple[str, ...]:
        """Batch fields (see :data:`arctic_core.data.TOKEN_FIELDS`) that these options read."""
        return (
            "advantages",
            *(() if self.on_policy else ("old_logprobs",)),
            *(("ref_logprobs",) if self.kl_coef else ()),
            *(("sampler_logprobs",) if self.mismatch != "none" else ()),
        )

    def needs_entropy(self) -> bool:
        """Whether the model's entropies are needed."""
        return self.entropy_coef != 0


class ClippedLossConfig(PolicyLossConfig):
    """Options of the losses that clip an importance ratio, as PPO does."""

    clip_low: float = Field(0.2, ge=0, lt=1)
    """The importance ratio is clipped below at ``1 - clip_low``."""
    clip_high: float = Field(0.2, ge=0)
    """The importance ratio is clipped above at ``1 + clip_high``."""
    dual_clip: float | None = Field(None, gt=1)
    """Where the advantage is negative, bound the loss of a token by ``dual_clip·|advantage|``; absent does not bound it."""


class GRPOLossConfig(ClippedLossConfig):
    """GRPO. Normalised by ``sequence`` unless told otherwise, which with the mean over each response is the paper's form."""

    name: Literal["grpo"] = "grpo"
    sequence_reduction: Literal["sum", "mean"] = "mean"
    """How the trained tokens of one sequence combine."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or of the sequence: the geometric mean over its trained tokens."""


class DAPOLossConfig(ClippedLossConfig):
    """DAPO: token mean over the whole step (``token``), and a higher upper clip bound."""

    name: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, ge=0)
    """The importance ratio is clipped above at ``1 + clip_high``."""


class DrGRPOLossConfig(ClippedLossConfig):
    """Dr. GRPO: tokens are summed and divided by a ``constant`` that you give; use it with advantages without std."""

    name: Literal["dr_grpo"] = "dr_grpo"


class GSPOLossConfig(ClippedLossConfig):
    """GSPO: importance ratio of the sequence, mean over each response, normalised by ``sequence``."""

    name: Literal["gspo"] = "gspo"
    sequence_reduction: Literal["sum", "mean"] = "mean"
    """How the trained tokens of one sequence combine."""
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """The sequence's ratio is clipped below at ``1 - clip_low``."""
    clip_high: float = Field(4e-4, ge=0)
    """The sequence's ratio is clipped above at ``1 + clip_high``."""


class CISPOLossConfig(PolicyLossConfig):
    """CISPO: the clipped ratio is a weight without gradient, so no token loses its gradient. Normalised by ``token``."""

    name: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(None, ge=0, le=1)
    """The weight is at least ``1 - clip_low``; absent sets no lower bound."""
    clip_high: float = Field(4.0, ge=0)
    """The weight is at most ``1 + clip_high``."""


class SAPOLossConfig(PolicyLossConfig):
    """SAPO: a smooth gate instead of a clip. Mean over each response, normalised by ``sequence``."""

    name: Literal["sapo"] = "sapo"
    sequence_reduction: Literal["sum", "mean"] = "mean"
    """How the trained tokens of one sequence combine."""
    tau_positive: float = Field(1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness of the gate where it is not."""


class RLOOLossConfig(PolicyLossConfig):
    """RLOO: a whole response is one action, with the clipped ratio of its probability. Normalised by ``sequence``.

    KL and entropy are those of the response: sums over its tokens.
    """

    name: Literal["rloo"] = "rloo"
    mismatch_level: Literal["token", "sequence", "geometric"] = "sequence"
    """What ``ρ`` belongs to: the response, by the product over its trained tokens, or by their geometric mean."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The response's ratio is clipped below at ``1 - clip_low``."""
    clip_high: float = Field(0.2, ge=0)
    """The response's ratio is clipped above at ``1 + clip_high``."""

    @model_validator(mode="after")
    def _one_action(self) -> RLOOLossConfig:
        if self.sequence_reduction != "sum":
            raise ValueError("sequence_reduction is 'sum' in rloo: a response is one action and has nothing to average")
        if self.mismatch_level == "token":
            raise ValueError("mismatch_level is 'sequence' or 'geometric' in rloo: a response is one action")
        return self


class ReinforcePPLossConfig(ClippedLossConfig):
    """REINFORCE++: the clipped token loss, for advantages normalised over the whole batch. Normalised by ``token``."""

    name: Literal["reinforce_pp"] = "reinforce_pp"


class PPOLossConfig(ClippedLossConfig):
    """PPO's policy loss, for advantages of any kind (GAE with a critic, or critic-free). Normalised by ``token``."""

    name: Literal["ppo"] = "ppo"


class ValueLossConfig(ConfigModel):
    """The value loss of PPO, for critics you run yourself."""

    name: Literal["value"] = "value"
    clip: float | None = Field(0.2, gt=0)
    """Predictions further than this from the old ones gain nothing from it; absent does not clip."""


class SFTLossConfig(ConfigModel):
    """Cross-entropy; it has no options. Normalised by ``token``."""

    name: Literal["sft"] = "sft"


class DistillLossConfig(ConfigModel):
    """Distillation from a teacher's log-probs. Normalised by ``token``."""

    name: Literal["distill"] = "distill"
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """KL(student ‖ teacher), KL(teacher ‖ student), or the generalised Jensen-Shannon divergence."""
    beta: float = Field(0.5, gt=0, lt=1)
    """The teacher's share of the mixture in ``jsd``; 0.5 is symmetric."""
    source: Literal["sampled", "topk"] = "topk"
    """What is known of the teacher: its log-probs of the sampled tokens (``teacher_logprobs``), from which the divergence is
    estimated, or of ``K`` tokens at each position (``topk_ids``, ``teacher_topk_logprobs``), over which it is summed."""
    tail: Literal["bucket", "renormalize"] = "bucket"
    """Of ``topk``, the mass outside the ``K`` tokens: one further outcome, or none after both sides are scaled to sum to 1."""
    on_policy: bool = True
    """Of ``sampled``: the responses are the policy's own. Otherwise each token is weighted by ``π / π_old`` and
    ``old_logprobs`` are needed."""

    @model_validator(mode="after")
    def _source_fits(self) -> DistillLossConfig:
        if self.source == "topk" and not self.on_policy:
            raise ValueError("on_policy false goes with source 'sampled'; a sum over tokens depends on no sampling")
        refuse_without_effect(self, DISTILL_RULES)
        return self

    def required_fields(self) -> tuple[str, ...]:
        """Batch fields that these options read."""
        if self.source == "topk":
            return ("topk_ids", "teacher_topk_logprobs")
        return ("teacher_logprobs", *(() if self.on_policy else ("old_logprobs",)))

    def needs_topk(self) -> bool:
        """Whether the policy's log-probs of ``topk_ids`` are needed."""
        return self.source == "topk"


AnyLossConfig = Annotated[
    GRPOLossConfig
    | DAPOLossConfig
    | DrGRPOLossConfig
    | GSPOLossConfig
    | CISPOLossConfig
    | SAPOLossConfig
    | RLOOLossConfig
    | ReinforcePPLossConfig
    | PPOLossConfig
    | SFTLossConfig
    | DistillLossConfig,
    Field(discriminator="name"),
]
"""The losses an engine can run by name, told apart by ``name``."""
