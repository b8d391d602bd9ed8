"""Sequences that were admitted together and share one KV cache, decoded in lock-step.

Suffix legend: ``_B`` rows of the cohort, ``_T`` columns of its cache, ``_V`` vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from arctic_core.backends.base import SampleJob
from arctic_core.errors import ArcticError
from arctic_core.protocol import Completion


@dataclass(eq=False)
class Row:
    """One completion on its way."""

    index: int
    """Place of the job in its request."""
    job: SampleJob
    generator: torch.Generator
    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[tuple[int, Completion] | ArcticError]
    """Where the outcome goes; belongs to ``loop``."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int | None = None
    """Policy version of the first token."""
    done: bool = False

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and tokens drawn so far."""
        return np.concatenate([self.job.prompt, np.asarray(self.tokens, np.int64)]).astype(np.int64)

    def deliver(self, outcome: tuple[int, Completion] | ArcticError) -> None:
        """Hand the outcome to the event loop, once."""
        if not self.done and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.results.put_nowait, outcome)
        self.done = True


class Cohort:
    """Rows with a common KV cache, left-padded.

    Equal sequences are computed once in the prefill and their cache is copied to the rows that share them, which is what the
    rollouts of one prompt need.
    """

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._model = model
        unique: dict[bytes, int] = {}
        sequences: list[np.ndarray] = []
        members: list[int] = []
        for row in rows:
            sequence = row.sequence
            place = unique.setdefault(sequence.tobytes(), len(unique))
            if place == len(sequences):
                sequences.append(sequence)
            members.append(place)
        width = max(map(len, sequences))
        ids = np.zeros((len(sequences), width), np.int64)
        mask = np.zeros((len(sequences), width), np.int64)
        for i, sequence in enumerate(sequences):
            ids[i, width - len(sequence) :] = sequence
            mask[i, width - len(sequence) :] = 1
        self._mask_BT = torch.from_numpy(mask).to(model.device)
        self._cache = DynamicCache(config=model.config)
        logits_BV = self._forward(torch.from_numpy(ids).to(model.device), self._positions())
        place_B = torch.tensor(members, device=model.device)
        self._select(place_B)
        self.logits_BV = logits_BV[place_B]
        """Logits of each row's next token."""

    def advance(self, tokens_B: Sequence[int]) -> None:
        """Append one token to every row and compute the logits of the next."""
        ids = torch.tensor(tokens_B, device=self._model.device)[:, None]
        self._mask_BT = torch.cat([self._mask_BT, torch.ones_like(ids)], dim=1)
        self.logits_BV = self._forward(ids, self._positions()[:, -1:])

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these."""
        if len(indices) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in indices]
        if self.rows:
            index_B = torch.tensor(indices, device=self._model.device)
            self._select(index_B)
            self.logits_BV = self.logits_BV[index_B]

    def _select(self, index_B: torch.Tensor) -> None:
        self._cache.batch_select_indices(index_B)
        self._mask_BT = self._mask_BT[index_B]

    def _positions(self) -> torch.Tensor:
        return (self._mask_BT.cumsum(1) - 1).clamp_min(0)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask_BT,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()
