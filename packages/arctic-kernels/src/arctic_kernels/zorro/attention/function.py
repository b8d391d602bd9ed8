"""Attention on a packed forest: what a sample's tokens would see, with shared tokens computed once.

Two plans. *Split*: all nodes attend causally to themselves in one call on the packed buffer, then the nodes of a level attend
to the nodes of each level above, without a mask, on views; the parts are merged by log-sum-exp, and the merged output and
log-sum-exp serve the backward pass of each part. *Gather*: keys and values of a node's path are copied beside its own, and one
causal call does the rest. Copies cost memory traffic in proportion to the shared tokens, parts in proportion to the queries.
A sliding window takes the second plan, with a path no longer than the window.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from arctic_kernels.zorro.attention import flex
from arctic_kernels.zorro.attention.choice import choose_backend, kernel
from arctic_kernels.zorro.attention.kernels import Call, Inputs, Kernel
from arctic_kernels.zorro.attention.merge import add_sinks_, merge_, sum_copies
from arctic_kernels.zorro.errors import ZorroError

if TYPE_CHECKING:
    from arctic_kernels.zorro.forest import PackedForest, WindowPart

__all__ = ["Plan", "Tape", "choose_plan", "forest_attention"]

Plan = Literal["auto", "split", "gather"]


def forest_attention(
    q_THD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    forest: PackedForest,
    *,
    scale: float | None = None,
    backend: str = "auto",
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    deterministic: bool = False,
    plan: Plan = "auto",
    tape: Tape | None = None,
) -> torch.Tensor:
    """Causal attention of every token to its path in the forest; differentiable once in ``q``, ``k``, ``v`` and the sinks.

    Args:
        q_THD: Queries of the packed tokens, ``[T, H, D]``.
        k_THD: Keys, ``[T, K, D]``; ``K`` divides ``H``.
        v_THD: Values, ``[T, K, D]``.
        forest: Says which tokens a token sees.
        scale: Multiplies the scores; ``D ** -0.5`` unless given.
        backend: One of ``eager``, ``sdpa``, ``flex``, ``flash``, ``fa4``, or ``auto`` (see :func:`choose_backend`).
        window: How many tokens a token sees at most, itself included.
        softcap: Bounds the scores smoothly.
        sinks_H: Score of one more key of value 0, per head.
        deterministic: Equal inputs give equal bits, gradients included.
        plan: ``split`` or ``gather`` (see the module); ``auto`` takes what moves less memory.
        tape: Keeps the result for a recomputation, or has it from the call that is repeated; unused by ``flex``.

    Raises:
        ZorroError: Shapes or types do not fit together.
        UnsupportedAttentionError: The backend cannot do this.
    """
    inputs = Inputs(q_THD, k_THD, v_THD)
    _check(inputs, sinks_H, forest, window)
    name = choose_backend(
        q_THD, backend, window=window, softcap=softcap, sinks=sinks_H is not None, deterministic=deterministic
    ).backend
    factor = q_THD.shape[-1] ** -0.5 if scale is None else scale
    if name == "flex":
        return flex.attention(inputs, forest, scale=factor, window=window, softcap=softcap, sinks=sinks_H)
    if plan == "auto":
        plan = choose_plan(forest, q_THD.shape[1], k_THD.shape[1]) if q_THD.is_cuda else "split"
    options = _Options(kernel(name), factor, window, softcap, deterministic, window is not None or plan == "gather")
    return _ForestAttention.apply(*(x.contiguous() for x in inputs), sinks_H, _Request(forest, options, tape))


def choose_plan(forest: PackedForest, heads: int, kv_heads: int) -> Literal["split", "gather"]:
    """The plan that moves fewer bytes, forward and backward; where copies would triple keys and values it is ``split``.

    Passes over memory, in units of one 16-bit element: a part costs 13 per query element (merge 3, statistics 2, a float32
    gradient zeroed and read 4, rounded and added 4), a copy 10 per element of keys and of values (copied twice 4, a float32
    gradient zeroed and read 4, rounded and summed 2).
    """
    structure = forest.structure
    copies = int(structure.starts_N.sum())
    queries = sum(part.q_stop - part.q_start for part in forest.ancestors)
    cheaper = 20 * copies * kv_heads < 13 * queries * heads
    return "gather" if cheaper and copies <= 2 * forest.num_tokens else "split"


@dataclass(frozen=True)
class _Options:
    kernel: Kernel
    scale: float
    window: int | None
    softcap: float | None
    deterministic: bool
    gather: bool

    def call(self, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, causal: bool) -> Call:
        window = self.window if causal and self.gather else None
        return Call(cu_q, cu_k, max_q, max_k, causal, self.scale, window, self.softcap, self.deterministic)


class Tape:
    """Attention results of a part of a model that is computed twice, such as a checkpointed layer, in the order of the calls.

    The first pass records, the second takes instead of computing; from then on every pass computes. Holds ``[T, H, D]`` and
    ``[H, T]`` for each call in between.
    """

    def __init__(self) -> None:
        self._results: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._passes = 0

    @contextmanager
    def one_pass(self) -> Iterator[Tape]:
        """Record or take inside the block."""
        self._passes += 1
        try:
            yield self
        finally:
            if self._passes > 1:
                self._results.clear()

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The next result of the first pass, in the second."""
        return self._results.popleft() if self._passes > 1 and self._results else None

    def put(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Record, in the first pass."""
        if self._passes == 1:
            self._results.append((out, lse))


class _Request(NamedTuple):
    forest: PackedForest
    options: _Options
    tape: Tape | None


class _ForestAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, request: _Request
    ) -> torch.Tensor:
        forest, options, tape = request
        result = tape.take() if tape is not None else None
        if result is not None:
            out, lse = result[0].detach(), result[1]  # detached: what was returned once has a history
        else:
            out, lse = (_gather_forward if options.gather else _split_forward)(Inputs(q, k, v), forest, options)
            if sinks is not None:
                add_sinks_(out, lse, sinks)
            if tape is not None:
                tape.put(out.detach(), lse)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.request = request
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        (dout,) = grad_outputs
        dout = dout.contiguous()
        forest, options, _ = ctx.request
        backward = _gather_backward if options.gather else _split_backward
        gradients = backward(dout, Inputs(q, k, v), (out, lse), forest, options)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            delta_HT = (dout.to(lse.dtype) * out).sum(-1).mT
            dsinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta_HT).sum(1).to(sinks.dtype)
        return *gradients, dsinks, None


def _split_forward(inputs: Inputs, forest: PackedForest, options: _Options) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = inputs
    out, lse = options.kernel.forward(q, k, v, _own_call(forest, options))
    for (start, stop), parts in itertools.groupby(forest.ancestors, key=lambda part: (part.q_start, part.q_stop)):
        results = []
        for part in parts:
            keys = slice(part.k_start, part.k_stop)
            call = options.call(part.cu_q, part.cu_k, part.max_q, part.max_k, causal=False)
            results.append(options.kernel.forward(q[start:stop], k[keys], v[keys], call))
        merge_(out[start:stop], lse[:, start:stop], results)
    return out, lse


def _split_backward(
    dout: torch.Tensor, inputs: Inputs, result: tuple[torch.Tensor, torch.Tensor], forest: PackedForest, options: _Options
) -> Inputs:
    (q, k, v), (out, lse) = inputs, result
    gradients = options.kernel.backward(dout, inputs, out, lse, _own_call(forest, options))
    for part in forest.ancestors:
        rows, keys = slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)
        call = options.call(part.cu_q, part.cu_k, part.max_q, part.max_k, causal=False)
        views = Inputs(q[rows], k[keys], v[keys])
        dq_part, dk_part, dv_part = options.kernel.backward(dout[rows], views, out[rows], lse[:, rows], call)
        if part.queried_k is not None:
            dk_part, dv_part = (torch.where(part.queried_k[:, None, None], x, 0) for x in (dk_part, dv_part))
        gradients.q[rows].add_(dq_part)
        gradients.k[keys].add_(dk_part)
        gradients.v[keys].add_(dv_part)
    return gradients


def _own_call(forest: PackedForest, options: _Options) -> Call:
    """Every node to itself."""
    return options.call(forest.cu_nodes, forest.cu_nodes, forest.max_node, forest.max_node, causal=True)


def _gather_forward(inputs: Inputs, forest: PackedForest, options: _Options) -> tuple[torch.Tensor, torch.Tensor]:
    part = _path(forest, options)
    call = options.call(part.cu_q, part.cu_k, part.max_q, part.max_k, causal=True)
    return options.kernel.forward(inputs.q, inputs.k[part.gather_G], inputs.v[part.gather_G], call)


def _gather_backward(
    dout: torch.Tensor, inputs: Inputs, result: tuple[torch.Tensor, torch.Tensor], forest: PackedForest, options: _Options
) -> Inputs:
    part = _path(forest, options)
    call = options.call(part.cu_q, part.cu_k, part.max_q, part.max_k, causal=True)
    copied = Inputs(inputs.q, inputs.k[part.gather_G], inputs.v[part.gather_G])
    dq, dk, dv = options.kernel.backward(dout, copied, *result, call)
    order, starts = part.copies
    return Inputs(dq, sum_copies(dk, part.gather_G, order, starts), sum_copies(dv, part.gather_G, order, starts))


def _path(forest: PackedForest, options: _Options) -> WindowPart:
    return forest.window(forest.naive_tokens + 1 if options.window is None else options.window)


def _check(inputs: Inputs, sinks: torch.Tensor | None, forest: PackedForest, window: int | None) -> None:
    q, k, v = inputs
    shapes = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in inputs._asdict().items())
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2] or q.shape[1] % k.shape[1]:
        raise ZorroError(f"{shapes}: give [T, H, D], [T, K, D] and [T, K, D], where K divides H")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ZorroError(f"{shapes}: types and devices must agree")
    if len(q) != forest.num_tokens or q.device != forest.token_ids.device:
        raise ZorroError(f"{shapes}: the forest has {forest.num_tokens} tokens on {forest.token_ids.device}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ZorroError(f"sinks_H has shape {tuple(sinks.shape)}: one number per query head is needed, {q.shape[1]}")
    if window is not None and window < 1:
        raise ZorroError(f"window is {window}: a token sees at least itself")
