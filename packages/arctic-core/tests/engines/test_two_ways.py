"""The two ways to a gradient are one: a loss by name, and the same loss on the client between ``forward`` and ``backward``.

On the torch engine; the DeepSpeed engine's part is in ``test_deepspeed_engine``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from arctic_core.backends.base import RankSpec
from arctic_core.backends.group import TrainerGroup
from arctic_core.backends.packed import weighted_sum
from arctic_core.backends.rank import LocalRank
from arctic_core.backends.torch_engine.trainer import TorchTrainer
from arctic_core.config import ArcticRLClientConfig
from arctic_core.data import Batch
from arctic_core.errors import DataError, NonFiniteError
from arctic_core.losses.base import LossInputs, LossOutput
from arctic_core.losses.evaluate import evaluate_loss
from arctic_core.plugins.builtin import arctic_losses
from arctic_core.protocol import NamedLoss, Scores

from .loss_cases import CASES, K, bare_samples, full_batch, needs


@pytest.fixture(scope="module")
def trainers(tiny_model: str) -> Iterator[list[TorchTrainer]]:
    yield from start_two(tiny_model, "float32")


@pytest.fixture(scope="module")
def exact_trainers(tiny_model: str) -> Iterator[list[TorchTrainer]]:
    """The same with a model in float64, so that the order of its sums and the place of a division hardly matter."""
    yield from start_two(tiny_model, "float64")


def start_two(model: str, dtype: str) -> Iterator[list[TorchTrainer]]:
    """Two engines with the same weights: two ranks whose gradients we add up ourselves."""
    config = ArcticRLClientConfig(model_name=model, training_gpus=1)
    spec = RankSpec(
        engine="trainer", rank=0, world_size=1, model_path=model, device="cpu", dtype=dtype, config=config, threads=1
    )
    engines = [TorchTrainer(spec) for _ in range(2)]
    for engine in engines:
        engine.start()
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def batch(trainers: list[TorchTrainer]) -> Batch:
    return full_batch(trainers[0].forward([Batch.from_samples(bare_samples())], entropy=False, temperature=None).logprobs_R)


class Job:
    """A trainer group of one or two ranks whose gradient can be looked at."""

    def __init__(self, trainers: list[TorchTrainer], tokens: int) -> None:
        self.trainers = trainers
        self.group = TrainerGroup([LocalRank(t) for t in trainers], deadline_s=60, micro_batch_tokens=tokens)

    def forward(self, batch: Batch, loss: NamedLoss) -> Scores:
        return asyncio.run(self.group.forward(batch, temperature=None, **needs(loss)))

    def by_name(self, batches: list[Batch], loss: NamedLoss) -> tuple[dict[str, np.ndarray], dict[str, tuple[float, float]]]:
        async def run() -> list[dict]:
            return [await self.group.forward_backward(batch, loss, temperature=None) for batch in batches]

        (metrics,) = asyncio.run(run())[-1:]
        return self.taken(), {name: (metric.sum, metric.count) for name, metric in metrics.items()}

    def by_hand(self, batches: list[Batch], loss: NamedLoss, *, divide_last: bool = False) -> dict[str, np.ndarray]:
        found = [evaluate_loss(batch, self.forward(batch, loss), loss) for batch in batches]
        constant = loss.normalization == "constant" or loss.constant is not None
        divisor = found[0].divisor if constant else sum(result.divisor for result in found) or 1.0

        async def run() -> None:
            for batch, result in zip(batches, found, strict=True):
                await self.group.backward(batch, **result.gradients(1.0 if divide_last else divisor), temperature=None)

        asyncio.run(run())
        return {name: value / divisor if divide_last else value for name, value in self.taken().items()}

    def taken(self) -> dict[str, np.ndarray]:
        """The gradient a step would apply, summed over ranks; it is dropped."""
        divisor = self.group._divisor.value()
        total: dict[str, np.ndarray] = {}
        for trainer in self.trainers:
            for name, master in trainer._masters.items():
                if master.grad is not None:
                    total[name] = total.get(name, 0.0) + master.grad.numpy() / divisor
        asyncio.run(self.group.zero_grad())
        return total


def relative(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest difference as a part of the largest entry."""
    assert actual.keys() == expected.keys()
    largest = max(np.abs(value).max() for value in expected.values())
    return max(np.abs(actual[name] - value).max() for name, value in expected.items()) / largest


def test_every_built_in_loss_is_among_the_cases() -> None:
    assert {loss.name for loss in CASES.values()} == {definition.name for definition in arctic_losses()}


CUTS = pytest.mark.parametrize(("ranks", "tokens"), [(1, 1000), (1, 20), (2, 20)])


@CUTS
@pytest.mark.parametrize("case", CASES)
def test_the_two_ways_are_one(trainers: list[TorchTrainer], batch: Batch, case: str, ranks: int, tokens: int) -> None:
    """In float32, uncut and cut into micro-batches of 20 tokens, on one rank and two, divided where the engine divides.

    A division by 5 before the backward pass instead of after it rounds every product differently, by some 1e-6 in all. That
    is of float32, not of the two ways; how gradients are divided is compared in float64 below.
    """
    job = Job(trainers[:ranks], tokens)
    by_name, _ = job.by_name([batch], CASES[case])
    assert max(np.abs(value).max() for value in by_name.values()) > 1e-3
    assert relative(job.by_hand([batch], CASES[case], divide_last=True), by_name) < 1e-6


@CUTS
@pytest.mark.parametrize("case", CASES)
def test_no_cut_changes_a_step(exact_trainers: list[TorchTrainer], batch: Batch, case: str, ranks: int, tokens: int) -> None:
    """In float64, divided by the client: two batches per step as well as one, and every cut as good as none."""
    loss = CASES[case]
    job = Job(exact_trainers[:ranks], tokens)
    by_name, metrics = job.by_name([batch], loss)
    halves = [batch.select([6, 2, 0]), batch.select([1, 3, 4, 5])]
    assert relative(job.by_hand([batch], loss), by_name) < 1e-6
    assert relative(job.by_hand(halves, loss), by_name) < 1e-6
    whole, reference = Job(exact_trainers[:1], 1000).by_name([batch], loss)
    assert relative(by_name, whole) < 1e-6
    assert relative(job.by_name(halves, loss)[0], whole) < 1e-6
    assert metrics.keys() == reference.keys()
    for name, (total, count) in reference.items():
        assert metrics[name] == (pytest.approx(total, rel=1e-6, abs=1e-6), count), name


def test_an_evaluation_reports_what_the_engine_does(trainers: list[TorchTrainer], batch: Batch) -> None:
    job = Job(trainers[:1], 1000)
    loss = CASES["grpo-token"]
    _, metrics = job.by_name([batch], loss)
    result = evaluate_loss(batch, job.forward(batch, loss), loss)
    assert metrics.pop("all_masked_batches") == (0.0, 1.0)
    assert metrics.pop("zorro_saved") == (0.0, float(batch.lengths.sum()))
    assert {name: (m.sum, m.count) for name, m in result.metrics.items()} == {
        name: (pytest.approx(total, rel=1e-5, abs=1e-5), count) for name, (total, count) in metrics.items()
    }
    assert result.loss == result.metrics["loss"].sum
    assert result.divisor == batch.mask.sum()
    assert result.grad_topk_logprobs is None
    assert not result.grad_logprobs[batch.mask == 0].any()


def test_a_loss_of_ones_own(trainers: list[TorchTrainer], batch: Batch) -> None:
    def mine(inputs: LossInputs, config: object) -> LossOutput:
        assert inputs.topk_logprobs_RK is not None
        assert inputs.entropy_R is not None
        kept_R = inputs.mask_R
        loss = -inputs.logprobs_R[kept_R].sum() + inputs.entropy_R[kept_R].square().sum()
        return LossOutput(loss + inputs.topk_logprobs_RK[kept_R].exp().sum(), {"mine": (1.0, 2.0)})

    scores = asyncio.run(Job(trainers[:1], 1000).group.forward(batch, entropy=True, temperature=None, given_topk=True))
    result = evaluate_loss(batch, scores, mine)
    mask = batch.mask
    assert scores.entropy is not None
    assert scores.topk_logprobs is not None
    np.testing.assert_array_equal(result.grad_logprobs, -mask)
    np.testing.assert_allclose(result.grad_entropy, 2 * scores.entropy * mask, rtol=0, atol=1e-5)
    np.testing.assert_allclose(result.grad_topk_logprobs, np.exp(scores.topk_logprobs) * mask[:, None], rtol=0, atol=1e-6)
    assert (result.metrics["mine"].sum, result.metrics["mine"].count) == (1.0, 2.0)
    given = result.gradients(4.0)
    np.testing.assert_array_equal(given["grad_logprobs"], -mask / 4)
    with pytest.raises(DataError, match="cannot divide by 0"):
        result.gradients(0.0)


def test_where_nothing_is_trained_nothing_moves(trainers: list[TorchTrainer], batch: Batch) -> None:
    silent = batch.replace(loss_mask=np.zeros(batch.num_response_tokens))
    for loss in CASES.values():
        job = Job(trainers, 20)
        by_name, metrics = job.by_name([silent], loss)
        assert metrics["all_masked_batches"] == (1.0, 1.0)
        result = evaluate_loss(silent, job.forward(silent, loss), loss)
        assert result.loss == 0
        assert result.divisor == (loss.constant or 0)
        assert not any(value.any() for value in result.gradients().values() if isinstance(value, np.ndarray))
        assert not any(value.any() for value in by_name.values())
        assert not any(value.any() for value in job.by_hand([silent], loss).values())


@pytest.mark.parametrize("knows_k", [False, True])
def test_an_empty_batch_adds_nothing(trainers: list[TorchTrainer], batch: Batch, knows_k: bool) -> None:
    empty = batch.select([]) if knows_k else Batch.from_samples([])
    for loss in CASES.values():
        job = Job(trainers, 20)
        by_name, metrics = job.by_name([empty], loss)
        assert metrics["all_masked_batches"] == (1.0, 1.0)
        assert not any(value.any() for value in by_name.values())
        assert not any(value.any() for value in job.by_hand([empty], loss).values())


def test_scores_that_do_not_fit_are_named(trainers: list[TorchTrainer], batch: Batch) -> None:
    group = Job(trainers[:1], 1000).group
    scores = asyncio.run(group.forward(batch, entropy=True, temperature=None, given_topk=True))
    bare = Scores(logprobs=scores.logprobs, entropy=None)
    other = batch.replace(topk_ids=batch.topk_ids[:, ::-1])
    for loss, given, where, text in (
        (CASES["grpo"], bare, "scores.entropy", "entropy=True"),
        (CASES["distill"], bare, "scores.topk_logprobs", "given_topk=True"),
        (CASES["sft"], Scores(logprobs=scores.logprobs[1:], entropy=None), "scores.logprobs", "this very batch"),
    ):
        with pytest.raises(DataError) as caught:
            evaluate_loss(batch, given, loss)
        assert caught.value.where == where
        assert text in caught.value.remedy
    with pytest.raises(DataError, match="not the batch's topk_ids"):
        evaluate_loss(other, scores, CASES["distill"])
    with pytest.raises(DataError, match="needs ref_logprobs"):
        evaluate_loss(batch.replace(ref_logprobs=None), scores, CASES["grpo"])
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        evaluate_loss(batch.replace(advantages=np.full(batch.num_response_tokens, np.nan)), scores, CASES["ppo"])


# --- top-k scores -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [1000, 20])
def test_top_k_scores_come_in_the_callers_order(trainers: list[TorchTrainer], batch: Batch, ranks: int, tokens: int) -> None:
    """The most likely tokens, asked for again by their ids, have the same log-probs; all of the vocabulary sums to 1."""
    group = Job(trainers[:ranks], tokens).group
    most = asyncio.run(group.forward(batch, entropy=False, temperature=None, topk=K))
    assert most.topk_ids is not None
    assert most.topk_logprobs is not None
    assert (most.topk_ids.dtype, most.topk_logprobs.dtype) == (np.int32, np.float32)
    assert most.topk_ids.shape == most.topk_logprobs.shape == (batch.num_response_tokens, K)
    assert (np.diff(most.topk_logprobs, axis=1) <= 0).all()
    asked = asyncio.run(group.forward(batch.replace(topk_ids=most.topk_ids, teacher_topk_logprobs=None), **GIVEN))
    np.testing.assert_array_equal(asked.topk_ids, most.topk_ids)
    np.testing.assert_allclose(asked.topk_logprobs, most.topk_logprobs, rtol=0, atol=1e-6)
    everything = asyncio.run(group.forward(batch, entropy=False, temperature=None, topk=512)).topk_logprobs
    assert everything is not None
    np.testing.assert_allclose(np.exp(everything.astype(np.float64)).sum(axis=1), 1.0, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(everything[:, :K], most.topk_logprobs)


GIVEN = {"entropy": False, "temperature": None, "given_topk": True}


def test_top_k_that_cannot_be_is_refused(trainers: list[TorchTrainer], batch: Batch) -> None:
    group = Job(trainers, 20).group
    foreign = batch.topk_ids.copy()
    foreign[0, 0] = 512
    for given, arguments, text in (
        (batch, {"topk": 513}, "topk=513"),
        (batch, {"topk": 2, "given_topk": True}, "either the most likely"),
        (batch.replace(topk_ids=foreign), {"given_topk": True}, "token id 512"),
        (batch.replace(topk_ids=None, teacher_topk_logprobs=None), {"given_topk": True}, "topk_ids"),
    ):
        with pytest.raises(DataError, match=text):
            asyncio.run(group.forward(given, entropy=False, temperature=None, **arguments))
    zeros = np.zeros(batch.num_response_tokens, np.float32)
    with pytest.raises(DataError, match=r"shape \(\d+, 4\), got \(\d+, 3\)"):
        asyncio.run(group.backward(batch, zeros, None, np.zeros((len(zeros), 3), np.float32), temperature=None))
    with pytest.raises(DataError, match="token id 512"):
        asyncio.run(group.forward_backward(batch.replace(topk_ids=foreign), CASES["distill"], temperature=None))
    assert not group.accumulating


def test_a_zero_weight_silences_a_token_that_cannot_be() -> None:
    """A candidate of probability 0 has log-prob −inf; with weight 0 it reaches neither value nor gradient."""
    values_RK = torch.tensor([[-np.inf, -2.0], [-1.0, -np.inf]], requires_grad=True)
    total = weighted_sum(np.array([[0.0, 3.0], [0.5, 0.0]]), values_RK)
    total.backward()
    assert total.item() == -6.5
    assert values_RK.grad is not None
    assert values_RK.grad.tolist() == [[0.0, 3.0], [0.5, 0.0]]
