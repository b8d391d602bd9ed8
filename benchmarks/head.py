"""Log-probs and entropies from hidden states: in chunks under a memory budget against whole logits, value and gradient.

    .nox/cpu/bin/python benchmarks/head.py [--rows N] [--vocabulary N] [--hidden N] [--budget-mib N] [--device cpu|cuda] ...

"Plain" is torch as one would write it: a matrix product, ``log_softmax`` in float32, autograd. Rounds alternate, so that a busy
moment of the machine meets both. Prints the median seconds with the spread and the peak of memory that each allocated beyond
what was there before, outputs and gradients included.
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
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--budget-mib", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    figures = measure(options)
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)

    def tensor(*shape: int) -> torch.Tensor:
        return (0.2 * torch.randn(*shape, generator=generator)).to(options.device, dtype).requires_grad_()

    hidden, weight = tensor(options.rows, options.hidden), tensor(options.vocabulary, options.hidden)
    labels = torch.randint(0, options.vocabulary, (options.rows,), generator=generator).to(options.device)

    def chunked() -> None:
        output = linear_logprob_entropy(hidden, weight, labels, budget_bytes=options.budget_mib * 2**20)
        backward(output.logprobs_R, output.entropy_R)

    def plain() -> None:
        logp = (hidden @ weight.T).float().log_softmax(-1)
        backward(logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1))

    def backward(logprobs: torch.Tensor, entropy: torch.Tensor | None) -> None:
        assert entropy is not None
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        hidden.grad = weight.grad = None

    runs = {"chunked": chunked, "plain": plain}
    peaks = {name: peak_bytes(run, options.device) for name, run in runs.items()}  # warms up too
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            seconds[name].append(timed(run, options.device))
    case = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    return {"case": case, "seconds": seconds, "peak_bytes": peaks, "machine": machine(options.device)}


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
    write(f"{'':10}{'seconds (smallest to largest)':>34}{'peak MiB':>12}\n")
    for name, values in figures["seconds"].items():
        text = f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        write(f"{name:10}{text:>34}{figures['peak_bytes'][name] / 2**20:>12.0f}\n")


if __name__ == "__main__":
    main()
