"""Configuration models. Unknown keys are errors; nothing here imports an engine."""

from arctic_core.config.base import ConfigModel, config_error
from arctic_core.config.client import (
    AdamWConfig,
    ArcticRLClientConfig,
    ConstantSchedule,
    CosineSchedule,
    DeadlineConfig,
    HttpConfig,
    LinearSchedule,
    LogProbConfig,
    RayConfig,
    SamplingConfig,
    Schedule,
    TrainingConfig,
    WeightSyncConfig,
)

__all__ = [
    "AdamWConfig",
    "ArcticRLClientConfig",
    "ConfigModel",
    "ConstantSchedule",
    "CosineSchedule",
    "DeadlineConfig",
    "HttpConfig",
    "LinearSchedule",
    "LogProbConfig",
    "RayConfig",
    "SamplingConfig",
    "Schedule",
    "TrainingConfig",
    "WeightSyncConfig",
    "config_error",
]
