"""The embedded sampler: a transformers model decoded in this process. Small, exact, and the oracle for the others.

Completions depend on their own seed only (see :mod:`~arctic_core.backends.transformers_sampler.drawing`). There is no
prefix cache: prompts are shared only among jobs admitted in the same step, and nothing outlives a request.

The policy version of a completion is that of its first token. A sync while generation is paused with ``keep`` lets frozen
completions go on under the new weights, with their KV cache computed anew.

Suffix legend: ``_S`` tokens of one sequence, ``_V`` vocabulary.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from arctic_core.backends.base import EngineReport, RankSpec, SampleJob, Sampler
from arctic_core.backends.memory import resident_bytes
from arctic_core.backends.sample_jobs import check_jobs, check_sequences
from arctic_core.backends.transformers_sampler.cohort import Row
from arctic_core.backends.transformers_sampler.decoder import Decoder, Limits
from arctic_core.errors import (
    ArcticError,
    DeadlineExceeded,
    EngineStartError,
    InvalidStateError,
    ModelNotFoundError,
    UnsupportedOperation,
    WeightSyncError,
)
from arctic_core.models.factory import CheckpointManifest, manifest_of
from arctic_core.models.loading import LOADING
from arctic_core.plugins.manager import get_registry
from arctic_core.protocol import Completion
from arctic_core.sync.plan import BucketRef, WeightPlan
from arctic_core.sync.receiver import BucketStage, check_plan

T = TypeVar("T")


class TransformersSampler(Sampler):
    """Samples with ``transformers`` in this process, decoding on a thread of its own."""

    implementation = "transformers"

    def __init__(self, spec: RankSpec) -> None:
        super().__init__(spec)
        self._where = f"sampler[{spec.rank}]"
        self._decoder: Decoder | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._manifest: CheckpointManifest | None = None
        self._shapes: dict[str, torch.Size] = {}
        self._stage: BucketStage | None = None
        self._asleep = 0
        self._lost = False
        # Seeds of jobs that bring none.
        self._seeds = np.random.default_rng([spec.config.seed, spec.rank])

    # --- life -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load model and tokenizer.

        Raises:
            ModelNotFoundError: The model's folder cannot be read.
            EngineStartError: transformers refuses it; the message holds its reason.
        """
        if self.spec.threads is not None:
            torch.set_num_threads(self.spec.threads)
        model, tokenizer = _load(self.spec)
        limits = Limits(
            max_num_seqs=self.spec.config.sampling.max_num_seqs,
            max_seq_len=self.spec.config.max_seq_len,
            eos_token_ids=_eos_token_ids(model, tokenizer),
        )
        self._manifest = manifest_of(model, self.spec.dtype)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._tokenizer = tokenizer
        self._decoder = Decoder(model, self._decode, limits, version=0)

    def stop(self) -> None:
        decoder, self._decoder = self._decoder, None
        if self._stage is not None:
            self._stage.close()
            self._stage = None
        if decoder is not None and not decoder.stop(self.spec.config.deadlines.stop):
            raise DeadlineExceeded("the decoder's running step did not end in time", where=self._where)

    def report(self) -> EngineReport:
        on_gpu = self.spec.device == "cuda"
        return EngineReport(
            implementation=self.implementation,
            device=self.spec.device,
            dtype=self.spec.dtype,
            pid=os.getpid(),
            memory_bytes=torch.cuda.memory_allocated() if on_gpu else resident_bytes([os.getpid()]),
            capabilities=self.capabilities(self.spec.device),
        )

    @classmethod
    def capabilities(cls, device: str) -> tuple[str, ...]:
        return ("generate", "sync_weights", "reset_prefix_cache", "pause", "resume", "abort", "sleep", "wake")

    # --- generation -----------------------------------------------------------------------------------------------------

    async def generate(self, jobs: Sequence[SampleJob]) -> AsyncIterator[tuple[int, Completion]]:
        decoder = self._ready()
        vocabulary = decoder.model.config.get_text_config().vocab_size
        check_jobs(jobs, vocabulary=vocabulary, max_seq_len=self.spec.config.max_seq_len)
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[tuple[int, Completion] | ArcticError] = asyncio.Queue()
        rows = [Row(i, job, self._generator(job), loop, results) for i, job in enumerate(jobs)]
        decoder.call(lambda: decoder.submit(rows))
        try:
            for _ in rows:
                outcome = await results.get()
                if isinstance(outcome, ArcticError):
                    raise outcome
                yield outcome
        finally:
            if not all(row.done for row in rows):
                mine = set(map(id, rows))
                decoder.call(lambda: decoder.abort(lambda row: id(row) in mine))

    async def abort(self, prefixes: Sequence[str]) -> None:
        decoder = self._running()
        chosen = tuple(prefixes) or ("",)
        await self._on_decoder(lambda: decoder.abort(lambda row: row.job.request_id.startswith(chosen)))

    async def pause(self, mode: Literal["drain", "keep", "abort"], deadline_s: float) -> None:
        decoder = self._running()
        await self._on_decoder(lambda: decoder.pause(freeze=mode == "keep"))
        if mode == "abort":
            await self._on_decoder(lambda: decoder.abort(lambda row: True))
        if mode != "drain":
            return
        drained = await self._on_decoder(decoder.drained)
        try:
            await asyncio.wait_for(asyncio.wrap_future(drained), deadline_s)
        except TimeoutError:
            await self.resume()
            raise DeadlineExceeded(
                f"running generations did not end within {deadline_s:g} s; generation goes on",
                where=self._where,
                remedy="raise deadlines.drain, or pause with mode 'keep' or 'abort'",
            ) from None

    async def resume(self) -> None:
        await self._on_decoder(self._running().resume)

    async def reset_prefix_cache(self) -> None:
        """True at all times: no prefix is kept."""
        self._running()

    # --- weights --------------------------------------------------------------------------------------------------------

    async def sync_begin(self, plan: WeightPlan) -> None:
        self._awake()
        if self._manifest is None or any(
            meta.name != source for meta, source in zip(self._manifest.tensors, self._manifest.sources, strict=True)
        ):
            raise UnsupportedOperation(
                "this architecture's checkpoint is laid out differently from its module, so it cannot be loaded in place",
                where=self._where,
                remedy="use the vllm sampler",
            )
        if self._stage is not None:
            raise InvalidStateError("a weight sync is under way already", where=self._where)
        mapping = check_plan(plan, self._manifest.tensors, self._manifest.ties)
        directory = self.spec.config.weight_sync.directory
        registry = get_registry()
        self._stage = BucketStage(plan, mapping, lambda name: registry.carrier(name).create(directory))

    async def sync_push(self, ref: BucketRef) -> None:
        await asyncio.to_thread(self._begun().push, ref)

    async def sync_commit(self, version: int) -> None:
        decoder = self._awake()
        stage = self._begun()
        stage.complete()

        def load() -> None:
            parameters = dict(decoder.model.named_parameters())
            for name, tensor in stage.tensors():
                parameters[name].data.copy_(tensor)
            decoder.weights_changed(version)

        await self._on_decoder(load)
        self._lost = False
        await self.sync_abandon()

    async def sync_abandon(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.close()

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        decoder = self._ready()
        vocabulary = decoder.model.config.get_text_config().vocab_size
        check_sequences(token_ids, vocabulary=vocabulary, max_seq_len=self.spec.config.max_seq_len)

        def one(ids_S: np.ndarray) -> np.ndarray:
            row = torch.from_numpy(ids_S.astype(np.int64)).to(decoder.model.device)
            logprobs_SV = decoder.model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            return logprobs_SV.gather(-1, row[1:, None])[:, 0].cpu().numpy()

        return [await self._on_decoder(lambda ids=ids: one(ids)) for ids in token_ids]

    # --- sleep ----------------------------------------------------------------------------------------------------------

    async def sleep_async(self, level: int) -> None:
        """Level 1 moves the weights to host memory (where they are already on CPU), level 2 drops them."""
        decoder = self._awake()

        def sleep() -> None:
            if decoder.busy:
                raise InvalidStateError(
                    "completions are running", where=self._where, remedy='pause("drain") or pause("abort") first'
                )
            if level == 1:
                decoder.model.to("cpu")  # type: ignore[arg-type]
            else:
                for parameter in decoder.model.parameters():
                    parameter.data = torch.empty(0, dtype=parameter.dtype)

        await self._on_decoder(sleep)
        self._asleep = level
        self._lost = self._lost or level > 1

    async def wake_async(self) -> None:
        """After level 2 the weights are zeros until a sync; generation is refused till then."""
        decoder = self._running()
        level = self._asleep
        if not level:
            return

        def wake() -> None:
            if level > 1:
                parameters = dict(decoder.model.named_parameters())
                for name, shape in self._shapes.items():
                    parameters[name].data = torch.zeros(shape, dtype=parameters[name].dtype)
            decoder.model.to(self.spec.device)  # type: ignore[arg-type]

        await self._on_decoder(wake)
        self._asleep = 0

    # --- helpers --------------------------------------------------------------------------------------------------------

    def _running(self) -> Decoder:
        if self._decoder is None:
            raise InvalidStateError("the sampler is not running", where=self._where)
        return self._decoder

    def _awake(self) -> Decoder:
        if self._asleep:
            raise InvalidStateError("the sampler sleeps", where=self._where, remedy="wake it first")
        return self._running()

    def _ready(self) -> Decoder:
        decoder = self._awake()
        if self._lost:
            raise InvalidStateError(
                "the weights were dropped by a sleep of level 2", where=self._where, remedy="sync_weights first"
            )
        return decoder

    def _begun(self) -> BucketStage:
        if self._stage is None:
            raise WeightSyncError("no weight sync was begun", where=self._where)
        return self._stage

    async def _on_decoder(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._running().call(function))

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)  # type: ignore[union-attr, return-value]

    def _generator(self, job: SampleJob) -> torch.Generator:
        seed = int(self._seeds.integers(2**63)) if job.seed is None else job.seed
        return torch.Generator().manual_seed(seed & (2**63 - 1))


def _load(spec: RankSpec) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    dtype = getattr(torch, spec.dtype)
    try:
        with LOADING:
            model = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(spec.model_path)
    except OSError as error:
        raise ModelNotFoundError(f"the model cannot be read: {error}", where=spec.model_path) from error
    except (ValueError, ImportError) as error:
        raise EngineStartError(f"transformers cannot load the model: {error}", where=spec.model_path) from error
    model.to(spec.device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None)
