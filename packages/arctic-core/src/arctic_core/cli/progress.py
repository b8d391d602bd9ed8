"""What ``arctic train`` shows: a live line on a terminal, plain lines elsewhere, tables at the start and the end."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from arctic_core.cli import console
from arctic_core.protocol import Info
from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.report import RunFolder, StepRecord, Summary

_PREPARATIONS = {
    "model": "Preparing the model",
    "engines": "Starting the engines",
    "checkpoint": "Loading the checkpoint",
    "export": "Writing the trained model",
}


class TrainView:
    """An :class:`~arctic_core.rl.observe.Observer` for people. Use as a context manager."""

    def __init__(self, job: TrainJobConfig) -> None:
        self._job = job
        self._live = console.out.is_terminal
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console.out,
            transient=True,
        )
        self._task = self._progress.add_task("Preparing", total=None, figures="")
        self._began_steps = time.monotonic()
        self._first = self._total = 0

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def preparing(self, what: str) -> None:
        """Name what is waited for."""
        text = _PREPARATIONS.get(what, what)
        if self._live:
            self._progress.update(self._task, description=text, total=None)
        else:
            console.out.print(f"{text} …")

    def started(self, info: Info, folder: RunFolder, completed: int, total: int) -> None:
        """Say what runs where."""
        console.out.print(_engine_table(info, self._job.model))
        console.out.print(f"Files: [bold]{folder.path}[/]" + (f", resumed after step {completed}" if completed else ""), "\n")
        self._began_steps, self._first, self._total = time.monotonic(), completed, total
        self._progress.update(self._task, total=total, completed=completed, description=f"step {completed + 1}")

    def phase(self, step: int, name: str) -> None:
        """Move the live line to the phase."""
        self._progress.update(self._task, description=f"step {step} {name:<9}")

    def stepped(self, record: StepRecord) -> None:
        """Add a line for the step."""
        remaining = self._total - record.step
        pace = (time.monotonic() - self._began_steps) / (record.step - self._first)
        figures = (
            f"reward {record.metrics['reward/mean']:.3f}  {record.metrics['tokens/per_second']:.0f} tok/s"
            f"  ETA {console.duration(remaining * pace)}"
        )
        self._progress.update(self._task, completed=record.step, figures=figures)
        if record.step == self._first + 1:
            console.out.print(_HEADER, style="dim", highlight=False)
        line = _step_line(record, self._total, None if self._live else remaining * pace)
        console.out.print(line, highlight=False, soft_wrap=True)

    def saved(self, path: Path) -> None:
        """Mention the file."""
        console.out.print(f"saved {path}", style="dim", highlight=False, soft_wrap=True)

    def ended(self, summary: Summary, folder: RunFolder) -> None:
        """Sum the run up."""
        self._progress.stop()
        console.out.print()
        console.out.print(_summary_table(summary, folder))


_HEADER = " step   reward  solved   length  entropy  grad norm  mismatch    tok/s   seconds"


def _step_line(record: StepRecord, total: int, eta: float | None) -> str:
    m = record.metrics
    line = (
        f"{record.step:>5}  {m['reward/mean']:>7.3f}  {m['reward/accuracy']:>6.0%}  {m['length/mean']:>7.1f}"
        f"  {m['policy/entropy']:>7.3f}  {m['optim/grad_norm']:>9.3f}  {m['mismatch/max_abs_diff']:>8.1e}"
        f"  {m['tokens/per_second']:>7.0f}  {m['seconds/total']:>8.1f}"
    )
    return line if eta is None else f"{line}   of {total}, ETA {console.duration(eta)}"


def _engine_table(info: Info, title: str) -> Table:
    made = console.table("engine", "implementation", "device", "type", "rank", "share", "node", "pid", title=title)
    engines = {engine.name: engine for engine in info.engines}
    for place in info.placement:
        engine = engines[place.engine]
        made.add_row(
            place.engine,
            engine.implementation,
            place.device,
            engine.dtype,
            f"{place.rank + 1} of {engine.ranks}",
            f"{place.share:g}",
            place.node,
            str(place.pid),
        )
    return made


def _summary_table(summary: Summary, folder: RunFolder) -> Table:
    made = Table(
        show_header=False, box=None, pad_edge=False, title=f"Run {summary.status}", title_justify="left", title_style="bold"
    )
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    rows: list[tuple[str, str | None]] = [
        ("steps", str(summary.steps)),
        ("reward", _change(summary)),
        ("time", console.duration(summary.seconds)),
        ("time of a step", _seconds(summary.seconds_per_step)),
        ("first step after", _seconds(summary.seconds_to_first_step)),
        ("peak memory", console.size(summary.peak_memory_bytes) if summary.peak_memory_bytes else None),
        (
            "largest mismatch",
            None if summary.max_mismatch is None else f"{summary.max_mismatch:.1e} nats, sampler against trainer",
        ),
    ]
    files = (folder.metrics, folder.samples, folder.plot, folder.summary, folder.checkpoints, folder.model)
    rows += [(path.stem, str(path) if path.exists() else None) for path in files]
    for name, value in rows:
        if value is not None:
            made.add_row(name, value)
    return made


def _change(summary: Summary) -> str | None:
    if summary.reward_first is None or summary.reward_last is None:
        return None
    return f"{summary.reward_first:.3f} at first → {summary.reward_last:.3f} at last"


def _seconds(value: float | None) -> str | None:
    return None if value is None else console.duration(value)
