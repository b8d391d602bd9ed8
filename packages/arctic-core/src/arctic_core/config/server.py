"""Configuration of ``arctic serve``. Tokens themselves are never in it: it names the variables or files that hold them."""

from __future__ import annotations

import ipaddress
from typing import Literal, Self

from pydantic import Field, model_validator

from arctic_core.config.base import ConfigModel
from arctic_core.config.client import RayConfig

Role = Literal["admin", "job", "infer", "read"]

SAFE_VLLM_ARGUMENTS = (
    "block_size",
    "cpu_offload_gb",
    "cudagraph_capture_sizes",
    "data_parallel_size",
    "disable_cascade_attn",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "kv_cache_dtype",
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "max_num_batched_tokens",
    "max_num_partial_prefills",
    "num_gpu_blocks_override",
    "prefix_caching_hash_algo",
    "scheduling_policy",
    "swap_space",
    "tensor_parallel_size",
)
"""Engine arguments of vLLM that size or tune it. Others can load code or read files, so the operator has to name them."""


class TokenConfig(ConfigModel):
    """One token and what it may do. Exactly one of ``env`` and ``file`` says where its text is."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Who holds it, for logs; the owner of the jobs that it starts."""
    role: Role
    """``admin``: everything, all jobs. ``job``: jobs of its own. ``infer``: sampling from any job. ``read``: watching."""
    env: str | None = None
    """Environment variable with the text."""
    file: str | None = None
    """File with the text; white space around it does not count."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise ValueError(f"token {self.name!r}: give either env or file")
        return self


class ServerConfig(ConfigModel):
    """Everything ``arctic serve`` needs to know.

    Example:
        >>> config = ServerConfig(port=0, engines="local", data_root="/srv/arctic")
    """

    host: str = "127.0.0.1"
    """Address to listen on. Off the loopback interface tokens are mandatory."""
    port: int = Field(8520, ge=0, le=65535)
    """0 takes a free one, which is printed and written to ``--port-file``."""
    tokens: tuple[TokenConfig, ...] = ()
    """Who may do what. Without any, whoever reaches the loopback address is ``admin``."""
    tls_cert: str | None = None
    """Certificate chain, PEM; with ``tls_key``."""
    tls_key: str | None = None
    """Private key, PEM."""
    engines: Literal["ray", "local"] = "ray"
    """Where jobs run: as Ray actors, or inside the server's process."""
    ray: RayConfig = RayConfig()
    """The Ray cluster of all jobs."""
    ray_cpus: int | None = Field(None, ge=1)
    """CPUs that a private cluster declares; ranks on CPU take turns on the cores there are. Absent: 8 for each of
    ``max_jobs``."""
    max_jobs: int = Field(8, ge=1)
    """Most jobs that start or run at once."""
    max_body_bytes: int = Field(2 * 2**30, ge=2**10)
    """Largest frame of a request."""
    max_buffered_bytes: int = Field(8 * 2**30, ge=2**10)
    """Most bytes of all requests' frames in memory; more is refused with 429 for the time being."""
    max_header_bytes: int = Field(64 * 2**10, ge=2**10)
    """Most bytes of a request's line and headers."""
    header_timeout_s: float = Field(10.0, gt=0)
    """A connection is closed when a request's headers take longer."""
    body_timeout_s: float = Field(60.0, gt=0)
    """Longest pause between two pieces of a body."""
    max_inflight_calls: int = Field(1024, ge=1)
    """Most calls and streams that run at once, all jobs together."""
    max_waiting: int = Field(4096, ge=1)
    """Most requests that wait at once for a call's answer or for a job's state."""
    default_lease_s: float = Field(300.0, gt=0)
    """A job whose client says nothing for this long is stopped."""
    max_lease_s: float = Field(86_400.0, gt=0)
    """Longest lease a client may ask for."""
    max_deadline_s: float = Field(86_400.0, gt=0)
    """Longest deadline a request may carry."""
    orphan_s: float = Field(30.0, gt=0)
    """A read or generation for whose answer nobody has waited this long is cancelled; writes run on."""
    result_ttl_s: float = Field(600.0, gt=0)
    """Answers are kept this long, or until their client deletes them."""
    max_result_bytes: int = Field(4 * 2**30, ge=0)
    """Most bytes of kept answers per job; the oldest go first."""
    job_ttl_s: float = Field(600.0, ge=0)
    """How long a job that ended is still listed, with its error."""
    drain_s: float = Field(30.0, ge=0)
    """What running calls get to end in when the server is told to stop."""
    data_root: str = "."
    """Folder of checkpoints and exports; paths of clients must lie inside it, symbolic links resolved, and relative ones start
    here."""
    model_roots: tuple[str, ...] = ()
    """More folders from which clients may load models by path. Hub ids are always allowed."""
    unrestricted_paths: bool = False
    """Let clients name any path of this machine, relative ones from the server's working folder: for a server that one client
    owns. Only on the loopback interface."""
    allow_loss_import: bool = False
    """Let clients name losses as ``package.module:attribute``, which runs code of their choice in the engines."""
    vllm_arguments: tuple[str, ...] = SAFE_VLLM_ARGUMENTS
    """Keys of ``sampling.vllm`` that clients may set."""
    log_format: Literal["text", "json"] = "text"
    """How log lines look."""

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [token.name for token in self.tokens]
        if len(set(names)) != len(names):
            raise ValueError("two tokens have the same name")
        if not self.tokens and not self.loopback:
            raise ValueError(f"host {self.host!r} can be reached from other machines: tokens are mandatory there")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.default_lease_s > self.max_lease_s:
            raise ValueError(f"default_lease_s {self.default_lease_s:g} exceeds max_lease_s {self.max_lease_s:g}")
        if self.max_body_bytes > self.max_buffered_bytes:
            raise ValueError("max_body_bytes exceeds max_buffered_bytes: the largest body could never be read")
        if self.unrestricted_paths and not self.loopback:
            raise ValueError("unrestricted_paths is for a server on the loopback interface")
        if self.engines == "local" and (self.ray != RayConfig() or self.ray_cpus):
            raise ValueError("ray, ray_cpus: no effect, because engines is 'local'")
        if self.ray.address is not None and self.ray_cpus:
            raise ValueError("ray_cpus: no effect, because ray.address names a cluster that has its own")
        return self
