"""FlashAttention-4 (the package ``flash-attn-4``), float16 and bfloat16, on Hopper and Blackwell."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from arctic_kernels.zorro.attention.kernels import Call, Inputs

__all__ = ["Fa4Kernel"]


class Fa4Kernel:
    """The forward and backward functions beneath ``flash_attn.cute``'s autograd functions, which take a given log-sum-exp."""

    name = "fa4"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _interface()._flash_attn_fwd(q, k, v, softcap=call.softcap, return_lse=True, **_arguments(call))[:2]
        return out, lse

    def backward(self, dout: torch.Tensor, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, call: Call) -> Inputs:
        q, k, v = inputs
        options = {"softcap": call.softcap or 0.0, "deterministic": call.deterministic, **_arguments(call)}
        gradients = _interface()._flash_attn_bwd(q, k, v, out, dout, lse.contiguous(), **options)[:3]
        return Inputs(*gradients)


@functools.cache
def _interface() -> ModuleType:
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface


def _arguments(call: Call) -> dict[str, Any]:
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size_left": None if call.window is None else call.window - 1,
        "window_size_right": None if call.window is None else 0,
    }
