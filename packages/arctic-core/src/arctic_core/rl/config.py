"""Configuration of ``arctic train``: one model tree that a YAML or TOML file fills. Needs pydantic only.

Reading files and command-line overrides is :mod:`arctic_core.rl.config_file`'s work.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from arctic_core.config import ArcticRLClientConfig, ConfigModel
from arctic_core.config.advantages import AdvantageConfig, GRPOAdvantageConfig
from arctic_core.config.client import LogProbConfig, SamplingConfig, TrainingConfig
from arctic_core.config.effects import DEEPSPEED_TRAINING, VLLM_SAMPLING, Rule, refuse_without_effect
from arctic_core.protocol import SamplingParams

Backend = Literal["local", "ray"]
OptionValue = bool | int | float | str | None

ADVANTAGES_OF_LOSSES = ("dr_grpo", "rloo", "reinforce_pp")
"""Losses that have an advantage estimator of their own name."""
LOSSES_WITHOUT_ADVANTAGES = ("sft", "distill")
"""Built-in losses that read no advantages."""


class TaskConfig(ConfigModel):
    """Where prompts and their answers come from."""

    name: str
    """Registered task: ``reasoning_gym``, ``addition`` or a plugin's."""
    options: dict[str, Any] = Field({})
    """Options of that task; the task refuses unknown ones."""


class RolloutConfig(ConfigModel):
    """How responses are sampled at each step."""

    prompts_per_step: int = Field(8, ge=1)
    """Prompts drawn at each step."""
    n: int = Field(8, ge=1)
    """Responses per prompt; they form one group. A group of one has advantage 0."""
    max_tokens: int = Field(256, ge=1)
    """Most new tokens of one response."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; scoring and training divide logits by the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass. Below 1 the sampler's log-probs are of a truncated distribution, which ``mismatch/*`` then shows."""
    top_k: int = Field(0, ge=0)
    """Number of most likely tokens kept; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the model's own end-of-sequence tokens."""

    def sampling(self, seed: int) -> SamplingParams:
        """The protocol's sampling parameters with this call's seed."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
        )


class LossConfig(ConfigModel):
    """What the optimizer minimises."""

    name: str = "grpo"
    """Registered loss, or ``package.module:attribute`` where ``client.training.allow_loss_import`` is on."""
    options: dict[str, OptionValue] = Field({})
    """Options of that loss, e.g. ``clip_low``, ``clip_high``, ``kl_coef``, ``entropy_coef``; the loss refuses unknown ones."""
    normalization: Literal["token", "sequence", "constant"] | None = None
    """What the summed loss is divided by, once per optimizer step; absent takes the loss's own."""
    constant: float | None = Field(None, gt=0)
    """The divisor of ``constant``, which alone takes it; absent means the responses of an optimizer step times the longest
    they can be: ``rollouts.prompts_per_step * rollouts.n / mini_batches * rollouts.max_tokens``."""

    @model_validator(mode="after")
    def _constant_fits(self) -> LossConfig:
        if self.constant is not None and self.normalization in ("token", "sequence"):
            raise ValueError(f"`constant` does not go with normalization {self.normalization!r}")
        return self


class AlgorithmConfig(ConfigModel):
    """What happens between a rollout batch and the next policy version."""

    loss: LossConfig = LossConfig()
    """The loss."""
    advantage: AdvantageConfig = Field(GRPOAdvantageConfig())
    """How rewards become advantages. Without a ``name`` it is the estimator with the loss's name (``dr_grpo``, ``rloo``,
    ``reinforce_pp``), and ``grpo`` for all other losses."""
    filter_uniform_groups: bool = False
    """Do not train on groups whose rewards are all equal (``filter/*`` counts them). A step in which nothing is left makes no
    optimizer step."""
    drop_failed_samples: bool = False
    """Let a reward function return ``None`` for a response that failed for reasons which are not the model's: it is left out
    and counted. Otherwise that ends the run."""
    teacher_topk: int | None = Field(None, ge=1)
    """How many of the teacher's most likely tokens a loss on top-k distributions is given at each position, 16 where absent;
    other losses refuse it. The teacher is the reference model: the initial one, or ``client.log_prob.model_name``."""
    epochs: int = Field(1, ge=1)
    """Passes over each rollout batch."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per pass; samples are shuffled and cut into as many nearly equal parts."""
    report_reference_kl: bool = False
    """Score the reference model as well and report ``kl/reference``, also where the loss has no KL term."""

    @model_validator(mode="before")
    @classmethod
    def _name_advantage(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(advantage := values.get("advantage") or {}, dict):
            return values
        loss = values.get("loss") or {}
        name = loss.get("name") if isinstance(loss, dict) else getattr(loss, "name", None)
        return {**values, "advantage": {"name": name if name in ADVANTAGES_OF_LOSSES else "grpo", **advantage}}


class CheckpointConfig(ConfigModel):
    """When to save, and how many to keep."""

    every: int = Field(0, ge=0)
    """Save after every so many steps and after the last; 0 saves none."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints kept."""


class TrainJobConfig(ConfigModel):
    """One training job: one model, one task."""

    model: str
    """Hub id, local folder, GGUF file, or ``package:NAME/FILE.gguf`` for a file inside an installed package."""
    task: TaskConfig
    """The task."""
    reward: str | None = None
    """``pkg.module:function`` taking ``(completion, item)``, instead of the task's own reward."""
    solved_reward: float = 1.0
    """A response with at least this reward counts as solved in ``reward/accuracy``."""
    steps: int = Field(ge=1)
    """Rollout steps; each makes ``epochs * mini_batches`` optimizer steps and one weight sync."""
    seed: int = Field(0, ge=0)
    """Seed of prompts, sampling, shuffling and engines."""
    rollouts: RolloutConfig = RolloutConfig()
    """Rollouts."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Algorithm."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    samples_per_step: int = Field(8, ge=0)
    """Completions written to ``samples.jsonl`` at each step."""
    export: bool = False
    """Write the trained model as a Hugging Face folder at the end."""
    client: ArcticRLClientConfig
    """Engines and placement; ``model_name`` and ``seed`` are the job's. One trainer and one sampler by default."""

    @model_validator(mode="before")
    @classmethod
    def _fill_client(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        client = values.get("client") or {}
        if not isinstance(client, dict):
            return values
        for ours, theirs in (("model", "model_name"), ("seed", "seed")):
            if theirs in client and client[theirs] != values.get(ours, client[theirs]):
                raise ValueError(f"client.{theirs} differs from {ours}; set {ours} alone")
        filled: dict[str, Any] = {"training_gpus": 1, "sampling_gpus": 1, **client, "model_name": values.get("model", "")}
        if "seed" in values:
            filled["seed"] = values["seed"]
        return {**values, "client": filled}

    @model_validator(mode="after")
    def _consistent(self) -> TrainJobConfig:
        if not (self.client.training_gpus and self.client.sampling_gpus):
            raise ValueError("client: a training job needs training_gpus and sampling_gpus")
        size = self.rollouts.prompts_per_step * self.rollouts.n
        if self.algorithm.mini_batches > size:
            raise ValueError(f"algorithm.mini_batches {self.algorithm.mini_batches} exceeds the {size} responses of a step")
        if self.rollouts.max_tokens >= self.client.max_seq_len:
            raise ValueError(
                f"rollouts.max_tokens {self.rollouts.max_tokens} leaves no room for a prompt in "
                f"client.max_seq_len {self.client.max_seq_len}"
            )
        refuse_without_effect(self, JOB_RULES)
        return self

    @property
    def loss_constant(self) -> float:
        """The divisor of ``normalization: constant`` in an optimizer step."""
        rollouts, algorithm = self.rollouts, self.algorithm
        if algorithm.loss.constant is not None:
            return algorithm.loss.constant
        return rollouts.prompts_per_step * rollouts.n / algorithm.mini_batches * rollouts.max_tokens

    @property
    def backend(self) -> Literal["local", "ray", "http"]:
        """``ray`` (DeepSpeed and vLLM actors), ``local`` (in process) or ``http`` (a server's)."""
        return self.client.comm_protocol


JOB_RULES: tuple[Rule[Any], ...] = (
    Rule(
        ("algorithm.advantage",),
        lambda job: job.algorithm.loss.name in LOSSES_WITHOUT_ADVANTAGES,
        "the loss reads no advantages",
        "leave it out, or choose a loss that learns from rewards",
    ),
    Rule(
        ("algorithm.advantage.epsilon",),
        lambda job: job.algorithm.advantage.name == "grpo" and not job.algorithm.advantage.normalize_std,
        "algorithm.advantage.normalize_std is false: there is no standard deviation to add it to",
        "leave it out, or leave normalize_std on",
    ),
    Rule(
        ("checkpoint.keep_last",),
        lambda job: not job.checkpoint.every,
        "checkpoint.every is 0: there are no checkpoints",
        "leave it out (checkpoint={} on the command line), or set checkpoint.every",
    ),
)
"""Settings of a training job that nothing reads, and when; its client has rules of its own."""


def _defaults(model: type[ConfigModel], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: model.model_fields[name].get_default(call_default_factory=True) for name in names}


LOCAL_BACKEND: dict[str, Any] = {
    "comm_protocol": "local",
    "training_gpus": 1,
    "sampling_gpus": 1,
    "log_prob_gpus": 0,
    "colocate": False,
    "training": {"engine": "torch", **_defaults(TrainingConfig, DEEPSPEED_TRAINING)},
    "sampling": {"engine": "transformers", **_defaults(SamplingConfig, VLLM_SAMPLING)},
    "log_prob": _defaults(LogProbConfig, tuple(name for name in LogProbConfig.model_fields if name != "model_name")),
    "ray": {},
}
"""What ``--backend local`` writes over a file's ``client`` block: one process, no Ray, vLLM or DeepSpeed. A reference model
other than the initial one (``log_prob.model_name``) would change the job, so it stays, and is refused."""

RAY_BACKEND: dict[str, Any] = {
    "comm_protocol": "ray",
    "training": {"engine": "deepspeed"},
    "sampling": {"engine": "vllm"},
    "log_prob": {"engine": "auto"},
}
"""What ``--backend ray`` writes over a file's ``client`` block; ``auto`` follows the training engine."""

FREE_ON_RESUME = frozenset({"steps", "checkpoint", "samples_per_step", "export"})
"""Keys that may change between a run and its resumption."""
