"""The self-check of ZoRRo Train in an engine: a slice of a real batch, with what it shares computed once, and without.

Every rank makes the same two forward passes, since the ranks of a sharded model wait for each other in them; one that has no
slice makes them on a dummy token.

Suffix legend: ``_S`` scores of the slice: log-probs, then entropies.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from arctic_core.data import Batch, Sample
from arctic_core.errors import UnsupportedModelError
from arctic_core.models.scoring import pack

SHARED_TOKENS, OWN_TOKENS = 128, 64
"""Most tokens of the slice that its two samples share, and that each has for itself."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest error, as a part of the spread of the scores. Rounding stays 10 times below it, a wrong key does not."""


@torch.no_grad()
def sharing_error(module: nn.Module, batch: Batch | None, device: str) -> float:
    """How far scores with shared prompts are from scores of each sample alone; runs the module twice.

    Args:
        module: Called like a :class:`~arctic_core.models.scoring.ScoringModule`, in evaluation mode.
        batch: A micro-batch in which samples share a prefix; ``None`` takes part without a slice.
        device: Where the module computes.

    Returns:
        Norm of the difference over the norm of the spread of the scores; 0 without a slice.
    """
    part = Batch.from_samples([]) if batch is None else shared_slice(batch)
    scores = []
    for max_tokens in (None, 0):  # without a forest, and with one that shares all it can
        logprobs_R, entropy_R, *_ = module(pack(part, device, forest_tokens=max_tokens), True)
        scores.append(torch.cat([logprobs_R, entropy_R]).double())
    alone_S, shared_S = scores
    if not len(alone_S):
        return 0.0
    spread = max(float((alone_S - alone_S.mean()).norm()), 1e-2 * float(alone_S.norm()))
    error = float((shared_S - alone_S).norm()) / max(spread, 1e-30)
    return error if np.isfinite(error) else np.inf


def check_error(error: float, dtype: torch.dtype, where: str) -> None:
    """Refuse an error above rounding.

    Raises:
        UnsupportedModelError: It is.
    """
    allowed = TOLERANCES.get(dtype, 0.2)
    if error > allowed:
        raise UnsupportedModelError(
            f"scores with shared prompts computed once differ from scores of each sample alone (relative error {error:.2e}, "
            f"allowed {allowed:.0e})",
            where=where,
            remedy="set zorro to off, and report the model",
        )


def shared_slice(batch: Batch) -> Batch:
    """The two samples that share most, cut around the token at which they part; all their tokens but the first are scored."""
    rows = sorted(np.split(batch.token_ids, batch.cu_seqlens[1:-1]), key=lambda row: row.astype(">i4").tobytes())
    common = [_common(*pair) for pair in pairwise(rows)]  # in this order the best pair are neighbours
    best = int(np.argmax(common))
    span = slice(max(0, common[best] - SHARED_TOKENS), common[best] + OWN_TOKENS)
    return Batch.from_samples(Sample(token_ids=row[span], prompt_length=1) for row in rows[best : best + 2])


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """How many tokens both begin with."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if differ.size else size
