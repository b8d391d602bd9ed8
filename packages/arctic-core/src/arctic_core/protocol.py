"""The messages between a client and the service, protocol version 1.

Every operation is one frozen :class:`Operation`; every answer is one :class:`Result` or an :class:`ErrorInfo`. Transports
carry :class:`Request` and :class:`Reply` and know nothing else. Unknown fields are refused on decoding. Arrays inside
messages are numpy arrays, encoded by :mod:`arctic_core.wire`.

Suffix legend: ``_R`` response-token axis of a packed batch, ``_B`` samples.

This module needs numpy and msgspec only.
"""

# pyright: reportGeneralTypeIssues=false
# (frozen is inherited in msgspec, but the typing rules for dataclass-like bases do not know that)
from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from arctic_core.data import Batch
from arctic_core.errors import ArcticError, DataError, error_types

PROTOCOL_VERSION = 1

EngineName = Literal["trainer", "sampler", "log_prob"]
ModelName = Literal["policy", "reference"]
FinishReason = Literal["stop", "length", "abort"]
RestorePart = Literal["weights", "optimizer", "scheduler", "step", "rng"]
Normalization = Literal["token", "sequence", "constant"]
PauseMode = Literal["drain", "keep", "abort"]

RESTORE_ALL: tuple[RestorePart, ...] = ("weights", "optimizer", "scheduler", "step", "rng")


class Message(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """Base of everything that crosses a transport."""


# --- values inside messages ---------------------------------------------------------------------------------------------


class SamplingParams(Message):
    """How to sample completions. Log-probs are those of the distribution sampled from: after temperature, top-p and top-k."""

    max_tokens: int = 256
    """Upper bound of new tokens per completion, at least 1."""
    temperature: float = 1.0
    """0 is greedy; log-probs are then those of temperature 1."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. The stop string's tokens stay in ``token_ids``."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, beside the model's own end-of-sequence tokens. They stay in ``token_ids``."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    seed: int | None = None
    """Seed of the call: completion ``j`` of prompt ``i`` depends on ``(seed, i, j)`` alone."""

    def __post_init__(self) -> None:
        force_setattr(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        force_setattr(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or a positive number"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or positive"),
            ("stop", all(self.stop), "non-empty strings"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise DataError(f"{name}={getattr(self, name)!r} must be {expected}", where=f"sampling.{name}")


class NamedLoss(Message):
    """A loss by name. ``options`` are validated by the loss's own config model; unknown ones are refused."""

    name: str
    """A built-in loss, a plugin's, or ``package.module:attribute`` where the operator allows it
    (``training.allow_loss_import``)."""
    options: dict[str, bool | int | float | str | None] = {}
    normalization: Normalization | None = None
    """What divides the summed loss, once per optimizer step: trained tokens, sequences with one, or ``constant``. ``None``
    takes the loss's own default (:attr:`arctic_core.losses.base.LossDefinition.normalization`)."""
    constant: float | None = None
    """The divisor of ``normalization="constant"``."""

    def __post_init__(self) -> None:
        if self.normalization is not None and (self.normalization == "constant") != (self.constant is not None):
            raise DataError("`constant` goes with normalization='constant', and only with it", where="loss.constant")
        if self.constant is not None and not 0 < self.constant < float("inf"):
            raise DataError(f"constant={self.constant} must be a positive number", where="loss.constant")


class Metric(Message):
    """A metric as a pair, so that means over micro-batches, ranks and steps are exact."""

    sum: float
    count: float = 1.0

    @property
    def mean(self) -> float:
        """``sum / count``; 0 where nothing was counted."""
        return self.sum / self.count if self.count else 0.0

    def __add__(self, other: Metric) -> Metric:
        return Metric(sum=self.sum + other.sum, count=self.count + other.count)


class Completion(Message):
    """One sampled response."""

    token_ids: np.ndarray
    """New tokens, the stop token included where one was drawn, int32 ``[R]``."""
    logprobs: np.ndarray
    """Natural log-prob of each token under the distribution sampled from, float32 ``[R]``."""
    text: str
    """Decoded tokens, for display only."""
    finish_reason: FinishReason
    policy_version: int
    """Policy version that produced the tokens."""


class EngineInfo(Message):
    """One running engine."""

    name: EngineName
    implementation: str
    """Registered name, e.g. ``"deepspeed"``."""
    ranks: int
    device: str
    """``"cpu"`` or ``"cuda"``."""
    dtype: str
    state: str
    """``"awake"``, ``"asleep"``, ``"paused"``, ``"stale"`` (must be synced before use) or ``"dead"``."""
    policy_version: int
    memory_bytes: int
    """Resident memory of all ranks (host memory on CPU, device memory on GPU)."""
    capabilities: tuple[str, ...]


class Place(Message):
    """Where one engine rank runs."""

    engine: EngineName
    rank: int
    node: str
    pid: int
    device: str
    """``"cpu"`` or a GPU's UUID."""
    share: float
    """Fraction of the device reserved."""


# --- operations ---------------------------------------------------------------------------------------------------------


class Operation(Message):
    """Base of the requests. ``mutates`` tells whether a retry needs its idempotency key."""

    @classmethod
    def mutates(cls) -> bool:
        return cls not in (GetInfo, Generate, Forward)

    @classmethod
    def op(cls) -> str:
        """Name on the wire and in ``capabilities``."""
        return str(cls.__struct_config__.tag)


class GetInfo(Operation, tag="info"):
    """What runs: engines, devices, versions, capabilities."""


class Generate(Operation, tag="generate"):
    """Sample ``n`` completions per prompt."""

    prompts: tuple[np.ndarray, ...]
    """Token ids per prompt, int32."""
    sampling: SamplingParams
    n: int = 1
    groups: tuple[int | str, ...] | None = None
    """Group id per prompt, used to route a group's rollouts to one replica."""
    request_id: str = ""
    """Handle for :class:`Abort`; filled in by the client."""


class Forward(Operation, tag="forward"):
    """Score a batch without gradients."""

    batch: Batch
    model: ModelName = "policy"
    entropy: bool = False
    temperature: float | None = None
    """Overrides the samples' own temperatures."""
    topk: int = 0
    """Report this many of the model's most likely tokens at each response token, with their log-probs."""
    given_topk: bool = False
    """Report the log-probs of the batch's own ``topk_ids`` instead; not together with ``topk``."""


class ForwardBackward(Operation, tag="forward_backward"):
    """Accumulate the gradient of a named loss, as a sum; :class:`Step` divides once."""

    batch: Batch
    loss: NamedLoss
    temperature: float | None = None


class Backward(Operation, tag="backward"):
    """Accumulate the gradient of ``Σ w·logprob + Σ v·entropy + Σ u·topk_logprob``, a plain sum."""

    batch: Batch
    grad_logprobs: np.ndarray
    """``w``, float32 ``[R]``."""
    grad_entropy: np.ndarray | None = None
    """``v``, float32 ``[R]``."""
    temperature: float | None = None
    grad_topk_logprobs: np.ndarray | None = None
    """``u``, of the log-probs of the batch's ``topk_ids``, float32 ``[R, K]``."""


class Step(Operation, tag="step"):
    """Apply the accumulated gradient."""

    lr: float | None = None
    """Learning rate of this step; absent means the configured schedule's."""
    max_grad_norm: float | None = None
    """Clipping norm of this step; absent means the configured one."""


class ZeroGrad(Operation, tag="zero_grad"):
    """Drop the accumulated gradient."""


class SyncWeights(Operation, tag="sync_weights"):
    """Bring the sampler to the trainer's policy version."""

    probe: tuple[np.ndarray, ...] = ()
    """Token id sequences scored by both sides after the sync; each needs at least two tokens."""
    force: bool = False
    """Sync although the sampler already has this version."""


class Sleep(Operation, tag="sleep"):
    """Free an engine's memory. Level 1 keeps the weights (moved off the device), level 2 drops them."""

    engine: EngineName
    level: int = 1


class Wake(Operation, tag="wake"):
    """Undo :class:`Sleep`. A sampler that lost its weights stays ``stale`` until the next sync."""

    engine: EngineName


class ResetPrefixCache(Operation, tag="reset_prefix_cache"):
    """Forget cached prompt prefixes of the sampler."""


class Pause(Operation, tag="pause"):
    """Hold generation. ``drain`` lets running requests end, ``keep`` freezes them, ``abort`` ends them now."""

    mode: PauseMode = "drain"


class Resume(Operation, tag="resume"):
    """Go on after :class:`Pause`."""


class Abort(Operation, tag="abort"):
    """End requests early; their completions return with ``finish_reason="abort"``. No ids means all."""

    request_ids: tuple[str, ...] = ()


class SaveCheckpoint(Operation, tag="save_checkpoint"):
    """Write ``<path>/step-<n>`` atomically and point ``<path>/latest`` at it."""

    path: str
    keep_last: int | None = None
    """Prune older checkpoints of this folder that carry our manifest."""
    extra: dict[str, str] = {}
    """Caller's strings kept in the manifest, e.g. the state of a data loader."""


class LoadCheckpoint(Operation, tag="load_checkpoint"):
    """Restore from ``path`` (a checkpoint, or a folder of them: then its latest)."""

    path: str
    restore: tuple[RestorePart, ...] = RESTORE_ALL


class ExportHF(Operation, tag="export_hf"):
    """Write weights, config and tokenizer as a Hugging Face folder."""

    path: str


class Shutdown(Operation, tag="shutdown"):
    """Stop all engines and the service."""


AnyOperation = (
    GetInfo
    | Generate
    | Forward
    | ForwardBackward
    | Backward
    | Step
    | ZeroGrad
    | SyncWeights
    | Sleep
    | Wake
    | ResetPrefixCache
    | Pause
    | Resume
    | Abort
    | SaveCheckpoint
    | LoadCheckpoint
    | ExportHF
    | Shutdown
)


# --- results ------------------------------------------------------------------------------------------------------------


class Result(Message):
    """Base of the answers."""


class Done(Result, tag="done"):
    """The operation has nothing more to say."""


class Info(Result, tag="info"):
    protocol_version: int
    job: str
    """Name of the job the engines belong to."""
    model: str
    engines: tuple[EngineInfo, ...]
    placement: tuple[Place, ...]
    packages: dict[str, str]
    """Installed versions of the packages that compute."""
    capabilities: tuple[str, ...]
    """Operations this service can carry out."""
    policy_version: int
    """The trainer's."""
    step: int
    """Optimizer steps taken."""


class Generated(Result, tag="generated"):
    completions: tuple[tuple[Completion, ...], ...]
    """Per prompt in the caller's order, ``n`` completions each."""


class CompletionReady(Result, tag="completion"):
    """One item of a streamed generation, in the order of finishing."""

    prompt: int
    index: int
    completion: Completion


class Scores(Result, tag="scores"):
    logprobs: np.ndarray
    """Log-prob (nats) of each response token, float32 ``[R]``, in the batch's order."""
    entropy: np.ndarray | None
    """Entropy (nats) of the distribution each response token was drawn from, float32 ``[R]``."""
    topk_ids: np.ndarray | None = None
    """The tokens asked for by ``topk`` (most likely first) or ``given_topk`` (as given), int32 ``[R, K]``."""
    topk_logprobs: np.ndarray | None = None
    """Their log-probs (nats), float32 ``[R, K]``."""


class Gradients(Result, tag="gradients"):
    """Metrics of a gradient accumulation."""

    metrics: dict[str, Metric]


class Stepped(Result, tag="stepped"):
    grad_norm: float
    """Global norm of the normalised gradient before clipping."""
    lr: float
    step: int
    policy_version: int


class SyncReport(Result, tag="synced"):
    version: int
    tensors: int
    bytes: int
    seconds: float
    carrier: str
    verified: tuple[str, ...]
    """The checks that passed, e.g. ``("names", "shapes", "dtypes", "bytes", "checksums", "probe")``."""
    probe_max_abs_diff: float | None = None
    """Largest |Δ log-prob| (nats) between sampler and trainer on the probe."""
    skipped: bool = False
    """The sampler already had this version and nothing was sent."""


class CheckpointRef(Result, tag="checkpoint"):
    path: str
    step: int
    policy_version: int
    extra: dict[str, str] = {}


class ExportRef(Result, tag="export"):
    path: str
    tensors: int
    bytes: int


AnyResult = Done | Info | Generated | CompletionReady | Scores | Gradients | Stepped | SyncReport | CheckpointRef | ExportRef


class ErrorInfo(Message, tag="error"):
    """An error on the wire."""

    kind: str
    """Class name of the error."""
    message: str
    where: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> ErrorInfo:
        """Describe any exception; one that is not ours keeps its type's name in the message."""
        if isinstance(error, ArcticError):
            return cls(kind=type(error).__name__, message=error.message, where=error.where or where, remedy=error.remedy)
        return cls(kind="EngineError", message=f"{type(error).__name__}: {error}", where=where)

    def to_exception(self) -> ArcticError:
        """The same error as a typed exception."""
        cls = error_types().get(self.kind)
        if cls is None:  # of a newer version, or of a plugin that only the service has
            return ArcticError(f"{self.kind}: {self.message}", where=self.where, remedy=self.remedy)
        return cls(self.message, where=self.where, remedy=self.remedy)


# --- envelopes ----------------------------------------------------------------------------------------------------------


class Request(Message):
    """What a transport sends. ``(session, sequence)`` is the idempotency key of a mutating operation."""

    session: str
    sequence: int
    operation: AnyOperation
    deadline_s: float
    """Seconds the service may take before it answers with ``DeadlineExceeded``."""
    version: int = PROTOCOL_VERSION


class Reply(Message):
    """What comes back; a stream sends one :class:`Reply` per item."""

    sequence: int
    body: AnyResult | ErrorInfo

    def unwrap(self) -> AnyResult:
        """The result, or the error raised as its own type."""
        if isinstance(self.body, ErrorInfo):
            raise self.body.to_exception()
        return self.body
