"""Brings engines up in this process. Its twin over Ray is :mod:`arctic_core.service.ray_launch`."""

from __future__ import annotations

import abc
import importlib.util
import os
import platform
from typing import Literal

from arctic_core.backends.base import EngineDefinition, RankSpec
from arctic_core.backends.rank import LocalRank, Rank
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import ConfigError
from arctic_core.protocol import EngineName, Place


class Launcher(abc.ABC):
    """Creates ranks and knows where they are. One launcher serves one job."""

    @abc.abstractmethod
    async def open(self) -> None:
        """Reserve what the job needs."""

    @abc.abstractmethod
    def device(self) -> Literal["cpu", "cuda"]:
        """What the engines run on."""

    @abc.abstractmethod
    async def launch(self, engine: EngineName, definition: EngineDefinition, model_path: str) -> list[Rank]:
        """Create (not start) all ranks of an engine, in rank order. A failure leaves none behind."""

    @abc.abstractmethod
    def places(self) -> tuple[Place, ...]:
        """Where the launched ranks are."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Give back what :meth:`open` reserved. Idempotent."""


class LocalLauncher(Launcher):
    """All engines in this process, one rank each."""

    def __init__(self, config: ArcticRLClientConfig) -> None:
        self._config = config
        self._places: list[Place] = []
        self._device: Literal["cpu", "cuda"] = "cpu"

    async def open(self) -> None:
        if self._config.device != "cpu":
            has_gpu = _has_gpu()
            if self._config.device == "cuda" and not has_gpu:
                raise ConfigError("device='cuda', but there is no GPU here", remedy="set device='cpu' or 'auto'")
            self._device = "cuda" if has_gpu else "cpu"

    def device(self) -> Literal["cpu", "cuda"]:
        return self._device

    async def launch(self, engine: EngineName, definition: EngineDefinition, model_path: str) -> list[Rank]:
        count = count_ranks(self._config, engine)
        if count > 1:
            raise ConfigError(
                f"{count} {engine} ranks do not fit in one process",
                where=f"{engine}s",
                remedy="use comm_protocol='ray', or one rank per engine",
            )
        spec = make_spec(self._config, engine, 0, model_path, self._device)
        self._places.append(Place(engine=engine, rank=0, node=platform.node(), pid=os.getpid(), device=self._device, share=1.0))
        return [LocalRank(definition.load()(spec))]

    def places(self) -> tuple[Place, ...]:
        return tuple(self._places)

    async def close(self) -> None:
        self._places.clear()


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:  # the engine that needs it says so when it is loaded
        return False
    import torch

    return torch.cuda.is_available()


def count_ranks(config: ArcticRLClientConfig, engine: EngineName) -> int:
    """Ranks asked for."""
    return {"trainer": config.training_gpus, "sampler": config.sampling_gpus, "log_prob": config.log_prob_gpus}[engine]


def make_spec(
    config: ArcticRLClientConfig,
    engine: EngineName,
    rank: int,
    model_path: str,
    device: Literal["cpu", "cuda"],
    *,
    threads: int | None = None,
    rendezvous: str | None = None,
) -> RankSpec:
    """The spec of one rank, with ``auto`` settings resolved."""
    dtype = config.dtype if config.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    return RankSpec(
        engine=engine,
        rank=rank,
        world_size=count_ranks(config, engine),
        model_path=model_path,
        device=device,
        dtype=dtype,
        config=config,
        threads=threads,
        rendezvous=rendezvous,
    )
