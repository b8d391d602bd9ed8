"""From a user's arguments to checked operations. What can be told to be wrong without an engine is refused here.

Suffix legend: ``_R`` response-token axis of a packed batch, ``_K`` tokens scored beside each response token.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from arctic_core import protocol as p
from arctic_core.data import Batch, Group, Sample, token_array
from arctic_core.errors import DataError
from arctic_core.losses.named import LossLike, named_loss

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BatchLike = Batch | Sequence[Sample]
"""What the batch operations take: a batch, or the samples of one."""


def generate(
    prompts: Iterable[ArrayLike],
    sampling: p.SamplingParams | None,
    *,
    n: int,
    group: Sequence[Group] | None,
    request_id: str,
) -> p.Generate:
    if "/" in request_id:
        raise DataError(f"{request_id!r} must not contain a slash", where="generate.request_id")
    arrays = tuple(_prompt(prompt, f"prompt {i}") for i, prompt in enumerate(_not_text(prompts, "generate.prompts")))
    groups = None
    if group is not None:
        groups = tuple(g if isinstance(g, str) else _integer(g, "generate.group") for g in _not_text(group, "generate.group"))
        if len(groups) != len(arrays):
            raise DataError(f"{len(groups)} group ids for {len(arrays)} prompts", where="generate.group")
    return p.Generate(
        prompts=arrays,
        sampling=_instance(sampling or p.SamplingParams(), p.SamplingParams, "generate.sampling"),
        n=_integer(n, "generate.n", at_least=1),
        groups=groups,
        request_id=request_id,
    )


def forward(
    batch: BatchLike, *, model: p.ModelName, entropy: bool, temperature: float | None, topk: int, given_topk: bool
) -> p.Forward:
    packed = _batch(batch, "forward")
    count = _integer(topk, "forward.topk", at_least=0)
    if count and given_topk:
        raise DataError("topk and given_topk ask for different tokens", where="forward.topk", remedy="give one of them")
    if given_topk:
        _require_topk_ids(packed, "forward.given_topk")
    return p.Forward(
        batch=packed,
        model=_one_of(model, p.ModelName, "forward.model"),
        entropy=bool(entropy),
        temperature=_number(temperature, "forward.temperature", above=True),
        topk=count,
        given_topk=bool(given_topk),
    )


def forward_backward(batch: BatchLike, loss: LossLike, *, temperature: float | None) -> p.ForwardBackward:
    return p.ForwardBackward(
        batch=_batch(batch, "forward_backward"),
        loss=named_loss(loss, "forward_backward.loss"),
        temperature=_number(temperature, "forward_backward.temperature", above=True),
    )


def backward(
    batch: BatchLike,
    grad_logprobs: ArrayLike,
    grad_entropy: ArrayLike | None,
    *,
    grad_topk_logprobs: ArrayLike | None,
    temperature: float | None,
) -> p.Backward:
    packed = _batch(batch, "backward")
    return p.Backward(
        batch=packed,
        grad_logprobs=_gradient(grad_logprobs, packed, "backward.grad_logprobs"),
        grad_entropy=None if grad_entropy is None else _gradient(grad_entropy, packed, "backward.grad_entropy"),
        temperature=_number(temperature, "backward.temperature", above=True),
        grad_topk_logprobs=None if grad_topk_logprobs is None else _topk_gradient(grad_topk_logprobs, packed),
    )


def step(*, lr: float | None, max_grad_norm: float | None) -> p.Step:
    return p.Step(lr=_number(lr, "step.lr"), max_grad_norm=_number(max_grad_norm, "step.max_grad_norm"))


def sync_weights(*, probe: Iterable[ArrayLike], force: bool) -> p.SyncWeights:
    arrays = tuple(_prompt(ids, f"probe {i}") for i, ids in enumerate(_not_text(probe, "sync_weights.probe")))
    for i, ids in enumerate(arrays):
        if len(ids) < 2:
            raise DataError(f"probe {i} has one token; scoring needs at least two", where="sync_weights.probe")
    return p.SyncWeights(probe=arrays, force=bool(force))


def sleep(engine: p.EngineName, level: int) -> p.Sleep:
    if level not in (1, 2):
        raise DataError(f"level {level!r} is neither 1 nor 2", where="sleep.level")
    return p.Sleep(engine=_one_of(engine, p.EngineName, "sleep.engine"), level=int(level))


def wake(engine: p.EngineName) -> p.Wake:
    return p.Wake(engine=_one_of(engine, p.EngineName, "wake.engine"))


def pause(mode: p.PauseMode) -> p.Pause:
    return p.Pause(mode=_one_of(mode, p.PauseMode, "pause.mode"))


def abort(request_ids: Iterable[str]) -> p.Abort:
    ids = tuple(_not_text(request_ids, "abort.request_ids"))
    return p.Abort(request_ids=tuple(_instance(item, str, "abort.request_ids") for item in ids))


def save_checkpoint(
    path: str | os.PathLike[str], *, keep_last: int | None, extra: Mapping[str, str] | None
) -> p.SaveCheckpoint:
    strings = dict(extra or {})
    for key, value in strings.items():
        _instance(key, str, "save_checkpoint.extra")
        _instance(value, str, f"save_checkpoint.extra[{key!r}]")
    return p.SaveCheckpoint(
        path=os.fspath(path),
        keep_last=None if keep_last is None else _integer(keep_last, "save_checkpoint.keep_last", at_least=1),
        extra=strings,
    )


def load_checkpoint(path: str | os.PathLike[str], *, restore: Iterable[p.RestorePart]) -> p.LoadCheckpoint:
    parts = tuple(
        _one_of(part, p.RestorePart, "load_checkpoint.restore") for part in _not_text(restore, "load_checkpoint.restore")
    )
    if not parts:
        raise DataError("nothing to restore was named", where="load_checkpoint.restore")
    return p.LoadCheckpoint(path=os.fspath(path), restore=parts)


def export_hf(path: str | os.PathLike[str]) -> p.ExportHF:
    return p.ExportHF(path=os.fspath(path))


# --- checks -------------------------------------------------------------------------------------------------------------


def _prompt(value: ArrayLike, what: str) -> np.ndarray:
    array = token_array(value, what)
    if not len(array):
        raise DataError("has no tokens", where=what, remedy="give every prompt at least one token (a BOS token will do)")
    return array


def _batch(value: BatchLike, op: str) -> Batch:
    if isinstance(value, Batch):
        return value
    samples = list(_not_text(value, f"{op}.batch"))
    for i, sample in enumerate(samples):
        _instance(sample, Sample, f"{op}.batch[{i}]")
    return Batch.from_samples(samples)


def _gradient(value: ArrayLike, batch: Batch, where: str) -> np.ndarray:
    array = np.asarray(value)
    if array.shape != (batch.num_response_tokens,):
        raise DataError(
            f"has shape {array.shape}, the batch has {batch.num_response_tokens} response tokens",
            where=where,
            remedy="give one weight per response token, in the batch's order (the prompts have none)",
        )
    return _weights(array, where)


def _topk_gradient(value: ArrayLike, batch: Batch) -> np.ndarray:
    where = "backward.grad_topk_logprobs"
    _require_topk_ids(batch, where)
    array = np.asarray(value)
    if batch.topk_ids is not None and array.shape != batch.topk_ids.shape:
        raise DataError(
            f"has shape {array.shape}, the batch's topk_ids have {batch.topk_ids.shape}",
            where=where,
            remedy="give one weight per token id of topk_ids",
        )
    return _weights(array, where)


def _weights(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype.kind not in "fiub":
        raise DataError(f"expected numbers, got {array.dtype}", where=where)
    return array.astype(np.float32, copy=False)


def _require_topk_ids(batch: Batch, where: str) -> None:
    if len(batch) and batch.topk_ids is None:
        raise DataError("the batch has no topk_ids", where=where, remedy="set topk_ids on every sample")


def _one_of(value: Any, literal: Any, where: str) -> Any:
    known = get_args(literal)
    if value not in known:
        raise DataError(f"{value!r} is not one of {', '.join(map(repr, known))}", where=where)
    return value


def _instance(value: Any, type_: type, where: str) -> Any:
    if not isinstance(value, type_):
        raise DataError(f"expected a {type_.__name__}, got {type(value).__name__}", where=where)
    return value


def _not_text(value: Any, where: str) -> Iterable[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise DataError(f"expected a sequence, got {value!r}", where=where)
    return value


def _integer(value: Any, where: str, *, at_least: int | None = None) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise DataError(f"expected an integer, got {value!r}", where=where)
    if at_least is not None and value < at_least:
        raise DataError(f"{value} is below {at_least}", where=where)
    return int(value)


def _number(value: float | None, where: str, *, above: bool = False) -> float | None:
    """A finite number of at least 0 (``above``: greater than 0), or ``None``."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise DataError(f"expected a number, got {value!r}", where=where)
    if not math.isfinite(value) or value < 0 or (above and value == 0):
        raise DataError(f"{value} is not a {'positive' if above else 'non-negative'} number", where=where)
    return float(value)
