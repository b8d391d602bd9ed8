"""A reference model on ranks of its own, and an export that transformers and vLLM load."""

from __future__ import annotations

import numpy as np
import pytest

from arctic_core import ArcticRLClientConfig, Batch, NamedLoss, Sample, SamplingParams, create_arctic_rl_client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GRPO = NamedLoss(name="grpo", options={"on_policy": True, "kl_coef": 0.1})


def test_the_reference_stays_and_the_export_loads(ray_config, tiny_tied_model, tmp_path):
    config = ray_config(
        model_name=tiny_tied_model, sampling_gpus=0, log_prob_gpus=2, log_prob={"zero_stage": 3}, reference=True
    )
    rows = [Sample(token_ids=[1, 2, 3, 4 + i], prompt_length=2, advantages=[1.0, -1.0], group=i) for i in range(3)]
    batch = Batch.from_samples(rows)
    with create_arctic_rl_client(config) as client:
        start = client.forward(batch).logprobs
        reference = client.forward(batch, model="reference").logprobs
        np.testing.assert_allclose(reference, start, rtol=0, atol=1e-5)
        client.forward_backward(batch.replace(ref_logprobs=reference), GRPO)
        client.step()
        trained = client.forward(batch).logprobs
        assert np.abs(trained - start).max() > 0.01
        np.testing.assert_array_equal(client.forward(batch, model="reference").logprobs, reference)
        exported = client.export_hf(str(tmp_path / "model")).path

    for engine in ("vllm", "transformers"):
        local = ArcticRLClientConfig(
            model_name=exported,
            sampling_gpus=1,
            training_gpus=1,
            device="cpu",
            max_seq_len=64,
            sampling={"engine": engine, **({"kv_cache_gib": 0.25} if engine == "vllm" else {})},
        )
        with create_arctic_rl_client(local) as client:
            np.testing.assert_allclose(client.forward(batch).logprobs, trained, rtol=0, atol=1e-5)
            drawn = client.generate([[1, 2]], SamplingParams(max_tokens=5, seed=0, ignore_eos=True))[0][0]
            sample = Sample(token_ids=[1, 2, *drawn.token_ids], prompt_length=2)
            np.testing.assert_allclose(client.forward([sample]).logprobs, drawn.logprobs, rtol=0, atol=1e-4)
