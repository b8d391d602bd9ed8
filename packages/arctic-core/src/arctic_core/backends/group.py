"""Engine groups: N ranks that act as one engine.

A group shards a batch over its ranks, decides the number of micro-batches once for all of them, runs the ranks together
and merges their results in the caller's order. It also owns the one division of a training step: the trainer group counts
what the accumulated gradient must be divided by, over all batches and ranks, and hands the number to every rank.

Suffix legend: ``_R`` response-token axis of a packed batch, ``_K`` tokens scored beside each response token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from arctic_core.backends.base import EngineReport, SampleJob, ScoreOutcome, StepOutcome
from arctic_core.backends.rank import Rank
from arctic_core.batching import BatchPlan, plan_batch
from arctic_core.data import Batch
from arctic_core.errors import (
    ArcticError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineDiedError,
    EngineError,
    InvalidStateError,
)
from arctic_core.losses.base import LossDefinition, PreparedLoss, prepare_loss
from arctic_core.losses.named import count_divisor, find_loss
from arctic_core.protocol import Completion, Metric, NamedLoss, RestorePart, Scores
from arctic_core.sync.plan import BucketRef, WeightPlan

#: Seconds the other ranks get to fail too, once one has failed, before they count as stuck in a collective.
STRAGGLER_GRACE_S = 10.0
#: Seconds within which a rank must report, however busy it is.
REPORT_DEADLINE_S = 10.0


class EngineGroup:
    """All ranks of one engine.

    Args:
        ranks: Handles in rank order; their engines have been started.
        deadline_s: Longest wait for one call.
    """

    straggler_grace_s: float | None = STRAGGLER_GRACE_S
    """``None`` where ranks never wait for each other: each then has until its own deadline."""

    def __init__(self, ranks: Sequence[Rank], *, deadline_s: float) -> None:
        self.ranks = list(ranks)
        self.deadline_s = deadline_s

    async def everywhere(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method with the same arguments on all ranks; results in rank order."""
        return await self.each(method, [args] * len(self.ranks), **kwargs)

    async def each(self, method: str, args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """Call a method on all ranks, with arguments of its own for each.

        The first failure is raised once the other ranks have answered. Ranks that do not answer within a grace time hang
        in a collective that will never complete: the error is then :class:`EngineDiedError`, and the group is lost.
        """
        tasks = [
            asyncio.ensure_future(rank.call(method, *rank_args, deadline_s=self.deadline_s, **kwargs))
            for rank, rank_args in zip(self.ranks, args, strict=True)
        ]
        try:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                late, pending = await asyncio.wait(pending, timeout=self.straggler_grace_s)
                done |= late
        finally:
            for task in tasks:
                task.cancel()
        errors = [error for task in tasks if task in done and (error := task.exception())]
        if not errors:
            return [task.result() for task in tasks]
        error = min(errors, key=_secondary)
        if pending and not isinstance(error, EngineDiedError):
            raise EngineDiedError(
                f"{method} failed on one rank while {len(pending)} others wait for it: {error}",
                where=getattr(error, "where", ""),
            ) from error
        raise error

    async def reports(self) -> list[EngineReport]:
        """Every rank's report."""
        return await asyncio.gather(*(rank.report(REPORT_DEADLINE_S) for rank in self.ranks))

    async def stop(self, deadline_s: float) -> None:
        """Stop all ranks, whatever their state."""
        await asyncio.gather(*(rank.stop(deadline_s) for rank in self.ranks), return_exceptions=True)


class LogProbGroup(EngineGroup):
    """Scores batches over all ranks."""

    shares_prompts = False
    """Whether all ranks compute once what the samples of a micro-batch share, so that plans count it once."""

    def __init__(self, ranks: Sequence[Rank], *, deadline_s: float, micro_batch_tokens: int) -> None:
        super().__init__(ranks, deadline_s=deadline_s)
        self.micro_batch_tokens = micro_batch_tokens

    def shard(self, batch: Batch) -> tuple[BatchPlan, list[list[Batch]]]:
        """The plan of a batch and each rank's micro-batches, equally many everywhere."""
        plan = plan_batch(batch, ranks=len(self.ranks), max_tokens=self.micro_batch_tokens, shared_prompts=self.shares_prompts)
        return plan, [[batch.select(indices) for indices in rank] for rank in plan.ranks]

    async def forward(
        self,
        batch: Batch,
        *,
        entropy: bool,
        temperature: float | None,
        topk: int = 0,
        given_topk: bool = False,
        method: str = "forward",
    ) -> Scores:
        """What :class:`arctic_core.protocol.Forward` asks for, of the batch's response tokens, in its order."""
        plan, shards = self.shard(batch)
        outcomes: list[ScoreOutcome] = await self.each(
            method,
            [(shard,) for shard in shards],
            entropy=entropy,
            temperature=temperature,
            topk=topk,
            given_topk=given_topk,
        )

        def merged(outputs: list[np.ndarray | None]) -> np.ndarray | None:
            found = [output for output in outputs if output is not None]
            return plan.merge(batch, found) if found else None

        return Scores(
            logprobs=plan.merge(batch, [outcome.logprobs_R for outcome in outcomes]),
            entropy=merged([outcome.entropy_R for outcome in outcomes]),
            topk_ids=merged([outcome.topk_ids_RK for outcome in outcomes]),
            topk_logprobs=merged([outcome.topk_logprobs_RK for outcome in outcomes]),
        )


class TrainerGroup(LogProbGroup):
    """Trains over all ranks.

    Args:
        find_loss: The definition of a named loss, for what the group itself must know of it.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        deadline_s: float,
        micro_batch_tokens: int,
        find_loss: Callable[[str], LossDefinition] = find_loss,
    ) -> None:
        super().__init__(ranks, deadline_s=deadline_s, micro_batch_tokens=micro_batch_tokens)
        self._find_loss = find_loss
        self._divisor = Divisor()

    @property
    def accumulating(self) -> bool:
        """Whether a gradient waits for :meth:`step`."""
        return self._divisor.kind is not None

    async def forward_backward(self, batch: Batch, loss: NamedLoss, *, temperature: float | None) -> dict[str, Metric]:
        """Accumulate a named loss's gradient; returns metrics summed over ranks, with ``all_masked_batches``: whether the
        batch had nothing to train.

        Raises:
            ConfigError: There is no such loss, or its options or normalisation are wrong. No rank has begun.
            NonFiniteError: The loss is NaN or infinite. The accumulated gradient is dropped.
        """
        # Not on the event loop: a loss by dotted name imports its module.
        prepared = await asyncio.to_thread(lambda: prepare_loss(self._find_loss(loss.name), loss))
        counted = self._divisor.with_loss(batch, prepared)
        _, shards = self.shard(batch)
        async with self._dropping_on_failure():
            per_rank: list[dict[str, Metric]] = await self.each(
                "forward_backward", [(shard, loss) for shard in shards], temperature=temperature
            )
        self._divisor = counted
        return add_metrics([*per_rank, {"all_masked_batches": Metric(sum=float(not batch.mask.any()))}])

    async def backward(
        self,
        batch: Batch,
        grad_logprobs: np.ndarray,
        grad_entropy: np.ndarray | None,
        grad_topk_logprobs: np.ndarray | None = None,
        *,
        temperature: float | None,
    ) -> None:
        """Accumulate the gradient of ``Σ w·logprob + Σ v·entropy + Σ u·topk_logprob``."""
        counted = self._divisor.with_sum()
        plan, shards = self.shard(batch)
        weights = [_deal(plan, batch, values) for values in (grad_logprobs, grad_entropy, grad_topk_logprobs)]
        async with self._dropping_on_failure():
            await self.each("backward", list(zip(shards, *weights, strict=True)), temperature=temperature)
        self._divisor = counted

    @contextlib.asynccontextmanager
    async def _dropping_on_failure(self) -> AsyncIterator[None]:
        """What is refused leaves the gradient as it was; what fails half-way may have added a part of it, so all is dropped."""
        try:
            yield
        except (ConfigError, DataError, EngineDiedError, DeadlineExceeded):  # the last two: the ranks are lost
            raise
        except ArcticError:
            await self.zero_grad()
            raise

    async def step(self, *, lr: float | None, max_grad_norm: float | None) -> StepOutcome:
        """Divide once, clip, update, zero."""
        divisor = self._divisor.value()
        self._divisor = Divisor()
        try:
            return (await self.everywhere("step", divisor=divisor, lr=lr, max_grad_norm=max_grad_norm))[0]
        except (EngineDiedError, DeadlineExceeded):  # the ranks are lost
            raise
        except ArcticError:  # whatever it was, the gradient must not be part of the next step
            await self.zero_grad()
            raise

    async def zero_grad(self) -> None:
        """Drop the accumulated gradient and its count."""
        self._divisor = Divisor()
        await self.everywhere("zero_grad")

    async def weight_plan(self, bucket_bytes: int) -> WeightPlan:
        """The plan of a sync, the same on all ranks."""
        return (await self.everywhere("weight_plan", bucket_bytes))[0]

    async def export_bucket(self, plan: WeightPlan, index: int, carrier: str) -> BucketRef:
        """Publish one bucket; every rank takes part."""
        return (await self.everywhere("export_bucket", plan, index, carrier))[0]

    async def load(self, directory: str, restore: Sequence[RestorePart]) -> int:
        """Restore a checkpoint, dropping any accumulated gradient; returns the step number."""
        await self.zero_grad()  # first, so that a checkpoint some rank refuses leaves none of it on any
        return (await self.everywhere("load", directory, restore))[0]


class SamplerGroup(EngineGroup):
    """Spreads prompts over replicas. The rollouts of one group go to one replica, which then shares their prefix."""

    straggler_grace_s = None

    async def generate(self, jobs: Sequence[SampleJob], groups: Sequence[int]) -> AsyncGenerator[tuple[int, Completion], None]:
        """Yield ``(job index, completion)`` as completions finish.

        Args:
            jobs: What to draw.
            groups: Per job the number of its group; equal numbers share a replica.
        """
        by_replica: list[list[int]] = [[] for _ in self.ranks]
        for index, group in enumerate(groups):
            by_replica[group % len(self.ranks)].append(index)
        queue: asyncio.Queue[tuple[int, Completion] | BaseException | None] = asyncio.Queue()
        pumps = [
            asyncio.ensure_future(_pump(rank, indices, [jobs[i] for i in indices], queue))
            for rank, indices in zip(self.ranks, by_replica, strict=True)
            if indices
        ]
        running = len(pumps)
        try:
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(rank: Rank, indices: list[int], jobs: list[SampleJob], queue: asyncio.Queue[Any]) -> None:
    stream = rank.stream("generate", jobs)
    try:
        async for local, completion in stream:
            queue.put_nowait((indices[local], completion))
        queue.put_nowait(None)
    except asyncio.CancelledError:
        raise
    except Exception as error:  # handed to the consumer, which raises it
        queue.put_nowait(error)
    finally:
        await stream.aclose()


class Divisor:
    """What the gradient accumulated since the last step must be divided by. Immutable; ``with_*`` return successors."""

    def __init__(self, kind: str | None = None, count: float = 0.0) -> None:
        self.kind = kind
        self.count = count

    def with_loss(self, batch: Batch, prepared: PreparedLoss) -> Divisor:
        """Count a batch under a loss's normalization."""
        count = count_divisor(batch, prepared)
        if prepared.normalization == "constant":
            return self._next(f"constant={prepared.constant}", count - self.count)
        return self._next(prepared.normalization, count)

    def with_sum(self) -> Divisor:
        """Note a plain sum, which is divided by nothing."""
        return self._next("sum", 1.0 - self.count)

    def _next(self, kind: str, more: float) -> Divisor:
        if self.kind not in (None, kind):
            raise InvalidStateError(
                f"the gradient accumulated so far is normalised by {self.kind}, this call by {kind}",
                where="trainer",
                remedy="call step() or zero_grad() between them, or use one normalization",
            )
        return Divisor(kind, self.count + more)

    def value(self) -> float:
        """The divisor; 1 where nothing was trained, since the gradient is exactly 0 then."""
        if self.kind is None:
            raise InvalidStateError(
                "there is no accumulated gradient to apply",
                where="trainer",
                remedy="call forward_backward() or backward() first",
            )
        return self.count or 1.0


def _secondary(error: BaseException) -> int:
    """How much an error is a consequence of another rank's: a death explains most, a failed collective least."""
    if isinstance(error, EngineDiedError):
        return 0
    return 2 if type(error) is EngineError else 1


def add_metrics(parts: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
    """Sum metrics by name."""
    total: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name] + metric if name in total else metric
    return total


def _deal(plan: BatchPlan, batch: Batch, values: np.ndarray | None) -> list[list[np.ndarray] | None]:
    """Per rank the ``[R]`` or ``[R, K]`` values of its micro-batches, or ``None`` for each where there are none."""
    if values is None:
        return [None] * len(plan.ranks)
    rows = batch.split(values)
    return [[np.concatenate([values[:0], *(rows[i] for i in indices)]) for indices in rank] for rank in plan.ranks]
