"""The ``deepspeed`` log-prob engine: a frozen model, replicated (stage 0) or sharded over the ranks (stage 3)."""

from __future__ import annotations

from arctic_core.backends.deepspeed_engine.rank import DeepSpeedRank


class DeepSpeedLogProb(DeepSpeedRank):
    """Scores. With ``log_prob.zero_stage=3`` each rank holds a part of the weights; layers are gathered as they are used."""

    @classmethod
    def capabilities(cls, device: str) -> tuple[str, ...]:
        return ("forward",)
