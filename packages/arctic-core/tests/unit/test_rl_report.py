"""A run's folder: append, rewind, resume checks, summary, plot."""

import json
import math

import pytest

from arctic_core.errors import ConfigError, DataError
from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.plot import plot_run
from arctic_core.rl.report import SampleRecord, StepRecord, open_run, summarize


def job(**changes):
    return TrainJobConfig.parse({"model": "m", "task": {"name": "addition"}, "steps": 5, **changes})


def record(step, reward=0.5, **more):
    values = {
        "reward/mean": reward,
        "reward/std": 0.1,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/accuracy": 0.5,
        "seconds/total": float(step),
    }
    values |= {"memory/total_bytes": 10.0 * step, "mismatch/max_abs_diff": 1e-6, "mismatch/kl_k3": 1e-9}
    values |= {"length/mean": 3.0, "length/min": 1.0, "length/max": 5.0, "seconds/generate": 1.0, "seconds/train": 2.0}
    return StepRecord(step=step, policy_version=step, metrics=values | more)


def sample(step):
    return SampleRecord(
        step=step,
        group=0,
        index=0,
        prompt="p",
        completion="“é\n",
        answer="a",
        reward=1.0,
        advantage=0.0,
        tokens=1,
        finish_reason="stop",
        policy_version=0,
    )


def test_lines_come_back_as_written(tmp_path):
    folder = open_run(tmp_path / "run", job(), resume=False)
    written = [record(1), record(2, loss=math.nan)]
    for item in written:
        folder.write_step(item, [sample(item.step)])
    read = folder.read_steps()
    assert read[0] == written[0]
    assert math.isnan(read[1].metrics["loss"])
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert lines[1]["loss"] is None
    assert [json.loads(line)["completion"] for line in folder.samples.read_text(encoding="utf-8").splitlines()] == ["“é\n"] * 2


def test_rewinding_drops_later_lines_and_a_torn_one(tmp_path):
    folder = open_run(tmp_path, job(), resume=False)
    for step in (1, 2, 3):
        folder.write_step(record(step), [sample(step), sample(step)])
    with folder.metrics.open("ab") as stream:
        stream.write(b'{"step": 4, "poli')
    folder.rewind(2)
    folder.write_step(record(3, reward=0.9), [sample(3)])
    assert [(r.step, r.metrics["reward/mean"]) for r in folder.read_steps()] == [(1, 0.5), (2, 0.5), (3, 0.9)]
    assert len(folder.samples.read_text().splitlines()) == 5
    folder.rewind(0)
    assert folder.read_steps() == []


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    folder = open_run(tmp_path, job(), resume=False)
    folder.metrics.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        folder.read_steps()


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    folder = open_run(tmp_path, job(), resume=False)
    open_run(tmp_path, job(), resume=False)  # nothing was measured yet
    folder.write_step(record(1), [])
    with pytest.raises(ConfigError, match="--resume"):
        open_run(tmp_path, job(), resume=False)


def test_resuming_needs_a_run_of_the_same_job(tmp_path):
    with pytest.raises(ConfigError, match="no run to resume"):
        open_run(tmp_path / "none", job(), resume=True)
    open_run(tmp_path, job(), resume=False)
    open_run(tmp_path, job(steps=9, checkpoint={"every": 3}), resume=True)
    with pytest.raises(ConfigError, match=r"client\.training\.optimizer\.lr, rollouts\.n"):
        open_run(tmp_path, job(rollouts={"n": 3}, client={"training": {"optimizer": {"lr": 1.0}}}), resume=True)
    with pytest.raises(ConfigError, match=r"task\.options\.max_operand"):
        open_run(tmp_path, job(task={"name": "addition", "options": {"max_operand": 2}}), resume=True)


@pytest.mark.parametrize(("count", "first", "last"), [(12, 3.0, 10.0), (4, 1.5, 3.5), (1, 1.0, 1.0), (0, None, None)])
def test_the_summary_compares_the_ends(count, first, last):
    records = [record(step, reward=float(step)) for step in range(1, count + 1)]
    found = summarize(records, job(), status="finished", seconds=1.0, seconds_to_first_step=None, packages={})
    assert (found.steps, found.reward_first, found.reward_last) == (count, first, last)
    assert found.peak_memory_bytes == (10.0 * count or None)


@pytest.mark.parametrize("count", [1, 2, 30])
def test_the_plot_is_drawn(tmp_path, count):
    records = [record(step, **({"kl/reference": 0.01 * step} if step % 2 else {})) for step in range(1, count + 1)]
    path = tmp_path / "plot.png"
    plot_run(records, path, "title")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000
