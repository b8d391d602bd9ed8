"""Weights and moments by parameter, whatever the ZeRO stage, the number of ranks or the compute type.

A checkpoint holds, in float32 and whole, every parameter and its two Adam moments, spread over files that the ranks write
side by side. It can be loaded by any number of ranks at any stage (compare DeepSpeed's Universal Checkpointing, Lian et al.,
2024): each rank reads what it needs of all files. No pickle is involved.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from arctic_core.backends.deepspeed_engine.optimizer import ScaledAdamW
from arctic_core.errors import CheckpointError

_SHARD_BYTES = 2 << 30  # host memory that one rank collects before it writes a file


class FullState(abc.ABC):
    """Access to whole float32 tensors behind partitioned ones. All ranks call with the same names, in the same order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters

    @abc.abstractmethod
    def read(self, name: str, part: str | None) -> torch.Tensor:
        """The parameter (``part=None``) or one of its moments."""

    @abc.abstractmethod
    def write(self, name: str, part: str | None, value: torch.Tensor) -> None:
        """Set it from a whole tensor. Weights in the compute type follow at the next held step."""


class ReplicatedState(FullState):
    """Stage 0: the optimizer's parameters stand in the model's order, and are the model's own in float32."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], adamw: ScaledAdamW) -> None:
        super().__init__(parameters)
        masters = [master for group in adamw.param_groups for master in group["params"]]
        self._masters = dict(zip(parameters, masters, strict=True))
        self._adamw = adamw

    def read(self, name: str, part: str | None) -> torch.Tensor:
        return self._tensor(name, part).detach()

    @torch.no_grad()
    def write(self, name: str, part: str | None, value: torch.Tensor) -> None:
        self._tensor(name, part).copy_(value)

    def _tensor(self, name: str, part: str | None) -> torch.Tensor:
        master = self._masters[name]
        return master if part is None else self._adamw.state[master][part]


class FlatState(FullState):
    """Stages 1 and 2: each rank holds a stretch of all parameters laid end to end."""

    def read(self, name: str, part: str | None) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        value = safe_get_full_fp32_param(parameter) if part is None else safe_get_full_optimizer_state(parameter, part)
        assert value is not None
        return value

    def write(self, name: str, part: str | None, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        parameter = self.parameters[name]
        if part is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, part)


class ShardedState(FlatState):
    """Stage 3: each rank holds an equal stretch of every parameter, the last one padded."""

    def write(self, name: str, part: str | None, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        parameter: Any = self.parameters[name]
        size = parameter.ds_tensor.numel()
        mine = value.flatten()[dist.get_rank() * size :][:size]
        local = torch.zeros(size, dtype=torch.float32)  # DeepSpeed's call for whole tensors fails where the last part is padded
        local[: mine.numel()] = mine
        if part is None:
            safe_set_local_fp32_param(parameter, local)
        else:
            safe_set_local_optimizer_state(parameter, local, part)


def write_shards(directory: Path, prefix: str, rank: int, world_size: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write named tensors, each by one rank, so that all write about the same number of bytes.

    Args:
        directory: Existing folder shared by the ranks.
        prefix: Files are called ``<prefix>-<rank>-<number>.safetensors``.
        tensors: The same names and shapes in the same order on all ranks; consumed one by one.
    """
    loads = [0] * world_size
    pending: dict[str, torch.Tensor] = {}
    size = number = 0

    def flush() -> None:
        nonlocal size, number
        if pending:
            save_file(pending, directory / f"{prefix}-{rank:05d}-{number:03d}.safetensors")
            pending.clear()
            size, number = 0, number + 1

    for name, tensor in tensors:
        owner = loads.index(min(loads))
        loads[owner] += tensor.nbytes
        if owner == rank:
            pending[name] = tensor.to("cpu", torch.float32, copy=True).contiguous()
            size += tensor.nbytes
            if size >= _SHARD_BYTES:
                flush()
    flush()


class ShardReader:
    """Tensors of all ``<prefix>-*.safetensors`` in a folder, read one at a time.

    Args:
        directory: Folder that :func:`write_shards` wrote.
        prefix: As given there.
        shapes: What must be there; ``None`` reads nothing.

    Raises:
        CheckpointError: A file cannot be read, or names or shapes differ.
    """

    def __init__(self, directory: Path, prefix: str, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        self._files: dict[str, Any] = {}
        if shapes is None:
            return
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(directory.glob(f"{prefix}-*.safetensors")):
            try:
                handle: Any = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"cannot be read: {error}", where=str(file)) from error
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                found[name] = tuple(handle.get_slice(name).get_shape())
                self._files[name] = handle
        different = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        if different:
            text = ", ".join(f"{name}: {found.get(name)} instead of {shapes.get(name)}" for name in different[:5])
            raise CheckpointError(f"missing, unexpected or mis-shaped {prefix}: {text}", where=str(directory))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """In the order of names, which is that of all ranks."""
        for name in sorted(self._files):
            yield name, self._files[name].get_tensor(name)
