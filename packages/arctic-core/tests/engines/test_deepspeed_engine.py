"""The DeepSpeed trainer against the torch trainer: ZeRO 0 to 3, one and two ranks, and what only it can get wrong."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from arctic_core.backends.base import RankSpec
from arctic_core.config import ArcticRLClientConfig
from arctic_core.data import Batch
from arctic_core.errors import CheckpointError, EngineStartError, InvalidStateError, ModelNotFoundError
from arctic_core.testing import make_tiny_model

from . import deepspeed_worker as worker
from .deepspeed_worker import Case
from .loss_cases import SAMPLES

DEADLINE = 120.0
STAGES = (0, 1, 2, 3)


def slow(*values: Any) -> Any:
    """A parameter set left to the end-to-end runs."""
    return pytest.param(*values, marks=pytest.mark.e2e)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wide enough that ZeRO 3 really shards the large matrices (it keeps tensors below 100 000 elements whole)."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), hidden_size=320, layers=1, initializer_range=0.08)


@pytest.fixture(scope="module")
def oracle(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return life(Case(model, engine="torch"), tmp_path_factory.mktemp("oracle"))


class Workers:
    """Processes, each of which runs one rank at a time; new ones after a failure, which may have left a rank waiting."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self._address, self._world_size = str(directory / "socket"), world_size
        self._launch()

    def _launch(self) -> None:
        command = [sys.executable, worker.__file__, self._address]
        with Listener(self._address, authkey=worker.AUTHKEY) as listener:
            self._processes = [subprocess.Popen([*command, str(rank)]) for rank in range(self._world_size)]
            connections = [listener.accept() for _ in range(self._world_size)]
        self._connections: dict[int, Connection] = {c.recv(): c for c in connections}

    def start(self, function: str, case: Case, folder: Path) -> None:
        """Call a function of the worker on all ranks."""
        self._connections[0].send(("open_store", ()))
        rendezvous = self.answer(0)
        for rank in range(case.world_size):
            arguments = (function, dataclasses.asdict(case), rank, rendezvous, str(folder))
            self._connections[rank].send(("on_rank", arguments))

    def run(self, function: str, case: Case, folder: Path) -> list[dict[str, Any]]:
        """The same, with the answers; fails with the traceback of the first rank that failed."""
        self.start(function, case, folder)
        try:
            return [self.answer(rank) for rank in range(case.world_size)]
        except pytest.fail.Exception:
            self.close()
            self._launch()
            raise

    def answer(self, rank: int) -> Any:
        if not self._connections[rank].poll(DEADLINE):
            pytest.fail(f"rank {rank} gave no answer in {DEADLINE} s")
        good, value = self._connections[rank].recv()
        if not good:
            pytest.fail(f"rank {rank}: {value}")
        return value

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("pair"), 2)
    yield workers
    workers.close()


def life(case: Case, folder: Path, workers: Workers | None = None) -> dict[str, Any]:
    for name in ("start", "middle"):
        (folder / name).mkdir()
    if workers is None:
        return worker.whole_life(case, 0, None, str(folder))
    first, *others = workers.run("whole_life", case, folder)
    for other in others:
        assert other["trained"]["weights"] == {}
        assert other["trained"]["norms"] == first["trained"]["norms"]
        assert len(other["not_finite"]["raised"]) == 2
    return first


def assert_close(left: dict[str, np.ndarray], right: dict[str, np.ndarray], atol: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], rtol=0, atol=atol, err_msg=name)


def check_life(result: dict[str, Any], oracle: dict[str, Any], folder: Path) -> None:
    trained = result["trained"]
    np.testing.assert_allclose(trained["norms"], oracle["trained"]["norms"], rtol=1e-5)
    assert_close(trained["weights"], oracle["trained"]["weights"], 1e-5)

    assert len(result["not_finite"]["raised"]) == 2
    assert_close(result["not_finite"]["before"], result["not_finite"]["after"], 0.0)

    resumed = result["resumed"]
    assert resumed["step"] == 3
    assert resumed["norms"][0] == resumed["norms"][1]
    assert_close(*resumed["weights"], atol=0.0)
    assert_close(resumed["weights"][0], oracle["resumed"]["weights"][0], 1e-5)

    assert result["step"] == 0
    assert_close(result["again"]["weights"], trained["weights"], 0.0)
    assert result["again"]["norms"] == trained["norms"]

    exported = load_file(folder / "exported" / "model.safetensors")
    assert result["exported"] == oracle["exported"]
    assert_close(exported, trained["weights"], 0.0)
    assert result["environment"]
    assert not result["member"]


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, slow(3)])
def test_one_rank_equals_the_oracle(stage: int, model: str, oracle: dict[str, Any], tmp_path: Path) -> None:
    """Three optimizer steps, non-finite gradients, resuming in the middle and at the start, export, and no traces left."""
    check_life(life(Case(model, stage=stage), tmp_path), oracle, tmp_path)


def gradients(case: Case, folder: Path, workers: Workers | None = None) -> list[dict[str, np.ndarray]]:
    folders = [folder / str(number) for number in range(len(worker.CUTS))]
    for path in folders:
        path.mkdir(parents=True)
    if workers is None:
        worker.save_gradients(case, 0, None, str(folder))
    else:
        workers.run("save_gradients", case, folder)
    found = []
    for path in folders:
        moments = {name: value for file in path.glob("optimizer*.safetensors") for name, value in load_file(file).items()}
        found.append({name: value for name, value in moments.items() if name.startswith("exp_avg.")})
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("stage", STAGES)
def test_no_cut_of_the_batch_changes_the_gradient(stage: int, model: str, tmp_path: Path, pair: Workers) -> None:
    """1, 2, 3 and 7 micro-batches, shuffled, on one rank and on two, against the whole batch on the oracle."""
    show = worker.SHOW_GRADIENT
    oracle = gradients(Case(model, engine="torch", optimizer=show), tmp_path / "torch")[0]
    assert 0.25 < max(np.abs(value).max() for value in oracle.values()) < 2.0
    for world_size, workers in ((1, None), (2, pair)):
        case = Case(model, stage=stage, world_size=world_size, optimizer=show)
        for gradient in gradients(case, tmp_path / f"ranks-{world_size}", workers):
            assert_close(gradient, oracle, 1e-6)


@pytest.fixture(scope="module")
def losses(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The policy's log-probs in a folder, and the oracle's gradient of each loss on the whole batch."""
    folder = tmp_path_factory.mktemp("losses")
    case = Case(model, engine="torch", optimizer=worker.SHOW_GRADIENT)
    np.save(folder / "logprobs.npy", worker.policy_logprobs(case))
    return folder, worker.two_ways(case, 0, None, str(folder))


def check_losses(found: list[dict[str, Any]], oracle: dict[str, Any], tolerance: float = 1e-6) -> None:
    for name, expected in oracle.items():
        for rank in found:
            assert rank[name]["difference"] < tolerance, name
            assert rank[name]["norm"] == pytest.approx(expected["norm"], rel=1e-5), name
        assert worker.relative(found[0][name]["gradient"], expected["gradient"]) < 3 * tolerance, name


@pytest.mark.parametrize("stage", [slow(0), 2, slow(3)])
def test_the_two_ways_to_a_gradient_are_one(stage: int, model: str, losses: tuple[Path, dict[str, Any]]) -> None:
    """Every built-in loss by name, and on the client between forward and backward; both equal the oracle's by name."""
    folder, oracle = losses
    assert all(result["difference"] < 1e-6 for result in oracle.values())
    assert all(result["norm"] > 1e-2 for result in oracle.values())
    case = Case(model, stage=stage, optimizer=worker.SHOW_GRADIENT)
    check_losses([worker.two_ways(case, 0, None, str(folder))], oracle)


@pytest.mark.e2e
@pytest.mark.parametrize("stage", [0, 3])
def test_the_two_ways_are_one_on_two_ranks(stage: int, model: str, losses: tuple[Path, dict[str, Any]], pair: Workers) -> None:
    folder, oracle = losses
    case = Case(model, stage=stage, world_size=2, optimizer=worker.SHOW_GRADIENT)
    check_losses(pair.run("two_ways", case, folder), oracle)


@pytest.fixture(scope="module")
def shared(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The same for samples with shared prompts, each of which the oracle computes on its own."""
    folder = tmp_path_factory.mktemp("shared")
    case = Case(model, engine="torch", optimizer=worker.SHOW_GRADIENT, training={"zorro": "off"}, samples="shared")
    np.save(folder / "logprobs.npy", worker.policy_logprobs(case))
    return folder, worker.two_ways(case, 0, None, str(folder))


def check_shared(found: list[dict[str, Any]], oracle: dict[str, Any]) -> None:
    """The batch's order, its log-probs, every gradient and every metric; and what is computed once is computed once."""
    check_losses(found, oracle, tolerance=3e-6)  # sequences are twenty times as long
    batch = Batch.from_samples(SAMPLES["shared"]())
    for name, expected in oracle.items():
        rows = batch.split(expected["logprobs"][0])
        for rank, result in enumerate(found):
            mine = [rows[i] for part in worker.SHARED_CUT[rank :: len(found)] for i in part]
            np.testing.assert_allclose(np.concatenate(result[name]["logprobs"]), np.concatenate(mine), rtol=0, atol=1e-5)
        for metric, (total, count) in expected["metrics"].items():
            parts = np.array([result[name]["metrics"][metric] for result in found]).sum(0)
            np.testing.assert_allclose(parts, (total, count), rtol=1e-4, atol=1e-4, err_msg=f"{name}: {metric}")
        saved = np.array([result[name]["metrics"]["zorro_saved"] for result in found]).sum(0)
        assert saved.tolist() == [80 + 80 + 100 + 170, batch.lengths.sum()]  # what goes away of [0, 1, 6] and of [2, 5, 4]


@pytest.mark.parametrize("checkpointing", [False, slow(True)])
@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, slow(3)])
def test_shared_prompts_computed_once_change_nothing(
    stage: int, checkpointing: bool, model: str, shared: tuple[Path, dict[str, Any]]
) -> None:
    """All losses, by name and by way of the client, against the oracle that computes every sample on its own."""
    folder, oracle = shared
    training = {"zorro": "on", "zorro_check": True, "gradient_checkpointing": checkpointing}
    case = Case(model, stage=stage, optimizer=worker.SHOW_GRADIENT, training=training, samples="shared")
    check_shared([worker.two_ways(case, 0, None, str(folder))], oracle)


@pytest.mark.e2e
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_where_one_rank_shares_nothing(
    stage: int, model: str, shared: tuple[Path, dict[str, Any]], pair: Workers
) -> None:
    folder, oracle = shared
    training = {"zorro": "on", "zorro_check": True}
    case = Case(model, stage=stage, world_size=2, optimizer=worker.SHOW_GRADIENT, training=training, samples="shared")
    check_shared(pair.run("two_ways", case, folder), oracle)


def check_failures(found: dict[str, Any], stage: int) -> None:
    """Nothing of a failed step is left, or the engine says that it is lost: DeepSpeed's buckets of gradients may hold some."""
    expected = found.pop("expected")
    assert max(np.abs(value).max() for value in expected.values()) > 1e-3
    for name, (raised, gradient) in found.items():
        assert raised, name
        assert (gradient is None) == (stage > 0 and name == "backward_pass_breaks"), name
        if gradient is not None:
            assert_close(gradient, expected, 0.0)


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, slow(3)])
def test_a_step_after_a_failed_one_knows_nothing_of_it(stage: int, model: str, tmp_path: Path) -> None:
    check_failures(
        worker.after_failures(Case(model, stage=stage, optimizer=worker.SHOW_GRADIENT), 0, None, str(tmp_path)), stage
    )


@pytest.mark.e2e
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_on_two_ranks(stage: int, model: str, tmp_path: Path, pair: Workers) -> None:
    case = Case(model, stage=stage, world_size=2, optimizer=worker.SHOW_GRADIENT)
    for found in pair.run("after_failures", case, tmp_path):
        check_failures(found, stage)


@pytest.mark.e2e
@pytest.mark.parametrize("stage", [1, 3])
def test_optimizer_offload_equals_the_oracle(stage: int, model: str, oracle: dict[str, Any], tmp_path: Path) -> None:
    case = Case(model, stage=stage, training={"offload_optimizer": True, "gradient_checkpointing": True})
    check_life(life(case, tmp_path), oracle, tmp_path)


@pytest.mark.e2e
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_equal_the_oracle(stage: int, model: str, oracle: dict[str, Any], tmp_path: Path, pair: Workers) -> None:
    """Uneven shards; in some steps the second rank has nothing at all."""
    check_life(life(Case(model, stage=stage, world_size=2), tmp_path, pair), oracle, tmp_path)


@pytest.mark.e2e
def test_a_checkpoint_of_two_ranks_continues_at_any_stage(
    model: str, oracle: dict[str, Any], tmp_path: Path, pair: Workers
) -> None:
    life(Case(model, stage=3, world_size=2), tmp_path, pair)
    for stage in (0, 2):
        result = worker.continue_from(Case(model, stage=stage), 0, None, str(tmp_path / "middle"))
        assert result["step"] == 3
        assert_close(result["weights"], oracle["resumed"]["weights"][0], 1e-5)
    spread = pair.run("continue_from", Case(model, stage=1, world_size=2), tmp_path / "middle")
    assert_close(spread[0]["weights"], oracle["resumed"]["weights"][0], 1e-5)

    three = Workers(tmp_path, 3)  # nothing in the model divides by three: shards are padded
    try:
        padded = three.run("continue_from", Case(model, stage=3, world_size=3), tmp_path / "middle")
    finally:
        three.close()
    assert_close(padded[0]["weights"], oracle["resumed"]["weights"][0], 1e-5)


@pytest.mark.e2e
@pytest.mark.parametrize("stage", [0, 3])
def test_log_prob_engine_on_two_ranks(stage: int, model: str, tmp_path: Path, pair: Workers) -> None:
    config = {"log_prob_gpus": 1, "log_prob": {"zero_stage": stage}}
    whole = worker.score(Case(model, config=config), 0, None, "")
    first, second = pair.run("score", Case(model, world_size=2, config=config), tmp_path)
    np.testing.assert_allclose(first["logprobs"], whole["logprobs"], atol=1e-5)
    np.testing.assert_allclose(first["entropy"], whole["entropy"], atol=1e-5)
    assert len(second["logprobs"]) == len(second["entropy"]) == 0


@pytest.mark.e2e
def test_the_death_of_a_rank_is_noticed_by_the_others(model: str, tmp_path: Path) -> None:
    workers = Workers(tmp_path, 2)
    try:
        workers.start("lose_a_rank", Case(model, stage=2, world_size=2), tmp_path)
        survivor = workers.answer(0)
    finally:
        workers.close()
    assert survivor["error"]
    assert survivor["seconds"] < 30
    assert not survivor["member"]


@pytest.mark.e2e
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("offload", [False, True])
def test_bfloat16(stage: int, offload: bool, model: str, tmp_path: Path) -> None:
    """bfloat16 computes with 8 bits of mantissa: compared loosely with the oracle's, exactly with itself."""
    if offload and stage == 0:
        pytest.skip("offload needs a stage above 0")
    case = Case(model, stage=stage, dtype="bfloat16", training={"offload_optimizer": offload})
    result = life(case, tmp_path)
    (tmp_path / "torch").mkdir()
    reference = life(Case(model, engine="torch", dtype="bfloat16"), tmp_path / "torch")
    np.testing.assert_allclose(result["trained"]["norms"], reference["trained"]["norms"], rtol=0.02)
    assert_close(result["trained"]["weights"], reference["trained"]["weights"], 4e-3)
    assert_close(result["not_finite"]["before"], result["not_finite"]["after"], 0.0)
    assert_close(*result["resumed"]["weights"], atol=0.0)
    assert_close(result["again"]["weights"], result["trained"]["weights"], 0.0)


# With eps = 1, no decay and a rate of 1 the first AdamW step moves each weight by g / (1 + |g|): it shows the gradient.
SHOW_GRADIENT = {"lr": 1.0, "eps": 1.0, "weight_decay": 0.0}


def gradient_of(case: Case, parts: list[list[int]]) -> dict[str, np.ndarray]:
    trainer = worker.make_trainer(case.spec(), case.engine)
    trainer.start()
    try:
        before = worker.weights(trainer)
        whole = Batch.from_samples(worker.samples())
        trainer.forward_backward([whole.select(part) for part in parts], worker.LOSS, temperature=None)
        trainer.step(divisor=1000.0, lr=1.0, max_grad_norm=0.0)
        after = worker.weights(trainer)
    finally:
        trainer.stop()
    return {name: after[name] - before[name] for name in before}


@pytest.mark.parametrize("stage", [2, slow(3)])
def test_the_gradient_does_not_depend_on_micro_batches_or_order(stage: int, tiny_model: str) -> None:
    case = Case(tiny_model, stage=stage, optimizer=SHOW_GRADIENT)
    reference = gradient_of(Case(tiny_model, engine="torch", optimizer=SHOW_GRADIENT), [list(range(7))])
    assert max(np.abs(value).max() for value in reference.values()) > 1e-3
    cuts = [[list(range(7))], [[0, 1, 2], [3, 4, 5, 6]], [[6, 0], [5, 1, 3], [4, 2]], [[i] for i in (3, 1, 6, 0, 5, 2, 4)]]
    for parts in cuts:
        assert_close(gradient_of(case, parts), reference, 1e-6)


def test_tied_weights_are_exported_once(tiny_tied_model: str, tmp_path: Path) -> None:
    trainer = worker.make_trainer(Case(tiny_tied_model, stage=3).spec(), "deepspeed")
    trainer.start()
    try:
        worker.train_step(trainer, 0)
        trainer.export_hf(str(tmp_path))
        names = {meta.name for meta in trainer.weight_plan(1 << 20).tensors}
    finally:
        trainer.stop()
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == names
    assert ("lm_head.weight" in names) != ("model.embed_tokens.weight" in names)


@pytest.mark.parametrize(("stage", "dtype"), [slow(0, "float32"), (3, "float32"), slow(0, "bfloat16"), slow(3, "bfloat16")])
def test_log_prob_engine_beside_a_trainer(stage: int, dtype: Any, model: str) -> None:
    """Two engines of one process; the reference does not move with the policy, and outlives the trainer."""
    from arctic_core.backends.deepspeed_engine.log_prob import DeepSpeedLogProb

    settings = {"engine": "deepspeed", "zero_stage": stage}
    config = ArcticRLClientConfig.parse({"model_name": model, "log_prob_gpus": 1, "log_prob": settings})
    scorer = DeepSpeedLogProb(RankSpec("log_prob", 0, 1, model, "cpu", dtype, config, 1))
    case = Case(model, stage=2, dtype=dtype, config={"reference": True, "log_prob": {"zero_stage": stage}})
    trainer = worker.make_trainer(case.spec(), "deepspeed")
    batch = [Batch.from_samples(worker.samples()), Batch.from_samples([])]
    try:
        trainer.start()
        scorer.start()
        initial = trainer.forward(batch, entropy=True, temperature=None)
        worker.train_step(trainer, 0)
        trained = trainer.forward(batch, entropy=True, temperature=None)
        reference = trainer.forward_reference(batch, entropy=True, temperature=None)
        trainer.stop()
        scored = scorer.forward(batch, entropy=True, temperature=None)
    finally:
        trainer.stop()
        scorer.stop()
    assert not torch.distributed.is_initialized()
    assert "LOCAL_RANK" not in os.environ
    np.testing.assert_array_equal(reference.logprobs_R, initial.logprobs_R)
    np.testing.assert_array_equal(scored.logprobs_R, initial.logprobs_R)
    assert scored.entropy_R is not None
    np.testing.assert_array_equal(scored.entropy_R, initial.entropy_R)
    assert np.abs(trained.logprobs_R - initial.logprobs_R).max() > 1e-3


def test_weights_alone_and_refused_checkpoints(model: str, tmp_path: Path) -> None:
    trainer = worker.make_trainer(Case(model, stage=2).spec(), "deepspeed")
    trainer.start()
    try:
        worker.train_step(trainer, 0)
        trained = worker.weights(trainer)
        trainer.save(str(tmp_path))
        worker.train_step(trainer, 1)
        assert trainer.load(str(tmp_path), ["weights"]) == 2
        assert_close(worker.weights(trainer), trained, 0.0)
        with pytest.raises(InvalidStateError, match="no gradient"):
            trainer.step(divisor=1.0, lr=None, max_grad_norm=None)
        (shard,) = tmp_path.glob("optimizer-*.safetensors")
        shard.write_bytes(shard.read_bytes()[:1000])
        with pytest.raises(CheckpointError, match="cannot be read"):
            trainer.load(str(tmp_path), ["weights", "optimizer"])
        shard.unlink()
        with pytest.raises(CheckpointError, match="missing, unexpected or mis-shaped optimizer"):
            trainer.load(str(tmp_path), ["optimizer"])
        assert_close(worker.weights(trainer), trained, 0.0)
    finally:
        trainer.stop()


def test_a_failed_start_leaves_nothing_behind(model: str, tmp_path: Path) -> None:
    before = dict(os.environ)
    with pytest.raises(ModelNotFoundError):
        worker.make_trainer(Case(str(tmp_path / "absent")).spec(), "deepspeed").start()
    assert not torch.distributed.is_initialized()
    assert dict(os.environ) == before
    for rendezvous, message in ((None, "an address to meet at"), ("tcp://127.0.0.1:1", "does not host")):
        with pytest.raises(EngineStartError, match=message):
            worker.make_trainer(Case(model, world_size=2).spec(0, rendezvous), "deepspeed").start()
