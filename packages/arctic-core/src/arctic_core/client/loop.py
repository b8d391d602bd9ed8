"""An event loop in a thread of its own, for calling coroutines from ordinary code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from arctic_core.errors import InvalidStateError, TransportClosedError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on a background event loop. Usable from any thread, also from one whose own loop is running."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, linger_s: float = 0.0) -> T:
        """Run to the end and return the result.

        An exception that interrupts the wait (Ctrl-C) cancels the work and is raised at once, or after the work has
        ended for up to ``linger_s`` seconds.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidStateError(
                "a synchronous client was called from its own event loop, which would wait for itself",
                remedy="use the asynchronous client inside coroutines",
            )
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                if linger_s:
                    self._settle(linger_s, cancel=False)  # cancelled once; twice would interrupt its cleaning up
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start work and return at once."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise TransportClosedError("the client is closed", remedy="create a new one") from None

    def stop(self, deadline_s: float) -> None:
        """Cancel what runs, stop the loop and end the thread. Idempotent."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._settle(deadline_s, cancel=True)
            with contextlib.suppress(RuntimeError):  # closed between the check and the call
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(deadline_s)

    def _settle(self, deadline_s: float, *, cancel: bool) -> None:
        """Wait until all tasks have ended."""

        async def settle() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks if cancel else ():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=deadline_s)

        with contextlib.suppress(TransportClosedError, TimeoutError):
            self.submit(settle()).result(deadline_s + 1.0)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
