"""The training loop: rollouts → rewards → scores → advantages → optimizer steps → weight sync, once per step.

All chance in a step comes from seeds derived from ``(seed, step)``, and all other state lives in the trainer's
checkpoint, so a run resumed after step ``k`` goes on exactly as if it had not stopped.

Suffix legend: ``_R`` response-token axis of a packed batch, ``_B`` samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arctic_core.advantages import compute_advantages, counted_samples, filter_groups
from arctic_core.checkpoint import read_manifest, resolve_checkpoint
from arctic_core.client import ArcticRLClient
from arctic_core.data import Batch, Sample
from arctic_core.errors import CheckpointError, EngineError, InvalidStateError, RewardError
from arctic_core.protocol import Completion, Metric, NamedLoss
from arctic_core.rl import metrics
from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.observe import Observer, PhaseClock, memory_metrics
from arctic_core.rl.prompts import ChatTokenizer
from arctic_core.rl.report import RunFolder, SampleRecord, StepRecord
from arctic_core.rl.tasks import RewardFunction, Task, TaskItem, derive_seed, score

logger = logging.getLogger(__name__)

COMPLETED_STEPS = "arctic.train.completed_steps"
"""Key of the loop's own state in a checkpoint's manifest."""


@dataclass(frozen=True)
class Recipe:
    """A job file made concrete: everything of a step that does not run on an engine."""

    config: TrainJobConfig
    task: Task
    reward: RewardFunction
    tokenizer: ChatTokenizer
    loss: NamedLoss
    """The loss, its normalisation settled."""
    fields: frozenset[str]
    """Batch fields that the loss and the advantages read with the options at hand."""
    teacher_topk: int
    """How many of the reference model's most likely tokens the loss reads; 0 where it reads none."""

    @property
    def wants_reference(self) -> bool:
        """Whether the reference model is scored too."""
        return bool(self.fields & _OF_REFERENCE) or self.config.algorithm.report_reference_kl


_OF_REFERENCE = {"ref_logprobs", "teacher_logprobs", "topk_ids", "teacher_topk_logprobs"}


@dataclass(frozen=True)
class Rollouts:
    """One step's responses, judged; every sequence has one entry per sample, groups in order."""

    items: list[TaskItem]
    completions: list[Completion]
    texts: list[str]
    rewards: list[float | None]
    """``None`` where a sample failed."""
    batch: Batch


@dataclass(frozen=True)
class ResumePoint:
    """Where an earlier run left off."""

    checkpoint: Path | None
    """``None`` where it ended before its first checkpoint was due; it then starts over."""
    completed: int
    """Rollout steps done."""


def find_resume_point(folder: RunFolder, config: TrainJobConfig) -> ResumePoint:
    """Look at a run's checkpoints, before any engine is started.

    Raises:
        InvalidStateError: Nothing is left to do, or the run keeps no checkpoints.
        CheckpointError: No checkpoint is complete, or the latest is not a training job's.
    """
    if not any(path.name.removeprefix("step-").isdigit() for path in folder.checkpoints.glob("step-*")):
        if not config.checkpoint.every:
            raise InvalidStateError(
                f"the run in {folder.path} kept no checkpoints", remedy="start a new run with checkpoint.every above 0"
            )
        return ResumePoint(None, 0)
    path = resolve_checkpoint(folder.checkpoints)
    extra = read_manifest(path).info.extra
    if COMPLETED_STEPS not in extra:
        raise CheckpointError("the checkpoint was not written by a training job", where=str(path))
    completed = int(extra[COMPLETED_STEPS])
    if completed >= config.steps:
        raise InvalidStateError(
            f"all {config.steps} steps of the run in {folder.path} are done", remedy="raise `steps` to train further"
        )
    return ResumePoint(path, completed)


class TrainLoop:
    """Runs steps of one job through a client.

    Args:
        recipe: What to do.
        client: Connected, with a trainer and a sampler that serve the same policy version.
        folder: Where to write.
        observer: Who watches.
    """

    def __init__(self, recipe: Recipe, client: ArcticRLClient, folder: RunFolder, observer: Observer) -> None:
        self._recipe = recipe
        self._config = recipe.config
        self._client = client
        self._folder = folder
        self._observer = observer
        self._saving_seconds = 0.0
        self.first_step_at: float | None = None
        """When this loop's first step ended, by ``time.perf_counter``."""
        self.completed = 0
        """Rollout steps done."""

    def resume_from(self, point: ResumePoint) -> None:
        """Load the checkpoint, give its weights to the sampler, and drop lines written after it."""
        if point.checkpoint is not None:
            self._client.load_checkpoint(point.checkpoint)
            self._client.sync_weights(force=True)
        self.completed = point.completed
        self._folder.rewind(point.completed)

    def run(self) -> None:
        """Do the remaining steps."""
        while self.completed < self._config.steps:
            self._step(self.completed)

    def _step(self, index: int) -> None:
        clock = PhaseClock(self._observer, index + 1)
        rollouts = self._rollout(index, clock)
        batch, values = self._score(rollouts, clock)
        kept, dropped = self._filter(rollouts, batch)
        chosen = batch.select(kept)
        advantages = compute_advantages(self._config.algorithm.advantage, [rollouts.rewards[i] for i in kept], chosen)
        means = metrics.sample_means(chosen, advantages.advantages_R)
        chosen = chosen.replace(advantages=advantages.advantages_R)
        values |= dropped | metrics.advantage_metrics(chosen, advantages)
        with clock("train"):
            values |= self._optimize(chosen, index)
        version, sent = self._sync(clock) if values["optim/steps"] else (self._client.info().policy_version, 0)
        self.completed = index + 1
        values |= clock.metrics() | {"seconds/checkpoint": self._saving_seconds, "sync/bytes": float(sent)}
        values |= self._rates(rollouts.batch, values) | memory_metrics(self._client.info())
        record = StepRecord(step=self.completed, policy_version=version, metrics=values)
        self._folder.write_step(record, self._samples(rollouts, dict(zip(kept, means, strict=True))))
        self.first_step_at = self.first_step_at or time.perf_counter()
        self._observer.stepped(record)
        self._save_if_due()

    def _sync(self, clock: PhaseClock) -> tuple[int, int]:
        """Bring the sampler to the new weights; returns the version it serves and the bytes sent."""
        with clock("sync"):
            report = self._client.sync_weights()
        return report.version, report.bytes

    def _rollout(self, index: int, clock: PhaseClock) -> Rollouts:
        config = self._config.rollouts
        items = list(self._recipe.task.prompts(self._config.seed, index, config.prompts_per_step))
        prompts = [self._recipe.tokenizer.encode(item.messages) for item in items]
        with clock("generate"):
            generated = self._client.generate(
                prompts, config.sampling(derive_seed("rollout", self._config.seed, index)), n=config.n
            )
        completions = [completion for group in generated for completion in group]
        _refuse_aborted(completions)
        repeated = [item for item in items for _ in range(config.n)]
        with clock("reward"):
            texts = [self._recipe.tokenizer.decode(completion.token_ids) for completion in completions]
            rewards = self._judge(texts, repeated)
        groups = [i // config.n for i in range(len(completions))]
        batch = Batch.from_samples(
            Sample(
                token_ids=np.concatenate([prompts[group], completion.token_ids]),
                prompt_length=len(prompts[group]),
                group=group,
                sampler_logprobs=completion.logprobs,
                policy_version=completion.policy_version,
                temperature=config.temperature,
            )
            for group, completion in zip(groups, completions, strict=True)
        )
        return Rollouts(repeated, completions, texts, rewards, batch)

    def _judge(self, texts: Sequence[str], items: Sequence[TaskItem]) -> list[float | None]:
        may_fail = self._config.algorithm.drop_failed_samples
        rewards = [
            score(self._recipe.reward, text, item, i, may_fail=may_fail)
            for i, (text, item) in enumerate(zip(texts, items, strict=True))
        ]
        if all(reward is None for reward in rewards):
            raise RewardError(
                f"all {len(rewards)} samples of the step failed",
                where="rewards",
                remedy="see why the reward function gives None",
            )
        return rewards

    def _score(self, rollouts: Rollouts, clock: PhaseClock) -> tuple[Batch, dict[str, float]]:
        """The batch with the log-probs that loss and advantages need, and the metrics of all the step's responses."""
        batch = rollouts.batch
        with clock("score"):
            scores = self._client.forward(batch, entropy=True)
        assert batch.sampler_logprobs is not None
        assert scores.entropy is not None
        values = metrics.reward_metrics(rollouts.rewards, batch.groups, self._config.solved_reward)
        values |= metrics.length_metrics(batch, [completion.finish_reason for completion in rollouts.completions])
        values |= metrics.mismatch_metrics(scores.logprobs, batch.sampler_logprobs)
        values["policy/entropy"] = float(scores.entropy.mean()) if len(scores.entropy) else 0.0
        batch = batch.replace(old_logprobs=scores.logprobs)
        if self._recipe.wants_reference:
            with clock("reference"):
                reference = self._client.forward(batch, model="reference", topk=self._recipe.teacher_topk)
            values["kl/reference"] = metrics.kl_k3(scores.logprobs, reference.logprobs)
            found = {
                "ref_logprobs": reference.logprobs,
                "teacher_logprobs": reference.logprobs,
                "topk_ids": reference.topk_ids,
                "teacher_topk_logprobs": reference.topk_logprobs,
            }
            batch = batch.replace(**{name: value for name, value in found.items() if name in self._recipe.fields})
        return batch, values

    def _filter(self, rollouts: Rollouts, batch: Batch) -> tuple[list[int], dict[str, float]]:
        """Indices of the samples to train on, and how many others there are and why."""
        algorithm = self._config.algorithm
        found = filter_groups(
            rollouts.rewards,
            batch.groups,
            uniform=algorithm.filter_uniform_groups,
            failed=algorithm.drop_failed_samples,
            counted=counted_samples(batch),
        )
        values: dict[str, float] = {}
        if algorithm.filter_uniform_groups:
            values |= {"filter/groups": float(found.groups_dropped), "filter/samples": float(found.samples_dropped)}
        if algorithm.drop_failed_samples:
            values["filter/failed_samples"] = float(found.samples_failed)
        return found.kept.tolist(), values

    def _optimize(self, batch: Batch, index: int) -> dict[str, float]:
        """Epochs of optimizer steps. A mini-batch without a trained token makes none: its gradient is 0, and an optimizer's
        momentum would move the weights all the same."""
        algorithm = self._config.algorithm
        rng = np.random.default_rng(derive_seed("shuffle", self._config.seed, index))
        parts: list[dict[str, Metric]] = []
        norms: list[float] = []
        lr = 0.0
        all_masked = 0
        for _ in range(algorithm.epochs):
            order = np.arange(len(batch)) if algorithm.mini_batches == 1 else rng.permutation(len(batch))
            for chosen in np.array_split(order, algorithm.mini_batches):
                part = batch.select(chosen.tolist())
                if not part.mask.any():
                    all_masked += len(part) > 0
                    continue
                parts.append(self._client.forward_backward(part, self._recipe.loss).metrics)
                stepped = self._client.step()
                norms.append(stepped.grad_norm)
                lr = stepped.lr
        if not norms:
            logger.warning("step %d: no sample with a trained token is left, so no optimizer step is made", index + 1)
        return metrics.merge_metrics(parts) | {
            "optim/steps": float(len(norms)),
            "optim/all_masked_batches": float(all_masked),
            "optim/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "optim/lr": lr,
        }

    def _save_if_due(self) -> None:
        """Save after the step's lines are written: a checkpoint never stands for a step that no line tells of.

        The seconds it takes are reported by the next step's record.
        """
        every = self._config.checkpoint.every
        start = time.perf_counter()
        if every and (self.completed % every == 0 or self.completed == self._config.steps):
            self._observer.phase(self.completed, "checkpoint")
            ref = self._client.save_checkpoint(
                str(self._folder.checkpoints),
                keep_last=self._config.checkpoint.keep_last,
                extra={COMPLETED_STEPS: str(self.completed)},
            )
            self._observer.saved(Path(ref.path))
        self._saving_seconds = time.perf_counter() - start

    def _rates(self, batch: Batch, values: dict[str, float]) -> dict[str, float]:
        return {
            "tokens/generated": float(batch.num_response_tokens),
            "tokens/per_second_generate": batch.num_response_tokens / max(values["seconds/generate"], 1e-9),
            "tokens/per_second": len(batch.token_ids) / max(values["seconds/total"], 1e-9),
        }

    def _samples(self, rollouts: Rollouts, advantages: Mapping[int, float]) -> list[SampleRecord]:
        """As many as asked for, spread over the groups: first each group's first response, then each one's second."""
        n = self._config.rollouts.n
        order = sorted(range(len(rollouts.texts)), key=lambda i: (i % n, i // n))
        return [
            SampleRecord(
                step=self.completed,
                group=i // n,
                index=i % n,
                prompt=rollouts.items[i].messages[-1]["content"],
                completion=rollouts.texts[i],
                answer=str(rollouts.items[i].answer),
                reward=rollouts.rewards[i],
                advantage=advantages.get(i),
                tokens=len(rollouts.completions[i].token_ids),
                finish_reason=rollouts.completions[i].finish_reason,
                policy_version=rollouts.completions[i].policy_version,
            )
            for i in order[: self._config.samples_per_step]
        ]


def _refuse_aborted(completions: Sequence[Completion]) -> None:
    for i, completion in enumerate(completions):
        if completion.finish_reason == "abort":
            raise EngineError(
                "a response was aborted, so the step cannot be judged",
                where=f"sampler, sample {i}",
                remedy="abort or pause the job's sampler between its steps only; resume from the last checkpoint",
            )
