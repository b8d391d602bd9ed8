"""No cut of a batch changes a gradient: every loss, every normalisation; ranks, micro-batches, orders and host layouts.

Suffix legend: ``_R`` response tokens of a batch, ``_K`` tokens scored beside each of them, ``_B`` samples, ``_W`` padded width.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arctic_core.batching import plan_batch
from arctic_core.data import Batch, Sample
from arctic_core.errors import ConfigError
from arctic_core.losses.base import PreparedLoss, prepare_loss
from arctic_core.losses.inputs import loss_inputs
from arctic_core.losses.named import count_divisor
from arctic_core.padded import from_padded
from arctic_core.plugins.builtin import arctic_losses
from arctic_core.plugins.manager import get_registry
from arctic_core.protocol import NamedLoss

K, VOCABULARY = 3, 40
DEFINITIONS = {definition.name: definition for definition in arctic_losses()}
TOKEN_VALUES = ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "teacher_logprobs")


def choices() -> list[NamedLoss]:
    """Every loss with every normalisation that it allows, under both reductions where it has one."""
    found = []
    for name, definition in DEFINITIONS.items():
        reductions = ("sum", "mean") if "sequence_reduction" in definition.config_model.model_fields else (None,)
        for reduction in reductions:
            extra = {"kl_coef": 0.1, "entropy_coef": 0.02, "mismatch": "tis"} if reduction else {}
            options = extra | ({"sequence_reduction": reduction} if reduction else {})
            for normalization in ("token", "sequence", "constant"):
                constant = 37.0 if normalization == "constant" else None
                loss = NamedLoss(name=name, options=options, normalization=normalization, constant=constant)
                try:
                    prepare_loss(definition, loss)
                except ConfigError:
                    continue
                found.append(loss)
    return found


CHOICES = choices()
NAMES = [f"{loss.name}-{loss.options.get('sequence_reduction', 'plain')}-{loss.normalization}" for loss in CHOICES]


def make_batch(shapes: list[tuple[int, int, int]], seed: int) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray]:
    """Samples of (group, prompt, response), and log-probs ``[R]``, entropies ``[R]``, log-probs of candidates ``[R, K]``."""
    rng = np.random.default_rng(seed)
    samples = []
    for group, prompt, response in shapes:
        values = {name: -rng.exponential(0.5, response) for name in TOKEN_VALUES}
        mask = rng.random(response) < 0.7
        for name in TOKEN_VALUES:
            values[name] = np.where(mask, values[name], rng.choice([np.nan, np.inf, 1e3, -1e3], response))
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCABULARY, prompt + response),
                prompt_length=prompt,
                group=str(group),
                loss_mask=mask,
                topk_ids=np.stack([rng.permutation(VOCABULARY)[:K] for _ in range(response)]).reshape(-1, K)
                if response
                else np.zeros((0, K), np.int32),
                teacher_topk_logprobs=np.log(rng.dirichlet(np.ones(K + 1), response)[:, :K]),
                **values,
            )
        )
    batch = Batch.from_samples(samples)
    size = batch.num_response_tokens
    student_RK = np.log(rng.dirichlet(np.ones(K + 1), size)[:, :K])
    return batch, -rng.exponential(0.5, size), rng.exponential(1.0, size), student_RK


def gradient(prepared: PreparedLoss, batch: Batch, scores: tuple[np.ndarray, ...]) -> tuple[float, np.ndarray]:
    """The summed loss and its gradient ``[R, 2 + K]`` with respect to the scores; none is touched where none is trained."""
    leaves = [torch.from_numpy(np.array(score, np.float64)).requires_grad_() for score in scores]
    loss = prepared.compute(loss_inputs(batch, prepared, *leaves)).loss
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.item(), torch.cat([found[0][:, None], found[1][:, None], found[2].reshape(-1, K)], 1).numpy()


def prepared_loss(loss: NamedLoss) -> PreparedLoss:
    return prepare_loss(get_registry().loss(loss.name), loss)


SHAPES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=7)


@pytest.mark.parametrize("loss", CHOICES, ids=NAMES)
@settings(max_examples=12, deadline=None)
@given(shapes=SHAPES, ranks=st.integers(1, 4), budget=st.integers(9, 30), seed=st.integers(0, 2**31))
def test_ranks_and_micro_batches_change_nothing(
    loss: NamedLoss, shapes: list[tuple[int, int, int]], ranks: int, budget: int, seed: int
) -> None:
    prepared = prepared_loss(loss)
    batch, *scores = make_batch(shapes, seed)
    expected, whole = gradient(prepared, batch, tuple(scores))
    plan = plan_batch(batch, ranks=ranks, max_tokens=budget)
    total, divisor, outputs = 0.0, 0.0, []
    for rank in plan.ranks:
        parts = [np.zeros((0, whole.shape[1]))]
        for indices in rank:
            part = batch.select(indices)
            taken = tuple(np.concatenate([score[:0], *(batch.split(score)[i] for i in indices)]) for score in scores)
            value, found = gradient(prepared, part, taken)
            total += value
            divisor += 0.0 if loss.normalization == "constant" else count_divisor(part, prepared)
            parts.append(found)
        outputs.append(np.concatenate(parts))
    assert np.isfinite(whole).all()
    assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(plan.merge(batch, outputs), whole, rtol=1e-9, atol=1e-12)
    if loss.normalization != "constant":
        assert divisor == count_divisor(batch, prepared)


@pytest.mark.parametrize("loss", CHOICES, ids=NAMES)
@pytest.mark.parametrize("wider", [0, 5])
def test_the_padding_of_the_host_changes_nothing(loss: NamedLoss, wider: int) -> None:
    prepared = prepared_loss(loss)
    batch, *scores = make_batch([(0, 2, 3), (0, 2, 0), (1, 4, 5), (2, 1, 1)], 7)
    expected, whole = gradient(prepared, batch, tuple(scores))
    width, prompt_width = int(batch.response_lengths.max()) + wider, int(batch.prompt_lengths.max()) + wider
    rows, columns = np.arange(len(batch))[:, None], np.arange(width)[None]
    mask_BW = columns < batch.response_lengths[rows]
    prompt_mask = np.arange(prompt_width)[None] >= prompt_width - batch.prompt_lengths[rows]
    prompts, responses = np.full(prompt_mask.shape, 3), np.full(mask_BW.shape, 3)
    is_prompt = np.concatenate([np.arange(n) < p for n, p in zip(batch.lengths, batch.prompt_lengths, strict=True)])
    prompts[prompt_mask], responses[mask_BW] = batch.token_ids[is_prompt], batch.token_ids[~is_prompt]

    def padded(values: np.ndarray) -> np.ndarray:
        out = np.full((*mask_BW.shape, *values.shape[1:]), 0 if values.dtype.kind == "i" else np.nan, values.dtype)
        out[mask_BW] = values
        return out

    fields = {name: padded(getattr(batch, name)) for name in (*TOKEN_VALUES, "topk_ids", "teacher_topk_logprobs")}
    again = from_padded(
        prompts, prompt_mask, responses, mask_BW, groups=batch.groups,
        fields=fields | {"loss_mask": np.nan_to_num(padded(batch.mask))},
    ).batch  # fmt: skip
    value, found = gradient(prepared, again, tuple(scores))
    assert value == pytest.approx(expected)
    np.testing.assert_array_equal(found, whole)
    assert count_divisor(again, prepared) == count_divisor(batch, prepared)
