"""The torch engine: scores, gradients that do not depend on how a batch is cut, AdamW, checkpoints, export."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from arctic_core.backends.base import RankSpec
from arctic_core.backends.torch_engine.log_prob import TorchLogProb
from arctic_core.backends.torch_engine.trainer import TorchTrainer
from arctic_core.batching import plan_batch
from arctic_core.config import ArcticRLClientConfig
from arctic_core.config.losses import SFTLossConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    InvalidStateError,
    NonFiniteError,
    PluginError,
    UnsupportedOperation,
)
from arctic_core.losses.base import LossDefinition, LossOutput
from arctic_core.losses.sft import sft_loss
from arctic_core.plugins.manager import get_registry
from arctic_core.protocol import RESTORE_ALL, NamedLoss

GRPO = NamedLoss(
    name="grpo",
    options={"kl_coef": 0.1, "entropy_coef": 0.02, "clip_high": 0.3, "sequence_reduction": "sum"},
    normalization="token",
)
ANYTHING = {"entropy": True, "temperature": None}


def make_batch(trainer: TorchTrainer, seed: int = 0) -> Batch:
    """Ragged lengths, interleaved groups, an empty response, a group of one, masked tokens that hold NaN."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, (prompt, response) in enumerate([(5, 8), (3, 1), (9, 0), (2, 21), (1, 5), (7, 3), (4, 13), (1, 1), (6, 2)]):
        mask = (rng.random(response) < 0.8).astype(np.float32)
        advantages = rng.normal(size=response)
        advantages[mask == 0] = np.nan
        samples.append(
            Sample(
                token_ids=rng.integers(0, 512, prompt + response),
                prompt_length=prompt,
                group=[0, 1, 0, 1, 2, 0, 1, 0, 0][i],
                loss_mask=mask,
                advantages=advantages,
                temperature=[1.0, 0.7, 1.3][i % 3],
            )
        )
    batch = Batch.from_samples(samples)
    logprobs = trainer.forward([batch], entropy=False, temperature=None).logprobs_R
    old, ref = logprobs + 0.3 * rng.normal(size=(2, len(logprobs)))
    return batch.replace(old_logprobs=old, ref_logprobs=ref)


@pytest.fixture
def start(tiny_model: str) -> Iterator[Callable[..., Any]]:
    """Start engines that are stopped at the end of the test."""
    engines: list[Any] = []

    def start_one(cls: type = TorchTrainer, *, model: str = tiny_model, dtype: str = "float32", **config: Any) -> Any:
        training = {"optimizer": {"lr": 1e-2}, "max_grad_norm": 0.0} | config.pop("training", {})
        settings = ArcticRLClientConfig(model_name=model, training_gpus=1, training=training, **config)
        name = "trainer" if cls is TorchTrainer else "log_prob"
        spec = RankSpec(
            engine=name, rank=0, world_size=1, model_path=model, device="cpu", dtype=dtype, config=settings, threads=1
        )
        engine = cls(spec)
        engine.start()
        engines.append(engine)
        return engine

    yield start_one
    for engine in engines:
        engine.stop()


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in trainer.module.model.named_parameters()}


def parameters(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.module.model.named_parameters()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def cut(batch: Batch, count: int, order: Sequence[int] | None = None) -> list[Batch]:
    chosen = batch if order is None else batch.select(order)
    plan = plan_batch(chosen, ranks=1, max_tokens=10_000, micro_batches=count)
    return [chosen.select(indices) for indices in plan.ranks[0]]


# --- scores -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [TorchTrainer, TorchLogProb])
def test_scores_equal_an_ordinary_forward_per_sample(start: Callable, tiny_model: str, cls: type) -> None:
    engine = start(cls)
    batch = make_batch(engine)
    outcome = engine.forward([batch.select([0, 1, 2]), Batch.from_samples([]), batch.select(range(3, 9))], **ANYTHING)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    expected = []
    for sample in batch.samples():
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
        scores = (logits / sample.temperature).log_softmax(-1)
        expected += [scores[i - 1, sample.token_ids[i]].item() for i in range(sample.prompt_length, len(sample.token_ids))]
    np.testing.assert_allclose(outcome.logprobs_R, expected, rtol=0, atol=1e-5)
    assert outcome.logprobs_R.dtype == outcome.entropy_R.dtype == np.float32
    assert (outcome.entropy_R > 0).all()
    assert engine.forward([batch], entropy=False, temperature=None).entropy_R is None
    assert engine.forward([], **ANYTHING).logprobs_R.shape == (0,)


def test_the_reference_stays_what_the_model_was(start: Callable) -> None:
    trainer = start(reference=True)
    batch = make_batch(trainer)
    before = trainer.forward([batch], **ANYTHING).logprobs_R
    trainer.forward_backward([batch], GRPO, temperature=None)
    trainer.step(divisor=10.0, lr=None, max_grad_norm=None)
    assert np.array_equal(trainer.forward_reference([batch], **ANYTHING).logprobs_R, before)
    assert np.abs(trainer.forward([batch], **ANYTHING).logprobs_R - before).max() > 1e-3


def test_without_a_reference_asking_for_it_is_refused(start: Callable) -> None:
    with pytest.raises(InvalidStateError, match="no reference"):
        start().forward_reference([], **ANYTHING)


def test_foreign_token_ids_are_refused(start: Callable) -> None:
    rows = [Sample(token_ids=[1, last], prompt_length=1) for last in (511, 512)]
    with pytest.raises(DataError, match=r"sample 1 .* token id 512"):
        start().forward([Batch.from_samples(rows)], **ANYTHING)


# --- gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gradient_does_not_depend_on_the_split(start: Callable, count: int, shuffled: bool) -> None:
    trainer, other = start(), start()
    batch = make_batch(trainer)
    metrics = trainer.forward_backward([batch], GRPO, temperature=None)
    order = np.random.default_rng(count).permutation(len(batch)) if shuffled else None
    split = other.forward_backward(cut(batch, count, order), GRPO, temperature=None)
    trained = float(batch.mask.sum())
    for reported in (metrics, split):
        saved = reported.pop("zorro_saved")
        assert (saved.sum, saved.count) == (0, batch.lengths.sum())
    scaled = [{name: grad / trained for name, grad in gradients(t).items()} for t in (other, trainer)]
    assert max(grad.abs().max() for grad in scaled[1].values()) > 1e-3
    assert_close(scaled[0], scaled[1], atol=1e-6)
    for name, metric in metrics.items():
        assert split[name].count == metric.count == trained
        assert split[name].sum == pytest.approx(metric.sum, abs=1e-3), name


def test_gradient_is_that_of_autograd_on_a_padded_batch(start: Callable, tiny_model: str) -> None:
    """The whole loss written against transformers' own forward in float64, with padding, masks and eager attention.

    The largest entry is 0.7. Here float32 leaves the engine within 8e-7 of the oracle (a float32 oracle is itself 2e-6 off);
    a wrong mask, label, temperature or clip bound moves entries by more than 1e-3.
    """
    trainer = start()
    batch = make_batch(trainer)
    trainer.forward_backward([batch], GRPO, temperature=None)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64, attn_implementation="eager")
    width = int(batch.lengths.max())
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for i, sample in enumerate(batch.samples()):
        ids[i, : len(sample.token_ids)] = torch.from_numpy(sample.token_ids.astype(np.int64))
        mask[i, : len(sample.token_ids)] = 1
    logits = model(ids, attention_mask=mask).logits
    total = torch.zeros((), dtype=torch.float64)
    for i, s in enumerate(batch.samples()):
        for j in np.flatnonzero(s.loss_mask):
            position = s.prompt_length + j
            logp = (logits[i, position - 1] / s.temperature).log_softmax(-1)
            ratio = (logp[ids[i, position]] - s.old_logprobs[j].item()).exp()
            gain = torch.minimum(ratio * s.advantages[j].item(), ratio.clamp(0.8, 1.3) * s.advantages[j].item())
            gap = s.ref_logprobs[j].item() - logp[ids[i, position]]
            entropy = -(logp.exp() * logp).sum()
            total = total - gain + 0.1 * (gap.exp() - 1 - gap) - 0.02 * entropy
    total.backward()
    scale = float(batch.mask.sum())
    expected = {name: p.grad / scale for name, p in model.named_parameters()}
    assert_close({name: g.double() / scale for name, g in gradients(trainer).items()}, expected, atol=2e-6)


def test_backward_checks_the_shapes_of_its_weights(start: Callable) -> None:
    trainer = start()
    batch = make_batch(trainer)
    with pytest.raises(DataError, match=r"micro-batch 0 has 54 response tokens .* got \(3,\)"):
        trainer.backward([batch], [np.zeros(3, np.float32)], None, temperature=None)


def test_gradient_checkpointing_changes_nothing(start: Callable) -> None:
    plain, checkpointed = start(), start(training={"gradient_checkpointing": True})
    assert checkpointed.module.model.is_gradient_checkpointing
    batch = make_batch(plain)
    for trainer in (plain, checkpointed):
        trainer.forward_backward([batch], GRPO, temperature=None)
    assert_close(gradients(checkpointed), gradients(plain), atol=1e-5)


def test_temperature_of_the_call_wins(start: Callable) -> None:
    trainer, other = start(), start()
    batch = make_batch(trainer)
    trainer.forward_backward([batch], GRPO, temperature=0.9)
    other.forward_backward([batch.replace(temperatures=np.full(len(batch), 0.9, np.float32))], GRPO, temperature=None)
    assert_close(gradients(other), gradients(trainer), atol=1e-7)


# --- what a loss is refused ---------------------------------------------------------------------------------------------


def test_missing_fields_and_bad_options_are_named(start: Callable) -> None:
    trainer = start()
    batch = make_batch(trainer)
    for field in ("advantages", "old_logprobs", "ref_logprobs"):
        with pytest.raises(DataError, match=f"needs {field}"):
            trainer.forward_backward([batch.replace(**{field: None})], GRPO, temperature=None)
    trainer.forward_backward([batch.replace(ref_logprobs=None)], NamedLoss(name="grpo"), temperature=None)
    with pytest.raises(ConfigError, match="clip"):
        trainer.forward_backward([batch], NamedLoss(name="grpo", options={"clip": 0.1}), temperature=None)
    with pytest.raises(ConfigError, match="no loss named 'nope'"):
        trainer.forward_backward([batch], NamedLoss(name="nope"), temperature=None)
    with pytest.raises(DataError, match="0 and 1 only"):
        trainer.forward_backward([batch.replace(loss_mask=np.full(54, 0.5))], GRPO, temperature=None)


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        (LossDefinition("odd", SFTLossConfig, lambda inputs, c: LossOutput(inputs.logprobs_R)), r"shape \(54,\)"),
        (LossDefinition("odd", SFTLossConfig, lambda inputs, c: LossOutput(torch.zeros(()))), "requires_grad=False"),
        (LossDefinition("odd", SFTLossConfig, sft_loss, requires=("rewards",)), "'rewards'"),
        (LossDefinition("odd", SFTLossConfig, lambda inputs, c: inputs.logprobs_R.sum()), "returned a Tensor"),
        (LossDefinition("odd", SFTLossConfig, lambda inputs, c: LossOutput(3.0)), "LossOutput of a float"),
        (LossDefinition("odd", SFTLossConfig, lambda inputs, c: LossOutput(inputs.logprobs_R.sum(), {"a": 1.0})), "no pairs"),
        (LossDefinition("odd", SFTLossConfig, lambda inputs, c: {}["key"]), "raised KeyError: 'key'"),
    ],
)
def test_a_plugins_loss_that_breaks_the_contract_is_named(
    start: Callable, monkeypatch: pytest.MonkeyPatch, definition: LossDefinition, text: str
) -> None:
    trainer = start()
    batch = make_batch(trainer)
    monkeypatch.setitem(get_registry()._definitions["arctic_losses"], "odd", (definition, "test"))
    with pytest.raises(PluginError, match=text) as caught:
        trainer.forward_backward([batch], NamedLoss(name="odd"), temperature=None)
    assert "odd" in caught.value.where


def test_a_nan_loss_drops_the_gradient_and_changes_nothing(start: Callable) -> None:
    trainer = start()
    batch = make_batch(trainer)
    before = parameters(trainer)
    advantages = batch.advantages.copy()
    advantages[np.flatnonzero(batch.mask)[0]] = np.nan
    with pytest.raises(NonFiniteError, match="micro-batch 1 is nan"):
        trainer.forward_backward([batch, batch.replace(advantages=advantages)], GRPO, temperature=None)
    assert all(parameter.grad is None for parameter in trainer.module.parameters())
    with pytest.raises(InvalidStateError, match="no gradient"):
        trainer.step(divisor=1.0, lr=None, max_grad_norm=None)
    assert_close(parameters(trainer), before, atol=0)


def test_an_infinite_gradient_is_not_applied(start: Callable) -> None:
    trainer = start()
    batch = make_batch(trainer)
    before = parameters(trainer)
    trainer.forward_backward([batch], GRPO, temperature=None)
    trainer.module.model.lm_head.weight.grad[3, 3] = np.inf
    with pytest.raises(NonFiniteError, match="norm is inf"):
        trainer.step(divisor=1.0, lr=None, max_grad_norm=None)
    assert_close(parameters(trainer), before, atol=0)
    trainer.forward_backward([batch], GRPO, temperature=None)
    assert trainer.step(divisor=1.0, lr=None, max_grad_norm=None).step == 1


# --- the step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_step_is_torch_adamw_on_the_mean_gradient(start: Callable, tiny_model: str, max_norm: float) -> None:
    optimizer = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    schedule = {"type": "linear", "total_steps": 4, "warmup_steps": 2}
    trainer = start(training={"optimizer": optimizer, "schedule": schedule, "max_grad_norm": max_norm})
    twin = start()
    reference = torch.optim.AdamW(twin.module.parameters(), **optimizer)
    for k, rate in enumerate([1.5e-3, 3e-3, 3e-3]):
        batch = make_batch(trainer, k)
        divisor = float(batch.mask.sum())
        for engine in (trainer, twin):
            engine.forward_backward(cut(batch, 2), GRPO, temperature=None)
        outcome = trainer.step(divisor=divisor, lr=None, max_grad_norm=None)
        for parameter in twin.module.parameters():
            parameter.grad /= divisor
        norm = torch.nn.utils.clip_grad_norm_(twin.module.parameters(), max_norm or float("inf"))
        reference.param_groups[0]["lr"] = rate
        reference.step()
        twin.zero_grad()
        assert (outcome.step, outcome.lr) == (k + 1, pytest.approx(rate))
        assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert norm > 0.05, "the smaller bound must clip"
    assert_close(parameters(trainer), parameters(twin), atol=1e-6)


def test_step_overrides_and_refusals(start: Callable) -> None:
    trainer = start()
    batch = make_batch(trainer)
    with pytest.raises(InvalidStateError):
        trainer.step(divisor=1.0, lr=None, max_grad_norm=None)
    trainer.forward_backward([batch], GRPO, temperature=None)
    with pytest.raises(DataError, match="divide"):
        trainer.step(divisor=0.0, lr=None, max_grad_norm=None)
    before = parameters(trainer)
    assert trainer.step(divisor=1.0, lr=0.0, max_grad_norm=None).lr == 0.0
    assert_close(parameters(trainer), before, atol=0)


def test_a_batch_with_nothing_to_train_is_a_zero_gradient(start: Callable) -> None:
    trainer = start()
    batch = make_batch(trainer)
    masked = batch.replace(loss_mask=np.zeros(54, np.float32))
    metrics = trainer.forward_backward([masked, Batch.from_samples([])], GRPO, temperature=None)
    assert metrics["loss"].count == metrics["loss"].sum == 0
    before = parameters(trainer)
    assert trainer.step(divisor=1.0, lr=None, max_grad_norm=None).grad_norm == 0
    assert_close(parameters(trainer), before, atol=0)


def test_bfloat16_updates_float32_masters(start: Callable) -> None:
    """Updates far below bfloat16's resolution add up in the masters; the model is their rounded copy."""
    trainer = start(dtype="bfloat16", training={"optimizer": {"lr": 1e-6}})
    batch = make_batch(trainer)
    before = {name: value.float() for name, value in parameters(trainer).items()}
    for _ in range(3):
        trainer.forward_backward(cut(batch, 2), GRPO, temperature=None)
        trainer.step(divisor=float(batch.mask.sum()), lr=None, max_grad_norm=None)
    for name, value in parameters(trainer).items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, trainer._masters[name].to(torch.bfloat16)), name
    moved = torch.cat([(trainer._masters[name] - value).flatten().abs() for name, value in before.items()])
    assert (moved > 1e-7).float().mean() > 0.5
    assert moved.max() < 4e-6


# --- checkpoints and export ---------------------------------------------------------------------------------------------


def train(trainer: TorchTrainer, steps: Sequence[int]) -> list[tuple]:
    seen = []
    for k in steps:
        batch = make_batch(trainer, k)
        metrics = trainer.forward_backward([batch], GRPO, temperature=None)
        seen.append((metrics["loss"].sum, trainer.step(divisor=float(batch.mask.sum()), lr=None, max_grad_norm=None)))
    return seen


@pytest.mark.parametrize(("saved_after", "dtype"), [(0, "float32"), (2, "float32"), (4, "float32"), (2, "bfloat16")])
def test_resume_goes_on_as_if_never_stopped(start: Callable, tmp_path: Path, saved_after: int, dtype: str) -> None:
    settings = {"training": {"schedule": {"type": "cosine", "total_steps": 6, "warmup_steps": 2}}, "dtype": dtype}
    whole = start(**settings)
    train(whole, range(saved_after))
    whole.save(str(tmp_path))
    drawn = torch.rand(3)
    expected = train(whole, range(saved_after, 5))

    resumed = start(**settings)
    train(resumed, [9])
    assert resumed.load(str(tmp_path), RESTORE_ALL) == saved_after
    assert torch.equal(torch.rand(3), drawn)
    assert train(resumed, range(saved_after, 5)) == expected
    assert_close(parameters(resumed), parameters(whole), atol=0)


def test_partial_restore(start: Callable, tmp_path: Path) -> None:
    trainer = start(training={"schedule": {"type": "constant", "warmup_steps": 10}})
    train(trainer, range(3))
    trainer.save(str(tmp_path))
    other = start(training={"schedule": {"type": "constant", "warmup_steps": 10}})
    assert other.load(str(tmp_path), ("weights",)) == 0
    assert_close(parameters(other), parameters(trainer), atol=0)
    assert train(other, [0])[0][1].lr == pytest.approx(1e-2 * 1 / 10)
    assert other.load(str(tmp_path), ("scheduler",)) == 1
    assert train(other, [0])[0][1].lr == pytest.approx(1e-2 * 4 / 10)


def test_bad_checkpoints_are_refused_before_anything_changes(start: Callable, tmp_path: Path, tiny_tied_model: str) -> None:
    trainer = start()
    with pytest.raises(CheckpointError, match="no readable trainer state"):
        trainer.load(str(tmp_path), RESTORE_ALL)
    train(trainer, [0])
    trainer.save(str(tmp_path))
    with pytest.raises(CheckpointError, match="another model"):
        start(model=tiny_tied_model).load(str(tmp_path), RESTORE_ALL)
    other = start()
    before = parameters(other)
    damaged = tmp_path / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        other.load(str(tmp_path), RESTORE_ALL)
    assert_close(parameters(other), before, atol=0)
    state = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps(state | {"engine": "deepspeed"}))
    with pytest.raises(CheckpointError, match="'deepspeed'"):
        other.load(str(tmp_path), ("step",))


@pytest.mark.parametrize("fixture", ["tiny_model", "tiny_tied_model"])
def test_export_is_a_model_that_transformers_loads(
    start: Callable, tmp_path: Path, fixture: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(fixture)
    trainer = start(model=path)
    train(trainer, [0])
    tensors, size = trainer.export_hf(str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    assert tensors == len(weights) == len(trainer.manifest.tensors)
    assert size == sum(value.nbytes for value in weights.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._attn_implementation == "sdpa"
    assert_close(dict(model.named_parameters()), parameters(trainer), atol=0)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (path, tmp_path)]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert tokenizers[0]("what is 1 + 2 ?")["input_ids"] == tokenizers[1]("what is 1 + 2 ?")["input_ids"]


@pytest.mark.parametrize("carrier", ["file", "shared_memory"])
@pytest.mark.parametrize("fixture", ["tiny_model", "tiny_tied_model"])
def test_buckets_carry_the_weights(
    start: Callable, tmp_path: Path, fixture: str, carrier: str, request: pytest.FixtureRequest
) -> None:
    directory = str(tmp_path) if carrier == "file" else None
    sync = {"carrier": carrier, "directory": directory}
    trainer = start(model=request.getfixturevalue(fixture), sampling_gpus=1, weight_sync=sync)
    train(trainer, [0])
    plan = trainer.weight_plan(bucket_bytes=100_000)
    assert len(plan.buckets) > 2
    expected = parameters(trainer)
    receiver = get_registry().carrier(carrier).create(directory)
    for index, members in enumerate(plan.buckets):
        ref = trainer.export_bucket(plan, index, carrier)
        with receiver.open(ref) as view:
            raw = bytes(view)
        start_byte = 0
        for i in members:
            meta = plan.tensors[i]
            part = torch.frombuffer(bytearray(raw[start_byte : start_byte + meta.nbytes]), dtype=torch.float32)
            assert torch.equal(part.reshape(meta.shape), expected.pop(meta.name)), meta.name
            start_byte += meta.nbytes
        assert start_byte == ref.nbytes == len(raw)
    assert not expected
    trainer.release_buckets()
    trainer.release_buckets()


# --- the engine itself --------------------------------------------------------------------------------------------------


def test_report_and_capabilities(start: Callable) -> None:
    trainer = start()
    report = trainer.report()
    assert (report.implementation, report.device, report.dtype) == ("torch", "cpu", "float32")
    assert report.memory_bytes > 50 * 2**20
    assert "sleep" not in report.capabilities
    assert "sleep" in TorchTrainer.capabilities("cuda")
    for call in (lambda: trainer.sleep(1), trainer.wake):
        with pytest.raises(UnsupportedOperation, match="on cpu"):
            call()
    assert start(TorchLogProb).report().capabilities == ("forward",)


def test_stop_is_idempotent_even_before_start(start: Callable) -> None:
    trainer = start()
    trainer.stop()
    trainer.stop()
    TorchTrainer(dataclasses.replace(trainer.spec)).stop()
