"""Brings engines up as Ray actors. Imported only where Ray is wanted.

Each rank is one actor holding a :class:`~arctic_core.backends.rank.LocalRank`. Actors are children of the process that
launches them (the job's service actor) and end with it. No exception crosses as a pickled traceback: answers are
``(value, None)`` or ``(None, ErrorInfo)``.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from arctic_core import tracing
from arctic_core.backends.base import EngineDefinition, EngineReport, RankSpec
from arctic_core.backends.rank import LocalRank, Rank, late
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import ArcticError, ConfigError, EngineDiedError, EngineStartError, PlacementError, TransportError
from arctic_core.plugins.manager import PluginRegistry, get_registry
from arctic_core.protocol import EngineName, ErrorInfo, Place
from arctic_core.service.launch import Launcher, make_spec
from arctic_core.service.placement import PlacementPlan, Seat, plan_placement

Answer = tuple[Any, ErrorInfo | None]

#: Seconds beyond an engine call's own deadline after which the actor itself counts as unreachable.
SLACK_S = 15.0


def find_engine(registry: PluginRegistry, engine: EngineName, name: str) -> EngineDefinition:
    """An engine definition by kind and name."""
    return {"trainer": registry.trainer, "sampler": registry.sampler, "log_prob": registry.log_prob}[engine](name)


class EngineActor:
    """One rank's process. The engine is looked up in the registry of that process, so that only names are sent."""

    def __init__(self) -> None:
        tracing.configure("arctic-engine")
        self._rank: LocalRank | None = None

    async def where(self) -> tuple[str, int, str]:
        """Node name, pid and device (a GPU's UUID, or ``"cpu"``)."""
        return platform.node(), os.getpid(), _device_name()

    async def open_store(self) -> Answer:
        """Host the ranks' rendezvous; answers its address."""
        from arctic_core.backends.deepspeed_engine.rendezvous import open_store

        return await _answer(asyncio.to_thread(open_store, ray.util.get_node_ip_address()))

    async def build(self, name: str, spec: RankSpec) -> Answer:
        """Create the engine; its :meth:`start` is a call like any other."""

        async def work() -> None:
            definition = find_engine(get_registry(), spec.engine, name)
            self._rank = LocalRank(await asyncio.to_thread(lambda: definition.load()(spec)))

        return await _answer(work())

    async def call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], deadline_s: float, traceparent: str
    ) -> Answer:
        assert self._rank is not None
        with tracing.carried(traceparent):
            return await _answer(self._rank.call(method, *args, deadline_s=deadline_s, **kwargs))

    async def stream(self, method: str, args: tuple[Any, ...], traceparent: str) -> AsyncIterator[Answer]:
        assert self._rank is not None
        try:
            async for item in tracing.carried_items(traceparent, self._rank.stream(method, *args)):
                yield item, None
        except ArcticError as error:
            yield None, ErrorInfo.of(error, where=self._rank.label)

    async def report(self, deadline_s: float) -> Answer:
        assert self._rank is not None
        return await _answer(self._rank.report(deadline_s))

    async def stop(self, deadline_s: float) -> Answer:
        answer = await _answer(self._rank.stop(deadline_s)) if self._rank else (None, None)
        await asyncio.to_thread(tracing.flush)  # the process is killed next
        return answer


async def _answer(work: Awaitable[Any]) -> Answer:
    try:
        return await work, None
    except Exception as error:  # the border of the actor: whatever happens becomes a typed answer
        return None, ErrorInfo.of(error)


class RayRank(Rank):
    """A rank in an actor."""

    def __init__(self, label: str, actor: Any) -> None:
        super().__init__(label)
        self.actor = actor

    async def call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        ref = self.actor.call.remote(method, args, kwargs, deadline_s, tracing.traceparent())
        return await self._ask(ref, method, deadline_s + SLACK_S)

    async def build(self, name: str, spec: RankSpec, deadline_s: float) -> None:
        """Create the engine in the actor."""
        await self._ask(self.actor.build.remote(name, spec), "build", deadline_s)

    async def open_store(self, deadline_s: float) -> str:
        """Address of a rendezvous hosted by this rank."""
        return await self._ask(self.actor.open_store.remote(), "open_store", deadline_s)

    async def where(self, deadline_s: float) -> tuple[str, int, str]:
        """Node, pid, device."""
        return await self._wait(self.actor.where.remote(), "where", deadline_s)

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        generator = self.actor.stream.options(num_returns="streaming").remote(method, args, tracing.traceparent())
        try:
            async for ref in generator:
                value, error = await ref
                if error is not None:
                    raise error.to_exception()
                yield value
        except RayError as error:
            raise self._died(error) from None
        finally:
            ray.cancel(generator)

    async def report(self, deadline_s: float) -> EngineReport:
        return await self._ask(self.actor.report.remote(deadline_s), "report", deadline_s + SLACK_S)

    async def stop(self, deadline_s: float) -> None:
        try:
            await self._ask(self.actor.stop.remote(deadline_s), "stop", deadline_s)
        except ArcticError:
            pass  # it is killed next, whatever it says
        finally:
            ray.kill(self.actor)

    async def _ask(self, ref: Any, what: str, deadline_s: float) -> Any:
        value, error = await self._wait(ref, what, deadline_s)
        if error is not None:
            raise error.to_exception()
        return value

    async def _wait(self, ref: Any, what: str, deadline_s: float) -> Any:
        try:
            return await asyncio.wait_for(ref, deadline_s)
        except TimeoutError:
            raise late(self.label, what, deadline_s) from None
        except RayActorError as error:
            raise self._died(error) from None
        except RayError as error:
            raise TransportError(f"{what} failed in Ray: {error}", where=self.label) from None

    def _died(self, error: RayError) -> EngineDiedError:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return EngineDiedError(
            f"the process of {self.label} is gone ({reason})",
            where=self.label,
            remedy="its last words are in the logs folder of the Ray session (/tmp/ray/session_latest/logs by default); "
            "running out of memory is the usual cause",
        )


class RayLauncher(Launcher):
    """Engines as actors in one placement group."""

    def __init__(self, config: ArcticRLClientConfig) -> None:
        self._config = config
        self._plan: PlacementPlan | None = None
        self._group: PlacementGroup | None = None
        self._places: list[Place] = []

    async def open(self) -> None:
        gpus = ray.cluster_resources().get("GPU", 0.0)
        if self._config.device == "cuda" and not gpus:
            raise ConfigError("device='cuda', but the Ray cluster has no GPU", remedy="set device='cpu' or 'auto'")
        device: Literal["cpu", "cuda"] = "cuda" if gpus and self._config.device != "cpu" else "cpu"
        self._plan = plan_placement(self._config, device=device, gpus=gpus)
        self._group = placement_group(self._plan.resources(), strategy="PACK")
        try:
            await asyncio.wait_for(self._group.ready(), min(60.0, self._config.deadlines.start))
        except TimeoutError:
            await self.close()
            raise PlacementError(
                f"the cluster could not give {self._plan.bundles} bundles of {self._plan.resources()[0]} within a minute; "
                f"it has {ray.cluster_resources()} and {ray.available_resources()} are free",
                remedy="stop what else runs there, or ask for fewer ranks or cpus_per_rank",
            ) from None

    def device(self) -> Literal["cpu", "cuda"]:
        return self._plan.device if self._plan else "cpu"

    async def launch(self, engine: EngineName, definition: EngineDefinition, model_path: str) -> list[Rank]:
        assert self._plan is not None
        if not definition.multi_process:
            raise ConfigError(
                f"the engine {definition.name!r} does not run over Ray", where=engine, remedy="use comm_protocol='local'"
            )
        seats = self._plan.seats_of(engine)
        if len(seats) > 1 and not definition.multi_rank:
            raise ConfigError(
                f"the engine {definition.name!r} runs with one rank, {len(seats)} are asked for",
                where=engine,
                remedy="use engine 'deepspeed' for several training ranks",
            )
        ranks = [self._create(seat, len(seats)) for seat in seats]
        deadline_s = self._config.deadlines.start
        try:
            rendezvous = await ranks[0].open_store(deadline_s) if engine != "sampler" and len(ranks) > 1 else None
            builds = []
            for seat, rank in zip(seats, ranks, strict=True):
                spec = make_spec(
                    self._config,
                    engine,
                    seat.rank,
                    model_path,
                    self._plan.device,
                    threads=self._threads(len(seats)),
                    rendezvous=rendezvous,
                )
                builds.append(rank.build(definition.name, spec, deadline_s))
            await asyncio.gather(*builds)
            wheres = await asyncio.gather(*(rank.where(deadline_s) for rank in ranks))
        except BaseException as error:
            for rank in ranks:
                ray.kill(rank.actor)
            if isinstance(error, EngineDiedError):
                raise EngineStartError(error.message, where=error.where, remedy=error.remedy) from None
            raise
        for seat, (node, pid, device) in zip(seats, wheres, strict=True):
            self._places.append(Place(engine=engine, rank=seat.rank, node=node, pid=pid, device=device, share=seat.share))
        return list(ranks)

    def _create(self, seat: Seat, ranks: int) -> RayRank:
        assert self._plan is not None
        assert self._group is not None
        options: dict[str, Any] = {
            "num_cpus": self._plan.cpus_per_bundle * seat.share,
            "num_gpus": seat.share if self._plan.device == "cuda" else 0,
            "max_restarts": 0,
            "max_concurrency": 1000,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=seat.bundle),
            "runtime_env": {"env_vars": self._environment(ranks)},
        }
        actor = ray.remote(EngineActor).options(**options).remote()
        return RayRank(f"{seat.engine}[{seat.rank}]", actor)

    def _environment(self, ranks: int) -> dict[str, str]:
        assert self._plan is not None
        if self._plan.device == "cuda":
            return {}
        # The engines take turns, so each may use the cores that its own ranks leave it.
        return {"OMP_NUM_THREADS": str(self._threads(ranks)), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

    def _threads(self, ranks: int) -> int | None:
        assert self._plan is not None
        if self._plan.device == "cuda":
            return None
        return self._config.ray.threads_per_rank or max(1, (os.cpu_count() or 1) // ranks)

    def places(self) -> tuple[Place, ...]:
        return tuple(self._places)

    async def close(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _device_name() -> str:
    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        return "cpu"
    import torch

    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"
