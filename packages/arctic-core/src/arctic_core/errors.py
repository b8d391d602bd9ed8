"""Every error Arctic raises, in one tree.

    ArcticError
    ├── ConfigError (ValueError)            a setting is unknown, missing or contradicts another
    ├── DataError (ValueError)              a sample, batch or per-token field is malformed
    │   └── RewardError                     a reward is NaN, infinite or missing
    ├── WireError (ValueError)              a frame cannot be encoded or decoded
    ├── ProtocolError                       a message is unknown or of another protocol version
    ├── MissingExtraError (ImportError)     an optional part is not installed
    ├── UnsupportedVersionError             an installed package is outside the tested range
    ├── UnsupportedOperation                this engine, or this set-up, cannot do what was asked
    ├── InvalidStateError                   the operation is right, but not now
    ├── DeadlineExceeded (TimeoutError)     a wait ran past its deadline
    ├── QueueFullError                      too many requests wait already
    ├── PlacementError                      the engines do not fit on the machines at hand
    ├── ModelError
    │   ├── ModelNotFoundError              no such hub id, folder or file
    │   └── UnsupportedModelError           the architecture cannot be run as asked
    ├── EngineError                         an engine failed while working
    │   ├── EngineStartError                an engine did not come up
    │   ├── EngineDiedError                 the process behind an engine is gone
    │   └── NonFiniteError                  a loss or gradient is NaN or infinite
    ├── WeightSyncError                     a weight sync was refused or failed; the old weights serve on
    ├── CheckpointError                     a checkpoint is missing, incomplete or of another model
    ├── PluginError                         a plugin failed to load or broke a hook's contract
    ├── AuthenticationError                 the server does not know who asks
    ├── PermissionDeniedError               the server knows, and this one may not
    ├── JobNotFoundError                    the server has no such job, or not for this caller
    ├── PayloadTooLargeError                a body or header exceeds what the server takes
    └── TransportError                      the service could not be reached
        └── TransportClosedError            the client or its transport is closed

An error says *what* went wrong (its message), *where* (engine, rank, file, field) and *what to do* (its remedy). All of
them pickle, and travel over every transport as :class:`arctic_core.protocol.ErrorInfo` to come out as the same type.

To add one: subclass the nearest node (and the built-in exception a caller would expect to catch), and draw it above.
"""

from __future__ import annotations

__all__ = [
    "ArcticError",
    "AuthenticationError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeadlineExceeded",
    "EngineDiedError",
    "EngineError",
    "EngineStartError",
    "InvalidStateError",
    "JobNotFoundError",
    "MissingExtraError",
    "ModelError",
    "ModelNotFoundError",
    "NonFiniteError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
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
    "error_types",
]


class ArcticError(Exception):
    """Base of all errors raised by Arctic.

    Args:
        message: What went wrong, in one sentence.
        where: The engine, rank, file or field it concerns, e.g. ``"trainer[1]"``; empty when the message says it.
        remedy: What the reader can do about it; empty when there is nothing to do.
    """

    def __init__(self, message: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  → {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.where, self.remedy)


def _rebuild(cls: type[ArcticError], message: str, where: str, remedy: str) -> ArcticError:
    return cls(message, where=where, remedy=remedy)


class ConfigError(ArcticError, ValueError):
    """A setting is unknown, missing or contradicts another."""


class DataError(ArcticError, ValueError):
    """A sample, batch or per-token field is malformed."""


class RewardError(DataError):
    """A reward is NaN, infinite or missing."""


class WireError(ArcticError, ValueError):
    """A frame cannot be encoded or decoded; the message names the path inside it."""


class ProtocolError(ArcticError):
    """A message is unknown or of another protocol version."""


class MissingExtraError(ArcticError, ImportError):
    """An optional part is not installed; the remedy names the extra."""


class UnsupportedVersionError(ArcticError):
    """An installed package is outside the tested range."""


class UnsupportedOperation(ArcticError):
    """This engine, or this set-up, cannot do what was asked."""


class InvalidStateError(ArcticError):
    """The operation is right, but not in the present state."""


class DeadlineExceeded(ArcticError, TimeoutError):
    """A wait ran past its deadline."""


class QueueFullError(ArcticError):
    """Too many requests wait already."""


class PlacementError(ArcticError):
    """The engines do not fit on the machines at hand."""


class ModelError(ArcticError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError):
    """No such hub id, folder or file."""


class UnsupportedModelError(ModelError):
    """The architecture cannot be run as asked."""


class EngineError(ArcticError):
    """An engine failed while working."""


class EngineStartError(EngineError):
    """An engine did not come up; nothing of it is left running."""


class EngineDiedError(EngineError):
    """The process behind an engine is gone."""


class NonFiniteError(EngineError):
    """A loss or gradient is NaN or infinite; no weight was changed."""


class WeightSyncError(ArcticError):
    """A weight sync was refused or failed; the sampler serves the weights it had."""


class CheckpointError(ArcticError):
    """A checkpoint is missing, incomplete or of another model."""


class PluginError(ArcticError):
    """A plugin failed to load or broke a hook's contract."""


class AuthenticationError(ArcticError):
    """The server does not know who asks: no token, or not one of its own."""


class PermissionDeniedError(ArcticError):
    """The server knows who asks, and this one may not do that."""


class JobNotFoundError(ArcticError):
    """The server has no such job, or not for this caller."""


class PayloadTooLargeError(ArcticError):
    """A body or header exceeds what the server takes."""


class TransportError(ArcticError):
    """The service could not be reached."""


class TransportClosedError(TransportError):
    """The client or its transport is closed."""


def error_types() -> dict[str, type[ArcticError]]:
    """All error classes by name, for rebuilding an error that came over a transport."""

    def walk(cls: type[ArcticError]) -> list[type[ArcticError]]:
        return [cls, *(leaf for sub in cls.__subclasses__() for leaf in walk(sub))]

    found: dict[str, type[ArcticError]] = {}
    for cls in walk(ArcticError):
        if cls.__module__ == __name__ or cls.__name__ not in found:  # a plugin's class never hides one of ours
            found[cls.__name__] = cls
    return found
