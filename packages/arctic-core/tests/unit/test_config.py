"""Configuration: unknown keys at any depth, cross-field rules, and errors that name the place."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, get_args

import pydantic
import pytest

from arctic_core.config import (
    AdamWConfig,
    ArcticRLClientConfig,
    ConfigModel,
    CosineSchedule,
    LinearSchedule,
    SamplingConfig,
    TrainingConfig,
    WeightSyncConfig,
)
from arctic_core.errors import ConfigError

BASE: dict[str, Any] = {"model_name": "m", "training_gpus": 1}


def test_the_designs_example_is_valid() -> None:
    config = ArcticRLClientConfig(
        model_name="Qwen/Qwen3-4B", comm_protocol="ray", training_gpus=8, sampling_gpus=8, log_prob_gpus=0, colocate=True
    )
    assert (config.training_gpus, config.sampling_gpus, config.colocate) == (8, 8, True)


def models(model: type[ConfigModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[ConfigModel]]]:
    """Every model in the tree with the keys that lead to it."""
    yield path, model
    for name, field in model.model_fields.items():
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, ConfigModel):
                yield from models(inner, (*path, name))


TREE = list(models(ArcticRLClientConfig))


@pytest.mark.parametrize(("path", "model"), TREE, ids=lambda part: ".".join(part) if isinstance(part, tuple) else part.__name__)
def test_an_unknown_key_is_named_at_any_depth(path: tuple[str, ...], model: type[ConfigModel]) -> None:
    needed = {"type": model.model_fields["type"].annotation.__args__[0]} if "type" in model.model_fields else {}
    values: dict[str, Any] = needed | {"total_steps": 5} if "total_steps" in model.model_fields else dict(needed)
    values["surprise"] = 1
    for name in reversed(path):
        values = {name: values}
    with pytest.raises(ConfigError) as caught:
        ArcticRLClientConfig(**BASE | values)
    assert "surprise: unknown key" in caught.value.message
    assert caught.value.message.startswith(".".join(path))
    assert min(model.model_fields) in caught.value.remedy


def test_the_tree_was_walked() -> None:
    names = {model.__name__ for _, model in TREE}
    assert {"AdamWConfig", "CosineSchedule", "RayConfig", "DeadlineConfig", "WeightSyncConfig"} <= names


def test_a_misspelt_key_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        ArcticRLClientConfig(**BASE, training={"micro_batch_token": 3})
    assert "did you mean micro_batch_tokens?" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        ArcticRLClientConfig(**BASE, training={"schedule": {"type": "cosine", "total_steps": 9, "min_rate": 0.1}})
    assert "did you mean min_ratio?" in caught.value.remedy


def test_all_bad_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ArcticRLClientConfig(**BASE, seed="x", zz=1, training={"optimizer": {"lr": -1}})
    for part in ("seed: ", "zz: unknown key", "training.optimizer.lr: ", "(got -1)"):
        assert part in caught.value.message


def test_parse_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"job.yaml: model_name: required, but missing"):
        ArcticRLClientConfig.parse({}, where="job.yaml")


def test_a_nested_model_built_first_fails_where_it_is_built() -> None:
    with pytest.raises(ConfigError, match=r"AdamWConfig: lrr: unknown key"):
        TrainingConfig(optimizer=AdamWConfig(lrr=1))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training_gpus": 0}, "no engine asked for"),
        ({"connect_to": "job"}, "connect_to needs comm_protocol='ray'"),
        ({"training_gpus": 0, "sampling_gpus": 1, "reference": True}, "reference=True needs a trainer"),
        ({"training": {"schedule": {"type": "linear", "total_steps": 3, "warmup_steps": 4}}}, "warmup_steps 4 exceeds"),
        ({"training": {"schedule": {"type": "cosine", "total_steps": 3, "warmup_steps": 4}}}, "warmup_steps 4 exceeds"),
        ({"training": {"schedule": {"type": "linear"}}}, "total_steps: required"),
        ({"training": {"schedule": {"type": "wave"}}}, "training.schedule"),
        ({"weight_sync": {"bucket_bytes": 0}}, "weight_sync.bucket_bytes"),
        ({"training": {"optimizer": {"betas": [0.9, 1.0]}}}, "training.optimizer.betas.1"),
        ({"training": {"optimizer": {"lr": float("nan")}}}, "training.optimizer.lr"),
        ({"deadlines": {"request": float("inf")}}, "deadlines.request"),
        ({"max_seq_len": 1}, "max_seq_len"),
        ({"training_gpus": -1}, "training_gpus"),
        ({"dtype": "float64"}, "dtype"),
        ({"comm_protocol": "smoke"}, "comm_protocol"),
    ],
)
def test_rules_across_fields_and_ranges(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ArcticRLClientConfig(**BASE | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"training_gpus": 0, "comm_protocol": "ray", "connect_to": "job"},
        {"training_gpus": 0, "log_prob_gpus": 1, "reference": True, "log_prob": {"model_name": "ref"}},
        {"training": {"schedule": {"type": "linear", "total_steps": 4, "warmup_steps": 4}}},
    ],
)
def test_what_the_rules_allow(changes: dict[str, Any]) -> None:
    assert ArcticRLClientConfig(**BASE | changes).model_name == "m"


def test_a_config_survives_dumping_and_pickling() -> None:
    config = ArcticRLClientConfig(
        **BASE,
        comm_protocol="ray",
        sampling_gpus=1,
        training=TrainingConfig(schedule=CosineSchedule(type="cosine", total_steps=9), zero_stage=3),
        sampling=SamplingConfig(vllm={"block_size": 32}),
        weight_sync=WeightSyncConfig(carrier="file", directory="/x"),
    )
    assert ArcticRLClientConfig(**config.model_dump()) == config
    assert ArcticRLClientConfig.model_validate_json(config.model_dump_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_is_frozen() -> None:
    config = ArcticRLClientConfig(**BASE)
    with pytest.raises(pydantic.ValidationError):
        config.seed = 3
    one, other = SamplingConfig(), SamplingConfig()
    assert one.vllm is not other.vllm


@pytest.mark.parametrize(("path", "model"), TREE, ids=lambda part: ".".join(part) if isinstance(part, tuple) else part.__name__)
def test_every_key_is_described(path: tuple[str, ...], model: type[ConfigModel]) -> None:
    missing = [name for name, field in model.model_fields.items() if not field.description and name != "type"]
    assert missing == []
    assert model.__doc__


def test_schedules_are_chosen_by_type() -> None:
    config = ArcticRLClientConfig(**BASE, training={"schedule": {"type": "linear", "total_steps": 4}})
    assert config.training.schedule == LinearSchedule(type="linear", total_steps=4)
