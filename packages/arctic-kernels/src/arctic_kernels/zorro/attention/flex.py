"""FlexAttention on the forest's mask in one call: compiled with Triton on GPUs, plain torch and forward only on CPUs.

A row of node ``n`` sees the rows of ``n`` and its ancestors that come no later in the packed buffer. With ``enter`` the order
in which a depth-first walk reaches the nodes and ``leave`` the number reached when it is done with one, ``a`` is ``n`` or an
ancestor of it exactly if ``enter[a] <= enter[n] < leave[a]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from arctic_kernels.zorro.attention.kernels import Inputs

if TYPE_CHECKING:
    from arctic_kernels.zorro.forest import ForestStructure, PackedForest

__all__ = ["attention", "block_mask"]

_BLOCK = 128


def attention(
    inputs: Inputs,
    forest: PackedForest,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """See :func:`arctic_kernels.zorro.forest_attention`; differentiated by FlexAttention's own backward pass."""
    q, k, _ = inputs
    function = _compiled() if q.is_cuda else flex_attention
    heads = (x.transpose(0, 1)[None] for x in inputs)
    out, statistics = function(
        *heads,
        score_mod=None if softcap is None else _soft_cap(softcap),
        block_mask=block_mask(forest, window),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        assert statistics.lse is not None  # asked for above
        out = out * torch.sigmoid(statistics.lse - sinks.to(statistics.lse.dtype)[:, None])[..., None].to(out.dtype)
    return out[0].transpose(0, 1)


_MASKS: WeakKeyDictionary[PackedForest, dict[int | None, BlockMask]] = WeakKeyDictionary()


def block_mask(forest: PackedForest, window: int | None = None) -> BlockMask:
    """The forest's mask in blocks of 128 × 128, built once for each forest and window from its nodes, not from its tokens."""
    masks = _MASKS.setdefault(forest, {})
    if window not in masks:
        masks[window] = _build(forest, window)
    return masks[window]


def _build(forest: PackedForest, window: int | None) -> BlockMask:
    structure, device = forest.structure, forest.token_ids.device
    lengths = np.diff(structure.offsets_N1)
    enter, leave = walk(structure)
    rows = {"enter": enter, "leave": leave}
    enter_T, leave_T = (torch.from_numpy(np.repeat(rows[x], lengths)).to(device, torch.int32) for x in rows)
    position_T = forest.position_ids[0].to(torch.int32)

    def seen(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        del b, h
        inside = (enter_T[key] <= enter_T[query]) & (enter_T[query] < leave_T[key]) & (key <= query)
        return inside if window is None else inside & (position_T[query] - position_T[key] < window)

    pairs = _pairs_of_blocks(structure, device)
    partial = pairs > 0
    full = (pairs == _BLOCK * _BLOCK) if window is None else torch.zeros_like(partial)
    return BlockMask.from_kv_blocks(
        *_listed(partial & ~full),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(forest.num_tokens, forest.num_tokens),
    )


def walk(structure: ForestStructure) -> tuple[np.ndarray, np.ndarray]:
    """``enter`` and ``leave`` of each node."""
    parents = structure.parents_N
    size = np.ones(len(parents), dtype=np.int64)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    enter, free, root = np.zeros(len(parents), dtype=np.int64), np.zeros(len(parents), dtype=np.int64), 0
    for node, parent in enumerate(parents):
        if parent < 0:
            enter[node], root = root, root + size[node]
        else:
            enter[node], free[parent] = free[parent], free[parent] + size[node]
        free[node] = enter[node] + 1
    return enter, enter + size


def _pairs_of_blocks(structure: ForestStructure, device: torch.device) -> torch.Tensor:
    """How many pairs of a query and an earlier key each block has, float32 ``[blocks, blocks]``; on the diagonal 1.

    The visible pairs are rectangles, a node against an ancestor or itself, so a block's number is a sum over rectangles of
    overlap times overlap: one matrix product, exact in float32 and in TF32.
    """
    nodes, ancestors = [np.arange(len(structure.parents_N))], [np.arange(len(structure.parents_N))]
    node, above = nodes[0], structure.parents_N
    while (kept := above >= 0).any():
        node, above = node[kept], above[kept]
        nodes.append(node)
        ancestors.append(above)
        above = structure.parents_N[above]
    offsets = torch.from_numpy(structure.offsets_N1).to(device)
    edges = torch.arange(0, int(structure.offsets_N1[-1]), _BLOCK, device=device)[:, None]

    def overlap(chosen: list[np.ndarray]) -> torch.Tensor:
        index = torch.from_numpy(np.concatenate(chosen)).to(device)
        begin, end = offsets[index], offsets[index + 1]
        return (torch.minimum(end, edges + _BLOCK) - torch.maximum(begin, edges)).clamp(min=0).float()

    pairs = (overlap(nodes) @ overlap(ancestors).T).tril(-1)
    return pairs + torch.eye(len(edges), device=device)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and indices as BlockMask wants them, ``[1, 1, blocks]`` and ``[1, 1, blocks, blocks]``."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def _soft_cap(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
