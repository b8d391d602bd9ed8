"""The parts Arctic ships, registered through the same hooks as anyone's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from arctic_core.backends.base import EngineDefinition
from arctic_core.config import losses
from arctic_core.errors import MissingExtraError
from arctic_core.losses.base import LossDefinition, LossInputs, LossOutput
from arctic_core.plugins.hookspecs import hookimpl
from arctic_core.protocol import Normalization
from arctic_core.rl.reasoning_gym_task import ReasoningGymOptions, create_reasoning_gym
from arctic_core.rl.tasks import AdditionOptions, TaskDefinition, create_addition
from arctic_core.sync.carriers import CarrierDefinition, WeightCarrier


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


@hookimpl
def arctic_losses() -> list[LossDefinition]:
    return [
        _policy_loss(losses.GRPOLossConfig, "clipped", "grpo_loss", "sequence"),
        _policy_loss(losses.DAPOLossConfig, "clipped", "dapo_loss", "token"),
        _policy_loss(losses.DrGRPOLossConfig, "clipped", "dr_grpo_loss", "constant"),
        _policy_loss(losses.PPOLossConfig, "clipped", "ppo_loss", "token"),
        _policy_loss(losses.ReinforcePPLossConfig, "clipped", "reinforce_pp_loss", "token"),
        _policy_loss(losses.GSPOLossConfig, "clipped", "gspo_loss", "sequence"),
        _policy_loss(losses.RLOOLossConfig, "rloo", "rloo_loss", "sequence"),
        _policy_loss(losses.CISPOLossConfig, "cispo", "cispo_loss", "token"),
        _policy_loss(losses.SAPOLossConfig, "sapo", "sapo_loss", "sequence"),
        LossDefinition("sft", losses.SFTLossConfig, _loss("sft", "sft_loss")),
        LossDefinition(
            "distill",
            losses.DistillLossConfig,
            _loss("distill", "distill_loss"),
            requires_for=losses.DistillLossConfig.required_fields,
            needs_topk=losses.DistillLossConfig.needs_topk,
        ),
    ]


def _policy_loss(
    config: type[losses.PolicyLossConfig], module: str, function: str, normalization: Normalization
) -> LossDefinition:
    return LossDefinition(
        config.model_fields["name"].default,
        config,
        _loss(module, function),
        requires_for=config.required_fields,
        needs_entropy=config.needs_entropy,
        normalization=normalization,
    )


def _loss(module: str, name: str) -> Callable[[LossInputs, Any], LossOutput]:
    """A loss whose module, and with it torch, is imported when it is first computed."""
    load = lazy(f"arctic_core.losses.{module}", name, "train")

    def compute(inputs: LossInputs, options: Any) -> LossOutput:
        return load()(inputs, options)

    return compute


@hookimpl
def arctic_weight_carriers() -> list[CarrierDefinition]:
    return [
        CarrierDefinition("file", _file_carrier),
        CarrierDefinition("shared_memory", _shared_memory_carrier),
    ]


def _file_carrier(directory: str | None) -> WeightCarrier:
    from arctic_core.sync.file import FileCarrier

    return FileCarrier(directory)


def _shared_memory_carrier(directory: str | None) -> WeightCarrier:
    from arctic_core.sync.shared_memory import SharedMemoryCarrier

    return SharedMemoryCarrier()


@hookimpl
def arctic_tasks() -> list[TaskDefinition]:
    return [
        TaskDefinition("addition", create_addition, "sums of two small numbers; needs no package", AdditionOptions),
        TaskDefinition("reasoning_gym", create_reasoning_gym, "any dataset of reasoning-gym", ReasoningGymOptions),
    ]
