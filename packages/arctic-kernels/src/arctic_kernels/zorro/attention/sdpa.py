"""torch's blocked attention for CPUs (``aten::_scaled_dot_product_flash_attention_for_cpu``), segment by segment."""

from __future__ import annotations

import torch

from arctic_kernels.zorro.attention.eager import segments
from arctic_kernels.zorro.attention.kernels import Call, Inputs

__all__ = ["SdpaKernel"]


class SdpaKernel:
    """Never holds a segment's scores; keys and values are repeated for their query heads, one segment at a time."""

    name = "sdpa"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=wide)
        group = q.shape[1] // k.shape[1]
        for queries, keys in segments(call):
            arguments = _heads(q[queries]), _heads(k[keys], group), _heads(v[keys], group)
            out_s, lse_s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *arguments, 0.0, _square(queries, keys, call), attn_mask=_mask(queries, keys, call, q), scale=call.scale
            )
            out[queries], lse[:, queries] = out_s[0].transpose(0, 1), lse_s[0].view(q.shape[1], -1)
        return out, lse

    def backward(self, dout: torch.Tensor, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, call: Call) -> Inputs:
        q, k, v = inputs
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        group = q.shape[1] // k.shape[1]
        for queries, keys in segments(call):
            arguments = _heads(q[queries]), _heads(k[keys], group), _heads(v[keys], group)
            dq_s, dk_s, dv_s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads(dout[queries]),
                *arguments,
                _heads(out[queries]),
                lse[None, :, queries],
                0.0,
                _square(queries, keys, call),
                attn_mask=_mask(queries, keys, call, q),
                scale=call.scale,
            )
            dq[queries] = dq_s[0].transpose(0, 1)
            dk[keys], dv[keys] = (x[0].unflatten(0, (-1, group)).sum(1).transpose(0, 1) for x in (dk_s, dv_s))
        return Inputs(dq, dk, dv)


def _heads(x: torch.Tensor, group: int = 1) -> torch.Tensor:
    """``[L, K, D]`` to ``[1, K * group, L, D]``."""
    return x.transpose(0, 1).repeat_interleave(group, 0)[None] if group > 1 else x.transpose(0, 1)[None]


def _square(queries: slice, keys: slice, call: Call) -> bool:
    """Whether the operator's own causal mask, which aligns to the top left, is the one wanted."""
    return call.causal and call.window is None and queries.stop - queries.start == keys.stop - keys.start


def _mask(queries: slice, keys: slice, call: Call, like: torch.Tensor) -> torch.Tensor | None:
    if not call.causal or _square(queries, keys, call):
        return None
    rows, columns = queries.stop - queries.start, keys.stop - keys.start
    seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    if call.window is not None:
        seen = seen.triu(columns - rows - call.window + 1)
    return like.new_zeros(1, 1, rows, columns).masked_fill(~seen, float("-inf"))
