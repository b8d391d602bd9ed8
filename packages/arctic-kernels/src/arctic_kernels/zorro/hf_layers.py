"""Which layers of a transformers model mix tokens, and whether each of them can run on a packed forest.

Everything else in a decoder (embeddings, norms, projections, MLPs, experts) works token by token and needs no change. A module
mixes tokens if its ``forward`` takes a mask, a cache or position embeddings and none of its children does. It is supported if
it is

- causal self-attention that calls transformers' ``AttentionInterface`` (full or sliding window), or
- a gated DeltaNet with the attributes that :mod:`arctic_kernels.zorro.hf_delta` uses.

Anything else is refused by name. Layers are told by what they have, not by a list of classes or the version of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from arctic_kernels.zorro.errors import UnsupportedLayerError

SEQUENCE_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "past_key_values",
        "past_key_value",
        "layer_past",
        "cache_params",
        "position_embeddings",
        "alibi",
        "state",
        "use_cache",
    }
)
LAYER_TYPES = frozenset({"full_attention", "attention", "sliding_attention", "linear_attention"})
CHECKPOINT_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")  # of transformers, of torch's CheckpointWrapper
DELTA_ATTRIBUTES = ("A_log", "dt_bias", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim")
DELTA_PROJECTIONS = (
    ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering", "conv1d", "norm", "out_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_norm", "o_proj"),
)


@dataclass(frozen=True)
class ForestLayers:
    """The parts of a model that forests touch.

    Attributes:
        models: transformers models that hold such layers, outermost first.
        attentions: Attention modules that call the attention interface.
        deltas: Gated DeltaNet modules.
        configs: Distinct configs that name the attention implementation of those modules and models.
    """

    models: tuple[PreTrainedModel, ...]
    attentions: tuple[nn.Module, ...]
    deltas: tuple[nn.Module, ...]
    configs: tuple[Any, ...]


_FOUND = "_arctic_forest_layers"
"""Attribute that keeps the layers of a model: in the model, since they hold it, so that both go together."""


def find_layers(model: nn.Module) -> ForestLayers:
    """The layers of ``model`` that mix tokens; found once for each model object.

    Args:
        model: A transformers model, or a module that holds one (PEFT, DDP, a scoring module).

    Raises:
        UnsupportedLayerError: A layer cannot run on a forest; it says which and why.
    """
    found: ForestLayers | None = vars(model).get(_FOUND)
    if found is None:
        found = vars(model)[_FOUND] = _find(model)
    return found


def checkpoint_slots(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules and attributes that hold a function that recomputes a layer in the backward pass."""
    for module in model.modules():
        for name in CHECKPOINT_ATTRIBUTES:
            if callable(vars(module).get(name)):
                yield module, name


def _find(model: nn.Module) -> ForestLayers:
    decoders = [_decoder(root) for root in _outermost(model)]
    if not decoders:
        raise UnsupportedLayerError(
            type(model).__name__,
            "it holds no transformers model",
            "pass a transformers PreTrainedModel, or call forest_attention in your own attention layer",
        )
    finder = _Finder()
    for decoder in decoders:
        if getattr(getattr(decoder, "config", None), "is_encoder_decoder", False):
            raise UnsupportedLayerError(type(decoder).__name__, "it is part of an encoder-decoder model")
        if not finder.visit(decoder, "", decoder):
            raise UnsupportedLayerError(type(decoder).__name__, "no attention layer was found in it")
        if "position_ids" not in _parameters(type(decoder)):
            raise UnsupportedLayerError(
                type(decoder).__name__,
                "its forward takes no position_ids, which differ from places in the forest",
            )
    attentions, deltas = finder.attentions, finder.deltas
    mixers = {id(x) for x in (*attentions, *deltas)}
    models = tuple(
        x for x in model.modules() if isinstance(x, PreTrainedModel) and any(id(child) in mixers for child in x.modules())
    )
    for x in models:
        if not any(p.kind is p.VAR_KEYWORD for p in _parameters(type(x)).values()):
            raise UnsupportedLayerError(type(x).__name__, "its forward passes no keyword arguments on to its layers")
    configs = {id(c): c for x in (*models, *attentions) if (c := getattr(x, "config", None)) is not None}
    return ForestLayers(models, tuple(attentions), tuple(deltas), tuple(configs.values()))


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _decoder(model: PreTrainedModel) -> nn.Module:
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, nn.Module) else model


class _Finder:
    """Sorts the modules that mix tokens."""

    def __init__(self) -> None:
        self.attentions: list[nn.Module] = []
        self.deltas: list[nn.Module] = []

    def visit(self, module: nn.Module, path: str, parent: nn.Module) -> bool:
        """Whether ``module`` is, or holds, one that mixes tokens."""
        if is_gated_delta_net(module):
            self.deltas.append(module)
            return True
        if isinstance(module, (nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            raise UnsupportedLayerError(
                type(parent).__name__,
                f"its {type(module).__name__} at {path!r} carries a state along the sequence, which is not handed on from a"
                " shared prompt to its continuations",
            )
        below = [self.visit(x, f"{path}.{name}" if path else name, module) for name, x in module.named_children()]
        if any(below):
            return True
        parameters = _parameters(type(module))
        positional_embedding = isinstance(module, nn.Embedding) and "position_ids" in parameters
        if positional_embedding or not SEQUENCE_ARGUMENTS.intersection(parameters):
            return False
        _check_attention(module, path)
        self.attentions.append(module)
        return True


def _check_attention(module: nn.Module, path: str) -> None:
    name, parameters = f"{type(module).__name__} at {path!r}", _parameters(type(module))
    if "alibi" in parameters:
        raise UnsupportedLayerError(name, "it adds ALiBi position biases to the scores, which no forest backend does")
    if "cache_params" in parameters or "state" in parameters or not _calls_attention_interface(type(module)):
        raise UnsupportedLayerError(
            name,
            "it does not call transformers' AttentionInterface, and it is no gated DeltaNet whose state could be handed on",
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedLayerError(name, "its attention is bidirectional; a shared prompt would depend on what follows it")
    if getattr(module, "is_cross_attention", False):
        raise UnsupportedLayerError(name, "it is cross-attention; forests are for causal self-attention")
    kind = layer_type(module)
    if kind is not None and kind not in LAYER_TYPES:
        known = ", ".join(sorted(LAYER_TYPES))
        raise UnsupportedLayerError(name, f"layers of the type {kind!r} are not supported, only {known}")


def layer_type(module: nn.Module) -> str | None:
    """The layer's entry in its config's ``layer_types``, or None where the config has none."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    return types[index] if types is not None and index is not None and index < len(types) else None


def is_gated_delta_net(module: nn.Module) -> bool:
    """Whether ``module`` has the parts of a gated DeltaNet in one of the three arrangements that are known."""
    if not all(hasattr(module, x) for x in DELTA_ATTRIBUTES):
        return False
    return any(all(hasattr(module, x) for x in names) for names in DELTA_PROJECTIONS)


@cache
def _parameters(kind: type[nn.Module]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kind.forward).parameters)


@cache
def _calls_attention_interface(kind: type[nn.Module]) -> bool:
    for base in kind.__mro__:
        for function in vars(base).values() if base is not nn.Module else ():
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if "ALL_ATTENTION_FUNCTIONS" in getattr(code, "co_names", ()):
                return True
    return False
