"""DeepSpeed in this process: imported for the right device, joined to the other ranks, left again without traces.

DeepSpeed keeps global state (accelerator, communication backend, process groups) and reads environment variables. Several
engines may live in one process, one after the other or, with a world of one each, at the same time. So memberships are
counted, and the environment is restored, since other libraries read the same variables: all that stays set while an engine
lives is ``LOCAL_RANK``, which ZeRO 3 reads in every forward pass.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from arctic_core.backends.base import RankSpec
from arctic_core.backends.deepspeed_engine.rendezvous import meet
from arctic_core.errors import DeadlineExceeded, EngineStartError, MissingExtraError, UnsupportedVersionError

LOCAL_RANK = "LOCAL_RANK"
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass
class _Membership:
    rank: int
    world_size: int
    owned: bool
    """Whether we made the default process group, and so destroy it."""
    users: int
    store: Store | None
    """Held as long as the group: rank 0's process serves it."""
    set_local_rank: bool
    """Whether we set ``LOCAL_RANK``, and so remove it."""


_membership: _Membership | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while; afterwards the environment is exactly as before, whatever was set inside."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def load_deepspeed(device: str) -> ModuleType:
    """Import DeepSpeed for ``"cpu"`` or ``"cuda"``.

    Raises:
        MissingExtraError: It is not installed.
        EngineStartError: DeepSpeed already runs on another device in this process.
        UnsupportedVersionError: This DeepSpeed is too old.
    """
    try:
        with environment({"DS_ACCELERATOR": device}):
            import deepspeed
            from deepspeed.accelerator import get_accelerator
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the deepspeed engine needs the package {error.name!r}", remedy='pip install "arctic-core[train]"'
        ) from error
    accelerator: Any = get_accelerator()
    running = accelerator.device_name()
    if running != device:
        raise EngineStartError(
            f"DeepSpeed runs on {running} in this process already, {device} is asked for",
            remedy="run engines of different devices in different processes",
        )
    if not hasattr(deepspeed.DeepSpeedEngine, "managed_gradient_accumulation"):  # an unknown setting would just be ignored
        raise UnsupportedVersionError(
            f"deepspeed {deepspeed.__version__} has no unmanaged gradient accumulation",
            remedy='pip install -U "deepspeed>=0.19.8"',
        )
    # Without this the first communication compiles a shared-memory operator for about two minutes; gloo needs none of it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)
    return deepspeed


def join(spec: RankSpec, deepspeed: ModuleType) -> None:
    """Become a member of the process group of the engine's ranks. Every call is undone by one :func:`leave`.

    Raises:
        EngineStartError: This process is already a member of a group of other size or as another rank.
        DeadlineExceeded: Not all ranks came within ``deadlines.start``.
    """
    global _membership
    with _lock:
        if _membership is None:
            _membership = _form_group(spec)
            os.environ.setdefault(LOCAL_RANK, str(torch.cuda.current_device() if spec.device == "cuda" else 0))
            with environment({}):
                deepspeed.init_distributed(dist_backend=BACKENDS[spec.device], auto_mpi_discovery=False, verbose=False)
        elif (_membership.rank, _membership.world_size) != (spec.rank, spec.world_size) or spec.world_size > 1:
            raise EngineStartError(
                f"this process is rank {_membership.rank} of {_membership.world_size} of another engine",
                where=f"{spec.engine}[{spec.rank}]",
                remedy="give each rank of an engine with several ranks its own process",
            )
        _membership.users += 1


def leave(deepspeed: ModuleType) -> None:
    """Undo one :func:`join`; the last one out dissolves the group."""
    global _membership
    with _lock:
        if _membership is None:
            return
        _membership.users -= 1
        if _membership.users > 0:
            return
        if _membership.owned and dist.is_initialized():
            deepspeed.comm.destroy_process_group()
        if _membership.set_local_rank:
            os.environ.pop(LOCAL_RANK, None)
        deepspeed.comm.comm.cdb = None  # DeepSpeed's handle outlives the group, and would be taken for a live one
        _membership = None


def limit_waits(group: dist.ProcessGroup | None, seconds: float) -> None:
    """Give a group DeepSpeed made for itself our deadline; ``new_group`` does not pass on the default group's."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _form_group(spec: RankSpec) -> _Membership:
    if dist.is_initialized():  # by another library of this process, e.g. a sampler
        if (dist.get_rank(), dist.get_world_size()) != (spec.rank, spec.world_size) or spec.world_size > 1:
            raise EngineStartError(
                f"torch.distributed is in use here as rank {dist.get_rank()} of {dist.get_world_size()}",
                where=f"{spec.engine}[{spec.rank}]",
                remedy="run the engine in a process of its own",
            )
        return _Membership(spec.rank, spec.world_size, False, 0, None, LOCAL_RANK not in os.environ)
    store = meet(spec)
    deadlines = spec.config.deadlines
    try:
        store.set_timeout(timedelta(seconds=deadlines.start))
        dist.init_process_group(
            BACKENDS[spec.device],
            store=store,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=deadlines.request),
            device_id=torch.device("cuda", torch.cuda.current_device())
            if spec.device == "cuda" and spec.world_size > 1
            else None,
        )
        _await_everyone(store, spec)
    except dist.DistError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise DeadlineExceeded(
            f"not all {spec.world_size} ranks met within {deadlines.start:g} s: {error}",
            where=f"{spec.engine}[{spec.rank}]",
            remedy="see which rank failed to start, or raise deadlines.start",
        ) from error
    return _Membership(spec.rank, spec.world_size, True, 0, store, LOCAL_RANK not in os.environ)


def _await_everyone(store: Store, spec: RankSpec) -> None:
    """Wait under the deadline of starting; the group's own is that of a request, which may be far longer."""
    store.set(f"arctic/joined/{spec.rank}", "1")
    store.wait([f"arctic/joined/{rank}" for rank in range(spec.world_size)], timedelta(seconds=spec.config.deadlines.start))
