"""The embedded sampler against plain transformers: tokens, log-probs, ends, pauses, weights."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from arctic_core.backends.base import RankSpec, SampleJob
from arctic_core.backends.transformers_sampler.drawing import draw, sampling_logprobs
from arctic_core.backends.transformers_sampler.sampler import TransformersSampler
from arctic_core.config import ArcticRLClientConfig
from arctic_core.errors import DataError, DeadlineExceeded, InvalidStateError, ModelNotFoundError, WeightSyncError
from arctic_core.protocol import SamplingParams
from arctic_core.testing import make_tiny_model

from .sampler_support import WeightSender, collect, job, reference_logprobs, spec_of

PROMPTS = [[5, 6, 7, 8, 9], [300, 301], [40, 41, 42]]


@pytest.fixture(scope="module")
def tiny_b(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-b"), seed=7)


@pytest.fixture
def sampler(tiny_model):
    made = TransformersSampler(spec_of(tiny_model, max_num_seqs=4))
    made.start()
    yield made
    made.stop()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


# --- drawing ------------------------------------------------------------------------------------------------------------


def test_sampling_logprobs_follow_temperature_top_k_and_top_p():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain = logits.log_softmax(-1)
    torch.testing.assert_close(sampling_logprobs(logits, [SamplingParams()]), plain)
    torch.testing.assert_close(sampling_logprobs(logits, [SamplingParams(temperature=0, top_k=1, top_p=0.1)]), plain)
    torch.testing.assert_close(sampling_logprobs(logits, [SamplingParams(temperature=0.5)]), (logits * 2).log_softmax(-1))
    kept = torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf]]).log_softmax(-1)
    torch.testing.assert_close(sampling_logprobs(logits, [SamplingParams(top_k=2)]), kept)
    # Masses 0.644, 0.237, 0.087, 0.032: 0.65 needs two tokens, 0.6 one.
    torch.testing.assert_close(sampling_logprobs(logits, [SamplingParams(top_p=0.65)]), kept)
    assert sampling_logprobs(logits, [SamplingParams(top_p=0.6)])[0].tolist() == [0.0, *[-float("inf")] * 3]


def test_rows_of_one_call_keep_their_own_settings():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(top_k=3), SamplingParams(), SamplingParams(temperature=0.7, top_p=0.5)]
    together = sampling_logprobs(logits, params)
    for i, one in enumerate(params):
        torch.testing.assert_close(together[i], sampling_logprobs(logits[i : i + 1], [one])[0])


def test_draws_have_the_distributions_frequencies():
    logprobs = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().repeat(20000, 1)
    generator = torch.Generator().manual_seed(0)
    tokens = draw(logprobs, [SamplingParams()] * 20000, [generator] * 20000)
    frequency = torch.bincount(tokens, minlength=4) / 20000
    torch.testing.assert_close(frequency, torch.tensor([0.5, 0.3, 0.2, 0.0]), atol=0.02, rtol=0)
    assert frequency[3] == 0


# --- generation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_equal_a_plain_forward(sampler, tiny_model, temperature):
    jobs = [job(p, i, temperature=temperature, max_tokens=12, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    for i, completion in enumerate(run(collect(sampler, jobs))):
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == len(completion.logprobs) == 12
        expected = reference_logprobs(tiny_model, PROMPTS[i], completion.token_ids, temperature or 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


def test_greedy_takes_the_most_likely_token(sampler, tiny_model):
    (completion,) = run(collect(sampler, [job(PROMPTS[0], 0, temperature=0, max_tokens=6, ignore_eos=True)]))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = list(PROMPTS[0])
    for token in completion.token_ids:
        assert token == model(torch.tensor([ids])).logits[0, -1].argmax()
        ids.append(int(token))


def test_filtered_logprobs_are_normalised_over_what_was_kept(sampler, tiny_model):
    (completion,) = run(collect(sampler, [job(PROMPTS[0], 0, top_k=3, temperature=0.8, max_tokens=10, ignore_eos=True)]))
    expected = reference_logprobs(tiny_model, PROMPTS[0], completion.token_ids, 0.8, top_k=3)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


def test_a_completion_depends_on_its_seed_alone(sampler):
    def sampled(prompt, i, seed):
        return job(prompt, i, seed=seed, max_tokens=20, ignore_eos=True)

    alone = run(collect(sampler, [sampled(PROMPTS[0], 0, 11)]))[0]
    crowd = [sampled(PROMPTS[i % 3], i, 100 + i) for i in range(9)]
    crowd[5] = sampled(PROMPTS[0], 5, 11)
    together = run(collect(sampler, crowd))
    np.testing.assert_array_equal(together[5].token_ids, alone.token_ids)
    same_prompt = [together[i].token_ids.tolist() for i in (0, 3, 5, 6)]
    assert len({tuple(tokens) for tokens in same_prompt}) == 4


def test_jobs_without_a_seed_differ(sampler):
    jobs = [dataclasses.replace(job(PROMPTS[0], i, max_tokens=20, ignore_eos=True), seed=None) for i in range(2)]
    first, second = run(collect(sampler, jobs))
    assert first.token_ids.tolist() != second.token_ids.tolist()


def test_eos_and_stop_tokens_end_a_completion_and_stay_in_it(sampler):
    (free,) = run(collect(sampler, [job(PROMPTS[0], 0, temperature=0, max_tokens=10, ignore_eos=True)]))
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    (ended,) = run(
        collect(sampler, [job(PROMPTS[0], 0, temperature=0, max_tokens=10, stop_token_ids=(stop,), ignore_eos=True)])
    )
    assert ended.finish_reason == "stop"
    np.testing.assert_array_equal(ended.token_ids, free.token_ids[: first + 1])


def test_the_models_eos_ends_a_completion(tiny_model, tmp_path):
    import shutil

    from transformers import GenerationConfig

    sampler = TransformersSampler(spec_of(tiny_model))
    sampler.start()
    (free,) = run(collect(sampler, [job(PROMPTS[0], 0, temperature=0, max_tokens=5, ignore_eos=True)]))
    sampler.stop()
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    GenerationConfig(eos_token_id=[int(free.token_ids[0]), 2]).save_pretrained(folder)
    sampler = TransformersSampler(spec_of(str(folder)))
    sampler.start()
    (ended,) = run(collect(sampler, [job(PROMPTS[0], 0, temperature=0, max_tokens=5)]))
    (ignored,) = run(collect(sampler, [job(PROMPTS[0], 0, temperature=0, max_tokens=5, ignore_eos=True)]))
    sampler.stop()
    assert (ended.finish_reason, ended.token_ids.tolist()) == ("stop", free.token_ids[:1].tolist())
    assert ignored.token_ids.tolist() == free.token_ids.tolist()


def test_a_stop_string_cuts_the_text_and_keeps_its_tokens(sampler):
    (free,) = run(collect(sampler, [job(PROMPTS[0], 0, max_tokens=40, ignore_eos=True)]))
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 2]
    end = free.text.index(stop) + len(stop)
    (ended,) = run(collect(sampler, [job(PROMPTS[0], 0, max_tokens=40, stop=("never said", stop), ignore_eos=True)]))
    assert ended.finish_reason == "stop"
    assert ended.text == free.text[:end]
    count = len(ended.token_ids)
    assert 0 < count < 40
    np.testing.assert_array_equal(ended.token_ids, free.token_ids[:count])
    assert len(ended.logprobs) == count


def test_max_seq_len_ends_a_completion(tiny_model):
    sampler = TransformersSampler(spec_of(tiny_model, max_seq_len=8))
    sampler.start()
    (completion,) = run(collect(sampler, [job(PROMPTS[0], 0, max_tokens=40, ignore_eos=True)]))
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)
    with pytest.raises(DataError, match="leaves no room"):
        run(collect(sampler, [job(range(1, 9), 0)]))
    sampler.stop()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (job([], 0), "has no tokens"),
        (job([1, 512], 0), "token 512 at position 1"),
        (job([-1], 0), "token -1 at position 0"),
        (job([1], 0, stop_token_ids=(600,)), "stop token 600"),
    ],
)
def test_a_bad_job_is_refused_before_any_starts(sampler, bad, message):
    with pytest.raises(DataError, match=message):
        run(collect(sampler, [job(PROMPTS[0], 1), bad]))


# --- control ------------------------------------------------------------------------------------------------------------


def long_job(i: int, **kw) -> SampleJob:
    return job(PROMPTS[i % 3], i, max_tokens=400, ignore_eos=True, **kw)


def test_abort_ends_running_and_waiting_jobs_by_prefix(sampler):
    async def scenario():
        jobs = [dataclasses.replace(long_job(i), request_id=f"{'a' if i % 2 else 'b'}/{i}") for i in range(8)]
        jobs = [dataclasses.replace(j, sampling=short if j.request_id.startswith("b") else j.sampling) for j in jobs]
        task = asyncio.create_task(collect(sampler, jobs))
        await asyncio.sleep(0.05)
        await sampler.abort(["a/"])
        return await task

    short = SamplingParams(max_tokens=5, ignore_eos=True)
    results = run(scenario())
    assert [r.finish_reason for r in results] == ["length", "abort"] * 4
    assert all(len(r.token_ids) < 400 for r in results)


def test_closing_the_iterator_aborts_the_rest(sampler):
    async def scenario():
        stream = sampler.generate([job(PROMPTS[0], 0, max_tokens=1), *(long_job(i) for i in range(1, 8))])
        await anext(stream)
        await stream.aclose()
        await sampler.pause("drain", 5.0)  # ends at once where nothing runs any more
        await sampler.resume()

    run(scenario())


def test_a_drain_lets_running_jobs_end_and_holds_new_ones(sampler):
    async def scenario():
        running = asyncio.create_task(collect(sampler, [job(PROMPTS[0], 0, max_tokens=60, ignore_eos=True)]))
        await asyncio.sleep(0.03)
        await sampler.pause("drain", 30.0)
        (first,) = await asyncio.wait_for(running, 5)
        held = asyncio.create_task(collect(sampler, [job(PROMPTS[1], 1, max_tokens=2, ignore_eos=True)]))
        await asyncio.sleep(0.1)
        assert not held.done()
        await sampler.resume()
        (second,) = await held
        return first, second

    first, second = run(scenario())
    assert (len(first.token_ids), len(second.token_ids)) == (60, 2)


def test_a_drain_past_its_deadline_raises_and_generation_goes_on(sampler):
    async def scenario():
        running = asyncio.create_task(collect(sampler, [long_job(0)]))
        await asyncio.sleep(0.03)
        with pytest.raises(DeadlineExceeded, match="goes on"):
            await sampler.pause("drain", 0.05)
        (done,) = await running
        return done

    assert len(run(scenario()).token_ids) == 400


def test_pause_keep_freezes_and_resume_changes_nothing(sampler):
    async def scenario():
        running = asyncio.create_task(collect(sampler, [long_job(0, seed=3)]))
        await asyncio.sleep(0.05)
        await sampler.pause("keep", 5.0)
        await asyncio.sleep(0.2)
        assert not running.done()
        await sampler.resume()
        (frozen,) = await running
        (free,) = await collect(sampler, [long_job(0, seed=3)])
        return frozen, free

    frozen, free = run(scenario())
    np.testing.assert_array_equal(frozen.token_ids, free.token_ids)


def test_pause_abort_ends_all(sampler):
    async def scenario():
        running = asyncio.create_task(collect(sampler, [long_job(i) for i in range(6)]))
        await asyncio.sleep(0.05)
        await sampler.pause("abort", 5.0)
        results = await running
        await sampler.resume()
        return results

    assert {r.finish_reason for r in run(scenario())} == {"abort"}


def test_stop_fails_running_jobs(tiny_model):
    sampler = TransformersSampler(spec_of(tiny_model))
    sampler.start()

    async def scenario():
        running = asyncio.create_task(collect(sampler, [long_job(0)]))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(sampler.stop)
        await running

    with pytest.raises(Exception, match="was stopped"):
        run(scenario())
    with pytest.raises(InvalidStateError, match="not running"):
        run(collect(sampler, [long_job(0)]))
    sampler.stop()


def test_a_wrong_path_is_a_typed_error(tmp_path):
    with pytest.raises(ModelNotFoundError):
        TransformersSampler(spec_of(str(tmp_path / "absent"))).start()


# --- weights ------------------------------------------------------------------------------------------------------------


def test_after_a_sync_it_equals_a_fresh_engine(sampler, tiny_b):
    greedy = [job(p, i, temperature=0, max_tokens=16, ignore_eos=True) for i, p in enumerate(PROMPTS)]

    async def scenario():
        before = await collect(sampler, greedy)
        await WeightSender(tiny_b).sync(sampler, version=5)
        return before, await collect(sampler, greedy), await sampler.score([np.array([1, 2, 3])])

    before, after, scores = run(scenario())
    fresh = TransformersSampler(spec_of(tiny_b))
    fresh.start()
    expected = run(collect(fresh, greedy))
    expected_scores = run(fresh.score([np.array([1, 2, 3])]))
    fresh.stop()
    for old, got, want in zip(before, after, expected, strict=True):
        assert (old.policy_version, got.policy_version) == (0, 5)
        assert old.token_ids.tolist() != got.token_ids.tolist()
        np.testing.assert_array_equal(got.token_ids, want.token_ids)
        np.testing.assert_array_equal(got.logprobs, want.logprobs)
    np.testing.assert_array_equal(scores[0], expected_scores[0])


def test_a_sync_in_the_middle_recomputes_the_cache_of_what_was_frozen(sampler, tiny_model, tiny_b):
    async def scenario():
        running = asyncio.create_task(collect(sampler, [long_job(0, seed=3)]))
        await asyncio.sleep(0.05)
        await sampler.pause("keep", 5.0)
        await WeightSender(tiny_b).sync(sampler, version=1)
        await sampler.resume()
        return (await running)[0]

    completion = run(scenario())
    assert completion.policy_version == 0
    assert len(completion.token_ids) == 400
    old = reference_logprobs(tiny_model, PROMPTS[0], completion.token_ids, 1.0)
    new = reference_logprobs(tiny_b, PROMPTS[0], completion.token_ids, 1.0)
    is_old = np.abs(completion.logprobs - old) < 1e-4
    is_new = np.abs(completion.logprobs - new) < 1e-4
    switch = int(is_new.argmax())
    assert 0 < switch < 400
    assert is_old[:switch].all()
    assert is_new[switch:].all()


def test_a_tied_model_syncs(tiny_tied_model, tmp_path_factory):
    other = make_tiny_model(tmp_path_factory.mktemp("tied-b"), seed=9, tie_embeddings=True)
    sampler = TransformersSampler(spec_of(tiny_tied_model))
    sampler.start()

    async def scenario():
        await WeightSender(other).sync(sampler, version=1)
        return await collect(sampler, [job(PROMPTS[0], 0, temperature=0, max_tokens=8, ignore_eos=True)])

    (completion,) = run(scenario())
    sampler.stop()
    expected = reference_logprobs(other, PROMPTS[0], completion.token_ids, 1.0)
    np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


def test_a_failed_sync_leaves_the_old_weights_serving(sampler, tiny_b):
    greedy = [job(PROMPTS[0], 0, temperature=0, max_tokens=8, ignore_eos=True)]

    async def scenario():
        before = await collect(sampler, greedy)
        sender = WeightSender(tiny_b, leave_out="model.norm.weight")
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight: missing"):
            await sampler.sync_begin(sender.plan)
        sender = WeightSender(tiny_b)
        await sampler.sync_begin(sender.plan)
        await sampler.sync_push(sender.publish(0))
        with pytest.raises(WeightSyncError, match="never arrived"):
            await sampler.sync_commit(1)
        await sampler.sync_abandon()
        await sampler.sync_abandon()
        with pytest.raises(WeightSyncError, match="no weight sync was begun"):
            await sampler.sync_commit(1)
        sender.carrier.release()
        return before, await collect(sampler, greedy)

    before, after = run(scenario())
    np.testing.assert_array_equal(before[0].token_ids, after[0].token_ids)
    assert after[0].policy_version == 0


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(sampler, tiny_model, level):
    greedy = [job(PROMPTS[0], 0, temperature=0, max_tokens=8, ignore_eos=True)]

    async def scenario():
        before = await collect(sampler, greedy)
        await sampler.sleep_async(level)
        with pytest.raises(InvalidStateError, match="sleeps"):
            await collect(sampler, greedy)
        await sampler.wake_async()
        if level == 2:
            with pytest.raises(InvalidStateError, match="dropped"):
                await collect(sampler, greedy)
            await WeightSender(tiny_model).sync(sampler, version=0)
        return before, await collect(sampler, greedy)

    before, after = run(scenario())
    np.testing.assert_array_equal(before[0].token_ids, after[0].token_ids)


def test_the_report_names_what_it_can_do(sampler):
    report = sampler.report()
    assert report.implementation == "transformers"
    assert report.memory_bytes > 2**20
    assert {"generate", "sync_weights", "sleep"} <= set(report.capabilities)


def test_score_refuses_what_it_cannot_score(sampler):
    with pytest.raises(DataError, match="sequence 1"):
        run(sampler.score([np.array([1, 2]), np.array([1])]))


def test_two_samplers_in_one_process_are_independent(tiny_model):
    config = ArcticRLClientConfig(model_name=tiny_model, sampling_gpus=2)
    ranks = [RankSpec("sampler", rank, 2, tiny_model, "cpu", "float32", config) for rank in range(2)]
    samplers = [TransformersSampler(spec) for spec in ranks]
    for sampler in samplers:
        sampler.start()
    samplers[0].stop()
    assert len(run(collect(samplers[1], [job(PROMPTS[0], 0, max_tokens=3, ignore_eos=True)]))[0].token_ids) == 3
    samplers[1].stop()
