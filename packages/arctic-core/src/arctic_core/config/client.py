"""Configuration of a job: which model, which engines, how many ranks, where. Needs pydantic only."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from arctic_core.config.base import ConfigModel
from arctic_core.config.effects import CLIENT_RULES, refuse_without_effect

DType = Literal["float32", "bfloat16"]
Zorro = Literal["auto", "on", "off"]


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(ConfigModel):
    """AdamW (Loshchilov & Hutter, 2019)."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, applied to every parameter."""


def _check_warmup(warmup_steps: int, total_steps: int) -> None:
    if warmup_steps > total_steps:
        raise ValueError(f"warmup_steps {warmup_steps} exceeds total_steps {total_steps}, which include it")


class ConstantSchedule(ConfigModel):
    """``lr`` throughout, after the warm-up."""

    type: Literal["constant"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up; step ``k`` (from 0) of it runs at ``lr·(k+1)/warmup_steps``."""


class LinearSchedule(ConfigModel):
    """Linear decay from ``lr`` to ``lr·min_ratio`` at ``total_steps``, after the warm-up."""

    type: Literal["linear"]
    total_steps: int = Field(ge=1)
    """Optimizer steps until the end of the decay, warm-up included."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a part of ``lr``."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_warmup(self.warmup_steps, self.total_steps)
        return self


class CosineSchedule(ConfigModel):
    """Half-cosine decay from ``lr`` to ``lr·min_ratio`` at ``total_steps``, after the warm-up."""

    type: Literal["cosine"]
    total_steps: int = Field(ge=1)
    """Optimizer steps until the end of the decay, warm-up included."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a part of ``lr``."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_warmup(self.warmup_steps, self.total_steps)
        return self


Schedule = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="type")]


class TrainingConfig(ConfigModel):
    """The training engine."""

    engine: str = "auto"
    """Registered trainer: ``torch``, ``deepspeed`` or a plugin's; ``auto`` is ``torch`` in process, ``deepspeed`` over Ray."""
    optimizer: AdamWConfig = AdamWConfig()
    """AdamW settings."""
    schedule: Schedule = ConstantSchedule()
    """Learning-rate schedule in optimizer steps; ``step(lr=...)`` overrides it for one step."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the normalised gradient to this global norm; 0 does not clip."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Most tokens of one micro-batch. A longer sample is an error."""
    head_budget_bytes: int = Field(512 * 2**20, ge=2**20)
    """Most bytes of temporaries per rank while hidden states become log-probs and entropies; each row takes 9 to 11 bytes per
    token of the vocabulary, and one row is always allowed. Above it comes the output layer's gradient in float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    zorro: Zorro = "auto"
    """ZoRRo Train: compute what samples share once. ``auto`` does where model, device and batch allow it, ``on`` refuses a
    model or a device that cannot, ``off`` computes every sample on its own."""
    zorro_check: bool = False
    """At the first batch with shared prompts compare a few of its tokens with and without ZoRRo, and refuse to go on where
    scores differ by more than rounding."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (DeepSpeed ZeRO-Offload; stages 1 to 3)."""
    allow_loss_import: bool = False
    """Let a client name a loss as ``package.module:attribute``, which the engines import: it runs code of the client's choice
    there."""


class SamplingConfig(ConfigModel):
    """The sampling engine."""

    engine: str = "auto"
    """Registered sampler: ``transformers``, ``vllm`` or a plugin's; ``auto``: ``transformers`` in process, else ``vllm``."""
    max_num_seqs: int = Field(64, ge=1)
    """Most sequences decoded at once by one replica."""
    max_waiting: int = Field(4096, ge=1)
    """Most completions that may run or wait in the service; one more is refused with ``QueueFullError``."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Host memory for vLLM's KV cache on CPU, GiB per replica."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Part of a GPU's memory vLLM may use."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """More vLLM engine arguments by vLLM's own names; unknown ones are refused."""


class LogProbConfig(ConfigModel):
    """The log-prob engine: a frozen model that scores."""

    engine: str = "auto"
    """Registered log-prob engine: ``torch``, ``deepspeed`` or a plugin's; ``auto`` follows the training engine."""
    model_name: str | None = None
    """The reference model; absent means the policy's initial weights."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Most tokens of one micro-batch."""
    head_budget_bytes: int = Field(512 * 2**20, ge=2**20)
    """Most bytes of temporaries per rank while hidden states become log-probs and entropies."""
    zorro: Zorro = "auto"
    """ZoRRo Train: compute what samples share once, as the option of that name of :class:`TrainingConfig`."""
    zorro_check: bool = False
    """As the option of that name of :class:`TrainingConfig`."""
    zero_stage: Literal[0, 3] = 0
    """0 keeps a replica per rank, 3 shards it."""


class WeightSyncConfig(ConfigModel):
    """How weights reach the sampler."""

    carrier: str = "auto"
    """Registered carrier: ``shared_memory``, ``file`` or a plugin's; ``auto`` takes shared memory."""
    bucket_bytes: int = Field(64 * 2**20, ge=1)
    """Target size of one bucket. A larger tensor travels alone."""
    checksums: bool = True
    """Compare a CRC-32 of each tensor at both ends."""
    probe_tolerance: float = Field(1e-3, gt=0)
    """Largest |Δ log-prob| (nats) accepted on a probe."""
    directory: str | None = None
    """Folder of the file carrier; absent means a temporary one, removed at the end."""


class DeadlineConfig(ConfigModel):
    """Seconds that each kind of wait may take."""

    start: float = Field(600.0, gt=0)
    """All engines up and the model loaded."""
    request: float = Field(1800.0, gt=0)
    """One operation, queueing included."""
    drain: float = Field(120.0, gt=0)
    """Running generations to end before a weight sync or a pause."""
    stop: float = Field(20.0, gt=0)
    """A graceful stop before engines are killed."""


class RayConfig(ConfigModel):
    """The Ray cluster behind ``comm_protocol="ray"``."""

    address: str | None = None
    """Cluster to join (``"auto"`` finds a running one); absent starts a private one that ends with the client."""
    cpus_per_rank: float = Field(1.0, gt=0)
    """CPUs reserved by one engine rank that runs on CPU."""
    threads_per_rank: int | None = Field(None, ge=1)
    """Compute threads of one CPU rank; absent shares the machine's cores among the trainers."""
    object_store_bytes: int = Field(200 * 2**20, ge=80 * 2**20)
    """Object store of a private cluster."""
    dashboard: bool = False
    """Start Ray's dashboard in a private cluster."""


class HttpConfig(ConfigModel):
    """The server behind ``comm_protocol="http"``."""

    url: str | None = Field(None, pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$")
    """Address of a running server (``arctic serve``), e.g. ``"https://arctic.example:8520"``; absent starts one on this machine
    that ends with the client."""
    engines: Literal["local", "ray"] = "ray"
    """Where the server that this client starts runs the engines: in its own process, or as Ray actors."""
    token_env: str = Field("ARCTIC_TOKEN", min_length=1)
    """Environment variable that holds the token; unset, or empty, sends none."""
    token_file: str | None = None
    """File that holds the token, read instead of the environment variable."""
    ca_file: str | None = None
    """PEM file of the authorities that may sign the server's certificate; absent means those that Python trusts."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """Seconds until a connection must stand."""
    retries: int = Field(5, ge=0)
    """How often a request is repeated that could not be delivered, or that the server was too busy to take. Pauses grow from
    0.2 s by doubling."""
    lease_s: float = Field(120.0, gt=0)
    """The server stops the job when it has not heard from any client for so many seconds."""


class ArcticRLClientConfig(ConfigModel):
    """Everything a client needs to start, or find, the engines of one job.

    Example:
        >>> config = ArcticRLClientConfig(
        ...     model_name="Qwen/Qwen3-4B", comm_protocol="ray", training_gpus=8, sampling_gpus=8, colocate=True
        ... )
    """

    model_name: str
    """Hugging Face hub id, local folder, or GGUF file."""
    comm_protocol: Literal["local", "ray", "http"] = "local"
    """``local`` runs the engines in this process, ``ray`` as actors, ``http`` behind a server."""
    training_gpus: int = Field(0, ge=0)
    """Training ranks, one GPU each; CPU ranks where there is no GPU."""
    sampling_gpus: int = Field(0, ge=0)
    """Sampling ranks."""
    log_prob_gpus: int = Field(0, ge=0)
    """Log-prob ranks. 0 with ``reference=True`` keeps a frozen copy beside the trainer."""
    reference: bool = False
    """Whether ``forward(model="reference")`` is wanted."""
    colocate: bool = False
    """Share GPUs between the engines by fractions instead of giving each its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes GPUs where present."""
    dtype: Literal["auto"] | DType = "auto"
    """Compute type of all engines; ``auto`` is float32 on CPU and bfloat16 on GPU."""
    seed: int = 0
    """Seed of whatever an engine draws by itself."""
    max_seq_len: int = Field(2048, ge=2)
    """Longest prompt plus response, tokens."""
    job: str = "arctic"
    """Name of the job, shown in logs and part of the name under which others find it."""
    training: TrainingConfig = TrainingConfig()
    """Training engine."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling engine."""
    log_prob: LogProbConfig = LogProbConfig()
    """Log-prob engine."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Weight sync."""
    deadlines: DeadlineConfig = DeadlineConfig()
    """Deadlines."""
    ray: RayConfig = RayConfig()
    """Ray."""
    http: HttpConfig = HttpConfig()
    """The server."""
    plugins_strict: bool = False
    """Fail at start when any installed plugin failed to load."""
    connect_to: str | None = None
    """Name of a running job's service (from ``reconnect_config()``); absent starts a new one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.connect_to is None and not (self.training_gpus or self.sampling_gpus or self.log_prob_gpus):
            raise ValueError("no engine asked for: set training_gpus, sampling_gpus or log_prob_gpus")
        if self.connect_to is not None and self.comm_protocol == "local":
            raise ValueError("connect_to needs comm_protocol='ray' or 'http': a local job lives in its own process")
        if self.connect_to is not None and self.comm_protocol == "http" and self.http.url is None:
            raise ValueError("connect_to needs http.url: the address of the server that runs the job")
        if self.reference and not (self.training_gpus or self.log_prob_gpus):
            raise ValueError("reference=True needs a trainer or log-prob ranks to hold the reference model")
        refuse_without_effect(self, CLIENT_RULES)
        return self
