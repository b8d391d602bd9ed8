"""Starting and ending vLLM's processes, leaving none behind."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from arctic_core.backends.base import RankSpec
from arctic_core.backends.vllm_sampler.arguments import engine_arguments, engine_environment
from arctic_core.backends.vllm_sampler.plugin import FAILURES, PROCESSES
from arctic_core.errors import ArcticError, EngineStartError

if TYPE_CHECKING:
    import psutil
    from vllm.v1.engine.async_llm import AsyncLLM

_GRACE_S = 2.0  # for vLLM's own teardown, which holds nothing that the kernel does not free
_REAP_S = 5.0


class EngineProcess:
    """An ``AsyncLLM`` and the processes under it, which note their ids in a folder of ours."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._family: list[psutil.Process] = []
        self.engine: AsyncLLM | None = None
        """The engine, between :meth:`start` and :meth:`stop`."""

    def start(self) -> AsyncLLM:
        """Start the engine.

        Raises:
            ConfigError: A bad key in ``sampling.vllm``.
            EngineStartError: vLLM refused or its processes failed.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="arctic-vllm-")
        folder = self._folder.name
        try:
            self.engine = self._start(folder)
        except ArcticError:
            self.stop(0)
            raise
        except Exception as error:  # vLLM raises whatever its parts raise
            causes = _lines(folder, FAILURES) or [f"{type(error).__name__}: {error}"]
            self.stop(0)
            raise EngineStartError(
                f"vLLM did not start: {causes[0]}",
                where=f"sampler[{self._spec.rank}]",
                remedy="check model_name, max_seq_len, memory and sampling.vllm; VLLM_LOGGING_LEVEL=INFO shows more",
            ) from error
        self._family = _processes(folder)
        return self.engine

    def _start(self, folder: str) -> AsyncLLM:
        # Importing vLLM reads the environment too.
        with engine_environment(self._spec, {}, folder):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        arguments = engine_arguments(self._spec)
        with engine_environment(self._spec, arguments, folder):
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def pids(self) -> list[int]:
        """Process ids under the engine."""
        return [process.pid for process in self._family]

    def alive(self) -> bool:
        """Whether all processes under the engine run. vLLM's own monitor learns of a death by waiting for its child, which
        fails where SIGCHLD is ignored, as it is in Ray's workers."""
        return all(process.is_running() and process.status() != "zombie" for process in self._family)

    def stop(self, deadline_s: float) -> None:
        """End the processes: politely at first, by force before ``deadline_s`` is over. Idempotent; ends a start that hangs."""
        engine, self.engine = self.engine, None
        if engine is not None:
            _stop_reading(engine)
            engine.shutdown(timeout=min(_GRACE_S, deadline_s / 2))
            # Its finaliser calls this again; at interpreter exit, with vLLM's modules gone, that would print a traceback.
            engine.shutdown = lambda timeout=None: None
        folder, self._folder = self._folder, None
        if folder is not None:
            _kill([*self._family, *_processes(folder.name)])
            folder.cleanup()
        self._family = []


def _stop_reading(engine: AsyncLLM) -> None:
    """End vLLM's reader first, which would log the end of the engine as a failure, and fail what waits for it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    handler = engine.output_handler
    if handler is not None and not handler.get_loop().is_closed():
        handler.get_loop().call_soon_threadsafe(handler.cancel)
        handler.get_loop().call_soon_threadsafe(engine.output_processor.propagate_error, EngineDeadError())


def _lines(folder: str, name: str) -> list[str]:
    path = Path(folder) / name
    return path.read_text().splitlines() if path.exists() else []


def _processes(folder: str) -> list[psutil.Process]:
    import psutil

    found = []
    for line in _lines(folder, PROCESSES):
        pid, created = line.split()
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):  # else the id was given to another process since
                found.append(process)
    return found


def _kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL what still runs, and wait until it is gone (psutil does not mistake a reused id for the old process)."""
    import psutil

    left = list(processes)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_REAP_S)
