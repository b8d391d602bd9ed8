"""Attention on a packed forest, forward and backward, over several backends."""

from __future__ import annotations

from arctic_kernels.zorro.attention.choice import BACKENDS, BackendRow, Choice, available_backends, choose_backend
from arctic_kernels.zorro.attention.function import choose_plan, forest_attention

__all__ = ["BACKENDS", "BackendRow", "Choice", "available_backends", "choose_backend", "choose_plan", "forest_attention"]
