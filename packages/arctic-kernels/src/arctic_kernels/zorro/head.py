"""Log-probs and entropies of a forest's response tokens; see :mod:`arctic_kernels.head`.

Suffix legend: as there, and ``_T`` packed tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from arctic_kernels import head
from arctic_kernels.zorro.errors import ZorroError

if TYPE_CHECKING:
    from arctic_kernels.zorro.forest import PackedForest

__all__ = ["linear_logprob_entropy"]


def linear_logprob_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    forest: PackedForest,
    *,
    temperature: float | torch.Tensor = 1.0,
    bias_V: torch.Tensor | None = None,
    entropy: bool = True,
    scale: float = 1.0,
    softcap: float | None = None,
    budget_bytes: int = head.DEFAULT_BUDGET_BYTES,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Score each response token by the hidden state before it, once for all samples that share it.

    Only rows that predict a response token are multiplied; the row in front of a branch scores the first token of each branch.
    Labels of one row with different temperatures are scored as separate rows.

    Args:
        hidden_TD: Last hidden states of the packed tokens, ``[T, D]``.
        weight_VD: The output layer's weight, ``[V, D]``, of the same type.
        forest: The samples.
        temperature: A positive number, or one for each response token in the order of samples, ``[R]``.
        bias_V: The output layer's bias.
        entropy: Whether to compute entropies.
        scale: Multiplies the logits, before soft-capping.
        softcap: Bounds the logits smoothly.
        budget_bytes: Most bytes of temporaries.
        backend: As for :func:`arctic_kernels.head.linear_logprob_entropy`.

    Returns:
        Log-probs ``[R]`` and, where asked for, entropies ``[R]``, in nats, in the caller's order of samples.

    Raises:
        ZorroError: The hidden states are not those of the forest's tokens.
        ValueError: As :func:`arctic_kernels.head.linear_logprob_entropy`.
    """
    tokens = forest.token_ids.numel()
    if hidden_TD.dim() != 2 or len(hidden_TD) != tokens:
        raise ZorroError(
            f"hidden states have shape {tuple(hidden_TD.shape)}, the forest has {tokens} tokens: give [tokens, hidden size], "
            "without a batch dimension"
        )
    output = head.linear_logprob_entropy(
        hidden_TD,
        weight_VD,
        forest.labels_R,
        rows_R=forest.rows_P[forest.row_of_R],
        temperature=temperature,
        bias_V=bias_V,
        entropy=entropy,
        scale=scale,
        softcap=softcap,
        budget_bytes=budget_bytes,
        backend=backend,
    )
    return output.logprobs_R, output.entropy_R
