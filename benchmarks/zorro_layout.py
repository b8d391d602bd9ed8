"""How long it takes to pack samples as a forest, on one CPU core, over ways in which samples share tokens.

    OMP_NUM_THREADS=1 .nox/cpu/bin/python benchmarks/zorro_layout.py [--samples N] [--tokens N] [--rounds N] [--json FILE]

``host`` is what a step on an accelerator waits for: finding the shared runs, laying them out, filling the buffer that is
copied (on the meta device: the rest runs on the accelerator). ``all`` also writes out every tensor of the forest on the CPU.
Both are medians of wall times in ms, with the smallest; samples come in random order, as int64 tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from arctic_kernels.zorro import PackedForest
from arctic_kernels.zorro.discovery import find_runs
from arctic_kernels.zorro.forest import DEFAULT_MIN_SHARED_TOKENS, Share

GROUP = 16
VOCABULARY = 151_936
SHARES: tuple[Share, ...] = ("auto", "prompts")


class Batch(NamedTuple):
    """Samples of one length, one after the other."""

    token_ids: np.ndarray
    lengths_B: np.ndarray
    prompt_lengths_B: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384, help="per sample")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    heads = ("share", "nodes", "levels", "T of naive", "find", "host", "min", "all", "min")
    print(f"{'samples':<16}" + "".join(f"{head:>11}" for head in heads))
    for name, batch in batches(options.samples, options.tokens):
        for share in SHARES:
            line = {"case": name, "share": share} | measure(batch, share, options.rounds)
            lines.append(line)
            show(line)
    figures = {
        "samples": options.samples,
        "tokens": options.tokens,
        "lines": lines,
        "numpy": np.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "machine": platform.processor() or platform.machine(),
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def batches(samples: int, tokens: int) -> Iterator[tuple[str, Batch]]:
    """Batches of half prompt and half response, in random order."""
    generator = np.random.default_rng(0)
    prompt = tokens // 2
    groups = np.arange(samples) // GROUP

    def batch(tokens_BL: np.ndarray) -> Batch:
        mixed = tokens_BL[generator.permutation(samples)]
        return Batch(mixed.reshape(-1), np.full(samples, tokens), np.full(samples, prompt))

    def fresh() -> np.ndarray:
        return generator.integers(0, VOCABULARY, (samples, tokens))

    tokens_BL = fresh()
    yield "all different", batch(tokens_BL)
    tokens_BL[:, :prompt] = tokens_BL[groups * GROUP, :prompt]
    yield "groups of 16", batch(tokens_BL)
    tokens_BL[:, : prompt // 4] = tokens_BL[0, : prompt // 4]
    yield "system prompt", batch(tokens_BL)
    for sample in range(samples):  # responses of a group start alike, for up to 1,000 tokens
        more = prompt + int(generator.integers(0, min(1000, prompt)))
        tokens_BL[sample, prompt:more] = tokens_BL[groups[sample] * GROUP, prompt:more]
    yield "starts alike", batch(tokens_BL)
    tokens_BL = fresh()
    for level in range(8):  # two ways on after every eighth of the sample
        width, shared = max(1, samples >> level), tokens * (level + 1) // 8
        for first in range(0, samples, width):
            tokens_BL[first : first + width, tokens * level // 8 : shared] = tokens_BL[first, tokens * level // 8 : shared]
    yield "binary tree", batch(tokens_BL)
    tokens_BL[:] = tokens_BL[0]
    yield "all equal", batch(tokens_BL)


def measure(batch: Batch, share: Share, rounds: int) -> dict[str, Any]:
    """Time packing one batch."""
    offsets_B = np.cumsum(batch.lengths_B) - batch.lengths_B

    def pack(device: str) -> PackedForest:
        return PackedForest.from_packed(*batch, device=device, share=share)

    def find() -> None:
        find_runs(batch.token_ids, offsets_B, batch.lengths_B, DEFAULT_MIN_SHARED_TOKENS)

    found = timed(find, rounds) if share == "auto" else None
    host, whole = timed(lambda: pack("meta"), rounds), timed(lambda: pack("cpu"), rounds)
    forest = pack("meta")
    return {
        "nodes": forest.num_nodes,
        "levels": forest.depth,
        "packed_tokens": forest.num_tokens,
        "naive_tokens": forest.naive_tokens,
        "find_ms": found[0] if found else None,
        "host_ms": host[0],
        "host_min_ms": host[1],
        "all_ms": whole[0],
        "all_min_ms": whole[1],
    }


def timed(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median and smallest wall time in ms, after one round that does not count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:]), min(times[1:])


def show(line: dict[str, Any]) -> None:
    """Print one line of the table."""
    ratio = line["packed_tokens"] / line["naive_tokens"]
    find = "" if line["find_ms"] is None else f"{line['find_ms']:.1f}"
    print(
        f"{line['case']:<16}{line['share']:>11}{line['nodes']:>11}{line['levels']:>11}{ratio:>11.3f}{find:>11}"
        f"{line['host_ms']:>11.1f}{line['host_min_ms']:>11.1f}{line['all_ms']:>11.1f}{line['all_min_ms']:>11.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
