"""Job files: reading, overrides, backends, and the errors that name what is wrong."""

import pytest

from arctic_core.errors import ConfigError
from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.config_file import apply_override, dump_yaml, job_values, load_job, parse_yaml, shipped_configs

JOB = """
model: some/model
task: {name: addition, options: {max_operand: 5}}
steps: 3
client:
  training:
    optimizer: {lr: 1e-5}
"""


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def test_a_job_file_fills_the_tree(job_file):
    job = load_job(job_file)
    assert job.model == job.client.model_name == "some/model"
    assert job.client.training.optimizer.lr == 1e-5
    assert (job.client.training_gpus, job.client.sampling_gpus) == (1, 1)
    assert job.task.options == {"max_operand": 5}
    assert job.backend == "local"


def test_toml_gives_the_same_job(job_file, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        'model = "some/model"\nsteps = 3\n[task]\nname = "addition"\n[task.options]\nmax_operand = 5\n'
        "[client.training.optimizer]\nlr = 1e-5\n"
    )
    assert load_job(str(path)) == load_job(job_file)


def test_overrides_win_over_the_backend_and_the_file(job_file):
    job = load_job(
        job_file, ["seed=7", "client.training.zero_stage=2", "rollouts.stop=['x', y]", "task.options.extra=on"], "ray"
    )
    assert job.seed == job.client.seed == 7
    assert job.client.comm_protocol == "ray"
    assert (job.client.training.engine, job.client.sampling.engine) == ("deepspeed", "vllm")
    assert job.client.training.zero_stage == 2
    assert job.rollouts.stop == ("x", "y")
    assert job.task.options["extra"] == "on"


def test_the_local_backend_removes_what_only_ray_engines_know(job_file):
    ray_only = ["client.training.zero_stage=3", "client.training.offload_optimizer=true", "client.training_gpus=4"]
    values = job_values(load_job(job_file, [*ray_only, "client.comm_protocol=ray"]))
    path = job_file.replace("job", "ray")
    with open(path, "w") as stream:
        stream.write(dump_yaml(values))
    client = load_job(path, backend="local").client
    assert client.comm_protocol == "local"
    assert (client.training.engine, client.sampling.engine) == ("torch", "transformers")
    assert (client.training.zero_stage, client.training.offload_optimizer, client.training_gpus) == (0, False, 1)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rolouts.n=3", "rolouts"),
        ("rollouts.m=3", "rollouts.m"),
        ("client.training.optimizer.lrr=3", "client.training.optimizer.lrr"),
        ("algorithm.loss.optoins.clip_low=0.1", "algorithm.loss.optoins"),
        ("steps=0", "steps"),
        ("rollouts.temperature=0", "rollouts.temperature"),
        ("algorithm.mini_batches=65", "mini_batches"),
        ("rollouts.max_tokens=4096", "max_seq_len"),
        ("client.training_gpus=0", "training_gpus"),
        ("client.model_name=other", "client.model_name"),
        ("algorithm.loss={normalization: token, constant: 3}", "constant"),
        ("algorithm.advantage.name=gae", "algorithm.advantage"),
        ("algorithm.advantage={name: rloo, epsilon: 1}", "algorithm.advantage.rloo.epsilon"),
        ("algorithm.advantage.kl_coef=0.1", "algorithm.advantage.grpo.kl_coef"),
        ("algorithm.teacher_topk=0", "teacher_topk"),
        ("steps", "key.sub=value"),
        (".=3", "key.sub=value"),
        ("steps.deep=3", "steps is 3"),
        ("steps={", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_named(job_file, override, named):
    with pytest.raises(ConfigError) as caught:
        load_job(job_file, [override])
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "grpo"),
        (["algorithm.loss.name=cispo"], "grpo"),
        (["algorithm.loss.name=dr_grpo"], "dr_grpo"),
        (["algorithm.loss.name=rloo", "algorithm.advantage="], "rloo"),
        (["algorithm.loss.name=reinforce_pp", "algorithm.advantage.baseline=true"], "reinforce_pp"),
        (["algorithm.loss.name=reinforce_pp", "algorithm.advantage.name=rloo"], "rloo"),
        (["algorithm.advantage.epsilon=1e-3"], "grpo"),
    ],
)
def test_the_advantage_goes_with_the_loss_unless_it_is_named(job_file, overrides, name):
    job = load_job(job_file, overrides)
    assert job.algorithm.advantage.name == name
    assert TrainJobConfig.parse(job_values(job)) == job


def test_the_constant_divisor_is_the_job_files_own(job_file):
    job = load_job(job_file, ["rollouts={prompts_per_step: 3, n: 4, max_tokens: 10}", "algorithm.mini_batches=2"])
    assert job.loss_constant == 3 * 4 / 2 * 10
    assert load_job(job_file, ["algorithm.loss.constant=7"]).loss_constant == 7


def test_a_missing_file_names_the_shipped_ones():
    with pytest.raises(ConfigError, match="quickstart"):
        load_job("no-such-job")


def test_other_files_are_refused(tmp_path):
    for name, text in (("job.json", "{}"), ("list.yaml", "- 1"), ("bad.toml", "="), ("twice.yaml", "a: 1\nb: {c: 1, c: 2}")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError):
            load_job(str(path))


def test_scalars_follow_yaml_1_2():
    text = (
        "{a: 1e-5, b: on, c: no, d: 1:30, e: true, f: -3, g: .5, h: 1_000, i: null, j: ~, k: 2., l: .inf, m: 0x10, n: -1.5E+3}"
    )
    assert parse_yaml(text, where="test") == {
        "a": 1e-5,
        "b": "on",
        "c": "no",
        "d": "1:30",
        "e": True,
        "f": -3,
        "g": 0.5,
        "h": "1_000",
        "i": None,
        "j": None,
        "k": 2.0,
        "l": float("inf"),
        "m": "0x10",
        "n": -1500.0,
    }


def test_overrides_make_missing_branches():
    values: dict = {}
    apply_override(values, "a.b.c=1")
    apply_override(values, "a.b.d = x=y")
    assert values == {"a": {"b": {"c": 1, "d": "x=y"}}}


@pytest.mark.parametrize("backend", [None, "local", "ray"])
def test_a_written_job_reads_back_as_the_same(backend):
    job = load_job("quickstart", ["seed=3"], backend)
    assert TrainJobConfig.parse(parse_yaml(dump_yaml(job_values(job)), where="test")) == job


def test_every_shipped_job_is_valid():
    assert "quickstart" in shipped_configs()
    for name in shipped_configs():
        assert load_job(name).steps >= 1
