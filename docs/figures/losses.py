"""Draws ``assets/losses.svg``: what weight each policy loss gives a token's gradient as its ratio moves away from 1.

Needs torch and matplotlib: ``python docs/figures/losses.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from arctic_core.losses.base import LossInputs, prepare_loss
from arctic_core.plugins.manager import get_registry
from arctic_core.protocol import NamedLoss

TARGET = Path(__file__).parents[1] / "assets" / "losses.svg"
LINES = (
    ("clip (grpo, dapo, ppo, …)", "ppo", {}, "#2563eb", "-"),
    ("dual clip 3", "ppo", {"dual_clip": 3.0}, "#93b4f5", "--"),
    ("cispo", "cispo", {"clip_high": 0.5}, "#ea7a17", "-"),
    ("sapo", "sapo", {"sequence_reduction": "sum"}, "#15935f", "-"),
)
RATIOS = torch.linspace(0.02, 4.0, 400, dtype=torch.float64)


def gradient_weights(name: str, options: dict[str, Any], advantage: float) -> torch.Tensor:
    """``−∂ loss / ∂ log π`` of one token at each of :data:`RATIOS`."""
    loss = prepare_loss(get_registry().loss(name), NamedLoss(name=name, options=options, normalization="sequence"))
    logprobs_R = RATIOS.log().requires_grad_()
    size = len(RATIOS)
    inputs = LossInputs(
        logprobs_R=logprobs_R,
        entropy_R=None,
        mask_R=torch.ones(size, dtype=torch.bool),
        cu_seqlens_B=torch.arange(size + 1),
        advantages_R=torch.full_like(RATIOS, advantage),
        old_logprobs_R=torch.zeros_like(RATIOS),
    )
    (gradient,) = torch.autograd.grad(loss.compute(inputs).loss, logprobs_R)
    return -gradient


def draw() -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained", facecolor="white")
    FigureCanvasSVG(figure)
    for axis, advantage in zip(figure.subplots(1, 2, sharex=True), (1.0, -1.0), strict=True):
        for label, name, options, colour, style in LINES:
            axis.plot(RATIOS, gradient_weights(name, options, advantage), color=colour, linestyle=style, label=label)
        axis.axvline(1.0, color="#9aa5b1", linewidth=0.8)
        axis.axhline(0.0, color="#9aa5b1", linewidth=0.8)
        axis.set_title(f"advantage {advantage:+.0f}", loc="left", fontsize=10)
        axis.set_xlabel("ratio")
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("weight of the gradient")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    draw()
