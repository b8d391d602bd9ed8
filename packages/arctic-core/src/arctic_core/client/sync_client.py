"""The synchronous client: the asynchronous one on an event loop in a thread of its own."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its own end of the process, which must come after ours
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from arctic_core import protocol as p
from arctic_core.client.async_client import AsyncArcticRLClient, create_async_arctic_rl_client
from arctic_core.client.loop import LoopThread
from arctic_core.client.operations import BatchLike
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.data import Group
from arctic_core.errors import ArcticError, TransportClosedError
from arctic_core.losses.named import LossLike
from arctic_core.transports.base import Transport

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

_open_clients: set[ArcticRLClient] = set()


class ArcticRLClient:
    """A job's engines behind ordinary methods. Get one from :func:`create_arctic_rl_client`; use it in ``with``.

    May be used from any thread and inside a running event loop (which it blocks meanwhile). Ctrl-C during a call cancels
    the operation and raises ``KeyboardInterrupt`` at once. Errors are those of :class:`AsyncArcticRLClient`, where every
    method is described in full.
    """

    def __init__(self, twin: AsyncArcticRLClient, loop: LoopThread) -> None:
        self._twin = twin
        self._loop = loop
        _open_clients.add(self)

    @property
    def config(self) -> ArcticRLClientConfig:
        """The configuration the client was created with."""
        return self._twin.config

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` or :meth:`shutdown` was called."""
        return self._twin.closed

    def info(self) -> p.Info:
        """What runs where: engines, states, devices, package versions, capabilities, policy version."""
        return self._loop.run(self._twin.info())

    # --- sampling ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Iterable[ArrayLike],
        sampling: p.SamplingParams | None = None,
        *,
        n: int = 1,
        group: Sequence[Group] | None = None,
        request_id: str | None = None,
    ) -> list[list[p.Completion]]:
        """Sample ``n`` completions per prompt; see :meth:`AsyncArcticRLClient.generate`."""
        return self._loop.run(self._twin.generate(prompts, sampling, n=n, group=group, request_id=request_id))

    def generate_stream(
        self,
        prompts: Iterable[ArrayLike],
        sampling: p.SamplingParams | None = None,
        *,
        n: int = 1,
        group: Sequence[Group] | None = None,
        request_id: str | None = None,
    ) -> Iterator[p.CompletionReady]:
        """Like :meth:`generate`, yielding completions as they finish. Closing the iterator aborts the rest."""
        return self._drain(self._twin.generate_stream(prompts, sampling, n=n, group=group, request_id=request_id))

    def reset_prefix_cache(self) -> None:
        """Forget cached prompt prefixes of the sampler."""
        self._loop.run(self._twin.reset_prefix_cache())

    def pause(self, mode: p.PauseMode = "drain") -> None:
        """Hold generation: ``drain`` lets running requests end, ``keep`` freezes them, ``abort`` ends them now."""
        self._loop.run(self._twin.pause(mode))

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._loop.run(self._twin.resume())

    def abort(self, request_ids: Iterable[str] = ()) -> None:
        """End generations early, all of them where no id is given; they return with ``finish_reason="abort"``."""
        self._loop.run(self._twin.abort(request_ids))

    # --- scoring and training ---------------------------------------------------------------------------------------

    def forward(
        self,
        batch: BatchLike,
        *,
        model: p.ModelName = "policy",
        entropy: bool = False,
        temperature: float | None = None,
        topk: int = 0,
        given_topk: bool = False,
    ) -> p.Scores:
        """Log-probs (nats) of the batch's response tokens; see :meth:`AsyncArcticRLClient.forward`."""
        return self._loop.run(
            self._twin.forward(batch, model=model, entropy=entropy, temperature=temperature, topk=topk, given_topk=given_topk)
        )

    def forward_backward(self, batch: BatchLike, loss: LossLike, *, temperature: float | None = None) -> p.Gradients:
        """Accumulate the gradient of a named loss; see :meth:`AsyncArcticRLClient.forward_backward`."""
        return self._loop.run(self._twin.forward_backward(batch, loss, temperature=temperature))

    def backward(
        self,
        batch: BatchLike,
        grad_logprobs: ArrayLike,
        grad_entropy: ArrayLike | None = None,
        *,
        grad_topk_logprobs: ArrayLike | None = None,
        temperature: float | None = None,
    ) -> None:
        """Accumulate the gradient of a loss of your own; see :meth:`AsyncArcticRLClient.backward`."""
        self._loop.run(
            self._twin.backward(
                batch, grad_logprobs, grad_entropy, grad_topk_logprobs=grad_topk_logprobs, temperature=temperature
            )
        )

    def step(self, *, lr: float | None = None, max_grad_norm: float | None = None) -> p.Stepped:
        """Apply the accumulated gradient; see :meth:`AsyncArcticRLClient.step`."""
        return self._loop.run(self._twin.step(lr=lr, max_grad_norm=max_grad_norm))

    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        self._loop.run(self._twin.zero_grad())

    # --- weights and memory -----------------------------------------------------------------------------------------

    def sync_weights(self, *, probe: Iterable[ArrayLike] = (), force: bool = False) -> p.SyncReport:
        """Bring the sampler to the trainer's policy version; see :meth:`AsyncArcticRLClient.sync_weights`."""
        return self._loop.run(self._twin.sync_weights(probe=probe, force=force))

    def sleep(self, engine: p.EngineName, level: int = 1) -> None:
        """Free an engine's memory. Level 1 keeps the weights (moved off the device), level 2 drops them."""
        self._loop.run(self._twin.sleep(engine, level))

    def wake(self, engine: p.EngineName) -> None:
        """Undo :meth:`sleep`. A sampler that lost its weights must be synced before it generates."""
        self._loop.run(self._twin.wake(engine))

    # --- files ------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: str | os.PathLike[str], *, keep_last: int | None = None, extra: Mapping[str, str] | None = None
    ) -> p.CheckpointRef:
        """Write ``<path>/step-<n>`` atomically; see :meth:`AsyncArcticRLClient.save_checkpoint`."""
        return self._loop.run(self._twin.save_checkpoint(path, keep_last=keep_last, extra=extra))

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, restore: Iterable[p.RestorePart] = p.RESTORE_ALL
    ) -> p.CheckpointRef:
        """Restore the named parts from a checkpoint, or from the latest of a folder of them."""
        return self._loop.run(self._twin.load_checkpoint(path, restore=restore))

    def export_hf(self, path: str | os.PathLike[str]) -> p.ExportRef:
        """Write weights, config and tokenizer as a Hugging Face folder on the trainer's machine."""
        return self._loop.run(self._twin.export_hf(path))

    # --- life -------------------------------------------------------------------------------------------------------

    def reconnect_config(self) -> ArcticRLClientConfig:
        """The configuration with which another process gets a client of this job.

        Raises:
            UnsupportedOperation: The job lives and dies with this process.
        """
        return self._twin.reconnect_config()

    def close(self) -> None:
        """End what is in flight; stop the engines this client started, leave those it connected to. Idempotent."""
        self._finish(shutdown=False)

    def shutdown(self) -> None:
        """Like :meth:`close`, and stop the engines even where this client only connected to them."""
        self._finish(shutdown=True)

    def _finish(self, *, shutdown: bool) -> None:
        if self not in _open_clients:
            return
        deadline_s = self.config.deadlines.stop
        try:
            self._loop.run(self._twin.shutdown() if shutdown else self._twin.close(), linger_s=deadline_s)
        finally:
            _open_clients.discard(self)
            self._loop.stop(deadline_s)

    def _drain(self, items: AsyncIterator[p.CompletionReady]) -> Iterator[p.CompletionReady]:
        iterator = aiter(items)
        try:
            while (item := self._loop.run(_next(iterator))) is not None:
                yield item
        finally:
            # Not waited for: the collector may run this, on any thread.
            with contextlib.suppress(TransportClosedError):
                self._loop.submit(iterator.aclose())  # type: ignore[attr-defined] - it is a generator

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def create_arctic_rl_client(config: ArcticRLClientConfig, *, transport: Transport | None = None) -> ArcticRLClient:
    """Start the job's engines, or connect to those that run, and return a client of theirs.

    Args:
        config: The job.
        transport: Used instead of the one that ``config.comm_protocol`` names, e.g. a :class:`MockTransport`.

    Raises:
        ArcticError: The job did not start; nothing of it is left running.
    """
    loop = LoopThread(f"arctic-{config.job}")
    try:
        twin = loop.run(create_async_arctic_rl_client(config, transport=transport), linger_s=config.deadlines.stop)
    except BaseException:
        loop.stop(config.deadlines.stop)
        raise
    return ArcticRLClient(twin, loop)


async def _next(iterator: AsyncIterator[p.CompletionReady]) -> p.CompletionReady | None:
    return await anext(iterator, None)


def _close_all() -> None:
    for client in list(_open_clients):
        try:
            client.close()
        except ArcticError as error:
            logger.warning("closing at exit: %s", error)


# These run last in, first out: ours before thread pools, which stopping an engine needs, refuse work. `atexit` is too late.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
