"""Two partitions: items dealt to ranks in equal numbers, and items packed into bins that hold so many tokens.

Both are deterministic: ties go to the item, and to the bin, that comes first. An item is named by its place in the lists.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Give every rank ⌊n/ranks⌋ or ⌈n/ranks⌉ items, of similar total cost: the totals differ by at most the costliest item.

    Costliest first, each to the rank that has least among those that may have more (Graham's LPT rule with a limit on the
    number). Why the bound holds, for ranks ``a`` and ``b``: say that ``a`` leads when it gets its item ``i + 1`` before ``b``
    has its item ``i``. ``b`` may then have more too, so ``a`` has no more cost than ``b``. From the last such moment on (or
    from the start), after the item that ``a`` gets first, every further item of ``a`` is preceded by one of ``b``, which
    costs no less; so ``a`` ends ahead by at most that first item.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    full, extra = divmod(len(costs), ranks)  # so many items each, and one more on so many ranks
    open_ranks = [(0.0, rank) for rank in range(ranks)]  # a heap: all equal, so already in order
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):  # stable, here and below
        while not extra and len(shares[open_ranks[0][1]]) == full:  # the extras went to others since
            heapq.heappop(open_ranks)
        total, rank = open_ranks[0]
        extra -= len(shares[rank]) == full
        shares[rank].append(item)
        if len(shares[rank]) > full:
            heapq.heappop(open_ranks)
        else:
            heapq.heapreplace(open_ranks, (total + costs[item], rank))
    return shares


def pack(tokens: Sequence[int], costs: Sequence[float], capacity: int, at_least: int, bins: list[list[int]]) -> list[list[int]]:
    """Bins of at most ``capacity`` tokens and similar cost, ``at_least`` so many, or else as many as ``bins`` has.

    Bins are empty only where there are fewer items than bins.

    Args:
        bins: What :func:`best_fit` found: the answer where no more even one fits.
    """
    count = max(len(bins), at_least)
    for weights in (costs, tokens):  # by tokens the emptiest bin comes first, so more fits
        if (even := _longest_first(weights, tokens, capacity, count)) is not None:
            return even
    bins = bins.copy()
    while len(bins) < count and len(largest := max(bins, key=len, default=[])) > 1:
        bins.remove(largest)
        bins += [largest[::2], largest[1::2]]
    return bins + [[] for _ in range(count - len(bins))]


def best_fit(tokens: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing: the longest item first, into the fullest bin that has room, or a new one.

    At most 11/9 of the smallest possible number of bins, and 4 more (Johnson et al. 1974, SIAM J. Comput. 3(4)). Any two
    bins hold more than ``capacity`` together, so it is below 2·Σ tokens/capacity + 1.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        place = bisect_left(room, (tokens[i], -1))
        if place == len(room):
            left, number = capacity, len(bins)
            bins.append([])
        else:
            left, number = room.pop(place)
        bins[number].append(i)
        insort(room, (left - tokens[i], number))
    return bins


def _longest_first(weights: Sequence[float], tokens: Sequence[int], capacity: int, count: int) -> list[list[int]] | None:
    """The heaviest item first, each into the lightest bin (Graham's LPT rule, 1969); ``None`` where that bin has no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [capacity] * count
    loads = [(0.0, number) for number in range(count)]  # a heap: all equal, so already in order
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        load, number = loads[0]
        if tokens[i] > room[number]:
            return None
        bins[number].append(i)
        room[number] -= tokens[i]
        heapq.heapreplace(loads, (load + weights[i], number))
    return bins
