"""The vLLM sampler with the real vLLM: log-probs, seeds, ends, pauses, weight sync, and no process left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from arctic_core.backends.vllm_sampler.admission import Admission
from arctic_core.backends.vllm_sampler.arguments import engine_arguments, engine_environment, sampling_arguments
from arctic_core.backends.vllm_sampler.sampler import VllmSampler
from arctic_core.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    EngineDiedError,
    EngineError,
    EngineStartError,
    InvalidStateError,
    UnsupportedOperation,
    WeightSyncError,
)
from arctic_core.testing import make_tiny_model

from . import sampler_support
from .sampler_support import WeightSender, collect, job, reference_logprobs

spec_of = functools.partial(sampler_support.spec_of, engine="vllm", kv_cache_gib=0.25)
PROMPTS = [[5, 6, 7, 8, 9], [300, 301], [40, 41, 42] * 20]


# --- parts, without an engine -------------------------------------------------------------------------------------------


def test_admission_is_first_come_first_served_and_bounded():
    async def scenario():
        admission = Admission(2)
        order: list[str] = []
        most = 0

        async def one(name: str) -> None:
            nonlocal most
            async with admission.turn(name) as admitted:
                assert admitted
                order.append(name)
                most = max(most, admission.inside)
                await asyncio.sleep(0.01)

        await asyncio.gather(*(one(f"j{i}") for i in range(7)))
        assert order == [f"j{i}" for i in range(7)]
        assert most == 2
        assert admission.inside == 0

    asyncio.run(scenario())


def test_admission_holds_aborts_and_drains():
    async def scenario():
        admission = Admission(1)
        release = asyncio.Event()

        async def one(name: str) -> bool:
            async with admission.turn(name) as admitted:
                if admitted:
                    await release.wait()
                return admitted

        running = asyncio.create_task(one("a/0"))
        waiting = [asyncio.create_task(one(name)) for name in ("a/1", "b/0")]
        await asyncio.sleep(0)
        admission.close()
        assert admission.abort(["a/"]) == ["a/0"]
        assert await waiting[0] is False
        idle = asyncio.create_task(admission.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        release.set()
        await asyncio.wait_for(idle, 1)
        assert await running
        assert not waiting[1].done()
        admission.open()
        assert await waiting[1]
        cancelled = asyncio.create_task(one("c/0"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert admission.inside == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_num_seq": 3}, "no engine argument 'max_num_seq'"),
        ({"dtype": "float16"}, "dtype is set by dtype"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode is set by nothing"),
    ],
)
def test_unknown_and_reserved_engine_arguments_are_refused_by_name(tiny_model, extra, message):
    with pytest.raises(ConfigError, match=message):
        engine_arguments(spec_of(tiny_model, vllm=extra))


def test_engine_arguments_follow_the_settings(tiny_model):
    arguments = engine_arguments(spec_of(tiny_model, max_seq_len=99, kv_cache_gib=0.5, vllm={"block_size": 64}))
    assert arguments["max_model_len"] == 99
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert arguments["block_size"] == 64
    cuda = engine_arguments(dataclasses.replace(spec_of(tiny_model), device="cuda"))
    assert cuda["enable_sleep_mode"] is True
    assert "kv_cache_memory_bytes" not in cuda


def test_the_environment_is_undone(tiny_model, monkeypatch):
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    before = dict(os.environ)
    with engine_environment(dataclasses.replace(spec_of(tiny_model), threads=1), {}, "folder"):
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ["OMP_NUM_THREADS"] == "1"
        os.environ["VLLM_SET_BY_VLLM"] = "1"
    assert dict(os.environ) == before


def test_sampling_parameters_are_passed_on_or_refused():
    given = job([1, 2, 3], 0, seed=-1, top_k=5, top_p=0.5, temperature=0.6, max_tokens=100, stop=("x",), stop_token_ids=(7,))
    params = sampling_arguments(given, 50)
    assert (params.max_tokens, params.top_k, params.top_p, params.temperature) == (47, 5, 0.5, 0.6)
    assert (params.stop, params.stop_token_ids, params.seed) == (["x"], [7], 2**63 - 1)
    with pytest.raises(DataError, match=r"0\.001"):
        sampling_arguments(job([1], 0, temperature=0.001), 50)


def test_sleep_is_not_offered_on_cpu(tiny_model):
    assert "sleep" not in VllmSampler.capabilities("cpu")
    assert {"sleep", "wake"} <= set(VllmSampler.capabilities("cuda"))
    with pytest.raises(UnsupportedOperation):
        asyncio.run(VllmSampler(spec_of(tiny_model)).sleep_async(1))


# --- the real engine ----------------------------------------------------------------------------------------------------


class Runner:
    """A sampler on one event loop, as the service runs it: started and stopped on another thread."""

    def __init__(self, sampler: VllmSampler) -> None:
        self.sampler = sampler
        self._loop = asyncio.Runner()

    def __enter__(self) -> Runner:
        self.run(asyncio.to_thread(self.sampler.start))
        return self

    def __exit__(self, *_: object) -> None:
        self.run(asyncio.to_thread(self.sampler.stop))
        self._loop.close()

    def run(self, coroutine):
        return self._loop.run(asyncio.wait_for(coroutine, 120))

    def collect(self, jobs):
        return self.run(collect(self.sampler, jobs))


@pytest.fixture(scope="module")
def tiny_b(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-b"), seed=7)


@pytest.fixture(scope="module")
def vllm(tiny_model) -> Iterator[Runner]:
    with Runner(VllmSampler(spec_of(tiny_model))) as runner:
        yield runner


_numbers = iter(range(10**9))


def fresh(prompt, **kw):
    """A job with a request id that was never used."""
    kw.setdefault("seed", 0)
    return job(prompt, next(_numbers), **{"ignore_eos": True, **kw})


@pytest.mark.e2e
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7}, {}, {"top_k": 3, "temperature": 0.8}])
def test_logprobs_equal_a_transformers_forward(vllm, tiny_model, sampling):
    jobs = [fresh(p, seed=i, max_tokens=12, **sampling) for i, p in enumerate(PROMPTS)]
    for i, completion in enumerate(vllm.collect(jobs)):
        assert (completion.finish_reason, len(completion.token_ids), completion.policy_version) == ("length", 12, 0)
        temperature = sampling.get("temperature", 1.0) or 1.0
        expected = reference_logprobs(tiny_model, PROMPTS[i], completion.token_ids, temperature, top_k=sampling.get("top_k", 0))
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.e2e
def test_greedy_and_sampled_jobs_in_one_batch_keep_their_own_logprobs(vllm, tiny_model):
    jobs = [fresh(PROMPTS[0], seed=i, max_tokens=8, temperature=t) for i, t in enumerate((0.0, 0.5, 1.3, 0.0))]
    for one, completion in zip(jobs, vllm.collect(jobs), strict=True):
        expected = reference_logprobs(tiny_model, PROMPTS[0], completion.token_ids, one.sampling.temperature or 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.e2e
def test_a_completion_depends_on_its_seed_alone(vllm):
    (alone,) = vllm.collect([fresh(PROMPTS[0], seed=11, max_tokens=20)])
    crowd = [fresh(PROMPTS[0], seed=11 if i == 5 else i, max_tokens=20) for i in range(8)]
    together = vllm.collect(crowd)
    np.testing.assert_array_equal(together[5].token_ids, alone.token_ids)
    assert len({tuple(c.token_ids.tolist()) for c in together}) == 8


@pytest.mark.e2e
def test_stop_token_stop_string_and_eos(vllm):
    (free,) = vllm.collect([fresh(PROMPTS[0], seed=2, max_tokens=40)])
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    middle = len(free.text) // 2
    string = free.text[middle : middle + 2]
    by_token, by_string = vllm.collect(
        [
            fresh(PROMPTS[0], seed=2, max_tokens=40, stop_token_ids=(stop,)),
            fresh(PROMPTS[0], seed=2, max_tokens=40, stop=("never said", string)),
        ]
    )
    assert by_token.finish_reason == by_string.finish_reason == "stop"
    np.testing.assert_array_equal(by_token.token_ids, free.token_ids[: first + 1])
    count = len(by_string.token_ids)
    assert 0 < count < 40
    np.testing.assert_array_equal(by_string.token_ids, free.token_ids[:count])
    np.testing.assert_array_equal(by_string.logprobs, free.logprobs[:count])
    assert by_string.text == free.text[: free.text.index(string) + len(string)]


@pytest.mark.e2e
def test_limits_and_bad_jobs(vllm):
    (full,) = vllm.collect([fresh(range(1, 479), max_tokens=40)])
    assert (full.finish_reason, len(full.token_ids)) == ("length", 2)
    for bad in (fresh([]), fresh([512]), fresh(range(480))):
        with pytest.raises(DataError):
            vllm.collect([bad])


@pytest.mark.e2e
def test_abort_by_prefix(vllm):
    async def scenario():
        jobs = [dataclasses.replace(fresh(PROMPTS[0], max_tokens=400), request_id=f"abort/{i}") for i in range(30)]
        short = dataclasses.replace(fresh(PROMPTS[0], max_tokens=3), request_id="keep/0")
        task = asyncio.create_task(collect(vllm.sampler, [short, *jobs]))
        await asyncio.sleep(0.3)
        await vllm.sampler.abort(["abort/"])
        return await task

    kept, *aborted = vllm.run(scenario())
    assert (kept.finish_reason, len(kept.token_ids)) == ("length", 3)
    assert {c.finish_reason for c in aborted} == {"abort"}
    assert all(len(c.token_ids) == len(c.logprobs) < 400 for c in aborted)
    assert len(aborted[0].token_ids) > 0
    assert len(aborted[-1].token_ids) == 0


@pytest.mark.e2e
def test_closing_the_iterator_frees_the_engine(vllm):
    async def scenario():
        stream = vllm.sampler.generate(
            [fresh(PROMPTS[0], max_tokens=1), *(fresh(PROMPTS[0], max_tokens=400) for _ in range(5))]
        )
        await anext(stream)
        await stream.aclose()
        await vllm.sampler.pause("drain", 2.0)
        await vllm.sampler.resume()

    vllm.run(scenario())


@pytest.mark.e2e
def test_a_late_drain_goes_on_and_keep_freezes(vllm):
    sampler = vllm.sampler

    async def scenario():
        task = asyncio.create_task(collect(sampler, [fresh(PROMPTS[0], seed=1, max_tokens=300)]))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded, match="goes on"):
            await sampler.pause("drain", 0.05)
        await sampler.pause("keep", 10)
        await asyncio.sleep(0.3)
        assert not task.done()
        with pytest.raises(InvalidStateError, match="frozen"):
            await sampler.score([np.array([1, 2])])
        await sampler.resume()
        return (await task)[0]

    kept = vllm.run(scenario())
    (free,) = vllm.collect([fresh(PROMPTS[0], seed=1, max_tokens=300)])
    np.testing.assert_array_equal(kept.token_ids, free.token_ids)


@pytest.mark.e2e
def test_pause_abort_ends_what_runs_and_holds_what_comes(vllm):
    sampler = vllm.sampler

    async def scenario():
        async def end() -> None:
            await asyncio.sleep(0.1)
            await sampler.pause("abort", 10)

        long = [fresh(PROMPTS[0], max_tokens=400) for _ in range(3)]
        aborted, _ = await asyncio.gather(collect(sampler, long), end())
        held = asyncio.create_task(collect(sampler, [fresh(PROMPTS[0], max_tokens=2)]))
        await asyncio.sleep(0.2)
        assert not held.done()
        await sampler.resume()
        await held
        return aborted

    assert {c.finish_reason for c in vllm.run(scenario())} == {"abort"}


@pytest.mark.e2e
@pytest.mark.parametrize(("mode", "reason"), [("drain", "length"), ("abort", "abort")])
def test_frozen_completions_can_still_be_drained_or_aborted(vllm, mode, reason):
    sampler = vllm.sampler

    async def scenario():
        task = asyncio.create_task(collect(sampler, [fresh(PROMPTS[0], max_tokens=300)]))
        await asyncio.sleep(0.1)
        await sampler.pause("keep", 10)
        await sampler.pause(mode, 10)
        (completion,) = await asyncio.wait_for(task, 10)
        await sampler.resume()
        return completion.finish_reason

    assert vllm.run(scenario()) == reason


@pytest.mark.e2e
def test_score_equals_a_transformers_forward(vllm, tiny_model):
    scores = vllm.run(vllm.sampler.score([np.asarray(p, np.int32) for p in PROMPTS]))
    for prompt, score in zip(PROMPTS, scores, strict=True):
        np.testing.assert_allclose(score, reference_logprobs(tiny_model, prompt[:1], prompt[1:], 1.0), rtol=0, atol=1e-4)


@pytest.mark.e2e
def test_a_failed_sync_leaves_the_old_weights_serving(vllm, tiny_b):
    greedy = {"temperature": 0.0, "max_tokens": 8}
    sampler = vllm.sampler

    async def scenario():
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight: missing"):
            await sampler.sync_begin(WeightSender(tiny_b, leave_out="model.norm.weight").plan)
        sender = WeightSender(tiny_b)
        await sampler.sync_begin(sender.plan)
        ref = sender.publish(0)
        assert ref.checksums is not None
        wrong = dataclasses.replace(ref, checksums=(ref.checksums[0] ^ 1, *ref.checksums[1:]))
        with pytest.raises(WeightSyncError, match=f"{sender.plan.tensors[0].name}: CRC-32") as caught:
            await sampler.sync_push(wrong)
        assert "worker 0" in caught.value.where
        await sampler.sync_push(ref)
        with pytest.raises(WeightSyncError, match="never arrived"):
            await sampler.sync_commit(9)
        await sampler.sync_abandon()
        sender.carrier.release()

    (before,) = vllm.collect([fresh(PROMPTS[0], **greedy)])
    vllm.run(scenario())
    (after,) = vllm.collect([fresh(PROMPTS[0], **greedy)])
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    assert after.policy_version == 0


@pytest.mark.e2e
def test_syncs_equal_fresh_engines_and_reset_the_prefix_cache(vllm, tiny_model, tiny_b):
    """A → B → A: what is served after each sync equals an engine that started on those weights, bit for bit."""
    greedy = {"temperature": 0.0, "max_tokens": 16}
    sampler = vllm.sampler

    def answers(runner: Runner):
        # One by one: bits depend on what else is in the batch.
        return [completion for p in PROMPTS for completion in runner.collect([fresh(p, **greedy)])]

    async def sync(path: str, version: int) -> None:
        await sampler.pause("drain", 10)
        await WeightSender(path).sync(sampler, version)
        await sampler.resume()

    async def sync_while_frozen():
        task = asyncio.create_task(collect(sampler, [fresh(PROMPTS[0], seed=4, max_tokens=400)]))
        await asyncio.sleep(0.2)
        with pytest.raises(InvalidStateError, match="running"):
            await WeightSender(tiny_model).sync(sampler, 2)
        await sampler.sync_abandon()
        await sampler.pause("keep", 10)
        await WeightSender(tiny_model).sync(sampler, 2)
        await sampler.resume()
        return (await task)[0]

    original = answers(vllm)
    vllm.run(sync(tiny_b, 1))
    changed = answers(vllm)
    frozen = vllm.run(sync_while_frozen())
    restored = answers(vllm)
    with Runner(VllmSampler(spec_of(tiny_b))) as other:
        expected = answers(other)
        assert other.sampler._process.pids()
    for got, want in ((changed, expected), (restored, original)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert original[0].token_ids.tolist() != changed[0].token_ids.tolist()
    assert [c[0].policy_version for c in (original, changed, restored)] == [0, 1, 2]

    assert (frozen.policy_version, len(frozen.token_ids)) == (1, 400)
    old = np.abs(frozen.logprobs - reference_logprobs(tiny_b, PROMPTS[0], frozen.token_ids, 1.0)) < 1e-4
    new = np.abs(frozen.logprobs - reference_logprobs(tiny_model, PROMPTS[0], frozen.token_ids, 1.0)) < 1e-4
    switch = int(new.argmax())
    assert 0 < switch < 400
    assert old[:switch].all()
    assert new[switch:].all()


@pytest.mark.e2e
def test_a_tied_model_syncs_and_a_killed_engine_is_noticed(tiny_tied_model, tmp_path_factory):
    other = make_tiny_model(tmp_path_factory.mktemp("tied-b"), seed=9, tie_embeddings=True)
    with Runner(VllmSampler(spec_of(tiny_tied_model))) as runner:
        sampler = runner.sampler
        runner.run(WeightSender(other).sync(sampler, 1))
        (completion,) = runner.collect([fresh(PROMPTS[0], max_tokens=12)])
        expected = reference_logprobs(other, PROMPTS[0], completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)

        async def kill() -> float:
            tasks = [asyncio.create_task(collect(sampler, [fresh(PROMPTS[0], max_tokens=470)])) for _ in range(20)]
            await asyncio.sleep(0.2)
            (pid,) = sampler._process.pids()
            os.kill(pid, signal.SIGKILL)
            started = time.monotonic()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(outcome, EngineDiedError), outcome
            with pytest.raises(EngineDiedError):
                await collect(sampler, [fresh(PROMPTS[0])])
            with pytest.raises(EngineDiedError):
                await sampler.pause("drain", 5)
            return time.monotonic() - started

        assert runner.run(kill()) < 5


@pytest.mark.e2e
def test_stop_fails_running_and_waiting_jobs(tiny_model):
    runner = Runner(VllmSampler(spec_of(tiny_model, max_num_seqs=1)))

    async def scenario():
        tasks = [asyncio.create_task(collect(runner.sampler, [fresh(PROMPTS[0], max_tokens=470)])) for _ in range(4)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(runner.sampler.stop)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)

    with runner:
        outcomes = runner.run(scenario())
    assert [type(outcome) for outcome in outcomes] == [EngineError] * 4
    assert all("was stopped" in str(outcome) for outcome in outcomes)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda model: spec_of(model + "-absent"), "absent"),
        (lambda model: spec_of(model, max_seq_len=4096), "max_model_len"),
        (lambda model: spec_of(model, kv_cache_gib=4000), "[Kk][Vv]"),
    ],
)
def test_a_failed_start_names_the_cause_and_leaves_no_process(tiny_model, spec, message):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    sampler = VllmSampler(spec(tiny_model))
    with pytest.raises(EngineStartError, match=message):
        sampler.start()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert [child.cmdline() for child in left if "resource_tracker" not in " ".join(child.cmdline())] == []
    sampler.stop()


@pytest.mark.e2e
def test_no_process_outlives_stop_nor_a_killed_parent(tiny_model, tmp_path):
    program = f"""
import sys, time
from arctic_core.backends.base import RankSpec
from arctic_core.backends.vllm_sampler.sampler import VllmSampler
from arctic_core.config import ArcticRLClientConfig

if __name__ == "__main__":
    config = ArcticRLClientConfig.parse(
        dict(model_name={tiny_model!r}, sampling_gpus=1, max_seq_len=64, sampling=dict(engine="vllm", kv_cache_gib=0.1))
    )
    sampler = VllmSampler(RankSpec("sampler", 0, 1, {tiny_model!r}, "cpu", "float32", config))
    sampler.start()
    print(*sampler._process.pids(), flush=True)
    sys.stdin.readline()
    sampler.stop()
    print("stopped", flush=True)
    sys.stdin.readline()
"""
    script = tmp_path / "start_sampler.py"
    script.write_text(program)
    for ending in ("stop", "kill"):
        parent = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert parent.stdin is not None
        assert parent.stdout is not None
        (pid,) = map(int, parent.stdout.readline().split())
        engine = psutil.Process(pid)
        assert engine.is_running()
        if ending == "stop":
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "stopped\n"
            assert not psutil.pid_exists(pid)
        parent.kill()
        parent.wait(10)
        psutil.wait_procs([engine], timeout=10)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
