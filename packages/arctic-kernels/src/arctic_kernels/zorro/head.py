"""Log-probs and entropies of the response tokens of a forest, from hidden states and the output layer's weight.

Suffix legend: ``_T`` packed tokens, ``_D`` hidden size, ``_V`` vocabulary, ``_R`` response tokens in the caller's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from arctic_kernels.head import DEFAULT_BUDGET_BYTES
from arctic_kernels.head import linear_logprob_entropy as score
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
    entropy: bool = True,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores of every response token, in the caller's order of samples; differentiable in hidden states and weight.

    A row that ends a shared node predicts several tokens; it is taken once for each.

    Args:
        hidden_TD: Last hidden states of the packed row, ``[T, D]``.
        weight_VD: The output layer's weight, ``[V, D]``, of the same type.
        forest: What the packed row holds.
        temperature: Divides the logits: a positive number, or one per response token ``[R]``.
        entropy: Whether entropies are wanted.
        budget_bytes: Most bytes of temporaries (see :mod:`arctic_kernels.head`).

    Returns:
        Log-probs ``[R]`` and entropies ``[R]`` (or ``None``), in nats, float32, or float64 for float64 weights.

    Raises:
        ZorroError: The hidden states are not those of the forest.
        ValueError: What :func:`arctic_kernels.head.linear_logprob_entropy` refuses.
    """
    if hidden_TD.dim() != 2 or hidden_TD.shape[0] != forest.num_tokens:
        raise ZorroError(f"hidden states {tuple(hidden_TD.shape)} for a forest of {forest.num_tokens} tokens: give [T, D]")
    rows_R = forest.rows_P[forest.row_of_R]
    output = score(
        hidden_TD[rows_R], weight_VD, forest.labels_R, temperature=temperature, entropy=entropy, budget_bytes=budget_bytes
    )
    return output.logprobs_R, output.entropy_R
