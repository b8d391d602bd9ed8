"""Methods that vLLM adds to its workers (``worker_extension_cls``), called with ``collective_rpc``.

Only text crosses: a plan, addresses of buckets, errors. Each worker maps the sender's bytes itself, verifies them, and on
:meth:`SyncWorkerExtension.arctic_sync_load` hands views of them to vLLM's reload path, which restores each layer's
checkpoint layout, loads it and processes it again. (Plain ``load_weights`` on a model whose layers were packed for the CPU
leaves it half loaded.)

Every method returns ``""`` or an error as JSON: an exception would reach the caller as text without its type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from arctic_core.errors import ArcticError, WeightSyncError
from arctic_core.plugins.manager import get_registry
from arctic_core.protocol import ErrorInfo
from arctic_core.sync.plan import BucketRef, WeightPlan
from arctic_core.sync.receiver import BucketStage

if TYPE_CHECKING:
    import torch


class Begin(msgspec.Struct, frozen=True):
    """Argument of :meth:`SyncWorkerExtension.arctic_sync_begin`."""

    plan: WeightPlan
    mapping: tuple[tuple[str, int], ...]
    directory: str | None


class SyncWorkerExtension:
    """Mixed into vLLM's worker class; keeps the stage of the sync under way."""

    reload_weights: Callable[..., None]
    get_model: Callable[[], torch.nn.Module]
    """Both are vLLM's own."""
    _arctic_stage: BucketStage | None = None

    def arctic_sync_begin(self, begin: str) -> str:
        """Start staging; the plan was checked by the caller."""
        message = msgspec.json.decode(begin, type=Begin)

        def work() -> None:
            registry = get_registry()
            self._arctic_stage = BucketStage(
                message.plan, message.mapping, lambda name: registry.carrier(name).create(message.directory)
            )

        return _answer(work)

    def arctic_sync_push(self, ref: str) -> str:
        """Map and verify one bucket."""
        return _answer(lambda: self._arctic_begun().push(msgspec.json.decode(ref, type=BucketRef)))

    def arctic_sync_complete(self) -> str:
        """Check that all buckets are here."""
        return _answer(lambda: self._arctic_begun().complete())

    def arctic_sync_load(self) -> str:
        """Load the staged weights. A failure here leaves the model in between."""

        def work() -> None:
            self.reload_weights(weights_iterator=self._arctic_begun().tensors(), is_checkpoint_format=True)
            _process_tied_heads(self.get_model())

        return _answer(work)

    def arctic_sync_abandon(self) -> str:
        """Unmap all buckets. Idempotent."""
        stage, self._arctic_stage = self._arctic_stage, None
        if stage is not None:
            stage.close()
        return ""

    def _arctic_begun(self) -> BucketStage:
        if self._arctic_stage is None:
            raise WeightSyncError("no weight sync was begun")
        return self._arctic_stage


def _process_tied_heads(model: torch.nn.Module) -> None:
    """Process output heads that share the embedding's weight once more.

    vLLM's reload loads and processes the embedding; the head sees the new weight, since it is the same tensor, but keeps
    what it derived from the old one. On CPU that is the packed copy it multiplies with, so a tied model would go on with its
    old head.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embedded = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for head in heads:
        if id(head.weight) in embedded and isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)


def _answer(work: Callable[[], None]) -> str:
    try:
        work()
    except ArcticError as error:
        return msgspec.json.encode(ErrorInfo.of(error)).decode()
    return ""
