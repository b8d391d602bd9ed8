"""What the sampler tests share: jobs, a reference forward, and a stand-alone sender of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from arctic_core.backends.base import RankSpec, SampleJob, Sampler
from arctic_core.config import ArcticRLClientConfig
from arctic_core.protocol import Completion, SamplingParams
from arctic_core.sync.plan import BucketRef, TensorMeta, WeightPlan
from arctic_core.sync.shared_memory import SharedMemoryCarrier


def spec_of(model: str, *, max_seq_len: int = 480, **sampling: Any) -> RankSpec:
    config = ArcticRLClientConfig.parse(
        {
            "model_name": model,
            "sampling_gpus": 1,
            "max_seq_len": max_seq_len,
            "sampling": {"max_num_seqs": 16, **sampling},
        }
    )
    return RankSpec("sampler", 0, 1, model, "cpu", "float32", config)


def job(prompt: Sequence[int], index: int, *, seed: int | None = None, **sampling: Any) -> SampleJob:
    params = SamplingParams(**{"max_tokens": 16, **sampling})
    return SampleJob(f"r/{index}", np.asarray(list(prompt), np.int32), params, index if seed is None else seed)


async def collect(sampler: Sampler, jobs: Sequence[SampleJob]) -> list[Completion]:
    """All completions, in the order of the jobs."""
    found = {index: completion async for index, completion in sampler.generate(jobs)}
    return [found[i] for i in range(len(jobs))]


@torch.no_grad()
def reference_logprobs(
    path: str, prompt: Sequence[int], response: Sequence[int], temperature: float, *, top_k: int = 0
) -> np.ndarray:
    """Log-probs of a response by one plain transformers forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *(int(token) for token in response)]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


class WeightSender:
    """Sends a model folder's weights in small buckets, as a trainer does."""

    def __init__(self, path: str, *, leave_out: str = "", bucket_bytes: int = 20_000) -> None:
        from safetensors.torch import load_file

        tensors = {name: t for name, t in load_file(f"{path}/model.safetensors").items() if name != leave_out}
        metas = [TensorMeta(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
        self.plan = WeightPlan.build(metas, (), bucket_bytes)
        self.carrier = SharedMemoryCarrier()
        self._tensors = list(tensors.values())

    def publish(self, index: int) -> BucketRef:
        views = [memoryview(self._tensors[i].flatten().view(torch.uint8).numpy()) for i in self.plan.buckets[index]]
        return self.carrier.publish(index, views, checksums=True)

    async def sync(self, sampler: Sampler, version: int) -> None:
        await sampler.sync_begin(self.plan)
        for index in range(len(self.plan.buckets)):
            await sampler.sync_push(self.publish(index))
        await sampler.sync_commit(version)
        self.carrier.release()
