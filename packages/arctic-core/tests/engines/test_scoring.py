"""Scoring of packed rows: candidates beside the response tokens."""

import numpy as np
import pytest
import torch

from arctic_core.data import Batch, Sample
from arctic_core.errors import DataError
from arctic_core.models.factory import load_causal_lm
from arctic_core.models.scoring import ScoringModule, pack

LENGTHS = [(5, 4), (1, 0), (1, 3), (7, 2)]


def make_batch(width: int | None = None, **fields: float) -> Batch:
    rng = np.random.default_rng(0)
    samples = []
    for prompt, response in LENGTHS:
        ids = np.argsort(rng.random((response, 512)), axis=1)[:, :width].astype(np.int32)
        extra = fields if width is None else {**fields, "topk_ids": ids}
        samples.append(Sample(token_ids=rng.integers(0, 512, prompt + response), prompt_length=prompt, **extra))
    return Batch.from_samples(samples)


@pytest.fixture
def scorer(tiny_model: str) -> ScoringModule:
    return ScoringModule(load_causal_lm(tiny_model, dtype="float32", device="cpu"))


def row_logits(scorer: ScoringModule, batch: Batch) -> torch.Tensor:
    """Logits of one ordinary forward, at the rows that predict response tokens, divided by the temperature."""
    inputs = pack(batch, "cpu")
    output = scorer.model(
        input_ids=inputs.token_ids_T, position_ids=inputs.position_ids_T, cu_seqlens=inputs.cu_seqlens, use_cache=False
    )
    return output.logits[0, inputs.rows_R].double() / inputs.temperatures_R.double()[:, None]


def test_given_candidates_in_value_and_gradient(scorer: ScoringModule) -> None:
    batch = make_batch(5, temperature=0.6)
    weights = torch.linspace(-0.2, 0.2, 9 * 5).reshape(9, 5)

    def gradients(candidates_RK: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((weights * candidates_RK).sum(), list(scorer.parameters())))

    logprobs_R, entropy_R, candidates_RK, ids_RK = scorer(pack(batch, "cpu", topk_ids=True), True)
    expected_RV = row_logits(scorer, batch).log_softmax(-1)
    assert torch.equal(ids_RK, torch.from_numpy(batch.topk_ids).long())
    expected_RK = expected_RV.gather(1, ids_RK)
    torch.testing.assert_close(candidates_RK.double(), expected_RK, rtol=0, atol=1e-5)
    for mine, theirs in zip(gradients(candidates_RK), gradients(expected_RK), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    plain = scorer(pack(batch, "cpu"), True)
    assert plain[2] is None
    assert plain[3] is None
    assert torch.equal(plain[0], logprobs_R)
    assert torch.equal(plain[1], entropy_R)


def test_most_likely_tokens(scorer: ScoringModule) -> None:
    batch = make_batch(temperature=1.4)
    logprobs_R, entropy_R, candidates_RK, ids_RK = scorer(pack(batch, "cpu"), topk=7)
    expected = row_logits(scorer, batch).log_softmax(-1).topk(7, dim=-1)
    assert entropy_R is None
    assert logprobs_R.requires_grad
    assert not candidates_RK.requires_grad
    assert torch.equal(ids_RK, expected.indices)
    torch.testing.assert_close(candidates_RK.double(), expected.values, rtol=0, atol=1e-5)


def test_without_response_tokens_candidates_are_empty(scorer: ScoringModule) -> None:
    inputs = pack(Batch.from_samples([]), "cpu", topk_ids=True)
    _, _, candidates_RK, ids_RK = scorer(inputs)
    assert candidates_RK.shape == ids_RK.shape == (0, 0)
    _, _, candidates_RK, ids_RK = scorer(pack(Batch.from_samples([]), "cpu"), topk=4)
    assert candidates_RK.shape == ids_RK.shape == (0, 4)


def test_refusals(scorer: ScoringModule) -> None:
    with pytest.raises(DataError, match="no candidates"):
        pack(make_batch(), "cpu", topk_ids=True)
    for topk, batch in ((-1, make_batch()), (513, make_batch()), (2, make_batch(5))):
        with pytest.raises(DataError, match="topk"):
            scorer(pack(batch, "cpu", topk_ids=batch.topk_ids is not None), topk=topk)
