"""The public names of arctic_core and their signatures. A change here is a change of the interface: say so in the changelog."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from importlib.metadata import version

import pytest

import arctic_core

NAMES = """
AdamWConfig ArcticError ArcticRLClient ArcticRLClientConfig AsyncArcticRLClient AuthenticationError Batch
CISPOLossConfig CheckpointError CheckpointRef Completion CompletionReady ConfigError ConstantSchedule CosineSchedule
DAPOLossConfig DataError DeadlineConfig DeadlineExceeded DistillLossConfig Done DrGRPOLossConfig EngineDiedError
EngineError EngineInfo EngineStartError ErrorInfo ExportRef GRPOLossConfig GSPOLossConfig Generated Gradients HttpConfig Info
InvalidStateError JobNotFoundError LinearSchedule LogProbConfig Metric MissingExtraError MockTransport ModelError
ModelNotFoundError NamedLoss NonFiniteError PPOLossConfig PayloadTooLargeError PermissionDeniedError Place
PlacementError PluginError ProtocolError QueueFullError RLOOLossConfig RayConfig ReinforcePPLossConfig Reply Request
RewardError SAPOLossConfig SFTLossConfig Sample SamplingConfig SamplingParams Scores Stepped SyncReport TrainingConfig
Transport TransportClosedError TransportError UnsupportedModelError UnsupportedOperation UnsupportedVersionError
ValueLossConfig WeightSyncConfig WeightSyncError WireError __version__ create_arctic_rl_client
create_async_arctic_rl_client
"""

SIGNATURES = """
create_arctic_rl_client(config, *, transport=None)
create_async_arctic_rl_client(config, *, transport=None)
MockTransport(handler)
ArcticError(message, *, where='', remedy='')
Sample(*, token_ids, prompt_length, group=0, loss_mask=None, advantages=None, old_logprobs=None,
    ref_logprobs=None, sampler_logprobs=None, teacher_logprobs=None, topk_ids=None,
    teacher_topk_logprobs=None, policy_version=None, temperature=1.0)
Batch(*, token_ids, cu_seqlens, prompt_lengths, groups, temperatures, policy_versions=None,
    loss_mask=None, advantages=None, old_logprobs=None, ref_logprobs=None, sampler_logprobs=None,
    teacher_logprobs=None, topk_ids=None, teacher_topk_logprobs=None)
SamplingParams(max_tokens=256, temperature=1.0, top_p=1.0, top_k=0, stop=(), stop_token_ids=(), ignore_eos=False,
    seed=None)
NamedLoss(name, options=<factory>, normalization=None, constant=None)
Completion(token_ids, logprobs, text, finish_reason, policy_version)
Metric(sum, count=1.0)
ArcticRLClient.info(self)
ArcticRLClient.generate(self, prompts, sampling=None, *, n=1, group=None, request_id=None)
ArcticRLClient.generate_stream(self, prompts, sampling=None, *, n=1, group=None, request_id=None)
ArcticRLClient.reset_prefix_cache(self)
ArcticRLClient.pause(self, mode='drain')
ArcticRLClient.resume(self)
ArcticRLClient.abort(self, request_ids=())
ArcticRLClient.forward(self, batch, *, model='policy', entropy=False, temperature=None, topk=0, given_topk=False)
ArcticRLClient.forward_backward(self, batch, loss, *, temperature=None)
ArcticRLClient.backward(self, batch, grad_logprobs, grad_entropy=None, *, grad_topk_logprobs=None, temperature=None)
ArcticRLClient.step(self, *, lr=None, max_grad_norm=None)
ArcticRLClient.zero_grad(self)
ArcticRLClient.sync_weights(self, *, probe=(), force=False)
ArcticRLClient.sleep(self, engine, level=1)
ArcticRLClient.wake(self, engine)
ArcticRLClient.save_checkpoint(self, path, *, keep_last=None, extra=None)
ArcticRLClient.load_checkpoint(self, path, *, restore=('weights', 'optimizer', 'scheduler', 'step', 'rng'))
ArcticRLClient.export_hf(self, path)
ArcticRLClient.reconnect_config(self)
ArcticRLClient.close(self)
ArcticRLClient.shutdown(self)
Transport.open(self)
Transport.send(self, request)
Transport.stream(self, request)
Transport.relay(self, request, frame)
Transport.relay_stream(self, request, frame)
Transport.close(self, shutdown)
Transport.reconnect_config(self)
Sample.replace(self, **changes)
Batch.samples(self)
Batch.select(self, indices)
Batch.replace(self, **changes)
Batch.split(self, values)
"""


def parameters(item: object) -> str:
    """Names, defaults and kinds of the parameters, without their types; long ones over several lines."""
    signature = inspect.signature(item)  # type: ignore[arg-type]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return "\n    ".join(textwrap.wrap(str(inspect.Signature(plain)), 100))


def surface() -> list[str]:
    lines = [
        f"{name}{parameters(getattr(arctic_core, name))}"
        for name in (
            *("create_arctic_rl_client", "create_async_arctic_rl_client", "MockTransport", "ArcticError"),
            *("Sample", "Batch", "SamplingParams", "NamedLoss", "Completion", "Metric"),
        )
    ]
    for cls in (arctic_core.ArcticRLClient, arctic_core.Transport, arctic_core.Sample, arctic_core.Batch):
        for name, item in vars(cls).items():
            if inspect.isfunction(item) and not name.startswith("_"):
                lines.append(f"{cls.__name__}.{name}{parameters(item)}")
    return lines


def test_the_public_names_are_pinned() -> None:
    assert sorted(arctic_core.__all__) == sorted(NAMES.split())
    assert len(set(arctic_core.__all__)) == len(arctic_core.__all__)


def test_the_signatures_are_pinned() -> None:
    assert "\n".join(surface()) == SIGNATURES.strip()


@pytest.mark.parametrize("name", arctic_core.__all__)
def test_every_public_name_is_there_and_described(name: str) -> None:
    item = getattr(arctic_core, name)
    assert name in dir(arctic_core)
    assert name == "__version__" or (item.__name__ == name and inspect.getdoc(item))


def test_the_version_is_the_distributions() -> None:
    assert arctic_core.__version__ == version("arctic-core")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Teapot'"):
        arctic_core.Teapot  # type: ignore[attr-defined] # noqa: B018


def test_a_star_import_brings_exactly_the_public_names() -> None:
    program = "before = set(globals()); from arctic_core import *; print(*sorted(set(globals()) - before - {'before'}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(result.stdout.split()) == sorted(NAMES.split())
