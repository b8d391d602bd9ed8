"""Attention in plain torch, segment by segment: any device and type, the oracle of the other backends."""

from __future__ import annotations

import torch

from arctic_kernels.zorro.attention.kernels import Call, Inputs

__all__ = ["EagerKernel", "segments"]


class EagerKernel:
    """Holds the scores of one segment at a time, in float32 or better. On a GPU it waits for the device to read the offsets."""

    name = "eager"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=_wide(q.dtype))
        for queries, keys in segments(call):
            scores, _ = _scores(q[queries], k[keys], call)
            lse_s = scores.logsumexp(-1)
            weights = _weights(scores, lse_s)
            values = _kv_heads(v[keys])
            out[queries] = _merge_heads(weights @ values[:, None]).to(out.dtype)
            lse[:, queries] = lse_s.flatten(0, 1)
        return out, lse

    def backward(self, dout: torch.Tensor, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, call: Call) -> Inputs:
        q, k, v = inputs
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys in segments(call):
            scores, slope = _scores(q[queries], k[keys], call)
            groups = scores.shape[:2]
            weights = _weights(scores, lse[:, queries].unflatten(0, groups))
            dout_s, out_s = (_q_heads(x[queries], groups[0]) for x in (dout, out))
            delta = (dout_s * out_s).sum(-1, keepdim=True)
            dscores = weights * (dout_s @ _kv_heads(v[keys])[:, None].mT - delta) * call.scale
            if slope is not None:
                dscores = dscores * slope
            dq[queries] = _merge_heads(dscores @ _kv_heads(k[keys])[:, None]).to(q.dtype)
            dk[keys] = (dscores.mT @ _q_heads(q[queries], groups[0])).sum(1).transpose(0, 1).to(k.dtype)
            dv[keys] = (weights.mT @ dout_s).sum(1).transpose(0, 1).to(v.dtype)
        return Inputs(dq, dk, dv)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def segments(call: Call) -> list[tuple[slice, slice]]:
    """Queries and keys of each segment that has both."""
    cu_q, cu_k = call.cu_q.tolist(), call.cu_k.tolist()
    pairs = zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs if b > a and d > c]


def _kv_heads(x: torch.Tensor) -> torch.Tensor:
    """``[L, K, D]`` to ``[K, L, D]``."""
    return x.transpose(0, 1).to(_wide(x.dtype))


def _q_heads(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[L, H, D]`` to ``[K, group, L, D]``."""
    return x.transpose(0, 1).unflatten(0, (kv_heads, -1)).to(_wide(x.dtype))


def _merge_heads(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1).transpose(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores ``[K, group, Lq, Lk]``, hidden ones minus infinity, and the derivative of the soft cap where there is one."""
    scores = _q_heads(q, k.shape[1]) @ _kv_heads(k)[:, None].mT * call.scale
    slope = None
    if call.softcap is not None:
        squashed = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * squashed, 1 - squashed.square()
    if call.causal:
        position = torch.arange(len(q), device=q.device)[:, None] + (len(k) - len(q))
        key = torch.arange(len(k), device=q.device)
        hidden = key > position
        if call.window is not None:
            hidden |= key <= position - call.window
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, slope


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """``exp(scores - lse)``, with 0 where the row is empty."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
