"""What clients may not ask for: paths out of the server's folder, code of their choice, the server's own settings."""

from __future__ import annotations

import asyncio
import os

import pytest

from arctic_core import protocol as p
from arctic_core.config.server import SAFE_VLLM_ARGUMENTS, ServerConfig
from arctic_core.errors import ConfigError, DataError, PermissionDeniedError
from arctic_core.server.policy import Policy

from .support import TRAINING, batch, request, serving

OUTSIDE = (
    "../out",
    "/etc/arctic",
    "a/../../out",
    "~/out",
    "link/x",
    "link",
    "inner/link2/x",
    "/proc/self/root/tmp",
    "a/b/../../../x",
)


@pytest.fixture
def root(tmp_path):
    """The server's folder, with symbolic links that lead out of it, and one that stays inside."""
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (root / "link").symlink_to(tmp_path / "out")
    (root / "inner" / "link2").symlink_to("../../out")
    (root / "inside").symlink_to(root / "inner")
    return root


@pytest.mark.parametrize("make", [p.SaveCheckpoint, p.LoadCheckpoint, p.ExportHF])
@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_out_is_refused_before_anything_is_done(root, tmp_path, make, path):
    calls = []

    async def main():
        async with serving(root, answer=lambda request: calls.append(request) or p.Done()) as api:
            await api.start("a", {"model_name": "hub/any", "training_gpus": 1})
            response = await api.post("a", request(make(path=path), 1))
            assert (response.status_code, response.json()["error"]["kind"]) == (403, "PermissionDeniedError"), path
            assert calls == []

    asyncio.run(main())
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_what_is_no_path_is_refused(root, path):
    with pytest.raises(DataError):
        Policy(ServerConfig(data_root=str(root))).path(path, "path")


def test_a_path_inside_reaches_the_service_absolute_and_without_links(root):
    policy = Policy(ServerConfig(data_root=str(root)))
    for given, wanted in (
        ("run/ckpt", root / "run" / "ckpt"),
        (str(root / "run"), root / "run"),
        ("inside/x", root / "inner" / "x"),
        ("a/../b", root / "b"),
        (".", root),
    ):
        allowed = policy.request(request(p.SaveCheckpoint(path=given, keep_last=2), 1)).operation
        assert (allowed.path, allowed.keep_last) == (str(wanted), 2)
    same = request(p.Step(), 1)
    assert policy.request(same) is same


def test_a_checkpoint_goes_into_the_servers_folder_and_comes_back(tiny_model, root):
    async def main():
        async with serving(root, model_roots=(tiny_model,)) as api:
            await api.start("a", {"model_name": tiny_model, **TRAINING})
            await api.call("a", p.ForwardBackward(batch=batch(), loss=p.NamedLoss(name="grpo")), 1)
            await api.call("a", p.Step(), 2)
            saved = await api.call("a", p.SaveCheckpoint(path="run"), 3)
            assert saved.path == str(root / "run" / "step-1")
            loaded = await api.call("a", p.LoadCheckpoint(path="run"), 4)
            assert loaded.step == 1
            # A link that somebody put there since then is followed by the check, not by the engine.
            os.rename(root / "run", root.parent / "elsewhere")
            (root / "run").symlink_to(root.parent / "elsewhere")
            response = await api.post("a", request(p.LoadCheckpoint(path="run"), 5))
            assert response.status_code == 403

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"training": {"allow_loss_import": True}}, "training.allow_loss_import"),
        ({"model_name": "../out"}, "model_name"),
        ({"model_name": "/etc"}, "model_name"),
        ({"model_name": "link"}, "model_name"),
        ({"model_name": "~/model.gguf"}, "model_name"),
        ({"log_prob_gpus": 1, "log_prob": {"model_name": "/etc"}}, "log_prob.model_name"),
        ({"weight_sync": {"carrier": "file", "directory": "../out"}}, "weight_sync.directory"),
        ({"sampling": {"engine": "vllm", "vllm": {"worker_extension_cls": "os.path"}}}, "sampling.vllm"),
        ({"sampling": {"engine": "vllm", "vllm": {"trust_remote_code": True}}}, "sampling.vllm"),
    ],
)
def test_settings_that_clients_may_not_give_are_refused(root, settings, where):
    async def main():
        async with serving(root, answer=lambda request: p.Done()) as api:
            config = {"model_name": "hub/any", "training_gpus": 1, "sampling_gpus": 1, **settings}
            response = await api.post_job("a", config)
            error = response.json()["error"]
            assert (response.status_code, error["kind"], error["where"]) == (403, "PermissionDeniedError", where)
            assert not list(api.app.state.jobs)

    asyncio.run(main())


def test_a_loss_by_import_path_is_not_imported(tiny_model, root, monkeypatch):
    marker = root / "imported"
    (root / "evil_loss.py").write_text(f"open({str(marker)!r}, 'w')\nloss = None\n")
    monkeypatch.syspath_prepend(str(root))

    async def main(sequence, **settings):
        async with serving(root, model_roots=(tiny_model,), **settings) as api:
            config = {"model_name": tiny_model, **TRAINING}
            if settings:
                config["training"] = {**config["training"], "allow_loss_import": True}
            assert (await api.start("a", config))["state"] == "ready"
            operation = p.ForwardBackward(batch=batch(), loss=p.NamedLoss(name="evil_loss:loss"))
            return await api.post("a", request(operation, sequence))

    assert asyncio.run(main(1)).status_code == 403
    assert not marker.exists()
    assert asyncio.run(main(2, allow_loss_import=True)).status_code != 403
    assert marker.exists()  # so the marker would have told


def test_models_come_from_the_servers_folders_or_the_hub(root, tmp_path):
    (root / "tiny").mkdir()
    (tmp_path / "zoo" / "big").mkdir(parents=True)
    policy = Policy(ServerConfig(data_root=str(root), model_roots=(str(tmp_path / "zoo"),)))
    for given, wanted in (
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("gpt2", "gpt2"),
        ("tiny", str(root / "tiny")),
        ("./tiny", str(root / "tiny")),
        (str(tmp_path / "zoo" / "big"), str(tmp_path / "zoo" / "big")),
    ):
        assert policy.model(given, "model_name") == wanted


def test_a_hub_id_does_not_become_a_folder_of_the_servers_process(root, tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PermissionDeniedError):
        Policy(ServerConfig(data_root=str(root))).model("owner/name", "model_name")


def test_the_job_runs_with_the_servers_engines_and_cluster(root):
    given = {"model_name": "hub/any", "training_gpus": 1, "comm_protocol": "http", "job": "x", "http": {}, "connect_to": "y"}
    config = Policy(ServerConfig(engines="local", data_root=str(root))).job_config(given, "mine")
    assert (config.comm_protocol, config.job, config.connect_to) == ("local", "mine", None)
    policy = Policy(ServerConfig(ray={"object_store_bytes": 10**9}, data_root=str(root)))
    config = policy.job_config({**given, "ray": {"cpus_per_rank": 2}}, "mine")
    assert (config.comm_protocol, config.ray.cpus_per_rank, config.ray.object_store_bytes) == ("ray", 2, 10**9)
    for key, value in (("address", "10.0.0.1:6379"), ("dashboard", True), ("object_store_bytes", 10**8)):
        with pytest.raises(PermissionDeniedError, match="cluster"):
            policy.job_config({**given, "ray": {key: value}}, "mine")
    with pytest.raises(ConfigError):
        Policy(ServerConfig(engines="local", data_root=str(root))).job_config({**given, "ray": {"cpus_per_rank": 2}}, "mine")
    with pytest.raises(ConfigError):
        policy.job_config({**given, "ray": [1]}, "mine")


def test_the_owner_of_a_server_may_name_any_path(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = Policy(ServerConfig(data_root=str(root), unrestricted_paths=True))
    assert policy.path("run", "path") == str(tmp_path / "run")
    assert policy.path("/a/b", "path") == "/a/b"
    assert policy.model("/a/b", "model_name") == "/a/b"
    assert policy.model("hub/any", "model_name") == "hub/any"


def test_arguments_of_vllm_that_clients_may_set_only_size_and_tune_it():
    dangerous = (
        "cls",
        "path",
        "plugin",
        "trust",
        "remote",
        "loader",
        "config",
        "tokenizer",
        "url",
        "dir",
        "revision",
        "hf_",
        "fn",
    )
    assert not [name for name in SAFE_VLLM_ARGUMENTS if any(word in name for word in dangerous)]


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_deadline_out_of_range_is_refused(root, deadline):
    with pytest.raises(DataError, match="deadline"):
        Policy(ServerConfig(data_root=str(root))).request(request(p.GetInfo(), 1, deadline_s=deadline))
