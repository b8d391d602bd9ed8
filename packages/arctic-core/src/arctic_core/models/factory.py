"""The one way a model is loaded for training and scoring, and what is known of its checkpoint without loading it."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from arctic_core.errors import ModelNotFoundError, UnsupportedModelError
from arctic_core.models.loading import LOADING
from arctic_core.models.packed_attention import PACKED_ATTENTION
from arctic_core.models.quiet import no_progress_bars
from arctic_core.models.resolve import resolve_model
from arctic_core.sync.plan import TensorMeta

if TYPE_CHECKING:
    from arctic_core.plugins.manager import PluginRegistry

__all__ = [
    "CheckpointManifest",
    "checkpoint_manifest",
    "checkpoint_tensors",
    "load_causal_lm",
    "manifest_of",
    "resolve_model",
    "tied_names",
    "torch_dtype",
]

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ISOLATION_TOLERANCE = 0.05  # relative; a leak between samples moves logits by about their own size, rounding by far less


@dataclass(frozen=True)
class CheckpointManifest:
    """What ``save_pretrained`` of a model writes."""

    tensors: tuple[TensorMeta, ...]
    ties: tuple[tuple[str, str], ...]
    """``(other name, name it is saved by)``."""
    sources: tuple[str, ...]
    """Per tensor, the parameter of the transformers model it comes from (the same name for nearly all architectures)."""


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` → ``torch.bfloat16``."""
    return getattr(torch, name)


def load_causal_lm(
    path: str,
    *,
    dtype: str,
    device: torch.device | str,
    gradient_checkpointing: bool = False,
    registry: PluginRegistry | None = None,
) -> PreTrainedModel:
    """Load a causal language model for packed scoring.

    Dropout is off, attention is :func:`~arctic_core.models.packed_attention.packed_attention`, and the model patches of
    ``registry`` are applied in their order.

    Args:
        path: Local folder from :func:`resolve_model`.
        dtype: ``"float32"`` or ``"bfloat16"``; all weights get it.
        device: Where the weights go.
        gradient_checkpointing: Recompute each layer in the backward pass.
        registry: Source of model patches; ``None`` applies none.

    Raises:
        ModelNotFoundError: ``path`` is not a model folder.
        UnsupportedModelError: The architecture cannot be scored packed; the message names what stands in the way.
    """
    config = _load_config(path)
    _check_config(config)
    try:
        with LOADING, no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=_without_dropout(config),
                dtype=torch_dtype(dtype),
                attn_implementation=PACKED_ATTENTION,
                use_safetensors=True,
                local_files_only=True,
            )
    except ValueError as error:  # no causal LM of that type, or no attention interface
        raise UnsupportedModelError(f"transformers cannot load it: {error}", where=path) from error
    except OSError as error:
        raise ModelNotFoundError(f"cannot be read: {error}", where=path) from error
    except KeyError as error:  # a table of attention classes of its own
        if error.args != (PACKED_ATTENTION,):
            raise
        raise UnsupportedModelError("the model does not use transformers' attention interface", where=path) from error
    _check_class(type(model))
    for patch in registry.model_patches() if registry else []:
        if patch.applies(model):
            patch.apply(model)
    model.to(device)  # type: ignore[arg-type]
    _check_isolation(model)
    if gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UnsupportedModelError(f"{type(model).__name__} has no gradient checkpointing", where=path)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def tied_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Pairs ``(other name, name it is saved by)`` of parameters that are one tensor."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(
        (name, first[id(parameter)])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name != first[id(parameter)]
    )


def checkpoint_tensors(model: PreTrainedModel, parameter: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The checkpoint tensors that one full parameter becomes (one of the same name unless transformers fuses at loading)."""
    return revert_weight_conversion(model, {parameter: value})


def manifest_of(model: PreTrainedModel, dtype: str) -> CheckpointManifest:
    """Manifest of a model on any device, the meta device included, whose parameters have their full shapes.

    Raises:
        UnsupportedModelError: A checkpoint tensor is made of several parameters, so it cannot be streamed one by one.
    """
    shapes = {name: torch.empty(parameter.shape, device="meta") for name, parameter in model.named_parameters()}
    tensors: list[TensorMeta] = []
    sources: list[str] = []
    for parameter, value in shapes.items():
        for name, tensor in checkpoint_tensors(model, parameter, value).items():
            tensors.append(TensorMeta(name, tuple(tensor.shape), dtype))
            sources.append(parameter)
    whole = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, shapes).items()}
    if whole != {meta.name: meta.shape for meta in tensors} or len(whole) != len(tensors):
        raise UnsupportedModelError(
            f"{type(model).__name__} saves tensors that are made of several parameters", remedy="use another architecture"
        )
    return CheckpointManifest(tuple(tensors), tied_names(model), tuple(sources))


def checkpoint_manifest(path: str, dtype: str = "float32") -> CheckpointManifest:
    """Names, shapes and ties of a model's checkpoint from its config alone, without loading weights.

    Args:
        path: Local folder from :func:`resolve_model`.
        dtype: Type recorded for every tensor.
    """
    with LOADING, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_load_config(path))
        model.tie_weights()
    return manifest_of(model, dtype)


def _load_config(path: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except OSError as error:
        raise ModelNotFoundError(f"no model configuration: {error}", where=path) from error
    except ValueError as error:
        raise UnsupportedModelError(
            f"this transformers does not know the architecture: {error}", where=path, remedy="upgrade transformers"
        ) from error


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Log-probs must not depend on chance, in training neither."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value:
            setattr(config, name, 0.0)
    return config


def _check_config(config: PretrainedConfig) -> None:
    text = config.get_text_config()
    problems = [f"layers of type {kind!r}" for kind in sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)]
    if getattr(text, "attn_logit_softcapping", None):
        problems.append("soft-capped attention scores (attn_logit_softcapping)")
    if getattr(config, "quantization_config", None) is not None:
        problems.append("quantised weights")
    if getattr(config, "is_encoder_decoder", False):
        problems.append("an encoder")
    if problems:
        raise UnsupportedModelError(
            f"{config.model_type} has {', '.join(problems)}, which packed scoring does not support",
            remedy="choose a decoder with full or sliding-window attention in every layer",
        )


def _check_class(cls: type[PreTrainedModel]) -> None:
    if not (cls._supports_attention_backend and cls._can_set_attn_implementation()):
        raise UnsupportedModelError(f"{cls.__name__} does not use transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(cls.forward).parameters:
        raise UnsupportedModelError(f"the forward of {cls.__name__} has no logits_to_keep")


@torch.no_grad()
def _check_isolation(model: PreTrainedModel) -> None:
    """Refuse a model in which one sample of a packed row can see another.

    Two rows differ in their first sample only; the second sample's logits must agree. This finds every way of mixing
    tokens that ignores ``cu_seqlens`` (convolutions, recurrent states, attention sinks), whatever its name.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(1, 9, device=model.device).remainder(vocabulary)[None]
    positions = torch.arange(4, device=model.device).repeat(2)[None]
    other = ids.clone()
    other[:, :4] = (ids[:, :4] + math.ceil(vocabulary / 2)).remainder(vocabulary)
    keep = torch.arange(4, 8, device=model.device)
    was_training = model.training
    model.eval()
    logits = [_row_logits(model, row, positions, keep) for row in (ids, other)]
    model.train(was_training)
    difference = (logits[0] - logits[1]).norm() / logits[0].norm().clamp_min(1e-30)
    if not difference <= _ISOLATION_TOLERANCE:
        raise UnsupportedModelError(
            f"in {type(model).__name__} the samples of a packed row see each other (relative change {difference:.2g})"
        )


def _row_logits(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    cu_seqlens = (0, 4, 8)
    output: Any = model(input_ids=ids, position_ids=positions, cu_seqlens=cu_seqlens, logits_to_keep=keep, use_cache=False)
    return output.logits.float()
