"""A whole job over Ray: sampler and trainer agree after every live sync, whatever the sharding."""

from __future__ import annotations

import numpy as np
import pytest

from arctic_core import (
    ArcticRLClient,
    Batch,
    DistillLossConfig,
    GRPOLossConfig,
    NamedLoss,
    Sample,
    SamplingParams,
    SFTLossConfig,
    create_arctic_rl_client,
)
from arctic_core.errors import InvalidStateError, UnsupportedOperation
from arctic_core.losses.evaluate import evaluate_loss

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GRPO = NamedLoss(name="grpo", options={"on_policy": True})
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


def to_batch(prompts, groups) -> Batch:
    rows = []
    for group, (prompt, completions) in enumerate(zip(prompts, groups, strict=True)):
        for k, completion in enumerate(completions):
            ids = np.concatenate([prompt, completion.token_ids])
            advantage = np.full(len(completion.token_ids), (-1.0) ** k, np.float32)
            rows.append(
                Sample(
                    token_ids=ids,
                    prompt_length=len(prompt),
                    group=group,
                    advantages=advantage,
                    sampler_logprobs=completion.logprobs,
                    policy_version=completion.policy_version,
                )
            )
    return Batch.from_samples(rows)


def check_two_ways(client: ArcticRLClient, batch: Batch) -> None:
    """A loss by name and the same loss on the client give one gradient, over as many ranks as there are."""
    teacher = client.forward(batch, temperature=2.0, topk=5)
    batch = batch.replace(topk_ids=teacher.topk_ids, teacher_topk_logprobs=teacher.topk_logprobs)
    for loss in (DistillLossConfig(), GRPOLossConfig(on_policy=True, entropy_coef=0.1), SFTLossConfig()):
        client.forward_backward(batch, loss, temperature=0.8)
        expected = client.step(lr=0.0).grad_norm
        scores = client.forward(batch, entropy=True, given_topk=True, temperature=0.8)
        client.backward(batch, **evaluate_loss(batch, scores, loss).gradients(), temperature=0.8)
        assert client.step(lr=0.0).grad_norm == pytest.approx(expected, rel=1e-5)
        assert expected > 1e-2


@pytest.mark.parametrize(("zero_stage", "ranks", "tied"), [(0, 1, True), (3, 1, False), (0, 2, False), (3, 2, True)], ids=str)
def test_sampler_and_trainer_agree_at_every_step(ray_config, tiny_model, tiny_tied_model, marked, zero_stage, ranks, tied):
    config = ray_config(
        model_name=tiny_tied_model if tied else tiny_model,
        training_gpus=ranks,
        training={"optimizer": {"lr": 1e-2}, "zero_stage": zero_stage},
        weight_sync={"bucket_bytes": 30_000, "probe_tolerance": 1e-4},
    )
    with create_arctic_rl_client(config) as client:
        info = client.info()
        assert len(info.placement) == ranks + 1
        assert len({place.pid for place in info.placement}) == ranks + 1
        assert "sync_weights" in info.capabilities
        for step in range(3):
            sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=step, ignore_eos=True)
            groups = client.generate(PROMPTS, sampling, n=3)
            assert all(c.policy_version == step for row in groups for c in row)
            batch = to_batch(PROMPTS, groups)
            scores = client.forward(batch, temperature=0.8)
            assert np.abs(scores.logprobs - batch.sampler_logprobs).max() <= 1e-4
            client.forward_backward(batch, GRPO, temperature=0.8)
            stepped = client.step()
            assert stepped.policy_version == step + 1
            assert stepped.grad_norm > 0
            report = client.sync_weights(probe=[[1, 2, 3, 4, 5]])
            assert report.version == step + 1
            assert report.probe_max_abs_diff is not None
            assert report.probe_max_abs_diff <= 1e-4
            assert not report.skipped
        assert client.sync_weights().skipped
        check_two_ways(client, batch)
        with pytest.raises(InvalidStateError, match="no accumulated gradient"):
            client.step()
        with pytest.raises(UnsupportedOperation):
            client.forward(batch, model="reference")


def test_a_job_can_be_joined_and_left(ray_config, marked):
    with create_arctic_rl_client(ray_config()) as owner:
        other = create_arctic_rl_client(owner.reconnect_config())
        assert isinstance(other, ArcticRLClient)
        assert other.info().job == owner.info().job
        other.close()
        assert owner.info().engines[0].state == "awake"
