"""The ``torch`` log-prob engine: one frozen model per rank, scored packed. Ranks are replicas and need no communication."""

from __future__ import annotations

import torch
from torch import nn

from arctic_core.backends.packed_scoring import PackedEngine
from arctic_core.models.scoring import ScoringModule


class TorchLogProb(PackedEngine):
    """Scores with plain torch."""

    implementation = "torch"

    @classmethod
    def capabilities(cls, device: str) -> tuple[str, ...]:
        return ("forward", "sleep", "wake") if device == "cuda" else ("forward",)

    def _build_frozen(self, module: ScoringModule) -> nn.Module:
        return module.requires_grad_(False)

    def sleep(self, level: int) -> None:
        if self.spec.device != "cuda":
            raise self._unsupported("sleep")
        if level == 1 and self._frozen is not None:
            self._frozen.to("cpu")
        elif level == 2:
            self._frozen = None
        torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.spec.device != "cuda":
            raise self._unsupported("wake")
        if self._frozen is None:
            self._frozen = self._build_frozen(self._load_module(self.spec.model_path))
        else:
            self._frozen.to(self.spec.device)
