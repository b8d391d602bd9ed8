"""Runs in every vLLM process, through the entry-point group ``vllm.general_plugins``, before a model is loaded.

It does three small things and imports nothing that vLLM does not import anyway:

- on CPUs with AMX it asks the kernel for the tile registers, without which bfloat16 kernels die with SIGILL;
- in a process that Arctic's sampler started it notes the process's id where the sampler finds it, and watches the parent, so
  that a killed parent leaves no engine behind;
- there it also writes the causes of failures to a file, since vLLM tells its parent only that "the engine core failed".
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import psutil

PARENT_VARIABLE = "ARCTIC_VLLM_PARENT"
"""Process id of the sampler that starts the engine."""
FOLDER_VARIABLE = "ARCTIC_VLLM_FOLDER"
"""The sampler's folder for :data:`PROCESSES` and :data:`FAILURES`."""
PROCESSES = "processes"
"""One line per process of the engine: its id and the time of its creation."""
FAILURES = "failures"
"""One line per exception that vLLM logged."""
_POLL_S = 1.0


_registered = threading.Event()


def register() -> None:
    """Entry point. May run several times in one process."""
    _enable_amx()
    parent = int(os.environ.get(PARENT_VARIABLE, os.getpid()))
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    if parent == os.getpid() or not folder.is_dir() or _registered.is_set():
        return
    _registered.set()
    with (folder / PROCESSES).open("a") as file:
        file.write(f"{os.getpid()} {psutil.Process().create_time()}\n")
    if os.getppid() == parent:  # a worker's parent is the engine core, which watches it by itself
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True, name="arctic-parent-watch").start()
    elif not psutil.pid_exists(parent):  # it died while this process was importing
        os.kill(os.getpid(), signal.SIGKILL)
    logging.getLogger("vllm").addHandler(_FailureFile(folder / FAILURES))


def _enable_amx() -> None:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _FailureFile(logging.Handler):
    """Appends ``Type: message`` of every exception that vLLM logs."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and self._path.parent.is_dir():
            error = record.exc_info[1]
            line = " ".join(f"{type(error).__name__}: {error}".split())
            with self._path.open("a") as file:
                file.write(line + "\n")
