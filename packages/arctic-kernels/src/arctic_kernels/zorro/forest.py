"""A batch of samples packed so that what they share stands, and is computed, once.

A *node* is a run of tokens that all samples through it share; a sample is the path from a root to its last token, and may end
inside a node. Nodes stand on one token axis ``T`` in *level order*: all roots, then all children of roots (grouped by parent,
in parent order), and so on; each node contiguous; roots with children before roots without. A token's position is its depth,
so everything that works on single tokens runs unchanged, and a token's causal context is its node up to itself and the nodes
above, which attention reads in

* one causal varlen call over all nodes (``cu_nodes``), and
* for each pair of levels one varlen call without a mask (:class:`AncestorPart`): queries of one level against the keys of one
  level above; all descendants of a node on a level are neighbours, so that both sides are views, nothing is copied.

Rows predict labels. The last row of a shared node has one label per sample or child; ``rows_P`` names each predicting row once,
``row_of_R`` says which of them scores each response token.

Example:
    >>> forest = PackedForest.from_sequences([[5, 6, 7], [5, 6, 8, 9]], [2, 2], min_shared_tokens=1)
    >>> forest.token_ids.tolist(), forest.position_ids.tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 2, 3]])
    >>> forest.rows_P.tolist(), forest.row_of_R.tolist(), forest.labels_R.tolist()
    ([1, 3], [0, 0, 1], [7, 8, 9])

Suffix legend: ``_T`` packed tokens, ``_N`` nodes (``_N1``: and one more), ``_B`` samples, ``_P`` predicting rows, ``_R``
response tokens in the caller's order, ``_S`` sequences of a varlen call, ``_G`` gathered keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from arctic_kernels.zorro.discovery import Runs, find_prompts, find_runs, separate
from arctic_kernels.zorro.errors import ZorroError
from arctic_kernels.zorro.layout import (
    ForestStructure,
    Part,
    Ranges,
    Tables,
    Uploaded,
    ancestor_parts,
    level_order,
    sample_ranges,
    spread_on_host,
    unite,
    window_keys,
)

__all__ = ["DEFAULT_MIN_SHARED_TOKENS", "AncestorPart", "ForestStructure", "PackedForest", "Share", "WindowPart"]

DEFAULT_MIN_SHARED_TOKENS = 64
"""Shortest run of tokens that is shared, and the measure of what sharing costs: see :mod:`~arctic_kernels.zorro.discovery`."""

Share = Literal["auto", "prompts", "none"]
"""Prefixes of any depth, equal whole prompts only, or nothing."""

_INT32 = 2**31


@dataclass(frozen=True, eq=False)
class AncestorPart:
    """One varlen call without a mask: queries of one level against the keys of one level above."""

    query_level: int
    key_level: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    """Slices of ``T``."""
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    """Offsets relative to the slices, int32 ``[S + 1]``: one sequence per node of the key level."""
    max_q: int
    max_k: int
    queried_k: torch.Tensor | None
    """Which keys have queries, bool ``[k_stop - k_start]``; ``None``: all. Some kernels leave the gradients of others unset."""


@dataclass(frozen=True, eq=False)
class WindowPart:
    """One varlen call for layers with a sliding window: each node against its last path tokens and itself.

    Causal, aligned at the end of the keys; each query sees itself and up to ``window - 1`` tokens before it.
    """

    window: int
    gather_G: torch.Tensor
    """Rows of the keys, node by node in path order, int64."""
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    """Offsets of queries on ``T`` and of keys in ``gather_G``, int32 ``[N + 1]``."""
    max_q: int
    max_k: int
    tokens: int
    """Packed tokens ``T``."""

    @cached_property
    def copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Order of ``gather_G`` by row, ``[G]``, and where each row's copies begin therein, ``[T + 1]``; no host sync."""
        rows_G, order_G = torch.sort(self.gather_G, stable=True)
        return order_G, torch.searchsorted(rows_G, torch.arange(self.tokens + 1, device=rows_G.device))


@dataclass(frozen=True, eq=False)
class PackedForest:
    """Samples packed as a forest; build one with :meth:`from_sequences` or :meth:`from_packed`."""

    structure: ForestStructure
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    """int64 ``[1, T]``."""
    cu_nodes: torch.Tensor
    """Node offsets, int32 ``[N + 1]``."""
    max_node: int
    """Tokens of the longest node."""
    ancestors: tuple[AncestorPart, ...]
    """One per pair of a level and a level above it, by query level, then from the roots down."""
    rows_P: torch.Tensor
    """Rows that predict at least one response token, ascending, int64."""
    row_of_R: torch.Tensor
    """For each response token the index into ``rows_P`` of the row that predicts it, int64."""
    labels_R: torch.Tensor
    """The response tokens, int64."""
    cu_responses: tuple[int, ...]
    """Where each sample's response starts on ``R``, and the end: ``[B + 1]``."""
    naive_tokens: int
    """Tokens of all samples, shared ones counted once per sample."""
    nodes_B: np.ndarray
    """The node that holds each sample's last token; host."""
    lengths_B: np.ndarray
    """Tokens per sample; host."""
    prompt_lengths_B: np.ndarray
    """Prompt tokens per sample; host."""
    _windows: dict[int, WindowPart] = field(default_factory=dict, repr=False)

    @classmethod
    def from_sequences(
        cls,
        token_ids: Sequence[Any],
        prompt_lengths: Sequence[int] | np.ndarray | torch.Tensor,
        *,
        device: torch.device | str = "cpu",
        share: Share = "auto",
        min_shared_tokens: int = DEFAULT_MIN_SHARED_TOKENS,
    ) -> PackedForest:
        """Pack samples that are given one by one.

        Args:
            token_ids: Prompt and response of each sample: 1-D integer tensors, arrays or lists. Tensors on an accelerator are
                copied to the host first.
            prompt_lengths: How many tokens of each sample are its prompt, at least 1.
            device: Where the tensors of the forest go.
            share: What may be shared (:data:`Share`).
            min_shared_tokens: Shortest run to share; 1 shares all it can.

        Raises:
            ZorroError: The samples are malformed; it says which and why.
        """
        arrays = [_as_array(sample, f"sample {index}") for index, sample in enumerate(token_ids)]
        lengths = np.array([len(array) for array in arrays], np.int64)
        flat = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        return cls.from_packed(flat, lengths, prompt_lengths, device=device, share=share, min_shared_tokens=min_shared_tokens)

    @classmethod
    def from_packed(
        cls,
        token_ids: np.ndarray | torch.Tensor,
        lengths: Sequence[int] | np.ndarray | torch.Tensor,
        prompt_lengths: Sequence[int] | np.ndarray | torch.Tensor,
        *,
        device: torch.device | str = "cpu",
        share: Share = "auto",
        min_shared_tokens: int = DEFAULT_MIN_SHARED_TOKENS,
    ) -> PackedForest:
        """Pack samples that stand one after the other in one integer array ``[sum(lengths)]``; else as :meth:`from_sequences`.

        No samples give a forest of one token (id 0) that predicts nothing.
        """
        tokens = _as_array(token_ids, "token_ids")
        lengths_B, prompts_B = _as_array(lengths, "lengths"), _as_array(prompt_lengths, "prompt_lengths")
        _check(tokens, lengths_B, prompts_B, share, min_shared_tokens)
        lengths_B, prompts_B = lengths_B.astype(np.int64), prompts_B.astype(np.int64)
        if not len(lengths_B):
            return _pack(np.zeros(1, np.int64), separate(np.ones(1, np.int64)), lengths_B, prompts_B, torch.device(device))
        offsets_B = np.cumsum(lengths_B) - lengths_B
        if share == "auto":
            runs = find_runs(tokens, offsets_B, lengths_B, min_shared_tokens)
        elif share == "prompts":
            runs = find_prompts(tokens, offsets_B, lengths_B, prompts_B, min_shared_tokens)
        else:
            runs = separate(lengths_B)
        return _pack(tokens, runs, lengths_B, prompts_B, torch.device(device))

    @property
    def num_tokens(self) -> int:
        """Packed tokens ``T``."""
        return int(self.structure.offsets_N1[-1])

    @property
    def num_nodes(self) -> int:
        """Nodes ``N``."""
        return len(self.structure.parents_N)

    @property
    def num_samples(self) -> int:
        """Samples ``B``."""
        return len(self.lengths_B)

    @property
    def depth(self) -> int:
        """Levels; 1 where nothing is shared."""
        return self.structure.depth

    @property
    def tokens_saved(self) -> int:
        """Tokens that need not be computed because another sample's are the same."""
        return max(0, self.naive_tokens - self.num_tokens)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.token_ids.device

    def to(self, device: torch.device | str) -> PackedForest:
        """The same forest with its tensors on another device."""
        if torch.device(device) == self.device:
            return self
        parts = tuple(_moved(part, device) for part in self.ancestors)
        return replace(_moved(self, device), ancestors=parts, _windows={})

    def sample_rows(self, sample: int) -> np.ndarray:
        """Rows on ``T`` of a sample's tokens, in order: int64 ``[length]``."""
        one = slice(sample, sample + 1) if sample >= 0 else slice(0, 0)
        lengths = self.lengths_B[one]
        if not len(lengths):
            raise IndexError(f"sample {sample} of a forest of {self.num_samples}")
        return spread_on_host(sample_ranges(self.structure, self.nodes_B[one], np.zeros(1, np.int64), lengths))

    def ancestor_mask(self) -> torch.Tensor:
        """Which key (column) each query (row) sees: bool ``[T, T]``, on the forest's device. For small forests."""
        node_T = np.repeat(np.arange(self.num_nodes), self.structure.lengths_N)
        sees_NN = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.structure.parents_N):
            if parent >= 0:
                sees_NN[node] |= sees_NN[parent]
        sees_TT = torch.from_numpy(sees_NN[node_T[:, None], node_T[None, :]]).to(self.device)
        return sees_TT & (self.position_ids[0][:, None] >= self.position_ids[0][None, :])

    def window(self, window: int) -> WindowPart:
        """The call for layers in which a token sees itself and ``window - 1`` tokens before; made once for each ``window``."""
        if window < 1:
            raise ZorroError(f"A sliding window of {window} tokens: it must hold at least the token itself, so pass 1 or more.")
        if window not in self._windows:
            ranges, counts_N = window_keys(self.structure, window)
            tables = Tables(self.device, 0)
            starts, counts = tables.add(ranges.starts_S), tables.add(ranges.counts_S)
            cu_k = tables.add(np.concatenate([[0], np.cumsum(counts_N)]))
            moved = tables.upload([])
            self._windows[window] = WindowPart(
                window=window,
                gather_G=moved.spread(starts, counts),
                cu_q=self.cu_nodes,
                cu_k=moved.ints(cu_k),
                max_q=self.max_node,
                max_k=int(counts_N.max()),
                tokens=self.num_tokens,
            )
        return self._windows[window]


def _pack(tokens: np.ndarray, runs: Runs, lengths_B: np.ndarray, prompts_B: np.ndarray, device: torch.device) -> PackedForest:
    """Lay the nodes out and make the tensors."""
    if not len(lengths_B):
        runs = runs._replace(nodes_B=np.zeros(1, np.int64))
    structure, sources_N, nodes_B = level_order(runs)
    nodes_B = nodes_B[: len(lengths_B)]
    total = int(structure.offsets_N1[-1])
    offsets_B = np.cumsum(lengths_B) - lengths_B if len(lengths_B) else np.zeros(1, np.int64)
    rows, places = unite(sample_ranges(structure, nodes_B, prompts_B - 1, lengths_B - 1))
    labels = sample_ranges(structure, nodes_B, prompts_B, lengths_B)
    if max(total, labels.total) >= _INT32:
        raise ZorroError(
            f"{total:,} packed tokens and {labels.total:,} response tokens do not fit 32-bit offsets; split the batch."
        )
    tables = Tables(device, total)
    cu_nodes = tables.add(structure.offsets_N1)
    positions = Ranges(structure.starts_N, structure.lengths_N)
    ranges = [(tables.add(x.starts_S), tables.add(x.counts_S)) for x in (positions, rows, places, labels)]
    parts = [(part, tables.add(part.cu_q_S1), tables.add(part.cu_k_S1)) for part in ancestor_parts(structure)]
    first_N = offsets_B[sources_N] + structure.starts_N
    spans = zip(first_N.tolist(), (first_N + structure.lengths_N).tolist(), strict=True)
    moved = tables.upload([tokens[first:stop] for first, stop in spans])
    position_T, rows_P, row_of_R = (moved.spread(*pair) for pair in ranges[:-1])
    cu_responses = np.concatenate([[0], np.cumsum(lengths_B - prompts_B)])
    return PackedForest(
        structure=structure,
        token_ids=moved.data[None],
        position_ids=position_T[None],
        cu_nodes=moved.ints(cu_nodes),
        max_node=int(structure.lengths_N.max()),
        ancestors=tuple(_ancestor_part(part, moved, cu_q, cu_k) for part, cu_q, cu_k in parts),
        rows_P=rows_P,
        row_of_R=row_of_R,
        labels_R=moved.gather(*ranges[-1]),
        cu_responses=tuple(cu_responses.tolist()),
        naive_tokens=int(lengths_B.sum()),
        nodes_B=nodes_B,
        lengths_B=lengths_B,
        prompt_lengths_B=prompts_B,
    )


def _ancestor_part(part: Part, moved: Uploaded, cu_q: int, cu_k: int) -> AncestorPart:
    """One part with its tables on the device."""
    counts_q, counts_k = np.diff(part.cu_q_S1), np.diff(part.cu_k_S1)
    queried = None
    if not counts_q.all():
        asked = moved.ints(cu_q).diff() > 0
        queried = torch.repeat_interleave(asked, moved.ints(cu_k).diff(), output_size=part.k.stop - part.k.start)
    return AncestorPart(
        query_level=part.query_level,
        key_level=part.key_level,
        q_start=part.q.start,
        q_stop=part.q.stop,
        k_start=part.k.start,
        k_stop=part.k.stop,
        cu_q=moved.ints(cu_q),
        cu_k=moved.ints(cu_k),
        max_q=int(counts_q.max()),
        max_k=int(counts_k.max()),
        queried_k=queried,
    )


def _moved(record: Any, device: torch.device | str) -> Any:
    """A dataclass with its tensors on another device."""
    tensors = {name: value.to(device) for name, value in vars(record).items() if isinstance(value, torch.Tensor)}
    return replace(record, **tensors)


def _as_array(values: Any, what: str) -> np.ndarray:
    """A 1-D integer array of a tensor, array or list."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise ZorroError(f"{what} has the shape {array.shape}; it must be one-dimensional.")
    if not len(array):
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ZorroError(f"{what} is of type {array.dtype}; it must hold integers.")
    return array


def _check(tokens: np.ndarray, lengths_B: np.ndarray, prompts_B: np.ndarray, share: str, min_shared_tokens: int) -> None:
    """Refuse samples and options that make no forest."""
    if share not in ("auto", "prompts", "none"):
        raise ZorroError(f"share is {share!r}; it must be 'auto', 'prompts' or 'none'.")
    if min_shared_tokens < 1:
        raise ZorroError(f"min_shared_tokens is {min_shared_tokens}; it must be at least 1.")
    if len(lengths_B) != len(prompts_B):
        raise ZorroError(f"{len(lengths_B)} samples have {len(prompts_B)} prompt lengths; give one for each.")
    for sample in np.flatnonzero((prompts_B < 1) | (prompts_B > lengths_B))[:1]:
        length, prompt = lengths_B[sample], prompts_B[sample]
        why = "a prompt has at least one token" if prompt < 1 else "the prompt is a part of the sample"
        raise ZorroError(f"Sample {sample} of {length} tokens has a prompt length of {prompt}; {why}.")
    if lengths_B.sum() != len(tokens):
        raise ZorroError(f"lengths add up to {lengths_B.sum():,} tokens, but {len(tokens):,} token ids are given.")
