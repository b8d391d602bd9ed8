"""What goes wrong ends in a typed error within a stated time, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest

from arctic_core import Batch, NamedLoss, Sample, SamplingParams, create_arctic_rl_client
from arctic_core.errors import ConfigError, DataError, EngineDiedError, EngineStartError, ModelNotFoundError

from .conftest import wait_until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GRPO = NamedLoss(name="grpo", options={"on_policy": True})
#: Seconds within which a fault must show.
NOTICE_S = 30.0


def batch() -> Batch:
    rows = [Sample(token_ids=[1, 2, 3, 4], prompt_length=2, advantages=[1.0, 1.0], group=i) for i in range(4)]
    return Batch.from_samples(rows)


def pid_of(client, engine: str, rank: int = 0) -> int:
    return next(place.pid for place in client.info().placement if (place.engine, place.rank) == (engine, rank))


def test_a_refused_batch_does_no_harm_and_a_killed_trainer_rank_is_noticed(ray_config, marked):
    training = {"zero_stage": 3, "optimizer": {"lr": 1e-2}}
    with create_arctic_rl_client(ray_config(training_gpus=2, sampling_gpus=0, training=training)) as client:
        foreign = Batch.from_samples([*batch().samples(), Sample(token_ids=[1, 99_999], prompt_length=1, advantages=[1.0])])
        with pytest.raises(DataError, match="token id 99999"):  # on one rank; the other must not wait for it
            client.forward_backward(foreign, GRPO)
        client.forward_backward(batch(), GRPO)
        assert client.step().step == 1
        client.forward_backward(batch(), GRPO)
        os.kill(pid_of(client, "trainer", 1), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDiedError, match="trainer"):
            client.forward_backward(batch(), GRPO)
        assert time.monotonic() - started < NOTICE_S
        with pytest.raises(EngineDiedError, match="load_checkpoint"):
            client.step()
        assert {engine.name: engine.state for engine in client.info().engines} == {"trainer": "dead"}


@pytest.mark.parametrize("victim", ["actor", "engine core"])
def test_a_killed_sampler_is_noticed_and_training_goes_on(ray_config, marked, victim):
    with create_arctic_rl_client(ray_config()) as client:
        pid = pid_of(client, "sampler")
        if victim == "engine core":
            children = psutil.Process(pid).children(recursive=True)
            pid = max(children, key=lambda child: child.memory_info().rss).pid  # the other is a resource tracker
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(EngineDiedError, match="sampler"):
            client.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        assert time.monotonic() - started < NOTICE_S
        client.forward_backward(batch(), GRPO)
        assert client.step().step == 1


def test_a_wrong_model_path_leaves_nothing(ray_config, marked):
    with pytest.raises(ModelNotFoundError, match="no-such-folder"):
        create_arctic_rl_client(ray_config(model_name="/no-such-folder/model"))
    assert not wait_until_gone(marked, seconds=NOTICE_S)


def test_a_wrong_engine_option_is_named(ray_config, marked):
    with pytest.raises((ConfigError, EngineStartError), match="no_such_argument"):
        create_arctic_rl_client(ray_config(training_gpus=0, sampling={"vllm": {"no_such_argument": 1}}))
    assert not wait_until_gone(marked, seconds=NOTICE_S)


JOB = textwrap.dedent(
    """
    import sys, time
    from arctic_core import ArcticRLClientConfig, SamplingParams, create_arctic_rl_client
    config = ArcticRLClientConfig.model_validate_json(sys.argv[1])
    with create_arctic_rl_client(config) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        rows = client.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        print("generated", len(rows[0][0].token_ids), flush=True)
        if sys.argv[2] == "wait":
            time.sleep(300)
    """
)


def start_job(config, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", JOB, config.model_dump_json(), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def expect(job: subprocess.Popen[str], line: str) -> None:
    assert job.stdout is not None
    assert job.stdout.readline().strip() == line


def go(job: subprocess.Popen[str]) -> None:
    assert job.stdin is not None
    job.stdin.write("go\n")
    job.stdin.flush()


def test_two_jobs_run_on_one_machine(ray_config, marked):
    jobs = [start_job(ray_config(job=f"twin{i}"), "end") for i in range(2)]
    for job in jobs:
        expect(job, "ready")
    for job in jobs:
        go(job)
    for job in jobs:
        expect(job, "generated 4")
        assert job.wait(timeout=60) == 0
    assert not wait_until_gone(marked, seconds=NOTICE_S)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_client_takes_its_engines_with_it(ray_config, marked, how):
    job = start_job(ray_config(), "wait")
    expect(job, "ready")
    go(job)
    expect(job, "generated 4")
    assert len(marked()) > 3
    job.send_signal(how)
    assert job.wait(timeout=NOTICE_S) != 0
    left = wait_until_gone(marked, seconds=NOTICE_S)
    assert not left, [process.cmdline() for process in left]


@pytest.mark.parametrize(("absent", "extra"), [("deepspeed", "train"), ("torch", "train"), ("vllm", "sample"), ("ray", "rl")])
def test_a_missing_extra_is_named(tiny_model, absent, extra):
    part = (
        "sampling_gpus=1, sampling={'engine': 'vllm'}"
        if absent == "vllm"
        else "training_gpus=1, training={'engine': 'deepspeed'}"
    )
    code = textwrap.dedent(
        f"""
        import sys
        sys.modules[{absent!r}] = None  # as if it were not installed
        from arctic_core import ArcticRLClientConfig, create_arctic_rl_client
        from arctic_core.errors import MissingExtraError
        config = ArcticRLClientConfig(
            model_name={tiny_model!r},
            {part},
            comm_protocol={"ray" if absent == "ray" else "local"!r},
        )
        try:
            create_arctic_rl_client(config)
        except MissingExtraError as error:
            print(error)
        """
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert f'pip install "arctic-core[{extra}]"' in out
    assert absent in out


def test_a_generation_past_its_deadline_is_cut_off(ray_config, marked):
    config = ray_config(training_gpus=0, deadlines={"request": 2, "start": 240, "stop": 15}, max_seq_len=512)
    with create_arctic_rl_client(config) as client:
        from arctic_core.errors import DeadlineExceeded

        sampling = SamplingParams(max_tokens=500, ignore_eos=True)
        with pytest.raises(DeadlineExceeded):
            client.generate([np.arange(1, 6)] * 32, sampling, n=8)
        time.sleep(1)
        assert len(client.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))[0][0].token_ids) == 2
