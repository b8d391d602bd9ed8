"""The service's parts that need no engine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arctic_core.backends.base import Engine, EngineReport
from arctic_core.backends.group import Divisor, EngineGroup, SamplerGroup, TrainerGroup
from arctic_core.backends.rank import LocalRank
from arctic_core.config import ArcticRLClientConfig
from arctic_core.data import Batch, Sample
from arctic_core.errors import (
    ConfigError,
    DataError,
    EngineDiedError,
    InvalidStateError,
    PlacementError,
    QueueFullError,
)
from arctic_core.losses.base import PreparedLoss, prepare_loss
from arctic_core.losses.named import find_loss
from arctic_core.protocol import Done, Generate, NamedLoss, Reply, SamplingParams
from arctic_core.service.generation import Admission, make_jobs
from arctic_core.service.launch import make_spec
from arctic_core.service.ledger import Ledger
from arctic_core.service.placement import plan_placement
from arctic_core.service.state import EngineState


def test_ledger_runs_a_key_once_even_when_both_calls_overlap():
    calls = []

    async def work() -> Reply:
        calls.append(1)
        await asyncio.sleep(0.01)
        return Reply(sequence=len(calls), body=Done())

    async def main():
        ledger = Ledger()
        first, second = await asyncio.gather(ledger.once(("s", 1), work), ledger.once(("s", 1), work))
        third = await ledger.once(("s", 1), work)
        other = await ledger.once(("s", 2), work)
        return first, second, third, other

    first, second, third, other = asyncio.run(main())
    assert first is second is third
    assert other.sequence == 2
    assert len(calls) == 2


def test_ledger_finishes_the_work_of_a_cancelled_caller():
    finished = []

    async def work() -> Reply:
        await asyncio.sleep(0.02)
        finished.append(1)
        return Reply(sequence=7, body=Done())

    async def main():
        ledger = Ledger()
        caller = asyncio.create_task(ledger.once(("s", 1), work))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        return await ledger.once(("s", 1), work)

    assert asyncio.run(main()).sequence == 7
    assert finished == [1]


def test_ledger_forgets_only_finished_entries():
    async def work() -> Reply:
        return Reply(sequence=0, body=Done())

    async def main():
        ledger = Ledger(capacity=2)
        release = asyncio.Event()

        async def slow() -> Reply:
            await release.wait()
            return Reply(sequence=9, body=Done())

        pending = asyncio.create_task(ledger.once(("s", 0), slow))
        await asyncio.sleep(0)
        for i in range(1, 6):
            await ledger.once(("s", i), work)
        again = asyncio.create_task(ledger.once(("s", 0), work))
        await asyncio.sleep(0)
        release.set()
        return (await pending).sequence, (await again).sequence

    assert asyncio.run(main()) == (9, 9)


def test_admission_refuses_above_its_capacity_and_recovers():
    async def main():
        gate = Admission(3)
        async with gate.admit(2):
            with pytest.raises(QueueFullError, match="2 completions asked for, 2 run or wait, at most 3"):
                async with gate.admit(2):
                    pass
        async with gate.admit(3):
            pass

    asyncio.run(main())


def test_admission_held_shut_lets_nobody_in_until_opened():
    async def main():
        gate, order = Admission(10), []

        async def enter():
            async with gate.admit(1):
                order.append("in")

        async with gate.hold():
            task = asyncio.create_task(enter())
            await asyncio.sleep(0.01)
            order.append("held")
        await task
        return order

    assert asyncio.run(main()) == ["held", "in"]


def _generate(**kw) -> Generate:
    defaults = {"prompts": (np.array([1, 2]), np.array([3])), "sampling": SamplingParams(seed=5, max_tokens=100), "n": 2}
    return Generate(**{**defaults, "request_id": "r", **kw})


def test_jobs_are_prompt_major_with_own_seeds_and_room_for_the_prompt():
    jobs, groups = make_jobs(_generate(), max_seq_len=10)
    assert [job.request_id for job in jobs] == ["r/0.0", "r/0.1", "r/1.0", "r/1.1"]
    assert groups == [0, 0, 1, 1]
    assert [job.sampling.max_tokens for job in jobs] == [8, 8, 9, 9]
    assert len({job.seed for job in jobs}) == 4
    again, _ = make_jobs(_generate(prompts=(np.array([9, 9, 9]),), n=1), max_seq_len=10)
    assert again[0].seed == jobs[0].seed


def test_jobs_of_one_group_share_its_number():
    _, groups = make_jobs(_generate(groups=("a", "a"), n=1), max_seq_len=10)
    assert groups == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n=0"),
        ({"prompts": (np.zeros(0, np.int32),), "groups": None}, "prompt 0 has 0 tokens"),
        ({"prompts": (np.arange(10),), "groups": None}, "prompt 0 has 10 tokens; 1 to 9"),
        ({"groups": ("a",)}, "1 group ids for 2 prompts"),
    ],
)
def test_bad_generate_requests_are_named(change, message):
    with pytest.raises(DataError, match=message):
        make_jobs(_generate(**change), max_seq_len=10)


def _config(**kw) -> ArcticRLClientConfig:
    return ArcticRLClientConfig(model_name="m", comm_protocol="ray", **kw)


@given(trainer=st.integers(0, 5), sampler=st.integers(0, 5), log_prob=st.integers(0, 5), colocate=st.booleans())
def test_every_rank_has_a_seat_and_no_bundle_is_overbooked(trainer, sampler, log_prob, colocate):
    if trainer + sampler + log_prob == 0:
        return
    colocate = colocate and sum(count > 0 for count in (trainer, sampler, log_prob)) > 1
    config = _config(training_gpus=trainer, sampling_gpus=sampler, log_prob_gpus=log_prob, colocate=colocate)
    plan = plan_placement(config, device="cuda", gpus=100)
    assert plan.bundles == (max if colocate else lambda *a: sum(a))(trainer, sampler, log_prob)
    load = np.zeros(plan.bundles)
    for seat in plan.seats:
        load[seat.bundle] += seat.share
    np.testing.assert_allclose(load, 1.0)
    for engine, count in (("trainer", trainer), ("sampler", sampler), ("log_prob", log_prob)):
        seats = plan.seats_of(engine)
        assert [seat.rank for seat in seats] == list(range(count))
        assert len({seat.bundle for seat in seats}) == count


def test_too_few_gpus_are_refused_with_the_sum():
    with pytest.raises(
        PlacementError, match=r"sum of training_gpus=2, sampling_gpus=1, log_prob_gpus=0 is 3, and the cluster has 2"
    ):
        plan_placement(_config(training_gpus=2, sampling_gpus=1), device="cuda", gpus=2)
    plan_placement(_config(training_gpus=2, sampling_gpus=1, colocate=True), device="cuda", gpus=2)


def _batch(masks: list[list[float]]) -> Batch:
    return Batch.from_samples(
        Sample(token_ids=np.arange(len(mask) + 1), prompt_length=1, loss_mask=np.asarray(mask, np.float32)) for mask in masks
    )


def _loss(**fields) -> PreparedLoss:
    options = {"sequence_reduction": "sum"}
    return prepare_loss(
        find_loss("grpo"), NamedLoss(**{"name": "grpo", "options": options, "normalization": "token", **fields})
    )


def test_divisor_counts_over_calls():
    batch = _batch([[1, 0, 1], [], [0, 0], [1]])
    token = _loss()
    assert Divisor().with_loss(batch, token).with_loss(batch, token).value() == 6
    assert Divisor().with_loss(batch, _loss(normalization="sequence")).value() == 2
    constant = _loss(normalization="constant", constant=8.0)
    assert Divisor().with_loss(batch, constant).with_loss(batch, constant).value() == 8
    assert Divisor().with_sum().with_sum().value() == 1
    assert Divisor().with_loss(_batch([[0, 0]]), token).value() == 1


@pytest.mark.parametrize(
    ("name", "value"), [("grpo", 2), ("gspo", 2), ("sapo", 2), ("rloo", 2), ("dapo", 3), ("cispo", 3), ("ppo", 3), ("sft", 3)]
)
def test_a_loss_divides_by_its_own_default(name: str, value: int):
    prepared = prepare_loss(find_loss(name), NamedLoss(name=name))
    assert Divisor().with_loss(_batch([[1, 0, 1], [], [0, 0], [1]]), prepared).value() == value


def test_divisors_do_not_mix_and_need_a_gradient():
    batch = _batch([[1]])
    with pytest.raises(InvalidStateError, match="normalised by token, this call by sum"):
        Divisor().with_loss(batch, _loss()).with_sum()
    with pytest.raises(InvalidStateError, match="no accumulated gradient"):
        Divisor().value()


def test_constants_that_differ_a_little_do_not_mix():
    first = Divisor().with_loss(_batch([[1]]), _loss(normalization="constant", constant=1_000_001.0))
    with pytest.raises(InvalidStateError):
        first.with_loss(_batch([[1]]), _loss(normalization="constant", constant=1_000_002.0))


class _Sleeper(Engine):
    """Rank 0 fails at once, the others take a while."""

    finished = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def report(self) -> EngineReport:
        return EngineReport("sleeper", "cpu", "float32", 0, 0, ())

    @classmethod
    def capabilities(cls, device: str) -> tuple[str, ...]:
        return ()

    def forward_backward(self, *args: object, **kwargs: object) -> None:
        self.finished += 1

    async def work(self) -> None:
        if self.spec.rank == 0:
            raise InvalidStateError("not now", where="sampler[0]")
        await asyncio.sleep(0.3)
        self.finished += 1


@pytest.mark.parametrize("kind", [SamplerGroup, EngineGroup])
def test_only_ranks_that_meet_in_collectives_are_lost_when_late(kind: type[EngineGroup], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(EngineGroup, "straggler_grace_s", 0.05)
    config = _config(sampling_gpus=2)
    engines = [_Sleeper(make_spec(config, "sampler", rank, "nowhere", "cpu")) for rank in range(2)]

    async def main() -> None:
        group = kind([LocalRank(engine) for engine in engines], deadline_s=5.0)
        try:
            await group.everywhere("work")
        finally:
            await group.stop(1.0)

    with pytest.raises(InvalidStateError if kind is SamplerGroup else EngineDiedError, match="not now"):
        asyncio.run(main())
    assert engines[1].finished == (kind is SamplerGroup)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (NamedLoss(name="nope"), "no loss named 'nope'"),
        (NamedLoss(name="grpo", options={"clip_hi": 0.3}), "unknown key"),
        (NamedLoss(name="grpo", normalization="token"), "cannot be divided by tokens"),
        (NamedLoss(name="dr_grpo"), "constant that you give"),
        (NamedLoss(name="antigravity:loss"), "does not import losses"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_before_any_rank_works(loss: NamedLoss, message: str):
    engine = _Sleeper(make_spec(_config(training_gpus=1), "trainer", 0, "nowhere", "cpu"))
    group = TrainerGroup([LocalRank(engine)], deadline_s=5.0, micro_batch_tokens=100)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(group.forward_backward(_batch([[1]]), loss, temperature=None))
    assert not engine.finished
    assert not group.accumulating


def test_states_refuse_with_the_way_out():
    state = EngineState("sampler")
    state.require_fresh("generate")
    state.stale = "its weights were dropped"
    with pytest.raises(InvalidStateError, match=r"generate is refused.*(?s:.)*sync_weights"):
        state.require_fresh("generate")
    state.sleep_level = 1
    with pytest.raises(InvalidStateError, match=r'sleeps at level 1(?s:.)*wake\("sampler"\)'):
        state.require_awake("generate")
    state.dead = "killed"
    with pytest.raises(EngineDiedError, match="killed"):
        state.require_alive("generate")
    assert str(state) == "dead"
