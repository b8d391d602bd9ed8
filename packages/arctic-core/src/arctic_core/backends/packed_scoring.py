"""What the packed engines (``torch``, ``deepspeed``) share for scoring: starting, packing, scores without gradients.

Suffix legend: ``_R`` response tokens of a micro-batch, ``_K`` tokens scored beside each of them.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from arctic_core.backends.base import EngineReport, LogProb, ScoreOutcome
from arctic_core.backends.memory import resident_bytes
from arctic_core.backends.shared_check import check_error, sharing_error
from arctic_core.config.client import LogProbConfig, TrainingConfig
from arctic_core.data import Batch
from arctic_core.errors import ArcticError, DataError, EngineError, InvalidStateError
from arctic_core.models.factory import load_causal_lm, resolve_model, torch_dtype
from arctic_core.models.scoring import PackedInputs, ScoringModule, pack
from arctic_core.models.shared_prompts import SharedPrompts, shared_prompts
from arctic_core.plugins.manager import get_registry

T = TypeVar("T")


class PackedEngine(LogProb):
    """One rank that scores packed batches; on its own it is a log-prob engine."""

    _frozen: nn.Module | None = None
    """The model that is only scored with: the log-prob engine's model, or a trainer's reference."""
    _shared: SharedPrompts | None = None
    """Whether shared prompts are computed once; known when the first model has been loaded."""
    _shared_checked = False

    # --- hooks ------------------------------------------------------------------------------------------------------

    def _start_runtime(self) -> None:
        """Prepare the process before the model is loaded, e.g. join the process group."""

    @abc.abstractmethod
    def _build_frozen(self, module: ScoringModule) -> nn.Module:
        """Make a loaded module ready for scoring without gradients; the result is called like a :class:`ScoringModule`."""

    def _all_ranks(self, flag: bool) -> bool:
        """Whether ``flag`` holds on every rank."""
        return flag

    # --- engine -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._prepare_process()
        self._frozen = self._build_frozen(self._load_module(self.spec.model_path))

    def stop(self) -> None:
        self._frozen = self._shared = None
        if self.spec.device == "cuda":
            torch.cuda.empty_cache()

    def report(self) -> EngineReport:
        return EngineReport(
            implementation=self.implementation,
            device=self.spec.device,
            dtype=self.spec.dtype,
            pid=os.getpid(),
            memory_bytes=memory_bytes(self.spec.device),
            capabilities=self.capabilities(self.spec.device),
            shares_prompts=self._shares_prompts,
        )

    def forward(
        self,
        micro_batches: Sequence[Batch],
        *,
        entropy: bool,
        temperature: float | None,
        topk: int = 0,
        given_topk: bool = False,
    ) -> ScoreOutcome:
        return self._score(
            self._frozen, micro_batches, entropy=entropy, temperature=temperature, topk=topk, given_topk=given_topk
        )

    @property
    def where(self) -> str:
        """The rank, as errors name it."""
        return f"{self.spec.engine}[{self.spec.rank}]"

    # --- shared steps -----------------------------------------------------------------------------------------------

    def _prepare_process(self) -> None:
        if self.spec.device == "cpu" and self.spec.threads is not None:
            torch.set_num_threads(self.spec.threads)
        torch.manual_seed(self.spec.config.seed)
        self._start_runtime()

    def _load_module(self, name: str, *, gradient_checkpointing: bool = False) -> ScoringModule:
        model = load_causal_lm(
            resolve_model(name),
            dtype=self.spec.dtype,
            device=self.spec.device,
            gradient_checkpointing=gradient_checkpointing,
            registry=get_registry(),
        )
        self._vocabulary = model.config.get_text_config().vocab_size
        settings = self._settings
        if self._shared is None:
            self._shared = shared_prompts(model, settings.zorro, trains=self.spec.engine == "trainer")
        return ScoringModule(model, settings.head_budget_bytes)

    @property
    def _settings(self) -> TrainingConfig | LogProbConfig:
        config = self.spec.config
        return config.log_prob if self.spec.engine == "log_prob" else config.training

    @property
    def _shares_prompts(self) -> bool:
        return self._shared is not None and self._shared.active

    def _agree(self, check: Callable[[], T]) -> T:
        """Run a check that may refuse this rank's part. Where it does on one rank all raise: a rank that went on would wait
        for the others for ever."""
        try:
            result = check()
        except ArcticError:
            self._all_ranks(False)
            raise
        if not self._all_ranks(True):
            raise EngineError("another rank refused its part", where=self.where)
        return result

    def _pack_all(self, micro_batches: Sequence[Batch], temperature: float | None, given_topk: bool) -> list[PackedInputs]:
        return self._agree(lambda: [self._pack(batch, temperature, given_topk) for batch in micro_batches])

    def _pack(self, batch: Batch, temperature: float | None, given_topk: bool = False) -> PackedInputs:
        self._check_ids(batch.token_ids, batch.cu_seqlens, "token_ids")
        if given_topk and batch.topk_ids is not None:
            self._check_ids(batch.topk_ids, batch.cu_responses, "topk_ids")
        forest_tokens = self._settings.micro_batch_tokens if self._shares_prompts else None
        return pack(batch, self.spec.device, temperature, topk_ids=given_topk, forest_tokens=forest_tokens)

    def _check_sharing(self, module: nn.Module, micro_batches: Sequence[Batch], packed: Sequence[PackedInputs]) -> None:
        """The self-check, once, when some rank has samples that share tokens; all ranks raise where one finds an error."""
        if self._shared_checked or not (self._shares_prompts and self._settings.zorro_check):
            return
        pairs = zip(micro_batches, packed, strict=True)
        shared = next((batch for batch, inputs in pairs if inputs.forest is not None), None)
        if self._all_ranks(shared is None):
            return
        module.eval()
        error = sharing_error(module, shared, self.spec.device)
        self._agree(lambda: check_error(error, torch_dtype(self.spec.dtype), self.where))
        self._shared_checked = True

    def _check_ids(self, ids: np.ndarray, offsets_B: np.ndarray, name: str) -> None:
        bad = np.argwhere(ids >= self._vocabulary)
        if bad.size:
            sample = int(np.searchsorted(offsets_B, bad[0, 0], side="right")) - 1
            raise DataError(
                f"sample {sample} of a micro-batch holds token id {ids[tuple(bad[0])]}; the model knows 0.."
                f"{self._vocabulary - 1}",
                where=f"batch.{name}",
                remedy="tokenize with the tokenizer of the model that is trained",
            )

    @torch.no_grad()
    def _score(
        self,
        module: nn.Module | None,
        micro_batches: Sequence[Batch],
        *,
        entropy: bool,
        temperature: float | None,
        topk: int,
        given_topk: bool,
    ) -> ScoreOutcome:
        if module is None:
            raise InvalidStateError("there is no model to score with", where=self.where)
        if not 0 <= topk <= self._vocabulary or (topk and given_topk):  # before any rank waits for another
            raise DataError(
                f"topk={topk} with given_topk={given_topk}, of a vocabulary of {self._vocabulary}",
                where="forward.topk",
                remedy="ask for at most the vocabulary's size, and for either the most likely tokens or given ones",
            )
        packed = self._pack_all(micro_batches, temperature, given_topk)
        self._check_sharing(module, micro_batches, packed)
        module.eval()
        scores = [module(inputs, entropy, topk) for inputs in packed]
        logprobs, entropies, topk_logprobs, topk_ids = zip(*scores, strict=True) if scores else [()] * 4
        wide = bool(topk or given_topk)
        width = topk or next((batch.topk_ids.shape[1] for batch in micro_batches if batch.topk_ids is not None), 0)
        return ScoreOutcome(
            logprobs_R=_joined(logprobs, (0,)),
            entropy_R=_joined(entropies, (0,)) if entropy else None,
            topk_ids_RK=_joined(topk_ids, (0, width)).astype(np.int32) if wide else None,
            topk_logprobs_RK=_joined(topk_logprobs, (0, width)) if wide else None,
        )


def _joined(parts: Sequence[torch.Tensor], empty: tuple[int, ...]) -> np.ndarray:
    """The parts end to end on the host, floats as float32; an array of shape ``empty`` where nothing was scored."""
    arrays = [(part.float() if part.is_floating_point() else part).cpu().numpy() for part in parts if len(part)]
    return np.concatenate(arrays) if arrays else np.zeros(empty, np.float32)


def memory_bytes(device: str) -> int:
    """Memory held by this process: device memory on GPU, resident memory on CPU."""
    return torch.cuda.memory_reserved() if device == "cuda" else resident_bytes([os.getpid()])
