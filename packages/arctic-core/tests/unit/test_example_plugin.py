"""The example plugin, really installed, found through its entry point, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[4] / "examples" / "plugin"

PROGRAM = """
import json, sys
import torch
from arctic_core.errors import ConfigError
from arctic_core.losses.base import LossInputs
from arctic_core.plugins.manager import PluginRegistry

registry = PluginRegistry()
registry.require_healthy()
plugin = next(p for p in registry.plugins if p.name == "example")

nan = float("nan")
logprobs_R = torch.tensor([-1.0, -2.0, nan, -4.0], requires_grad=True)
inputs = LossInputs(
    logprobs_R=logprobs_R,
    entropy_R=None,
    mask_R=torch.tensor([True, True, False, True]),
    cu_seqlens_B=torch.tensor([0, 2, 4]),
    advantages_R=torch.tensor([0.5, 2.0, nan, -1.0]),
)
definition = registry.loss("positive_only")
results = {}
for weighted in (False, True):
    output = definition.compute(inputs, definition.config_model.parse({"weighted": weighted}))
    (grad,) = torch.autograd.grad(output.loss, logprobs_R)
    results[str(weighted)] = {"loss": output.loss.item(), "grad": grad.tolist(), "metrics": output.metrics}
try:
    definition.config_model.parse({"wieghted": True})
except ConfigError as error:
    refused = error.message

task = registry.task("reversal").create({"length": 3})
items = task.prompts(seed=1, step=2, count=5)
again = task.prompts(seed=1, step=2, count=5)
json.dump(
    {
        "distribution": plugin.distribution,
        "provides": plugin.provides,
        "results": results,
        "refused": refused,
        "repeatable": items == again,
        "asked": [item.messages[-1]["content"] for item in items],
        "answers": [item.answer for item in items],
        "rewards": [task.reward(text.format(items[0].answer), items[0]) for text in ("{0}", " {0}\\n", "", "{0}{0}")],
    },
    sys.stdout,
)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What a fresh process sees with the plugin installed."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(EXAMPLE)], check=True, timeout=120)
    env = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_plugin_is_listed_with_its_distribution(outcome):
    assert outcome["distribution"] == "arctic-example-plugin 0.1.0"
    assert outcome["provides"] == {"arctic_losses": ["positive_only"], "arctic_tasks": ["reversal"]}


def test_its_loss_computes_what_it_says(outcome):
    plain, weighted = outcome["results"]["False"], outcome["results"]["True"]
    assert plain["loss"] == 3.0  # 1 + 2: the masked slot is NaN, the last advantage negative
    assert plain["grad"] == [-1.0, -1.0, 0.0, 0.0]
    assert weighted["loss"] == 0.5 * 1 + 2.0 * 2
    assert weighted["grad"] == [-0.5, -2.0, 0.0, 0.0]
    assert plain["metrics"] == {"positive_only/kept": [2.0, 3.0]}
    assert "wieghted" in outcome["refused"]


def test_its_task_is_repeatable_and_judges(outcome):
    assert outcome["repeatable"]
    words = [text.split()[1] for text in outcome["asked"]]
    assert [word[::-1] for word in words] == outcome["answers"]
    assert len(set(words)) > 1
    assert outcome["rewards"] == [1.0, 1.0, 0.0, 0.5]
