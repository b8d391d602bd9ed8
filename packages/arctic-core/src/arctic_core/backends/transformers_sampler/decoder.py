"""The decode loop: one thread that owns the model, the running cohorts and the queue.

Everything that touches them runs on this thread between two steps, handed over by :meth:`Decoder.call`; so there are no
locks, and a weight update can never meet a forward pass.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from arctic_core.backends.transformers_sampler.cohort import Cohort, Row
from arctic_core.backends.transformers_sampler.drawing import draw, sampling_logprobs
from arctic_core.errors import EngineError
from arctic_core.protocol import Completion, FinishReason

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What ends a completion whatever its job asks for."""

    max_num_seqs: int
    max_seq_len: int
    eos_token_ids: frozenset[int]


class Decoder:
    """Runs jobs first come, first served, up to ``max_num_seqs`` at once; a free place is filled at the next step.

    Args:
        model: A causal language model in evaluation mode.
        decode: Token ids to text.
        limits: See :class:`Limits`.
        version: Policy version of the model's weights.
    """

    def __init__(self, model: PreTrainedModel, decode: Callable[[Sequence[int]], str], limits: Limits, version: int) -> None:
        self.model = model
        self.version = version
        self._decode = decode
        self._limits = limits
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Row] = deque()
        self._cohorts: list[Cohort] = []
        self._hold: Literal["", "admission", "everything"] = ""
        self._drained: list[Future[None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="arctic-decoder", daemon=True)
        self._thread.start()

    # --- from any thread ------------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the decoder's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # it belongs to the caller
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def stop(self, timeout_s: float) -> bool:
        """End the thread; running jobs fail. Returns whether it ended in time (a step cannot be interrupted)."""

        def stop() -> None:
            self._stopping = True

        self._inbox.put(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the decoder's thread ----------------------------------------------------------------------------------------

    def submit(self, rows: Iterable[Row]) -> None:
        """Queue rows."""
        self._waiting.extend(rows)

    def abort(self, chosen: Callable[[Row], bool]) -> None:
        """End chosen rows with ``"abort"`` and what they have."""
        for row in [row for row in self._waiting if chosen(row)]:
            self._waiting.remove(row)
            self._finish(row, "abort")
        for cohort in self._cohorts:
            for row in cohort.rows:
                if chosen(row):
                    self._finish(row, "abort")
        self._sweep()

    def pause(self, *, freeze: bool) -> None:
        """Admit no more rows; with ``freeze`` also stop the running ones."""
        self._hold = "everything" if freeze else "admission"

    def drained(self) -> Future[None]:
        """A future that is done once nothing runs."""
        future: Future[None] = Future()
        self._drained.append(future)
        self._sweep()
        return future

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._hold = ""

    @property
    def running(self) -> int:
        """Rows being decoded."""
        return sum(len(cohort.rows) for cohort in self._cohorts)

    @property
    def busy(self) -> bool:
        """Whether rows are being decoded, or will be in the next step."""
        return bool(self._cohorts) or self._can_step()

    def weights_changed(self, version: int) -> None:
        """Serve ``version``; what runs has its KV cache computed anew before its next token."""
        self.version = version
        for cohort in reversed(self._cohorts):
            self._waiting.extendleft(reversed(cohort.rows))
        self._cohorts.clear()

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                self._read_inbox()
                if self._stopping or not self._can_step():
                    continue
                try:
                    self._step()
                except Exception as error:  # as in _admit
                    _fail(self._clear(), error)
        for row in (*self._clear(), *self._waiting):
            row.deliver(EngineError("the sampler was stopped"))
        self._waiting.clear()

    def _read_inbox(self) -> None:
        while not self._inbox.empty() or not (self._stopping or self._can_step()):
            self._inbox.get()()

    def _can_step(self) -> bool:
        if self._hold == "everything":
            return False
        return bool(self._cohorts) or (bool(self._waiting) and not self._hold)

    def _step(self) -> None:
        free = self._limits.max_num_seqs - self.running
        if self._waiting and not self._hold and free > 0:
            self._admit([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))])
        for cohort in self._cohorts:
            self._draw(cohort)
        self._sweep()

    def _admit(self, rows: list[Row]) -> None:
        try:
            self._cohorts.append(Cohort(self.model, rows))
        except Exception as error:  # e.g. out of memory: these rows fail, others may do better
            _fail(rows, error)

    def _draw(self, cohort: Cohort) -> None:
        params = [row.job.sampling for row in cohort.rows]
        logprobs_BV = sampling_logprobs(cohort.logits_BV, params)
        tokens_B = draw(logprobs_BV, params, [row.generator for row in cohort.rows])
        drawn = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0].tolist()
        tokens = tokens_B.tolist()
        for row, token, logprob in zip(cohort.rows, tokens, drawn, strict=True):
            row.version = self.version if row.version is None else row.version
            row.tokens.append(token)
            row.logprobs.append(logprob)
            self._check_end(row, token)
        going = [i for i, row in enumerate(cohort.rows) if not row.done]
        cohort.keep(going)
        if going:
            cohort.advance([tokens[i] for i in going])

    def _check_end(self, row: Row, token: int) -> None:
        sampling = row.job.sampling
        if (not sampling.ignore_eos and token in self._limits.eos_token_ids) or token in sampling.stop_token_ids:
            self._finish(row, "stop")
            return
        if sampling.stop:
            text = self._decode(row.tokens)
            ends = [at + len(stop) for stop in sampling.stop if (at := text.find(stop)) >= 0]
            if ends:
                self._finish(row, "stop", text[: min(ends)])
                return
        if len(row.tokens) >= sampling.max_tokens or len(row.job.prompt) + len(row.tokens) >= self._limits.max_seq_len:
            self._finish(row, "length")

    def _finish(self, row: Row, reason: FinishReason, text: str | None = None) -> None:
        completion = Completion(
            token_ids=np.asarray(row.tokens, np.int32),
            logprobs=np.asarray(row.logprobs, np.float32),
            text=self._decode(row.tokens) if text is None else text,
            finish_reason=reason,
            policy_version=self.version if row.version is None else row.version,
        )
        row.deliver((row.index, completion))

    def _sweep(self) -> None:
        for cohort in self._cohorts:
            cohort.keep([i for i, row in enumerate(cohort.rows) if not row.done])
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        if not self._cohorts:
            for future in self._drained:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)
            self._drained.clear()

    def _clear(self) -> list[Row]:
        rows = [row for cohort in self._cohorts for row in cohort.rows]
        self._cohorts.clear()
        self._sweep()
        return rows


def _fail(rows: Iterable[Row], error: Exception) -> None:
    for row in rows:
        row.deliver(EngineError(f"decoding failed: {type(error).__name__}: {error}"))
