"""Score rollouts that share their prompts, packed and one by one, with a tiny random model on the CPU.

Needs arctic-kernels and transformers:

    python examples/zorro/standalone.py
"""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from arctic_kernels.zorro import PackedForest, linear_logprob_entropy, use_forest


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config)


def make_rollouts() -> tuple[list[torch.Tensor], list[int]]:
    """Three prompts with four rollouts each, in any order."""
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 500, (n,), generator=g) for n in (200, 120, 320)]
    groups = [0, 1, 2, 1, 0, 2, 2, 0, 1, 0, 2, 1]
    responses = [torch.randint(0, 500, (int(n),), generator=g) for n in torch.randint(10, 60, (len(groups),), generator=g)]
    samples = [torch.cat([prompts[group], response]) for group, response in zip(groups, responses, strict=True)]
    return samples, [len(prompts[group]) for group in groups]


def packed_logprobs(model: Qwen3ForCausalLM, forest: PackedForest) -> torch.Tensor:
    with use_forest(model, forest):
        hidden = model.model(input_ids=forest.token_ids, position_ids=forest.position_ids).last_hidden_state
    logprobs_R, _ = linear_logprob_entropy(hidden[0], model.lm_head.weight, forest)
    return logprobs_R


def naive_logprobs(model: Qwen3ForCausalLM, samples: list[torch.Tensor], prompt_lengths: list[int]) -> torch.Tensor:
    parts = []
    for tokens, prompt in zip(samples, prompt_lengths, strict=True):
        logits_LV = model(input_ids=tokens.unsqueeze(0)).logits[0, prompt - 1 : -1]
        parts.append(logits_LV.log_softmax(dim=-1).gather(1, tokens[prompt:].unsqueeze(1)).squeeze(1))
    return torch.cat(parts)


def gradient(model: Qwen3ForCausalLM, logprobs_R: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    (-logprobs_R.mean()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    model = make_model()
    samples, prompt_lengths = make_rollouts()
    forest = PackedForest.from_sequences(samples, prompt_lengths)
    packed_R, naive_R = packed_logprobs(model, forest), naive_logprobs(model, samples, prompt_lengths)
    packed_gradient, naive_gradient = gradient(model, packed_R), gradient(model, naive_R)
    print(f"tokens computed: {forest.num_tokens} instead of {forest.naive_tokens} ({forest.tokens_saved} saved)")
    print(f"largest difference of a log-probability: {float((packed_R - naive_R).detach().abs().max()):.1e}")
    print(f"largest difference of a gradient: {float((packed_gradient - naive_gradient).abs().max()):.1e}")


if __name__ == "__main__":
    main()
