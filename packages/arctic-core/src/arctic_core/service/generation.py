"""From one ``generate`` request to jobs for the samplers, and the gate they pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import numpy as np

from arctic_core.backends.base import SampleJob
from arctic_core.errors import DataError, QueueFullError
from arctic_core.protocol import Generate


def make_jobs(op: Generate, *, max_seq_len: int) -> tuple[list[SampleJob], list[int]]:
    """One job per completion, prompt-major, and per job the number of its group.

    ``max_tokens`` is cut to what ``max_seq_len`` leaves after the prompt. Completion ``j`` of prompt ``i`` is seeded by
    ``(seed, i, j)``.

    Raises:
        DataError: An empty prompt, one that leaves no room for a token, ``n < 1``, or group ids of another number.
    """
    if op.n < 1:
        raise DataError(f"n={op.n} must be at least 1", where="generate.n")
    if op.groups is not None and len(op.groups) != len(op.prompts):
        raise DataError(f"{len(op.groups)} group ids for {len(op.prompts)} prompts", where="generate.group")
    numbers: dict[int | str, int] = {}
    jobs, groups = [], []
    for i, prompt in enumerate(op.prompts):
        room = max_seq_len - len(prompt)
        if len(prompt) == 0 or room < 1:
            raise DataError(
                f"prompt {i} has {len(prompt)} tokens; 1 to {max_seq_len - 1} fit max_seq_len={max_seq_len}",
                where="generate.prompts",
            )
        sampling = msgspec.structs.replace(op.sampling, max_tokens=min(op.sampling.max_tokens, room))
        key: int | str = i if op.groups is None else op.groups[i]
        group = numbers.setdefault(key, len(numbers))
        for j in range(op.n):
            seed = None if op.sampling.seed is None else _seed(op.sampling.seed, i, j)
            jobs.append(SampleJob(request_id=f"{op.request_id}/{i}.{j}", prompt=prompt, sampling=sampling, seed=seed))
            groups.append(group)
    return jobs, groups


def _seed(seed: int, prompt: int, index: int) -> int:
    entropy = (seed & (2**63 - 1), int(seed < 0), prompt, index)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0])


class Admission:
    """Counts running completions against a bound, and can be held shut.

    Args:
        capacity: Most completions that may run or wait in the samplers.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside = 0
        self._open = asyncio.Event()
        self._open.set()

    @contextlib.asynccontextmanager
    async def admit(self, count: int) -> AsyncIterator[None]:
        """Let ``count`` completions in, once the gate is open.

        Raises:
            QueueFullError: They would exceed the capacity.
        """
        if self._inside + count > self._capacity:
            raise QueueFullError(
                f"{count} completions asked for, {self._inside} run or wait, at most {self._capacity} may",
                where="sampler",
                remedy="wait for running requests to end, send fewer at once, or raise sampling.max_waiting",
            )
        self._inside += count
        try:
            await self._open.wait()
            yield
        finally:
            self._inside -= count

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Keep new completions waiting; those inside go on."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()
