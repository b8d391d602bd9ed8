"""Attention on packed forests on one GPU against packed samples, FlexAttention and copies of keys and values per rollout.

    python benchmarks/zorro_attention.py [--cases A B' C short] [--rounds N] [--json FILE]

Rows of the table, per layer, bfloat16:

- ``naive``: all samples packed one after the other, prompts repeated, one causal varlen call;
- ``copies, as before``: prompts once, interleaved with their responses; each layer gathers prompts and responses, repeats the
  prompt's keys and values for each rollout, calls the kernel for prompts and for responses, and joins the outputs, by autograd;
- ``flex``: FlexAttention with the forest's mask, compiled with Triton;
- ``split``, ``gather``: our two plans; ``auto`` is the one that would be chosen.

Forward, and forward with backward: medians in ms over rounds that alternate between the rows. TFLOP/s count the pairs of query
and key that a row computes (4·H·D operations forward, 10 backward). Peak: memory beyond inputs. Error: relative distance of O,
dQ, dK, dV to float64 over the first group and key head, gradients of a repeated token added up; and the worst of the four over
that of the naive row of the same kernels. "DualKV" is a shape of that paper (arXiv 2605.15422).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from arctic_kernels.zorro import PackedForest
from arctic_kernels.zorro.attention import available_backends, choose_plan, forest_attention


class Shape(NamedTuple):
    """Prompts, rollouts of each, tokens of a prompt and of a response."""

    prompts: int
    rollouts: int
    prompt: int
    response: int


CASES = {
    "A": Shape(8, 8, 8192, 1024),
    "B'": Shape(1, 16, 16384, 2048),
    "C": Shape(8, 8, 2048, 2048),
    "short": Shape(16, 8, 512, 1024),
    "DualKV": Shape(1, 28, 32768, 2048),
    "tiny": Shape(2, 3, 200, 100),
}
NAMES = ("O", "dQ", "dK", "dV")
MOST_SCORES = 4e9
"""Of the float64 reference; a larger case is timed and not compared."""


class Heads(NamedTuple):
    """Query heads, key heads and head size."""

    query: int
    key: int
    size: int


@dataclass(frozen=True)
class Row:
    """One way to compute the attention of a case."""

    name: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    rows: torch.Tensor
    """The forest's row of each of this way's rows."""
    pairs: int
    first: torch.Tensor
    """Whether a row is the first of its forest row."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention on packed forests on one GPU.")
    parser.add_argument("--cases", nargs="+", default=["A", "B'", "C", "short"], choices=CASES)
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), metavar=("H", "K", "D"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", nargs="+", help="only rows whose name contains one of these")
    parser.add_argument("--json", type=Path, help="write the figures here too, after each case")
    options = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "heads": options.heads, "cases": {}}
    for name in options.cases:
        figures["cases"][name] = measure(CASES[name], Heads(*options.heads), options)
        show(name, figures["cases"][name])
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))


def measure(shape: Shape, heads: Heads, options: argparse.Namespace) -> dict[str, Any]:
    samples, forest = batch(shape)
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(forest.num_tokens, count, heads.size, generator=generator, device="cuda").bfloat16()

    packed = normal(heads.query), normal(heads.key), normal(heads.key), normal(heads.query)
    small = forest.num_tokens / shape.prompts * shape.prompt * heads.query / heads.key <= MOST_SCORES
    exact = reference(samples, shape, forest, heads, packed) if small else None
    ways = [w for w in rows(samples, shape, forest, heads) if not options.rows or any(x in w.name for x in options.rows)]
    result: dict[str, Any] = {"shape": shape._asdict(), "tokens": forest.num_tokens, "plan": choose_plan(forest, *heads[:2])}
    runs: dict[str, dict[str, list[float]]] = {}
    for way in ways:
        result[way.name] = {"error": errors(way, packed, exact, slice_rows(forest, shape)), "peak_gib": peak(way, packed)}
        runs[way.name] = {"forward": [], "both": []}
    for _ in range(options.rounds):
        for way in ways:
            leaves = [x[way.rows].requires_grad_() for x in packed[:3]]
            dout = packed[3][way.rows]
            for key in runs[way.name]:
                runs[way.name][key].append(milliseconds(way, leaves, dout, backward=key == "both"))
            del leaves, dout
    for way in ways:
        operations = way.pairs * heads.query * heads.size * 1e-9
        medians = {key: statistics.median(values) for key, values in runs[way.name].items()}
        rates = {"forward": 4 * operations / medians["forward"], "both": 14 * operations / medians["both"]}
        result[way.name] |= {"ms": medians, "all_ms": runs[way.name], "tflops": rates}
    return result


def batch(shape: Shape) -> tuple[list[np.ndarray], PackedForest]:
    samples = samples_of(shape)
    return samples, PackedForest.from_sequences(samples, [shape.prompt] * len(samples), device="cuda", share="prompts")


def samples_of(shape: Shape) -> list[np.ndarray]:
    """Random tokens, one prompt after the other with all its responses."""
    random = np.random.default_rng(0)
    samples = []
    for _ in range(shape.prompts):
        prompt = random.integers(0, 150_000, shape.prompt)
        samples += [np.concatenate([prompt, random.integers(0, 150_000, shape.response)]) for _ in range(shape.rollouts)]
    return samples


def rows(samples: Sequence[np.ndarray], shape: Shape, forest: PackedForest, heads: Heads) -> list[Row]:
    lengths = [shape.prompt] * len(samples)
    apart = PackedForest.from_sequences(samples, lengths, device="cuda", share="none")
    every = torch.arange(forest.num_tokens, device="cuda")
    naive_rows = torch.from_numpy(np.concatenate([forest.sample_rows(b) for b in range(len(samples))])).cuda()
    own = shape.prompt * (shape.prompt + 1) // 2
    response = shape.response * shape.prompt + shape.response * (shape.response + 1) // 2
    shared_pairs = shape.prompts * (own + shape.rollouts * response)
    naive_pairs = len(samples) * (own + response)
    ways = []

    def way(name: str, place: PackedForest, **options: Any) -> None:
        index, pairs = (naive_rows, naive_pairs) if place is apart else (every, shared_pairs)
        ways.append(Row(name, lambda q, k, v: forest_attention(q, k, v, place, **options), index, pairs, firsts(index)))

    kernels = [row.backend for row in available_backends("cuda") if row.available and row.backend in ("flash", "fa4")]
    kernels.sort(reverse=True)
    for kernel in kernels:
        way(f"naive {kernel}", apart, backend=kernel, plan="split")
    way("flex", forest, backend="flex")
    interleaved = torch.cat([every[:0], *interleave(forest, shape)])
    for kernel in kernels:
        before = Copies(shape, kernel)
        ways.append(Row(f"copies, as before {kernel}", before, interleaved, shared_pairs, firsts(interleaved)))
        for plan in ("split", "gather"):
            way(f"{plan} {kernel}", forest, backend=kernel, plan=plan)
    return ways


def firsts(index: torch.Tensor) -> torch.Tensor:
    order = torch.sort(index, stable=True)
    first = torch.ones_like(index, dtype=torch.bool)
    first[order.indices[1:]] = order.values[1:] != order.values[:-1]
    return first


def interleave(forest: PackedForest, shape: Shape) -> list[torch.Tensor]:
    """Rows of each prompt and of its responses, in turn."""
    pieces = []
    for prompt in range(shape.prompts):
        sample_rows = [forest.sample_rows(prompt * shape.rollouts + n) for n in range(shape.rollouts)]
        pieces += [sample_rows[0][: shape.prompt], *(x[shape.prompt :] for x in sample_rows)]
    return [torch.from_numpy(x).cuda() for x in pieces]


class Copies:
    """The pipeline ``copies, as before``: its index tensors are made once, everything else in each call."""

    def __init__(self, shape: Shape, kernel: str) -> None:
        group = shape.prompt + shape.rollouts * shape.response
        starts = torch.arange(shape.prompts, device="cuda")[:, None] * group
        prompt = starts + torch.arange(shape.prompt, device="cuda")
        response = starts + shape.prompt + torch.arange(group - shape.prompt, device="cuda")
        response = response.view(shape.prompts, shape.rollouts, -1)
        repeated = prompt[:, None].expand(-1, shape.rollouts, -1)
        self.prompt, self.response = prompt.flatten(), response.flatten()
        self.full = torch.cat([repeated, response], -1).flatten()
        self.back = torch.argsort(torch.cat([self.prompt, self.response]))
        self.flash = varlen(kernel)
        self.shape = shape

        def offsets(count: int, length: int) -> torch.Tensor:
            return torch.arange(count + 1, dtype=torch.int32, device="cuda") * length

        rollouts = shape.prompts * shape.rollouts
        self.cu_prompt, self.cu_response = offsets(shape.prompts, shape.prompt), offsets(rollouts, shape.response)
        self.cu_full = offsets(rollouts, shape.prompt + shape.response)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        prompts = (x.index_select(0, self.prompt) for x in (q, k, v))
        out_prompt = self.flash(*prompts, self.cu_prompt, self.cu_prompt, shape.prompt, shape.prompt)
        full = (x.index_select(0, self.full) for x in (k, v))
        length = shape.prompt + shape.response
        responses = q.index_select(0, self.response)
        out_response = self.flash(responses, *full, self.cu_response, self.cu_full, shape.response, length)
        return torch.cat([out_prompt, out_response]).index_select(0, self.back)


def varlen(kernel: str) -> Callable[..., torch.Tensor]:
    """Causal varlen attention as its library offers it: ``q, k, v, cu_q, cu_k, max_q, max_k``."""
    if kernel == "flash":
        from torch.nn.attention.varlen import varlen_attn

        def flash(*arguments: Any) -> torch.Tensor:
            out = varlen_attn(*arguments, **causal())
            assert isinstance(out, torch.Tensor)
            return out

        return flash
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    def fa4(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int) -> torch.Tensor:  # noqa: PLR0917
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        result = flash_attn_varlen_func(q, k, v, causal=True, **lengths)
        return result[0] if isinstance(result, tuple) else result

    return fa4


def causal() -> dict[str, Any]:
    """torch's argument for it, which changed its name."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}


def reference(
    samples: Sequence[np.ndarray], shape: Shape, forest: PackedForest, heads: Heads, packed: tuple[torch.Tensor, ...]
) -> list[torch.Tensor]:
    """O, dQ, dK, dV of the first group and key head in float64."""
    small = PackedForest.from_sequences(
        samples[: shape.rollouts], [shape.prompt] * shape.rollouts, device="cuda", share="prompts"
    )
    index = slice_rows(forest, shape)
    q, k, v, dout = (x[index, : max(1, x.shape[1] // heads.key)].double() for x in packed)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = forest_attention(leaves[0], leaves[1], leaves[2], small, backend="eager", plan="split")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def slice_rows(forest: PackedForest, shape: Shape) -> torch.Tensor:
    """Rows of the first group in the level order that it has alone: its prompt, then its responses."""
    sample_rows = [forest.sample_rows(n) for n in range(shape.rollouts)]
    pieces = [sample_rows[0][: shape.prompt], *(x[shape.prompt :] for x in sample_rows)]
    return torch.from_numpy(np.concatenate(pieces)).cuda()


def errors(
    way: Row, packed: tuple[torch.Tensor, ...], exact: list[torch.Tensor] | None, index: torch.Tensor
) -> dict[str, float]:
    """Relative distances to ``exact``; the output's gradient goes to the first of equal rows."""
    if exact is None:
        return dict.fromkeys(NAMES, float("nan"))
    leaves = [x[way.rows].requires_grad_() for x in packed[:3]]
    out = way.attend(*leaves)
    dout = packed[3][way.rows] * way.first[:, None, None]
    gradients = torch.autograd.grad(out, leaves, dout)
    found = []
    for position, value in enumerate((out.detach() * way.first[:, None, None], *gradients)):
        part = value[:, : exact[position].shape[1]].double()
        whole = torch.zeros(len(packed[0]), *part.shape[1:], dtype=torch.float64, device="cuda")
        whole.index_add_(0, way.rows, part)
        found.append(((whole[index] - exact[position]).norm() / exact[position].norm()).item())
    return dict(zip(NAMES, found, strict=True))


def peak(way: Row, packed: tuple[torch.Tensor, ...]) -> float:
    """GiB beyond the inputs in a forward and backward pass, gradients included."""
    leaves = [x[way.rows].requires_grad_() for x in packed[:3]]
    dout = packed[3][way.rows]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(way.attend(*leaves), leaves, dout)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def milliseconds(way: Row, leaves: list[torch.Tensor], dout: torch.Tensor, *, backward: bool) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    out = way.attend(*leaves)
    if backward:
        torch.autograd.grad(out, leaves, dout)
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def machine() -> dict[str, str]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "flash-attn-4", "nvidia-cutlass-dsl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return {"device": torch.cuda.get_device_name(), **versions}


def show(name: str, case: dict[str, Any]) -> None:
    write = sys.stdout.write
    shape = Shape(**case["shape"])
    write(f"\n{name}: {shape.prompts} x {shape.rollouts}, {shape.prompt}/{shape.response}; auto: {case['plan']}\n")
    heads = ("fwd ms", "f+b ms", "fwd TF/s", "f+b TF/s", "peak GiB", "speed-up", *NAMES, "of naive")
    write(f"{'':26}" + "".join(f"{head:>10}" for head in heads) + "\n")
    ways = {key: value for key, value in case.items() if isinstance(value, dict) and "ms" in value}
    best = min((value["ms"]["both"] for key, value in ways.items() if key.startswith("naive")), default=float("nan"))
    for key, value in ways.items():
        base = ways.get(f"naive {key.split()[-1]}") or next(iter(ways.values()))
        worst = max(value["error"][x] / base["error"][x] for x in NAMES)
        numbers = [*value["ms"].values(), *value["tflops"].values(), value["peak_gib"], best / value["ms"]["both"]]
        text = "".join(f"{x:>10.2f}" for x in numbers) + "".join(f"{value['error'][x]:>10.1e}" for x in NAMES)
        write(f"{key:26}{text}{worst:>10.2f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
