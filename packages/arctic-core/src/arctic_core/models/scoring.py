"""Packed scoring: log-probs and entropies of response tokens, from one row of sequences.

The logits at a sample's position ``i`` score its token ``i + 1``, inside that sample only. Logits are computed for the rows
that predict a response token and for no others, divided by the temperature, and normalised in float32 (float64 for a
float64 model): chunk by chunk where the model's output layer allows it (:mod:`arctic_core.models.head`), else all at once.

Tokens that samples share may lie on the row once (:mod:`arctic_core.models.shared_prompts`). A position then scores the next
token of several samples; results are per response token, in the order of the batch, all the same.

Suffix legend: ``_T`` token axis of a packed row, ``_P`` positions on it that predict response tokens, ``_R`` response tokens,
``_V`` vocabulary, ``_K`` candidates beside each response token.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from arctic_core.data import Batch
from arctic_core.errors import DataError
from arctic_core.models.head import ChunkedHead, chunked_head
from arctic_core.models.shared_prompts import shared_forest
from arctic_kernels.head import DEFAULT_BUDGET_BYTES, logprob_entropy
from arctic_kernels.zorro import PackedForest, use_forest

LM_ATTRIBUTE = "model"
"""Attribute of :class:`ScoringModule` that holds the language model."""


Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Log-probs ``[R]``, entropies ``[R]``, log-probs ``[R, K]`` of candidates, ids ``[R, K]`` of candidates."""


@dataclass(frozen=True)
class PackedInputs:
    """One micro-batch on the device."""

    token_ids_T: torch.Tensor
    """Int64 ``[1, T]``, ``T >= 1``."""
    position_ids_T: torch.Tensor
    """Position of each token inside its own sample, int64 ``[1, T]``."""
    cu_seqlens: tuple[int, ...]
    """Offsets of the samples on the token axis, on the host; unused with a forest."""
    rows_P: torch.Tensor
    """Positions whose logits predict response tokens, int64 ``[P]``."""
    labels_R: torch.Tensor
    """The response tokens, int64 ``[R]``."""
    temperatures_R: torch.Tensor
    """Temperature of each response token, float32 ``[R]``."""
    topk_ids_RK: torch.Tensor | None = None
    """Candidates to score beside each response token, int64 ``[R, K]``."""
    forest: PackedForest | None = None
    """How samples share tokens of the row; ``None`` where each has its own."""
    row_of_R: torch.Tensor | None = None
    """Which of ``rows_P`` predicts each response token, int64 ``[R]``; ``None``: one after the other, ``P = R``."""

    @property
    def tokens_saved(self) -> int:
        """Tokens that are not computed because another sample's are the same."""
        return 0 if self.forest is None else self.forest.tokens_saved


def pack(
    batch: Batch,
    device: torch.device | str,
    temperature: float | None = None,
    *,
    topk_ids: bool = False,
    forest_tokens: int | None = None,
) -> PackedInputs:
    """Lay a batch out for :class:`ScoringModule`; ``temperature`` overrides the samples' own.

    Args:
        batch: Samples of one micro-batch.
        device: Where the tensors go.
        temperature: Replaces the samples' temperatures.
        topk_ids: Score the batch's ``topk_ids`` too. Without response tokens it need not have any.
        forest_tokens: Lay tokens that samples share on the row once, to stay below this number of tokens
            (:func:`~arctic_core.models.shared_prompts.shared_forest`); ``None`` lays down each sample in full.

    Raises:
        DataError: ``temperature`` is not a positive number, or the batch has no ``topk_ids``.

    An empty batch becomes one dummy token without response tokens, so that a rank without work takes part in collectives.
    """
    if temperature is not None and not 0 < temperature < np.inf:
        raise DataError(f"temperature {temperature} is not a positive number", where="temperature")
    if topk_ids and batch.topk_ids is None and batch.num_response_tokens:
        raise DataError("the batch has no candidates to score", where="batch.topk_ids", remedy="give every sample topk_ids")
    temperatures = np.repeat(batch.temperatures, batch.response_lengths).astype(np.float32)
    if temperature is not None:
        temperatures = np.full_like(temperatures, temperature)
    candidates = np.zeros((0, 0), np.int64) if batch.topk_ids is None else batch.topk_ids.astype(np.int64)
    temperatures_R = torch.from_numpy(temperatures).to(device)
    topk_ids_RK = torch.from_numpy(candidates).to(device) if topk_ids else None
    forest = None if forest_tokens is None else shared_forest(batch, device, forest_tokens)
    if forest is not None:
        return PackedInputs(
            token_ids_T=forest.token_ids,
            position_ids_T=forest.position_ids,
            cu_seqlens=(),
            rows_P=forest.rows_P,
            labels_R=forest.labels_R,
            temperatures_R=temperatures_R,
            topk_ids_RK=topk_ids_RK,
            forest=forest,
            row_of_R=forest.row_of_R,
        )
    lengths, offsets = batch.lengths, batch.cu_seqlens
    token_ids = batch.token_ids.astype(np.int64)
    positions = np.arange(len(token_ids)) - np.repeat(offsets[:-1], lengths)
    targets = np.flatnonzero(positions >= np.repeat(batch.prompt_lengths, lengths))
    if len(token_ids) == 0:
        token_ids, positions, offsets = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([0, 1])
    return PackedInputs(
        token_ids_T=torch.from_numpy(token_ids)[None].to(device),
        position_ids_T=torch.from_numpy(positions)[None].to(device),
        cu_seqlens=tuple(offsets.tolist()),
        rows_P=torch.from_numpy(targets - 1).to(device),
        labels_R=torch.from_numpy(token_ids[targets]).to(device),
        temperatures_R=temperatures_R,
        topk_ids_RK=topk_ids_RK,
    )


class ScoringModule(nn.Module):
    """A causal language model that returns scores instead of logits.

    Args:
        model: A transformers model loaded by :func:`arctic_core.models.factory.load_causal_lm`, whole.
        head_budget_bytes: Most bytes of temporaries when hidden states become scores (see :mod:`arctic_kernels.head`).
    """

    def __init__(self, model: PreTrainedModel, head_budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.head_budget_bytes = head_budget_bytes
        self.head: ChunkedHead | None = chunked_head(model, head_budget_bytes)
        """The output layer in chunks; ``None`` where this architecture needs its own, with whole logits."""

    def forward(self, inputs: PackedInputs, entropy: bool = False, topk: int = 0) -> Scores:
        """Score a packed row.

        Args:
            inputs: The row; where it has ``topk_ids_RK`` their log-probs are returned, differentiable.
            entropy: Whether entropies are wanted.
            topk: Report this many most likely tokens instead, most likely first, without gradient.

        Returns:
            Log-probs ``[R]``, entropies ``[R]`` or ``None``, log-probs ``[R, K]`` of candidates or ``None``, and the
            candidates' ids, int64 ``[R, K]``, or ``None``. In nats and float32 (float64 for a float64 model). Without response
            tokens all are empty and still connected to every parameter. A plain tuple, since DeepSpeed looks into it.

        Raises:
            DataError: ``topk`` is negative or above the vocabulary's size, or given together with ``inputs.topk_ids_RK``.
        """
        vocabulary = self.model.config.get_text_config().vocab_size
        if not 0 <= topk <= vocabulary or (topk and inputs.topk_ids_RK is not None):
            raise DataError(
                f"topk {topk} of a vocabulary of {vocabulary}, candidates given: {inputs.topk_ids_RK is not None}",
                where="topk",
                remedy="ask for at most the vocabulary's size, and for either the most likely tokens or given ones",
            )
        if self.head is not None:
            output = self.head.score(
                lambda: self._logits(inputs),
                inputs.labels_R,
                inputs.temperatures_R,
                rows_R=inputs.row_of_R,
                entropy=entropy,
                ids_RK=inputs.topk_ids_RK,
                topk=topk,
            )
        else:
            logits_PV = self._logits(inputs)[0]
            output = logprob_entropy(
                logits_PV if inputs.row_of_R is None else logits_PV.index_select(0, inputs.row_of_R),
                inputs.labels_R,
                temperature=inputs.temperatures_R,
                entropy=entropy,
                ids_RK=inputs.topk_ids_RK,
                topk=topk,
                budget_bytes=self.head_budget_bytes,
            )
        return output.logprobs_R, output.entropy_R, output.topk_logprobs_RK, output.topk_ids_RK

    def _logits(self, inputs: PackedInputs) -> torch.Tensor:
        """Logits ``[1, P, V]`` of the rows that predict response tokens, as the model gives them."""
        scope: AbstractContextManager[None] = nullcontext()
        layout: dict[str, Any] = {"cu_seqlens": inputs.cu_seqlens}
        if inputs.forest is not None:
            scope, layout = use_forest(self.model, inputs.forest), {}
        with scope:
            output: Any = self.model(
                input_ids=inputs.token_ids_T,
                position_ids=inputs.position_ids_T,
                logits_to_keep=inputs.rows_P,
                use_cache=False,
                **layout,
            )
        return output.logits


def checkpoint_name(parameter: str) -> str:
    """Name inside the language model of a parameter of :class:`ScoringModule`."""
    return parameter.removeprefix(f"{LM_ATTRIBUTE}.")


def module_name(parameter: str) -> str:
    """Inverse of :func:`checkpoint_name`."""
    return f"{LM_ATTRIBUTE}.{parameter}"
