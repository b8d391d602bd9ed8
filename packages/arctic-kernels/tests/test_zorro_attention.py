"""Attention on a packed forest against plain attention sample by sample in float64: values and all gradients.

Suffix legend: as in :mod:`arctic_kernels.zorro.attention.kernels`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_kernels.zorro.attention import available_backends, choose_backend, choose_plan, forest_attention
from arctic_kernels.zorro.attention.choice import VARIABLE
from arctic_kernels.zorro.attention.merge import merge_torch_, sum_copies
from arctic_kernels.zorro.discovery import Runs
from arctic_kernels.zorro.errors import UnsupportedAttentionError, ZorroError
from arctic_kernels.zorro.forest import PackedForest, _pack

FORESTS: dict[str, list[tuple[int, int]]] = {  # (parent, tokens) of each node, in level order
    "one sample": [(-1, 5)],
    "one token": [(-1, 1)],
    "two levels": [(-1, 6), (-1, 4), (-1, 3), (0, 2), (0, 5), (1, 1), (1, 4), (1, 2)],
    "one-token nodes": [(-1, 1), (-1, 1), (0, 1), (0, 1), (1, 1)],
    "three levels, a leaf between parents": [(-1, 3), (-1, 2), (0, 4), (0, 1), (1, 3), (2, 2), (2, 1), (4, 5), (4, 1)],
    "four levels": [(-1, 7), (0, 3), (0, 2), (1, 1), (1, 4), (2, 2), (3, 1), (3, 6), (5, 1)],
}


def build(nodes: list[tuple[int, int]], device: str = "cpu") -> PackedForest:
    """The forest of exactly these nodes, with a sample for each path to a leaf."""
    parents, lengths = np.array(nodes, dtype=np.int64).T
    paths = [np.array(path(parents, node)) for node in range(len(nodes)) if node not in parents]
    samples = [np.repeat(nodes_on_it, lengths[nodes_on_it]) for nodes_on_it in paths]  # a node's tokens are its number
    runs = Runs(
        parents_N=parents,
        ends_N=np.array([lengths[path(parents, node)].sum() for node in range(len(nodes))]),
        sources_N=np.array([next(b for b, x in enumerate(paths) if node in x) for node in range(len(nodes))]),
        nodes_B=np.array([x[-1] for x in paths]),
    )
    sizes = np.array([len(sample) for sample in samples])
    return _pack(np.concatenate(samples), runs, sizes, np.ones_like(sizes), torch.device(device))


def path(parents: np.ndarray, node: int) -> list[int]:
    """The node and its ancestors, root first."""
    return [*path(parents, parents[node]), node] if node >= 0 else []


class Case:
    """Random inputs and the weights of a scalar made of the output."""

    def __init__(
        self, forest: PackedForest, heads: int = 4, kv_heads: int = 2, size: int = 8, sinks: bool = False, seed: int = 0
    ) -> None:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.forest, tokens = forest, forest.num_tokens
        self.leaves = [normal(tokens, heads, size), normal(tokens, kv_heads, size), normal(tokens, kv_heads, size)]
        self.leaves += [normal(heads)] if sinks else []
        self.weights = normal(tokens, heads, size)

    def run(self, dtype: torch.dtype, device: str = "cpu", **options: Any) -> list[torch.Tensor]:
        """Output and gradients, in float64; of ``flex`` on a CPU the output alone."""
        if options.get("backend") == "flex" and device == "cpu":
            leaves = [x.to(dtype) for x in self.leaves]
            sinks = leaves[3] if len(leaves) > 3 else None
            return [forest_attention(leaves[0], leaves[1], leaves[2], self.forest, sinks_H=sinks, **options).double()]
        leaves = [x.to(device, dtype).requires_grad_() for x in self.leaves]
        sinks = leaves[3] if len(leaves) > 3 else None
        out = forest_attention(leaves[0], leaves[1], leaves[2], self.forest, sinks_H=sinks, **options)
        assert out.dtype == dtype
        gradients = torch.autograd.grad((out * self.weights.to(device, dtype)).sum(), leaves)
        assert [x.dtype for x in gradients] == [dtype] * len(leaves)
        return [x.detach().double().cpu() for x in (out, *gradients)]

    def oracle(self, dtype: torch.dtype = torch.float64, **options: Any) -> list[torch.Tensor]:
        """Every leaf node's path is a sample; each row's output is taken from one sample that has it."""
        leaves = [x.to(dtype).double().requires_grad_() for x in self.leaves]
        q, k, v = leaves[:3]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        structure = self.forest.structure
        out: list[torch.Tensor] = []
        for node in range(len(structure.parents_N)):
            rows = torch.from_numpy(
                np.concatenate([np.arange(*structure.offsets_N1[n : n + 2]) for n in path(structure.parents_N, node)])
            )
            own = int(structure.offsets_N1[node + 1] - structure.offsets_N1[node])
            out.append(naive(q[rows], k[rows], v[rows], leaves[3] if len(leaves) > 3 else None, **options)[-own:])
        result = torch.cat(out)
        weights = self.weights.to(dtype).double()
        return [x.detach() for x in (result, *torch.autograd.grad((result * weights).sum(), leaves))]


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One sample, ``[L, H, D]``."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    scores = scores.masked_fill((distance < 0) | (distance >= (window or len(q))), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


def close(actual: list[torch.Tensor], expected: list[torch.Tensor], atol: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), actual, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


PRECISE, SINGLE = (torch.float64, 1e-10), (torch.float32, 1e-5)
BACKENDS = [("eager", "split"), ("eager", "gather"), ("sdpa", "split"), ("sdpa", "gather")]  # flex has no backward pass on CPU


@pytest.mark.parametrize(("dtype", "atol"), [PRECISE, SINGLE], ids=["float64", "float32"])
@pytest.mark.parametrize(("backend", "plan"), BACKENDS)
@pytest.mark.parametrize("name", FORESTS)
def test_equals_attention_sample_by_sample(name: str, backend: str, plan: str, dtype: torch.dtype, atol: float) -> None:
    case = Case(build(FORESTS[name]))
    close(case.run(dtype, backend=backend, plan=plan), case.oracle(dtype), atol)


OPTIONS = [{"window": 1}, {"window": 3}, {"window": 100}, {"softcap": 1.5}, {"scale": 0.3}, {"window": 4, "softcap": 2.0}]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("backend", "plan"), BACKENDS)
def test_window_softcap_scale_and_sinks(backend: str, plan: str, options: dict[str, Any], sinks: bool) -> None:
    if backend == "sdpa" and "softcap" in options:
        pytest.skip("a refusal, tested below")
    case = Case(build(FORESTS["three levels, a leaf between parents"]), sinks=sinks)
    close(case.run(torch.float64, backend=backend, plan=plan, **options), case.oracle(**options), 1e-10)


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize(("backend", "plan"), BACKENDS)
def test_head_sizes_and_groups(backend: str, plan: str, heads: int, kv_heads: int, size: int) -> None:
    case = Case(build(FORESTS["two levels"]), heads, kv_heads, size)
    close(case.run(torch.float64, backend=backend, plan=plan), case.oracle(), 1e-10)


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, int]]:
    level = [(-1, draw(st.integers(1, 9))) for _ in range(draw(st.integers(1, 3)))]
    nodes = list(level)
    first = 0
    for _ in range(draw(st.integers(0, 3))):
        most = 3 if len(nodes) < 20 else 1
        children = [n for n in range(len(level)) for _ in range(draw(st.integers(0, most)))]
        level = [(first + n, draw(st.integers(1, 9))) for n in children]
        first = len(nodes)
        nodes += level
    return nodes


@settings(max_examples=60, deadline=None)
@given(nodes=forests(), backend=st.sampled_from(BACKENDS), window=st.none() | st.integers(1, 20), sinks=st.booleans())
def test_any_forest(nodes: list[tuple[int, int]], backend: tuple[str, str], window: int | None, sinks: bool) -> None:
    case = Case(build(nodes), 2, 1, 4, sinks)
    close(case.run(torch.float64, backend=backend[0], plan=backend[1], window=window), case.oracle(window=window), 1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex has no backward pass on CPU")
def test_a_long_forest_in_blocks_of_flex() -> None:
    case = Case(build([(-1, 300), (-1, 140), (0, 200), (0, 40), (1, 260)]), 2, 1, 16)
    close(case.run(torch.float32, backend="flex"), case.oracle(torch.float32), 1e-4)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_bfloat16_is_no_worse_than_its_rounding(backend: str) -> None:
    case = Case(build(FORESTS["four levels"]), size=64)
    for actual, expected in zip(case.run(torch.bfloat16, backend=backend), case.oracle(torch.bfloat16), strict=True):
        assert (actual - expected).norm() / expected.norm() < 1e-2


def parts(*shapes: Any, empty: float = float("-inf")) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    result = []
    for hollow in shapes:
        out, lse = torch.randn(5, 2, 4, generator=g, dtype=torch.float64), torch.randn(2, 5, generator=g, dtype=torch.float64)
        out[hollow], lse[:, hollow] = 0.0, empty
        result.append((out, lse))
    return result


@pytest.mark.parametrize("empty", [float("-inf"), float("inf")], ids=["minus", "plus"])
def test_merge_with_rows_empty_in_some_or_all_parts(empty: float) -> None:
    (out, lse), *others = parts([0, 1, 2], [0, 1], [0], empty=empty)
    before = [(out.clone(), lse.clone()), *others]
    merge_torch_(out, lse, others)
    assert (out[0] == 0).all()
    assert (lse[:, 0] == float("-inf")).all()
    torch.testing.assert_close(out[1], before[2][0][1], rtol=0, atol=1e-15)
    torch.testing.assert_close(lse[:, 1], before[2][1][:, 1], rtol=0, atol=1e-15)
    weights = torch.stack([x[1][:, 4] for x in before]).softmax(0)
    torch.testing.assert_close(
        out[4], sum(w[:, None] * x[0][4] for w, x in zip(weights, before, strict=True)), rtol=0, atol=1e-12
    )


def test_merge_of_far_apart_scores_neither_overflows_nor_loses_the_larger() -> None:
    out, lse = torch.ones(1, 1, 2), torch.tensor([[-3e4]])
    merge_torch_(out, lse, [(torch.full((1, 1, 2), 5.0), torch.tensor([[3e4]]))])
    assert out.tolist() == [[[5.0, 5.0]]]
    assert lse.item() == 3e4


def test_merge_writes_into_views_only() -> None:
    out, lse = torch.zeros(4, 1, 2), torch.zeros(1, 4)
    merge_torch_(out[1:3], lse[:, 1:3], [(torch.ones(2, 1, 2), torch.zeros(1, 2))])
    assert out[:, 0, 0].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert lse[0, 0] == lse[0, 3] == 0.0


def test_the_backend_is_chosen_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(3, 2, 8)
    assert choose_backend(q).backend == "sdpa"
    assert choose_backend(q, softcap=3.0).backend == "eager"
    assert "sdpa lacks soft-capped scores" in choose_backend(q, softcap=3.0).reason
    monkeypatch.setenv(VARIABLE, "flex")
    assert choose_backend(q).backend == "flex"
    assert VARIABLE in choose_backend(q).reason
    assert choose_backend(q, "eager").backend == "eager"
    with pytest.raises(UnsupportedAttentionError, match=r"'fa4' does not support an NVIDIA GPU|fa4.*NVIDIA GPU"):
        choose_backend(q, "fa4")
    with pytest.raises(UnsupportedAttentionError, match="soft-capped"):
        choose_backend(q, "sdpa", softcap=3.0)
    with pytest.raises(UnsupportedAttentionError, match="the name"):
        choose_backend(q, "fa5")
    assert {row.backend: row.available for row in available_backends("cpu")} == {
        "fa4": False, "flash": False, "flex": True, "sdpa": True, "eager": True,
    }  # fmt: skip


def test_what_does_not_fit_is_refused() -> None:
    forest = build(FORESTS["two levels"])
    q, k = torch.zeros(forest.num_tokens, 4, 8), torch.zeros(forest.num_tokens, 2, 8)
    for arguments in [(q[1:], k[1:], k[1:]), (q, k, k[:, :1]), (q[:, :3], k, k), (q, k.double(), k)]:
        with pytest.raises(ZorroError):
            forest_attention(*arguments, forest)
    with pytest.raises(ZorroError, match="sees at least itself"):
        forest_attention(q, k, k, forest, window=0)
    with pytest.raises(ZorroError, match="sinks_H"):
        forest_attention(q, k, k, forest, sinks_H=torch.zeros(3))


def test_short_prefixes_are_copied_and_long_ones_are_not() -> None:
    short = build([(-1, 512), *[(0, 1024)] * 8])
    long = build([(-1, 8192), *[(0, 1024)] * 8])
    assert choose_plan(short, 32, 8) == "gather"
    assert choose_plan(long, 32, 8) == "split"


def triton_device() -> str:
    """The GPU, or the CPU under Triton's interpreter."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("size", [4, 96, 128])
def test_fused_merge_equals_torch(count: int, size: int) -> None:
    device = triton_device()
    from arctic_kernels.zorro.attention import triton_ops

    g = torch.Generator().manual_seed(0)
    whole_out, whole_lse = torch.randn(70, 3, size, generator=g), torch.randn(3, 70, generator=g)
    rest = [(torch.randn(61, 3, size, generator=g), torch.randn(3, 61, generator=g)) for _ in range(count)]
    whole_lse[:, 9:12] = float("-inf")
    whole_out[9:12] = 0
    for out, lse in rest:
        lse[:, 2:4], out[2:4] = float("inf"), 0
    expected = whole_out.clone(), whole_lse.clone()
    merge_torch_(expected[0][7:68], expected[1][:, 7:68], rest)
    actual = whole_out.to(device), whole_lse.to(device)
    triton_ops.merge_(actual[0][7:68], actual[1][:, 7:68], [(o.to(device), x.to(device)) for o, x in rest])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=2e-6)


@pytest.mark.gpu
def test_fused_sum_of_copies_equals_torch() -> None:
    device = triton_device()
    from arctic_kernels.zorro.attention import triton_ops

    g = torch.Generator().manual_seed(0)
    gather = torch.cat([torch.arange(9), torch.randint(0, 9, (20,), generator=g)])
    copies = torch.randn(29, 3, 700, generator=g)
    rows, order = torch.sort(gather, stable=True)
    starts = torch.searchsorted(rows, torch.arange(11))
    actual = triton_ops.sum_copies(copies.to(device), order.to(device), starts.to(device))
    expected = sum_copies(copies, gather, order, starts)
    assert (expected[9] == 0).all()
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-5)


GPU_FORESTS = [
    FORESTS["three levels, a leaf between parents"],
    [(-1, 700), (-1, 130), (0, 257), (0, 64), (1, 300), (2, 90), (4, 1)],
]
GPU_OPTIONS: list[dict[str, Any]] = [{}, {"window": 100}, {"softcap": 5.0}, {"deterministic": True}]
GPU_SIZES = [*itertools.product(GPU_OPTIONS, [128]), *itertools.product(GPU_OPTIONS[:2], [64, 96, 256])]
GPU_BACKENDS = [*itertools.product(("fa4", "flash"), ("split", "gather")), ("flex", "auto")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("options", "size"), GPU_SIZES, ids=str)
@pytest.mark.parametrize("nodes", GPU_FORESTS, ids=["small", "large"])
@pytest.mark.parametrize("backend", GPU_BACKENDS, ids=str)
def test_bfloat16_on_a_gpu(
    backend: tuple[str, str], nodes: list[tuple[int, int]], options: dict[str, Any], size: int, sinks: bool
) -> None:
    case = Case(build(nodes, "cuda"), 8, 2, size, sinks)
    options = {"backend": backend[0], "plan": backend[1], **options}
    try:
        actual = case.run(torch.bfloat16, "cuda", **options)
    except UnsupportedAttentionError as error:
        pytest.skip(str(error))
    if options.get("deterministic"):
        again = case.run(torch.bfloat16, "cuda", **options)
        assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    expected = case.oracle(torch.bfloat16, **{key: x for key, x in options.items() if key in {"window", "softcap"}})
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), actual, expected, strict=False):
        assert (a - b).norm() / b.norm() < 1.2e-2, name
