"""Shared prompts computed once in the torch engines: nothing but the cost changes. DeepSpeed: ``test_deepspeed_engine``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from arctic_core.backends import packed_scoring
from arctic_core.backends.base import RankSpec
from arctic_core.backends.group import TrainerGroup
from arctic_core.backends.rank import LocalRank
from arctic_core.backends.shared_check import shared_slice
from arctic_core.backends.torch_engine.log_prob import TorchLogProb
from arctic_core.backends.torch_engine.trainer import TorchTrainer
from arctic_core.config import ArcticRLClientConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import UnsupportedModelError
from arctic_core.losses.base import prepare_loss
from arctic_core.losses.inputs import loss_inputs
from arctic_core.losses.named import find_loss
from arctic_core.models import scoring, shared_prompts
from arctic_core.models.factory import load_causal_lm
from arctic_core.models.scoring import ScoringModule, pack
from arctic_core.models.shared_prompts import shared_forest
from arctic_core.protocol import NamedLoss
from arctic_kernels.zorro import PackedForest, use_forest
from arctic_kernels.zorro.testing import Float64Throughout

from .loss_cases import CASES, full_batch, gradients_outside, needs, shared_samples

SAVED = 80 + 80 + 100 + 170  # of the samples' 677 tokens


def make_engine(model: str, cls: type = TorchTrainer, **training: Any) -> Any:
    settings = {"training": {"optimizer": {"lr": 1e-2}} | training} if cls is TorchTrainer else {"log_prob": training}
    ranks = {"training_gpus": 1} if cls is TorchTrainer else {"log_prob_gpus": 1}
    config = ArcticRLClientConfig.parse({"model_name": model} | ranks | settings)
    name = "trainer" if cls is TorchTrainer else "log_prob"
    return cls(RankSpec(name, 0, 1, model, "cpu", "float32", config, threads=1))


@pytest.fixture(scope="module")
def engines(tiny_model: str) -> Iterator[dict[str, TorchTrainer]]:
    """Trainers by what they do with shared prompts; two of those that compute them once, and one that recomputes layers."""
    found = {
        "off": make_engine(tiny_model, zorro="off"),
        "on": make_engine(tiny_model, zorro="on", zorro_check=True),
        "auto": make_engine(tiny_model),
        "checkpointing": make_engine(tiny_model, gradient_checkpointing=True, zorro="on"),
    }
    for engine in found.values():
        engine.start()
    yield found
    for engine in found.values():
        engine.stop()


@pytest.fixture(scope="module")
def batch(engines: dict[str, TorchTrainer]) -> Batch:
    outcome = engines["off"].forward([Batch.from_samples(shared_samples())], entropy=False, temperature=None)
    return full_batch(outcome.logprobs_R, "shared")


def taken(*trainers: TorchTrainer) -> dict[str, np.ndarray]:
    """The gradient added up over trainers, which is dropped."""
    found: dict[str, np.ndarray] = {}
    for trainer in trainers:
        for name, parameter in trainer.module.model.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad.numpy().copy()
        trainer.zero_grad()
    return found


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float, name: str) -> None:
    largest = max(np.abs(value).max() for value in expected.values())
    assert largest > 0, name
    assert actual.keys() == expected.keys()
    for parameter, value in expected.items():
        np.testing.assert_allclose(actual[parameter], value, rtol=0, atol=tolerance * largest, err_msg=f"{name}: {parameter}")


# --- nothing changes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["on", "auto", "checkpointing"])
def test_every_loss_metric_and_gradient_by_name(engines: dict[str, TorchTrainer], batch: Batch, kind: str) -> None:
    for name, loss in CASES.items():
        expected = engines["off"].forward_backward([batch], loss, temperature=None)
        metrics = engines[kind].forward_backward([batch], loss, temperature=None)
        saved = metrics.pop("zorro_saved")
        assert (saved.sum, saved.count) == (SAVED, batch.lengths.sum())
        assert metrics.keys() == expected.keys(), name
        for metric, value in expected.items():
            assert metrics[metric].count == value.count, metric
            assert metrics[metric].sum == pytest.approx(value.sum, rel=1e-4, abs=1e-4), (name, metric)
        assert_close(taken(engines[kind]), taken(engines["off"]), 1e-5, name)


@pytest.mark.parametrize("own_head", [False, True])
def test_losses_and_gradients_in_float64(tiny_model: str, batch: Batch, own_head: bool) -> None:
    """The engine keeps gradients in float32, so this looks at the module; also where the model's own head makes the logits."""
    module = ScoringModule(load_causal_lm(tiny_model, dtype="float64", device="cpu"))
    module.head = None if own_head else module.head
    for name, loss in CASES.items():
        prepared = prepare_loss(find_loss(loss.name), loss)
        results = []
        for forest_tokens in (None, 8192):
            inputs = pack(batch, "cpu", topk_ids=prepared.needs_topk, forest_tokens=forest_tokens)
            assert inputs.tokens_saved == (SAVED if forest_tokens else 0)
            assert inputs.token_ids_T.shape == (1, batch.lengths.sum() - inputs.tokens_saved)
            module.zero_grad()
            with Float64Throughout():
                scores = module(inputs, prepared.needs_entropy)
                total = prepared.compute(loss_inputs(batch, prepared, *scores[:3])).loss
                total.backward()
            gradients = {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None}
            results.append((total.item(), gradients))
        assert results[1][0] == pytest.approx(results[0][0], rel=1e-10, abs=1e-10), name
        assert_close(results[1][1], results[0][1], 1e-10, name)


SCORES = [{"entropy": True}, {"entropy": False, "topk": 3}, {"entropy": True, "given_topk": True}]


@pytest.mark.parametrize("temperature", [None, 0.6])
@pytest.mark.parametrize("wanted", SCORES)
def test_scores_are_in_the_batchs_order(
    engines: dict[str, TorchTrainer], batch: Batch, wanted: dict[str, Any], temperature: float | None
) -> None:
    """Through a group that cuts the batch, and of one micro-batch; a sample stands for itself, wherever it is packed."""
    expected = engines["off"].forward([batch], temperature=temperature, **wanted)
    whole = engines["on"].forward([batch], temperature=temperature, **wanted)
    group = TrainerGroup([LocalRank(engines["on"]), LocalRank(engines["auto"])], deadline_s=60, micro_batch_tokens=200)
    group.shares_prompts = True
    assert group.shard(batch)[0].micro_batches > 1
    cut = asyncio.run(group.forward(batch, temperature=temperature, **wanted))
    for logprobs, entropy, topk_ids, topk_logprobs in (
        (whole.logprobs_R, whole.entropy_R, whole.topk_ids_RK, whole.topk_logprobs_RK),
        (cut.logprobs, cut.entropy, cut.topk_ids, cut.topk_logprobs),
    ):
        np.testing.assert_allclose(logprobs, expected.logprobs_R, rtol=0, atol=1e-5)
        for actual, value in ((entropy, expected.entropy_R), (topk_logprobs, expected.topk_logprobs_RK)):
            assert (actual is None) == (value is None)
            if value is not None:
                np.testing.assert_allclose(actual, value, rtol=0, atol=1e-5)
        assert np.array_equal(topk_ids, expected.topk_ids_RK)


@pytest.mark.parametrize("name", ["grpo", "distill", "gspo"])
def test_two_ranks_with_small_micro_batches_and_both_ways_to_a_gradient(
    engines: dict[str, TorchTrainer], batch: Batch, name: str
) -> None:
    loss, ranks = CASES[name], [engines["on"], engines["auto"]]
    engines["off"].forward_backward([batch], loss, temperature=None)
    expected = taken(engines["off"])
    group = TrainerGroup([LocalRank(rank) for rank in ranks], deadline_s=60, micro_batch_tokens=200)
    group.shares_prompts = True

    async def both() -> Any:
        metrics = await group.forward_backward(batch, loss, temperature=None)
        found = taken(*ranks)
        await group.zero_grad()
        scores = await group.forward(batch, temperature=None, **needs(loss))
        await group.backward(batch, *gradients_outside(batch, scores, loss, 1.0), temperature=None)
        return metrics, found, taken(*ranks)

    metrics, by_name, by_hand = asyncio.run(both())
    assert_close(by_name, expected, 1e-5, "by name")
    assert_close(by_hand, expected, 1e-5, "by hand")
    assert metrics["zorro_saved"].count == batch.lengths.sum()
    assert 0 < metrics["zorro_saved"].sum <= SAVED


def test_a_log_prob_engine_and_a_reference_share_too(tiny_model: str, engines: dict[str, TorchTrainer], batch: Batch) -> None:
    expected = engines["off"].forward([batch], entropy=True, temperature=None)
    engine = make_engine(tiny_model, TorchLogProb, zorro="on", zorro_check=True)
    engine.start()
    try:
        packed = engine._pack_all([batch, Batch.from_samples([])], None, False)
        assert [inputs.tokens_saved for inputs in packed] == [SAVED, 0]
        outcome = engine.forward([batch, Batch.from_samples([])], entropy=True, temperature=None)
    finally:
        engine.stop()
    np.testing.assert_allclose(outcome.logprobs_R, expected.logprobs_R, rtol=0, atol=1e-5)
    np.testing.assert_allclose(outcome.entropy_R, expected.entropy_R, rtol=0, atol=1e-5)


def test_a_batch_that_shares_nothing_is_computed_as_ever(engines: dict[str, TorchTrainer]) -> None:
    rng = np.random.default_rng(0)
    alone = Batch.from_samples([Sample(token_ids=rng.integers(0, 512, 90), prompt_length=80, group=i) for i in range(3)])
    outcomes = [engines[kind].forward([alone], entropy=True, temperature=None) for kind in ("off", "on")]
    assert np.array_equal(outcomes[0].logprobs_R, outcomes[1].logprobs_R)
    assert engines["on"]._pack(alone, None).forest is None


def test_short_prompts_are_shared_where_the_budget_was_planned_with_them(batch: Batch) -> None:
    """The cost model would leave ten common tokens alone."""
    rows = [Sample(token_ids=[*range(10), 20 + i], prompt_length=10) for i in range(4)]
    short = Batch.from_samples(rows)
    assert shared_forest(short, "cpu", 44) is None
    forest = shared_forest(short, "cpu", 43)
    assert forest is not None
    assert forest.num_tokens == 14
    assert shared_forest(batch.select([0]), "cpu", 1) is None


# --- which models, and the self-check -----------------------------------------------------------------------------------


@pytest.fixture
def with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have a layer that would carry a state along the sequence."""

    def load(*args: Any, **kwargs: Any) -> Any:
        model = load_causal_lm(*args, **kwargs)
        model.model.layers[1].self_attn.memory = nn.Conv1d(1, 1, 2)
        return model

    monkeypatch.setattr(packed_scoring, "load_causal_lm", load)


@pytest.mark.usefixtures("with_memory")
@pytest.mark.parametrize("cls", [TorchTrainer, TorchLogProb])
def test_on_refuses_a_model_at_start_and_names_the_layer(tiny_model: str, cls: type) -> None:
    engine = make_engine(tiny_model, cls, zorro="on")
    with pytest.raises(UnsupportedModelError, match=r"Qwen3Attention.* Conv1d at .*memory.* state") as caught:
        engine.start()
    assert "auto or off" in caught.value.remedy
    engine.stop()


@pytest.mark.usefixtures("with_memory")
def test_auto_computes_such_a_models_samples_one_by_one_and_says_so_once(
    tiny_model: str, batch: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    config = ArcticRLClientConfig(model_name=tiny_model, training_gpus=1, reference=True)
    engine = TorchTrainer(RankSpec("trainer", 0, 1, tiny_model, "cpu", "float32", config, threads=1))
    with caplog.at_level(logging.WARNING, "arctic_core.models.shared_prompts"):
        engine.start()
    try:
        (record,) = caplog.records
        assert "every sample on its own" in record.message
        assert "Conv1d" in record.message
        assert not engine.report().shares_prompts
        assert "zorro_saved" not in engine.forward_backward([batch], CASES["sft"], temperature=None)
    finally:
        engine.stop()


def test_a_backend_that_the_machine_lacks_is_refused_or_passed_over(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCTIC_FOREST_BACKEND", "fa4")
    with pytest.raises(UnsupportedModelError, match="fa4"):
        make_engine(tiny_model, zorro="on").start()
    engine = make_engine(tiny_model)
    engine.start()
    assert not engine.report().shares_prompts
    engine.stop()


@pytest.mark.parametrize("how", ["raises", "blind"])
def test_a_model_that_cannot_is_found_by_running_it(tiny_model: str, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def broken(model: nn.Module, forest: PackedForest) -> AbstractContextManager[None]:
        if how == "raises":
            raise RuntimeError("no kernel image is available")
        return use_forest(model, replace(forest, ancestors=()))

    monkeypatch.setattr(shared_prompts, "use_forest", broken)
    reason = "no kernel image" if how == "raises" else "its logits differ"
    with pytest.raises(UnsupportedModelError, match=reason):
        make_engine(tiny_model, zorro="on").start()
    engine = make_engine(tiny_model)
    engine.start()
    assert reason in engine._shared.reason
    assert not engine.report().shares_prompts
    assert not taken(engine)
    engine.stop()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples do not see the prompt that they share, as of the first real batch."""

    def use_another(model: nn.Module, forest: PackedForest) -> AbstractContextManager[None]:
        return use_forest(model, replace(forest, ancestors=()))

    monkeypatch.setattr(scoring, "use_forest", use_another)


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_the_self_check_finds_a_model_that_does_not_work(tiny_model: str, batch: Batch, call: str) -> None:
    engine = make_engine(tiny_model, zorro_check=True)
    engine.start()
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine.forward([batch], entropy=False, temperature=None),
        "forward_backward": lambda: engine.forward_backward([batch], NamedLoss(name="sft"), temperature=None),
    }
    try:
        engine.forward([batch.select([0])], entropy=False, temperature=None)  # nothing to check yet
        for _ in range(2):  # it does not go away
            with pytest.raises(UnsupportedModelError, match="differ from scores of each sample alone") as caught:
                calls[call]()
        assert "zorro to off" in caught.value.remedy
        assert not taken(engine)
    finally:
        engine.stop()


def test_the_self_check_takes_the_pair_that_shares_most_around_its_fork(batch: Batch) -> None:
    part = shared_slice(batch)
    first, second = part.samples()
    assert part.lengths.tolist() == [128 + 6, 128 + 10] or part.lengths.tolist() == [128 + 10, 128 + 6]
    assert np.array_equal(first.token_ids[:128], second.token_ids[:128])
    assert first.token_ids[128] != second.token_ids[128]
    assert part.prompt_lengths.tolist() == [1, 1]


def test_the_self_check_leaves_no_trace(tiny_model: str, batch: Batch) -> None:
    """Neither in a gradient that is being added up nor in the mode of the model."""
    found = []
    for check in (False, True):
        engine = make_engine(tiny_model, zorro_check=check)
        engine.start()
        engine.forward_backward([batch.select([3])], NamedLoss(name="sft"), temperature=None)
        engine.forward_backward([batch], NamedLoss(name="sft"), temperature=None)
        assert engine.policy.training
        found.append(taken(engine))
        engine.stop()
    for name, value in found[0].items():
        assert np.array_equal(found[1][name], value), name
    assert torch.is_grad_enabled()
