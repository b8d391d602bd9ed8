"""From the nodes of a forest to the order of its tokens and to its index tables. Host only, numpy; device copies at the end.

Long index tensors (positions, rows, labels) are runs of consecutive numbers. Only the runs' starts and lengths are made on the
host; all of them go to the device in one copy, with the token ids, and are spread out there. ``repeat_interleave`` is told its
output's size, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from arctic_kernels.zorro.discovery import Runs

ALIGN = 4
"""Tables start at multiples of this many numbers: 16 bytes in int32."""


@dataclass(frozen=True)
class ForestStructure:
    """Where the nodes are, in level order. Numpy int64, on the host."""

    offsets_N1: np.ndarray
    """Where each node starts on the token axis, and the end: ``[N + 1]``."""
    parents_N: np.ndarray
    """Index of the parent, −1 for roots; always smaller than the node's own."""
    levels_N: np.ndarray
    """Number of ancestors; never decreases."""
    starts_N: np.ndarray
    """Position of the node's first token: how many tokens its ancestors hold."""

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens per node."""
        return np.diff(self.offsets_N1)

    @property
    def depth(self) -> int:
        """Number of levels."""
        return int(self.levels_N[-1]) + 1

    def level(self, level: int) -> slice:
        """The nodes of a level."""
        first, last = np.searchsorted(self.levels_N, [level, level + 1])
        return slice(int(first), int(last))


class Ranges(NamedTuple):
    """Runs of consecutive numbers. int64."""

    starts_S: np.ndarray
    counts_S: np.ndarray

    @property
    def total(self) -> int:
        """How many numbers."""
        return int(self.counts_S.sum())


class Part(NamedTuple):
    """The tables of one ancestor part; see :class:`arctic_kernels.zorro.forest.AncestorPart`."""

    query_level: int
    key_level: int
    q: slice
    k: slice
    cu_q_S1: np.ndarray
    cu_k_S1: np.ndarray


def level_order(runs: Runs) -> tuple[ForestStructure, np.ndarray, np.ndarray]:
    """Order nodes by level, then by parent, then the taller subtrees first, then as the caller's samples come.

    Returns:
        The structure; the sample that holds each node's tokens ``[N]``; the node that holds each sample's last token ``[B]``.
    """
    parents = runs.parents_N
    count, samples = len(parents), len(runs.nodes_B)
    first = np.full(count, samples)
    np.minimum.at(first, runs.nodes_B, np.arange(samples))
    level, height = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for node in range(count):
        if parents[node] >= 0:
            level[node] = level[parents[node]] + 1
    for node in range(count - 1, -1, -1):
        if parents[node] >= 0:
            height[parents[node]] = max(height[parents[node]], height[node] + 1)
            first[parents[node]] = min(first[parents[node]], first[node])
    new = np.full(count + 1, -1)  # new index of a node; that of "no parent" comes last
    order = np.empty(count, np.int64)
    done = 0
    for peers in _by_level(level):
        nodes = peers[np.lexsort((first[peers], -height[peers], new[parents[peers]]))]
        order[done : done + len(nodes)] = nodes
        new[nodes] = np.arange(done, done + len(nodes))
        done += len(nodes)
    starts = np.where(parents >= 0, runs.ends_N[parents], 0)
    offsets = np.concatenate([[0], np.cumsum((runs.ends_N - starts)[order])])
    structure = ForestStructure(offsets, new[parents[order]], level[order], starts[order])
    return structure, runs.sources_N[order], new[runs.nodes_B]


def ancestor_parts(structure: ForestStructure) -> Iterator[Part]:
    """The rectangles of attention between levels: for each query level, its ancestors from the roots down."""
    offsets, lengths = structure.offsets_N1, structure.lengths_N
    for query_level in range(1, structure.depth):
        queries = structure.level(query_level)
        ancestor = np.arange(queries.start, queries.stop)
        parts = []
        for key_level in range(query_level - 1, -1, -1):
            ancestor = structure.parents_N[ancestor]  # never decreases, as nodes are grouped by parent
            first, stop = int(ancestor[0]), int(ancestor[-1]) + 1
            counts = np.zeros(stop - first, np.int64)
            np.add.at(counts, ancestor - first, lengths[queries])
            cu_k = offsets[first : stop + 1] - offsets[first]
            q = slice(int(offsets[queries.start]), int(offsets[queries.stop]))
            k = slice(int(offsets[first]), int(offsets[stop]))
            parts.append(Part(query_level, key_level, q, k, np.concatenate([[0], np.cumsum(counts)]), cu_k))
        yield from reversed(parts)


def sample_ranges(structure: ForestStructure, nodes_B: np.ndarray, from_B: np.ndarray, to_B: np.ndarray) -> Ranges:
    """Rows of the tokens at the positions ``[from, to)`` of each sample, sample by sample, in order."""
    samples, columns = np.arange(len(nodes_B)), []
    node = nodes_B
    while len(node):
        start, offset = structure.starts_N[node], structure.offsets_N1[node]
        low = np.maximum(from_B[samples], start)
        high = np.minimum(to_B[samples], start + structure.lengths_N[node])
        columns.append((samples, offset + low - start, high - low))
        up = structure.parents_N[node]
        samples, node = samples[up >= 0], up[up >= 0]
    if not columns:
        return Ranges(np.zeros(0, np.int64), np.zeros(0, np.int64))
    sample, first, count = (np.concatenate(column) for column in zip(*reversed(columns), strict=True))
    some = np.flatnonzero(count > 0)
    some = some[np.argsort(sample[some], kind="stable")]  # roots come first already
    return Ranges(first[some], count[some])


def unite(ranges: Ranges) -> tuple[Ranges, Ranges]:
    """The numbers in any of the ranges, ascending and once each, and where the numbers of each range stand among them."""
    starts, counts = ranges
    if not len(starts):
        return ranges, ranges
    order = np.argsort(starts, kind="stable")
    low, high = starts[order], np.maximum.accumulate((starts + counts)[order])
    opens = np.concatenate([[True], low[1:] > high[:-1]])
    first = low[opens]
    size = high[np.concatenate([opens[1:], [True]])] - first
    before = np.cumsum(size) - size
    at = np.searchsorted(first, starts, side="right") - 1
    return Ranges(first, size), Ranges(before[at] + starts - first[at], counts)


def window_keys(structure: ForestStructure, window: int) -> tuple[Ranges, np.ndarray]:
    """For each node the rows of its last ``min(window − 1, start)`` path tokens and its own: ranges, and counts ``[N]``."""
    before_N = np.minimum(window - 1, structure.starts_N)
    counts_N = before_N + structure.lengths_N
    order, columns = np.arange(len(counts_N)), []
    node, from_N = order, structure.starts_N - before_N
    while len(node):
        low = np.maximum(from_N[order], structure.starts_N[node])
        first = structure.offsets_N1[node] + low - structure.starts_N[node]
        columns.append((order, first, structure.offsets_N1[node + 1] - first))
        more = from_N[order] < structure.starts_N[node]
        order, node = order[more], structure.parents_N[node[more]]
    owner, first, count = (np.concatenate(column) for column in zip(*reversed(columns), strict=True))
    stable = np.argsort(owner, kind="stable")
    return Ranges(first[stable], count[stable]), counts_N


class Tables:
    """Numbers on their way to a device: long data first, then small tables, in one int64 buffer and one copy."""

    def __init__(self, device: torch.device, data: int) -> None:
        """Plan for ``data`` numbers of long data."""
        self.device, self.data = device, data
        self._tables: list[np.ndarray] = []
        self._size = 0

    def add(self, table: np.ndarray) -> int:
        """Add a table; returns its number, for :meth:`Uploaded.ints` and the like."""
        self._tables.append(table)
        self._size += -(-len(table) // ALIGN) * ALIGN
        return len(self._tables) - 1

    def upload(self, pieces: list[np.ndarray]) -> Uploaded:
        """Fill the buffer with the long data and the tables, and copy it."""
        start = -(-self.data // ALIGN) * ALIGN
        if self.device.type == "cuda":
            pinned = torch.empty(start + self._size, dtype=torch.int64, pin_memory=True)
            host = pinned.numpy()
        else:  # numpy asks for huge pages
            host = np.empty(start + self._size, np.int64)
            pinned = torch.from_numpy(host)
        if pieces:
            np.concatenate(pieces, out=host[: self.data])
        slices, at = [], start
        for table in self._tables:
            host[at : at + len(table)] = table
            slices.append(slice(at - start, at - start + len(table)))
            at += -(-len(table) // ALIGN) * ALIGN
        moved = pinned.to(self.device, non_blocking=True)
        small = moved[start:].clone()
        return Uploaded(self._tables, slices, moved[: self.data], small, small.to(torch.int32))


class Uploaded(NamedTuple):
    """Tables on the device."""

    tables: list[np.ndarray]
    slices: list[slice]
    data: torch.Tensor
    longs: torch.Tensor
    shorts: torch.Tensor

    def ints(self, table: int) -> torch.Tensor:
        """A table as int32."""
        return self.shorts[self.slices[table]]

    def spread(self, starts: int, counts: int) -> torch.Tensor:
        """The numbers in the ranges that two tables describe, int64."""
        ranges = Ranges(self.tables[starts], self.tables[counts])
        if self.data.device.type == "cpu":
            return torch.from_numpy(spread_on_host(ranges))
        return spread_on_device(self.longs[self.slices[starts]], self.longs[self.slices[counts]], ranges.total)

    def gather(self, starts: int, counts: int) -> torch.Tensor:
        """The long data at these numbers."""
        if self.data.device.type != "cpu":
            return self.data[self.spread(starts, counts)]
        data, first, count = self.data.numpy(), self.tables[starts], self.tables[counts]
        pieces = [data[start:stop] for start, stop in zip(first.tolist(), (first + count).tolist(), strict=True)]
        return torch.from_numpy(np.concatenate([data[:0], *pieces]))


def spread_on_host(ranges: Ranges) -> np.ndarray:
    """Write out ranges: int64 ``[total]``."""
    out = np.empty(ranges.total, np.int64)
    numbers = np.arange(int(ranges.counts_S.max(initial=0)))
    at = 0
    for start, count in zip(ranges.starts_S.tolist(), ranges.counts_S.tolist(), strict=True):
        np.add(numbers[:count], start, out=out[at : at + count])
        at += count
    return out


def spread_on_device(starts_S: torch.Tensor, counts_S: torch.Tensor, total: int) -> torch.Tensor:
    """Write out ranges of ``total`` numbers on the device of the tables: int64 ``[total]``."""
    shift_S = starts_S - (torch.cumsum(counts_S, 0) - counts_S)
    numbers = torch.arange(total, device=starts_S.device)
    return numbers.add_(torch.repeat_interleave(shift_S, counts_S, output_size=total))


def _by_level(levels: np.ndarray) -> Iterator[np.ndarray]:
    """The nodes of each level."""
    order = np.argsort(levels, kind="stable")
    return iter(np.split(order, np.flatnonzero(np.diff(levels[order])) + 1))
