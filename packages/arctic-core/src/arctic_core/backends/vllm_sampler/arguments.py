"""From Arctic's settings to vLLM's: engine arguments, environment, sampling parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from arctic_core.backends.base import RankSpec, SampleJob
from arctic_core.backends.vllm_sampler.plugin import FOLDER_VARIABLE, PARENT_VARIABLE
from arctic_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

MIN_TEMPERATURE = 0.01
"""vLLM silently raises smaller ones to this."""

_BLOCK_SIZE_CPU = 32
_WORKER_EXTENSION = "arctic_core.backends.vllm_sampler.worker.SyncWorkerExtension"
# vLLM's own settings of the parent's environment, undone after the engine's processes have inherited them.
_PREFIXES = ("VLLM_", "TORCHINDUCTOR_", "NUMEXPR_", "OMP_", "LD_PRELOAD", "TORCH_COMPILE", "ARCTIC_VLLM_")

# Arguments this sampler sets itself, and what sets them.
_RESERVED = {
    "model": "model_name",
    "tokenizer": "model_name",
    "dtype": "dtype",
    "seed": "seed",
    "max_model_len": "max_seq_len",
    "max_num_seqs": "sampling.max_num_seqs",
    "gpu_memory_utilization": "sampling.gpu_memory_utilization",
    "kv_cache_memory_bytes": "sampling.kv_cache_gib",
    "skip_tokenizer_init": "nothing: stop strings need the tokenizer",
    "logprobs_mode": "nothing: log-probs are those of the distribution sampled from",
    "stream_interval": "nothing: completions are returned whole",
    "worker_extension_cls": "nothing: weight sync needs it",
    "enable_sleep_mode": "nothing: on wherever the device can",
    "disable_log_stats": "nothing",
    "data_parallel_size": "sampling_gpus",
}


def engine_arguments(spec: RankSpec) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``AsyncEngineArgs``.

    Raises:
        ConfigError: ``sampling.vllm`` holds a key that vLLM does not know, or one that another setting owns.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    sampling = spec.config.sampling
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key in sampling.vllm:
        if key in _RESERVED:
            raise ConfigError(f"{key} is set by {_RESERVED[key]}", where="sampling.vllm")
        if key not in known:
            close = sorted(name for name in known if key.split("_")[0] in name)[:8]
            raise ConfigError(
                f"vLLM has no engine argument {key!r}",
                where="sampling.vllm",
                remedy=f"similar ones: {', '.join(close) or 'none'}",
            )
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "seed": spec.config.seed + spec.rank,
        "max_model_len": spec.config.max_seq_len,
        "max_num_seqs": sampling.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        # The first token and the end are all that is looked at; the steps between need not wake this process.
        "stream_interval": 1 << 30,
        "worker_extension_cls": _WORKER_EXTENSION,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.device == "cpu":
        arguments |= {
            "kv_cache_memory_bytes": int(sampling.kv_cache_gib * 2**30),
            "block_size": _BLOCK_SIZE_CPU,
            "enforce_eager": True,
        }
        if sampling.vllm.get("tensor_parallel_size", 1) == 1:
            # The worker inside the engine's process: one process less to start.
            arguments["distributed_executor_backend"] = "uni"
    else:
        arguments |= {"gpu_memory_utilization": sampling.gpu_memory_utilization, "enable_sleep_mode": True}
    return arguments | sampling.vllm


@contextlib.contextmanager
def engine_environment(spec: RankSpec, arguments: dict[str, Any], folder: str) -> Iterator[None]:
    """The environment in which vLLM's processes are started, and vLLM first imported; undone on exit."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking a process that has threads is not safe
        PARENT_VARIABLE: str(os.getpid()),
        FOLDER_VARIABLE: folder,
    }
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        wanted["VLLM_LOGGING_LEVEL"] = "ERROR"  # its warnings of a normal start on CPU fill a screen
    if spec.device == "cpu":
        if arguments.get("distributed_executor_backend") == "uni":
            wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or vLLM overrides the choice on CPU
        if arguments.get("enforce_eager"):
            wanted["TORCH_COMPILE_DISABLE"] = "1"  # its sampler compiles a helper with a C++ compiler otherwise
        if "OMP_WAIT_POLICY" not in os.environ:
            # Trainer and sampler share the cores: threads that wait must sleep, not spin.
            wanted["OMP_WAIT_POLICY"] = "PASSIVE"
        if spec.threads is not None:
            wanted["OMP_NUM_THREADS"] = str(spec.threads)
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
            if name not in before:
                del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if name.startswith(_PREFIXES)})


def sampling_arguments(job: SampleJob, max_seq_len: int) -> VllmSamplingParams:
    """vLLM's sampling parameters of one job.

    Raises:
        DataError: A temperature that vLLM would change behind our back.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = job.sampling
    check_temperature(sampling.temperature)
    return SamplingParams(
        max_tokens=min(sampling.max_tokens, max_seq_len - len(job.prompt)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=None if job.seed is None else job.seed & (2**63 - 1),
        include_stop_str_in_output=True,
        # Without stop strings the text is decoded once, at the end, by the sampler.
        detokenize=bool(sampling.stop),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )


def check_temperature(temperature: float) -> None:
    """Refuse what vLLM would change.

    Raises:
        DataError: Between 0 and 0.01, exclusive.
    """
    if 0 < temperature < MIN_TEMPERATURE:
        raise DataError(
            f"vLLM cannot sample at temperature {temperature}: it raises it to {MIN_TEMPERATURE}",
            where="sampling.temperature",
            remedy=f"use 0 (greedy) or at least {MIN_TEMPERATURE}",
        )
