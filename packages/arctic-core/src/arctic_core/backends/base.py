"""What an engine is: one rank of a trainer, a log-prob engine or a sampler.

An engine knows nothing of clients, transports or other ranks' work. It is built in the process that will run it, from a
:class:`RankSpec`, and called by an :class:`~arctic_core.backends.group.EngineGroup`, which shards batches, merges results
in order and decides the number of micro-batches once for all ranks. Trainers and log-prob engines are synchronous and
called from one thread; samplers are asynchronous. Every array is numpy at this border.

Suffix legend: ``_R`` response-token axis of a packed batch, ``_K`` tokens scored beside each response token.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.data import Batch
from arctic_core.protocol import Completion, EngineName, Metric, NamedLoss, RestorePart, SamplingParams
from arctic_core.sync.plan import BucketRef, WeightPlan


@dataclass(frozen=True)
class RankSpec:
    """All that one rank needs to build itself."""

    engine: EngineName
    rank: int
    world_size: int
    model_path: str
    """Local folder in Hugging Face layout, or a hub id; GGUF files have been converted by then."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    config: ArcticRLClientConfig
    threads: int | None = None
    """Compute threads on CPU; ``None`` leaves the default."""
    rendezvous: str | None = None
    """``tcp://host:port`` of rank 0's store where ``world_size > 1``; rank 0 binds the port before it is announced."""


@dataclass(frozen=True)
class EngineReport:
    """Answer of :meth:`Engine.report`."""

    implementation: str
    device: str
    dtype: str
    pid: int
    memory_bytes: int
    capabilities: tuple[str, ...]
    shares_prompts: bool = False
    """Whether tokens that samples of a micro-batch share are computed once."""


@dataclass(frozen=True)
class StepOutcome:
    """Answer of :meth:`Trainer.step`."""

    grad_norm: float
    lr: float
    step: int


@dataclass(frozen=True)
class ScoreOutcome:
    """Scores of one rank's micro-batches, concatenated in the order given; see :class:`arctic_core.protocol.Scores`."""

    logprobs_R: np.ndarray
    entropy_R: np.ndarray | None = None
    topk_ids_RK: np.ndarray | None = None
    """Int32."""
    topk_logprobs_RK: np.ndarray | None = None


class Engine(abc.ABC):
    """One rank of any engine."""

    #: Registered name of the implementation.
    implementation: str = ""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec

    @abc.abstractmethod
    def start(self) -> None:
        """Load the model and be ready. Raises a typed error and leaves nothing behind where it cannot."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Free everything. Idempotent."""

    @abc.abstractmethod
    def report(self) -> EngineReport:
        """Facts about the rank; must not wait for running work."""

    @classmethod
    @abc.abstractmethod
    def capabilities(cls, device: str) -> tuple[str, ...]:
        """Operations (by :meth:`Operation.op` name) this engine can carry out on that device."""

    def sleep(self, level: int) -> None:
        """Free memory; see :class:`arctic_core.protocol.Sleep`. Only called when ``"sleep"`` is among the capabilities."""
        raise self._unsupported("sleep")

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        raise self._unsupported("wake")

    def _unsupported(self, op: str) -> Exception:
        from arctic_core.errors import UnsupportedOperation

        return UnsupportedOperation(
            f"the {self.implementation} {self.spec.engine} cannot {op} on {self.spec.device}",
            where=f"{self.spec.engine}[{self.spec.rank}]",
            remedy="ask info() for its capabilities",
        )


class LogProb(Engine):
    """Scores batches with a frozen model. With several ranks every rank gets the same number of micro-batches."""

    @abc.abstractmethod
    def forward(
        self,
        micro_batches: Sequence[Batch],
        *,
        entropy: bool,
        temperature: float | None,
        topk: int = 0,
        given_topk: bool = False,
    ) -> ScoreOutcome:
        """Score without gradients. An empty micro-batch takes part in collectives and adds nothing.

        ``temperature`` overrides the samples' own. The arguments are those of :class:`arctic_core.protocol.Forward`.
        """


class Trainer(LogProb):
    """Trains. Gradients are sums over micro-batches *and* ranks until :meth:`step` divides them once."""

    @abc.abstractmethod
    def forward_reference(
        self,
        micro_batches: Sequence[Batch],
        *,
        entropy: bool,
        temperature: float | None,
        topk: int = 0,
        given_topk: bool = False,
    ) -> ScoreOutcome:
        """Score with the frozen copy of the initial weights (only with ``config.reference`` and no log-prob ranks)."""

    @abc.abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[Batch], loss: NamedLoss, *, temperature: float | None
    ) -> dict[str, Metric]:
        """Accumulate the gradient of the summed loss; metrics are this rank's sums."""

    @abc.abstractmethod
    def backward(
        self,
        micro_batches: Sequence[Batch],
        grad_logprobs: Sequence[np.ndarray],
        grad_entropy: Sequence[np.ndarray] | None,
        grad_topk_logprobs: Sequence[np.ndarray] | None = None,
        *,
        temperature: float | None,
    ) -> None:
        """Accumulate the gradient of ``Σ w·logprob + Σ v·entropy + Σ u·topk_logprob``; one ``[R]`` (``u``: ``[R, K]``) array
        per micro-batch."""

    @abc.abstractmethod
    def step(self, *, divisor: float, lr: float | None, max_grad_norm: float | None) -> StepOutcome:
        """Divide the accumulated gradient by ``divisor``, clip, update, zero.

        Raises:
            NonFiniteError: The gradient norm is NaN or infinite; nothing was updated, the gradient is dropped.
        """

    @abc.abstractmethod
    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""

    @abc.abstractmethod
    def weight_plan(self, bucket_bytes: int) -> WeightPlan:
        """Names, shapes, dtypes, ties and buckets of the weights, by Hugging Face checkpoint names."""

    @abc.abstractmethod
    def export_bucket(self, plan: WeightPlan, index: int, carrier: str) -> BucketRef | None:
        """Publish bucket ``index`` through a carrier. All ranks take part; only rank 0 returns a reference."""

    @abc.abstractmethod
    def release_buckets(self) -> None:
        """Free what :meth:`export_bucket` published. Idempotent."""

    @abc.abstractmethod
    def save(self, directory: str) -> None:
        """Write weights, optimizer, schedule, step and random state into an existing empty folder. All ranks take part."""

    @abc.abstractmethod
    def load(self, directory: str, restore: Sequence[RestorePart]) -> int:
        """Restore what :meth:`save` wrote; returns the number of optimizer steps taken. All ranks take part."""

    @abc.abstractmethod
    def export_hf(self, directory: str) -> tuple[int, int]:
        """Write a Hugging Face folder; returns number of tensors and bytes (rank 0's; 0 elsewhere)."""


@dataclass(frozen=True)
class SampleJob:
    """One completion to draw."""

    request_id: str
    """Unique; several jobs of one client request share its prefix ``<client request id>/``."""
    prompt: np.ndarray
    sampling: SamplingParams
    seed: int | None
    """Seed of this completion alone."""


class Sampler(Engine):
    """Draws completions. Methods are coroutines on one event loop."""

    @abc.abstractmethod
    def generate(self, jobs: Sequence[SampleJob]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield ``(index of the job, completion)`` in the order of finishing. Closing the iterator aborts what still runs."""

    @abc.abstractmethod
    async def abort(self, prefixes: Sequence[str]) -> None:
        """End jobs whose request id starts with one of the prefixes (all where empty); they finish with ``"abort"``."""

    @abc.abstractmethod
    async def pause(self, mode: Literal["drain", "keep", "abort"], deadline_s: float) -> None:
        """Hold generation. Raises :class:`DeadlineExceeded` where a drain does not end in time (and generation goes on)."""

    @abc.abstractmethod
    async def resume(self) -> None:
        """Go on after :meth:`pause`."""

    @abc.abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""

    @abc.abstractmethod
    async def sync_begin(self, plan: WeightPlan) -> None:
        """Check the plan against the model served. Raises :class:`WeightSyncError` naming each mismatch."""

    @abc.abstractmethod
    async def sync_push(self, ref: BucketRef) -> None:
        """Take note of a published bucket and verify it. The weights served do not change."""

    @abc.abstractmethod
    async def sync_commit(self, version: int) -> None:
        """Check completeness, load the new weights, reset the prefix cache, serve ``version``.

        Generation is paused by the caller. Raises :class:`WeightSyncError` before anything changed where a bucket is
        missing.
        """

    @abc.abstractmethod
    async def sync_abandon(self) -> None:
        """Forget a begun sync. Idempotent."""

    @abc.abstractmethod
    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probs (nats, temperature 1) of tokens ``1..`` of each sequence under the weights served; for probes."""

    async def sleep_async(self, level: int) -> None:
        """Twin of :meth:`Engine.sleep` on the event loop."""
        raise self._unsupported("sleep")

    async def wake_async(self) -> None:
        """Twin of :meth:`Engine.wake` on the event loop."""
        raise self._unsupported("wake")


@dataclass(frozen=True)
class EngineDefinition:
    """An engine as registered through the ``arctic_trainers``, ``arctic_logprobs`` or ``arctic_samplers`` hook."""

    name: str
    load: Callable[[], type[Engine]]
    """Imports the class; raises :class:`MissingExtraError` where its packages are absent."""
    extra: str = ""
    """The extra of ``arctic-core`` that installs what it needs."""
    multi_rank: bool = True
    """Whether it runs with more than one rank."""
    multi_process: bool = True
    """Whether its ranks may be Ray actors."""
