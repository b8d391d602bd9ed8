"""How a bucket of weights crosses from a trainer to a sampler.

A carrier publishes bytes under an address on one side and opens them, read-only, on the other. It knows nothing of
tensors: the plan says what lies where (tensors back to back, in plan order, without gaps).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arctic_core.sync.plan import BucketRef


class WeightCarrier(abc.ABC):
    """One side of a carrier. The sender publishes and releases, the receiver opens."""

    @abc.abstractmethod
    def publish(self, index: int, payload: Sequence[memoryview], *, checksums: bool) -> BucketRef:
        """Make the concatenated payload (one flat byte view per tensor) readable for the receiver."""

    @abc.abstractmethod
    def open(self, ref: BucketRef) -> AbstractContextManager[memoryview]:
        """Map a published bucket. What the receiver might write to it never reaches the sender.

        Raises:
            WeightSyncError: It is gone or has another size than the reference says.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Free all that this side published. Idempotent."""


@dataclass(frozen=True)
class CarrierDefinition:
    """A carrier as registered through the ``arctic_weight_carriers`` hook."""

    name: str
    create: Callable[[str | None], WeightCarrier]
    """``create(directory)``; ``directory`` is ``weight_sync.directory`` (or ``None``)."""
