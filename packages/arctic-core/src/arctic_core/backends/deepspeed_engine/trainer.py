"""The ``deepspeed`` trainer: ZeRO stages 0 to 3 (Rajbhandari et al., 2020), float32 and bfloat16, any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from arctic_core.backends.deepspeed_engine.config import training_config
from arctic_core.backends.deepspeed_engine.optimizer import MOMENTS, ReplicatedAdamW, ScaledAdamW
from arctic_core.backends.deepspeed_engine.rank import DeepSpeedRank
from arctic_core.backends.deepspeed_engine.state import (
    FlatState,
    FullState,
    ReplicatedState,
    ShardedState,
    ShardReader,
    write_shards,
)
from arctic_core.backends.packed import PackedTrainer
from arctic_core.data import Batch
from arctic_core.errors import CheckpointError, EngineDiedError
from arctic_core.models.scoring import ScoringModule

_OPTIMIZER_FILE = "optimizer.json"
_GATHER_BYTES = 256 << 20  # most that a stage 3 rank holds besides its shard while weights leave the engine


class DeepSpeedTrainer(DeepSpeedRank, PackedTrainer):
    """Trains through a DeepSpeed engine.

    Gradients are sums: see :mod:`arctic_core.backends.deepspeed_engine.optimizer` for how DeepSpeed's average over ranks is
    undone. Optimizer state is float32 whatever the compute type, and so is the gradient while it is added up.
    """

    @classmethod
    def capabilities(cls, device: str) -> tuple[str, ...]:
        return (
            "forward",
            "forward_backward",
            "backward",
            "step",
            "zero_grad",
            "sync_weights",
            "save_checkpoint",
            "load_checkpoint",
            "export_hf",
        )

    # --- model and optimizer ----------------------------------------------------------------------------------------

    def _build(self, module: ScoringModule) -> nn.Module:
        training = self.spec.config.training
        bare = training.zero_stage == 0 and self.spec.dtype == "float32"
        self._adamw: ScaledAdamW = (ReplicatedAdamW if bare else ScaledAdamW)(
            module.parameters(),
            lr=training.optimizer.lr,
            betas=training.optimizer.betas,
            eps=training.optimizer.eps,
            weight_decay=training.optimizer.weight_decay,
        )
        self._params = dict(module.model.named_parameters())
        engine = self._initialize(module, training_config(self.spec), self._adamw)
        if training.zero_stage == 0 and self.spec.dtype == "bfloat16":
            for parameter in self._params.values():  # DeepSpeed adds up in whatever type .grad has
                parameter.grad_dtype = torch.float32
        self._adamw.hold = False
        return engine

    def stop(self) -> None:
        for name in ("_adamw", "_params"):
            if hasattr(self, name):
                delattr(self, name)
        super().stop()

    # --- gradients --------------------------------------------------------------------------------------------------

    def _backward(self, scalar: torch.Tensor) -> None:
        try:
            self._engine.backward(scalar)
        except Exception as error:  # memory most of all
            if self.spec.config.training.zero_stage == 0:
                raise
            # A part of the gradient waits in DeepSpeed's buckets, out of reach: it would be refused, or counted, later.
            raise EngineDiedError(
                f"the backward pass failed inside DeepSpeed, which cannot go on from there: {type(error).__name__}: {error}",
                where=self.where,
            ) from error

    def _apply(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        # DeepSpeed measures and clips the average over ranks, our optimizer then multiplies by `scale`.
        scale = self.spec.world_size / divisor
        optimizer = self._engine.optimizer
        optimizer.clip_grad = max_grad_norm / scale
        self._adamw.scale = scale
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._engine_step()
        return float(optimizer._global_grad_norm) * scale

    def _engine_step(self) -> None:
        optimizer = self._engine.optimizer
        self._engine.step()
        if getattr(optimizer, "overflow", False) and self.spec.config.training.offload_optimizer:
            # DeepSpeed 0.19 forgets this buffer when it skips a step with offload: the NaN would stay in the next sum.
            for group in getattr(optimizer, "averaged_gradients", {}):
                optimizer.averaged_gradients[group] = None

    def _drop_gradients(self) -> None:
        if self._accumulated:
            self._held_step()

    def _held_step(self) -> None:
        """A DeepSpeed step in which the optimizer does nothing.

        What DeepSpeed does around it happens: accumulated gradients are dropped, at every stage and with offload, and the
        weights in use are refreshed from the optimizer's float32 copies.
        """
        if not self._accumulated:
            scores = self.policy(self._pack(Batch.from_samples([]), None), False)
            self._backward(scores[0].sum())
        self._adamw.hold = True
        try:
            self._engine.optimizer.clip_grad = 0.0
            self._engine_step()
        finally:
            self._adamw.hold = False
        self._accumulated = False

    @property
    def _engine(self) -> Any:
        """The DeepSpeed engine, untyped: DeepSpeed has no annotations."""
        return self.policy

    # --- weights ----------------------------------------------------------------------------------------------------

    def _gather(self, parameters: Sequence[str]) -> dict[str, torch.Tensor] | None:
        keep = self.spec.rank == 0
        if self.spec.config.training.zero_stage < 3:
            return {name: self._params[name].detach() for name in parameters} if keep else None
        assert self._deepspeed is not None
        whole: dict[str, torch.Tensor] = {}
        for names in self._gather_groups(parameters):
            with self._deepspeed.zero.GatheredParameters([self._params[name] for name in names]):
                if keep:
                    whole.update((name, self._params[name].detach().to("cpu", copy=True)) for name in names)
        return whole if keep else None

    def _gather_groups(self, parameters: Sequence[str]) -> Iterator[list[str]]:
        group: list[str] = []
        size = 0
        for name in parameters:
            parameter: Any = self._params[name]
            nbytes = parameter.ds_numel * parameter.element_size()
            if group and size + nbytes > _GATHER_BYTES:
                yield group
                group, size = [], 0
            group.append(name)
            size += nbytes
        if group:
            yield group

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _save_state(self, directory: Path) -> None:
        rank, world_size = self.spec.rank, self.spec.world_size
        state = self._full_state()
        write_shards(directory, "weights", rank, world_size, ((name, state.read(name, None)) for name in self._params))
        taken = self._adamw.steps_taken
        if taken:  # before the first step the moments are zero
            keys = ((f"{part}.{name}", state.read(name, part)) for name in self._params for part in MOMENTS)
            write_shards(directory, "optimizer", rank, world_size, keys)
        if rank == 0:
            (directory / _OPTIMIZER_FILE).write_text(json.dumps({"steps_taken": taken}))

    def _load_state(self, directory: Path, *, weights: bool, optimizer: bool) -> None:
        saved, moments, taken = self._open_state(directory, weights, optimizer)
        self._drop_gradients()
        self._held_step()  # makes optimizer state where there is none yet
        state = self._full_state()
        for name, value in saved:
            state.write(name, None, value)
        if weights:
            self._held_step()  # carries the float32 copies into the weights in use
        for key, value in moments:
            part, name = key.split(".", 1)
            state.write(name, part, value)
        if optimizer:
            self._adamw.set_steps_taken(taken)

    def _open_state(self, directory: Path, weights: bool, optimizer: bool) -> tuple[ShardReader, ShardReader, int]:
        shapes = {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in self._params.items()}
        opened: tuple[ShardReader, ShardReader, int] | None = None
        problem = CheckpointError("another rank cannot read it", where=str(directory))
        try:
            taken = _read_steps_taken(directory / _OPTIMIZER_FILE) if optimizer else 0
            expected = {f"{part}.{name}": shape for name, shape in shapes.items() for part in MOMENTS} if taken else None
            saved = ShardReader(directory, "weights", shapes if weights else None)
            opened = saved, ShardReader(directory, "optimizer", expected), taken
        except CheckpointError as error:
            problem = error
        if not self._all_ranks(opened is not None) or opened is None:  # all raise, or some would wait for ever
            raise problem
        return opened

    def _full_state(self) -> FullState:
        stage = self.spec.config.training.zero_stage
        if stage == 0:
            return ReplicatedState(self._params, self._adamw)
        return FlatState(self._params) if stage < 3 else ShardedState(self._params)


def _read_steps_taken(file: Path) -> int:
    try:
        return int(json.loads(file.read_text())["steps_taken"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"cannot be read: {error!r}", where=str(file)) from error
