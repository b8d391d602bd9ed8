"""The service over the embedded engines, through raw requests: what deadlines, failures and repetitions leave behind."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arctic_core import protocol as p
from arctic_core.backends.base import EngineDefinition
from arctic_core.backends.rank import LocalRank, Rank
from arctic_core.backends.torch_engine.trainer import TorchTrainer
from arctic_core.config import ArcticRLClientConfig
from arctic_core.config.losses import SFTLossConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineError,
    InvalidStateError,
    PluginError,
    UnsupportedOperation,
)
from arctic_core.losses.base import LossDefinition, LossInputs, LossOutput
from arctic_core.plugins.manager import get_registry
from arctic_core.service.core import ArcticService
from arctic_core.service.launch import LocalLauncher, count_ranks, make_spec

ENDLESS = p.SamplingParams(max_tokens=100_000, ignore_eos=True)
SHORT = p.SamplingParams(max_tokens=3, ignore_eos=True, seed=1)


class Replicas(LocalLauncher):
    """Several sampler replicas in one process."""

    async def launch(self, engine: p.EngineName, definition: EngineDefinition, model_path: str) -> list[Rank]:
        count = count_ranks(self._config, engine)
        specs = [make_spec(self._config, engine, rank, model_path, "cpu", threads=1) for rank in range(count)]
        return [LocalRank(definition.load()(spec)) for spec in specs]


class Driver:
    """Sends operations with keys of one session."""

    def __init__(self, service: ArcticService) -> None:
        self.service = service
        self._sequence = itertools.count(1)

    def request(self, operation: Any, *, deadline_s: float = 60.0, sequence: int | None = None) -> p.Request:
        sequence = next(self._sequence) if sequence is None else sequence
        return p.Request(session="s", sequence=sequence, operation=operation, deadline_s=deadline_s)

    async def __call__(self, operation: Any, **envelope: Any) -> Any:
        return (await self.service.handle(self.request(operation, **envelope))).unwrap()

    async def generate(self, prompts: int = 1, sampling: p.SamplingParams = SHORT, **more: Any) -> p.Generated:
        ids = tuple(np.array([1, 2, 3], np.int32) for _ in range(prompts))
        return await self(p.Generate(prompts=ids, sampling=sampling, **more))

    def engine(self, name: p.EngineName) -> Any:
        """The engine of an engine group's first rank."""
        return self.service._engines.get(name, "sync_weights").group.ranks[0].engine  # type: ignore[attr-defined]

    async def busy(self) -> asyncio.Task[p.Generated]:
        """A generation on the first replica that is under way and does not end by itself."""
        task = asyncio.create_task(self.generate(sampling=ENDLESS, request_id="endless"))
        while not self.engine("sampler")._decoder.running:
            await asyncio.sleep(0.01)
        return task


def run(model: str, work: Callable[[Driver], Awaitable[Any]], **config: Any) -> Any:
    """Run ``work`` on a started service, which is stopped afterwards."""

    @asynccontextmanager
    async def started() -> AsyncIterator[Driver]:
        length = {"max_seq_len": 100_000} if "sampling_gpus" in config else {}
        settings = ArcticRLClientConfig(model_name=model, device="cpu", **length, **config)
        service = ArcticService(settings, launcher=Replicas(settings))
        await service.start()
        try:
            yield Driver(service)
        finally:
            await service.stop()

    async def main() -> Any:
        async with started() as driver, asyncio.timeout(20):
            return await work(driver)

    return asyncio.run(main())


def batch(seed: int = 0, sizes: Sequence[int] = (4, 7)) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch.from_samples(Sample(token_ids=rng.integers(0, 512, 3 + size), prompt_length=3) for size in sizes)


SFT = p.NamedLoss(name="sft")


# --- pause, sync and what interrupts them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [p.Pause(), p.SyncWeights(force=True)])
def test_a_drain_that_one_replica_misses_holds_no_replica(tiny_model: str, operation: p.Operation) -> None:
    async def work(drive: Driver) -> None:
        endless = await drive.busy()
        with pytest.raises(DeadlineExceeded):
            await drive(operation)
        assert len((await drive.generate(2)).completions) == 2
        assert not endless.done()
        await drive(p.Abort(request_ids=("endless",)))
        assert (await endless).completions[0][0].finish_reason == "abort"

    run(tiny_model, work, training_gpus=1, sampling_gpus=2, deadlines={"drain": 0.3})


@pytest.mark.parametrize("operation", [p.Pause(), p.SyncWeights(force=True)])
def test_a_request_cut_off_while_it_drains_leaves_all_engines_at_work(tiny_model: str, operation: p.Operation) -> None:
    async def work(drive: Driver) -> None:
        endless = await drive.busy()
        with pytest.raises(DeadlineExceeded):
            await drive(operation, deadline_s=0.3)
        assert [engine.state for engine in (await drive(p.GetInfo())).engines] == ["awake", "awake"]
        assert len((await drive.generate(1)).completions) == 1
        await drive(p.ForwardBackward(batch=batch(), loss=SFT))
        await drive(p.Abort())
        await endless

    run(tiny_model, work, training_gpus=1, sampling_gpus=1)


def test_a_pause_changes_the_mode_of_the_one_before(tiny_model: str) -> None:
    async def work(drive: Driver) -> None:
        endless = await drive.busy()
        await drive(p.Pause(mode="keep"))
        await drive(p.Pause(mode="abort"))
        async with asyncio.timeout(5):
            assert (await endless).completions[0][0].finish_reason == "abort"
        waiting = asyncio.create_task(drive.generate())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await drive(p.Resume())
        await waiting

    run(tiny_model, work, sampling_gpus=1)


def test_a_pause_during_a_sync_holds_after_it(tiny_model: str) -> None:
    async def work(drive: Driver) -> None:
        endless = await drive.busy()
        sync = asyncio.create_task(drive(p.SyncWeights(force=True)))
        await asyncio.sleep(0.3)
        pause = asyncio.create_task(drive(p.Pause(mode="keep")))
        await asyncio.sleep(0.1)
        await drive(p.Abort())
        await asyncio.gather(sync, pause, endless)
        waiting = asyncio.create_task(drive.generate())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await drive(p.Resume())
        await waiting

    run(tiny_model, work, training_gpus=1, sampling_gpus=1)


def test_a_commit_that_is_cut_off_makes_the_sampler_stale(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(drive: Driver) -> None:
        sampler = drive.engine("sampler")
        commit = sampler.sync_commit

        async def slow(version: int) -> None:
            await asyncio.sleep(30)
            await commit(version)

        monkeypatch.setattr(sampler, "sync_commit", slow)
        with pytest.raises(DeadlineExceeded):
            await drive(p.SyncWeights(force=True), deadline_s=1.0)
        with pytest.raises(InvalidStateError, match="half-way"):
            await drive.generate()
        monkeypatch.setattr(sampler, "sync_commit", commit)
        assert not (await drive(p.SyncWeights())).skipped
        await drive.generate()

    run(tiny_model, work, training_gpus=1, sampling_gpus=1)


def test_generations_of_one_name_do_not_disturb_each_other(tiny_model: str) -> None:
    async def work(drive: Driver) -> None:
        endless = await drive.busy()
        assert (await drive.generate(request_id="endless")).completions[0][0].finish_reason == "length"
        assert not endless.done()
        await drive(p.Abort(request_ids=("endless",)))
        await endless

    run(tiny_model, work, sampling_gpus=1)


def test_a_sampler_with_work_does_not_fall_asleep(tiny_model: str) -> None:
    async def work(drive: Driver) -> None:
        between_steps = threading.Event()
        drive.engine("sampler")._decoder.call(between_steps.wait)
        waiting = asyncio.create_task(drive.generate())
        await asyncio.sleep(0.1)
        slept = asyncio.create_task(drive(p.Sleep(engine="sampler", level=2)))
        await asyncio.sleep(0.1)
        between_steps.set()
        with pytest.raises(InvalidStateError, match="running"):
            await slept
        assert (await waiting).completions[0][0].finish_reason == "length"

    run(tiny_model, work, training_gpus=1, sampling_gpus=1)


def test_a_sampler_sleeps_with_work_that_is_held_back(tiny_model: str) -> None:
    async def work(drive: Driver) -> None:
        await drive(p.Pause())
        waiting = asyncio.create_task(drive.generate())
        await asyncio.sleep(0.1)
        await drive(p.Sleep(engine="sampler", level=2))
        await drive(p.Wake(engine="sampler"))
        await drive(p.SyncWeights())
        await drive(p.Resume())
        assert (await waiting).completions[0][0].finish_reason == "length"

    run(tiny_model, work, training_gpus=1, sampling_gpus=1)


# --- gradients ----------------------------------------------------------------------------------------------------------


async def _norm(drive: Driver, *batches: Batch) -> float:
    for item in batches:
        await drive(p.ForwardBackward(batch=item, loss=SFT))
    return (await drive(p.Step(lr=0.0))).grad_norm


def test_a_loss_that_fails_like_a_refusal_drops_gradient_and_count(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(inputs: LossInputs, options: Any) -> LossOutput:
        raise DataError("not these tokens")

    odd = LossDefinition("odd", SFTLossConfig, compute)
    monkeypatch.setitem(get_registry()._definitions["arctic_losses"], "odd", (odd, "test"))

    async def work(drive: Driver) -> None:
        expected = await _norm(drive, batch(1))
        await drive(p.ForwardBackward(batch=batch(0), loss=SFT))
        with pytest.raises(PluginError, match="not these tokens"):
            await drive(p.ForwardBackward(batch=batch(0), loss=p.NamedLoss(name="odd")))
        assert await _norm(drive, batch(1)) == expected

    run(tiny_model, work, training_gpus=1)


def test_a_step_that_fails_leaves_no_gradient_to_the_next(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> float:
        raise RuntimeError("no memory")

    async def work(drive: Driver) -> None:
        expected = await _norm(drive, batch(1))
        await drive(p.ForwardBackward(batch=batch(0), loss=SFT))
        with monkeypatch.context() as patch:
            patch.setattr(TorchTrainer, "_apply", fail)
            with pytest.raises(EngineError, match="step failed: RuntimeError: no memory"):
                await drive(p.Step(lr=0.0))
        with pytest.raises(InvalidStateError, match="no accumulated gradient"):
            await drive(p.Step(lr=0.0))
        assert await _norm(drive, batch(1)) == expected

    run(tiny_model, work, training_gpus=1)


def test_a_loss_by_dotted_name_needs_the_operators_leave(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "losses_of_mine.py").write_text(
        "from arctic_core.losses.base import LossOutput\n"
        "def nll(inputs, config):\n"
        "    return LossOutput(-inputs.logprobs_R[inputs.mask_R].sum(), {'seen': (1.0, 1.0)})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = p.ForwardBackward(batch=batch(0), loss=p.NamedLoss(name="losses_of_mine:nll"))

    async def refused(drive: Driver) -> None:
        with pytest.raises(ConfigError, match="does not import losses"):
            await drive(mine)
        assert "losses_of_mine" not in sys.modules

    async def allowed(drive: Driver) -> None:
        expected = await _norm(drive, batch(0))
        assert (await drive(mine)).metrics["seen"].sum == 1.0
        assert (await drive(p.Step(lr=0.0))).grad_norm == pytest.approx(expected, rel=1e-6)
        await drive(mine)
        await drive(p.ZeroGrad())
        with pytest.raises(ConfigError, match="weight: unknown key"):
            await drive(p.ForwardBackward(batch=batch(0), loss=p.NamedLoss(name="losses_of_mine:nll", options={"weight": 1})))

    run(tiny_model, refused, training_gpus=1)
    run(tiny_model, allowed, training_gpus=1, training={"allow_loss_import": True})


def test_a_refused_batch_leaves_gradient_and_count(tiny_model: str) -> None:
    async def work(drive: Driver) -> None:
        expected = await _norm(drive, batch(0), batch(1))
        await drive(p.ForwardBackward(batch=batch(0), loss=SFT))
        with pytest.raises(DataError):
            await drive(p.ForwardBackward(batch=batch(2).replace(loss_mask=np.full(11, np.nan)), loss=SFT))
        assert await _norm(drive, batch(1)) == expected

    run(tiny_model, work, training_gpus=1)


def test_a_checkpoint_that_is_refused_does_not_mix_gradients(tiny_model: str, tmp_path: Path) -> None:
    async def work(drive: Driver) -> None:
        expected = await _norm(drive, batch(1))
        folder = Path((await drive(p.SaveCheckpoint(path=str(tmp_path)))).path)
        await drive(p.ForwardBackward(batch=batch(0), loss=SFT))
        drive.engine("trainer").implementation = "another"
        with pytest.raises(CheckpointError, match="written by engine 'torch'"):
            await drive(p.LoadCheckpoint(path=str(folder)))
        assert await _norm(drive, batch(1)) == expected

    run(tiny_model, work, training_gpus=1)


def test_a_repeated_key_changes_nothing(tiny_model: str) -> None:
    async def work(drive: Driver) -> None:
        expected = await _norm(drive, batch(0))
        once = p.ForwardBackward(batch=batch(0), loss=SFT)
        await asyncio.gather(drive(once, sequence=500), drive(once, sequence=500))
        await drive(once, sequence=500)
        first = await drive(p.Step(lr=0.0), sequence=501)
        again = await drive(p.Step(lr=0.0), sequence=501)
        assert (first.grad_norm, first.step) == (expected, 2)
        assert again is first
        assert (await drive(p.GetInfo())).step == 2

    run(tiny_model, work, training_gpus=1)


# --- start --------------------------------------------------------------------------------------------------------------


def test_a_start_past_its_deadline_leaves_no_thread(tiny_model: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(DeadlineExceeded):
        run(tiny_model, lambda drive: drive(p.GetInfo()), sampling_gpus=1, deadlines={"start": 0.001})
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread.name


# --- errors ---------------------------------------------------------------------------------------------------------------


def test_an_engine_that_raises_anything_gives_a_typed_error(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(drive: Driver) -> None:
        sampler = drive.engine("sampler")

        async def generate(jobs: Sequence[Any]) -> AsyncIterator[Any]:
            raise KeyError("odd")
            yield

        monkeypatch.setattr(sampler, "generate", generate)
        with pytest.raises(EngineError, match="KeyError") as caught:
            await drive.generate()
        assert caught.value.where == "sampler[0]"
        operation = p.Generate(prompts=(np.array([1], np.int32),), sampling=SHORT)
        (reply,) = [reply async for reply in drive.service.stream(drive.request(operation))]
        with pytest.raises(EngineError, match="KeyError"):
            reply.unwrap()

    run(tiny_model, work, sampling_gpus=1)


def test_what_an_engine_lacks_is_neither_listed_nor_called(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from arctic_core.backends.torch_engine.trainer import TorchTrainer

    monkeypatch.setattr(TorchTrainer, "capabilities", classmethod(lambda cls, device: ("forward", "forward_backward", "step")))

    async def work(drive: Driver) -> None:
        info = await drive(p.GetInfo())
        assert set(info.capabilities) == {"info", "shutdown", "forward", "forward_backward", "step"}
        assert set(info.engines[0].capabilities) == {"forward", "forward_backward", "step"}
        with pytest.raises(UnsupportedOperation, match="save_checkpoint"):
            await drive(p.SaveCheckpoint(path="/nowhere"))

    run(tiny_model, work, training_gpus=1)
