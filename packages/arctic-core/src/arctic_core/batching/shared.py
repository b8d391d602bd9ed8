"""What the samples of a group start with in common, as far as an engine that computes it once gains by that.

Suffix legend: ``_B`` samples, ``_G`` groups.
"""

from __future__ import annotations

import numpy as np

from arctic_core.data import Batch

MIN_SHARED_TOKENS = 64
QUERIED_PER_NODE = 4096
"""What sharing costs, as in :mod:`arctic_kernels.zorro.discovery`, which a client without torch need not have."""


def group_prefixes(batch: Batch, group_B: np.ndarray) -> np.ndarray:
    """How many tokens the prompts of each group have in common, int64 ``[G]``; 0 where computing them once gains nothing.

    Linear in the tokens of the prompts. A group of ``k`` samples with a common prefix of ``p`` tokens and ``r`` tokens besides
    gains ``(k − 1)·p`` tokens, and loses about ``63·(1 + r/4096)``.

    Args:
        batch: The samples.
        group_B: Number of each sample's group, ``0..G − 1``, all of which occur.
    """
    sizes_G = np.bincount(group_B)
    tokens_G = np.bincount(group_B, weights=batch.lengths)
    prefix_G = np.full(len(sizes_G), np.iinfo(np.int64).max)
    np.minimum.at(prefix_G, group_B, batch.prompt_lengths)
    _, first_G = np.unique(group_B, return_index=True)
    compared_B = _worth(prefix_G, sizes_G, tokens_G)[group_B]
    compared_B[first_G] = False
    tokens, offsets_B = batch.token_ids, batch.cu_seqlens
    for i in np.flatnonzero(compared_B).tolist():
        group = group_B[i]
        length, start, first = prefix_G[group], offsets_B[i], offsets_B[first_G[group]]
        differ = tokens[start : start + length] != tokens[first : first + length]
        at = differ.argmax() if length else 0
        if length and differ[at]:
            prefix_G[group] = at
    return np.where(_worth(prefix_G, sizes_G, tokens_G), prefix_G, 0)


def _worth(prefix_G: np.ndarray, sizes_G: np.ndarray, tokens_G: np.ndarray) -> np.ndarray:
    """Where computing prefixes of these lengths once gains more than it costs."""
    saved_G = (sizes_G - 1) * prefix_G
    rests_G = tokens_G - sizes_G * prefix_G
    return (prefix_G >= MIN_SHARED_TOKENS) & (saved_G >= (MIN_SHARED_TOKENS - 1) * (1 + rests_G / QUERIED_PER_NODE))
