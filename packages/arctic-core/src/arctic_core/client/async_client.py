"""The asynchronous client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from arctic_core import protocol as p
from arctic_core.client import operations as ops
from arctic_core.client.core import ClientCore
from arctic_core.client.operations import BatchLike
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.data import Group
from arctic_core.losses.named import LossLike
from arctic_core.transports.base import Transport

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class AsyncArcticRLClient:
    """A job's engines behind coroutines. Get one from :func:`create_async_arctic_rl_client`; use it in ``async with``.

    Every method raises what the service answered as its own type (:mod:`arctic_core.errors`), ``DataError`` for arguments
    that cannot be right, ``DeadlineExceeded`` after ``config.deadlines.request`` seconds, and ``TransportClosedError`` once
    the client is closed. Cancelling a coroutine cancels reads and generations in the engines; a write that has begun runs
    to its end. :class:`ArcticRLClient` is the same without ``async``.
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @property
    def config(self) -> ArcticRLClientConfig:
        """The configuration the client was created with."""
        return self._core.config

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` or :meth:`shutdown` was called."""
        return self._core.closed

    async def info(self) -> p.Info:
        """What runs where: engines, states, devices, package versions, capabilities, policy version."""
        return await self._core.call(p.GetInfo(), p.Info)

    # --- sampling ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Iterable[ArrayLike],
        sampling: p.SamplingParams | None = None,
        *,
        n: int = 1,
        group: Sequence[Group] | None = None,
        request_id: str | None = None,
    ) -> list[list[p.Completion]]:
        """Sample ``n`` completions per prompt.

        Args:
            prompts: Token ids per prompt: lists of ints or 1-D integer arrays.
            sampling: How to sample; the defaults of :class:`SamplingParams` where absent.
            n: Completions per prompt, at least 1.
            group: Group id per prompt; rollouts of one group are routed to the replica that holds their prefix.
            request_id: Handle for :meth:`abort`; made up where absent.

        Returns:
            Per prompt, in the order given, its ``n`` completions.
        """
        request_id = self._core.next_request_id() if request_id is None else request_id
        operation = ops.generate(prompts, sampling, n=n, group=group, request_id=request_id)
        generated = await self._core.call(operation, p.Generated)
        return [list(completions) for completions in generated.completions]

    def generate_stream(
        self,
        prompts: Iterable[ArrayLike],
        sampling: p.SamplingParams | None = None,
        *,
        n: int = 1,
        group: Sequence[Group] | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[p.CompletionReady]:
        """Like :meth:`generate`, yielding completions as they finish. Closing the iterator aborts the rest."""
        request_id = self._core.next_request_id() if request_id is None else request_id
        return self._core.stream(ops.generate(prompts, sampling, n=n, group=group, request_id=request_id))

    async def reset_prefix_cache(self) -> None:
        """Forget cached prompt prefixes of the sampler."""
        await self._core.call(p.ResetPrefixCache(), p.Done)

    async def pause(self, mode: p.PauseMode = "drain") -> None:
        """Hold generation: ``drain`` lets running requests end, ``keep`` freezes them, ``abort`` ends them now."""
        await self._core.call(ops.pause(mode), p.Done)

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._core.call(p.Resume(), p.Done)

    async def abort(self, request_ids: Iterable[str] = ()) -> None:
        """End generations early, all of them where no id is given; they return with ``finish_reason="abort"``."""
        await self._core.call(ops.abort(request_ids), p.Done)

    # --- scoring and training ---------------------------------------------------------------------------------------

    async def forward(
        self,
        batch: BatchLike,
        *,
        model: p.ModelName = "policy",
        entropy: bool = False,
        temperature: float | None = None,
        topk: int = 0,
        given_topk: bool = False,
    ) -> p.Scores:
        """Log-probs (nats) of the batch's response tokens, float32 ``[R]`` in the batch's order.

        Args:
            batch: A :class:`Batch`, or its samples.
            model: ``"policy"`` scores with the trainer's weights, ``"reference"`` with the reference model's.
            entropy: Also return the entropy (nats) of the distribution at each response token.
            temperature: Used for all samples instead of their own.
            topk: Also return this many of the most likely tokens at each response token, with their log-probs, most likely
                first: what a teacher is asked for.
            given_topk: Also return the log-probs of the batch's own ``topk_ids``; not together with ``topk``.
        """
        operation = ops.forward(batch, model=model, entropy=entropy, temperature=temperature, topk=topk, given_topk=given_topk)
        return await self._core.call(operation, p.Scores)

    async def forward_backward(self, batch: BatchLike, loss: LossLike, *, temperature: float | None = None) -> p.Gradients:
        """Accumulate the gradient of a named loss, as a sum that :meth:`step` divides once; returns metrics.

        Args:
            batch: A :class:`Batch` with the fields the loss needs, or its samples.
            loss: A :class:`NamedLoss`, the options of a loss (e.g. :class:`GRPOLossConfig`) to be normalised as that loss
                is by default, or the name of a loss to be used with its defaults.
            temperature: Used for all samples instead of their own.
        """
        operation = ops.forward_backward(batch, loss, temperature=temperature)
        return await self._core.call(operation, p.Gradients)

    async def backward(
        self,
        batch: BatchLike,
        grad_logprobs: ArrayLike,
        grad_entropy: ArrayLike | None = None,
        *,
        grad_topk_logprobs: ArrayLike | None = None,
        temperature: float | None = None,
    ) -> None:
        """Accumulate the gradient of ``Σ w·logprob + Σ v·entropy + Σ u·topk_logprob``: the way to use a loss of your own.

        It is a plain sum: :meth:`step` divides it by nothing. Give the derivatives of a loss that is normalised already, e.g.
        by :func:`arctic_core.losses.evaluate.evaluate_loss`.

        Args:
            batch: A :class:`Batch`, or its samples.
            grad_logprobs: ``w``, the loss's derivative with respect to each response token's log-prob, ``[R]``.
            grad_entropy: ``v``, the same with respect to its entropy, ``[R]``.
            grad_topk_logprobs: ``u``, the same with respect to the log-probs of the batch's ``topk_ids``, ``[R, K]``.
            temperature: Used for all samples instead of their own.
        """
        operation = ops.backward(
            batch, grad_logprobs, grad_entropy, grad_topk_logprobs=grad_topk_logprobs, temperature=temperature
        )
        await self._core.call(operation, p.Done)

    async def step(self, *, lr: float | None = None, max_grad_norm: float | None = None) -> p.Stepped:
        """Normalise and clip the accumulated gradient, update the weights, and begin a new policy version.

        Args:
            lr: Learning rate of this step instead of the schedule's.
            max_grad_norm: Clipping norm of this step instead of the configured one; 0 does not clip.
        """
        return await self._core.call(ops.step(lr=lr, max_grad_norm=max_grad_norm), p.Stepped)

    async def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        await self._core.call(p.ZeroGrad(), p.Done)

    # --- weights and memory -----------------------------------------------------------------------------------------

    async def sync_weights(self, *, probe: Iterable[ArrayLike] = (), force: bool = False) -> p.SyncReport:
        """Bring the sampler to the trainer's policy version.

        Args:
            probe: Token id sequences (two tokens or more) that both sides score afterwards; they must agree.
            force: Send the weights although the sampler already has this version.
        """
        return await self._core.call(ops.sync_weights(probe=probe, force=force), p.SyncReport)

    async def sleep(self, engine: p.EngineName, level: int = 1) -> None:
        """Free an engine's memory. Level 1 keeps the weights (moved off the device), level 2 drops them."""
        await self._core.call(ops.sleep(engine, level), p.Done)

    async def wake(self, engine: p.EngineName) -> None:
        """Undo :meth:`sleep`. A sampler that lost its weights must be synced before it generates."""
        await self._core.call(ops.wake(engine), p.Done)

    # --- files ------------------------------------------------------------------------------------------------------

    async def save_checkpoint(
        self, path: str | os.PathLike[str], *, keep_last: int | None = None, extra: Mapping[str, str] | None = None
    ) -> p.CheckpointRef:
        """Write ``<path>/step-<n>`` atomically, on the trainer's machine, and point ``<path>/latest`` at it.

        Args:
            path: Folder of checkpoints; made where absent.
            keep_last: Then delete all but this many of the newest checkpoints in it.
            extra: Strings kept in the manifest and given back by :meth:`load_checkpoint`.
        """
        return await self._core.call(ops.save_checkpoint(path, keep_last=keep_last, extra=extra), p.CheckpointRef)

    async def load_checkpoint(
        self, path: str | os.PathLike[str], *, restore: Iterable[p.RestorePart] = p.RESTORE_ALL
    ) -> p.CheckpointRef:
        """Restore the named parts from a checkpoint, or from the latest of a folder of them."""
        return await self._core.call(ops.load_checkpoint(path, restore=restore), p.CheckpointRef)

    async def export_hf(self, path: str | os.PathLike[str]) -> p.ExportRef:
        """Write weights, config and tokenizer as a Hugging Face folder on the trainer's machine."""
        return await self._core.call(ops.export_hf(path), p.ExportRef)

    # --- life -------------------------------------------------------------------------------------------------------

    def reconnect_config(self) -> ArcticRLClientConfig:
        """The configuration with which another process gets a client of this job.

        Raises:
            UnsupportedOperation: The job lives and dies with this process.
        """
        return self._core.reconnect_config()

    async def close(self) -> None:
        """End what is in flight; stop the engines this client started, leave those it connected to. Idempotent."""
        await self._core.close(shutdown=False)

    async def shutdown(self) -> None:
        """Like :meth:`close`, and stop the engines even where this client only connected to them."""
        await self._core.close(shutdown=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def make_transport(config: ArcticRLClientConfig) -> Transport:
    """The transport a configuration asks for; nothing is started."""
    if config.comm_protocol == "ray":
        from arctic_core.transports.ray import RayTransport

        return RayTransport(config)
    if config.comm_protocol == "http":
        from arctic_core.transports.http import HttpTransport

        return HttpTransport(config)
    from arctic_core.transports.local import LocalTransport

    return LocalTransport(config)


async def create_async_arctic_rl_client(
    config: ArcticRLClientConfig, *, transport: Transport | None = None
) -> AsyncArcticRLClient:
    """Start the job's engines, or connect to those that run, and return a client of theirs.

    Args:
        config: The job.
        transport: Used instead of the one that ``config.comm_protocol`` names, e.g. a :class:`MockTransport`.

    Raises:
        ArcticError: The job did not start; nothing of it is left running.
    """
    core = ClientCore(config, make_transport(config) if transport is None else transport)
    await core.open()
    return AsyncArcticRLClient(core)
