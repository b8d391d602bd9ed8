"""The base install is a client: in a clean process nothing heavy is imported, and a mock client works."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers")

PRELUDE = f"""
import sys
HEAVY = {HEAVY!r}

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise AssertionError(f"{{name}} was imported")

sys.meta_path.insert(0, Forbid())
"""

CLIENT = """
import arctic_core
from arctic_core import (
    ArcticRLClientConfig, Batch, Completion, Generated, Gradients, NamedLoss, Metric, MockTransport, Sample,
    SamplingParams, Stepped, create_arctic_rl_client,
)
import arctic_core.client
import numpy as np

def answer(request):
    if request.operation.op() == "generate":
        one = Completion(token_ids=np.array([1], np.int32), logprobs=np.array([-1.0], np.float32), text="x",
                         finish_reason="length", policy_version=0)
        return Generated(completions=((one,),))
    if request.operation.op() == "forward_backward":
        return Gradients(metrics={"loss": Metric(sum=1.0, count=2.0)})
    return Stepped(grad_norm=1.0, lr=0.1, step=1, policy_version=1)

config = ArcticRLClientConfig(model_name="Qwen/Qwen3-4B", comm_protocol="ray", training_gpus=8, sampling_gpus=8, colocate=True)
with create_arctic_rl_client(config, transport=MockTransport(answer)) as client:
    assert client.generate([[1, 2]], SamplingParams(max_tokens=1))[0][0].text == "x"
    batch = Batch.from_samples([Sample(token_ids=[1, 2], prompt_length=1)])
    assert client.forward_backward(batch, NamedLoss(name="grpo")).metrics["loss"].mean == 0.5
    assert client.step().step == 1
for name in arctic_core.__all__:
    getattr(arctic_core, name)
"""

CONTRACTS = """
import arctic_core.backends.base, arctic_core.losses.base, arctic_core.sync.plan, arctic_core.sync.carriers
import arctic_core.plugins.builtin, arctic_core.plugins.hookspecs, arctic_core.transports.ray, arctic_core.transports.local
from arctic_core.plugins.manager import PluginRegistry
registry = PluginRegistry([])
"""

ENTRY_POINTS = """
from arctic_core.plugins.manager import get_registry
registry = get_registry()
builtin = [plugin for plugin in registry.plugins if plugin.name == "builtin"]
assert [plugin.error for plugin in builtin] == [None], builtin
assert "torch" in registry.names("arctic_trainers")
"""


@pytest.mark.parametrize("program", [CLIENT, CONTRACTS, ENTRY_POINTS], ids=["client", "contracts", "plugins"])
def test_nothing_heavy_is_imported(program: str) -> None:
    check = "\nloaded = [name for name in HEAVY if name in sys.modules]\nassert not loaded, loaded\nprint('clean')\n"
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + program + check], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "clean"), result.stderr
