"""Which settings nothing reads, and when: a job that gives one is refused instead of running without it.

One table, :data:`CLIENT_RULES`, for a client's configuration; :mod:`arctic_core.rl.config` has that of a training job. A
setting counts as given where it differs from its default, so a configuration that passed passes again after being dumped
and read, with all of its defaults or without. What depends on the machine (``device="auto"``) or on a plugin is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic_core import PydanticCustomError

from arctic_core.config.base import NO_EFFECT, ConfigModel

if TYPE_CHECKING:
    from arctic_core.config.client import ArcticRLClientConfig
    from arctic_core.protocol import EngineName

C = TypeVar("C", bound=ConfigModel)

DEEPSPEED_TRAINING = ("zero_stage", "offload_optimizer")
"""Fields of ``training`` that the trainer ``torch`` has no use for."""
VLLM_SAMPLING = ("kv_cache_gib", "gpu_memory_utilization", "vllm")
"""Fields of ``sampling`` that the sampler ``transformers`` has no use for."""


@dataclass(frozen=True)
class Rule(Generic[C]):
    """Settings that have no effect under a condition."""

    fields: tuple[str, ...]
    """Dotted names. A block stands for all that is in it."""
    unread: Callable[[C], bool]
    """Whether nothing reads them in this configuration."""
    reason: str
    """Follows "no effect, because"."""
    remedy: str
    """What to do."""
    but: tuple[str, ...] = ()
    """Parts of ``fields`` that other rules are for."""

    def covers(self, setting: str) -> bool:
        """Whether the rule is about this setting."""
        return _within(setting, self.fields) and not _within(setting, self.but)


def refuse_without_effect(config: C, rules: Sequence[Rule[C]]) -> None:
    """To be called by a model's validator; the first rule that applies to a setting is the one reported.

    Raises:
        PydanticCustomError: Settings without effect; :func:`arctic_core.config.base.config_error` gives it its words.
    """
    found: dict[Rule[C], list[str]] = {}
    for setting in given_settings(config):
        rule = next((rule for rule in rules if rule.covers(setting) and rule.unread(config)), None)
        if rule is not None:
            found.setdefault(rule, []).append(setting)
    if found:
        lines = [(tuple(settings), f"no effect, because {rule.reason}", rule.remedy) for rule, settings in found.items()]
        text = "; ".join(f"{', '.join(settings)}: {why}" for settings, why, _ in lines)
        raise PydanticCustomError(NO_EFFECT, "{text}", {"text": text, "lines": lines})


def given_settings(config: ConfigModel, prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings that differ from their defaults."""
    for name, field in type(config).model_fields.items():
        value, default = getattr(config, name), field.get_default(call_default_factory=True)
        if value == default:
            continue
        if isinstance(value, ConfigModel) and type(value) is type(default):
            yield from given_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def engines_run(config: ArcticRLClientConfig) -> Literal["local", "ray"] | None:
    """Where the engines run: in one process, over Ray, or wherever the server at ``http.url`` decides (``None``)."""
    if config.comm_protocol != "http":
        return config.comm_protocol
    return config.http.engines if config.http.url is None else None


def engine_name(config: ArcticRLClientConfig, engine: EngineName) -> str:
    """The registered name of an engine, ``auto`` resolved where it is known where the engines run."""
    where = engines_run(config)
    local = where == "local"
    if where is None:
        followed = config.training.engine if config.log_prob.engine == "auto" else config.log_prob.engine
        return {"trainer": config.training.engine, "sampler": config.sampling.engine, "log_prob": followed}[engine]
    if engine == "sampler":
        return ("transformers" if local else "vllm") if config.sampling.engine == "auto" else config.sampling.engine
    if engine == "log_prob" and config.log_prob.engine != "auto":
        return config.log_prob.engine
    return ("torch" if local else "deepspeed") if config.training.engine == "auto" else config.training.engine


def _within(setting: str, names: tuple[str, ...]) -> bool:
    return any(setting == name or setting.startswith(f"{name}.") for name in names)


def _block(name: str, fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}.{field}" for field in fields)


def _local(config: ArcticRLClientConfig) -> bool:
    return engines_run(config) == "local"


def _engines(config: ArcticRLClientConfig) -> int:
    return sum(count > 0 for count in (config.training_gpus, config.sampling_gpus, config.log_prob_gpus))


def _trainer_scores_by_deepspeed(config: ArcticRLClientConfig) -> bool:
    """Whether the trainer keeps the reference model in an engine that can shard it."""
    return config.reference and config.training_gpus > 0 and engine_name(config, "trainer") != "torch"


_TRAINING_ENGINE = ("training.engine",)
_REFERENCE_SHARDS = ("log_prob.zero_stage",)

CLIENT_RULES: tuple[Rule[Any], ...] = (
    Rule(
        ("ray",),
        _local,
        "the engines run in one process (comm_protocol or http.engines is 'local'): there is no Ray cluster",
        "leave it out, or set comm_protocol (or http.engines) to 'ray'",
    ),
    Rule(
        ("http",),
        lambda config: config.comm_protocol != "http",
        "comm_protocol is not 'http': there is no server",
        "leave it out, or set comm_protocol to 'http'",
    ),
    Rule(
        ("http.token_env", "http.token_file", "http.ca_file"),
        lambda config: config.http.url is None,
        "http.url is absent, and the server that the client starts is on this machine with a token of its own",
        "leave it out, or set http.url",
    ),
    Rule(
        ("http.token_env",),
        lambda config: config.http.token_file is not None,
        "http.token_file is read instead",
        "leave it out, or leave out http.token_file",
    ),
    Rule(
        ("http.ca_file",),
        lambda config: not (config.http.url or "").startswith("https:"),
        "http.url is not https: there is no certificate",
        "leave it out, or use an https address",
    ),
    Rule(
        ("http.engines",),
        lambda config: config.http.url is not None,
        "the server at http.url decides where engines run",
        "leave it out, or leave out http.url",
    ),
    Rule(
        ("colocate",),
        _local,
        "the engines run in one process (comm_protocol or http.engines is 'local') and share its device anyhow",
        "leave it out, or set comm_protocol (or http.engines) to 'ray'",
    ),
    Rule(
        ("colocate",),
        lambda config: _engines(config) < 2,
        "the job has one engine, which has nothing to share with",
        "leave it out, or ask for ranks of a second engine",
    ),
    Rule(
        ("ray.dashboard", "ray.object_store_bytes"),
        lambda config: config.ray.address is not None,
        "they are for a private cluster, and one that is joined (ray.address) has its own",
        "leave them out, or leave out ray.address",
    ),
    Rule(
        ("ray.threads_per_rank",),
        lambda config: config.device == "cuda",
        "it is for ranks on CPU, and device is 'cuda'",
        "leave it out",
    ),
    Rule(
        _TRAINING_ENGINE,
        lambda config: not config.training_gpus and not (config.log_prob_gpus and config.log_prob.engine == "auto"),
        "training_gpus is 0, and no log-prob engine follows it",
        "leave it out, or set training_gpus",
    ),
    Rule(
        ("training",),
        lambda config: not config.training_gpus,
        "training_gpus is 0",
        "leave it out, or set training_gpus",
        but=_TRAINING_ENGINE,
    ),
    Rule(
        _block("training", DEEPSPEED_TRAINING),
        lambda config: engine_name(config, "trainer") == "torch",
        "it is for DeepSpeed, and the trainer is 'torch'",
        "leave it out, or set training.engine to 'deepspeed'",
    ),
    Rule(
        ("training.offload_optimizer",),
        lambda config: config.training.zero_stage == 0,
        "training.zero_stage is 0",
        "leave it out, or set training.zero_stage to 1, 2 or 3",
    ),
    Rule(
        ("training.zorro_check",),
        lambda config: config.training.zorro == "off",
        "training.zorro is 'off': there is nothing to check",
        "leave it out, or leave out training.zorro",
    ),
    Rule(
        ("sampling", "max_seq_len", "deadlines.drain"),
        lambda config: not config.sampling_gpus,
        "it is for the sampler, and sampling_gpus is 0",
        "leave it out, or set sampling_gpus",
    ),
    Rule(
        _block("sampling", VLLM_SAMPLING),
        lambda config: engine_name(config, "sampler") == "transformers",
        "it is for vLLM, and the sampler is 'transformers'",
        "leave it out, or set sampling.engine to 'vllm'",
    ),
    Rule(
        ("sampling.kv_cache_gib",),
        lambda config: config.device == "cuda",
        "it is for vLLM on CPU, and device is 'cuda'",
        "leave it out; sampling.gpu_memory_utilization bounds the cache on a GPU",
    ),
    Rule(
        ("sampling.gpu_memory_utilization",),
        lambda config: config.device == "cpu",
        "it is for vLLM on GPUs, and device is 'cpu'",
        "leave it out; sampling.kv_cache_gib sizes the cache on CPU",
    ),
    Rule(
        _REFERENCE_SHARDS,
        lambda config: not config.log_prob_gpus and not _trainer_scores_by_deepspeed(config),
        "it shards a log-prob engine or a DeepSpeed trainer's reference model, and this job has neither",
        "leave it out, set log_prob_gpus, or set reference with a DeepSpeed trainer",
    ),
    Rule(
        ("log_prob",),
        lambda config: not config.log_prob_gpus,
        "log_prob_gpus is 0 (a reference model beside the trainer is a copy of its start, with the trainer's settings)",
        "leave it out, or set log_prob_gpus",
        but=_REFERENCE_SHARDS,
    ),
    Rule(
        _REFERENCE_SHARDS,
        lambda config: config.log_prob_gpus > 0 and engine_name(config, "log_prob") == "torch",
        "it is for DeepSpeed, and the log-prob engine is 'torch'",
        "leave it out, or set log_prob.engine to 'deepspeed'",
    ),
    Rule(
        ("log_prob.zorro_check",),
        lambda config: config.log_prob.zorro == "off",
        "log_prob.zorro is 'off': there is nothing to check",
        "leave it out, or leave out log_prob.zorro",
    ),
    Rule(
        ("weight_sync",),
        lambda config: not (config.training_gpus and config.sampling_gpus),
        "weights go from a trainer to a sampler, and this job lacks one of them",
        "leave it out, or set both training_gpus and sampling_gpus",
    ),
    Rule(
        ("weight_sync.directory",),
        lambda config: config.weight_sync.carrier in ("auto", "shared_memory"),
        "it is for a carrier that writes files, and weight_sync.carrier is shared memory",
        "leave it out, or set weight_sync.carrier to 'file'",
    ),
)
"""All rules of :class:`~arctic_core.config.client.ArcticRLClientConfig`."""
