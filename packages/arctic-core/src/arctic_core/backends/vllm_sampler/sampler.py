"""The vLLM sampler: one replica on vLLM's ``AsyncLLM`` (Kwon et al., 2023), whose engine core is a process of its own.

The policy version of a completion is that of its first token. A sync while generation is paused with ``keep`` lets frozen
completions go on under the new weights, with their KV cache computed anew; their version stays that of their first token.

Log-probs are vLLM's ``processed_logprobs``: after temperature, top-k and top-p; of temperature 1 for greedy completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np

from arctic_core.backends.base import EngineReport, RankSpec, SampleJob, Sampler
from arctic_core.backends.memory import resident_bytes
from arctic_core.backends.sample_jobs import check_jobs, check_sequences
from arctic_core.backends.vllm_sampler.admission import Admission
from arctic_core.backends.vllm_sampler.arguments import check_temperature, sampling_arguments
from arctic_core.backends.vllm_sampler.process import EngineProcess
from arctic_core.backends.vllm_sampler.worker import Begin
from arctic_core.errors import (
    DeadlineExceeded,
    EngineDiedError,
    EngineError,
    InvalidStateError,
    UnsupportedOperation,
)
from arctic_core.protocol import Completion, ErrorInfo
from arctic_core.sync.plan import BucketRef, WeightPlan
from arctic_core.sync.receiver import check_plan

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from arctic_core.models.factory import CheckpointManifest

if importlib.util.find_spec("vllm") is None:  # importing it here would cost every process that only looks up capabilities
    raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

T = TypeVar("T")

_CHECK_S = 0.5  # how often a wait on the engine looks whether it still lives


class VllmSampler(Sampler):
    """Samples with vLLM."""

    implementation = "vllm"

    def __init__(self, spec: RankSpec) -> None:
        super().__init__(spec)
        self._where = f"sampler[{spec.rank}]"
        self._process = EngineProcess(spec)
        limit = spec.config.sampling.max_num_seqs
        # A few more than are decoded at once wait inside vLLM, so that a place that becomes free is filled at the next step.
        self._admission = Admission(limit + max(1, limit // 4))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._version = 0
        self._frozen = False
        self._syncing = False
        self._asleep = 0
        self._lost = ""
        self._manifest: CheckpointManifest | None = None
        self._vocabulary = 0
        self._scores = 0

    # --- life -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's process and load the model.

        Raises:
            ConfigError: ``sampling.vllm`` holds an unknown or reserved key.
            EngineStartError: vLLM did not come up; the message holds the cause, and no process is left.
        """
        engine = self._process.start()
        self._vocabulary = engine.model_config.get_vocab_size()

    def stop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._admission.fail, self._stopped())
        self._process.stop(self.spec.config.deadlines.stop)

    def report(self) -> EngineReport:
        return EngineReport(
            implementation=self.implementation,
            device=self.spec.device,
            dtype=self.spec.dtype,
            pid=os.getpid(),
            memory_bytes=self._memory_bytes(),
            capabilities=self.capabilities(self.spec.device),
        )

    def _memory_bytes(self) -> int:
        if self.spec.device == "cpu":
            return resident_bytes([os.getpid(), *self._process.pids()])
        import torch

        return torch.cuda.device_memory_used()  # by NVML: this process holds no CUDA context

    @classmethod
    def capabilities(cls, device: str) -> tuple[str, ...]:
        common = ("generate", "sync_weights", "reset_prefix_cache", "pause", "resume", "abort")
        return common if device == "cpu" else (*common, "sleep", "wake")

    # --- generation -----------------------------------------------------------------------------------------------------

    async def generate(self, jobs: Sequence[SampleJob]) -> AsyncIterator[tuple[int, Completion]]:
        engine = self._ready()
        check_jobs(jobs, vocabulary=self._vocabulary, max_seq_len=self.spec.config.max_seq_len)
        for job in jobs:
            check_temperature(job.sampling.temperature)
        self._loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(self._one(engine, i, job)) for i, job in enumerate(jobs)]
        watch = asyncio.create_task(self._fail_when_dead(engine))
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            started: list[asyncio.Task[Any]] = [*tasks, watch]
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    async def _fail_when_dead(self, engine: AsyncLLM) -> None:
        """End what waits for a dead engine; vLLM does so itself only where it notices the death."""
        from vllm.v1.engine.exceptions import EngineDeadError

        while not self._gone(engine):
            await asyncio.sleep(_CHECK_S)
        engine.output_processor.propagate_error(EngineDeadError())

    async def _one(self, engine: AsyncLLM, index: int, job: SampleJob) -> tuple[int, Completion]:
        async with self._admission.turn(job.request_id) as admitted:
            if not admitted:
                return index, self._completion(engine, [], "abort", self._version)
            version: int | None = None
            parts: list[RequestOutput] = []
            params = sampling_arguments(job, self.spec.config.max_seq_len)
            prompt: Any = {"prompt_token_ids": job.prompt.tolist()}
            with self._translated():
                async for part in engine.generate(prompt, params, job.request_id):
                    if version is None:
                        version = self._version
                    parts.append(part)
            reason = parts[-1].outputs[0].finish_reason if parts else "error"
            if reason not in ("stop", "length", "abort"):
                raise EngineError(f"vLLM ended {job.request_id} with {reason!r}", where=self._where)
            return index, self._completion(engine, parts, reason, self._version if version is None else version)

    def _completion(self, engine: AsyncLLM, parts: Sequence[RequestOutput], reason: Any, version: int) -> Completion:
        outputs = [part.outputs[0] for part in parts]
        tokens = [token for output in outputs for token in output.token_ids]
        logprobs = [logprob for output in outputs for logprob in _drawn(output)]
        text = "".join(output.text for output in outputs)
        if tokens and not text:
            text = engine.get_tokenizer().decode(tokens, skip_special_tokens=True)
        return Completion(
            token_ids=np.asarray(tokens, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            text=text,
            finish_reason=reason,
            policy_version=version,
        )

    async def abort(self, prefixes: Sequence[str]) -> None:
        inside = self._admission.abort(prefixes)
        if inside:
            await self._answer(self._engine().abort(inside))

    async def pause(self, mode: Literal["drain", "keep", "abort"], deadline_s: float) -> None:
        engine = self._engine()
        self._admission.close()
        try:
            if mode == "keep":
                await self._answer(engine.pause_generation(mode="keep", clear_cache=False), deadline_s)
                self._frozen = True
                return
            if self._frozen:  # by an earlier pause; frozen completions would never end
                await self._answer(engine.resume_generation(), deadline_s)
                self._frozen = False
            if mode == "abort":
                await self.abort(())
            await self._answer(self._admission.idle(), deadline_s)
        except DeadlineExceeded:
            await self.resume()
            raise DeadlineExceeded(
                f"running generations did not end within {deadline_s:g} s; generation goes on",
                where=self._where,
                remedy="raise deadlines.drain, or pause with mode 'keep' or 'abort'",
            ) from None

    async def resume(self) -> None:
        if self._frozen:
            await self._answer(self._engine().resume_generation())
            self._frozen = False
        self._admission.open()

    async def reset_prefix_cache(self) -> None:
        engine = self._engine()
        if not await self._answer(engine.reset_prefix_cache(reset_running_requests=self._frozen)):
            raise InvalidStateError(
                "the prefix cache is in use by running completions", where=self._where, remedy="pause generation first"
            )

    # --- weights --------------------------------------------------------------------------------------------------------

    async def sync_begin(self, plan: WeightPlan) -> None:
        self._awake()
        if self._syncing:
            raise InvalidStateError("a weight sync is under way already", where=self._where)
        if self._manifest is None:
            from arctic_core.models.factory import checkpoint_manifest

            self._manifest = await asyncio.to_thread(checkpoint_manifest, self.spec.model_path, self.spec.dtype)
        mapping = check_plan(plan, self._manifest.tensors, self._manifest.ties)
        begin = Begin(plan=plan, mapping=mapping, directory=self.spec.config.weight_sync.directory)
        self._syncing = True
        await self._on_workers("arctic_sync_begin", msgspec.json.encode(begin).decode())

    async def sync_push(self, ref: BucketRef) -> None:
        await self._on_workers("arctic_sync_push", msgspec.json.encode(ref).decode())

    async def sync_commit(self, version: int) -> None:
        self._awake()
        if self._admission.inside and not self._frozen:
            raise InvalidStateError("completions are running", where=self._where, remedy="pause first")
        await self._on_workers("arctic_sync_complete")
        self._lost = "a weight sync failed half-way"
        try:
            await self._on_workers("arctic_sync_load")
            await self._on_workers("arctic_sync_abandon")
        except EngineDiedError:
            raise
        except Exception as error:
            raise EngineError(
                f"loading the new weights failed half-way: {error}",
                where=self._where,
                remedy="sync again, or restart the sampler",
            ) from error
        await self.reset_prefix_cache()
        self._lost = ""
        self._syncing = False
        self._version = version

    async def sync_abandon(self) -> None:
        if self._syncing:
            self._syncing = False
            await self._on_workers("arctic_sync_abandon")

    async def _on_workers(self, method: str, *arguments: str) -> None:
        call = self._engine().collective_rpc(method, args=arguments)
        for rank, answer in enumerate(await self._answer(call)):
            if answer:
                error = msgspec.json.decode(answer, type=ErrorInfo).to_exception()
                error.where = f"{self._where}, worker {rank}" + (f": {error.where}" if error.where else "")
                raise error

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See the base class. A sequence may have ``max_seq_len - 1`` tokens at most: vLLM always generates one.

        Raises:
            InvalidStateError: Generation is paused with ``keep``, which holds this too.
        """
        engine = self._ready()
        if self._frozen:
            raise InvalidStateError(
                "vLLM scores nothing while completions are frozen", where=self._where, remedy="resume first"
            )
        check_sequences(token_ids, vocabulary=self._vocabulary, max_seq_len=self.spec.config.max_seq_len - 1)
        return list(await asyncio.gather(*(self._score(engine, ids) for ids in token_ids)))

    async def _score(self, engine: AsyncLLM, ids_S: np.ndarray) -> np.ndarray:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._scores += 1
        tokens = ids_S.tolist()
        prompt: Any = {"prompt_token_ids": tokens}
        params = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        with self._translated():
            async for output in engine.generate(prompt, params, f"arctic-score-{self._scores}"):
                listed: Any = output.prompt_logprobs
                return np.asarray([at[token].logprob for token, at in zip(tokens[1:], listed[1:], strict=True)], np.float32)
        raise EngineError("vLLM returned no score", where=self._where)

    # --- sleep ----------------------------------------------------------------------------------------------------------

    async def sleep_async(self, level: int) -> None:
        self._check_sleep("sleep")
        self._awake()
        if self._admission.inside:
            raise InvalidStateError("completions are running", where=self._where, remedy="pause first")
        await self._answer(self._engine().sleep(level=level))
        self._asleep = level
        if level > 1:
            self._lost = "the weights were dropped by a sleep of level 2"

    async def wake_async(self) -> None:
        self._check_sleep("wake")
        if self._asleep:
            await self._answer(self._engine().wake_up())
            self._asleep = 0

    def _check_sleep(self, op: str) -> None:
        if op not in self.capabilities(self.spec.device):
            raise UnsupportedOperation(f"vLLM cannot {op} on {self.spec.device}", where=self._where)

    # --- helpers --------------------------------------------------------------------------------------------------------

    def _engine(self) -> AsyncLLM:
        engine = self._process.engine
        if engine is None:
            raise InvalidStateError("the sampler is not running", where=self._where)
        if self._gone(engine):
            raise self._died()
        return engine

    def _gone(self, engine: AsyncLLM) -> bool:
        return engine.errored or not self._process.alive()

    def _awake(self) -> AsyncLLM:
        if self._asleep:
            raise InvalidStateError("the sampler sleeps", where=self._where, remedy="wake it first")
        return self._engine()

    def _ready(self) -> AsyncLLM:
        engine = self._awake()
        if self._lost:
            raise InvalidStateError(self._lost, where=self._where, remedy="sync_weights first")
        return engine

    def _stopped(self) -> EngineError:
        return EngineError("the sampler was stopped", where=self._where)

    def _died(self) -> EngineError:
        if self._process.engine is None:
            return self._stopped()
        return EngineDiedError("vLLM's engine process is gone", where=self._where, remedy="restart the sampler")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """vLLM's errors as ours."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield
        except EngineDeadError as error:
            raise self._died() from error
        except EngineGenerateError as error:
            cause = error.__cause__ or error
            raise EngineError(f"vLLM failed: {type(cause).__name__}: {cause}", where=self._where) from error

    async def _answer(self, awaitable: Awaitable[T], deadline_s: float | None = None) -> T:
        """Wait for the engine, but not for a dead one, nor past the deadline (by default the request's)."""
        loop = asyncio.get_running_loop()
        limit_s = self.spec.config.deadlines.request if deadline_s is None else deadline_s
        end = loop.time() + limit_s
        task = asyncio.ensure_future(awaitable)
        try:
            while True:
                await asyncio.wait({task}, timeout=min(_CHECK_S, max(0.0, end - loop.time())))
                if task.done():
                    with self._translated():
                        return task.result()
                self._engine()
                if loop.time() >= end:
                    raise DeadlineExceeded(f"vLLM did not answer within {limit_s:g} s", where=self._where)
        finally:
            task.cancel()


def _drawn(output: Any) -> list[float]:
    """Log-probs of the drawn tokens: with ``logprobs=0`` each position holds exactly one."""
    if output.logprobs is None:
        return []
    return output.logprobs.logprobs
