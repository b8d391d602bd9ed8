"""The training phase of a GRPO step with ZoRRo Train on against off, through the client, in one process.

    python benchmarks/zorro_step.py [--device cuda] [--prompts N] [--rollouts N] [--prompt N] [--response N] [--rounds N] ...

A random model with the widths of Qwen3-0.6B (28 layers, hidden size 1024, 16 query and 8 key heads of 128, MLP 3072, vocabulary
151,936, tied), the torch engine, gradient checkpointing. One round: log-probs of the batch under the policy (``forward``), the
gradient of the GRPO loss with an entropy bonus (``forward_backward``), and the optimizer's step at learning rate 0, so that
every round does the same. Rounds alternate between the two jobs. Prints the median seconds of each part, the largest
memory, and how far losses and log-probs are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from arctic_core import ArcticRLClientConfig, Batch, NamedLoss, Sample, create_arctic_rl_client

T = TypeVar("T")
PARTS = ("forward", "forward_backward", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description="The training phase of a GRPO step with ZoRRo Train on and off.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(save_model(options, folder), options)
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def save_model(options: argparse.Namespace, folder: str) -> str:
    config = Qwen3Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM._from_config(config, dtype=getattr(torch, options.dtype)).save_pretrained(folder)
    return folder


def make_batch(options: argparse.Namespace) -> Batch:
    random = np.random.default_rng(0)
    rows = []
    for group in range(options.prompts):
        prompt = random.integers(0, options.vocabulary, options.prompt)
        advantages = random.normal(size=options.rollouts)
        for advantage in advantages - advantages.mean():
            tokens = np.concatenate([prompt, random.integers(0, options.vocabulary, options.response)])
            rows.append(
                Sample(
                    token_ids=tokens, prompt_length=options.prompt, advantages=np.full(options.response, advantage), group=group
                )
            )
    return Batch.from_samples(rows)


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    batch = make_batch(options)
    clients = {zorro: create_arctic_rl_client(job(model, zorro, options)) for zorro in ("off", "on")}
    found: dict[str, Any] = {zorro: {"seconds": {part: [] for part in PARTS}} for zorro in clients}
    try:
        for number in range(options.rounds + 1):  # the first compiles kernels
            for zorro, client in clients.items():
                one_round(client, batch, found[zorro], warm=number > 0)
    finally:
        for client in clients.values():
            client.close()
    off, on = (np.asarray(found[zorro].pop("logprobs")) for zorro in ("off", "on"))
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return {
        "case": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "machine": {"device": device, "torch": torch.__version__},
        "ways": found,
        "logprob_difference": {"mean": float(np.abs(off - on).mean()), "largest": float(np.abs(off - on).max())},
    }


def job(model: str, zorro: str, options: argparse.Namespace) -> ArcticRLClientConfig:
    training = {
        "engine": "torch",
        "zorro": zorro,
        "micro_batch_tokens": options.micro_batch_tokens,
        "gradient_checkpointing": True,
    }
    return ArcticRLClientConfig.model_validate(
        {
            "model_name": model,
            "comm_protocol": "local",
            "device": options.device,
            "dtype": options.dtype,
            "training_gpus": 1,
            "sampling_gpus": 0,
            "training": training,
        }
    )


def one_round(client: Any, batch: Batch, found: dict[str, Any], *, warm: bool) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    loss = NamedLoss(name="grpo", options={"on_policy": True, "entropy_coef": 0.001})
    scores, scoring = timed(lambda: client.forward(batch, entropy=True))
    gradients, training = timed(lambda: client.forward_backward(batch, loss))
    stepped, stepping = timed(lambda: client.step(lr=0.0))
    if warm:
        for part, seconds in zip(PARTS, (scoring, training, stepping), strict=True):
            found["seconds"][part].append(seconds)
    found["logprobs"] = scores.logprobs
    found["metrics"] = {name: metric.mean for name, metric in gradients.metrics.items()}
    found["grad_norm"] = stepped.grad_norm
    if cuda:
        found["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30


def timed(run: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def show(figures: dict[str, Any]) -> None:
    write = sys.stdout.write
    write(f"{figures['machine']}\n{figures['case']}\n{'zorro':8}" + "".join(f"{part + ' s':>20}" for part in PARTS))
    write(f"{'all s':>10}{'peak GiB':>10}{'loss':>14}{'grad norm':>12}\n")
    totals = {}
    for name, way in figures["ways"].items():
        medians = [statistics.median(way["seconds"][part]) for part in PARTS]
        totals[name] = sum(medians)
        write(f"{name:8}" + "".join(f"{x:>20.3f}" for x in medians) + f"{totals[name]:>10.3f}")
        write(f"{way.get('peak_gib', float('nan')):>10.2f}{way['metrics']['loss']:>14.6f}{way['grad_norm']:>12.5f}\n")
    difference = figures["logprob_difference"]
    write(f"speed-up {totals['off'] / totals['on']:.2f}; log-probs apart: mean {difference['mean']:.1e}, ")
    write(f"largest {difference['largest']:.1e}; tokens saved: {figures['ways']['on']['metrics'].get('zorro_saved')}\n")


if __name__ == "__main__":
    main()
