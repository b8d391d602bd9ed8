"""What a run tells whoever watches it, and how it measures time and memory. Watching changes nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from arctic_core.protocol import Info
from arctic_core.rl.report import RunFolder, StepRecord, Summary


class Observer(Protocol):
    """Follows a run, on the run's own thread; whatever a method raises ends the run."""

    def preparing(self, what: str) -> None:
        """Something that takes a while begins before the first step."""

    def started(self, info: Info, folder: RunFolder, completed: int, total: int) -> None:
        """Engines are up; ``completed`` of ``total`` steps are done already."""

    def phase(self, step: int, name: str) -> None:
        """Phase ``name`` of step ``step`` (from 1) begins."""

    def stepped(self, record: StepRecord) -> None:
        """A step is complete and written."""

    def saved(self, path: Path) -> None:
        """A checkpoint or model was written."""

    def ended(self, summary: Summary, folder: RunFolder) -> None:
        """The run ended; its files are complete."""


class Silent:
    """An observer that looks away."""

    def preparing(self, what: str) -> None: ...

    def started(self, info: Info, folder: RunFolder, completed: int, total: int) -> None: ...

    def phase(self, step: int, name: str) -> None: ...

    def stepped(self, record: StepRecord) -> None: ...

    def saved(self, path: Path) -> None: ...

    def ended(self, summary: Summary, folder: RunFolder) -> None: ...


class PhaseClock:
    """Seconds per phase of one step."""

    def __init__(self, observer: Observer, step: int) -> None:
        self._observer = observer
        self._step = step
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase; several turns of one phase add up."""
        self._observer.phase(self._step, name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """``seconds/<phase>`` and ``seconds/total``."""
        return {
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
            "seconds/total": time.perf_counter() - self._start,
        }


def memory_metrics(info: Info) -> dict[str, float]:
    """Bytes per engine as it reports them, and of this process with all its descendants (engines over Ray included).

    ``memory/total_bytes`` counts a page shared by several processes once (proportional set size, where the system tells).
    """
    metrics = {f"memory/{engine.name}_bytes": float(engine.memory_bytes) for engine in info.engines}
    return {**metrics, "memory/total_bytes": float(process_tree_bytes())}


def process_tree_bytes() -> int:
    """Memory of this process and all its descendants; 0 where psutil is not installed."""
    try:
        import psutil
    except ModuleNotFoundError:
        return 0
    root = psutil.Process(os.getpid())
    total = 0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # ended, or not ours to look into
            details = process.memory_full_info()
            total += getattr(details, "pss", None) or details.rss
    return total
