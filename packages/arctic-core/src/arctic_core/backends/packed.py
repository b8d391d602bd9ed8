"""What the packed engines (``torch``, ``deepspeed``) share: scoring, losses, the step, weight export and checkpoints.

A subclass supplies what differs between runtimes, through the hooks marked abstract below: wrapping the module, running a
backward pass, applying the update, gathering whole parameters on rank 0, and keeping optimizer state on disk.

Suffix legend: ``_R`` response tokens of a micro-batch, ``_K`` tokens scored beside each of them.
"""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from arctic_core.backends.base import ScoreOutcome, StepOutcome, Trainer
from arctic_core.backends.packed_scoring import PackedEngine
from arctic_core.data import Batch
from arctic_core.errors import (
    ArcticError,
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    InvalidStateError,
    NonFiniteError,
    PluginError,
)
from arctic_core.losses.base import LossInputs, LossOutput, PreparedLoss, prepare_loss
from arctic_core.losses.inputs import check_loss_batch, checked_output, loss_inputs
from arctic_core.losses.named import find_loss
from arctic_core.models.export import host_bytes, write_hf_folder
from arctic_core.models.factory import CheckpointManifest, checkpoint_tensors, manifest_of, resolve_model
from arctic_core.models.scoring import Scores, ScoringModule
from arctic_core.optim import learning_rate
from arctic_core.plugins.manager import get_registry
from arctic_core.protocol import Metric, NamedLoss, RestorePart
from arctic_core.sync.carriers import WeightCarrier
from arctic_core.sync.plan import BucketRef, WeightPlan

STATE_FILE = "trainer.json"
_FORMAT = 1


class PackedTrainer(PackedEngine, Trainer):
    """One rank that trains packed batches.

    Attributes:
        module: The :class:`ScoringModule` as loaded; its parameters are those being trained (sharded where the runtime
            shards them).
        policy: What :meth:`_build` made of it; called like a :class:`ScoringModule`.
        manifest: Checkpoint names and full shapes, taken before anything was sharded.
    """

    module: ScoringModule
    policy: nn.Module
    manifest: CheckpointManifest

    # --- hooks ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _build(self, module: ScoringModule) -> nn.Module:
        """Wrap the loaded module for training and create the optimizer."""

    @abc.abstractmethod
    def _backward(self, scalar: torch.Tensor) -> None:
        """Add the gradient of ``scalar``; over micro-batches and ranks gradients add up, without any averaging."""

    @abc.abstractmethod
    def _apply(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        """Divide the gradient by ``divisor``, clip it (0 does not clip), update with ``lr``, and drop the gradient.

        Returns the global norm of the divided gradient before clipping. Where that is not finite nothing is updated.
        """

    @abc.abstractmethod
    def _drop_gradients(self) -> None:
        """Forget the accumulated gradient."""

    @abc.abstractmethod
    def _gather(self, parameters: Sequence[str]) -> dict[str, torch.Tensor] | None:
        """Whole parameters of the language model by name, in the compute type, on rank 0; ``None`` on the other ranks.

        All ranks call it with the same names. The tensors may be views of live weights: they are read before the next call.
        """

    @abc.abstractmethod
    def _save_state(self, directory: Path) -> None:
        """Write weights and optimizer state. All ranks take part."""

    @abc.abstractmethod
    def _load_state(self, directory: Path, *, weights: bool, optimizer: bool) -> None:
        """Restore what :meth:`_save_state` wrote. Raises :class:`CheckpointError` before anything changed."""

    # --- engine -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        config = self.spec.config
        self._step = self._schedule_step = 0
        self._accumulated = False
        self._carriers: dict[str, WeightCarrier] = {}
        self._prepare_process()
        self.module = self._load_module(self.spec.model_path, gradient_checkpointing=config.training.gradient_checkpointing)
        self.manifest = manifest_of(self.module.model, self.spec.dtype)
        self.policy = self._build(self.module)
        if config.reference and config.log_prob_gpus == 0:
            self._frozen = self._build_frozen(self._load_module(self.spec.model_path))

    def stop(self) -> None:
        if hasattr(self, "_carriers"):
            self.release_buckets()
        for name in ("policy", "module"):
            if hasattr(self, name):
                delattr(self, name)
        super().stop()

    def forward(
        self,
        micro_batches: Sequence[Batch],
        *,
        entropy: bool,
        temperature: float | None,
        topk: int = 0,
        given_topk: bool = False,
    ) -> ScoreOutcome:
        return self._score(
            self.policy, micro_batches, entropy=entropy, temperature=temperature, topk=topk, given_topk=given_topk
        )

    def forward_reference(
        self,
        micro_batches: Sequence[Batch],
        *,
        entropy: bool,
        temperature: float | None,
        topk: int = 0,
        given_topk: bool = False,
    ) -> ScoreOutcome:
        if self._frozen is None:
            raise InvalidStateError(
                "this trainer holds no reference model",
                where=self.where,
                remedy="start with reference=True; with log_prob_gpus > 0 the log-prob engine scores it",
            )
        return self._score(
            self._frozen, micro_batches, entropy=entropy, temperature=temperature, topk=topk, given_topk=given_topk
        )

    # --- gradients --------------------------------------------------------------------------------------------------

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss: NamedLoss, *, temperature: float | None
    ) -> dict[str, Metric]:
        prepared = self._agree(lambda: self._prepare(loss, micro_batches))
        metrics: dict[str, Metric] = {}

        def compute(batch: Batch, scores: Scores) -> torch.Tensor:
            scalar, found = checked_output(_run(prepared, loss_inputs(batch, prepared, *scores[:3])), loss.name)
            for name, metric in found.items():
                metrics[name] = metrics[name] + metric if name in metrics else metric
            return scalar

        saved = self._accumulate(micro_batches, compute, prepared.needs_entropy, prepared.needs_topk, temperature)
        if self._shares_prompts:
            naive = sum(len(batch.token_ids) for batch in micro_batches)
            metrics["zorro_saved"] = Metric(sum=float(saved), count=float(naive))
        return metrics

    def _prepare(self, loss: NamedLoss, micro_batches: Sequence[Batch]) -> PreparedLoss:
        definition = find_loss(loss.name, allow_import=self.spec.config.training.allow_loss_import)
        prepared = prepare_loss(definition, loss)
        for batch in micro_batches:
            check_loss_batch(batch, prepared)
        return prepared

    def backward(
        self,
        micro_batches: Sequence[Batch],
        grad_logprobs: Sequence[np.ndarray],
        grad_entropy: Sequence[np.ndarray] | None,
        grad_topk_logprobs: Sequence[np.ndarray] | None = None,
        *,
        temperature: float | None,
    ) -> None:
        absent = [None] * len(micro_batches)
        weights = list(zip(grad_logprobs, grad_entropy or absent, grad_topk_logprobs or absent, strict=True))
        self._agree(lambda: _check_weights(micro_batches, weights))
        pending = iter(weights)

        def compute(batch: Batch, scores: Scores) -> torch.Tensor:
            given = zip(next(pending), scores[:3], strict=True)
            return torch.stack([weighted_sum(w, values) for w, values in given if w is not None and values is not None]).sum()

        self._accumulate(micro_batches, compute, grad_entropy is not None, grad_topk_logprobs is not None, temperature)

    def _accumulate(
        self,
        micro_batches: Sequence[Batch],
        compute: Callable[[Batch, Scores], torch.Tensor],
        entropy: bool,
        given_topk: bool,
        temperature: float | None,
    ) -> int:
        """Add the gradients of the micro-batches; returns how many tokens were saved because samples share them."""
        packed = self._pack_all(micro_batches, temperature, given_topk)
        self._check_sharing(self.policy, micro_batches, packed)
        self.policy.train()
        for i, (batch, inputs) in enumerate(zip(micro_batches, packed, strict=True)):
            scores = self.policy(inputs, entropy)
            scalar, problem = self._attempt(lambda: compute(batch, scores), i)  # noqa: B023 - called at once
            if not self._all_ranks(problem is None) or scalar is None:
                self.zero_grad()
                raise problem or EngineError(
                    f"another rank failed at micro-batch {i}", where=self.where, remedy="the accumulated gradient was dropped"
                )
            self._accumulated = True  # a part of it, even where the backward pass fails
            self._backward(scalar)
        return sum(inputs.tokens_saved for inputs in packed)

    def _attempt(self, compute: Callable[[], torch.Tensor], index: int) -> tuple[torch.Tensor | None, Exception | None]:
        """A loss, or why there is none; ranks agree on what to do before anything is raised."""
        try:
            scalar = compute()
        except (ConfigError, DataError) as error:  # not a refusal beforehand, which would leave the gradient as it was
            return None, PluginError(
                f"the loss failed at micro-batch {index}: {error.message}", where=error.where or self.where, remedy=error.remedy
            )
        except Exception as error:
            return None, error
        if math.isfinite(scalar.item()):
            return scalar, None
        return None, NonFiniteError(
            f"the loss of micro-batch {index} is {scalar.item()}",
            where=self.where,
            remedy="the accumulated gradient was dropped; look for NaN or huge values in the batch's fields",
        )

    def step(self, *, divisor: float, lr: float | None, max_grad_norm: float | None) -> StepOutcome:
        training = self.spec.config.training
        if not 0 < divisor < math.inf:
            raise DataError(f"cannot divide the gradient by {divisor}", where="step.divisor")
        if not self._accumulated:
            raise InvalidStateError(
                "no gradient has been accumulated since the last step", where=self.where, remedy="call forward_backward first"
            )
        rate = learning_rate(training.schedule, training.optimizer.lr, self._schedule_step) if lr is None else lr
        norm = self._apply(divisor, rate, training.max_grad_norm if max_grad_norm is None else max_grad_norm)
        self._accumulated = False
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm is {norm}", where=self.where, remedy="the gradient was dropped and no weight was changed"
            )
        self._step += 1
        self._schedule_step += 1
        return StepOutcome(grad_norm=norm, lr=rate, step=self._step)

    def zero_grad(self) -> None:
        self._drop_gradients()
        self._accumulated = False

    # --- weight export ----------------------------------------------------------------------------------------------

    def weight_plan(self, bucket_bytes: int) -> WeightPlan:
        return WeightPlan.build(self.manifest.tensors, self.manifest.ties, bucket_bytes)

    def export_bucket(self, plan: WeightPlan, index: int, carrier: str) -> BucketRef | None:
        source = {meta.name: name for meta, name in zip(self.manifest.tensors, self.manifest.sources, strict=True)}
        wanted = [plan.tensors[i].name for i in plan.buckets[index]]
        whole = self._gather(list(dict.fromkeys(source[name] for name in wanted)))
        if whole is None:
            return None
        parts: dict[str, torch.Tensor] = {}
        for parameter, value in whole.items():
            parts.update(checkpoint_tensors(self.module.model, parameter, value))
        config = self.spec.config.weight_sync
        if carrier not in self._carriers:
            self._carriers[carrier] = get_registry().carrier(carrier).create(config.directory)
        payload = [host_bytes(parts[name]) for name in wanted]
        return self._carriers[carrier].publish(index, payload, checksums=config.checksums)

    def release_buckets(self) -> None:
        for carrier in self._carriers.values():
            carrier.release()

    def export_hf(self, directory: str) -> tuple[int, int]:
        whole = self._gather(list(dict.fromkeys(self.manifest.sources)))
        if whole is None:
            return 0, 0
        return write_hf_folder(self.module.model, whole, resolve_model(self.spec.model_path), Path(directory))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        folder = Path(directory)
        self._save_state(folder)
        save_file(_rng_state(), folder / f"rng-{self.spec.rank}.safetensors")
        if self.spec.rank == 0:
            state = {"format": _FORMAT, "engine": self.implementation, "step": self._step, "schedule": self._schedule_step}
            state["shapes"] = {meta.name: list(meta.shape) for meta in self.manifest.tensors}
            (folder / STATE_FILE).write_text(json.dumps(state))

    def load(self, directory: str, restore: Sequence[RestorePart]) -> int:
        folder = Path(directory)
        state = self._read_state(folder)
        if "weights" in restore or "optimizer" in restore:
            self._load_state(folder, weights="weights" in restore, optimizer="optimizer" in restore)
        self.zero_grad()
        if "step" in restore:
            self._step = int(state["step"])
        if "scheduler" in restore:
            self._schedule_step = int(state["schedule"])
        rng = folder / f"rng-{self.spec.rank}.safetensors"
        if "rng" in restore and rng.is_file():  # absent where the checkpoint was written by fewer ranks
            _set_rng_state(load_file(rng))
        return self._step

    def _read_state(self, folder: Path) -> dict[str, Any]:
        try:
            state = json.loads((folder / STATE_FILE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"no readable trainer state: {error}", where=str(folder)) from error
        if state.get("format") != _FORMAT or state.get("engine") != self.implementation:
            raise CheckpointError(
                f"written by engine {state.get('engine')!r} in format {state.get('format')}; this is {self.implementation!r}, "
                f"format {_FORMAT}",
                where=str(folder),
                remedy="load it with the engine that wrote it, or start from its Hugging Face export",
            )
        mine = {meta.name: list(meta.shape) for meta in self.manifest.tensors}
        different = sorted(name for name in mine.keys() | state["shapes"].keys() if mine.get(name) != state["shapes"].get(name))
        if different:
            raise CheckpointError(f"it is of another model: {', '.join(different[:5])} differ", where=str(folder))
        return state


def _run(prepared: PreparedLoss, inputs: LossInputs) -> LossOutput:
    try:
        return prepared.compute(inputs)
    except ArcticError:
        raise
    except Exception as error:  # a stranger's loss may raise anything
        name = prepared.definition.name
        raise PluginError(f"raised {type(error).__name__}: {error}", where=f"loss {name!r}") from error


def weighted_sum(weights: np.ndarray, values: torch.Tensor) -> torch.Tensor:
    """``Σ w·x`` in which a zero weight silences a value of −inf."""
    w = torch.from_numpy(np.array(weights, np.float32)).to(values.device)
    return (w * values.masked_fill(w == 0, 0.0)).sum()


def _check_weights(micro_batches: Sequence[Batch], weights: Sequence[tuple[np.ndarray | None, ...]]) -> None:
    for i, (batch, given) in enumerate(zip(micro_batches, weights, strict=True)):
        tokens = (batch.num_response_tokens,)
        candidates = (0, 0) if batch.topk_ids is None else batch.topk_ids.shape
        names = ("grad_logprobs", "grad_entropy", "grad_topk_logprobs")
        for name, value, shape in zip(names, given, (tokens, tokens, candidates), strict=True):
            if value is not None and value.shape != shape:
                raise DataError(
                    f"micro-batch {i} has {tokens[0]} response tokens and needs weights of shape {shape}, got {value.shape}",
                    where=name,
                )


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
