# ruff: noqa: ANN001, ANN202, PLR0917 - Triton takes its types from the call
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false
"""The Triton kernels of :mod:`arctic_kernels.zorro.attention.merge`: one pass over memory each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

__all__ = ["merge_", "sum_copies"]

_ROWS = 16  # tokens of one program; 16 rows of 128 values are 4 KiB a tensor


@triton.jit
def _merge_kernel(
    out, lse, out_a, lse_a, out_b, lse_b, rows, stride, stride_a, stride_b, heads, size,
    TWO: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, WIDTH)
    row_ok = t < rows
    ok = row_ok[:, None] & (d < size)[None, :]
    at = (t[:, None] * heads + head) * size + d[None, :]
    empty = float("-inf")
    l0 = tl.load(lse + head * stride + t, mask=row_ok, other=empty)
    la = tl.load(lse_a + head * stride_a + t, mask=row_ok, other=empty)
    l0 = tl.where(l0 == float("inf"), empty, l0)
    la = tl.where(la == float("inf"), empty, la)
    top = tl.maximum(l0, la)
    if TWO:
        lb = tl.load(lse_b + head * stride_b + t, mask=row_ok, other=empty)
        lb = tl.where(lb == float("inf"), empty, lb)
        top = tl.maximum(top, lb)
    base = tl.where(top == empty, 0.0, top)
    w0 = tl.exp(l0 - base)
    wa = tl.exp(la - base)
    total = w0 + wa
    if TWO:
        wb = tl.exp(lb - base)
        total += wb
    scale = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    o = tl.load(out + at, mask=ok, other=0.0).to(WIDE) * (w0 * scale)[:, None]
    o += tl.load(out_a + at, mask=ok, other=0.0).to(WIDE) * (wa * scale)[:, None]
    if TWO:
        o += tl.load(out_b + at, mask=ok, other=0.0).to(WIDE) * (wb * scale)[:, None]
    tl.store(out + at, o.to(out.dtype.element_ty), mask=ok)
    merged = tl.where(total == 0.0, empty, base + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(lse + head * stride + t, merged, mask=row_ok)


def merge_(out: torch.Tensor, lse: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Two parts are merged in one pass; of more, each further pair in one more."""
    rows, heads, size = out.shape
    if not out.numel():
        return
    wide = tl.float64 if out.dtype == torch.float64 else tl.float32
    grid = (triton.cdiv(rows, _ROWS), heads)
    for first in range(0, len(parts), 2):
        a, b = parts[first], parts[min(first + 1, len(parts) - 1)]
        _merge_kernel[grid](
            out, lse, a[0], a[1], b[0], b[1], rows, lse.stride(0), a[1].stride(0), b[1].stride(0), heads, size,
            TWO=first + 1 < len(parts), ROWS=_ROWS, WIDTH=triton.next_power_of_2(size), WIDE=wide,
        )  # fmt: skip


@triton.jit
def _sum_copies_kernel(copies, order, starts, total, width, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    ok = column < width
    start = tl.load(starts + t)
    stop = tl.load(starts + t + 1)
    acc = tl.zeros((WIDTH,), dtype=WIDE)
    for i in range(start, stop):
        row = tl.load(order + i)
        acc += tl.load(copies + row * width + column, mask=ok, other=0.0).to(WIDE)
    tl.store(total + t * width + column, acc.to(total.dtype.element_ty), mask=ok)


def sum_copies(copies: torch.Tensor, order_G: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Sums in float32 or better, in the order given."""
    copies = copies.contiguous()
    total = copies.new_empty((len(starts) - 1, *copies.shape[1:]))
    width = total[0].numel() if len(total) else 0
    if not total.numel():
        return total
    block = min(1024, triton.next_power_of_2(width))
    wide = tl.float64 if copies.dtype == torch.float64 else tl.float32
    grid = (len(total), triton.cdiv(width, block))
    _sum_copies_kernel[grid](copies, order_G, starts, total, width, WIDTH=block, WIDE=wide)
    return total
