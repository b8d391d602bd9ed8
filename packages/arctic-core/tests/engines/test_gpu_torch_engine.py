"""The torch engine on a GPU against itself on the CPU, and that sleeping really frees the device."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from arctic_core.backends.base import RankSpec
from arctic_core.backends.torch_engine.log_prob import TorchLogProb
from arctic_core.backends.torch_engine.trainer import TorchTrainer
from arctic_core.config import ArcticRLClientConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import UnsupportedOperation
from arctic_core.protocol import NamedLoss
from arctic_core.testing import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GRPO = NamedLoss(name="grpo", options={"kl_coef": 0.1, "entropy_coef": 0.02})
ANYTHING = {"entropy": True, "temperature": None}


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def start(cls: type, model: str, device: str, dtype: str = "float32", **config: Any) -> Any:
    training = {"optimizer": {"lr": 1e-3}, **config.pop("training", {})}
    settings = ArcticRLClientConfig(model_name=model, training_gpus=1, training=training, **config)
    engine = cls(RankSpec("trainer" if cls is TorchTrainer else "log_prob", 0, 1, model, device, dtype, settings))
    engine.start()
    return engine


def make_batch(trainer: TorchTrainer) -> Batch:
    rng = np.random.default_rng(0)
    shapes = [(5, 8), (3, 1), (9, 0), (2, 121), (1, 5), (70, 33)]
    rows = [Sample(token_ids=rng.integers(0, 512, p + r), prompt_length=p, advantages=rng.normal(size=r)) for p, r in shapes]
    batch = Batch.from_samples(rows)
    logprobs = trainer.forward([batch], **ANYTHING).logprobs_R
    return batch.replace(old_logprobs=logprobs + 0.1, ref_logprobs=logprobs - 0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_float32_equals_the_cpu(tiny_model: str, checkpointing: bool) -> None:
    training = {"gradient_checkpointing": checkpointing}
    cpu, gpu = (start(TorchTrainer, tiny_model, device, training=training) for device in ("cpu", "cuda"))
    batch = make_batch(cpu)
    expected, actual = (engine.forward([batch, Batch.from_samples([])], **ANYTHING) for engine in (cpu, gpu))
    np.testing.assert_allclose(actual.logprobs_R, expected.logprobs_R, rtol=0, atol=2e-5)
    np.testing.assert_allclose(actual.entropy_R, expected.entropy_R, rtol=0, atol=2e-5)
    for engine in (cpu, gpu):
        engine.forward_backward([batch, Batch.from_samples([])], GRPO, temperature=None)
    on_gpu = dict(gpu.module.named_parameters())
    for name, parameter in cpu.module.named_parameters():
        torch.testing.assert_close(on_gpu[name].grad.cpu() / 168, parameter.grad / 168, rtol=0, atol=2e-6, msg=name)


def test_bfloat16_stays_near_float32(tiny_model: str) -> None:
    full, half = (start(TorchTrainer, tiny_model, "cuda", dtype) for dtype in ("float32", "bfloat16"))
    batch = make_batch(full)
    gap = full.forward([batch], **ANYTHING).logprobs_R - half.forward([batch], **ANYTHING).logprobs_R
    assert np.abs(gap).mean() < 0.1
    half.forward_backward([batch], GRPO, temperature=None)
    assert np.isfinite(half.step(divisor=168.0, lr=None, max_grad_norm=None).grad_norm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_frees_the_device_and_wake_restores(tmp_path: object, dtype: str) -> None:
    model = make_tiny_model(tmp_path, hidden_size=1024, layers=4)
    sleeper, twin = (start(TorchTrainer, model, "cuda", dtype, reference=True) for _ in "ab")
    batch = make_batch(sleeper)
    for engine in (sleeper, twin):
        engine.forward_backward([batch], GRPO, temperature=None)
        engine.step(divisor=168.0, lr=None, max_grad_norm=None)
        engine.forward_backward([batch], GRPO, temperature=None)
    awake = torch.cuda.memory_allocated()
    sleeper.sleep(1)
    slept = torch.cuda.memory_allocated()
    assert awake - slept > 0.45 * awake, "its half of the two trainers' memory"
    assert all(parameter.device.type == "cpu" for parameter in sleeper.module.parameters())
    sleeper.wake()
    assert torch.cuda.memory_allocated() >= awake - 2**20
    outcomes = [engine.step(divisor=168.0, lr=None, max_grad_norm=None) for engine in (sleeper, twin)]
    assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-4)
    scores = [engine.forward([batch], **ANYTHING).logprobs_R for engine in (sleeper, twin)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-3 if dtype == "float32" else 0.2)
    with pytest.raises(UnsupportedOperation, match="level 1"):
        sleeper.sleep(2)
    for engine in (sleeper, twin):
        engine.stop()


@pytest.mark.parametrize("level", [1, 2])
def test_a_log_prob_engine_sleeps_and_scores_the_same_again(tiny_model: str, level: int) -> None:
    engine = start(TorchLogProb, tiny_model, "cuda", log_prob_gpus=1)
    batch = Batch.from_samples([Sample(token_ids=np.arange(1, 40), prompt_length=3)])
    before = engine.forward([batch], **ANYTHING).logprobs_R
    awake = torch.cuda.memory_allocated()
    engine.sleep(level)
    assert torch.cuda.memory_allocated() < awake
    engine.wake()
    np.testing.assert_array_equal(engine.forward([batch], **ANYTHING).logprobs_R, before)
    engine.stop()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_on_the_gpu(window: int | None, dtype: torch.dtype) -> None:
    """Against a dense masked softmax in float64, value and gradient."""
    from arctic_core.models.packed_attention import packed_attention

    generator = torch.Generator("cuda").manual_seed(0)
    cu, heads, kv_heads = (0, 1, 18, 19, 150), 8, 2
    shapes = ((heads, 64), (kv_heads, 64), (kv_heads, 64))
    q, k, v = (
        torch.randn(1, h, cu[-1], d, device="cuda", dtype=dtype, generator=generator).requires_grad_() for h, d in shapes
    )
    out, _ = packed_attention(torch.nn.Module(), q, k, v, None, cu_seqlens=cu, scaling=0.11, sliding_window=window)
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    position = torch.arange(cu[-1], device="cuda")
    sample = torch.bucketize(position, torch.tensor(cu[1:], device="cuda"), right=True)
    gap = position[:, None] - position[None, :]
    visible = (sample[:, None] == sample[None, :]) & (gap >= 0) & (gap < (window or 10**9))
    keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (k64, v64))
    weights = (0.11 * q64 @ keys.transpose(2, 3)).masked_fill(~visible, -torch.inf).softmax(-1)
    expected = (weights @ values).transpose(1, 2)
    atol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    probe = torch.randn(expected.shape, device="cuda", dtype=torch.float64, generator=generator)
    mine = torch.autograd.grad((out.double() * probe).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * probe).sum(), (q64, k64, v64))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=10 * atol)
