"""Passes over a tile of logits as Triton kernels; see :mod:`arctic_kernels.head_fused`. Needs the package triton.

One program takes one row (in value) or one block of a row (in gradient). Labels are compared with columns inside the program,
so nothing is added atomically and results do not depend on the order of programs.
"""

# ruff: noqa: ANN001, ANN202, PLR0917  (Triton functions: types are those of the language, not of Python)
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from arctic_kernels.head_fused import Scored, State, Tile

__all__ = ["add_product", "gradient", "product", "statistics"]

_BLOCK = 2048


def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """``out = left · right``, bfloat16 to float32."""
    torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """``out += left · right``, bfloat16 to float32."""
    torch.addmm(out, left, right, out_dtype=out.dtype, out=out)


def statistics(tile: Tile, state: State) -> None:
    """Take a tile's logits into the state."""
    rows, columns = tile.x_CW.shape
    sums = [x[tile.row : tile.row + rows] for x in state[:3]]
    _statistics[(rows,)](
        tile.x_CW,
        *sums,
        tile.temperatures_S[tile.row :],
        tile.starts_S[tile.row :],
        tile.ids_RJ,
        state.logits_RJ,
        columns,
        tile.column,
        tile.ids_RJ.shape[1],
        tile.scale,
        tile.softcap or 1.0,
        CAPPED=tile.softcap is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def gradient(
    tile: Tile, scored: Scored, grad_logprobs_RJ: torch.Tensor | None, grad_entropy_S: torch.Tensor | None, out_CW: torch.Tensor
) -> None:
    """Write the gradient with respect to a tile's logits."""
    rows, columns = tile.x_CW.shape
    labels, entropy = grad_logprobs_RJ is not None, grad_entropy_S is not None
    _gradient[(rows, triton.cdiv(columns, _BLOCK))](
        tile.x_CW,
        out_CW,
        scored.lse_S[tile.row :],
        scored.entropy_S[tile.row :],
        tile.temperatures_S[tile.row :],
        tile.starts_S[tile.row :],
        tile.ids_RJ,
        grad_logprobs_RJ.contiguous() if grad_logprobs_RJ is not None else scored.lse_S,
        grad_entropy_S.contiguous()[tile.row :] if grad_entropy_S is not None else scored.lse_S,
        columns,
        tile.column,
        tile.ids_RJ.shape[1],
        tile.scale,
        tile.softcap or 1.0,
        LABELS=labels,
        ENTROPY=entropy,
        CAPPED=tile.softcap is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _bend(x, softcap):
    """tanh(x / softcap)."""
    return 2 * tl.sigmoid(2 * x / softcap) - 1


@triton.jit
def _statistics(
    x_ptr,
    top_ptr,
    sum_ptr,
    weighted_ptr,
    temperature_ptr,
    starts_ptr,
    ids_ptr,
    logits_ptr,
    columns,
    first,
    ids_per_label,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * columns
    cool = 1 / tl.load(temperature_ptr + row)
    # Each lane keeps sums of its own, relative to its own maximum, until the end of the row.
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(x_ptr + at, mask=at < columns, other=0.0) * scale
        if CAPPED:
            z = softcap * _bend(z, softcap)
        z = tl.where(at < columns, z * cool, float("-inf"))
        new = tl.maximum(top, z)
        fall = top - new
        decay = tl.exp(fall)
        e = tl.exp(z - new)
        weighted = (weighted + fall * total) * decay + tl.where(e > 0, (z - new) * e, 0.0)
        total = total * decay + e
        top = new
    best = tl.max(top, 0)
    fall = top - best
    decay = tl.exp(fall)
    weighted_all = tl.sum((weighted + fall * total) * decay, 0)
    total_all = tl.sum(total * decay, 0)

    old = tl.load(top_ptr + row)
    old_total = tl.load(sum_ptr + row)
    old_weighted = tl.load(weighted_ptr + row)
    new_top = tl.maximum(old, best)
    old_decay = tl.exp(old - new_top)
    decay_all = tl.exp(best - new_top)
    tl.store(top_ptr + row, new_top)
    tl.store(sum_ptr + row, old_total * old_decay + total_all * decay_all)
    carried = (old_weighted + (old - new_top) * old_total) * old_decay
    tl.store(weighted_ptr + row, carried + (weighted_all + (best - new_top) * total_all) * decay_all)

    stop = tl.load(starts_ptr + row + 1) * ids_per_label
    for label in range(tl.load(starts_ptr + row) * ids_per_label, stop):
        at_label = tl.load(ids_ptr + label) - first
        inside = (at_label >= 0) & (at_label < columns)
        z_label = tl.load(x_ptr + at_label, mask=inside, other=0.0) * scale
        if CAPPED:
            z_label = softcap * _bend(z_label, softcap)
        tl.store(logits_ptr + label, z_label * cool, mask=inside)


@triton.jit
def _gradient(
    x_ptr,
    out_ptr,
    lse_ptr,
    entropy_ptr,
    temperature_ptr,
    starts_ptr,
    ids_ptr,
    grad_ptr,
    grad_entropy_ptr,
    columns,
    first,
    ids_per_label,
    scale,
    softcap,
    LABELS: tl.constexpr,
    ENTROPY: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cool = 1 / tl.load(temperature_ptr + row)
    z = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0) * scale
    factor = tl.full([BLOCK], 1.0, tl.float32) * scale * cool
    if CAPPED:
        bent = _bend(z, softcap)
        z = softcap * bent
        factor *= 1 - bent * bent
    logp = z * cool - tl.load(lse_ptr + row)
    p = tl.exp(logp)
    inner = tl.zeros([BLOCK], tl.float32)
    hot = tl.zeros([BLOCK], tl.float32)
    if LABELS:
        stop = tl.load(starts_ptr + row + 1) * ids_per_label
        for label in range(tl.load(starts_ptr + row) * ids_per_label, stop):
            grad = tl.load(grad_ptr + label)
            inner += grad
            hot += tl.where(at == tl.load(ids_ptr + label) - first, grad, 0.0)
    if ENTROPY:
        inner += tl.load(grad_entropy_ptr + row) * (logp + tl.load(entropy_ptr + row))
    out = (hot - tl.where(p > 0, p * inner, 0.0)) * factor
    tl.store(out_ptr + row * columns + at, out.to(out_ptr.dtype.element_ty), mask=at < columns)
