"""What every sampler checks of a job before any of a request's jobs starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arctic_core.backends.base import SampleJob
from arctic_core.errors import DataError


def check_jobs(jobs: Sequence[SampleJob], *, vocabulary: int, max_seq_len: int) -> None:
    """Refuse jobs that cannot run.

    Raises:
        DataError: A prompt is empty, leaves no room for a new token, or holds an id outside the vocabulary; a stop token is.
    """
    for job in jobs:
        check_ids(job.prompt, vocabulary, where=f"job {job.request_id}")
        if len(job.prompt) >= max_seq_len:
            raise DataError(
                f"the prompt has {len(job.prompt)} tokens, which leaves no room for a response in max_seq_len={max_seq_len}",
                where=f"job {job.request_id}",
                remedy="shorten the prompt or raise max_seq_len",
            )
        if bad := [token for token in job.sampling.stop_token_ids if not 0 <= token < vocabulary]:
            raise DataError(f"stop token {bad[0]} is outside the vocabulary of {vocabulary}", where="sampling.stop_token_ids")


def check_sequences(sequences: Sequence[np.ndarray], *, vocabulary: int, max_seq_len: int) -> None:
    """Refuse sequences that cannot be scored.

    Raises:
        DataError: A sequence has fewer than two tokens, more than ``max_seq_len``, or an id outside the vocabulary.
    """
    for i, ids in enumerate(sequences):
        check_ids(ids, vocabulary, where=f"sequence {i}")
        if not 2 <= len(ids) <= max_seq_len:
            raise DataError(f"has {len(ids)} tokens, 2 to {max_seq_len} can be scored", where=f"sequence {i}")


def check_ids(ids: np.ndarray, vocabulary: int, *, where: str) -> None:
    """Raise :class:`DataError` where ``ids`` is empty or holds an id outside ``0 .. vocabulary - 1``."""
    if len(ids) == 0:
        raise DataError("has no tokens", where=where)
    outside = np.flatnonzero((ids < 0) | (ids >= vocabulary))
    if outside.size:
        at = int(outside[0])
        raise DataError(f"token {int(ids[at])} at position {at} is outside the vocabulary of {vocabulary}", where=where)
