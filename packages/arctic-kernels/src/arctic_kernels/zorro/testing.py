"""Tiny random models of many families, samples with shared prefixes, and scores computed packed and sample by sample.

For tests and for trying a model of one's own: :func:`score_naive` is the definition that packed results must equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from arctic_kernels.zorro.hf import use_forest

if TYPE_CHECKING:
    from arctic_kernels.zorro.forest import PackedForest

VOCABULARY = 61
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_SLIDING: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, **_SLIDING}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "shared_expert_intermediate_size": 24}),
    "gemma": ("Gemma", {}),
    "gemma2": (
        "Gemma2",
        {**_SLIDING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("Gemma3", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"sliding_window": 7}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**_SLIDING}),
    "gpt_oss": (
        "GptOss",
        {
            **_SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite": ("Granite", {"logits_scaling": 2.0}),
    "cohere2": ("Cohere2", {**_SLIDING}),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
    "glm4": ("Glm4", {}),
    "smollm3": ("SmolLM3", {}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "qwen3_next": ("Qwen3Next", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3_5": ("Qwen3_5", _DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24}),
    "olmo_hybrid": ("OlmoHybrid", {**_DELTA, "linear_num_key_heads": 4}),
}


@dataclass(frozen=True)
class Scores:
    """Of the response tokens, in the order of the samples.

    Attributes:
        hidden: For each sample, hidden states [length, hidden] after the last layer.
        logprobs_R: Natural log-probabilities.
        entropy_R: In nats.
    """

    hidden: list[torch.Tensor]
    logprobs_R: torch.Tensor
    entropy_R: torch.Tensor


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """A random causal model of two or three layers.

    Raises:
        LookupError: The installed transformers has no such model.
    """
    import transformers

    prefix, options = FAMILIES[family]
    names = [f"{prefix}TextConfig", f"{prefix}Config"]
    config_class = next((getattr(transformers, x) for x in names if hasattr(transformers, x)), None)
    model_class = getattr(transformers, f"{prefix}ForCausalLM", None)
    if config_class is None or model_class is None:
        raise LookupError(f"the installed transformers has no {prefix}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_BASE, **options, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms, biases and sinks start as constants, which would hide an exchanged or forgotten one.
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.ndim > 1 else 0.2 * torch.rand_like(parameter))
            if "embed" in name:
                parameter.mul_(2.0)
    return model.to(dtype).train()


def random_samples(depth: int, seed: int = 0, longest: int = 9) -> tuple[list[torch.Tensor], list[int]]:
    """Token ids and prompt lengths of samples that form trees of ``depth`` levels, groups interleaved, lengths ragged.

    Every tree has a whole prompt (its root) that three or more samples share, and one sample is alone.
    """
    g = torch.Generator().manual_seed(seed)

    def run() -> torch.Tensor:
        length = int(torch.randint(1, longest + 1, (1,), generator=g))
        return torch.randint(3, VOCABULARY, (length,), generator=g)

    samples: list[torch.Tensor] = []
    prompts: list[int] = []

    def grow(path: torch.Tensor, prompt: int, levels: int) -> None:
        if levels == 0:
            samples.append(path)
            prompts.append(prompt)
            return
        for _ in range(3 if prompt == len(path) else 2):
            grow(torch.cat([path, run()]), prompt, levels - 1)

    for _ in range(2):
        root = torch.cat([run(), run()])
        grow(root, len(root), depth - 1)
    alone = torch.cat([run(), run(), run()])
    samples.append(alone)
    prompts.append(1)
    order = torch.randperm(len(samples), generator=g).tolist()
    return [samples[i] for i in order], [prompts[i] for i in order]


def score_packed(model: nn.Module, forest: PackedForest, backend: str = "auto") -> Scores:
    """One forward pass of the packed forest."""
    with use_forest(model, forest, backend):
        hidden_TD, logits_TV = _forward(model, forest.token_ids, forest.position_ids)
    rows_R = forest.rows_P[forest.row_of_R]
    logprobs_R, entropy_R = _score(logits_TV[rows_R], forest.labels_R)
    samples = len(forest.cu_responses) - 1
    return Scores([hidden_TD[torch.as_tensor(forest.sample_rows(b))] for b in range(samples)], logprobs_R, entropy_R)


def score_naive(model: nn.Module, token_ids: Sequence[torch.Tensor], prompt_lengths: Sequence[int]) -> Scores:
    """Each sample alone, with the model's own attention."""
    hidden, scores = [], []
    for tokens, prompt in zip(token_ids, prompt_lengths, strict=True):
        states_TD, logits_TV = _forward(model, tokens.unsqueeze(0), torch.arange(len(tokens)).unsqueeze(0))
        hidden.append(states_TD)
        scores.append(_score(logits_TV[prompt - 1 : -1], tokens[prompt:]))
    return Scores(hidden, torch.cat([x for x, _ in scores]), torch.cat([x for _, x in scores]))


def gradients(model: nn.Module, score: Callable[[], Scores], seed: int = 0) -> tuple[Scores, dict[str, torch.Tensor]]:
    """Scores, and gradients of a random weighted mean of log-probabilities and entropies with respect to every parameter."""
    model.zero_grad(set_to_none=True)
    scores = score()
    g = torch.Generator().manual_seed(seed)
    weights_2R = torch.randn(2, len(scores.logprobs_R), generator=g, dtype=torch.float64).to(scores.logprobs_R)
    (weights_2R[0] * scores.logprobs_R + weights_2R[1] * scores.entropy_R).mean().backward()
    return scores, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Float64Throughout(TorchFunctionMode):
    """What asks for float32 gets float64 inside the block.

    Models do norms, softmax, rotary embeddings and delta rules in float32 whatever their dtype, which would hide differences
    below 1e-7. With this, a float64 model is float64 in every step of the forward and the backward pass.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _forward(model: nn.Module, token_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output = model(input_ids=token_ids, position_ids=position_ids, output_hidden_states=True, use_cache=False)
    return output.hidden_states[-1][0], output.logits[0]


def _score(logits_RV: torch.Tensor, labels_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    return logprobs_RV.gather(1, labels_R.unsqueeze(1)).squeeze(1), -(logprobs_RV.exp() * logprobs_RV).sum(dim=-1)
