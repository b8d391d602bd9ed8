"""The code of the client guide about losses and gradients, run as written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from arctic_core import (
    ArcticRLClient,
    ArcticRLClientConfig,
    Batch,
    ConfigError,
    GRPOLossConfig,
    NamedLoss,
    Sample,
    create_arctic_rl_client,
)
from arctic_core.losses.base import LossInputs, LossOutput

GUIDE = (Path(__file__).parents[4] / "docs" / "client.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)


def block(mark: str) -> str:
    (found,) = [code for code in BLOCKS if mark in code]
    return found


@pytest.fixture(scope="module")
def client(tiny_model: str) -> Iterator[ArcticRLClient]:
    with create_arctic_rl_client(ArcticRLClientConfig(model_name=tiny_model, training_gpus=1, reference=True)) as client:
        yield client


@pytest.fixture
def names(client: ArcticRLClient) -> dict[str, object]:
    """What the guide's code finds around it."""
    client.zero_grad()
    samples = [
        Sample(
            token_ids=np.array([3, 4, 5, 6 + i]),
            prompt_length=2,
            loss_mask=np.array([1, i]),
            advantages=np.array([1.0, -1.0]),
            old_logprobs=np.array([-1.0, -2.0]),
        )
        for i in range(2)
    ]
    batch = Batch.from_samples(samples)
    return {
        "client": client,
        "batch": batch,
        "torch": torch,
        "GRPOLossConfig": GRPOLossConfig,
        "NamedLoss": NamedLoss,
        "mask": torch.from_numpy(batch.mask == 1),
        "advantages": torch.from_numpy(np.array(batch.advantages)),
    }


def test_a_loss_is_named_in_the_ways_of_the_guide(client: ArcticRLClient, names: dict[str, object]) -> None:
    *accepted, dotted = block("by dotted name").strip().splitlines()
    assert len(accepted) == 3
    for line in accepted:
        client.zero_grad()
        exec(line, names)
        assert client.step(lr=0.0).grad_norm > 0
    with pytest.raises(ConfigError, match="does not import losses"):
        exec(dotted, names)


def test_a_loss_on_the_client(client: ArcticRLClient, names: dict[str, object]) -> None:
    code = block("def my_loss")
    before = client.info().step
    exec(code, names)
    assert client.info().step == before + 1


def test_derivatives_by_hand_are_those_of_evaluate_loss(client: ArcticRLClient, names: dict[str, object]) -> None:
    exec(block("def my_loss").replace("client.step()", "norm = client.step(lr=0.0).grad_norm"), names)
    exec(block("logprobs = torch.tensor"), names)
    assert client.step(lr=0.0).grad_norm == pytest.approx(names["norm"], rel=1e-5)


def test_top_k_from_a_teacher_by_name_and_by_hand(client: ArcticRLClient, names: dict[str, object]) -> None:
    def forward_kl(inputs: LossInputs, config: object) -> LossOutput:
        student_RK, teacher_RK = inputs.topk_logprobs_RK, inputs.teacher_topk_logprobs_RK
        assert student_RK is not None
        assert teacher_RK is not None
        return LossOutput(-(teacher_RK.exp() * student_RK)[inputs.mask_R].sum())

    exec(block('"distill"').replace("topk=16", "topk=8"), names)
    client.zero_grad()
    names |= {"my_topk_loss": forward_kl}
    exec("from arctic_core.losses.evaluate import evaluate_loss\n" + block("my_topk_loss"), names)
    assert client.step(lr=0.0).grad_norm > 0
    assert np.shape(names["scores"].topk_logprobs) == (4, 8)  # type: ignore[attr-defined]
