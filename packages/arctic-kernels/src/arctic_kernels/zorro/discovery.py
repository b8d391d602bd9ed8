"""Which runs of tokens samples share: an exact trie of the samples, then the choice of the nodes worth having. Host only.

**Finding.** Samples that agree so far are sorted into classes by a hash of their next few tokens (compared in full on a hit).
In a class every sample is compared, token by token, with the longest one; those that leave it at the same token are sorted
into classes again from there on. So a token is compared about once, whatever the depth, and nothing rests on a hash alone. A
sample that ends while it still agrees makes no node: it is a piece of the longer one's path.

**Choosing.** An inner node ``v`` of ``length`` tokens is computed once instead of once in each of its ``k`` children, and so
saves ``(k - 1) · length`` tokens. It costs one more partial attention, and one more merge, for each of the ``queried`` tokens
below it. In tokens, with ``m = min_shared_tokens``::

    cost(v) = (m − 1) · (1 + queried / 4096)        and  length >= m

For the default ``m = 64`` that is 63 tokens for the shorter calls, and 1/65 token per queried token: a merge moves three rows
of the attention output and rounds up one tile of keys, about 1.6 % of what a token costs in a layer of a 4B model. ``m = 1``
makes sharing free, so every shared token is shared. A node that is not kept is copied into each of its children. The choice
that needs fewest tokens, costs included, is found exactly: children first, one value for each ancestor that may be the nearest
kept one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

QUERIED_PER_NODE = 4096
"""Tokens below a node that cost as much as the node itself."""
KEY_TOKENS = 64
"""Most tokens that are hashed to sort samples into classes."""


class Runs(NamedTuple):
    """The chosen nodes, parents before children, and where every sample ends. All int64."""

    parents_N: np.ndarray
    """Index of the parent, −1 for roots."""
    ends_N: np.ndarray
    """Position after the node's last token; the node starts where its parent ends."""
    sources_N: np.ndarray
    """A sample that holds the node's tokens."""
    nodes_B: np.ndarray
    """The node that holds the last token of each sample."""


@dataclass
class Trie:
    """The samples' exact trie. Nodes are appended parents first; leaves are the nodes without children."""

    offsets_B: list[int]
    lengths_B: list[int]
    parents: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    followed: dict[int, int] = field(default_factory=dict)
    """Samples that are a piece of another one's path: the other one."""
    pending: list[tuple[list[int], int, int]] = field(default_factory=list)
    """Samples yet to be added, how many tokens they agree on, and the node that ends there."""

    def add(self, parent: int, end: int, source: int) -> int:
        """Append a node; returns its index."""
        self.parents.append(parent)
        self.ends.append(end)
        self.sources.append(source)
        return len(self.ends) - 1


def find_runs(tokens: np.ndarray, offsets_B: np.ndarray, lengths_B: np.ndarray, min_shared_tokens: int) -> Runs:
    """Share prefixes of any depth.

    Args:
        tokens: The samples' tokens, one after the other: integers ``[tokens]``.
        offsets_B: Where each sample starts in it.
        lengths_B: Tokens per sample, at least one each.
        min_shared_tokens: Shortest run to share, see the module.
    """
    trie = Trie(offsets_B.tolist(), lengths_B.tolist())
    width = min(min_shared_tokens, KEY_TOKENS)
    trie.pending.append((list(range(len(trie.lengths_B))), 0, -1))
    while trie.pending:
        members, depth, parent = trie.pending.pop()
        for alike in _classes(tokens, trie, members, depth, width):
            _compare(tokens, trie, alike, depth, parent)
    return choose(trie, min_shared_tokens)


def find_prompts(
    tokens: np.ndarray, offsets_B: np.ndarray, lengths_B: np.ndarray, prompt_lengths_B: np.ndarray, min_shared_tokens: int
) -> Runs:
    """Share equal whole prompts and nothing else; arguments as of :func:`find_runs`."""
    trie = Trie(offsets_B.tolist(), lengths_B.tolist())
    groups: dict[tuple[int, bytes], list[list[int]]] = {}
    for sample, (offset, prompt) in enumerate(zip(trie.offsets_B, prompt_lengths_B.tolist(), strict=True)):
        prompt_P = tokens[offset : offset + prompt]
        stride = max(1, prompt // KEY_TOKENS)
        found = groups.setdefault((prompt, prompt_P[-1::-stride].tobytes()), [])
        for group in found:
            other = trie.offsets_B[group[0]]
            if _agree(tokens, offset, other, 0, prompt) == prompt:
                group.append(sample)
                break
        else:
            found.append([sample])
    for (prompt, _), found in groups.items():
        for group in found:
            _add_prompt(trie, group, prompt)
    return choose(trie, min_shared_tokens)


def separate(lengths_B: np.ndarray) -> Runs:
    """Share nothing: each sample is its own root."""
    samples = np.arange(len(lengths_B))
    return Runs(np.full(len(samples), -1), lengths_B, samples, samples)


def choose(trie: Trie, min_shared_tokens: int) -> Runs:
    """Drop the inner nodes that are not worth their cost."""
    parents, ends = trie.parents, trie.ends
    above, kept_under = _costs(parents, ends, min_shared_tokens)
    new = [-1] * len(ends)  # for each node: its new index, or that of its nearest kept ancestor
    place = [0] * len(ends)  # the nearest kept ancestor or self, as an index into `above` of the children
    kept: list[int] = []
    kept_parents: list[int] = []
    for node, parent in enumerate(parents):
        under, at = (new[parent], place[parent]) if parent >= 0 else (-1, 0)
        choice = kept_under[node]
        keep = choice is None or bool(choice[at])
        if keep:
            kept.append(node)
            kept_parents.append(under)
        new[node] = len(kept) - 1 if keep else under
        place[node] = len(above[node]) if keep else at
    parents_N = np.array(kept_parents, np.int64)
    ends_N = np.array(ends, np.int64)[kept]
    sources_N = np.array(trie.sources, np.int64)[kept]
    return Runs(parents_N, ends_N, sources_N, _last_nodes(trie, parents_N, ends_N, sources_N))


def _classes(tokens: np.ndarray, trie: Trie, members: list[int], depth: int, width: int) -> list[list[int]]:
    """Sort samples that agree on ``depth`` tokens by their next ``width`` ones; shorter rests join what they begin."""
    if len(members) == 1:
        return [members]
    offsets, lengths, size = trie.offsets_B, trie.lengths_B, width * tokens.itemsize
    classes: dict[bytes, list[int]] = {}
    short: list[tuple[bytes, int]] = []
    for sample in members:
        start = offsets[sample] + depth
        key = tokens[start : min(start + width, offsets[sample] + lengths[sample])].tobytes()
        if len(key) == size:
            classes.setdefault(key, []).append(sample)
        else:
            short.append((key, sample))
    if short:
        ordered = sorted(classes)
        for key, sample in sorted(short, key=lambda x: -len(x[0])):
            at = bisect_left(ordered, key)  # what starts with the key follows it at once
            if at < len(ordered) and ordered[at].startswith(key):
                classes[ordered[at]].append(sample)
            else:
                insort(ordered, key)
                classes[key] = [sample]
    return list(classes.values())


def _compare(tokens: np.ndarray, trie: Trie, members: list[int], depth: int, parent: int) -> None:
    """Add the path of the longest sample to the trie, with a node at each token where others leave it."""
    offsets, lengths = trie.offsets_B, trie.lengths_B
    longest = max(members, key=lengths.__getitem__)
    leaving: dict[int, list[int]] = {}
    for sample in members:
        if sample == longest:
            continue
        end = _agree(tokens, offsets[sample], offsets[longest], depth, lengths[sample])
        if end == lengths[sample]:
            trie.followed[sample] = longest
        else:
            leaving.setdefault(end, []).append(sample)
    for end in sorted(leaving):
        parent = trie.add(parent, end, longest)
        trie.pending.append((leaving[end], end, parent))
    trie.add(parent, lengths[longest], longest)


def _agree(tokens: np.ndarray, first: int, second: int, start: int, stop: int) -> int:
    """First position in ``[start, stop)`` at which the samples that begin at ``first`` and ``second`` differ, else ``stop``."""
    step = 256
    while start < stop:
        size = min(step, stop - start)
        differ = tokens[first + start : first + start + size] != tokens[second + start : second + start + size]
        at = int(differ.argmax())
        if differ[at]:
            return start + at
        start += size
        step = min(4 * step, 8192)
    return stop


def _add_prompt(trie: Trie, group: list[int], prompt: int) -> None:
    """Add samples of one prompt: the prompt with a leaf per response, or one leaf if at most one sample has a response."""
    lengths = trie.lengths_B
    longer = [sample for sample in group if lengths[sample] > prompt]
    first = longer[0] if longer else group[0]
    parent = trie.add(-1, prompt, first) if len(longer) > 1 else -1
    for sample in group:
        if lengths[sample] > prompt or sample == first:
            trie.add(parent, lengths[sample], sample)
        else:
            trie.followed[sample] = first


def _costs(parents: list[int], ends: list[int], min_shared_tokens: int) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """For each node: ends of its ancestors (0 for none, then root to parent), and whether to keep it under each of them.

    ``None`` instead of the latter for leaves, which are always kept.
    """
    count = len(ends)
    inner = np.zeros(count, bool)
    inner[[parent for parent in parents if parent >= 0]] = True
    nothing = np.zeros(1, np.int64)
    above = [nothing] * count
    below = [0] * count  # tokens below each node
    leaves = [0] * count  # children that are leaves, and the sum of their ends
    leaf_ends = [0] * count
    for node, parent in enumerate(parents):
        if inner[node] and parent >= 0:
            above[node] = np.append(above[parent], ends[parent])
    kept_under: list[np.ndarray | None] = [None] * count
    sums: dict[int, np.ndarray] = {}  # costs of the inner children under each ancestor of theirs
    for node in range(count - 1, -1, -1):
        parent, end = parents[node], ends[node]
        if inner[node]:
            under = np.append(above[node], end)
            children = sums.pop(node, 0) + (leaf_ends[node] - leaves[node] * under).astype(np.float64)
            cost = (min_shared_tokens - 1) * (1 + below[node] / QUERIED_PER_NODE)
            lengths = end - above[node]
            keep = np.where(lengths >= min_shared_tokens, lengths + cost + children[-1], np.inf)
            kept_under[node] = keep <= children[:-1]
            if parent >= 0:
                sums[parent] = sums.get(parent, 0) + np.minimum(keep, children[:-1])
        elif parent >= 0:
            leaves[parent] += 1
            leaf_ends[parent] += end
        if parent >= 0:
            below[parent] += below[node] + end - ends[parent]
    return above, kept_under


def _last_nodes(trie: Trie, parents_N: np.ndarray, ends_N: np.ndarray, sources_N: np.ndarray) -> np.ndarray:
    """The node that holds the last token of each sample, by walking up from the leaf that its path leads to."""
    lengths_B = np.array(trie.lengths_B, np.int64)
    leaf_B = np.full(len(lengths_B), -1)
    leaf_N = np.ones(len(parents_N), bool)
    leaf_N[parents_N[parents_N >= 0]] = False
    leaf_B[sources_N[leaf_N]] = np.flatnonzero(leaf_N)
    samples = np.array(list(trie.followed), np.int64)
    leaf_B[samples] = leaf_B[np.array(list(trie.followed.values()), np.int64)]
    while True:
        parents_B = parents_N[leaf_B]
        up = (parents_B >= 0) & (np.where(parents_B >= 0, ends_N[parents_B], 0) >= lengths_B)
        if not up.any():
            return leaf_B
        leaf_B = np.where(up, parents_B, leaf_B)
