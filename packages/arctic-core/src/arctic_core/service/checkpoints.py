"""Saving, loading and exporting the trainer. Atomicity is :mod:`arctic_core.checkpoint`'s; the ranks write the content."""

from __future__ import annotations

import asyncio
from pathlib import Path

from arctic_core.backends.group import TrainerGroup
from arctic_core.checkpoint import CheckpointInfo, CheckpointWriter, resolve_checkpoint, verify
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.errors import InvalidStateError
from arctic_core.protocol import CheckpointRef, ExportHF, ExportRef, LoadCheckpoint, SaveCheckpoint
from arctic_core.service.engines import RunningEngine


async def save(
    trainer: TrainerGroup, engine: RunningEngine, op: SaveCheckpoint, config: ArcticRLClientConfig, *, step: int
) -> CheckpointRef:
    """Write ``<path>/step-<n>`` and point ``<path>/latest`` at it. A failure leaves earlier checkpoints as they were.

    Raises:
        InvalidStateError: A gradient is accumulated; it would be lost on loading.
        CheckpointError: The folder cannot be written.
    """
    if trainer.accumulating:
        raise InvalidStateError(
            "a gradient is accumulated, and a checkpoint does not hold gradients",
            where="save_checkpoint",
            remedy="call step() or zero_grad() first",
        )
    info = CheckpointInfo(
        policy_version=engine.state.policy_version,
        engine=engine.definition.name,
        world_size=len(trainer.ranks),
        dtype=(await trainer.reports())[0].dtype,
        model=config.model_name,
        extra=op.extra,
    )
    writer = CheckpointWriter(op.path, step)
    try:
        folder = await asyncio.to_thread(writer.begin)
        await trainer.everywhere("save", str(folder))
        final = await asyncio.to_thread(writer.commit, info, op.keep_last)
    except BaseException:
        writer.abandon()
        raise
    return CheckpointRef(path=str(final), step=step, policy_version=info.policy_version, extra=op.extra)


async def load(trainer: TrainerGroup, engine: RunningEngine, op: LoadCheckpoint) -> CheckpointRef:
    """Verify a checkpoint and restore the chosen parts; an accumulated gradient is dropped.

    With ``"step"`` among the parts the policy version becomes the checkpoint's; otherwise it moves on by one.

    Raises:
        CheckpointError: There is none, it is damaged, or it is of another model.
    """
    folder = await asyncio.to_thread(resolve_checkpoint, op.path)
    manifest = await asyncio.to_thread(verify, folder)
    step = await trainer.load(str(folder), op.restore)
    state = engine.state
    state.policy_version = manifest.info.policy_version if "step" in op.restore else state.policy_version + 1
    return CheckpointRef(path=str(folder), step=step, policy_version=state.policy_version, extra=manifest.info.extra)


async def export_hf(trainer: TrainerGroup, op: ExportHF) -> ExportRef:
    """Write weights, config and tokenizer as a Hugging Face folder."""
    path = Path(op.path).absolute()
    tensors, size = (await trainer.everywhere("export_hf", str(path)))[0]
    return ExportRef(path=str(path), tensors=tensors, bytes=size)
