"""The learning rate as a function of the optimizer step. Needs nothing."""

from __future__ import annotations

import math

from arctic_core.config.client import ConstantSchedule, CosineSchedule, LinearSchedule


def learning_rate(schedule: ConstantSchedule | LinearSchedule | CosineSchedule, peak: float, step: int) -> float:
    """Learning rate of optimizer step ``step`` (the first is 0).

    Warm-up step ``k`` of ``w`` runs at ``peak·(k + 1)/w``. Then ``constant`` stays at the peak, while ``linear`` and
    ``cosine`` (Loshchilov & Hutter, 2017, without restarts) fall from the peak at step ``w`` to ``peak·min_ratio`` at step
    ``total_steps``, and stay there.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if isinstance(schedule, ConstantSchedule):
        return peak
    span = schedule.total_steps - schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / span) if span > 0 else 1.0
    remaining = 1.0 - progress if isinstance(schedule, LinearSchedule) else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * remaining)
