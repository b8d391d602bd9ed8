"""How long it takes to plan a batch of 4,096 samples, and how well the plan balances, over lengths, group sizes and ranks.

    .nox/cpu/bin/python benchmarks/batching.py [--samples N] [--max-tokens N] [--rounds N] [--json FILE]

Times include group bookkeeping and both permutations. Balance is the largest rank cost over the mean one; steps the mean
cost of the ranks over the largest, summed over micro-batches (1 where no rank ever waits); fill the share of the token
budget that is used. Then: selecting every micro-batch of a plan, merging one float per response token, and planning 4,096
samples that share prompts of 2,048 tokens in groups of 8, which are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from arctic_core.batching import BatchPlan, CostModel, plan_batch
from arctic_core.data import Batch

GROUP_SIZES = (1, 8, 64, None)
"""``None``: all samples are one group."""
RANKS = (1, 2, 4, 8, 16, 32, 64)
COST = CostModel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    lines = []
    heads = ("median ms", "max", "m-batches", "balance", "steps", "fill")
    print(f"{'lengths':<10}{'group':>6}{'ranks':>6}" + "".join(f"{head:>10}" for head in heads))
    for name, lengths in distributions(options.samples).items():
        for group_size in GROUP_SIZES:
            batch = make_batch(lengths, group_size or len(lengths))
            for ranks in RANKS:
                line = {"lengths": name, "group": group_size or len(lengths), "ranks": ranks}
                line |= measure(batch, ranks, options.max_tokens, options.rounds)
                lines.append(line)
                show(line)
    figures = {
        "samples": options.samples,
        "max_tokens": options.max_tokens,
        "lines": lines,
        "handling_ms": handling(options.samples, options.max_tokens, options.rounds),
        "shared_ms": shared(options.samples, options.max_tokens, options.rounds),
        "numpy": np.__version__,
        "python": sys.version.split()[0],
        "machine": platform.processor() or platform.machine(),
    }
    medians = [line["median_ms"] for line in lines]
    print(f"medians from {min(medians):.1f} to {max(medians):.1f} ms; {figures['handling_ms']}")
    print(f"shared prompts: {figures['shared_ms']}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def distributions(samples: int) -> dict[str, np.ndarray]:
    """Lengths in tokens."""
    rng = np.random.default_rng(0)
    return {
        "equal": np.full(samples, 2048),
        "uniform": rng.integers(64, 8192, samples),
        "lognormal": np.clip(rng.lognormal(7, 1, samples), 16, 32768).astype(np.int64),
        "bimodal": np.where(rng.random(samples) < 0.05, 16384, 512),
        "sorted": np.sort(rng.integers(64, 8192, samples)),
    }


def make_batch(lengths: np.ndarray, group_size: int) -> Batch:
    """One prompt token each; groups lie together."""
    total = int(lengths.sum())
    size = len(lengths)
    return Batch(
        token_ids=np.zeros(total, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.ones(size, np.int64),
        groups=tuple(i // group_size for i in range(size)),
        temperatures=np.ones(size, np.float32),
        advantages=np.zeros(total - size, np.float32),
        old_logprobs=np.zeros(total - size, np.float32),
    )


def timed(call: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds of each round, after one to warm up."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(batch: Batch, ranks: int, max_tokens: int, rounds: int) -> dict[str, float]:
    def plan() -> BatchPlan:
        made = plan_batch(batch, ranks=ranks, max_tokens=max_tokens, cost=COST)
        made.inverse  # noqa: B018 - computed on first use, and order with it
        return made

    times = timed(plan, rounds)
    made = plan()
    lengths = batch.lengths
    costs = COST.costs(lengths)
    per_step = np.array([[costs[list(indices)].sum() for indices in rank] for rank in made.ranks])
    totals = per_step.sum(1)
    return {
        "median_ms": statistics.median(times),
        "max_ms": max(times),
        "micro_batches": made.micro_batches,
        "balance": float(totals.max() / totals.mean()),
        "steps": float(per_step.mean(0).sum() / per_step.max(0).sum()),
        "fill": float(lengths.sum() / (per_step.size * max_tokens)),
    }


def handling(samples: int, max_tokens: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of cutting a lognormal batch as planned for 8 ranks, and of merging the results."""
    batch = make_batch(distributions(samples)["lognormal"], 8)
    plan = plan_batch(batch, ranks=8, max_tokens=max_tokens)
    lengths = batch.response_lengths
    outputs = [np.zeros(lengths[[i for m in rank for i in m]].sum(), np.float32) for rank in plan.ranks]
    select = timed(lambda: [batch.select(indices) for rank in plan.ranks for indices in rank], rounds)
    merge = timed(lambda: plan.merge(batch, outputs), rounds)
    return {"select": round(statistics.median(select), 1), "merge": round(statistics.median(merge), 1)}


def shared(samples: int, max_tokens: int, rounds: int) -> dict[str, float]:
    """Median milliseconds of planning with prompts counted once, over ranks."""
    prompt = 2048
    batch = make_batch(prompt + distributions(samples)["lognormal"] % 2048, 8)
    batch = batch.replace(prompt_lengths=np.full(samples, prompt), advantages=None, old_logprobs=None)

    def plan(ranks: int) -> Callable[[], BatchPlan]:
        return lambda: plan_batch(batch, ranks=ranks, max_tokens=max_tokens, cost=COST, shared_prompts=True)

    return {f"{ranks} ranks": round(statistics.median(timed(plan(ranks), rounds)), 1) for ranks in (1, 8, 64)}


def show(line: dict) -> None:
    print(
        f"{line['lengths']:<10}{line['group']:>6}{line['ranks']:>6}{line['median_ms']:>10.1f}{line['max_ms']:>10.1f}"
        f"{line['micro_batches']:>10}{line['balance']:>10.4f}{line['steps']:>10.3f}{line['fill']:>10.3f}"
    )


if __name__ == "__main__":
    main()
