"""The training loop with the embedded engines on a tiny model: it learns, it resumes exactly, it ends cleanly."""

import json

import numpy as np
import pytest

from arctic_core.client import create_arctic_rl_client
from arctic_core.errors import CheckpointError, ConfigError, InvalidStateError, RewardError
from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.job import make_recipe, train
from arctic_core.rl.loop import ResumePoint, find_resume_point
from arctic_core.rl.observe import Silent
from arctic_core.rl.report import open_run

pytest.importorskip("transformers")

VOLATILE = ("seconds/", "tokens/per_second", "memory/")


def job(model, **changes):
    values = {
        "model": model,
        "task": {"name": "addition"},
        "steps": 4,
        "rollouts": {"prompts_per_step": 2, "n": 4, "max_tokens": 6},
        "checkpoint": {"every": 1, "keep_last": 10},
        "client": {"max_seq_len": 128, "training": {"optimizer": {"lr": 1e-3}}},
    }
    return TrainJobConfig.parse(values | changes)


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A reward a random model can raise: the share of letters among its characters."""
    (tmp_path / "rewards_of_this_test.py").write_text(
        "import math\n"
        "def letters(completion, item):\n    return sum(c.isalpha() for c in completion) / max(1, len(completion))\n"
        "def nan(completion, item):\n    return math.nan\n"
        "def same(completion, item):\n    return 1.0\n"
        "def failed(completion, item):\n    return None\n"
        "seen = 0\n"
        "def mixed(completion, item):\n"
        "    global seen\n    seen += 1\n"
        "    return None if seen % 4 == 1 else 1.0 if seen > 4 else float(seen)\n"
        "calls = 0\n"
        "def interrupt(completion, item):\n"
        "    global calls\n    calls += 1\n"
        "    if calls > 20:\n        raise KeyboardInterrupt\n"
        "    return float(len(completion) % 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    return "rewards_of_this_test"


def steps_of(path):
    """A run's lines without what depends on the clock and the machine."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(VOLATILE)} for line in lines]


def samples_of(path):
    return (path / "samples.jsonl").read_text()


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """An uninterrupted run of four steps, with two optimizer steps in each."""
    path = tmp_path_factory.mktemp("finished") / "run"
    config = job(tiny_model, reward=None, algorithm=TWO_UPDATES)
    return config, path, train(config, path)


TWO_UPDATES = {"mini_batches": 2, "loss": {"options": {"kl_coef": 0.01, "entropy_coef": 0.001}}}


def test_a_run_reports_every_step(finished):
    config, path, summary = finished
    lines = steps_of(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["policy_version"] for line in lines] == [2, 4, 6, 8]
    for line in lines:
        assert line["mismatch/max_abs_diff"] <= 1e-4
        assert (line["optim/steps"], line["optim/all_masked_batches"]) == (2, 0)
        assert line["advantage/min"] <= 0 <= line["advantage/max"]
        assert {"reward/mean", "policy/entropy", "kl/reference", "length/mean", "loss/clip_fraction", "optim/lr"} <= line.keys()
        assert line["length/max"] <= config.rollouts.max_tokens
    assert lines[0]["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert (summary.status, summary.steps) == ("finished", 4)
    assert summary.seconds_to_first_step < summary.seconds
    samples = [json.loads(line) for line in samples_of(path).splitlines()]
    assert len(samples) == 4 * 8
    assert {sample["policy_version"] for sample in samples if sample["step"] == 2} == {2}
    assert {(sample["group"], sample["index"]) for sample in samples if sample["step"] == 1} == {
        (group, index) for group in range(2) for index in range(4)
    }
    assert (path / "plot.png").exists()
    assert json.loads((path / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("completed", [0, 2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(finished, tmp_path, completed):
    config, whole, _ = finished
    if completed:
        train(config.model_copy(update={"steps": completed}), tmp_path)
        later = config.model_copy(update={"steps": completed + 1})
        with pytest.raises(KeyboardInterrupt):  # leaves lines of a step that no checkpoint holds
            train(later, tmp_path, resume=True, observer=StopAfter("reward"))
    else:
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path, observer=StopAfter("train"))
    train(config, tmp_path, resume=True)
    assert steps_of(tmp_path) == steps_of(whole)
    assert samples_of(tmp_path) == samples_of(whole)


def test_resuming_a_finished_run_is_refused_and_changes_nothing(finished):
    config, path, _ = finished
    before = {file: file.read_bytes() for file in path.iterdir() if file.is_file()}
    with pytest.raises(InvalidStateError, match="all 4 steps"):
        train(config, path, resume=True)
    assert {file: file.read_bytes() for file in path.iterdir() if file.is_file()} == before


def test_a_run_without_checkpoints_cannot_be_resumed(tiny_model, tmp_path):
    config = job(tiny_model, reward=None, steps=1, checkpoint={"every": 0})
    train(config, tmp_path)
    with pytest.raises(InvalidStateError, match="kept no checkpoints"):
        train(config, tmp_path, resume=True)


def test_a_run_killed_while_it_saved_its_first_checkpoint_starts_over(tiny_model, tmp_path):
    config = job(tiny_model, reward=None)
    folder = open_run(tmp_path, config, resume=False)
    (folder.checkpoints / "step-1.tmp-99@host").mkdir(parents=True)
    assert find_resume_point(folder, config) == ResumePoint(None, 0)
    (folder.checkpoints / "step-1").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_resume_point(folder, config)


def test_a_foreign_checkpoint_is_refused(tiny_model, tmp_path):
    config = job(tiny_model, reward=None)
    folder = open_run(tmp_path, config, resume=False)
    with create_arctic_rl_client(config.client) as client:
        client.save_checkpoint(folder.checkpoints)
    with pytest.raises(CheckpointError, match="not written by a training job"):
        train(config, tmp_path, resume=True)


def test_reward_rises(tiny_model, tmp_path, rewards):
    config = job(
        tiny_model,
        reward=f"{rewards}:letters",
        steps=12,
        rollouts={"prompts_per_step": 2, "n": 16, "max_tokens": 6},
        checkpoint={"every": 0},
        client={"max_seq_len": 128, "training": {"optimizer": {"lr": 3e-3}}},
    )
    summary = train(config, tmp_path / "run")
    assert summary.reward_last > summary.reward_first + 0.2


def test_ctrl_c_closes_the_client_and_completes_the_files(tiny_model, tmp_path, rewards):
    clients = []

    def connect(config):
        clients.append(create_arctic_rl_client(config))
        return clients[-1]

    with pytest.raises(KeyboardInterrupt):
        train(job(tiny_model, reward=f"{rewards}:interrupt"), tmp_path / "run", connect=connect)
    assert clients[0].closed
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    assert (tmp_path / "run" / "plot.png").exists()


def test_a_bad_reward_ends_the_run_with_the_sample(tiny_model, tmp_path, rewards):
    with pytest.raises(RewardError, match="sample 0"):
        train(job(tiny_model, reward=f"{rewards}:nan"), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 0)
    assert "RewardError" in summary["error"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"task": {"name": "no_such_task"}}, "no_such_task"),
        ({"task": {"name": "addition", "options": {"x": 1}}}, "x"),
        ({"reward": "no_such_module_at_all:f"}, "no_such_module_at_all"),
        ({"algorithm": {"loss": {"name": "no_such_loss"}}}, "no_such_loss"),
        ({"algorithm": {"loss": {"options": {"clip_loww": 1}}}}, "clip_loww"),
        ({"algorithm": {"loss": {"normalization": "token"}}}, "sequence_reduction"),
        ({"algorithm": {"teacher_topk": 4}}, "teacher_topk"),
        ({"algorithm": {"teacher_topk": 4, "loss": {"name": "distill", "options": {"source": "sampled"}}}}, "teacher_topk"),
        ({"algorithm": {"loss": {"name": "some_module:some_loss"}}}, "allow_loss_import"),
    ],
)
def test_what_is_wrong_is_found_before_engines_start(tiny_model, tmp_path, changes, named):
    def connect(config):
        raise AssertionError("no engine may be started")

    with pytest.raises(ConfigError, match=named):
        train(job(tiny_model, **({"reward": None} | changes)), tmp_path / "run", connect=connect)
    assert not (tmp_path / "run").exists()


def test_a_step_of_which_nothing_is_left_makes_no_optimizer_step(tiny_model, tmp_path, rewards, caplog):
    config = job(
        tiny_model,
        reward=f"{rewards}:same",
        steps=2,
        algorithm={"filter_uniform_groups": True, "mini_batches": 3, "loss": {"options": {"entropy_coef": 1.0}}},
    )
    with caplog.at_level("WARNING"):
        summary = train(config, tmp_path / "run")
    assert "step 1: no sample with a trained token is left" in caplog.text
    assert "already serves" not in caplog.text  # nothing was synced
    assert (summary.status, summary.steps) == ("finished", 2)
    for line in steps_of(tmp_path / "run"):
        assert (line["policy_version"], line["optim/steps"], line["optim/grad_norm"], line["sync/bytes"]) == (0, 0, 0, 0)
        assert (line["filter/groups"], line["filter/samples"], line["reward/groups_without_signal"]) == (2, 8, 1)
        assert None not in line.values()
    assert {json.loads(line)["advantage"] for line in samples_of(tmp_path / "run").splitlines()} == {None}


def test_uniform_groups_and_failed_samples_leave_the_step(tiny_model, tmp_path, rewards):
    algorithm = {"filter_uniform_groups": True, "drop_failed_samples": True, "advantage": {"name": "rloo"}}
    config = job(tiny_model, reward=f"{rewards}:mixed", steps=1, algorithm=algorithm)
    train(config, tmp_path / "run")
    (line,) = steps_of(tmp_path / "run")  # rewards: none 2 3 4 | none 1 1 1
    assert (line["filter/groups"], line["filter/samples"], line["filter/failed_samples"]) == (1, 5, 2)
    assert line["reward/mean"] == pytest.approx(12 / 6)
    assert (line["optim/steps"], line["policy_version"]) == (1, 1)
    found = {
        (sample["group"], sample["index"]): (sample["reward"], sample["advantage"])
        for sample in map(json.loads, samples_of(tmp_path / "run").splitlines())
    }
    assert [found[0, i] for i in range(4)] == [(None, None), (2, -1.5), (3, 0), (4, 1.5)]
    assert [found[1, i] for i in range(4)] == [(None, None), (1, None), (1, None), (1, None)]


@pytest.mark.parametrize(
    ("allowed", "named"), [(False, "None, not a finite number"), (True, "all 8 samples of the step failed")]
)
def test_failed_samples_end_the_run_unless_some_are_left(tiny_model, tmp_path, rewards, allowed, named):
    config = job(tiny_model, reward=f"{rewards}:failed", algorithm={"drop_failed_samples": allowed})
    with pytest.raises(RewardError, match=named):
        train(config, tmp_path / "run")


def test_a_kl_penalty_on_rewards_scores_the_reference(tiny_model, tmp_path, rewards):
    penalty = {"name": "reinforce_pp", "kl_coef": 0.1, "baseline": True}
    algorithm = {"loss": {"name": "reinforce_pp"}, "advantage": penalty}
    train(job(tiny_model, reward=f"{rewards}:letters", steps=2, algorithm=algorithm), tmp_path / "run")
    first, second = steps_of(tmp_path / "run")
    assert first["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert second["kl/reference"] > 0
    assert second["advantage/std"] == pytest.approx(1, abs=0.05)


def test_seeds_change_prompts_and_samples(tiny_model, tmp_path):
    for seed in (1, 2):
        train(job(tiny_model, reward=None, seed=seed, steps=1, checkpoint={"every": 0}), tmp_path / str(seed))
    one, two = (samples_of(tmp_path / str(seed)) for seed in (1, 2))
    assert one != two


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollouts": {"n": 1}}, ["rollouts.n is 1"]),
        ({"rollouts": {"n": 1}, "algorithm": {"loss": {"name": "reinforce_pp"}}}, []),
        ({"rollouts": {"n": 1}, "algorithm": {"loss": {"name": "sft"}}}, []),
        ({"rollouts": {"top_p": 0.9}}, ["cannot reproduce its log-probs"]),
        ({"rollouts": {"top_k": 5, "n": 1}}, ["rollouts.n is 1", "cannot reproduce its log-probs"]),
        ({}, []),
    ],
)
def test_what_is_hardly_meant_is_said(tiny_model, caplog, changes, said):
    values = {"reward": None, **changes, "rollouts": {"max_tokens": 6, **changes.get("rollouts", {})}}
    make_recipe(job(tiny_model, **values), tiny_model)
    assert len(caplog.messages) == len(said)
    for message, part in zip(caplog.messages, said, strict=True):
        assert part in message


def test_responses_may_be_empty_or_groups_single(tiny_model, tmp_path):
    """A group of one has no advantage: a step that learns nothing is still a step."""
    config = job(tiny_model, reward=None, steps=2, rollouts={"prompts_per_step": 1, "n": 1, "max_tokens": 1}, checkpoint={})
    train(config, tmp_path)
    for line in steps_of(tmp_path):
        assert line["optim/grad_norm"] == 0
        assert line["reward/groups_without_signal"] == 1
        assert np.isfinite(line["mismatch/kl_k3"])


class StopAfter(Silent):
    """Presses Ctrl-C when the given phase first begins."""

    def __init__(self, phase):
        self._phase = phase

    def phase(self, step, name):
        if name == self._phase:
            raise KeyboardInterrupt
