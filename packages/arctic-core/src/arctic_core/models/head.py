"""The output layer of a loaded model, made to return scores instead of logits, in chunks under a memory budget.

During a scoring call the output layer's ``forward`` is exchanged, on that one module: it hands its hidden states and weight to
:func:`arctic_kernels.head.linear_logprob_entropy` and returns the scores, which the model passes on as if they were logits.
Names of parameters stay, and hooks around the module still run, so a runtime that shards the weight gathers it as ever.

What a model does to its logits after the output layer is measured, not looked up: a stand-in for the layer returns chosen
numbers, and what the model makes of them is compared. A constant factor is taken into account. Anything else, such as
soft-capping, leaves the model with its own output layer and whole logits.

Suffix legend: ``_R`` response tokens, ``_P`` rows that predict them, ``_D`` hidden size, ``_V`` vocabulary, ``_K`` candidates,
``_S`` scores of a response token: its log-prob, its entropy where wanted, and the log-probs of its candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from arctic_kernels.head import HeadOutput, linear_logprob_entropy

logger = logging.getLogger(__name__)

_TOLERANCE = 0.05  # relative, between scores of both paths; bfloat16 logits are rounded to about 0.004 of their size
_PROBE_TOKENS = 7
_PROBE_ROWS = (0, 2, 3, 5)  # not all of them: a model may pick rows only after its output layer


class ChunkedHead:
    """Scores by a model's output layer.

    Args:
        layer: The output layer, a plain :class:`torch.nn.Linear`.
        scale: Factor by which the model multiplies the layer's output.
        budget_bytes: Most bytes of temporaries.
    """

    def __init__(self, layer: nn.Linear, scale: float, budget_bytes: int) -> None:
        self.layer, self.scale, self.budget_bytes = layer, scale, budget_bytes

    def score(
        self,
        run: Callable[[], torch.Tensor],
        labels_R: torch.Tensor,
        temperatures_R: torch.Tensor,
        *,
        rows_R: torch.Tensor | None = None,
        entropy: bool,
        ids_RK: torch.Tensor | None,
        topk: int,
    ) -> HeadOutput:
        """Scores of the labels.

        Args:
            run: Runs the model on rows that predict the labels and returns its logits ``[1, P, V]``, or what stands for them.
            labels_R: Response tokens.
            temperatures_R: Their temperatures.
            rows_R: Which of the ``P`` rows predicts each label; ``None``: one after the other.
            entropy: Whether entropies are wanted.
            ids_RK: More tokens to score.
            topk: How many most likely tokens to report instead.
        """
        found: list[HeadOutput] = []

        def forward(hidden_1PD: torch.Tensor) -> torch.Tensor:
            output = linear_logprob_entropy(
                hidden_1PD[0],
                self.layer.weight,
                labels_R,
                bias_V=self.layer.bias,
                temperature=temperatures_R,
                rows_R=rows_R,
                ids_RK=ids_RK,
                topk=topk,
                entropy=entropy,
                scale=self.scale,
                budget_bytes=self.budget_bytes,
            )
            found.append(output)
            columns = [output.logprobs_R[:, None]]
            if output.entropy_R is not None:
                columns.append(output.entropy_R[:, None])
            if output.topk_logprobs_RK is not None:
                columns.append(output.topk_logprobs_RK)
            return torch.cat(columns, dim=1)[None]

        with _exchanged(self.layer, forward):
            # What comes out of the model has passed the hooks that bring a sharded weight back for the backward pass.
            scores_RS = run()[0] / self.scale
        first = 1 + entropy
        candidates_RK = scores_RS[:, first:] if topk or ids_RK is not None else None
        if topk and candidates_RK is not None:
            candidates_RK = candidates_RK.detach()
        return HeadOutput(scores_RS[:, 0], scores_RS[:, 1] if entropy else None, candidates_RK, found[0].topk_ids_RK)


@torch.no_grad()
def chunked_head(model: PreTrainedModel, budget_bytes: int) -> ChunkedHead | None:
    """The head of a model that is loaded whole, or ``None`` where the model must use its own; which one is logged.

    Runs the model on a few tokens.
    """
    was_training = model.training
    model.eval()
    try:
        head, reason = _find(model, budget_bytes)
    finally:
        model.train(was_training)
    name = type(model).__name__
    if head is None:
        logger.warning("%s scores with whole logits, which takes more memory: %s", name, reason)
    else:
        logger.info("%s scores in chunks of at most %d bytes, logits times %g", name, budget_bytes, head.scale)
    return head


def _find(model: PreTrainedModel, budget_bytes: int) -> tuple[ChunkedHead | None, str]:
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return None, f"its output layer is a {type(layer).__name__}, not a plain linear layer"
    scale = _scale(model, layer)
    if scale is None:
        return None, "it does more to its logits than multiply them by a constant"
    head = ChunkedHead(layer, scale, budget_bytes)
    if not _agrees(model, head):
        return None, "scores in chunks differ from those of its own logits"
    return head, ""


def _scale(model: PreTrainedModel, layer: nn.Linear) -> float | None:
    """The factor between the layer's output and the model's logits, if that is all there is between them."""
    # Of both signs and up to sizes that any soft-capping or clamping shows; float32, so that the factor is exact enough.
    chosen_RV = torch.linspace(-1e4, 1e4, len(_PROBE_ROWS) * layer.out_features, device=layer.weight.device)
    chosen_RV = chosen_RV.reshape(layer.out_features, len(_PROBE_ROWS)).T.contiguous()
    expected, width = (1, len(_PROBE_ROWS), layer.in_features), layer.out_features
    seen: list[torch.Size] = []

    def stand_in(hidden_1RD: torch.Tensor) -> torch.Tensor:
        seen.append(hidden_1RD.shape)
        return chosen_RV[None].clone() if hidden_1RD.shape == expected else chosen_RV.new_zeros(*hidden_1RD.shape[:-1], width)

    with _exchanged(layer, stand_in):
        logits_RV = _probe(model)[0]
    if seen != [expected] or logits_RV.shape != chosen_RV.shape:
        return None
    scale = float((logits_RV.double() * chosen_RV).sum() / chosen_RV.double().square().sum())
    same = torch.allclose(logits_RV.double(), scale * chosen_RV.double(), rtol=1e-5, atol=0)
    if not same or scale <= 0:
        return None
    return 1.0 if abs(scale - 1) < 1e-6 else scale


def _agrees(model: PreTrainedModel, head: ChunkedHead) -> bool:
    labels_R = torch.arange(len(_PROBE_ROWS), device=head.layer.weight.device) % head.layer.out_features
    temperatures_R = torch.ones(len(_PROBE_ROWS), device=labels_R.device)
    scores = head.score(lambda: _probe(model), labels_R, temperatures_R, entropy=True, ids_RK=None, topk=0)
    logp_RV = _probe(model)[0].double().log_softmax(-1)
    expected = logp_RV.gather(1, labels_R[:, None])[:, 0], torch.special.entr(logp_RV.exp()).sum(-1)
    for mine, theirs in zip(scores[:2], expected, strict=True):
        assert mine is not None
        if not bool((mine - theirs).norm() <= _TOLERANCE * theirs.norm()):
            return False
    return True


def _probe(model: PreTrainedModel) -> torch.Tensor:
    """Logits ``[1, R, V]`` of some of the first few tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    output: Any = model(
        input_ids=positions.remainder(vocabulary)[None],
        position_ids=positions[None],
        cu_seqlens=(0, _PROBE_TOKENS),
        logits_to_keep=positions[list(_PROBE_ROWS)],
        use_cache=False,
    )
    return output.logits


@contextmanager
def _exchanged(layer: nn.Linear, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    vars(layer)["forward"] = forward  # hides the class's
    try:
        yield
    finally:
        del vars(layer)["forward"]
