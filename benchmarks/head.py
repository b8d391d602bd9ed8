"""Log-probs and entropies from hidden states: in chunks under a memory budget against whole logits, value and gradient.

    .nox/cpu/bin/python benchmarks/head.py [--rows N ...] [--vocabulary N] [--hidden N] [--budget-mib N] [--device cpu|cuda] ...

"Chunked" is the head as it is called, "triton" the same in tiles with Triton kernels. "Plain" is torch as one would write it:
a matrix product, ``log_softmax`` in float32, autograd. Rounds alternate, so that a busy moment of the machine meets all.
Prints the median seconds with the spread, and two peaks of memory beyond what was there before: of all, and without outputs
and gradients.

TFLOP/s count ``2 · rows · vocabulary · hidden`` for each product: three for value and gradient (logits, gradients of hidden
states and weight), and four where the logits are made twice, the work that is really done; with ``--value`` one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from arctic_kernels.head import linear_logprob_entropy


def main() -> None:
    parser = argparse.ArgumentParser(description="Log-probs and entropies from hidden states: chunked against plain.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1024])
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--budget-mib", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ways", nargs="+", choices=("chunked", "triton", "plain"), default=["chunked", "plain"])
    parser.add_argument("--value", action="store_true", help="no gradient")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    figures = [measure(rows, options) for rows in options.rows]
    for figure in figures:
        show(figure)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def measure(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator(options.device).manual_seed(0)
    dtype = getattr(torch, options.dtype)

    def tensor(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=options.device)
        return values.mul_(0.2).to(dtype).requires_grad_(not options.value)

    hidden, weight = tensor(rows, options.hidden), tensor(options.vocabulary, options.hidden)
    labels = torch.randint(0, options.vocabulary, (rows,), generator=generator, device=options.device)

    def chunked(backend: str = "torch") -> None:
        output = linear_logprob_entropy(hidden, weight, labels, budget_bytes=options.budget_mib * 2**20, backend=backend)
        backward(output.logprobs_R, output.entropy_R)

    def plain() -> None:
        logp = (hidden @ weight.T).float().log_softmax(-1)
        backward(logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1))

    def backward(logprobs: torch.Tensor, entropy: torch.Tensor | None) -> None:
        assert entropy is not None
        if options.value:
            return
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        hidden.grad = weight.grad = None

    ways = {"chunked": chunked, "triton": lambda: chunked("triton"), "plain": plain}
    runs = {name: ways[name] for name in options.ways}
    peaks = {name: peak_bytes(run, options.device) for name, run in runs.items()}  # warms up too
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            seconds[name].append(timed(run, options.device))
    case = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    wide = 4  # the weight's gradient in float32, then rounded to its own type
    gradients = 0 if options.value else hidden.nbytes + weight.nbytes + (weight.numel() * wide if weight.itemsize < wide else 0)
    return {
        "case": case | {"rows": rows},
        "seconds": seconds,
        "peak_bytes": peaks,
        "temporary_bytes": {name: peak - gradients - 8 * rows for name, peak in peaks.items()},
        "flop_of_a_product": 2 * rows * options.vocabulary * options.hidden,
        "machine": machine(options.device),
    }


def timed(run: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(run: Callable[[], None], device: str) -> int:
    """Most memory that torch's allocator handed out beyond what was in use before."""
    if device == "cuda":
        run()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results: Any = profile.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def machine(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def show(figures: dict[str, Any]) -> None:
    write = sys.stdout.write
    write(f"{figures['machine']}\n{figures['case']}\n")
    write(f"{'':10}{'seconds (smallest to largest)':>34}{'TFLOP/s':>16}{'peak MiB':>12}{'without gradients':>20}\n")
    value, product = figures["case"]["value"], figures["flop_of_a_product"] / 1e12
    for name, values in figures["seconds"].items():
        text = f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        done = [1] if value else [3] if name == "plain" else [3, 4]
        rates = ", ".join(f"{count * product / statistics.median(values):.4g}" for count in done)
        peak, temporary = (figures[key][name] / 2**20 for key in ("peak_bytes", "temporary_bytes"))
        write(f"{name:10}{text:>34}{rates:>16}{peak:>12.0f}{temporary:>20.0f}\n")


if __name__ == "__main__":
    main()
