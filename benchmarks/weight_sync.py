"""How long a weight sync takes, by carrier, with the embedded engines in one process.

    .nox/cpu/bin/python benchmarks/weight_sync.py [--model NAME] [--rounds N] [--json FILE]

Both carriers are measured in one run, round by round in turn, so that a busy moment of the machine meets both. Prints the
median, the spread and the ratio of the medians. The default model is a random one of about 50 million parameters.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from arctic_core import ArcticRLClient, ArcticRLClientConfig, create_arctic_rl_client
from arctic_core.testing import make_tiny_model

CARRIERS = ("shared_memory", "file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub id, folder or GGUF file; a random model otherwise")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = options.model or make_tiny_model(folder, hidden_size=1024, layers=6, head_dim=64, initializer_range=0.02)
        clients = {carrier: stack.enter_context(connect(model, carrier, options.bucket_mib)) for carrier in CARRIERS}
        figures = measure(clients, options.rounds)
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def connect(model: str, carrier: str, bucket_mib: int) -> ArcticRLClient:
    sync = {"carrier": carrier, "bucket_bytes": bucket_mib * 2**20}
    config = ArcticRLClientConfig(model_name=model, training_gpus=1, sampling_gpus=1, device="cpu", weight_sync=sync)
    return create_arctic_rl_client(config)


def measure(clients: dict[str, ArcticRLClient], rounds: int) -> dict[str, object]:
    seconds: dict[str, list[float]] = {carrier: [] for carrier in clients}
    size = 0
    for number in range(rounds + 1):
        for carrier, client in clients.items():
            report = client.sync_weights(force=True)
            size = report.bytes
            if number:  # the first round warms files and pages up
                seconds[carrier].append(report.seconds)
    return {
        "bytes": size,
        "seconds": seconds,
        "packages": next(iter(clients.values())).info().packages,
        "python": sys.version.split()[0],
        "machine": platform.processor() or platform.machine(),
    }


def show(figures: dict[str, object]) -> None:
    size, seconds = figures["bytes"], figures["seconds"]
    assert isinstance(size, int)
    assert isinstance(seconds, dict)
    print(f"{size / 2**20:.0f} MiB of weights, {len(seconds[CARRIERS[0]])} rounds")
    print(f"{'carrier':<14}{'median s':>10}{'min':>8}{'max':>8}{'GB/s':>8}")
    for carrier, values in seconds.items():
        median = statistics.median(values)
        print(f"{carrier:<14}{median:>10.3f}{min(values):>8.3f}{max(values):>8.3f}{size / median / 1e9:>8.2f}")
    ratio = statistics.median(seconds["file"]) / statistics.median(seconds["shared_memory"])
    print(f"file takes {ratio:.2f} times as long as shared memory")


if __name__ == "__main__":
    main()
