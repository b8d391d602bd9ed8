"""What a sample costs to compute: a term linear in its tokens and one for attention, quadratic in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arctic_core.errors import ConfigError


@dataclass(frozen=True)
class CostModel:
    """Cost of a sample of ``T`` tokens: ``linear · T + attention · T²``, in any unit: only the ratio matters.

    A training step of a transformer with ``N`` parameters, ``L`` layers and hidden size ``d`` takes ``6·N·T + 12·L·d·T²``
    FLOPs for a sequence of ``T`` tokens (Chowdhery et al. 2022, PaLM, appendix B). With ``N ≈ 12·L·d²`` (Kaplan et al.
    2020, section 2.1) that is proportional to ``T + T²/(6·d)``, whatever the depth; a forward alone has the same ratio. The
    count includes the half of the attention scores that a causal kernel skips, which makes up for the scores that such
    kernels compute again in the backward, and for attention running at a lower rate than matrix products.
    The default is that of hidden size 4096: attention costs as much as the rest at 24,576 tokens.

    Raises:
        ConfigError: A coefficient is negative or not finite, or both are 0.
    """

    linear: float = 1.0
    attention: float = 1.0 / (6 * 4096)

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("attention", self.attention)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{value!r} is not a finite number of at least 0", where=f"CostModel.{name}")
        if self.linear == self.attention == 0:
            raise ConfigError("both coefficients are 0, so all samples would cost nothing", where="CostModel")

    @classmethod
    def of_hidden_size(cls, hidden_size: int) -> CostModel:
        """The cost model of a dense transformer with this hidden size."""
        if hidden_size < 1:
            raise ConfigError(f"hidden_size {hidden_size} is below 1", where="CostModel.of_hidden_size")
        return cls(linear=1.0, attention=1.0 / (6 * hidden_size))

    def costs(self, lengths: np.ndarray) -> np.ndarray:
        """Costs of samples of the given lengths in tokens, float64 ``[B]``."""
        tokens = np.asarray(lengths, np.float64)
        return (self.linear + self.attention * tokens) * tokens
