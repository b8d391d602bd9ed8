"""A training run with shared prompts computed once tells the same story as one without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.job import train

pytest.importorskip("transformers")

SYSTEM = "Think about both numbers, add them digit by digit from the right, and reply with the sum alone."
VOLATILE = ("seconds/", "tokens/per_second", "memory/")


def run(model: str, folder: Path, training: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of the run, without what depends on the clock, and its samples."""
    config = TrainJobConfig.parse(
        {
            "model": model,
            "task": {"name": "addition", "options": {"system_prompt": SYSTEM}},
            "steps": 2,
            "rollouts": {"prompts_per_step": 2, "n": 4, "max_tokens": 12},
            "algorithm": {"mini_batches": 2, "loss": {"options": {"kl_coef": 0.01, "entropy_coef": 0.001}}},
            "client": {"max_seq_len": 256, "training": {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 300} | training},
        }
    )
    train(config, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(VOLATILE)} for line in lines], samples


def test_a_run_reports_the_same_metrics_and_draws_the_same_samples(tiny_model: str, tmp_path: Path) -> None:
    expected, drawn = run(tiny_model, tmp_path / "off", {"zorro": "off"})
    lines, samples = run(tiny_model, tmp_path / "on", {"zorro": "on", "zorro_check": True})
    assert [sample["completion"] for sample in samples] == [sample["completion"] for sample in drawn]
    for line, other in zip(lines, expected, strict=True):
        saved = line.pop("tokens/zorro_saved")
        assert 0.2 < saved < 0.9
        assert line == pytest.approx(other, rel=1e-3, abs=1e-4)
