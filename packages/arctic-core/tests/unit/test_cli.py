"""The command line: what it prints, and its exit codes."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from arctic_core.cli import checks
from arctic_core.cli.app import build_app
from arctic_core.cli.explain import describe_type, explain_model
from arctic_core.plugins import manager
from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.config_file import load_job, parse_yaml


def arctic(*args, code=0):
    """Run the program in this process; returns standard output and standard error together."""
    result = CliRunner().invoke(build_app(), [str(arg) for arg in args], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def job_file(tiny_model, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {tiny_model}\ntask: {{name: addition}}\nsteps: 2\n"
        "rollouts: {prompts_per_step: 2, n: 2, max_tokens: 4}\ncheckpoint: {every: 1}\nclient: {max_seq_len: 128}\n"
    )
    return path


def test_help_names_every_command():
    output = arctic("--help")
    for command in ("train", "doctor", "plugins", "config"):
        assert command in output


def test_version():
    assert "arctic-core" in arctic("--version")


def test_plugins_lists_what_is_loaded():
    output = arctic("plugins", "--strict")
    for word in ("builtin", "arctic-core", "deepspeed", "vllm", "grpo", "reasoning_gym", "shared_memory"):
        assert word in output


@pytest.fixture
def broken_plugin(tmp_path, monkeypatch):
    """An installed distribution whose plugin cannot be imported."""
    info = tmp_path / "broken_plugin_dist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin-dist\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[arctic.plugins]\nbroken = no_such_module_of_a_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    manager.get_registry.cache_clear()
    yield
    monkeypatch.undo()
    manager.get_registry.cache_clear()


def test_a_broken_plugin_is_shown_with_its_reason(broken_plugin):
    assert "no_such_module_of_a_plugin" in arctic("plugins")
    output = arctic("plugins", "--strict", code=1)
    assert "broken-plugin-dist 1.0" in output
    assert "PluginError" in output
    output = arctic("doctor", "--no-imports", code=1)
    assert "plugin broken" in output
    assert "to fix" in output


def test_explain_covers_every_key():
    output = arctic("config", "explain")
    for info in explain_model(TrainJobConfig):
        assert info.path in output
        assert info.doc or info.path.endswith(".type"), f"{info.path} has no docstring"


def test_explain_narrows_down():
    output = arctic("config", "explain", "client.training")
    assert "client.training.schedule(cosine).total_steps" in output
    assert "client.training_gpus" not in output
    assert "required" in output
    options = arctic("config", "explain", "--loss", "grpo")
    assert "clip_low" in options
    assert "options.name" not in options
    assert ":attr:" not in options
    advantages = arctic("config", "explain", "algorithm.advantage")
    for key in ("(grpo).epsilon", "(dr_grpo).name", "(rloo).name", "(reinforce_pp).kl_coef"):
        assert f"algorithm.advantage{key}" in advantages
    assert "dataset" in arctic("config", "explain", "--task", "reasoning_gym")
    assert "no_such_key" in arctic("config", "explain", "no_such_key", code=1)


def test_types_read_like_words():
    fields = {info.path: info.type for info in explain_model(TrainJobConfig)}
    assert fields["reward"] == "text | null"
    assert fields["client.training.zero_stage"] == "0 | 1 | 2 | 3"
    assert fields["rollouts.top_p"] == "float (> 0, ≤ 1)"
    assert fields["rollouts.stop"] == "list of text"
    assert describe_type(dict[str, int]) == "mapping"
    assert describe_type(tuple[float, float]) == "[float, float]"


def test_show_prints_a_job_that_loads(job_file):
    shown = parse_yaml(arctic("config", "show", job_file, "seed=4", "--backend", "local"), where="shown")
    assert TrainJobConfig.parse(shown) == load_job(str(job_file), ["seed=4"], "local")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "no-such-file.yaml"], "quickstart"),
        (["train", "quickstart", "stepps=3"], "stepps"),
        (["train", "quickstart", "--resume"], "--output"),
        (["config", "show", "quickstart", "a.=3"], "key.sub=value"),
    ],
)
def test_errors_are_shown_with_a_remedy_and_no_traceback(arguments, named):
    output = arctic(*arguments, code=1)
    assert "ConfigError" in output
    assert named in output
    assert "Traceback" not in output


def test_debug_shows_the_traceback_wherever_it_stands():
    for arguments in (["--debug", "train", "no-such-file"], ["train", "no-such-file", "--debug"]):
        output = arctic(*arguments, code=1)
        assert "Traceback" in output
        assert "there is no file" in output


def test_unknown_options_are_usage_errors():
    arctic("train", "quickstart", "--bakend", "ray", code=2)


def test_train_runs_a_job_and_resumes_it(job_file, tmp_path):
    output = arctic("train", job_file, "--backend", "local", "-o", tmp_path / "run")
    assert "transformers" in output
    assert "Run finished" in output
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "plot.png", "checkpoints"):
        assert (tmp_path / "run" / name).exists()
    assert "--resume" in arctic("train", job_file, "--backend", "local", "-o", tmp_path / "run", code=1)
    assert "all 2 steps" in arctic("train", job_file, "--backend", "local", "-o", tmp_path / "run", "--resume", code=1)
    output = arctic("train", job_file, "--backend", "local", "-o", tmp_path / "run", "--resume", "steps=3", "export=true")
    assert "resumed after step 2" in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.e2e
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_run_cleanly(job_file, tmp_path, signum, code):
    command = "from arctic_core.cli.entry import main; main()"
    arguments = ["train", str(job_file), "steps=100000", "checkpoint.every=0", "-o", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert time.monotonic() < deadline, "no step was made"
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_the_program_says_what_to_install_without_its_extra():
    command = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('typer', 'rich'): raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from arctic_core.cli.entry import main\nmain()"
    )
    result = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert 'pip install "arctic-core[cli]"' in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor_finds_this_environment_usable():
    output = arctic("doctor", "--no-imports")
    for word in ("Python", "packages (base)", "packages [train]", "memory", "disk", "plugins"):
        assert word in output


def test_doctor_checks_a_model(tiny_model):
    assert "one-word chat" in arctic("doctor", "--no-imports", "--model", tiny_model)
    assert "no model at" in arctic("doctor", "--no-imports", "--model", "/no/such/folder", code=1)


def test_a_version_outside_the_range_is_a_failure(monkeypatch):
    monkeypatch.setattr(checks, "installed_version", lambda name: "0.0.1")
    found = list(checks.check_packages(None))
    assert found[0].status == "failure"
    assert "supported" in found[0].detail


def test_a_missing_package_matters_only_where_it_is_needed(monkeypatch):
    real = checks.installed_version
    monkeypatch.setattr(checks, "installed_version", lambda name: None if name in ("vllm", "deepspeed") else real(name))
    statuses = {backend: [c.status for c in checks.check_packages(backend)] for backend in (None, "local", "ray")}
    assert "failure" not in statuses[None]
    assert "failure" not in statuses["local"]
    assert statuses["ray"].count("failure") == 3


def test_doctor_notices_a_vllm_built_for_another_torch(monkeypatch):
    from arctic_kernels import versions

    installed = {"torch": "2.13.0", "vllm": "0.26.0"}
    real = versions.inspect_versions
    monkeypatch.setattr(versions, "inspect_versions", lambda: real(installed.get))
    (found,) = [check for check in checks.check_stack() if check.status == "failure"]
    assert "vllm 0.26.0" in found.detail
    assert found.fix


def test_doctor_names_the_kernels_that_this_machine_would_use(monkeypatch):
    if not torch.cuda.is_available():
        attention, head = checks.check_paths()
        assert (attention.status, head.status) == ("ok", "ok")
        assert "computed once, attention by sdpa (torch " in attention.detail
        assert "on CPU: fastest that can do this; fa4 lacks" in attention.detail
        assert "in chunks by torch" in head.detail
    monkeypatch.setenv("ARCTIC_FOREST_BACKEND", "eager")
    assert "by eager" in next(checks.check_paths()).detail
    monkeypatch.setenv("ARCTIC_FOREST_BACKEND", "fa5")
    (attention, _) = checks.check_paths()
    assert (attention.status, "'fa5'" in attention.detail) == ("warning", True)
    assert "unset ARCTIC_FOREST_BACKEND" in attention.fix


@pytest.mark.parametrize(
    ("backend", "reason", "status", "words"),
    [
        ("flash", "fastest that can do this; fa4 lacks the package flash-attn-4", "ok", "fa4 lacks the package"),
        (
            "eager",
            "fastest that can do this; flex lacks the package triton",
            "note",
            "zorro=auto computes every sample on its own",
        ),
        ("eager", "asked for by ARCTIC_FOREST_BACKEND", "ok", "computed once"),
    ],
)
def test_doctor_says_what_a_gpu_lacks(backend, reason, status, words):
    report = {"device": "a GPU", "gpu": True, "refused": None, "attention": backend, "reason": reason, "version": "torch 2"}
    check = checks._check_attention(report)
    assert check.status == status
    assert words in check.detail
    assert f"by {backend} (torch 2) on a GPU" in check.detail
