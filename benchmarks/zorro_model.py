"""Log-probs, entropies and gradients of a whole model on one GPU: samples packed one after the other against a packed forest.

    python benchmarks/zorro_model.py [--cases 8192/1024x8 ...] [--layers N] [--rounds N] [--ways NAME ...] [--json FILE]

One prompt group per case, a random model with the widths of Qwen3-4B (hidden size 2560, 32 query and 8 key heads of 128, MLP
9728, vocabulary 151,936, tied) and few layers, bfloat16, gradient checkpointing. The loss is that of a clipped policy gradient
at ratio 1 with an entropy bonus, over response tokens. Ways:

- ``naive K``: every sample whole, one causal varlen call of kernel ``K``, whole samples through every layer; the same head;
- ``zorro K``: a packed forest; ``+ liger``: with Liger's fused norms, rotary embeddings and SwiGLU (where it is installed);
  ``+ kept``: checkpointed layers keep their attention's output.

Prints medians in ms over rounds that alternate between the ways, forward alone and forward with backward; the peak of all
memory, weights and gradients included; the speed-up over the fastest naive way; the mean difference of log-probs and the
relative difference of all gradients to the first way. ``building`` is the time to find the forest on the CPU and to bring it
over.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from zorro_attention import Shape, machine, samples_of

from arctic_kernels.zorro import PackedForest, available_backends, linear_logprob_entropy, use_forest

CASES = ("8192/1024x8", "16384/2048x16", "2048/2048x8")
BUDGET = 2**30


@dataclass(frozen=True)
class Way:
    """How a case is computed."""

    name: str
    backend: str
    share: str
    liger: bool = False
    keep: bool = False
    head: str = "triton"


class Result(NamedTuple):
    """One forward pass, with or without backward."""

    milliseconds: float
    logprobs_R: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description="A whole model on packed forests on one GPU.")
    parser.add_argument("--cases", nargs="+", default=CASES, help="prompt/response x rollouts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--head", choices=("torch", "triton"), default="triton", help="the head, of all ways")
    parser.add_argument("--ways", nargs="+", help="only ways whose name contains one of these")
    parser.add_argument("--profile", type=Path, help="write the kernels' times of the last way and case here")
    parser.add_argument("--json", type=Path, help="write the figures here too, after each case")
    options = parser.parse_args()
    models = {False: build_model(options.layers, liger=False)}
    if importlib.util.find_spec("liger_kernel"):
        models[True] = build_model(options.layers, liger=True)
    kinds = [
        replace(w, head=options.head)
        for w in ways()
        if w.liger in models and (not options.ways or any(x in w.name for x in options.ways))
    ]
    figures: dict[str, Any] = {"machine": machine(), "layers": options.layers, "cases": {}}
    for case in options.cases:
        figures["cases"][case] = measure(shape_of(case), kinds, models, options.rounds)
        show(case, figures["cases"][case])
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))
    if options.profile:
        profile(shape_of(options.cases[-1]), kinds[-1], models, options.profile)


def ways() -> list[Way]:
    kernels = [row.backend for row in available_backends("cuda") if row.available and row.backend in ("flash", "fa4")]
    kernels.sort(reverse=True)
    found = [Way(f"naive {kernel}", kernel, "none") for kernel in kernels]
    found += [Way(f"zorro {kernel}", kernel, "auto") for kernel in kernels]
    best = kernels[-1]
    return [
        *found,
        Way(f"naive {best} + liger", best, "none", liger=True),
        Way(f"zorro {best} + liger", best, "auto", liger=True),
        Way(f"zorro {best} + liger + kept", best, "auto", liger=True, keep=True),
    ]


def shape_of(case: str) -> Shape:
    prompt, response, rollouts = map(int, re.split("[/x]", case))
    return Shape(1, rollouts, prompt, response)


def build_model(layers: int, *, liger: bool) -> Qwen3ForCausalLM:
    """The same weights either way."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        rope_theta=1e6,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    if liger:
        fuse(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def fuse(model: Qwen3ForCausalLM) -> None:
    """Liger's layers in this model only: its rotary function is a global of transformers' module otherwise."""
    import liger_kernel.transformers as liger  # pyright: ignore[reportMissingImports]
    from transformers.models.qwen3 import modeling_qwen3

    unfused = modeling_qwen3.apply_rotary_pos_emb
    liger.apply_liger_kernel_to_qwen3(rope=False, cross_entropy=False, fused_linear_cross_entropy=False, model=model)
    for layer in model.model.layers:
        attend = layer.self_attn.forward

        def forward(*args: Any, attend: Any = attend, **kwargs: Any) -> Any:
            modeling_qwen3.apply_rotary_pos_emb = liger.liger_rotary_pos_emb
            try:
                return attend(*args, **kwargs)
            finally:
                modeling_qwen3.apply_rotary_pos_emb = unfused

        layer.self_attn.forward = forward


def measure(shape: Shape, kinds: Sequence[Way], models: dict[bool, Qwen3ForCausalLM], rounds: int) -> dict[str, Any]:
    samples, lengths = samples_of(shape), [shape.prompt] * shape.rollouts
    result: dict[str, Any] = {"shape": shape._asdict(), "ways": {}}
    forests: dict[str, PackedForest] = {}
    for share in dict.fromkeys(way.share for way in kinds):
        start = time.perf_counter()
        forests[share] = PackedForest.from_sequences(samples, lengths, device="cuda", share=share)  # type: ignore[arg-type]
        torch.cuda.synchronize()
        result[f"building {share}"] = time.perf_counter() - start
    first = None
    for way in kinds:
        model, forest = models[way.liger], forests[way.share]
        run(model, forest, way, backward=True)  # compiles
        torch.cuda.reset_peak_memory_stats()
        logprobs_R = run(model, forest, way, backward=True).logprobs_R
        peak = (torch.cuda.max_memory_allocated() - others(models, model)) / 2**30
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
        if first is None:
            first = logprobs_R, gradients.cpu()
        away = first[1].cuda()
        difference = {
            "logprobs": (logprobs_R - first[0]).abs().mean().item(),
            "gradients": ((gradients - away).float().norm() / away.float().norm()).item(),
        }
        del gradients, away
        result["ways"][way.name] = asdict(way) | {"peak_gib": peak, "difference": difference, "tokens": forest.num_tokens}
        result["ways"][way.name]["ms"] = {"forward": [], "both": []}
    for _ in range(rounds):
        for way in kinds:
            for key, backward in (("forward", False), ("both", True)):
                found = run(models[way.liger], forests[way.share], way, backward=backward)
                result["ways"][way.name]["ms"][key].append(found.milliseconds)
                models[way.liger].zero_grad(set_to_none=True)
    return result


def others(models: dict[bool, Qwen3ForCausalLM], model: Qwen3ForCausalLM) -> int:
    """Bytes of the weights of models that this way does not use."""
    return sum(p.nbytes for other in models.values() if other is not model for p in other.parameters())


def run(model: Qwen3ForCausalLM, forest: PackedForest, way: Way, *, backward: bool) -> Result:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    with nullcontext() if backward else torch.no_grad():
        with use_forest(model, forest, way.backend, keep_attention=way.keep):
            hidden_TD = model.model(input_ids=forest.token_ids, position_ids=forest.position_ids).last_hidden_state[0]
        logprobs_R, entropy_R = linear_logprob_entropy(
            hidden_TD, model.lm_head.weight, forest, budget_bytes=BUDGET, backend=way.head
        )
        assert entropy_R is not None
    if backward:
        advantages_R = torch.linspace(-1, 1, len(logprobs_R), device="cuda")
        ratio_R = (logprobs_R - logprobs_R.detach()).exp()
        policy_R = torch.minimum(ratio_R * advantages_R, ratio_R.clamp(0.8, 1.2) * advantages_R)
        (-(policy_R + 0.001 * entropy_R).mean()).backward()
    stop.record()
    torch.cuda.synchronize()
    return Result(start.elapsed_time(stop), logprobs_R.detach())


def profile(shape: Shape, way: Way, models: dict[bool, Qwen3ForCausalLM], path: Path) -> None:
    """Times of kernels, copies to the host and synchronisations in one forward and backward pass."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    forest = PackedForest.from_sequences(samples_of(shape), [shape.prompt] * shape.rollouts, device="cuda")
    with torch.profiler.profile(activities=activities) as found:
        run(models[way.liger], forest, way, backward=True)
    models[way.liger].zero_grad(set_to_none=True)
    table = found.key_averages().table(sort_by="cuda_time_total", row_limit=60, max_name_column_width=90)
    copies = [x for x in found.key_averages() if "Memcpy DtoH" in x.key or "Synchronize" in x.key]
    lines = [f"{x.key}: {x.count} times" for x in copies]
    path.write_text(f"{way.name}, {shape}\n{table}\nTo the host, and waits of the host:\n" + "\n".join(lines) + "\n")


def show(case: str, figures: dict[str, Any]) -> None:
    write = sys.stdout.write
    building = ", ".join(f"{key} {figures[key] * 1e3:.1f} ms" for key in figures if key.startswith("building"))
    write(f"\n{case}; {building}\n{'':30}")
    heads = ("tokens", "forward ms", "f+b ms", "peak GiB", "speed-up", "Δ logprob", "Δ gradient")
    write("".join(f"{x:>12}" for x in heads) + "\n")
    naive = [statistics.median(w["ms"]["both"]) for name, w in figures["ways"].items() if name.startswith("naive")]
    best = min(naive, default=float("nan"))
    for name, way in figures["ways"].items():
        forward, both = (statistics.median(way["ms"][key]) for key in ("forward", "both"))
        difference = way["difference"]
        write(f"{name:30}{way['tokens']:>12}{forward:>12.1f}{both:>12.1f}{way['peak_gib']:>12.1f}{best / both:>12.2f}")
        write(f"{difference['logprobs']:>12.1e}{difference['gradients']:>12.1e}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
