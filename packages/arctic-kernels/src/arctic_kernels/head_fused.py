"""The chunked head in tiles of rows and vocabulary: matrix products of the vendor's library, one pass over a tile between them.

For bfloat16 weights on a GPU. A tile of logits ``[C, W]`` is made in float32. In value one pass takes from it, row by row, the
maximum ``m``, ``Σ e^(z−m)``, ``Σ (z−m)·e^(z−m)`` and the logits of labels, and carries them over from tile to tile (online
softmax, Milakov & Gimelshein, 2018). In gradient one pass writes the gradient of the tile in bfloat16, and two products add it
up in float32, over the vocabulary for the hidden states, over the rows for the weight. Tiles are cut both ways since each cut
costs traffic: rows read and write the weight's gradient once per chunk, the vocabulary that of the chunk's hidden states once
per tile. Four products in all: the logits are made twice.

Suffix legend: as in :mod:`arctic_kernels.head`, and ``_W`` a tile's part of the vocabulary.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch

from arctic_kernels.head_plan import Plan, Rows

__all__ = ["Kernels", "Scored", "State", "Tile", "choose", "gradients", "tile_shape", "triton_kernels", "values"]

MOST_ROWS = 8192
_ALIGN = 256  # vocabulary entries
_NARROW = 1024  # below this width of a tile rows give way


class State(NamedTuple):
    """What is carried over from tile to tile, float32; the sums are relative to the maximum."""

    top_S: torch.Tensor
    sum_S: torch.Tensor
    weighted_S: torch.Tensor
    logits_RJ: torch.Tensor


class Scored(NamedTuple):
    """Inputs and what the forward pass kept."""

    hidden_PD: torch.Tensor
    weight_VD: torch.Tensor
    ids_RJ: torch.Tensor
    lse_S: torch.Tensor
    entropy_S: torch.Tensor
    rows: Rows


@dataclass(frozen=True)
class Tile:
    """Logits of some scored rows and a part of the vocabulary."""

    x_CW: torch.Tensor
    """Float32, contiguous: hidden states times weight."""
    row: int
    """First scored row."""
    column: int
    """First token id."""
    temperatures_S: torch.Tensor
    starts_S: torch.Tensor
    """First label of each scored row and the end, int64 ``[S + 1]``."""
    ids_RJ: torch.Tensor
    scale: float
    softcap: float | None


class Kernels(Protocol):
    """What a device has to offer."""

    def product(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """``out = left · right``, bfloat16 to float32."""
        ...

    def add_product(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """``out += left · right``."""
        ...

    def statistics(self, tile: Tile, state: State) -> None:
        """Take a tile's logits into the state."""
        ...

    def gradient(
        self,
        tile: Tile,
        scored: Scored,
        grad_logprobs_RJ: torch.Tensor | None,
        grad_entropy_S: torch.Tensor | None,
        out_CW: torch.Tensor,
    ) -> None:
        """Write the gradient with respect to ``x_CW``, in bfloat16."""
        ...


def choose(backend: str, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, topk: int) -> bool:
    """Whether to compute in tiles.

    Raises:
        ValueError: No such backend, or it cannot compute this.
    """
    if backend not in {"torch", "triton"}:
        raise ValueError(f"backend {backend!r} is none of torch, triton")
    if backend == "torch":
        return False
    lacks = [
        text
        for missing, text in (
            (not weight_VD.is_cuda, "a GPU"),
            (weight_VD.dtype != torch.bfloat16, "bfloat16"),
            (bias_V is not None, "a layer without bias"),
            (topk > 0, "topk 0"),
            (importlib.util.find_spec("triton") is None, "the package triton"),
        )
        if missing
    ]
    if lacks:
        raise ValueError(f"backend 'triton' needs {', '.join(lacks)}; use backend 'torch'")
    return True


def triton_kernels() -> Kernels:
    from arctic_kernels import head_triton

    return cast("Kernels", head_triton)


def tile_shape(rows: int, vocabulary: int, width: int, budget_bytes: int) -> tuple[int, int]:
    """Rows and vocabulary entries of a tile, so that its temporaries fit into the budget, where one row by one entry does.

    Bytes: 4 + 2 for each logit and its gradient; for each row and hidden unit 2 for a gathered row, 4 for the sum of its
    gradient and 2 to round it.
    """

    def columns(count: int) -> int:
        most = (budget_bytes - 8 * width * count) // (6 * count)
        if most >= vocabulary:
            return vocabulary
        return max(1, most // _ALIGN * _ALIGN if most >= _ALIGN else most)

    count = max(1, min(rows, MOST_ROWS))
    while count > 1 and columns(count) < min(vocabulary, _NARROW):
        count = -(-count // 2)
    tiles = -(-vocabulary // columns(count))
    even = -(-vocabulary // tiles)  # rather equal tiles than a narrow last one
    return count, min(columns(count), -(-even // _ALIGN) * _ALIGN)


def _cuts(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]


def values(
    hidden_PD: torch.Tensor, weight_VD: torch.Tensor, ids_RJ: torch.Tensor, rows: Rows, plan: Plan, *, kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of sorted labels ``[R, J]``, entropies ``[S]`` and log-sum-exps ``[S]`` in float32."""
    work = _Work(hidden_PD, weight_VD, ids_RJ, rows, plan, kernels=kernels)
    tops_S = hidden_PD.new_full((len(rows),), -1e30, dtype=torch.float32)
    # A label outside of the vocabulary is in no tile and shall show.
    state = State(
        tops_S,
        torch.zeros_like(tops_S),
        torch.zeros_like(tops_S),
        hidden_PD.new_full(ids_RJ.shape, torch.nan, dtype=torch.float32),
    )
    for part in work.parts:
        hidden_CD = rows.gather(hidden_PD, part)
        for block in work.blocks:
            kernels.statistics(work.tile(hidden_CD, part, block), state)
    log_sum_S = state.sum_S.log()
    lse_S = state.top_S + log_sum_S
    return state.logits_RJ - lse_S[rows.row_R, None], log_sum_S - state.weighted_S / state.sum_S, lse_S


def gradients(
    scored: Scored,
    grad_logprobs_RJ: torch.Tensor | None,
    grad_entropy_S: torch.Tensor | None,
    plan: Plan,
    wanted: tuple[bool, bool],
    *,
    kernels: Kernels,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the hidden states, in their type, and of the weight, in float32; as wanted."""
    hidden_PD, weight_VD, rows = scored.hidden_PD, scored.weight_VD, scored.rows
    work = _Work(hidden_PD, weight_VD, scored.ids_RJ, rows, plan, kernels=kernels)
    grad_PD = rows.new_gradient(hidden_PD) if wanted[0] else None
    new = torch.empty_like if len(rows) else torch.zeros_like
    grad_VD = new(weight_VD, dtype=torch.float32) if wanted[1] else None
    buffer = hidden_PD.new_empty(work.size)
    for part in work.parts:
        hidden_CD = rows.gather(hidden_PD, part)
        grad_CD = torch.zeros_like(hidden_CD, dtype=torch.float32)
        for block in work.blocks:
            tile = work.tile(hidden_CD, part, block)
            dx_CW = buffer[: tile.x_CW.numel()].view(tile.x_CW.shape)
            kernels.gradient(tile, scored, grad_logprobs_RJ, grad_entropy_S, dx_CW)
            if grad_PD is not None:
                kernels.add_product(dx_CW, weight_VD[block], grad_CD)
            if grad_VD is not None:
                collect = kernels.add_product if part.start else kernels.product
                collect(dx_CW.T, hidden_CD, grad_VD[block])
        if grad_PD is not None:
            rows.add(grad_PD, part, grad_CD)
    return None if grad_PD is None else grad_PD.to(hidden_PD.dtype), grad_VD


class _Work:
    """The tiles, one buffer for their logits."""

    def __init__(
        self,
        hidden_PD: torch.Tensor,
        weight_VD: torch.Tensor,
        ids_RJ: torch.Tensor,
        rows: Rows,
        plan: Plan,
        *,
        kernels: Kernels,
    ) -> None:
        self.weight_VD, self.rows, self.plan, self.kernels = weight_VD, rows, plan, kernels
        self.ids_RJ, self.starts_S = ids_RJ.contiguous(), rows.first_labels()
        vocabulary, width = weight_VD.shape
        count, columns = tile_shape(len(rows), vocabulary, width, plan.budget_bytes)
        self.parts, self.blocks, self.size = _cuts(len(rows), count), _cuts(vocabulary, columns), count * columns
        self.buffer = hidden_PD.new_empty(self.size, dtype=torch.float32)

    def tile(self, hidden_CD: torch.Tensor, part: slice, block: slice) -> Tile:
        shape = len(hidden_CD), block.stop - block.start
        x_CW = self.buffer[: shape[0] * shape[1]].view(shape)
        self.kernels.product(hidden_CD, self.weight_VD[block].T, x_CW)
        return Tile(
            x_CW,
            part.start,
            block.start,
            self.rows.temperatures_S,
            self.starts_S,
            self.ids_RJ,
            self.plan.scale,
            self.plan.softcap,
        )
