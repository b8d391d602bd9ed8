"""``arctic train`` with every built-in loss and every advantage estimator, switched by one config line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from arctic_core.errors import ConfigError
from arctic_core.plugins.builtin import arctic_losses
from arctic_core.rl.config_file import load_job
from arctic_core.rl.job import make_recipe, train

LOSSES = sorted(definition.name for definition in arctic_losses())
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp")
NORMALIZATIONS = {
    "grpo": "sequence",
    "gspo": "sequence",
    "sapo": "sequence",
    "rloo": "sequence",
    "dr_grpo": "constant",
}
"""Those that are not normalised by ``token``."""


@pytest.fixture
def job_file(tiny_model: str, tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {tiny_model}\ntask: {{name: addition}}\nreward: rewards_of_the_losses_test:varied\nsteps: 2\n"
        "rollouts: {prompts_per_step: 2, n: 4, max_tokens: 5}\n"
        "client: {max_seq_len: 128, training: {optimizer: {lr: 1e-3}}}\n"
    )
    return str(path)


@pytest.fixture(autouse=True)
def varied_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that tells a random model's responses apart."""
    (tmp_path / "rewards_of_the_losses_test.py").write_text(
        "def varied(completion, item):\n    return sum(map(ord, completion)) % 7 / 7\n"
    )
    monkeypatch.chdir(tmp_path)


def run(job_file: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Train, and read the lines of ``metrics.jsonl``; what is not finite stands there as ``null``."""
    assert train(load_job(job_file, overrides), folder).status == "finished"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert {name: value for name, value in line.items() if value is None or not math.isfinite(value)} == {}
    return lines


@pytest.mark.parametrize("name", LOSSES)
def test_one_line_switches_the_loss(job_file: str, tmp_path: Path, name: str) -> None:
    lines = run(job_file, tmp_path / "run", f"algorithm.loss.name={name}")
    assert [(line["step"], line["policy_version"], line["optim/steps"]) for line in lines] == [(1, 1, 1), (2, 2, 1)]
    # The teacher of distillation is the initial model, so its first gradient is 0; every other loss moves the weights at once.
    assert lines[0]["optim/grad_norm"] == pytest.approx(0, abs=1e-4) if name == "distill" else lines[0]["optim/grad_norm"] > 0
    assert any(key.startswith("loss/") for key in lines[0])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_one_line_switches_the_advantage(job_file: str, tmp_path: Path, name: str) -> None:
    (line,) = run(job_file, tmp_path / "run", f"algorithm.advantage.name={name}", "steps=1")
    assert line["optim/grad_norm"] > 0
    assert line["advantage/std"] > 0


@pytest.mark.parametrize("name", LOSSES)
def test_the_quickstart_takes_every_loss_by_one_line(tiny_model: str, name: str) -> None:
    """With the options that the quickstart gives its own loss, and its numbers in the constant divisor."""
    config = load_job("quickstart", [f"algorithm.loss.name={name}"], "local")
    loss = make_recipe(config, tiny_model).loss
    normalization = NORMALIZATIONS.get(name, "token")
    assert (loss.name, loss.normalization) == (name, normalization)
    assert loss.constant == (4 * 8 * 12 if normalization == "constant" else None)


@pytest.mark.parametrize("source", ["sampled", "topk"])
def test_distillation_comes_nearer_to_its_teacher(job_file: str, tiny_tied_model: str, tmp_path: Path, source: str) -> None:
    teacher = (f"client.log_prob.model_name={tiny_tied_model}", "client.log_prob_gpus=1")
    loss = f"algorithm.loss={{name: distill, options: {{source: {source}}}}}"
    lines = run(job_file, tmp_path / "run", loss, *teacher, "steps=6", "algorithm.epochs=2")
    assert lines[0]["optim/grad_norm"] > 0.01
    assert lines[-1]["kl/reference"] < 0.9 * lines[0]["kl/reference"]


def test_the_number_of_teacher_tokens_is_the_one_given(job_file: str, tiny_model: str) -> None:
    plain = load_job(job_file, ["algorithm.loss.name=distill"])
    assert make_recipe(plain, tiny_model).teacher_topk == 16
    chosen = load_job(job_file, ["algorithm.loss.name=distill", "algorithm.teacher_topk=3"])
    assert make_recipe(chosen, tiny_model).teacher_topk == 3
    assert make_recipe(load_job(job_file), tiny_model).teacher_topk == 0


@pytest.mark.parametrize("setting", ["client.reference=true", "client.log_prob_gpus=1"])
def test_a_reference_model_that_nothing_asks_is_refused(job_file: str, tiny_model: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting.partition('=')[0]}: no effect, because nothing in this job asks"):
        make_recipe(load_job(job_file, [setting]), tiny_model)
    for use in ("report_reference_kl=true", "loss.options.kl_coef=0.1", "loss.name=distill"):
        assert make_recipe(load_job(job_file, [setting, f"algorithm.{use}"]), tiny_model).wants_reference


def test_a_loss_by_dotted_name_where_the_job_file_allows_it(job_file: str, tmp_path: Path) -> None:
    allowed = ("client.training.allow_loss_import=true", "algorithm.loss.name=arctic_core.losses.sft:sft_loss")
    named = run(job_file, tmp_path / "dotted", *allowed, "steps=1")
    builtin = run(job_file, tmp_path / "builtin", "algorithm.loss.name=sft", "steps=1")
    assert named[0]["optim/grad_norm"] == builtin[0]["optim/grad_norm"]
