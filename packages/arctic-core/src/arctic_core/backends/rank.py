"""A handle on one engine rank, wherever it runs.

:class:`LocalRank` holds the engine in this process: synchronous engines work on a thread of their own, samplers on the
event loop. Over Ray the same :class:`LocalRank` lives inside the actor (:mod:`arctic_core.service.ray_launch`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from arctic_core import tracing
from arctic_core.backends.base import Engine, EngineReport
from arctic_core.errors import ArcticError, DeadlineExceeded, EngineError, EngineStartError


class Rank(abc.ABC):
    """One engine rank. Every failure is an :class:`ArcticError`; every wait ends at its deadline."""

    def __init__(self, label: str) -> None:
        self.label = label
        """``"trainer[0]"``, for error messages."""

    @abc.abstractmethod
    async def call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Call an engine method and wait for its answer.

        Raises:
            DeadlineExceeded: No answer in time; a synchronous engine goes on working, so treat the rank as lost.
            EngineDiedError: Its process is gone.
        """

    @abc.abstractmethod
    def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Iterate over an engine method that is an asynchronous generator; closing the iterator stops it."""

    @abc.abstractmethod
    async def report(self, deadline_s: float) -> EngineReport:
        """The engine's report, answered even while it works."""

    @abc.abstractmethod
    async def stop(self, deadline_s: float) -> None:
        """Stop the engine; kill what does not stop in time. Idempotent, never raises an engine's own error."""


class LocalRank(Rank):
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(f"{engine.spec.engine}[{engine.spec.rank}]")
        self.engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.label)
        self._stopped = False
        self._starting: asyncio.Future[Any] | None = None

    async def call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        name, attributes = self._span(method)
        with tracing.span(name, attributes=attributes, child=True):
            return await self._call(method, *args, deadline_s=deadline_s, **kwargs)

    def _span(self, method: str) -> tuple[str, tracing.Attributes]:
        return f"{self.engine.spec.engine} {method}", {"arctic.engine": self.engine.spec.engine, "arctic.rank": self.label}

    async def _call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        bound = getattr(self.engine, method)
        try:
            if inspect.iscoroutinefunction(bound):
                return await asyncio.wait_for(bound(*args, **kwargs), deadline_s)
            work = asyncio.get_running_loop().run_in_executor(self._thread, lambda: bound(*args, **kwargs))
            if method == "start":
                self._starting = work
            return await asyncio.wait_for(asyncio.shield(work), deadline_s)
        except ArcticError as error:
            error.where = error.where or self.label
            raise
        except TimeoutError:
            raise late(self.label, method, deadline_s) from None
        except Exception as error:  # an engine's libraries may raise anything; it crosses as a typed error
            raise self._typed(error, method) from error

    def stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        name, attributes = self._span(method)
        return tracing.spanned(name, self._stream(method, *args), attributes, child=True)

    async def _stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        try:
            async with contextlib.aclosing(getattr(self.engine, method)(*args)) as items:
                async for item in items:
                    yield item
        except ArcticError as error:
            error.where = error.where or self.label
            raise
        except Exception as error:  # as in call
            raise self._typed(error, method) from error

    async def report(self, deadline_s: float) -> EngineReport:
        try:
            return await asyncio.wait_for(asyncio.to_thread(self.engine.report), deadline_s)
        except TimeoutError:
            raise late(self.label, "report", deadline_s) from None

    def _typed(self, error: Exception, method: str) -> EngineError:
        kind = EngineStartError if method == "start" else EngineError
        return kind(f"{method} failed: {type(error).__name__}: {error}", where=self.label)

    async def stop(self, deadline_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            await asyncio.wait_for(asyncio.to_thread(self.engine.stop), deadline_s)
        except TimeoutError:
            raise late(self.label, "stop", deadline_s) from None
        finally:
            unfinished = self._starting is not None and not self._starting.done()
            if unfinished:  # what goes on starting may still make what must be stopped
                self._thread.submit(self.engine.stop)
            self._thread.shutdown(wait=False, cancel_futures=not unfinished)


def late(label: str, method: str, deadline_s: float) -> DeadlineExceeded:
    """The error of a call that did not answer in time."""
    return DeadlineExceeded(
        f"{method} did not finish within {deadline_s:g} s",
        where=label,
        remedy="raise the matching value of `deadlines`, or look at the engine's log for what it waits on",
    )
