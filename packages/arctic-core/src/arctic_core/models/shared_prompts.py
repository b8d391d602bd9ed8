"""ZoRRo Train for a loaded model: whether it can compute what samples share once, and the forest of a micro-batch.

The packed row of a micro-batch becomes a forest (:class:`arctic_kernels.zorro.PackedForest`): tokens with which several samples
start lie on it once, and attention lets each sample see its own. Everything else of the model runs unchanged, on fewer tokens.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from arctic_core.data import Batch
from arctic_core.errors import UnsupportedModelError
from arctic_kernels.zorro import PackedForest, UnsupportedAttentionError, UnsupportedLayerError, check_model, choose_backend
from arctic_kernels.zorro.attention.choice import VARIABLE

if TYPE_CHECKING:
    from arctic_core.config.client import Zorro

__all__ = ["SharedPrompts", "shared_forest", "shared_prompts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedPrompts:
    """Whether an engine computes shared prompts once, and why it does or does not."""

    active: bool
    reason: str


def shared_prompts(model: PreTrainedModel, setting: Zorro, *, trains: bool) -> SharedPrompts:
    """Decide for a model on its device; the decision is logged.

    Args:
        model: Loaded, on its device.
        setting: The option ``zorro`` of the engine.
        trains: Whether there will be backward passes.

    Raises:
        UnsupportedModelError: ``setting`` is ``on`` and a layer of the model, or the device, cannot.
    """
    if setting == "off":
        return SharedPrompts(False, "zorro is off")
    name = type(model).__name__
    try:
        check_model(model)
        choice = choose_backend(_queries(model, trains))
    except (UnsupportedLayerError, UnsupportedAttentionError) as error:
        if setting == "on":
            raise UnsupportedModelError(
                f"zorro is on, but {name} cannot compute shared prompts once: {error}",
                where=name,
                remedy="set zorro to auto or off",
            ) from error
        return _alone(name, str(error))
    if setting == "auto" and choice.backend == "eager" and os.environ.get(VARIABLE) != "eager":
        return _alone(name, f"only a slow attention backend would do ({choice.reason})")
    logger.info("%s computes shared prompts once, with attention by %s (%s)", name, choice.backend, choice.reason)
    return SharedPrompts(True, f"attention by {choice.backend}: {choice.reason}")


def shared_forest(batch: Batch, device: torch.device | str, max_tokens: int) -> PackedForest | None:
    """The forest of a micro-batch, or ``None`` where computing its samples one by one costs no more.

    Prefixes are shared where that is worth it. A plan counts on what samples of a group share, so all prefixes are shared
    where the micro-batch would exceed its budget else.

    Args:
        batch: Samples of one micro-batch.
        device: Where the tensors go.
        max_tokens: The budget.
    """
    if len(batch) < 2:
        return None
    pack = partial(PackedForest.from_packed, batch.token_ids, batch.lengths, batch.prompt_lengths, device=device)
    forest = pack()
    if forest.num_tokens > max_tokens:
        forest = pack(min_shared_tokens=1)
    return forest if forest.tokens_saved else None


def _queries(model: PreTrainedModel, trains: bool) -> torch.Tensor:
    """No queries, of the kind that the model's attention makes."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return torch.empty(0, heads, size, dtype=model.dtype, device=model.device, requires_grad=trains)


def _alone(name: str, reason: str) -> SharedPrompts:
    logger.warning("%s computes every sample on its own, also what samples share: %s", name, reason)
    return SharedPrompts(False, reason)
