"""A check of a real model: a small forest against each of its samples alone, by the model's own attention.

Layers are told apart by what they declare, so a model with a hidden way to mix tokens would pass :func:`check_model`. This
check computes, and finds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from arctic_kernels.zorro.errors import ZorroError
from arctic_kernels.zorro.forest import PackedForest
from arctic_kernels.zorro.hf import use_forest
from arctic_kernels.zorro.hf_layers import find_layers

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}


@torch.no_grad()
def verify_model(model: nn.Module, *, backend: str = "auto", tolerance: float | None = None, seed: int = 0) -> float:
    """Compare hidden states of random tokens, packed and sample by sample; about 400 tokens each way.

    Args:
        model: As for :func:`~arctic_kernels.zorro.use_forest`; every rank of a sharded model must call this.
        backend: Attention backend of the packed pass.
        tolerance: Largest error allowed; None for 1e-4 in float32 and float64, 0.03 in float16, 0.1 in bfloat16.
        seed: Of the tokens.

    Returns:
        The largest error of a sample: norm of the difference over norm of the hidden states.

    Raises:
        UnsupportedLayerError: The model has a layer that cannot run on a forest.
        ZorroError: The error is above the tolerance, or not finite.
    """
    decoder = find_layers(model).models[-1]
    parameter = next(decoder.parameters())
    embeddings: Any = decoder.get_input_embeddings()
    vocabulary = int(embeddings.weight.shape[0])
    samples, prompts = _samples(vocabulary, seed)
    forest = PackedForest.from_sequences(samples, prompts, device=parameter.device, min_shared_tokens=1)
    training = {x: x.training for x in decoder.modules()}
    decoder.eval()
    try:
        with use_forest(model, forest, backend):
            packed_TD = decoder(input_ids=forest.token_ids, position_ids=forest.position_ids).last_hidden_state[0]
        worst = 0.0
        for b, tokens in enumerate(samples):
            alone_LD = (
                decoder(input_ids=tokens.to(parameter.device).unsqueeze(0), use_cache=False).last_hidden_state[0].double()
            )
            rows = torch.as_tensor(forest.sample_rows(b), device=parameter.device)
            error = (packed_TD[rows].double() - alone_LD).norm() / alone_LD.norm()
            worst = max(worst, float(torch.nan_to_num(error, nan=torch.inf)))
    finally:
        for x, mode in training.items():
            x.training = mode
    allowed = TOLERANCES.get(parameter.dtype, 0.1) if tolerance is None else tolerance
    if worst > allowed:
        raise ZorroError(
            f"{type(decoder).__name__} gives other hidden states on a packed forest than for samples alone (relative error"
            f" {worst:.2e}, allowed {allowed:.2e}, backend {backend!r}): train it without shared prompts, and report the model"
        )
    return worst


def _samples(vocabulary: int, seed: int) -> tuple[list[torch.Tensor], list[int]]:
    """Two prompts with three samples each, the second's branch twice, and one sample alone."""
    g = torch.Generator().manual_seed(seed)
    first, second, turn, *ends = (torch.randint(0, vocabulary, (n,), generator=g) for n in (37, 70, 9, 5, 1, 12, 8, 3, 20))
    paths = [(first, ends[0]), (second, ends[1]), (first, ends[2]), (second, turn, ends[3]), (second, turn, ends[4])]
    samples = [torch.cat(x) for x in (*paths, (first, ends[5]), (ends[5],))]
    return samples, [37, 70, 37, 79, 79, 37, 1]
