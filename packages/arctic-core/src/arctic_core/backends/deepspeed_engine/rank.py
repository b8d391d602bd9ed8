"""What the DeepSpeed trainer and log-prob engine share: joining the other ranks, building engines, leaving."""

from __future__ import annotations

import gc
import logging
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from arctic_core.backends.deepspeed_engine.config import frozen_config
from arctic_core.backends.deepspeed_engine.runtime import environment, join, leave, limit_waits, load_deepspeed
from arctic_core.backends.packed_scoring import PackedEngine
from arctic_core.models.scoring import ScoringModule


class DeepSpeedRank(PackedEngine):
    """One rank of an engine that runs on DeepSpeed. Every method but :meth:`report` is called on all ranks alike."""

    implementation = "deepspeed"
    _deepspeed: ModuleType | None = None
    """Set while this rank is a member of the process group."""

    def start(self) -> None:
        self._engines: list[Any] = []
        try:
            super().start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for engine in getattr(self, "_engines", []):
            engine.destroy()
        self._engines = []
        super().stop()
        gc.collect()  # engines, hooks and parameters refer to each other
        deepspeed, self._deepspeed = self._deepspeed, None
        if deepspeed is not None:
            leave(deepspeed)

    def _start_runtime(self) -> None:
        deepspeed = load_deepspeed(self.spec.device)
        join(self.spec, deepspeed)
        self._deepspeed = deepspeed

    def _initialize(self, module: nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> Any:
        assert self._deepspeed is not None
        log = self._deepspeed.utils.logger
        level = log.level
        log.setLevel(logging.ERROR)  # it warns of optimizers it has no test for; ours is torch's AdamW
        try:
            with environment({}):
                engine, *_ = self._deepspeed.initialize(
                    model=module, optimizer=optimizer, config=config, dist_init_required=False
                )
        finally:
            log.setLevel(level)
        self._engines.append(engine)
        if self.spec.world_size > 1:
            limit_waits(engine.seq_data_parallel_group, self.spec.config.deadlines.request)
        return engine

    def _build_frozen(self, module: ScoringModule) -> nn.Module:
        return self._initialize(module.requires_grad_(False), frozen_config(self.spec))

    def _all_ranks(self, flag: bool) -> bool:
        if self.spec.world_size == 1:
            return flag
        agreed = torch.tensor(int(flag), device=self.spec.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return bool(agreed)
