"""The parts Arctic ships, registered through the same hooks as anyone's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from arctic_core.backends.base import EngineDefinition
from arctic_core.errors import MissingExtraError
from arctic_core.plugins.hookspecs import hookimpl


def lazy(module: str, name: str, extra: str) -> Callable[[], Any]:
    """A loader of ``module.name`` that turns a missing package into :class:`MissingExtraError`."""

    def load() -> Any:
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("arctic_core"):
                raise
            raise MissingExtraError(
                f"{name} needs the package {error.name!r}",
                remedy=f'pip install "arctic-core[{extra}]"',
            ) from error

    return load


@hookimpl
def arctic_trainers() -> list[EngineDefinition]:
    base = "arctic_core.backends"
    return [
        EngineDefinition("torch", lazy(f"{base}.torch_engine.trainer", "TorchTrainer", "train"), "train", multi_rank=False),
        EngineDefinition("deepspeed", lazy(f"{base}.deepspeed_engine.trainer", "DeepSpeedTrainer", "train"), "train"),
    ]


@hookimpl
def arctic_logprobs() -> list[EngineDefinition]:
    base = "arctic_core.backends"
    return [
        EngineDefinition("torch", lazy(f"{base}.torch_engine.log_prob", "TorchLogProb", "train"), "train"),
        EngineDefinition("deepspeed", lazy(f"{base}.deepspeed_engine.log_prob", "DeepSpeedLogProb", "train"), "train"),
    ]


@hookimpl
def arctic_samplers() -> list[EngineDefinition]:
    base = "arctic_core.backends"
    return [
        EngineDefinition("transformers", lazy(f"{base}.transformers_sampler.sampler", "TransformersSampler", "train"), "train"),
        EngineDefinition("vllm", lazy(f"{base}.vllm_sampler.sampler", "VllmSampler", "sample"), "sample"),
    ]
