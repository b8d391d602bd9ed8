"""The worked example of ``losses.md``: two responses, and what each loss makes of their tokens.

Needs torch. ``.nox/cpu/bin/python docs/figures/example.py`` writes its tables into the page; a test fails when they are stale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# --8<-- [start:data]
from arctic_core import Batch, NamedLoss, Sample, Scores
from arctic_core.advantages import compute_advantages
from arctic_core.config.advantages import DrGRPOAdvantageConfig
from arctic_core.losses.evaluate import evaluate_loss

NAN = float("nan")
OLD = [[0.50, 0.20, 0.40], [0.50, 0.40, NAN]]  # probability of each token under the old policy; a masked slot may hold anything
NEW = [[0.50, 0.30, 0.28], [0.30, 0.50, NAN]]  # under the policy being trained
SAMPLER = [[0.50, 0.20, 0.16], [0.50, 0.40, NAN]]  # as the sampler saw it

samples = [
    Sample(
        token_ids=[1, 2, 3, 4],
        prompt_length=1,
        group="sums",  # rollouts of one prompt
        loss_mask=[1, 1, i == 0],
        old_logprobs=np.log(OLD[i]),
        sampler_logprobs=np.log(SAMPLER[i]),
    )
    for i in range(2)
]
batch = Batch.from_samples(samples)
# --8<-- [start:advantages]
advantages = compute_advantages(DrGRPOAdvantageConfig(), [2.0, 0.0], batch)  # reward less the group's mean: 1 and -1
batch = batch.replace(advantages=advantages.advantages_R)
# --8<-- [end:advantages]
scores = Scores(logprobs=np.log(np.concatenate(NEW)), entropy=None)  # what client.forward(batch) reports

LOSSES = {
    "grpo": "grpo",
    "dapo": "dapo",
    "gspo": NamedLoss("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    "cispo": NamedLoss("cispo", {"clip_high": 0.28}),
    "rloo": "rloo",
    "dapo, tis": NamedLoss("dapo", {"mismatch": "tis"}),
}
results = {title: evaluate_loss(batch, scores, loss) for title, loss in LOSSES.items()}
# --8<-- [end:data]

PAGE = Path(__file__).parents[1] / "losses.md"
SPOT = re.compile(r"(?<=<!-- example -->\n\n).*?(?=\n<!-- /example -->)", re.DOTALL)


@dataclass(frozen=True)
class Token:
    """One line of the table."""

    place: str
    trained: bool
    values: tuple[float, ...]
    """Advantage, ratio, ρ, and one entry per loss: ``−∂ loss / ∂ log π`` after the division."""


def tokens() -> list[Token]:
    """The lines of the table, computed by the library."""
    assert batch.old_logprobs is not None
    assert batch.sampler_logprobs is not None
    assert batch.advantages is not None
    columns = [
        batch.advantages,
        np.exp(scores.logprobs - batch.old_logprobs),
        np.exp(batch.old_logprobs - batch.sampler_logprobs),
        *(-result.gradients()["grad_logprobs"] for result in results.values()),
    ]
    places = [f"{'AB'[i // 3]}{i % 3 + 1}" for i in range(6)]
    return [Token(place, bool(batch.mask[i]), tuple(float(column[i]) for column in columns)) for i, place in enumerate(places)]


def tables() -> str:
    """Both tables in Markdown."""
    heads = ["token", "`A`", "`r`", "`ρ`", *(f"`{title}`" for title in LOSSES)]
    lines = [[token.place, *(number(value) for value in token.values)] for token in tokens()]
    for line, token in zip(lines, tokens(), strict=True):
        if not token.trained:
            line[0], line[1:4] = f"{token.place} (masked)", ["–"] * 3
    sums = [
        [f"`{title}`", number(result.loss), f"{result.divisor:g}", number(result.loss / result.divisor), metrics(title)]
        for title, result in results.items()
    ]
    return table(heads, lines) + "\n\n" + table(["loss", "sum", "divided by", "value", "metrics as sum / count"], sums) + "\n"


def metrics(title: str) -> str:
    """The metrics that differ between the losses."""
    shown = ("ratio", "clip_fraction", "mismatch_truncated")
    found = {name: metric for name, metric in results[title].metrics.items() if name in shown}
    return ", ".join(f"`{name}` {number(metric.sum, 2)} / {metric.count:g}" for name, metric in found.items())


def table(heads: list[str], lines: list[list[str]]) -> str:
    rule = ["---" if i == 0 else "---:" for i in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines))


def number(value: float, digits: int = 3) -> str:
    """Rounded, with a true minus and no negative zero."""
    text = f"{round(value, digits) + 0.0:.{digits}f}".rstrip("0").rstrip(".")
    return text.replace("-", "−")


def write() -> None:
    PAGE.write_text(SPOT.sub(lambda _: tables(), PAGE.read_text()))


if __name__ == "__main__":
    write()
