"""Train on samples that start alike, and compute what they share once (ZoRRo Train).

A batch of samples is packed into a *forest* of token runs (:mod:`~arctic_kernels.zorro.forest`); attention reads it as it is
(:mod:`~arctic_kernels.zorro.attention`), any transformers model that uses the attention interface runs on it
(:mod:`~arctic_kernels.zorro.hf`), and the output layer scores a shared row once for all its labels
(:mod:`~arctic_kernels.zorro.head`)::

    forest = PackedForest.from_sequences(token_ids, prompt_lengths, device="cuda")
    with use_forest(model, forest):
        hidden = model.model(input_ids=forest.token_ids, position_ids=forest.position_ids).last_hidden_state
    logprobs_R, entropy_R = linear_logprob_entropy(hidden[0], model.lm_head.weight, forest)

Importing this package imports none of its parts; a name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arctic_kernels.zorro.attention import available_backends, choose_backend, forest_attention
    from arctic_kernels.zorro.errors import UnsupportedAttentionError, UnsupportedLayerError, ZorroError
    from arctic_kernels.zorro.forest import AncestorPart, ForestStructure, PackedForest, WindowPart
    from arctic_kernels.zorro.head import linear_logprob_entropy
    from arctic_kernels.zorro.hf import FOREST_ATTENTION, check_model, use_forest
    from arctic_kernels.zorro.verify import verify_model

__all__ = [
    "FOREST_ATTENTION",
    "AncestorPart",
    "ForestStructure",
    "PackedForest",
    "UnsupportedAttentionError",
    "UnsupportedLayerError",
    "WindowPart",
    "ZorroError",
    "available_backends",
    "check_model",
    "choose_backend",
    "forest_attention",
    "linear_logprob_entropy",
    "use_forest",
    "verify_model",
]

_PARTS = {
    "attention": ("available_backends", "choose_backend", "forest_attention"),
    "errors": ("UnsupportedAttentionError", "UnsupportedLayerError", "ZorroError"),
    "forest": ("AncestorPart", "ForestStructure", "PackedForest", "WindowPart"),
    "head": ("linear_logprob_entropy",),
    "hf": ("FOREST_ATTENTION", "check_model", "use_forest"),
    "verify": ("verify_model",),
}
_PART_OF = {name: part for part, names in _PARTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load the part that defines a public name."""
    if name not in _PART_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PART_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})
