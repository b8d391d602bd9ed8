"""Which backend computes the attention, and why."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass

import torch

from arctic_kernels.zorro.attention.eager import EagerKernel
from arctic_kernels.zorro.attention.fa4 import Fa4Kernel
from arctic_kernels.zorro.attention.flash import FlashKernel
from arctic_kernels.zorro.attention.kernels import Kernel
from arctic_kernels.zorro.attention.sdpa import SdpaKernel
from arctic_kernels.zorro.errors import UnsupportedAttentionError

__all__ = ["BACKENDS", "VARIABLE", "BackendRow", "Choice", "available_backends", "choose_backend", "kernel"]

BACKENDS = ("fa4", "flash", "flex", "sdpa", "eager")
"""Fastest first."""
VARIABLE = "ARCTIC_FOREST_BACKEND"
"""Environment variable that names the backend where the caller leaves it open."""

_AMPERE, _FA4_MAJORS = 8, (9, 10)
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it."""

    backend: str
    reason: str


@dataclass(frozen=True)
class BackendRow:
    """A backend, whether this machine can run it, and its version or what is missing."""

    backend: str
    available: bool
    detail: str


def kernel(name: str) -> Kernel:
    """The kernel of a backend other than ``flex``, which differentiates itself."""
    kernels: dict[str, type[Kernel]] = {"eager": EagerKernel, "sdpa": SdpaKernel, "flash": FlashKernel, "fa4": Fa4Kernel}
    return kernels[name]()


def choose_backend(
    q: torch.Tensor,
    backend: str = "auto",
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    deterministic: bool = False,
) -> Choice:
    """The backend for queries like ``q`` ``[T, H, D]``: the one that the caller or the environment names, or the fastest.

    Raises:
        UnsupportedAttentionError: The backend named cannot do this; the message names the feature and a remedy.
    """
    asked = "by the caller"
    if backend == "auto" and os.environ.get(VARIABLE, "auto") != "auto":
        backend, asked = os.environ[VARIABLE], f"by {VARIABLE}"
    del window, sinks  # every backend does these
    if backend != "auto":
        if (lack := _lack(backend, q, softcap, deterministic)) is not None:
            raise UnsupportedAttentionError(lack, backend, f"take another of {', '.join(BACKENDS)}, or auto")
        return Choice(backend, f"asked for {asked}")
    lacks = {name: _lack(name, q, softcap, deterministic) for name in BACKENDS if name != "flex" or q.is_cuda}
    chosen = next(name for name, lack in lacks.items() if lack is None)
    slower = [f"{name} lacks {lack}" for name, lack in lacks.items() if lack is not None]
    return Choice(chosen, "; ".join(["fastest that can do this", *slower[: list(lacks).index(chosen)]]))


def available_backends(device: torch.device | str | None = None) -> tuple[BackendRow, ...]:
    """What each backend would need on ``device`` (the GPU if there is one) for bfloat16, head size 128."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    q = torch.empty(0, 1, 128, dtype=torch.bfloat16, device=device)
    lacks = {name: _lack(name, q, None, deterministic=False) for name in BACKENDS}
    return tuple(BackendRow(name, lack is None, f"lacks {lack}" if lack else _version(name)) for name, lack in lacks.items())


def _lack(name: str, q: torch.Tensor, softcap: float | None, deterministic: bool) -> str | None:
    """What is missing for this backend, ``None`` if nothing."""
    if name == "eager":
        return None
    if name == "sdpa":
        return "a CPU" if q.device.type != "cpu" else "soft-capped scores" if softcap is not None else None
    if name == "flex":
        return _flex_lack(q)
    if name not in BACKENDS:
        return f"the name (known: {', '.join(BACKENDS)})"
    return _half_lack(name, q, softcap, deterministic)


def _flex_lack(q: torch.Tensor) -> str | None:
    if q.device.type == "cpu":
        return "a backward pass on CPUs" if q.requires_grad else None
    if not q.is_cuda:
        return "a CPU or an NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    return "float64 on a GPU" if q.dtype == torch.float64 else None


def _half_lack(name: str, q: torch.Tensor, softcap: float | None, deterministic: bool) -> str | None:
    """Of the two libraries that compute in 16 bits."""
    if not q.is_cuda or torch.version.hip:
        return "an NVIDIA GPU"
    major, size = torch.cuda.get_device_capability(q.device)[0], q.shape[-1]
    lacks = [
        (q.dtype not in _HALF, f"{q.dtype} (float16 and bfloat16 only)"),
        (size % 8 != 0 or size > 256, f"head size {size} (a multiple of 8 up to 256)"),
    ]
    if name == "fa4":
        lacks += [
            (not _has_fa4(), "the package flash-attn-4"),
            (major not in _FA4_MAJORS, "a Hopper or Blackwell data-centre GPU"),
        ]
    else:
        lacks += [
            (major < _AMPERE, "an Ampere GPU or a later one"),
            (deterministic, "a deterministic backward pass"),
            (softcap is not None, "soft-capped scores"),
        ]
    return next((text for lacking, text in lacks if lacking), None)


@functools.cache
def _has_fa4() -> bool:
    """``flash_attn`` alone may be FlashAttention-2, which has no ``cute``."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def _version(name: str) -> str:
    if name != "fa4":
        return f"torch {torch.__version__}"
    try:
        return f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}"
    except importlib.metadata.PackageNotFoundError:
        return "flash-attn-4"
