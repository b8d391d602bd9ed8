"""Arctic core: one compute backend for LLM post-training, behind a thin client.

The public names live here, flat; each is imported when it is first used. No engine is imported with them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arctic_core.client import (
        ArcticRLClient,
        AsyncArcticRLClient,
        create_arctic_rl_client,
        create_async_arctic_rl_client,
    )
    from arctic_core.config import (
        AdamWConfig,
        ArcticRLClientConfig,
        ConstantSchedule,
        CosineSchedule,
        DeadlineConfig,
        LinearSchedule,
        LogProbConfig,
        RayConfig,
        SamplingConfig,
        TrainingConfig,
        WeightSyncConfig,
    )
    from arctic_core.config.losses import (
        CISPOLossConfig,
        DAPOLossConfig,
        DistillLossConfig,
        DrGRPOLossConfig,
        GRPOLossConfig,
        GSPOLossConfig,
        PPOLossConfig,
        ReinforcePPLossConfig,
        RLOOLossConfig,
        SAPOLossConfig,
        SFTLossConfig,
        ValueLossConfig,
    )
    from arctic_core.data import (
        Batch,
        Sample,
    )
    from arctic_core.errors import (
        ArcticError,
        CheckpointError,
        ConfigError,
        DataError,
        DeadlineExceeded,
        EngineDiedError,
        EngineError,
        EngineStartError,
        InvalidStateError,
        MissingExtraError,
        ModelError,
        ModelNotFoundError,
        NonFiniteError,
        PlacementError,
        PluginError,
        ProtocolError,
        QueueFullError,
        RewardError,
        TransportClosedError,
        TransportError,
        UnsupportedModelError,
        UnsupportedOperation,
        UnsupportedVersionError,
        WeightSyncError,
        WireError,
    )
    from arctic_core.protocol import (
        CheckpointRef,
        Completion,
        CompletionReady,
        Done,
        EngineInfo,
        ErrorInfo,
        ExportRef,
        Generated,
        Gradients,
        Info,
        Metric,
        NamedLoss,
        Place,
        Reply,
        Request,
        SamplingParams,
        Scores,
        Stepped,
        SyncReport,
    )
    from arctic_core.transports.base import (
        Transport,
    )
    from arctic_core.transports.mock import (
        MockTransport,
    )

    __version__: str

_HOMES = {
    "arctic_core.client": (
        "ArcticRLClient",
        "AsyncArcticRLClient",
        "create_arctic_rl_client",
        "create_async_arctic_rl_client",
    ),
    "arctic_core.config": (
        "AdamWConfig",
        "ArcticRLClientConfig",
        "ConstantSchedule",
        "CosineSchedule",
        "DeadlineConfig",
        "LinearSchedule",
        "LogProbConfig",
        "RayConfig",
        "SamplingConfig",
        "TrainingConfig",
        "WeightSyncConfig",
    ),
    "arctic_core.config.losses": (
        "CISPOLossConfig",
        "DAPOLossConfig",
        "DistillLossConfig",
        "DrGRPOLossConfig",
        "GRPOLossConfig",
        "GSPOLossConfig",
        "PPOLossConfig",
        "RLOOLossConfig",
        "ReinforcePPLossConfig",
        "SAPOLossConfig",
        "SFTLossConfig",
        "ValueLossConfig",
    ),
    "arctic_core.data": (
        "Batch",
        "Sample",
    ),
    "arctic_core.errors": (
        "ArcticError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DeadlineExceeded",
        "EngineDiedError",
        "EngineError",
        "EngineStartError",
        "InvalidStateError",
        "MissingExtraError",
        "ModelError",
        "ModelNotFoundError",
        "NonFiniteError",
        "PlacementError",
        "PluginError",
        "ProtocolError",
        "QueueFullError",
        "RewardError",
        "TransportClosedError",
        "TransportError",
        "UnsupportedModelError",
        "UnsupportedOperation",
        "UnsupportedVersionError",
        "WeightSyncError",
        "WireError",
    ),
    "arctic_core.protocol": (
        "CheckpointRef",
        "Completion",
        "CompletionReady",
        "Done",
        "EngineInfo",
        "ErrorInfo",
        "ExportRef",
        "Generated",
        "Gradients",
        "Info",
        "Metric",
        "NamedLoss",
        "Place",
        "Reply",
        "Request",
        "SamplingParams",
        "Scores",
        "Stepped",
        "SyncReport",
    ),
    "arctic_core.transports.base": ("Transport",),
    "arctic_core.transports.mock": ("MockTransport",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AdamWConfig",
    "ArcticError",
    "ArcticRLClient",
    "ArcticRLClientConfig",
    "AsyncArcticRLClient",
    "Batch",
    "CISPOLossConfig",
    "CheckpointError",
    "CheckpointRef",
    "Completion",
    "CompletionReady",
    "ConfigError",
    "ConstantSchedule",
    "CosineSchedule",
    "DAPOLossConfig",
    "DataError",
    "DeadlineConfig",
    "DeadlineExceeded",
    "DistillLossConfig",
    "Done",
    "DrGRPOLossConfig",
    "EngineDiedError",
    "EngineError",
    "EngineInfo",
    "EngineStartError",
    "ErrorInfo",
    "ExportRef",
    "GRPOLossConfig",
    "GSPOLossConfig",
    "Generated",
    "Gradients",
    "Info",
    "InvalidStateError",
    "LinearSchedule",
    "LogProbConfig",
    "Metric",
    "MissingExtraError",
    "MockTransport",
    "ModelError",
    "ModelNotFoundError",
    "NamedLoss",
    "NonFiniteError",
    "PPOLossConfig",
    "Place",
    "PlacementError",
    "PluginError",
    "ProtocolError",
    "QueueFullError",
    "RLOOLossConfig",
    "RayConfig",
    "ReinforcePPLossConfig",
    "Reply",
    "Request",
    "RewardError",
    "SAPOLossConfig",
    "SFTLossConfig",
    "Sample",
    "SamplingConfig",
    "SamplingParams",
    "Scores",
    "Stepped",
    "SyncReport",
    "TrainingConfig",
    "Transport",
    "TransportClosedError",
    "TransportError",
    "UnsupportedModelError",
    "UnsupportedOperation",
    "UnsupportedVersionError",
    "ValueLossConfig",
    "WeightSyncConfig",
    "WeightSyncError",
    "WireError",
    "__version__",
    "create_arctic_rl_client",
    "create_async_arctic_rl_client",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("arctic-core")
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
