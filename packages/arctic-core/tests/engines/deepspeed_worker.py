"""One rank of a trainer under test, in this process or in one of its own, and what is done with it.

As a program (``python deepspeed_worker.py SOCKET RANK``) it connects to the test and carries out calls of the functions
below, by name, until the test hangs up.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arctic_core.backends.base import RankSpec
from arctic_core.backends.packed import PackedTrainer
from arctic_core.config import ArcticRLClientConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import EngineError
from arctic_core.losses.base import prepare_loss
from arctic_core.losses.named import count_divisor, find_loss
from arctic_core.protocol import RESTORE_ALL, NamedLoss

try:
    from .loss_cases import CASES, SAMPLES, full_batch, gradients_outside, needs
except ImportError:  # as a program
    from loss_cases import CASES, SAMPLES, full_batch, gradients_outside, needs

AUTHKEY = b"arctic tests"
LOSS = NamedLoss(
    name="grpo", options={"kl_coef": 0.1, "entropy_coef": 0.01, "sequence_reduction": "sum"}, normalization="token"
)
DIVISOR = 17.0


@dataclass(frozen=True)
class Case:
    """How a trainer is set up."""

    model: str
    engine: str = "deepspeed"
    stage: int = 0
    world_size: int = 1
    dtype: Any = "float32"
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    samples: str = "bare"
    """Which of :data:`loss_cases.SAMPLES` the losses are computed on."""

    def spec(self, rank: int = 0, rendezvous: str | None = None) -> RankSpec:
        optimizer = {"lr": 1e-3, "weight_decay": 0.1} | self.optimizer
        schedule = {"type": "linear", "total_steps": 10, "warmup_steps": 2}
        training = {
            "engine": self.engine,
            "optimizer": optimizer,
            "schedule": schedule,
            "zero_stage": self.stage,
        } | self.training
        deadlines = {"start": 60.0, "request": 60.0}
        values = {"model_name": self.model, "training_gpus": self.world_size, "training": training, "deadlines": deadlines}
        config = ArcticRLClientConfig.parse(values | self.config)
        return RankSpec("trainer", rank, self.world_size, self.model, "cpu", self.dtype, config, 1, rendezvous)


def make_trainer(spec: RankSpec, engine: str) -> PackedTrainer:
    if engine == "torch":
        from arctic_core.backends.torch_engine.trainer import TorchTrainer

        return TorchTrainer(spec)
    from arctic_core.backends.deepspeed_engine.trainer import DeepSpeedTrainer

    return DeepSpeedTrainer(spec)


def samples() -> list[Sample]:
    """Seven ragged samples: groups of two, three and one, one empty response, masked tokens, two temperatures."""
    rng = np.random.default_rng(0)
    shapes = [("a", 3, 5), ("a", 3, 0), ("b", 4, 9), ("c", 2, 1), ("b", 4, 6), ("b", 4, 2), ("d", 1, 7)]
    rows = []
    for i, (group, prompt, response) in enumerate(shapes):
        fields = {name: rng.normal(size=response) for name in ("advantages", "old_logprobs", "ref_logprobs")}
        fields["old_logprobs"] = fields["ref_logprobs"] = -6 + 0.3 * fields["ref_logprobs"]
        rows.append(
            Sample(
                token_ids=rng.integers(3, 500, prompt + response),
                prompt_length=prompt,
                group=group,
                loss_mask=rng.random(response) < 0.8,
                temperature=0.7 if i == 2 else 1.0,
                **fields,
            )
        )
    return rows


# Per step and rank the samples of each micro-batch. A single rank gets the micro-batches of both, a third one empty ones.
SHARDS = [
    ([[0, 1, 2], [3], [4]], [[5, 6], [], []]),
    ([[0], [1, 2, 3, 4, 5, 6]], [[], []]),
    ([[6, 2], [1, 5]], [[], [3, 4, 0]]),
    ([[0, 1, 2, 3, 4, 5, 6]], [[]]),
    ([[6, 5, 4], [3]], [[2, 1], [0]]),
]


def batches(step: int, spec: RankSpec) -> list[Batch]:
    rows = samples()
    first, second = SHARDS[step]
    mine: list[list[int]] = first + second if spec.world_size == 1 else [first, second, [[]] * len(first)][spec.rank]
    whole = Batch.from_samples(rows)
    return [whole.select(indices) for indices in mine]


def train_step(trainer: PackedTrainer, step: int) -> float:
    """One optimizer step, by named loss or by gradients from outside; returns the gradient norm."""
    parts = batches(step, trainer.spec)
    if step == 2:
        logprob = [0.5 * b.advantages * b.mask for b in parts]
        entropy = [0.1 * b.mask for b in parts]
        trainer.backward(parts, logprob, entropy, temperature=1.3)
        trainer.backward(parts, logprob, None, temperature=None)
        return trainer.step(divisor=DIVISOR, lr=5e-4, max_grad_norm=0.0).grad_norm
    trainer.forward_backward(parts[:1], LOSS, temperature=None)
    trainer.forward(parts, entropy=True, temperature=None)  # scoring in between changes nothing
    trainer.forward_backward(parts[1:], LOSS, temperature=None)
    return trainer.step(divisor=DIVISOR, lr=None, max_grad_norm=0.3 if step == 1 else None).grad_norm


def weights(trainer: PackedTrainer) -> dict[str, np.ndarray]:
    """All weights on rank 0, float32; empty elsewhere."""
    whole = trainer._gather(list(dict.fromkeys(trainer.manifest.sources)))
    return {name: value.float().numpy().copy() for name, value in (whole or {}).items()}


def scores(trainer: PackedTrainer) -> np.ndarray:
    return trainer.forward([Batch.from_samples(samples())], entropy=False, temperature=None).logprobs_R


def three_steps(trainer: PackedTrainer) -> dict[str, Any]:
    """What every engine must agree on."""
    trainer.forward_backward(batches(1, trainer.spec), LOSS, temperature=None)
    trainer.zero_grad()
    trainer.zero_grad()
    norms = [train_step(trainer, step) for step in range(3)]
    return {"norms": norms, "weights": weights(trainer), "scores": scores(trainer)}


def not_finite(trainer: PackedTrainer) -> dict[str, Any]:
    """A finite loss with a gradient that is not, then a loss that is not, on one rank only; nothing may change."""
    before = weights(trainer)
    raised = []
    empty = Batch.from_samples([])
    full = Batch.from_samples([samples()[2]])
    batch = full if trainer.spec.rank == trainer.spec.world_size - 1 else empty
    for size in (3e36, np.inf):
        try:
            trainer.backward([batch], [np.full(batch.num_response_tokens, size, np.float32)], None, temperature=None)
            trainer.step(divisor=1e-4, lr=None, max_grad_norm=None)
        except EngineError as error:  # NonFiniteError where it happened, on the other ranks word of it
            raised.append(error.message)
    return {"before": before, "after": weights(trainer), "raised": raised}


def save_and_go_on(trainer: PackedTrainer, folder: Path) -> dict[str, Any]:
    """Save, take two steps, return, take them again."""
    trainer.save(str(folder))
    first = [train_step(trainer, step) for step in (3, 4)], weights(trainer)
    trainer.forward_backward(batches(1, trainer.spec), LOSS, temperature=None)  # a pending gradient is not part of it
    restored = trainer.load(str(folder), RESTORE_ALL)
    second = [train_step(trainer, step) for step in (3, 4)], weights(trainer)
    return {"step": restored, "norms": (first[0], second[0]), "weights": (first[1], second[1])}


def whole_life(case: Case, rank: int, rendezvous: str | None, folder: str) -> dict[str, Any]:
    """Everything the conformance test looks at, for one set-up."""
    root = Path(folder)
    environment = dict(os.environ)
    trainer = make_trainer(case.spec(rank, rendezvous), case.engine)
    result: dict[str, Any] = {}
    trainer.start()
    try:
        trainer.save(str(root / "start"))
        result["trained"] = three_steps(trainer)
        result["not_finite"] = not_finite(trainer)
        result["resumed"] = save_and_go_on(trainer, root / "middle")
        result["step"] = trainer.load(str(root / "start"), RESTORE_ALL)
        result["again"] = three_steps(trainer)
        result["exported"] = trainer.export_hf(str(root / "exported"))
    finally:
        trainer.stop()
        trainer.stop()
    result["environment"] = dict(os.environ) == environment
    result["member"] = torch.distributed.is_initialized()
    return result


#: One batch of seven samples cut into 1, 2, 3 and 7 micro-batches, the last two shuffled; per cut the indices of each.
CUTS = [
    [[0, 1, 2, 3, 4, 5, 6]],
    [[0, 1, 2, 3], [4, 5, 6]],
    [[6, 2], [0, 5, 1], [4, 3]],
    [[5], [1], [3], [0], [6], [2], [4]],
]
SHARED_CUT = [[0, 1, 6], [2, 5, 4], [3]]
"""The same of the samples with shared prompts: on two ranks the second one has a dummy where the first one shares nothing."""
#: With these the first moment *is* the last normalised gradient, which every sharding saves whole.
SHOW_GRADIENT = {"betas": (0.0, 0.95), "lr": 0.0}


UNIT = 256.0  # brings the largest entry of this gradient near 1, so that atol 1e-6 is a few units in its last place


def save_gradients(case: Case, rank: int, rendezvous: str | None, folder: str) -> None:
    """For each cut, dealt out to the ranks, the gradient of the batch into ``<folder>/<number of the cut>``."""
    whole = Batch.from_samples(samples())
    trainer = make_trainer(case.spec(rank, rendezvous), case.engine)
    trainer.start()
    try:
        for number, cut in enumerate(CUTS):
            mine = [whole.select(indices) for indices in cut[rank :: case.world_size]]
            equal = -(-len(cut) // case.world_size)
            mine += [whole.select([])] * (equal - len(mine))
            trainer.forward_backward(mine, LOSS, temperature=None)
            trainer.step(divisor=UNIT, lr=0.0, max_grad_norm=0.0)
            trainer.save(str(Path(folder) / str(number)))
    finally:
        trainer.stop()


def whole_gradient(trainer: PackedTrainer) -> dict[str, np.ndarray]:
    """The last normalised gradient, of a trainer that shows it (:data:`SHOW_GRADIENT`). All ranks take part."""
    if trainer.implementation == "torch":
        state, masters = trainer._optimizer.state, trainer._masters  # type: ignore[attr-defined]
        return {name: state[master]["exp_avg"].numpy().copy() for name, master in masters.items()}
    state = trainer._full_state()  # type: ignore[attr-defined]
    return {name: state.read(name, "exp_avg").numpy().copy() for name in trainer._params}  # type: ignore[attr-defined]


def relative(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest difference as a part of the largest entry."""
    largest = max(np.abs(value).max() for value in expected.values())
    return float(max(np.abs(actual[name] - value).max() for name, value in expected.items()) / largest)


def two_ways(case: Case, rank: int, rendezvous: str | None, folder: str) -> dict[str, Any]:
    """For every loss the gradient by its name, and how far that is from the gradient by way of the client.

    The batch is cut into three micro-batches that are dealt out to the ranks, or left whole on the oracle. The policy's
    log-probs, to which the batch's other fields are near, come from a file.
    """
    whole = full_batch(np.load(Path(folder) / "logprobs.npy"), case.samples)
    cut = CUTS[0] if case.engine == "torch" else SHARED_CUT if case.samples == "shared" else CUTS[2]
    mine = [whole.select(indices) for indices in cut[rank :: case.world_size]]
    mine += [whole.select([])] * (-(-len(cut) // case.world_size) - len(mine))
    found = {}
    trainer = make_trainer(case.spec(rank, rendezvous), case.engine)
    trainer.start()
    try:
        for name, loss in CASES.items():
            divisor = count_divisor(whole, prepare_loss(find_loss(loss.name), loss))
            metrics = trainer.forward_backward(mine, loss, temperature=None)
            norm = trainer.step(divisor=divisor, lr=0.0, max_grad_norm=0.0).grad_norm
            by_name = whole_gradient(trainer)
            outcomes = [trainer.forward([part], temperature=None, **needs(loss)) for part in mine]
            sent = [gradients_outside(part, outcome, loss, divisor) for part, outcome in zip(mine, outcomes, strict=True)]
            columns = [None if column[0] is None else list(column) for column in zip(*sent, strict=True)]
            trainer.backward(mine, *columns, temperature=None)
            trainer.step(divisor=1.0, lr=0.0, max_grad_norm=0.0)
            difference = relative(whole_gradient(trainer), by_name)
            found[name] = {"norm": norm, "difference": difference, "gradient": by_name if rank == 0 else None}
            found[name]["metrics"] = {key: (metric.sum, metric.count) for key, metric in metrics.items()}
            found[name]["logprobs"] = [outcome.logprobs_R for outcome in outcomes]
    finally:
        trainer.stop()
    return found


def after_failures(case: Case, rank: int, rendezvous: str | None, folder: str) -> dict[str, Any]:
    """A batch's gradient on its own, and again after each way in which an optimizer step can fail, with what was raised."""
    whole = Batch.from_samples(samples())
    mine = [whole.select(indices) for indices in CUTS[2][rank :: case.world_size]]
    mine += [whole.select([])] * (-(-len(CUTS[2]) // case.world_size) - len(mine))
    trainer = make_trainer(case.spec(rank, rendezvous), case.engine)
    trainer.start()

    def clean() -> dict[str, np.ndarray]:
        trainer.forward_backward(mine, LOSS, temperature=None)
        trainer.step(divisor=UNIT, lr=0.0, max_grad_norm=0.0)
        return whole_gradient(trainer)

    def weigh(size: float) -> None:
        trainer.backward(mine, [np.full(b.num_response_tokens, size, np.float32) for b in mine], None, temperature=None)

    def loss_is_not_finite() -> None:
        last = mine[-1].replace(advantages=np.full(mine[-1].num_response_tokens, np.nan))  # of one rank, maybe
        trainer.forward_backward([*mine[:-1], last if rank == 0 else mine[-1]], LOSS, temperature=None)

    def gradient_is_not_finite() -> None:
        weigh(3e36)
        trainer.step(divisor=1e-4, lr=None, max_grad_norm=None)

    def refuse(*args: Any) -> None:
        raise RuntimeError("no memory")

    def forward_pass_breaks() -> None:
        handle = trainer.module.model.get_submodule("model.norm").register_forward_hook(refuse)
        try:
            weigh(1.0)
        finally:
            handle.remove()
            trainer.zero_grad()  # what the group does

    def backward_pass_breaks() -> None:  # the last, as some engines are lost then
        layer = trainer.module.model.get_input_embeddings()
        handle = layer.register_forward_hook(lambda module, inputs, output: output.register_hook(refuse) and None)
        try:
            weigh(1.0)
        except RuntimeError:
            trainer.zero_grad()  # what the group does
            raise
        finally:
            handle.remove()

    def step_breaks() -> None:
        weigh(1.0)
        apply, trainer._apply = trainer._apply, lambda *args: 1 / 0
        try:
            trainer.step(divisor=1.0, lr=None, max_grad_norm=None)
        finally:
            trainer._apply = apply
            trainer.zero_grad()  # what the group does

    try:
        found: dict[str, Any] = {"expected": clean()}
        for fail in (loss_is_not_finite, gradient_is_not_finite, forward_pass_breaks, step_breaks, backward_pass_breaks):
            weigh(1.0)
            raised = ""
            try:
                fail()
            except (EngineError, RuntimeError, ZeroDivisionError) as error:
                raised = str(error)
            found[fail.__name__] = raised, None if "cannot go on" in raised else clean()
    finally:
        trainer.stop()
    return found


def policy_logprobs(case: Case) -> np.ndarray:
    """Log-probs of the samples of :mod:`loss_cases` under the model."""
    trainer = make_trainer(case.spec(), case.engine)
    trainer.start()
    try:
        return trainer.forward([Batch.from_samples(SAMPLES[case.samples]())], entropy=False, temperature=None).logprobs_R
    finally:
        trainer.stop()


def open_store() -> str:
    from arctic_core.backends.deepspeed_engine.rendezvous import open_store

    return open_store("127.0.0.1")


def continue_from(case: Case, rank: int, rendezvous: str | None, folder: str) -> dict[str, Any]:
    """Two steps from a checkpoint of another set-up."""
    trainer = make_trainer(case.spec(rank, rendezvous), case.engine)
    trainer.start()
    try:
        step = trainer.load(folder, RESTORE_ALL)
        return {"step": step, "norms": [train_step(trainer, i) for i in (3, 4)], "weights": weights(trainer)}
    finally:
        trainer.stop()


def score(case: Case, rank: int, rendezvous: str | None, folder: str) -> dict[str, Any]:
    """Scores of a log-prob engine; the last rank has nothing to score."""
    from arctic_core.backends.deepspeed_engine.log_prob import DeepSpeedLogProb

    spec = case.spec(rank, rendezvous)
    scorer = DeepSpeedLogProb(spec)
    scorer.start()
    try:
        batch = Batch.from_samples(samples() if rank < spec.world_size - 1 or rank == 0 else [])
        outcome = scorer.forward([batch], entropy=True, temperature=None)
        return {"logprobs": outcome.logprobs_R, "entropy": outcome.entropy_R}
    finally:
        scorer.stop()


def lose_a_rank(case: Case, rank: int, rendezvous: str | None, folder: str) -> dict[str, Any]:
    """Rank 1 dies before a collective; says how long rank 0 waits for it and how that ends."""
    trainer = make_trainer(case.spec(rank, rendezvous), case.engine)
    trainer.start()
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    error = ""
    try:
        train_step(trainer, 0)
    except RuntimeError as problem:
        error = str(problem)
    trainer.stop()
    return {"error": error, "seconds": time.monotonic() - start, "member": torch.distributed.is_initialized()}


def on_rank(function: str, case: dict[str, Any], rank: int, rendezvous: str, folder: str) -> Any:
    return globals()[function](Case(**case), rank, rendezvous, folder)


def main(address: str, rank: int) -> None:
    with Client(address, authkey=AUTHKEY) as connection:
        connection.send(rank)
        while True:
            try:
                name, args = connection.recv()
            except EOFError:
                return
            try:
                connection.send((True, globals()[name](*args)))
            except Exception:  # whatever it is, the test shall see it
                connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
