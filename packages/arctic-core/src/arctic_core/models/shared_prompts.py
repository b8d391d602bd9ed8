"""ZoRRo Train for a loaded model: whether it can compute what samples share once, and the forest of a micro-batch.

The packed row of a micro-batch becomes a forest (:class:`arctic_kernels.zorro.PackedForest`): tokens with which several samples
start lie on it once, and attention lets each sample see its own. Everything else of the model runs unchanged, on fewer tokens.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from arctic_core.data import Batch
from arctic_core.errors import DataError, UnsupportedModelError
from arctic_kernels.zorro import PackedForest, ZorroError, check_model, choose_backend, use_forest
from arctic_kernels.zorro.attention.choice import VARIABLE

if TYPE_CHECKING:
    from arctic_core.config.client import Zorro

__all__ = ["SharedPrompts", "shared_forest", "shared_prompts"]

logger = logging.getLogger(__name__)

_TOLERANCE = 0.05  # relative; a token that sees another context moves logits by about their own size, rounding by far less


@dataclass(frozen=True)
class SharedPrompts:
    """Whether an engine computes shared prompts once, and why it does or does not."""

    active: bool
    reason: str


def shared_prompts(model: PreTrainedModel, setting: Zorro, *, trains: bool) -> SharedPrompts:
    """Decide for a model on its device by what its layers are, and by running it on a few tokens; the decision is logged.

    Args:
        model: Loaded by :func:`~arctic_core.models.factory.load_causal_lm`, whole, on its device.
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
        if setting == "auto" and choice.backend == "eager" and os.environ.get(VARIABLE) != "eager":
            return _alone(name, f"only a slow attention backend would do ({choice.reason})")
        _try(model, trains)
    except Exception as error:  # kernels that cannot run here may raise anything
        if setting == "on":
            raise UnsupportedModelError(
                f"zorro is on, but {name} cannot compute shared prompts once here: {error}",
                where=name,
                remedy="set zorro to auto or off",
            ) from error
        return _alone(name, str(error))
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

    Raises:
        DataError: The micro-batch is too large for one forest.
    """
    if len(batch) < 2:
        return None
    pack = partial(PackedForest.from_packed, batch.token_ids, batch.lengths, batch.prompt_lengths, device=device)
    try:
        forest = pack()
        if forest.num_tokens > max_tokens:
            forest = pack(min_shared_tokens=1)
    except ZorroError as error:
        raise DataError(str(error), where="micro-batch", remedy="lower micro_batch_tokens") from error
    return forest if forest.tokens_saved else None


def _try(model: PreTrainedModel, trains: bool) -> None:
    """Run the model on two samples of one prompt, with the prompt once and with each sample on its own.

    Raises:
        Exception: Whatever a layer or a kernel raises, or a :class:`ZorroError` where logits differ by more than rounding.
    """
    vocabulary = model.config.get_text_config().vocab_size
    samples = [(torch.tensor([1, 2, 3, 4, 5, *own]) * 7 % vocabulary).tolist() for own in ([6, 7], [8, 9, 10])]
    forest = PackedForest.from_sequences(samples, [1, 1], device=model.device, min_shared_tokens=1)
    lengths = [len(sample) for sample in samples]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(model.device)
    ids = torch.tensor([*samples[0], *samples[1]], device=model.device)
    was_training = model.training
    model.eval()
    try:
        with torch.set_grad_enabled(trains):
            with use_forest(model, forest):
                shared: Any = model(input_ids=forest.token_ids, position_ids=forest.position_ids, use_cache=False)
            parameter = next((p for p in model.parameters() if p.requires_grad and p.dim() == 1), None)
            if trains and parameter is not None:
                torch.autograd.grad(shared.logits.sum(), parameter)
        with torch.no_grad():
            offsets = (0, lengths[0], sum(lengths))
            alone: Any = model(input_ids=ids[None], position_ids=positions[None], cu_seqlens=offsets, use_cache=False)
    finally:
        model.train(was_training)
    rows = torch.from_numpy(np.concatenate([forest.sample_rows(i) for i in range(2)])).to(model.device)
    expected = alone.logits[0].float()
    error = float((shared.logits[0, rows].detach().float() - expected).norm() / expected.norm().clamp_min(1e-30))
    if not error <= _TOLERANCE:
        raise ZorroError(f"its logits differ from those of each sample on its own by {error:.2g} of their size")


def _queries(model: PreTrainedModel, trains: bool) -> torch.Tensor:
    """No queries, of the kind that the model's attention makes."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return torch.empty(0, heads, size, dtype=model.dtype, device=model.device, requires_grad=trains)


def _alone(name: str, reason: str) -> SharedPrompts:
    logger.warning("%s computes every sample on its own, also what samples share: %s", name, reason)
    return SharedPrompts(False, reason)
