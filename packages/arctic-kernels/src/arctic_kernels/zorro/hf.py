"""Run any transformers model that uses the attention interface on a packed forest, without patching its forward.

``use_forest`` does three things to a model and undoes them on exit: it switches the attention implementation to
:data:`FOREST_ATTENTION`, it hands the forest to every attention layer through the keyword arguments of the model's forward, and
it exchanges the forward of gated DeltaNet layers (:mod:`arctic_kernels.zorro.hf_delta`). Recomputation of checkpointed layers
runs in the same state, also when ``backward`` is called after the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from arctic_kernels.zorro.attention.function import Tape
from arctic_kernels.zorro.errors import UnsupportedLayerError, ZorroError
from arctic_kernels.zorro.hf_delta import DeltaPlan, delta_forward
from arctic_kernels.zorro.hf_layers import ForestLayers, checkpoint_slots, find_layers, layer_type

if TYPE_CHECKING:
    from arctic_kernels.zorro.forest import PackedForest

FOREST_ATTENTION = "arctic_forest"
FOREST, BACKEND, SCOPE = "forest", "forest_backend", "forest_scope"  # keyword arguments of the model's forward
UNSUPPORTED_ARGUMENTS = ("position_bias", "alibi", "head_mask")


def check_model(model: nn.Module) -> None:
    """Refuse a model with a layer that cannot run on a forest.

    Raises:
        UnsupportedLayerError: Names the layer and what is missing.
    """
    for module in find_layers(model).attentions:
        if layer_type(module) == "sliding_attention" and getattr(module, "sliding_window", None) is None:
            raise UnsupportedLayerError(
                _name(module),
                "it is a sliding-window layer that does not say how long its window is",
            )


@contextmanager
def use_forest(
    model: nn.Module, forest: PackedForest, backend: str = "auto", *, keep_attention: bool = False
) -> Iterator[None]:
    """Run ``model`` on ``forest`` inside the block.

    Call the model on ``forest.token_ids`` [1, T] (or embeddings of them); ``position_ids`` are the forest's unless others are
    given, and no cache is kept. No attention mask may be given: a forest holds no padding. ``backward`` may come later.

    Args:
        model: A transformers model, or a module that holds one (PEFT, DDP, a scoring module).
        forest: On the model's device.
        backend: Backend of :func:`arctic_kernels.zorro.forest_attention`.
        keep_attention: Where layers are checkpointed, keep their attention's output ``[T, heads, head dim]`` instead of
            computing it again: less time for more memory. The backend ``flex`` always computes again.

    Raises:
        UnsupportedLayerError: The model has a layer that cannot run on a forest.
    """
    check_model(model)
    layers = find_layers(model)
    plans = {x: DeltaPlan.build(forest, x) for x in _kernel_sizes(layers)}
    scope = _Scope(layers, forest, backend, plans, keep_attention)
    with ExitStack() as stack:
        for x in layers.models:
            # In front of the hooks of outer blocks, which leave a call alone that has a forest.
            stack.callback(x.register_forward_pre_hook(scope.before_forward, with_kwargs=True, prepend=True).remove)
        for module, name in list(checkpoint_slots(model)):
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, _Checkpoint(scope, original))
        stack.enter_context(scope.installed())
        yield


def forest_attention_forward(  # noqa: PLR0917 - the signature is transformers'
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer on a forest, with the signature of transformers' attention functions.

    Args:
        module: The attention layer.
        query: [1, heads, T, head dim].
        key: [1, key/value heads, T, head dim].
        value: [1, key/value heads, T, value dim].
        attention_mask: Must be None.
        dropout: Must be 0.
        scaling: Factor of the scores; None for head dim ** -0.5.
        sliding_window: Keys that a query sees, itself included; None for all.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        s_aux: [heads] attention sinks.
        **kwargs: ``forest``, ``forest_backend`` and ``forest_scope``, and what else the model passes along.

    Returns:
        The output [1, T, heads, value dim], and None for the attention weights.
    """
    from arctic_kernels.zorro.attention import forest_attention

    forest = kwargs.get(FOREST)
    if forest is None:
        raise UnsupportedLayerError(_name(module), "the model does not pass the keyword argument `forest` on to it")
    if attention_mask is not None:
        raise UnsupportedLayerError(_name(module), "it was given an attention mask, which its model builds by itself")
    if dropout:
        raise UnsupportedLayerError(_name(module), f"it drops attention weights (p = {dropout})", "set attention_dropout to 0")
    _check_layer(module, sliding_window, kwargs)
    if query.shape[0] != 1 or query.shape[2] != forest.num_tokens:
        raise ZorroError(
            f"queries are [batch, heads, T, dim] = {tuple(query.shape)}; this forest is [1, ., {forest.num_tokens}, .]"
        )
    scope = kwargs.get(SCOPE)
    narrower = query.shape[-1] - value.shape[-1]
    if narrower > 0:  # latent attention; backends take one head dim, and columns of zeros change nothing
        value = functional.pad(value, (0, narrower))
    out_THD = forest_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        forest,
        scale=scaling,
        backend=kwargs.get(BACKEND, "auto"),
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
        tape=None if scope is None else scope.tape,
    )
    return out_THD[..., : query.shape[-1] - max(narrower, 0)].unsqueeze(0), None


AttentionInterface.register(FOREST_ATTENTION, forest_attention_forward)


def _name(module: nn.Module) -> str:
    return f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"


def _check_layer(module: nn.Module, window: int | None, kwargs: dict[str, Any]) -> None:
    """Refuse what no mask and no argument tells the backends about."""
    name = _name(module)
    if not kwargs.get("is_causal", True) or not getattr(module, "is_causal", True):
        raise UnsupportedLayerError(name, "its attention is bidirectional")
    for argument in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(argument) is not None:
            raise UnsupportedLayerError(name, f"it passes {argument!r}, which changes the scores")
    kind, configured = layer_type(module), getattr(getattr(module, "config", None), "sliding_window", None)
    if window is None and (kind == "sliding_attention" or (kind is None and configured is not None)):
        raise UnsupportedLayerError(name, "its model masks by a sliding window that the layer does not pass on")


def _kernel_sizes(layers: ForestLayers) -> set[int]:
    return {int(x.conv_kernel_size) for x in layers.deltas}  # type: ignore[arg-type]


@dataclass
class _Scope:
    """One use of one forest on one model."""

    layers: ForestLayers
    forest: PackedForest
    backend: str
    plans: dict[int, DeltaPlan] = field(repr=False)
    keep_attention: bool = False
    tape: Tape | None = None
    """Of the checkpointed layer that is being computed."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Attention implementation and DeltaNet forwards are the forest's inside the block."""
        with ExitStack() as stack:
            for config in self.layers.configs:
                stack.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
                config._attn_implementation_internal = FOREST_ATTENTION
            for module in self.layers.deltas:
                _restore_attribute(stack, module, "forward")
                plan = self.plans[int(module.conv_kernel_size)]  # type: ignore[arg-type]
                module.forward = _bind(delta_forward, module, plan)  # type: ignore[method-assign]
            yield

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict]:
        """Check the call of a model and add the forest to its keyword arguments, unless a model around it has done so."""
        if kwargs.get(FOREST) is not None:
            return args, kwargs
        name = type(module).__name__
        inputs = args[0] if args else kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds")
        if inputs is not None and tuple(inputs.shape[:2]) != (1, self.forest.num_tokens):
            raise ZorroError(
                f"{name} was called on inputs of shape {tuple(inputs.shape)} under use_forest, but the forest has the shape"
                f" [1, {self.forest.num_tokens}]; pass forest.token_ids"
            )
        for argument in ("attention_mask", "past_key_values"):
            if kwargs.get(argument) is not None:
                raise ZorroError(f"{name} was called with {argument} under use_forest; a forest has no padding and no cache")
        if kwargs.get("use_cache"):
            raise ZorroError(f"{name} was called with use_cache=True under use_forest; set it to False or leave it out")
        added: dict[str, Any] = {FOREST: self.forest, BACKEND: self.backend, SCOPE: self, "use_cache": False}
        if kwargs.get("position_ids") is None:
            added["position_ids"] = self.forest.position_ids
        return args, {**kwargs, **added}


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpointing function whose recomputation runs in the scope of its forward pass."""

    scope: _Scope
    original: Callable[..., Any]

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.original(_Recomputed(self.scope, function), *args, **kwargs)


class _Recomputed:
    """What a checkpoint calls in the forward pass and again in the backward pass."""

    def __init__(self, scope: _Scope, function: Callable[..., Any]) -> None:
        self._scope, self._function = scope, function
        self._tape = Tape() if scope.keep_attention else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope, outer = self._scope, self._scope.tape
        with scope.installed(), nullcontext() if self._tape is None else self._tape.one_pass():
            scope.tape = self._tape
            try:
                return self._function(*args, **kwargs)
            finally:
                scope.tape = outer


def _bind(function: Callable[..., Any], module: nn.Module, plan: DeltaPlan) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(module, plan, *args, **kwargs)

    return forward


def _restore_attribute(stack: ExitStack, module: nn.Module, name: str) -> None:
    """Put an attribute of the instance back on exit, or remove it if only the class has it."""
    if name in vars(module):
        stack.callback(setattr, module, name, vars(module)[name])
    else:
        stack.callback(delattr, module, name)
