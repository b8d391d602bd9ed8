"""Plans of a batch: which rank computes which samples, in which micro-batches, and the way back.

The number of micro-batches is decided here, once for all ranks, so that no rank waits for another.

Suffix legend: ``_R`` response tokens of a batch, ``_B`` samples, ``_G`` groups by first appearance, ``_K`` values per token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from arctic_core.batching.balance import best_fit, deal, pack
from arctic_core.batching.cost import CostModel
from arctic_core.batching.shared import group_prefixes
from arctic_core.data import Batch, Group
from arctic_core.errors import DataError

#: A group that costs more than this many ranks' fair shares is split: whole, it would keep the other ranks waiting.
DOMINANT = 1.25

_DEFAULT_COST = CostModel()


@dataclass(frozen=True)
class BatchPlan:
    """Which samples each rank computes, in which micro-batches."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """``ranks[r][m]``: indices of the samples in micro-batch ``m`` of rank ``r``; every rank has equally many micro-batches,
    and every sample is in exactly one. Those without samples are fillers, which weigh nothing."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])

    @cached_property
    def order(self) -> np.ndarray:
        """The samples as they are computed, rank after rank, int64 ``[B]``: planned place to index in the batch."""
        return np.array([i for rank in self.ranks for indices in rank for i in indices], np.int64)

    @cached_property
    def inverse(self) -> np.ndarray:
        """Index in the batch to planned place, int64 ``[B]``: ``order[inverse]`` and ``inverse[order]`` count up from 0."""
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(len(self.order))
        return inverse

    def merge(self, batch: Batch, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Put per-rank results (each rank's micro-batches end to end) back in the batch's order.

        Args:
            outputs: Per rank ``[R]`` or ``[R, K]`` over its response tokens, of one dtype, which is kept. A rank without
                response tokens may return an empty array of any shape.

        Raises:
            DataError: The plan is of another batch, a rank returned another number of values than it has response tokens,
                or ranks returned different widths.
        """
        if len(batch) != len(self.order) or len(outputs) != len(self.ranks):
            raise DataError(
                f"{len(outputs)} outputs and {len(batch)} samples for a plan of {len(self.ranks)} ranks and "
                f"{len(self.order)} samples",
                where="BatchPlan.merge",
            )
        lengths_B = batch.response_lengths
        for number, (rank, output) in enumerate(zip(self.ranks, outputs, strict=True)):
            expected = int(lengths_B[[i for indices in rank for i in indices]].sum())
            if len(output) != expected:
                raise DataError(f"{len(output)} values for {expected} response tokens", where=f"output of rank {number}")
        filled = [output for output in outputs if len(output)] or [max(outputs, key=lambda output: output.ndim)]
        if len({output.shape[1:] for output in filled}) > 1:
            raise DataError(f"ranks differ in shape: {[output.shape for output in filled]}", where="BatchPlan.merge")
        planned = np.concatenate(filled)
        stops_B = np.cumsum(lengths_B[self.order])[self.inverse].tolist()
        starts_B = (stops_B - lengths_B).tolist()
        return np.concatenate([planned[:0], *(planned[a:b] for a, b in zip(starts_B, stops_B, strict=True))])


def plan_batch(
    batch: Batch,
    *,
    ranks: int,
    max_tokens: int,
    micro_batches: int | None = None,
    cost: CostModel = _DEFAULT_COST,
    shared_prompts: bool = False,
) -> BatchPlan:
    """Spread a batch over ranks and micro-batches, by the lengths, the groups and the cost model alone.

    **Units.** What is not cut further is a unit: a whole group (samples with equal ``batch.groups``), so that its samples
    lie side by side in one micro-batch, where they can share their prefix. A group that cannot be whole becomes parts of
    similar cost, each a unit: one with more than ``max_tokens`` tokens; one that costs more than :data:`DOMINANT` times a
    rank's fair share (into parts of about a share); and where there are fewer units than ranks, the groups that are
    costliest per part, until every rank has one or all samples are apart.

    **Shared prompts.** With ``shared_prompts`` a unit counts the tokens that an engine computes which computes a group's common
    prompt once: the prompt, and what each sample has besides; costs likewise. A group that is cut has its prompt in each part,
    so it is cut by cost only where what is *not* shared costs more than :data:`DOMINANT` fair shares. Tokens that units share
    with each other count in each, so a micro-batch may hold less than it is counted, and never more.

    **Ranks.** Every rank gets ⌊U/ranks⌋ or ⌈U/ranks⌉ of the ``U`` units: sizes differ by at most one group where groups are
    whole, by at most one sample where all groups are of one, by at most one part otherwise. The ranks' costs differ by at
    most the cost of the costliest unit (:func:`~arctic_core.batching.balance.deal`).

    **Micro-batches.** No micro-batch exceeds ``max_tokens``. All ranks have the same number, the largest that
    best-fit-decreasing needs for the units of any rank: at most ⌈U/ranks⌉, and below 2·t/max_tokens + 1 for ``t`` the tokens
    of that rank. A rank's micro-batches are of similar cost where the budget allows, and run from costly to cheap, so that
    ranks which step together carry similar loads. An empty batch gets one empty micro-batch per rank.

    With ``micro_batches`` given, groups are split until every micro-batch has a unit. Where that many do not hold whole
    units, single samples are the units; where these do not fit either, the bins of a best-fit-decreasing packing of the
    whole batch are, and only then may the numbers of samples on two ranks differ by more than one unit.

    Args:
        ranks: Number of ranks.
        max_tokens: Most tokens of one micro-batch; never exceeded.
        micro_batches: Micro-batches per rank, instead of the smallest number.
        cost: What samples cost.
        shared_prompts: Count the prompt of a group once, not in each sample.

    Raises:
        DataError: A sample alone exceeds ``max_tokens``, or no packing into ``micro_batches`` was found. One is always
            found where ``(ranks * micro_batches - 4) * 9 / 11`` would do.
    """
    if ranks < 1 or (micro_batches is not None and micro_batches < 1):
        raise DataError(f"{ranks} ranks with {micro_batches} micro-batches: both start at 1", where="plan_batch")
    lengths_B = batch.lengths
    over = np.flatnonzero(lengths_B > max_tokens)
    if over.size:
        raise DataError(
            f"sample {over[0]} has {lengths_B[over[0]]} tokens, a micro-batch holds {max_tokens}",
            where="batch",
            remedy="raise micro_batch_tokens or shorten the sample",
        )
    group_B = _number(batch.groups)
    prefix_G = group_prefixes(batch, group_B) if shared_prompts else np.zeros(group_B.max(initial=-1) + 1, np.int64)
    prefix_costs_G = cost.costs(prefix_G)
    cutter = _Cutter(
        group_B=group_B,
        tokens_B=lengths_B - prefix_G[group_B],
        costs_B=cost.costs(lengths_B) - prefix_costs_G[group_B],
        prefix_tokens_G=prefix_G,
        prefix_costs_G=prefix_costs_G,
        ranks=ranks,
        max_tokens=max_tokens,
    )
    if micro_batches is None:
        return cutter.plan(cutter.groups(ranks), at_least=1)
    for units in cutter.finer_and_finer(ranks * micro_batches):
        plan = cutter.plan(units, at_least=micro_batches)
        if plan.micro_batches == micro_batches:
            return plan
    raise DataError(
        f"{int(lengths_B.sum())} tokens do not fit {ranks} x {micro_batches} micro-batches of {max_tokens} tokens",
        where="batch",
        remedy="ask for more micro-batches or raise micro_batch_tokens",
    )


Unit = list[int]
"""Samples that stay together."""


def _number(groups: Sequence[Group]) -> np.ndarray:
    """The number of each sample's group, int64 ``[B]``."""
    numbers: dict[Group, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], np.int64)


@dataclass(frozen=True)
class _Cutter:
    """One batch and what it is cut for. Samples count without what their group shares, which each unit counts once."""

    group_B: np.ndarray
    tokens_B: np.ndarray
    costs_B: np.ndarray
    prefix_tokens_G: np.ndarray
    prefix_costs_G: np.ndarray
    ranks: int
    max_tokens: int

    def finer_and_finer(self, wanted: int) -> Iterator[list[Unit]]:
        """Units to try for ``wanted`` bins in all."""
        yield self.groups(wanted)
        yield [[i] for i in range(len(self.tokens_B))]
        yield best_fit((self.tokens_B + self.prefix_tokens_G[self.group_B]).tolist(), self.max_tokens)

    def groups(self, wanted: int) -> list[Unit]:
        """The groups, split where they must be, and until there are ``wanted`` units or all samples are apart."""
        if not len(self.group_B):
            return []
        sizes_G = np.bincount(self.group_B)
        tokens_G = np.bincount(self.group_B, self.tokens_B).astype(np.int64)
        costs_G = np.bincount(self.group_B, self.costs_B)
        shares_G = costs_G * self.ranks / (costs_G + self.prefix_costs_G).sum()  # of what a rank should get
        by_cost_G = np.where(shares_G > DOMINANT, np.ceil(shares_G), 1).astype(np.int64)
        room_G = np.maximum(self.max_tokens - self.prefix_tokens_G, 1)
        parts_G = np.minimum(sizes_G, np.maximum(by_cost_G, -(-tokens_G // room_G)))
        _add_parts(parts_G, sizes_G, self.prefix_costs_G, costs_G, min(wanted, len(self.group_B)) - int(parts_G.sum()))
        members = np.argsort(self.group_B, kind="stable").tolist()
        ends = np.cumsum(sizes_G).tolist()
        groups = [members[end - size : end] for end, size in zip(ends, sizes_G.tolist(), strict=True)]
        return [unit for group, count in zip(groups, parts_G.tolist(), strict=True) for unit in self._split(group, count)]

    def _split(self, group: Unit, parts: int) -> list[Unit]:
        """At least so many parts, within the budget, each in ascending order."""
        if parts == 1:
            return [group]
        tokens, costs = self.tokens_B[group].tolist(), self.costs_B[group].tolist()
        room = self.max_tokens - int(self.prefix_tokens_G[self.group_B[group[0]]])
        bins = pack(tokens, costs, room, parts, best_fit(tokens, room))
        return [[group[place] for place in sorted(places)] for places in bins]

    def plan(self, units: list[Unit], at_least: int) -> BatchPlan:
        """Deal units to ranks and pack each rank's into micro-batches, equally many everywhere."""
        tokens, costs = (sums.tolist() for sums in self._sums(units))
        shares = deal(costs, self.ranks)
        tightest = [best_fit([tokens[u] for u in share], self.max_tokens) for share in shares]
        count = max(at_least, *(len(bins) for bins in tightest))
        ranks = []
        for share, bins in zip(shares, tightest, strict=True):
            packed = pack([tokens[u] for u in share], [costs[u] for u in share], self.max_tokens, count, bins)
            rank = [sorted(share[place] for place in places) for places in packed]
            rank.sort(key=lambda chosen: -sum(costs[u] for u in chosen))
            ranks.append(tuple(tuple(i for u in chosen for i in units[u]) for chosen in rank))
        return BatchPlan(tuple(ranks))

    def _sums(self, units: list[Unit]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and costs of each unit."""
        flat = np.fromiter(chain.from_iterable(units), np.int64, len(self.tokens_B))
        numbers = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
        groups = len(self.prefix_tokens_G)
        once = np.unique(numbers * groups + self.group_B[flat])  # each unit with each group that is in it

        def total(own_B: np.ndarray, shared_G: np.ndarray) -> np.ndarray:
            own = np.bincount(numbers, own_B[flat], len(units))
            return own + np.bincount(once // groups, shared_G[once % groups], len(units)) if groups else own

        tokens, costs = total(self.tokens_B, self.prefix_tokens_G), total(self.costs_B, self.prefix_costs_G)
        return tokens.astype(np.int64), costs


def _add_parts(parts: np.ndarray, sizes: np.ndarray, fixed: np.ndarray, costs: np.ndarray, missing: int) -> None:
    """Split further, in place: ``missing`` times the group that is costliest per part, while it has samples to part."""
    if missing <= 0:
        return
    costliest = [(-fixed[g] - costs[g] / parts[g], g) for g in np.flatnonzero(parts < sizes).tolist()]
    heapq.heapify(costliest)
    for _ in range(missing):
        g = costliest[0][1]
        parts[g] += 1
        if parts[g] < sizes[g]:
            heapq.heapreplace(costliest, (-fixed[g] - costs[g] / parts[g], g))
        else:
            heapq.heappop(costliest)
