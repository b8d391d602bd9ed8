"""Attention over one row of sequences laid end to end, without padding and without a ``[T, T]`` mask.

Installed through transformers' attention interface under the name :data:`PACKED_ATTENTION`, so that every architecture that
uses the interface runs unpatched. The model's forward is given ``cu_seqlens`` as a keyword, which transformers passes down
to each attention layer; each sequence is then a slice handled by torch's scaled-dot-product attention (causal, grouped
query heads, sliding window, the layer's own scale). No mask function is registered beside it: transformers then builds no
mask at all.

Suffix legend: ``_T`` tokens of the packed row, ``_L`` tokens of one sequence, ``_H`` query heads, ``_K`` key/value heads,
``_D`` head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from arctic_core.errors import UnsupportedModelError

PACKED_ATTENTION = "arctic_packed"
"""Name under which transformers knows the function: ``attn_implementation="arctic_packed"``."""

_SCORE_MODIFIERS = {"s_aux": "attention sinks", "softcap": "soft-capped attention scores", "position_bias": "position biases"}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seqlens: Sequence[int] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of a packed row; the signature is transformers'.

    Args:
        query: ``[1, H, T, D]``, any floating type.
        key: ``[1, K, T, D]`` with ``K`` dividing ``H``.
        value: ``[1, K, T, D]`` (its head dimension may differ).
        attention_mask: Must be ``None``.
        cu_seqlens: Host offsets of the sequences, from 0 to ``T``.
        scaling: Factor of the scores; ``None`` means ``D ** -0.5``.
        sliding_window: A token sees itself and the ``sliding_window - 1`` tokens before it; ``None`` means all before it.

    Returns:
        ``([1, T, H, D], None)``.

    Raises:
        UnsupportedModelError: The model did not pass ``cu_seqlens`` down, or asks for something besides plain attention.
    """
    _refuse_unsupported(module, attention_mask, cu_seqlens, dropout, kwargs)
    assert cu_seqlens is not None
    rows = []
    for start, stop in itertools.pairwise(cu_seqlens):
        q_HLD, k_KLD, v_KLD = (tensor[:, :, start:stop] for tensor in (query, key, value))
        rows.append(_attend(q_HLD, k_KLD, v_KLD, scale=scaling, window=sliding_window))
    out_HTD = rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)
    return out_HTD.transpose(1, 2).contiguous(), None


def _attend(
    q_HLD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor, *, scale: float | None, window: int | None
) -> torch.Tensor:
    length = q_HLD.shape[2]
    grouped = q_HLD.shape[1] != k_KLD.shape[1]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(q_HLD, k_KLD, v_KLD, is_causal=True, scale=scale, enable_gqa=grouped)
    positions = torch.arange(length, device=q_HLD.device)
    distance = positions[:, None] - positions[None, :]
    mask_LL = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(q_HLD, k_KLD, v_KLD, attn_mask=mask_LL, scale=scale, enable_gqa=grouped)


def _refuse_unsupported(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    cu_seqlens: Sequence[int] | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    problem = ""
    if cu_seqlens is None:
        problem = "was not given the offsets of the packed sequences"
    elif attention_mask is not None:
        problem = "builds an attention mask of its own"
    elif kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        problem = "is not causal"
    elif dropout:
        problem = f"applies dropout {dropout}"
    else:
        problem = next((f"uses {text}" for key, text in _SCORE_MODIFIERS.items() if kwargs.get(key) is not None), "")
    if problem:
        raise UnsupportedModelError(f"{name} {problem}, which packed attention cannot do", where=name)


def register() -> None:
    """Make the function known to transformers. Idempotent."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


register()
