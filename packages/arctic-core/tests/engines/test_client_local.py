"""The local transport with the embedded engines: one client, one process, from sampling to a verified sync."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from arctic_core import (
    ArcticRLClientConfig,
    Batch,
    DistillLossConfig,
    GRPOLossConfig,
    ModelNotFoundError,
    Sample,
    SamplingParams,
    UnsupportedOperation,
    create_arctic_rl_client,
)


def test_generate_train_and_sync_in_one_process(tiny_model: str) -> None:
    config = ArcticRLClientConfig(model_name=tiny_model, training_gpus=1, sampling_gpus=1, device="cpu", max_seq_len=64)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True, seed=3)
    with create_arctic_rl_client(config) as client:
        (rows,) = client.generate([[1, 2, 3]], sampling, n=2)
        streamed = {item.index: item.completion for item in client.generate_stream([[1, 2, 3]], sampling, n=2)}
        assert [streamed[j].token_ids.tolist() for j in range(2)] == [row.token_ids.tolist() for row in rows]
        batch = Batch.from_samples(
            Sample(
                token_ids=[1, 2, 3, *row.token_ids],
                prompt_length=3,
                advantages=np.ones(5),
                old_logprobs=row.logprobs,
                sampler_logprobs=row.logprobs,
            )
            for row in rows
        )
        np.testing.assert_allclose(client.forward(batch).logprobs, batch.sampler_logprobs, rtol=0, atol=1e-4)
        client.forward_backward(batch, "grpo")
        assert client.step(lr=1e-3).policy_version == 1
        report = client.sync_weights(probe=[[1, 2, 3]])
        assert (report.version, "probe" in report.verified) == (1, True)
        assert client.generate([[1, 2]], sampling)[0][0].policy_version == 1
        with pytest.raises(UnsupportedOperation):
            client.reconnect_config()


def test_a_loss_on_the_client_and_one_by_name_step_alike(tiny_model: str) -> None:
    """Distillation from what ``forward(topk=...)`` reports of a teacher, and a policy loss given by its options."""
    from arctic_core.losses.evaluate import evaluate_loss

    config = ArcticRLClientConfig(model_name=tiny_model, training_gpus=1, device="cpu", reference=True)
    rng = np.random.default_rng(0)
    with create_arctic_rl_client(config) as client:
        batch = Batch.from_samples(
            Sample(token_ids=rng.integers(0, 512, 3 + n), prompt_length=3, advantages=rng.normal(size=n)) for n in (4, 9, 1)
        )
        teacher = client.forward(batch, model="reference", temperature=1.7, topk=5)
        batch = batch.replace(topk_ids=teacher.topk_ids, teacher_topk_logprobs=teacher.topk_logprobs)
        for loss in (DistillLossConfig(divergence="jsd"), GRPOLossConfig(on_policy=True, entropy_coef=0.1)):
            reported = client.forward_backward(batch, loss).metrics
            expected = client.step(lr=0.0).grad_norm
            result = evaluate_loss(batch, client.forward(batch, entropy=True, given_topk=True), loss)
            client.backward(batch, **result.gradients())
            assert client.step(lr=0.0).grad_norm == pytest.approx(expected, rel=1e-6)
            assert expected > 1e-2
            assert result.loss == pytest.approx(reported["loss"].sum, rel=1e-5)
            assert reported["all_masked_batches"].sum == 0


def test_a_job_that_cannot_start_leaves_no_thread() -> None:
    with pytest.raises(ModelNotFoundError):
        create_arctic_rl_client(ArcticRLClientConfig(model_name="/no/such/model", training_gpus=1, job="nowhere"))
    assert [thread.name for thread in threading.enumerate() if thread.name == "arctic-nowhere"] == []
