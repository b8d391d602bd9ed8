"""Which engine rank goes to which bundle of resources.

A bundle is one GPU with its CPUs, or the CPUs of one CPU rank. Split engines get bundles of their own; colocated ones
share: rank ``i`` of every engine lies in bundle ``i`` and holds an equal fraction of its device. Pure; knows no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import PlacementError
from arctic_core.protocol import EngineName


@dataclass(frozen=True)
class Seat:
    """One rank's place."""

    engine: EngineName
    rank: int
    bundle: int
    share: float
    """Fraction of the bundle's device, in (0, 1]."""


@dataclass(frozen=True)
class PlacementPlan:
    """All ranks' places."""

    device: Literal["cpu", "cuda"]
    bundles: int
    seats: tuple[Seat, ...]
    cpus_per_bundle: float

    def seats_of(self, engine: EngineName) -> list[Seat]:
        """An engine's seats by rank."""
        return [seat for seat in self.seats if seat.engine == engine]

    def resources(self) -> list[dict[str, float]]:
        """Resources of each bundle, in Ray's terms."""
        gpus = {"GPU": 1.0} if self.device == "cuda" else {}
        return [{"CPU": self.cpus_per_bundle, **gpus} for _ in range(self.bundles)]


def plan_placement(config: ArcticRLClientConfig, *, device: Literal["cpu", "cuda"], gpus: float) -> PlacementPlan:
    """Seat all ranks.

    Args:
        config: The job.
        device: What the ranks run on.
        gpus: GPUs of the cluster; looked at on ``"cuda"`` only.

    Raises:
        PlacementError: More GPUs are asked for than there are; the message gives the sum.
    """
    names: tuple[EngineName, ...] = ("trainer", "sampler", "log_prob")
    counts = dict(zip(names, (config.training_gpus, config.sampling_gpus, config.log_prob_gpus), strict=True))
    bundles = max(counts.values()) if config.colocate else sum(counts.values())
    if device == "cuda" and bundles > gpus:
        how = "max" if config.colocate else "sum"
        raise PlacementError(
            f"{how} of training_gpus={counts['trainer']}, sampling_gpus={counts['sampler']}, "
            f"log_prob_gpus={counts['log_prob']} is {bundles}, and the cluster has {gpus:g} GPUs",
            remedy="ask for fewer ranks, set colocate=True, or add nodes",
        )
    seats, offset, tenants = [], 0, [0] * bundles
    for engine in names:
        for rank in range(counts[engine]):
            bundle = rank if config.colocate else offset + rank
            seats.append(Seat(engine, rank, bundle, 1.0))
            tenants[bundle] += 1
        offset += counts[engine]
    shared = tuple(Seat(s.engine, s.rank, s.bundle, 1.0 / tenants[s.bundle]) for s in seats)
    return PlacementPlan(device=device, bundles=bundles, seats=shared, cpus_per_bundle=config.ray.cpus_per_rank)
