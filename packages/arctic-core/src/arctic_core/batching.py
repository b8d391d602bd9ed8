"""How a batch is cut: shards per rank and micro-batches under a token budget, and results put back in the caller's order.

The number of micro-batches is decided here, once for all ranks, so that no rank waits for another. Needs numpy only.

Suffix legend: ``_R`` response tokens of a batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arctic_core.data import Batch
from arctic_core.errors import DataError


@dataclass(frozen=True)
class BatchPlan:
    """Which samples each rank computes, in which micro-batches."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """``ranks[r][m]``: indices of the samples in micro-batch ``m`` of rank ``r``; every rank has equally many micro-batches,
    and every sample is in exactly one."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])

    def merge(self, batch: Batch, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Put per-rank results (each rank's micro-batches end to end) back in the batch's order, ``[R]``.

        Raises:
            DataError: A rank returned another number of values than it has response tokens.
        """
        lengths = batch.response_lengths
        pieces: list[np.ndarray] = [np.zeros(0, np.float32)] * len(batch)
        for number, (rank, output) in enumerate(zip(self.ranks, outputs, strict=True)):
            order = [i for indices in rank for i in indices]
            if len(output) != lengths[order].sum():
                raise DataError(
                    f"{len(output)} values for {lengths[order].sum()} response tokens", where=f"output of rank {number}"
                )
            start = 0
            for i in order:
                pieces[i] = output[start : start + lengths[i]]
                start += lengths[i]
        return np.concatenate([np.zeros(0, np.float32), *pieces])


def plan_batch(batch: Batch, *, ranks: int, max_tokens: int, micro_batches: int | None = None) -> BatchPlan:
    """Spread a batch over ranks and micro-batches, balanced by tokens and depending on the lengths alone.

    Longest samples are placed first, each into the emptiest bin (Graham's LPT rule, 1969), with the smallest number of
    micro-batches for which no bin exceeds ``max_tokens``. An empty batch gets one empty micro-batch per rank.

    Args:
        ranks: Number of ranks.
        max_tokens: Most tokens of one micro-batch; never exceeded.
        micro_batches: Micro-batches per rank, instead of the smallest number; those left over are empty.

    Raises:
        DataError: A sample alone exceeds ``max_tokens``, or the batch does not fit ``micro_batches``.
    """
    lengths = batch.lengths
    over = np.flatnonzero(lengths > max_tokens)
    if over.size:
        raise DataError(
            f"sample {over[0]} has {lengths[over[0]]} tokens, a micro-batch holds {max_tokens}",
            where="batch",
            remedy="raise micro_batch_tokens or shorten the sample",
        )
    if micro_batches is not None:
        bins = _fill(lengths, ranks * micro_batches, max_tokens)
        if bins is None:
            raise DataError(
                f"{int(lengths.sum())} tokens do not fit {ranks} x {micro_batches} micro-batches of {max_tokens} tokens",
                where="batch",
                remedy="ask for more micro-batches or raise micro_batch_tokens",
            )
        return _assign(bins, lengths, ranks)
    count = max(1, -(-int(lengths.sum()) // (ranks * max_tokens)))
    while (bins := _fill(lengths, ranks * count, max_tokens)) is None:  # ends: with a bin per sample everything fits
        count += 1
    return _assign(bins, lengths, ranks)


def _fill(lengths: np.ndarray, bins: int, max_tokens: int) -> list[list[int]] | None:
    """LPT into ``bins`` bins, or ``None`` where a bin would overflow."""
    contents: list[list[int]] = [[] for _ in range(bins)]
    loads = [(0, number) for number in range(bins)]  # a heap: all equal, so already in order
    for i in np.argsort(-lengths, kind="stable").tolist():
        load, number = loads[0]
        if load + lengths[i] > max_tokens:
            return None
        contents[number].append(i)
        heapq.heapreplace(loads, (load + int(lengths[i]), number))
    return contents


def _assign(bins: list[list[int]], lengths: np.ndarray, ranks: int) -> BatchPlan:
    """Deal the bins out, largest first, to the rank with least work; a rank's micro-batches run from large to small, so that
    ranks which step together carry similar loads."""
    per_rank = len(bins) // ranks
    bins = sorted((sorted(indices) for indices in bins), key=lambda b: (-int(lengths[b].sum()), b))
    work: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for indices in bins:
        rank = min((r for r in range(ranks) if len(work[r]) < per_rank), key=lambda r: (loads[r], len(work[r]), r))
        work[rank].append(tuple(indices))
        loads[rank] += int(lengths[indices].sum())
    return BatchPlan(tuple(tuple(rank) for rank in work))
