"""The head in tiles: its loop with plain kernels anywhere, the Triton kernels where they run, both against float64.

``TRITON_INTERPRET=1`` runs the Triton kernels on a CPU where the package triton is installed.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arctic_kernels import head_fused
from arctic_kernels.head import linear_logprob_entropy
from arctic_kernels.head_fused import Kernels, Scored, State, Tile, tile_shape
from arctic_kernels.head_plan import Plan, Rows

GPU = torch.cuda.is_available()
TRITON = importlib.util.find_spec("triton") is not None and (GPU or os.environ.get("TRITON_INTERPRET") == "1")


class PlainKernels:
    """The same passes by torch, in float64 inside."""

    def product(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(left.double() @ right.double())

    def add_product(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(left.double() @ right.double())

    def statistics(self, tile: Tile, state: State) -> None:
        z = self._z(tile)[0]
        rows = slice(tile.row, tile.row + len(z))
        old, total, weighted = (x[rows].double() for x in state[:3])
        new = torch.maximum(old, z.amax(1))
        e = (z - new[:, None]).exp()
        state.weighted_S[rows] = (weighted + (old - new) * total) * (old - new).exp() + ((z - new[:, None]) * e).sum(1)
        state.sum_S[rows] = total * (old - new).exp() + e.sum(1)
        state.top_S[rows] = new
        for row, label, j, at in self._labels(tile):
            state.logits_RJ[label, j] = z[row, at]

    def gradient(
        self,
        tile: Tile,
        scored: Scored,
        grad_logprobs_RJ: torch.Tensor | None,
        grad_entropy_S: torch.Tensor | None,
        out_CW: torch.Tensor,
    ) -> None:
        z, slope = self._z(tile)
        rows = slice(tile.row, tile.row + len(z))
        logp = z - scored.lse_S[rows, None]
        inner = torch.zeros_like(logp)
        hot = torch.zeros_like(logp)
        if grad_entropy_S is not None:
            inner += grad_entropy_S[rows, None] * (logp + scored.entropy_S[rows, None])
        if grad_logprobs_RJ is not None:
            inner += torch.zeros(len(scored.lse_S), dtype=z.dtype).index_add_(
                0, scored.rows.row_R, grad_logprobs_RJ.sum(1).to(z.dtype)
            )[rows, None]
            for row, label, j, at in self._labels(tile):
                hot[row, at] += grad_logprobs_RJ[label, j]
        out_CW.copy_((hot - logp.exp() * inner) * slope)

    def _z(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        heat = tile.temperatures_S[tile.row : tile.row + len(tile.x_CW), None].double()
        z, slope = tile.x_CW.double() * tile.scale, tile.scale / heat
        if tile.softcap is not None:
            bent = (z / tile.softcap).tanh()
            z, slope = tile.softcap * bent, slope * (1 - bent**2)
        return z / heat, slope

    def _labels(self, tile: Tile) -> list[tuple[int, int, int, int]]:
        found = []
        for row in range(len(tile.x_CW)):
            for label in range(int(tile.starts_S[tile.row + row]), int(tile.starts_S[tile.row + row + 1])):
                for j, token in enumerate(tile.ids_RJ[label].tolist()):
                    if 0 <= token - tile.column < tile.x_CW.shape[1]:
                        found.append((row, label, j, token - tile.column))
        return found


def kernels(name: str) -> Kernels:
    if name == "plain":
        return PlainKernels()
    real = head_fused.triton_kernels()
    if GPU:
        return real
    products: Any = PlainKernels()
    return SimpleNamespace(  # type: ignore[return-value]
        product=products.product, add_product=products.add_product, statistics=real.statistics, gradient=real.gradient
    )


@pytest.mark.parametrize(
    "name",
    ["plain", pytest.param("triton", marks=[pytest.mark.gpu, pytest.mark.skipif(not TRITON, reason="needs triton and a GPU")])],
)
@pytest.mark.parametrize("options", [{}, {"scale": 1.5, "softcap": 4.0}], ids=str)
@pytest.mark.parametrize("budget", [9_000, 200_000, 1 << 30])
@pytest.mark.parametrize("shared", [False, True], ids=["one label", "shared rows"])
@pytest.mark.parametrize("parts", ["logprobs", "entropy", "both"])
def test_value_and_gradient(name: str, options: dict[str, float], budget: int, shared: bool, parts: str) -> None:
    if name == "plain" and GPU:
        pytest.skip("runs on a CPU")
    device = "cuda" if GPU else "cpu"
    g = torch.Generator().manual_seed(0)
    count, hidden_rows, vocabulary, width = 33, (12 if shared else 33), 2600, 16
    hidden = torch.randn(hidden_rows, width, generator=g).bfloat16().to(device)
    weight = torch.randn(vocabulary, width, generator=g).bfloat16().to(device)
    ids = torch.randint(0, vocabulary, (count, 2), generator=g).to(device)
    heat = (0.7 + 0.5 * torch.randint(0, 2, (count,), generator=g)).to(device)
    source = torch.randint(0, hidden_rows, (count,), generator=g).to(device) if shared else torch.arange(count, device=device)
    u = torch.randn(count, 2, generator=g).to(device) if parts != "entropy" else None
    v = torch.randn(count, generator=g).to(device) if parts != "logprobs" else None

    rows = Rows.grouped(source, heat, hidden_rows) if shared else Rows.plain(heat)
    plan = Plan(0, True, options.get("scale", 1.0), options.get("softcap"), budget, fused=True)
    sorted_ids = rows.sort(ids)
    logprobs, entropy, lse = head_fused.values(hidden, weight, sorted_ids, rows, plan, kernels=kernels(name))
    grad_entropy = None if v is None else entropy.new_zeros(len(rows)).index_add_(0, rows.row_R, rows.sort(v))
    scored = Scored(hidden, weight, sorted_ids, lse, entropy, rows)
    grads = head_fused.gradients(
        scored, None if u is None else rows.sort(u), grad_entropy, plan, (True, True), kernels=kernels(name)
    )

    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    x = (h[source] @ w.T) * options.get("scale", 1.0)
    cap = options.get("softcap")
    x = x if cap is None else cap * (x / cap).tanh()
    logp = (x / heat[:, None]).log_softmax(-1)
    wanted, uncertainty = logp.gather(1, ids), -(logp.exp() * logp).sum(-1)
    total = sum(
        ((f * y).sum() for f, y in ((u, wanted), (v, uncertainty)) if f is not None), start=torch.zeros((), device=device)
    )
    torch.testing.assert_close(rows.unsort(logprobs).double(), wanted.detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(rows.spread(entropy).double(), uncertainty.detach(), rtol=0, atol=1e-4)
    for mine, theirs in zip(grads, torch.autograd.grad(total, (h, w)), strict=True):
        assert mine is not None
        assert (mine.double() - theirs).norm() <= 6e-3 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not (GPU and TRITON), reason="needs a GPU")
@pytest.mark.parametrize("rows_shared", [False, True])
def test_triton_and_torch_agree(rows_shared: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 128, generator=g).bfloat16().cuda().requires_grad_()
    weight = (0.3 * torch.randn(5003, 128, generator=g)).bfloat16().cuda().requires_grad_()
    source = torch.randint(0, 300, (500,), generator=g).cuda() if rows_shared else None
    labels = torch.randint(0, 5003, (500 if rows_shared else 300,), generator=g).cuda()
    runs = []
    for backend in ("torch", "triton", "triton"):
        output = linear_logprob_entropy(hidden, weight, labels, rows_R=source, backend=backend, budget_bytes=4 * 2**20)
        assert output.entropy_R is not None
        loss = output.logprobs_R.sum() - 0.3 * output.entropy_R.sum()
        runs.append([output.logprobs_R, output.entropy_R, *torch.autograd.grad(loss, (hidden, weight))])
    for mine, theirs in zip(runs[1][:2], runs[0][:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-4)
    for mine, theirs in zip(runs[1][2:], runs[0][2:], strict=True):
        assert (mine.double() - theirs.double()).norm() <= 1e-2 * theirs.double().norm()
    assert all(torch.equal(a, b) for a, b in zip(runs[1], runs[2], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not (GPU and TRITON), reason="needs a GPU")
def test_memory_of_the_gpu_stays_within_the_budget() -> None:
    hidden = torch.randn(4096, 512, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(50_000, 512, device="cuda").bfloat16().requires_grad_()
    labels = torch.randint(0, 50_000, (4096,), device="cuda")
    budget, before = 64 * 2**20, 0
    for _ in range(2):
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output = linear_logprob_entropy(hidden, weight, labels, backend="triton", budget_bytes=budget)
        assert output.entropy_R is not None
        (output.logprobs_R.sum() + output.entropy_R.sum()).backward()
    outside = 50_000 * 512 * 6 + 4096 * 512 * 2 + 200 * 4096 + 2**20
    assert torch.cuda.max_memory_allocated() - before <= budget + outside


@pytest.mark.parametrize("rows", [1, 7, 300, 8192, 65_536])
@pytest.mark.parametrize("vocabulary", [50, 5003, 151_936])
@pytest.mark.parametrize("budget", [2**20, 2**29, 2**30])
def test_tiles_fit_the_budget(rows: int, vocabulary: int, budget: int) -> None:
    count, columns = tile_shape(rows, vocabulary, 2560, budget)
    assert 1 <= count <= rows
    assert 1 <= columns <= vocabulary
    assert 6 * count * columns + 8 * 2560 * count <= budget
    if budget == 2**30 and rows == 65_536 and vocabulary == 151_936:
        assert count == 8192
        assert columns >= 16_000


def test_refusals_name_what_is_missing() -> None:
    hidden, weight, labels = torch.zeros(2, 4), torch.zeros(9, 4), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"a GPU, bfloat16, a layer without bias"):
        linear_logprob_entropy(hidden, weight, labels, bias_V=torch.zeros(9), backend="triton")
    with pytest.raises(ValueError, match="cuda"):
        linear_logprob_entropy(hidden, weight, labels, backend="cuda")
