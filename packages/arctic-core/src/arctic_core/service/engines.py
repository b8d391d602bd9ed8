"""The engines of one job as the service holds them: groups, states, locks; started together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from arctic_core.backends.base import EngineDefinition
from arctic_core.backends.group import EngineGroup, LogProbGroup, SamplerGroup, TrainerGroup
from arctic_core.backends.rank import Rank
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.config.effects import engine_name
from arctic_core.errors import ArcticError, DeadlineExceeded, EngineDiedError, UnsupportedOperation
from arctic_core.losses.named import find_loss
from arctic_core.plugins.manager import PluginRegistry
from arctic_core.protocol import EngineInfo, EngineName
from arctic_core.service.launch import Launcher, count_ranks
from arctic_core.service.state import EngineState


@dataclass
class RunningEngine:
    """One engine of the job."""

    group: EngineGroup
    state: EngineState
    definition: EngineDefinition
    capabilities: tuple[str, ...]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by operations that must not overlap."""


class Engines:
    """All engines of one job."""

    def __init__(self, config: ArcticRLClientConfig, registry: PluginRegistry, launcher: Launcher) -> None:
        self.config = config
        self._registry = registry
        self._launcher = launcher
        self._running: dict[EngineName, RunningEngine] = {}

    async def start(self, model_path: str, reference_path: str) -> None:
        """Launch and start all engines at once; a failure, or the deadline, stops those already up and is raised."""
        names: list[EngineName] = [n for n in ("trainer", "sampler", "log_prob") if count_ranks(self.config, n)]
        groups: dict[EngineName, tuple[EngineDefinition, list[Rank]]] = {}
        try:
            async with asyncio.timeout(self.config.deadlines.start):
                for name in names:
                    definition = self._definition(name)
                    path = reference_path if name == "log_prob" else model_path
                    groups[name] = definition, await self._launcher.launch(name, definition, path)
                await _start_all([rank for _, ranks in groups.values() for rank in ranks], self.config.deadlines.start)
                for name, (definition, ranks) in groups.items():
                    await self._admit(name, definition, ranks)
        except BaseException as error:
            stops = [rank.stop(self.config.deadlines.stop) for _, ranks in groups.values() for rank in ranks]
            await asyncio.gather(*stops, return_exceptions=True)
            self._running.clear()
            if isinstance(error, TimeoutError) and not isinstance(error, ArcticError):
                raise DeadlineExceeded(
                    f"the engines were not up within {self.config.deadlines.start:g} s",
                    where=", ".join(names),
                    remedy="raise deadlines.start for a large model or a slow disk",
                ) from None
            raise

    def _definition(self, name: EngineName) -> EngineDefinition:
        registry = self._registry
        find = {"trainer": registry.trainer, "sampler": registry.sampler, "log_prob": registry.log_prob}[name]
        return find(engine_name(self.config, name))

    async def _admit(self, name: EngineName, definition: EngineDefinition, ranks: Sequence[Rank]) -> None:
        deadline = self.config.deadlines.request
        group: EngineGroup
        if name == "trainer":
            tokens = self.config.training.micro_batch_tokens
            losses = partial(find_loss, registry=self._registry, allow_import=self.config.training.allow_loss_import)
            group = TrainerGroup(ranks, deadline_s=deadline, micro_batch_tokens=tokens, find_loss=losses)
        elif name == "sampler":
            group = SamplerGroup(ranks, deadline_s=deadline)
        else:
            tokens = self.config.log_prob.micro_batch_tokens
            group = LogProbGroup(ranks, deadline_s=deadline, micro_batch_tokens=tokens)
        reports = await group.reports()
        if isinstance(group, LogProbGroup):
            group.shares_prompts = all(report.shares_prompts for report in reports)
        self._running[name] = RunningEngine(group, EngineState(name), definition, reports[0].capabilities)

    def get(self, name: EngineName, op: str) -> RunningEngine:
        """An engine of the job; raises :class:`UnsupportedOperation` where the job has none, or one that cannot do ``op``."""
        if name not in self._running:
            setting = {"trainer": "training_gpus", "sampler": "sampling_gpus", "log_prob": "log_prob_gpus"}[name]
            raise UnsupportedOperation(f"{op} needs a {name}, this job has none", where=name, remedy=f"set {setting}")
        engine = self._running[name]
        if op not in engine.capabilities:
            raise UnsupportedOperation(
                f"the {engine.definition.name} {name} cannot {op} on {self._launcher.device()}",
                where=name,
                remedy="info().engines lists what each engine can do",
            )
        return engine

    def has(self, name: EngineName) -> bool:
        """Whether the job has this engine."""
        return name in self._running

    def state(self, name: EngineName) -> EngineState | None:
        """The state of an engine, ``None`` where the job has none."""
        return self._running[name].state if name in self._running else None

    def capabilities(self) -> tuple[str, ...]:
        """Operations the job's engines can carry out."""
        ops = {"info", "shutdown"}.union(*(engine.capabilities for engine in self._running.values()))
        both = [name in self._running and "sync_weights" in self._running[name].capabilities for name in ("trainer", "sampler")]
        return tuple(sorted(ops if all(both) else ops - {"sync_weights"}))

    async def infos(self) -> tuple[EngineInfo, ...]:
        """Facts about each engine; one that is dead, or found dead, is reported as such."""
        return tuple(await asyncio.gather(*(self._info(name, engine) for name, engine in self._running.items())))

    async def _info(self, name: EngineName, engine: RunningEngine) -> EngineInfo:
        reports = []
        try:
            reports = [] if engine.state.dead else await engine.group.reports()
        except EngineDiedError as error:
            engine.state.dead = error.message
        return EngineInfo(
            name=name,
            implementation=engine.definition.name,
            ranks=len(engine.group.ranks),
            device=reports[0].device if reports else self._launcher.device(),
            dtype=reports[0].dtype if reports else "",
            state=str(engine.state),
            policy_version=engine.state.policy_version,
            memory_bytes=sum(report.memory_bytes for report in reports),
            capabilities=tuple(sorted(engine.capabilities)),
        )

    async def stop(self) -> None:
        """Stop all engines within ``deadlines.stop``; what does not stop is killed."""
        await asyncio.gather(*(e.group.stop(self.config.deadlines.stop) for e in self._running.values()))
        self._running.clear()


async def _start_all(ranks: Sequence[Rank], deadline_s: float) -> None:
    """Start ranks together. Ranks of one group meet in collectives, so one failure ends the wait for all."""
    tasks = [asyncio.ensure_future(rank.call("start", deadline_s=deadline_s)) for rank in ranks]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
