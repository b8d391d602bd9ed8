"""A picture of a run: reward, KL and mismatch, lengths, and where the time of a step goes. Imports matplotlib when called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arctic_core.errors import MissingExtraError
from arctic_core.rl.report import StepRecord

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _ORANGE, _GREEN, _RED = "#2563eb", "#ea7a17", "#15935f", "#c2304a"
PHASES = {
    "generate": "#2563eb",
    "reward": "#93b4f5",
    "score": "#15935f",
    "reference": "#8fd0b0",
    "train": "#ea7a17",
    "sync": "#a855c7",
    "checkpoint": "#9aa5b1",
}
"""Phases of a step in the order they run, with their colours."""


def plot_run(records: Sequence[StepRecord], path: str | Path, title: str) -> None:
    """Draw a run as a PNG with four panels.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError("the plot needs the package 'matplotlib'", remedy='pip install "arctic-core[cli]"') from error
    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # no pyplot: nothing global, no display
    axes = figure.subplots(2, 2)
    figure.suptitle(title, color=_INK, fontsize=13, fontweight="bold", x=0.012, ha="left")
    _rewards(axes[0][0], records)
    _divergences(axes[0][1], records)
    _lengths(axes[1][0], records)
    _times(axes[1][1], records)
    figure.savefig(str(path))


def _rewards(axis: Any, records: Sequence[StepRecord]) -> None:
    steps, mean, std = _steps(records), _series(records, "reward/mean"), _series(records, "reward/std")
    least, most = _series(records, "reward/min"), _series(records, "reward/max")
    low = [max(m - s, bound) for m, s, bound in zip(mean, std, least, strict=True)]
    high = [min(m + s, bound) for m, s, bound in zip(mean, std, most, strict=True)]
    axis.fill_between(steps, low, high, color=_BLUE, alpha=0.10, linewidth=0, label="one std of responses")
    axis.plot(steps, mean, color=_BLUE, alpha=0.45, linewidth=1, marker="o", markersize=3, label="mean of the step")
    axis.plot(steps, _smooth(mean), color=_BLUE, linewidth=2.2, label="mean of 5 steps")
    solved = _series(records, "reward/accuracy")
    if solved != mean:
        axis.plot(steps, solved, color=_ORANGE, linewidth=1.2, linestyle="--", label="share solved")
    _finish(axis, "Reward", "")
    axis.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="lower right")


def _divergences(axis: Any, records: Sequence[StepRecord]) -> None:
    steps = _steps(records)
    curves = (
        ("kl/reference", _RED, "KL to the initial model"),
        ("mismatch/kl_k3", _GREEN, "KL, sampler against trainer"),
        ("mismatch/max_abs_diff", _MUTED, "largest |Δ log-prob|, sampler against trainer"),
    )
    for name, colour, label in curves:
        values = [value if value > 0 else math.nan for value in _series(records, name)]  # the axis is logarithmic
        if any(math.isfinite(value) for value in values):
            axis.plot(steps, values, color=colour, linewidth=1.6, marker="o", markersize=2.5, label=label)
            axis.set_yscale("log")
    _finish(axis, "KL and mismatch", "nats")
    if axis.lines:
        axis.legend(frameon=False, fontsize=8, labelcolor=_INK)


def _lengths(axis: Any, records: Sequence[StepRecord]) -> None:
    steps, low, high = _steps(records), _series(records, "length/min"), _series(records, "length/max")
    axis.fill_between(steps, low, high, color=_GREEN, alpha=0.12, linewidth=0, label="min to max")
    axis.plot(steps, _series(records, "length/mean"), color=_GREEN, linewidth=2, marker="o", markersize=3, label="mean")
    _finish(axis, "Response length", "tokens")
    axis.set_ylim(0, 1.25 * max(1.0, *(value for value in high if math.isfinite(value))))  # room for the legend
    axis.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="upper right")


def _times(axis: Any, records: Sequence[StepRecord]) -> None:
    steps = _steps(records)
    bottom = [0.0] * len(steps)
    for phase, colour in PHASES.items():
        seconds = [0.0 if math.isnan(value) else value for value in _series(records, f"seconds/{phase}")]
        if any(seconds):
            axis.bar(steps, seconds, bottom=bottom, color=colour, width=0.8, label=phase)
            bottom = [a + b for a, b in zip(bottom, seconds, strict=True)]
    _finish(axis, "Time of a step", "seconds")
    if bottom and max(bottom) > 0:
        axis.set_ylim(0, 1.3 * max(bottom))  # room for the legend
        axis.legend(frameon=False, fontsize=8, labelcolor=_INK, ncols=4, loc="upper right")


def _steps(records: Sequence[StepRecord]) -> list[int]:
    return [record.step for record in records]


def _series(records: Sequence[StepRecord], name: str) -> list[float]:
    return [record.metrics.get(name, math.nan) for record in records]


def _smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Trailing mean."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def _finish(axis: Any, title: str, unit: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, loc="left", fontsize=11, color=_INK, fontweight="bold")
    axis.set_xlabel("step", fontsize=9, color=_MUTED)
    axis.set_ylabel(unit, fontsize=9, color=_MUTED)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(axis="y", color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_GRID)
