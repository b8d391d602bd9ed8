"""Drawing tokens: temperature, top-k, top-p, and a draw that depends on one generator alone.

Suffix legend: ``_B`` sequences, ``_V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arctic_core.protocol import SamplingParams


def sampling_logprobs(logits_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probs (nats, float32) of the distribution each row is drawn from, −inf outside it.

    Logits are divided by the temperature; of the result the ``top_k`` largest are kept (and what ties with the last of
    them); of what they give, the most likely tokens up to and including the one that reaches the mass ``top_p`` (Holtzman et
    al., 2020). A greedy row (temperature 0) has its full distribution of temperature 1.
    """
    scale = [p.temperature or 1.0 for p in params]
    logits_BV = logits_BV.float() / torch.tensor(scale, device=logits_BV.device)[:, None]
    rows = [i for i, p in enumerate(params) if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1)]
    if rows:
        logits_BV[rows] = _filter(logits_BV[rows], [params[i] for i in rows])
    return logits_BV.log_softmax(-1)


def _filter(logits_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    device = logits_BV.device
    vocabulary = logits_BV.shape[-1]
    ranked_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    last = torch.tensor([min(p.top_k or vocabulary, vocabulary) - 1 for p in params], device=device)[:, None]
    ranked_BV = ranked_BV.masked_fill(ranked_BV < ranked_BV.gather(-1, last), -torch.inf)
    mass_BV = ranked_BV.softmax(-1)
    before_BV = mass_BV.cumsum(-1) - mass_BV
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    # top_p = 1 keeps all: rounding may let the running sum reach 1 before the end.
    ranked_BV = ranked_BV.masked_fill((before_BV >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(ranked_BV).scatter_(-1, order_BV, ranked_BV)


def draw(logprobs_BV: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]) -> torch.Tensor:
    """One token per row, int64 ``[B]``.

    The largest of ``logp − log E`` with ``E ~ Exp(1)`` per token is a draw from the distribution (the Gumbel-max trick). All
    noise comes from the row's own CPU generator, so a row's draws do not depend on its neighbours; and unlike inverting the
    cumulative distribution, rounding that differs with the batch changes a draw only with a chance of about its own size.
    """
    tiny = torch.finfo(torch.float32).tiny
    scores_BV = logprobs_BV.clone()
    for i, (p, generator) in enumerate(zip(params, generators, strict=True)):
        if p.temperature > 0:
            noise_V = torch.empty(logprobs_BV.shape[-1]).exponential_(generator=generator).clamp_min_(tiny)
            scores_BV[i] -= noise_V.log_().to(scores_BV.device)
    return scores_BV.argmax(-1)
