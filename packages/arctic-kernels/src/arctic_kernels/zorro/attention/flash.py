"""torch's own FlashAttention-2 operators for variable lengths, float16 and bfloat16 on GPUs from Ampere on."""

from __future__ import annotations

import torch

from arctic_kernels.zorro.attention.kernels import Call, Inputs

__all__ = ["FlashKernel"]


class FlashKernel:
    """``aten::_flash_attention_forward`` and ``_backward``. Always deterministic in keys and values, not in queries."""

    name = "flash"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        if not q.numel() or not k.numel():
            return torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
        result = torch.ops.aten._flash_attention_forward(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, False, scale=call.scale, **_window(call)
        )
        return result[0], result[1]

    def backward(self, dout: torch.Tensor, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, call: Call) -> Inputs:
        q, k, v = inputs
        if not q.numel() or not k.numel():
            return Inputs(*map(torch.zeros_like, inputs))
        state = torch.empty(2, dtype=torch.int64, device=q.device)  # of the dropout that there is none of
        gradients = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            0.0,
            call.causal,
            state,
            state,
            scale=call.scale,
            **_window(call),
        )
        return Inputs(*gradients)


def _window(call: Call) -> dict[str, int]:
    return {} if call.window is None else {"window_size_left": call.window - 1, "window_size_right": 0}
