"""One weight sync, from plan to commit.

    plan      trainer: names, shapes, dtypes, ties, buckets ──▶ every sampler replica checks it against its own model
    push      bucket by bucket: all trainer ranks gather, rank 0 publishes, every replica maps and verifies
    commit    running generations end (with a deadline), every replica loads all buckets and resets its prefix cache
    probe     optional: both sides score the same tokens with the new weights

Whatever fails before the commit leaves the old weights serving. A commit that fails half-way leaves the sampler stale.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from arctic_core.backends.group import EngineGroup, SamplerGroup, TrainerGroup
from arctic_core.config.client import ArcticRLClientConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import ArcticError, DataError, WeightSyncError
from arctic_core.protocol import PauseMode, SyncReport
from arctic_core.service.state import EngineState

logger = logging.getLogger(__name__)


async def sync_weights(
    trainer: TrainerGroup,
    sampler: SamplerGroup,
    state: EngineState,
    config: ArcticRLClientConfig,
    *,
    version: int,
    probe: Sequence[np.ndarray],
) -> SyncReport:
    """Bring the sampler to ``version``. The caller holds both engines and admits no new generation.

    Raises:
        WeightSyncError: See the module's text.
        DeadlineExceeded: Running generations did not end in time; the old weights serve on.
    """
    started = time.monotonic()
    settings = config.weight_sync
    carrier = "shared_memory" if settings.carrier == "auto" else settings.carrier
    probe_batch = _probe_batch(probe)
    plan = await trainer.weight_plan(settings.bucket_bytes)
    try:
        await sampler.everywhere("sync_begin", plan)
        for index in range(len(plan.buckets)):
            ref = await trainer.export_bucket(plan, index, carrier)
            await sampler.everywhere("sync_push", ref)
        await _commit(sampler, state, config.deadlines.drain, version)
    except BaseException:
        await _quietly(sampler, "sync_abandon")
        raise
    finally:
        await _quietly(trainer, "release_buckets")
    verified = ["names", "shapes", "dtypes", "bytes"] + (["checksums"] if settings.checksums else [])
    difference = None
    if probe_batch is not None:
        difference = await _probe(trainer, sampler, state, batch=probe_batch, probe=probe, tolerance=settings.probe_tolerance)
        verified.append("probe")
    return SyncReport(
        version=version,
        tensors=len(plan.tensors),
        bytes=plan.nbytes,
        seconds=time.monotonic() - started,
        carrier=carrier,
        verified=tuple(verified),
        probe_max_abs_diff=difference,
    )


async def _commit(sampler: SamplerGroup, state: EngineState, drain_s: float, version: int) -> None:
    was_paused = state.paused
    if not was_paused:
        await pause(sampler, state, "drain", drain_s)
    try:
        await sampler.everywhere("sync_commit", version)
    except BaseException as error:  # a cancelled commit has begun too
        if not isinstance(error, WeightSyncError) or len(sampler.ranks) > 1:
            reason = error.message if isinstance(error, ArcticError) else "it was cut off"
            state.stale = f"the commit of policy version {version} failed half-way ({reason})"
        raise
    finally:
        if not was_paused:
            await _quietly(sampler, "resume")
            state.paused = False
    state.policy_version = version
    state.stale = ""


async def pause(sampler: EngineGroup, state: EngineState, mode: PauseMode, drain_s: float) -> None:
    """Hold generation on all replicas, or, where that fails or is cut off, on none."""
    try:
        await sampler.everywhere("pause", mode, drain_s)
    except BaseException:
        await _quietly(sampler, "resume")
        state.paused = False
        raise
    state.paused = True


async def _quietly(group: EngineGroup, method: str) -> None:
    """Clean up after a sync; the error that ended it matters more than one from cleaning."""
    try:
        await group.everywhere(method)
    except ArcticError as error:
        logger.warning("%s after a weight sync failed: %s", method, error)


def _probe_batch(probe: Sequence[np.ndarray]) -> Batch | None:
    for i, ids in enumerate(probe):
        if len(ids) < 2:
            raise DataError(f"probe sequence {i} has {len(ids)} tokens, at least 2 are needed", where="sync_weights.probe")
    return Batch.from_samples(Sample(token_ids=ids, prompt_length=1) for ids in probe) if probe else None


async def _probe(
    trainer: TrainerGroup,
    sampler: SamplerGroup,
    state: EngineState,
    *,
    batch: Batch,
    probe: Sequence[np.ndarray],
    tolerance: float,
) -> float:
    expected = (await trainer.forward(batch, entropy=False, temperature=None)).logprobs
    worst = 0.0
    for replica, scores in enumerate(await sampler.everywhere("score", list(probe))):
        difference = float(np.abs(np.concatenate(scores) - expected).max())
        if not difference <= tolerance:
            state.stale = f"the probe of policy version {state.policy_version} failed"
            raise WeightSyncError(
                f"after the sync the sampler's log-probs differ from the trainer's by {difference:.3g} nats "
                f"(weight_sync.probe_tolerance is {tolerance:g})",
                where=f"sampler[{replica}]",
                remedy="sync again; if it persists, the sampler's reload of this architecture is broken, or its dtype differs",
            )
        worst = max(worst, difference)
    logger.debug("probe of %d sequences differs by %.3g nats", len(probe), worst)
    return worst
