"""Settings without effect: refused by name with a reason and a remedy, accepted where they do something."""

from __future__ import annotations

import pickle
import types
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from arctic_core.config import (
    ArcticRLClientConfig,
    HttpConfig,
    LogProbConfig,
    RayConfig,
    SamplingConfig,
    TrainingConfig,
    WeightSyncConfig,
)
from arctic_core.config.effects import CLIENT_RULES, Rule, given_settings
from arctic_core.config.losses import DISTILL_RULES, POLICY_RULES
from arctic_core.errors import ConfigError
from arctic_core.losses.base import prepare_loss
from arctic_core.losses.named import find_loss, named_loss
from arctic_core.plugins.builtin import arctic_losses
from arctic_core.protocol import NamedLoss
from arctic_core.rl.config import JOB_RULES, LOSSES_WITHOUT_ADVANTAGES, TrainJobConfig
from arctic_core.rl.config_file import dump_yaml, job_values, load_job

TRAIN = {"training_gpus": 1}
SAMPLE = {"sampling_gpus": 1}
SCORE = {"log_prob_gpus": 1}
BOTH = TRAIN | SAMPLE
RAY = {"comm_protocol": "ray"}
HTTP = {"comm_protocol": "http"}
SECURE = HTTP | {"http": {"url": "https://server"}}


@dataclass(frozen=True)
class Case:
    """One setting, where it does nothing, and where it does something."""

    setting: str
    value: Any
    refused: dict[str, Any]
    reason: str
    accepted: list[dict[str, Any]] = field(default_factory=list)


CASES = [
    Case("ray.cpus_per_rank", 2.0, TRAIN, "there is no Ray cluster", [TRAIN | RAY]),
    Case("ray.address", "auto", BOTH, "there is no Ray cluster", [TRAIN | RAY]),
    Case("ray.dashboard", True, TRAIN | RAY | {"ray": {"address": "auto"}}, "a private cluster", [TRAIN | RAY]),
    Case("ray.object_store_bytes", 2**30, TRAIN | RAY | {"ray": {"address": "auto"}}, "a private cluster", [TRAIN | RAY]),
    Case("ray.threads_per_rank", 2, TRAIN | RAY | {"device": "cuda"}, "for ranks on CPU", [TRAIN | RAY]),
    Case("http.retries", 3, TRAIN | RAY, "comm_protocol is not 'http'", [TRAIN | HTTP, TRAIN | SECURE]),
    Case("http.url", "http://server", TRAIN, "comm_protocol is not 'http'", [TRAIN | HTTP]),
    Case("http.token_file", "/x", TRAIN | HTTP, "http.url is absent, and the server", [TRAIN | SECURE]),
    Case(
        "http.token_env",
        "TOKEN",
        TRAIN | HTTP | {"http": {"url": "http://server", "token_file": "/x"}},
        "http.token_file is read instead",
        [TRAIN | SECURE],
    ),
    Case("http.ca_file", "/x", TRAIN | HTTP | {"http": {"url": "http://server"}}, "not https", [TRAIN | SECURE]),
    Case("http.engines", "local", TRAIN | SECURE, "the server at http.url decides", [TRAIN | HTTP]),
    Case("ray.cpus_per_rank", 2.0, TRAIN | HTTP | {"http": {"engines": "local"}}, "there is no Ray cluster", [TRAIN | HTTP]),
    Case("training.zero_stage", 2, TRAIN | HTTP | {"http": {"engines": "local"}}, "the trainer is 'torch'", [TRAIN | SECURE]),
    Case("colocate", True, BOTH, "its device anyhow", [BOTH | RAY]),
    Case("colocate", True, TRAIN | RAY | {"training_gpus": 4}, "the job has one engine", [TRAIN | SCORE | RAY]),
    Case("training.engine", "torch", SAMPLE, "no log-prob engine follows it", [TRAIN, SCORE]),
    Case("training.engine", "torch", SCORE | {"log_prob": {"engine": "torch"}}, "no log-prob engine follows it"),
    Case("training.optimizer.lr", 0.1, SAMPLE | SCORE, "training_gpus is 0", [TRAIN]),
    Case("training.zero_stage", 2, SAMPLE | RAY, "training_gpus is 0", [TRAIN | RAY]),
    Case("training.zero_stage", 2, TRAIN, "the trainer is 'torch'", [TRAIN | RAY, TRAIN | {"training": {"engine": "mine"}}]),
    Case("training.zero_stage", 2, TRAIN | RAY | {"training": {"engine": "torch"}}, "the trainer is 'torch'"),
    Case("training.zero_stage", 2, TRAIN | {"training": {"engine": "torch"}}, "the trainer is 'torch'"),
    Case(
        "training.offload_optimizer",
        True,
        TRAIN | RAY,
        "training.zero_stage is 0",
        [TRAIN | RAY | {"training": {"zero_stage": 1}}],
    ),
    Case("training.zorro_check", True, TRAIN | {"training": {"zorro": "off"}}, "training.zorro is 'off'", [TRAIN]),
    Case("log_prob.zorro_check", True, SCORE | {"log_prob": {"zorro": "off"}}, "log_prob.zorro is 'off'", [SCORE]),
    Case("sampling.max_waiting", 8, TRAIN, "sampling_gpus is 0", [SAMPLE, SAMPLE | RAY]),
    Case("max_seq_len", 64, TRAIN | SCORE, "sampling_gpus is 0", [BOTH]),
    Case("deadlines.drain", 5.0, TRAIN, "sampling_gpus is 0", [SAMPLE]),
    Case("sampling.vllm", {"block_size": 16}, SAMPLE, "the sampler is 'transformers'", [SAMPLE | RAY]),
    Case("sampling.vllm", {"a": 1}, SAMPLE | RAY | {"sampling": {"engine": "transformers"}}, "the sampler is 'transformers'"),
    Case("sampling.kv_cache_gib", 0.5, BOTH, "the sampler is 'transformers'", [SAMPLE | {"sampling": {"engine": "vllm"}}]),
    Case("sampling.gpu_memory_utilization", 0.5, SAMPLE, "the sampler is 'transformers'", [SAMPLE | RAY]),
    Case("sampling.kv_cache_gib", 0.5, SAMPLE | RAY | {"device": "cuda"}, "vLLM on CPU", [SAMPLE | RAY | {"device": "cpu"}]),
    Case(
        "sampling.gpu_memory_utilization",
        0.5,
        SAMPLE | RAY | {"device": "cpu"},
        "vLLM on GPUs",
        [SAMPLE | RAY | {"device": "cuda"}],
    ),
    Case("log_prob.zero_stage", 3, TRAIN | RAY, "this job has neither", [TRAIN | RAY | {"reference": True}]),
    Case("log_prob.zero_stage", 3, TRAIN | {"reference": True}, "this job has neither"),
    Case("log_prob.zero_stage", 3, TRAIN | SCORE, "the log-prob engine is 'torch'", [TRAIN | SCORE | RAY]),
    Case("log_prob.zero_stage", 3, SCORE | RAY | {"training": {"engine": "torch"}}, "the log-prob engine is 'torch'"),
    Case("log_prob.model_name", "ref", TRAIN | {"reference": True}, "log_prob_gpus is 0", [TRAIN | SCORE]),
    Case("log_prob.engine", "torch", TRAIN | RAY | {"reference": True}, "log_prob_gpus is 0", [TRAIN | SCORE | RAY]),
    Case("weight_sync.checksums", False, TRAIN, "this job lacks one of them", [BOTH]),
    Case("weight_sync.probe_tolerance", 0.1, SAMPLE | SCORE | RAY, "this job lacks one of them", [BOTH | RAY]),
    Case("weight_sync.directory", "/x", BOTH, "writes files", [BOTH | {"weight_sync": {"carrier": "file"}}]),
    Case("weight_sync.directory", "/x", BOTH | {"weight_sync": {"carrier": "shared_memory"}}, "writes files"),
]

JOB = {"model": "m", "task": {"name": "addition"}, "steps": 5}


def job_loss(name: str) -> dict[str, Any]:
    return {"algorithm": {"loss": {"name": name}}}


JOB_CASES = [
    *(
        Case("algorithm.advantage", {"name": "rloo"}, job_loss(name), "reads no advantages", [job_loss("grpo")])
        for name in LOSSES_WITHOUT_ADVANTAGES
    ),
    Case("algorithm.advantage.normalize_std", False, job_loss("sft"), "reads no advantages", [job_loss("dapo")]),
    Case(
        "algorithm.advantage.epsilon",
        0.1,
        {"algorithm": {"advantage": {"normalize_std": False}}},
        "normalize_std is false",
        [{}],
    ),
    Case("checkpoint.keep_last", 5, {}, "there are no checkpoints", [{"checkpoint": {"every": 2}}]),
    Case("client.sampling.kv_cache_gib", 0.5, {}, "the sampler is 'transformers'", [{"client": RAY}]),
]

ON_POLICY = {"on_policy": True}
LOSS_CASES = {
    "grpo": [
        Case("clip_high", 0.3, ON_POLICY, "never clipped", [{}]),
        Case("dual_clip", 3.0, ON_POLICY, "never clipped", [{}]),
    ],
    "cispo": [Case("clip_low", 0.5, ON_POLICY, "never clipped", [{}])],
    "rloo": [Case("clip_low", 0.1, ON_POLICY, "never clipped", [{}])],
    "sapo": [Case("kl_gradient", "score", {}, "kl_coef is 0", [{"kl_coef": 0.1}])],
    "distill": [
        Case("beta", 0.3, {"divergence": "forward_kl"}, "for the divergence 'jsd'", [{"divergence": "jsd"}]),
        Case("tail", "renormalize", {"source": "sampled"}, "source is 'sampled'", [{}]),
    ],
}


def having(values: dict[str, Any], setting: str, value: Any) -> dict[str, Any]:
    """A copy of a tree with a setting in it."""
    name, _, rest = setting.partition(".")
    return values | {name: having(values.get(name, {}), rest, value) if rest else value}


def client(values: dict[str, Any]) -> ArcticRLClientConfig:
    return ArcticRLClientConfig(**{"model_name": "m"} | values)


def name_of(case: Any) -> str:
    return case.setting if isinstance(case, Case) else ""


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_setting_without_effect_is_refused(case: Case) -> None:
    assert client(case.refused)
    with pytest.raises(ConfigError) as caught:
        client(having(case.refused, case.setting, case.value))
    assert caught.value.message.startswith(f"{case.setting}: no effect, because ")
    assert case.reason in caught.value.message
    assert caught.value.remedy.startswith("leave ")


@pytest.mark.parametrize(("case", "values"), [(case, values) for case in CASES for values in case.accepted], ids=name_of)
def test_it_is_accepted_where_it_has_one_and_again_after_every_round_trip(case: Case, values: dict[str, Any]) -> None:
    config = client(having(values, case.setting, case.value))
    assert case.setting in given_settings(config)
    model = ArcticRLClientConfig
    for dumped in (config.model_dump_json(), config.model_dump_json(exclude_unset=True), config.model_dump_json(indent=1)):
        assert model.model_validate_json(dumped) == config
    assert model(**config.model_dump()) == model(**config.model_dump(exclude_unset=True)) == config
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("case", JOB_CASES, ids=name_of)
def test_it_is_the_same_in_a_job(case: Case) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainJobConfig.parse(having(JOB | case.refused, case.setting, case.value))
    assert caught.value.message.startswith(f"{case.setting}: no effect, because ")
    assert case.reason in caught.value.message
    for values in case.accepted:
        job = TrainJobConfig.parse(having(JOB | values, case.setting, case.value))
        assert TrainJobConfig.parse(job_values(job)) == job


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in LOSS_CASES.items() for case in cases], ids=str)
def test_it_is_the_same_with_the_options_of_a_loss(name: str, case: Case) -> None:
    definition = find_loss(name)
    with pytest.raises(ConfigError, match=f"loss '{name}': {case.setting}: no effect, because .*{case.reason}"):
        prepare_loss(definition, NamedLoss(name=name, options=case.refused | {case.setting: case.value}))
    for values in case.accepted:
        options = definition.config_model.parse(values | {case.setting: case.value})
        sent = named_loss(options)  # every option is in it, the defaults too
        assert definition.config_model.parse(dict(sent.options)) == options


@pytest.mark.parametrize(
    ("rules", "cases"),
    [
        (CLIENT_RULES, CASES),
        (JOB_RULES, JOB_CASES),
        (POLICY_RULES + DISTILL_RULES, [case for cases in LOSS_CASES.values() for case in cases]),
    ],
    ids=["client", "job", "loss"],
)
def test_every_rule_is_tested_both_ways(rules: tuple[Rule[Any], ...], cases: list[Case]) -> None:
    for rule in rules:
        mine = [case for case in cases if rule.covers(case.setting) and case.reason in rule.reason]
        assert any(case.accepted for case in mine), (rule.fields, rule.reason)


BLOCKS = [
    ("ray", RayConfig, TRAIN),
    ("http", HttpConfig, TRAIN | RAY),
    ("training", TrainingConfig, SAMPLE),
    ("sampling", SamplingConfig, TRAIN),
    ("log_prob", LogProbConfig, TRAIN),
    ("weight_sync", WeightSyncConfig, TRAIN),
]


OTHERS = {
    "optimizer": {"lr": 0.5},
    "schedule": {"type": "linear", "total_steps": 3},
    "vllm": {"block_size": 16},
    "url": "http://s",
}


def other_value(name: str, info: FieldInfo) -> Any:
    """A valid value that is not the default."""
    if name in OTHERS:
        return OTHERS[name]
    default = info.get_default(call_default_factory=True)
    optional = get_origin(info.annotation) is types.UnionType
    kind = get_args(info.annotation)[0] if optional else info.annotation
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != default)
    return {bool: lambda: not default, int: lambda: (default or 0) + 1, float: lambda: default / 2, str: lambda: "other"}[
        kind
    ]()


FIELDS = [
    (block, name, other_value(name, info), absent)
    for block, model, absent in BLOCKS
    for name, info in model.model_fields.items()
]


@pytest.mark.parametrize(("block", "name", "value", "absent"), FIELDS, ids=str)
def test_no_field_of_an_absent_part_gets_through(block: str, name: str, value: Any, absent: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{block}\.{name}[^;]*: no effect, because"):
        client(absent | {block: {name: value}})


def test_all_settings_without_effect_are_named_at_once_each_for_one_reason() -> None:
    values = TRAIN | {
        "training": {"zero_stage": 2, "offload_optimizer": True},
        "sampling": {"kv_cache_gib": 1.5, "max_num_seqs": 2},
        "ray": {"address": "auto", "dashboard": True},
    }
    with pytest.raises(ConfigError) as caught:
        client(values)
    lines = [line.partition(":")[0] for line in caught.value.message.split("; ")]
    assert lines == [
        "training.zero_stage, training.offload_optimizer",
        "sampling.max_num_seqs, sampling.kv_cache_gib",
        "ray.address, ray.dashboard",
    ]


def test_a_default_that_is_written_down_counts_as_left_out() -> None:
    config = client(TRAIN | {"sampling": {"kv_cache_gib": 1.0, "vllm": {}}, "ray": {}, "max_seq_len": 2048})
    assert list(given_settings(config)) == ["model_name", "training_gpus"]


def test_losses_without_advantages_are_those_that_do_not_require_them() -> None:
    unread = {
        loss.name
        for loss in arctic_losses()
        if "advantages" not in (*loss.requires, *loss.requires_for(loss.config_model.parse({})))
    }
    assert unread == set(LOSSES_WITHOUT_ADVANTAGES)


FOR_RAY = """
model: m
task: {name: addition}
steps: 3
client:
  comm_protocol: ray
  training_gpus: 4
  sampling_gpus: 2
  log_prob_gpus: 1
  colocate: true
  training: {engine: deepspeed, zero_stage: 3, offload_optimizer: true, optimizer: {lr: 1e-5}}
  sampling: {engine: vllm, kv_cache_gib: 2, gpu_memory_utilization: 0.5, vllm: {block_size: 32}, max_num_seqs: 8}
  log_prob: {engine: deepspeed, zero_stage: 3, micro_batch_tokens: 100, head_budget_bytes: 2097152}
  ray: {address: auto, cpus_per_rank: 2, threads_per_rank: 3}
"""


def test_a_job_for_ray_runs_locally_with_what_a_local_job_has(tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(FOR_RAY)
    job = load_job(str(path), backend="local")
    kept = set(given_settings(job.client)) - {"model_name", "training_gpus", "sampling_gpus"}
    assert kept == {"training.engine", "training.optimizer.lr", "sampling.engine", "sampling.max_num_seqs"}


def test_a_local_job_runs_over_ray(tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(dump_yaml(JOB | {"client": {"training": {"engine": "torch"}, "sampling": {"engine": "transformers"}}}))
    for override in ([], ["client.log_prob_gpus=1", "client.log_prob.zero_stage=3"]):
        assert load_job(str(path), override, backend="ray").client.training.engine == "deepspeed"


def test_another_reference_model_is_not_dropped_silently(tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(FOR_RAY.replace("log_prob: {", "log_prob: {model_name: other, "))
    assert load_job(str(path)).client.log_prob.model_name == "other"
    with pytest.raises(ConfigError, match=r"client\.log_prob\.model_name: no effect"):
        load_job(str(path), backend="local")
