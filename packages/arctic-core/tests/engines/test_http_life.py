"""Whose server and whose job it is: owning, joining, leaving, tokens, and what is left when one of the two dies."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from arctic_core import (
    ArcticRLClientConfig,
    EngineDiedError,
    HttpConfig,
    JobNotFoundError,
    ModelNotFoundError,
    SamplingParams,
    TransportError,
    create_arctic_rl_client,
    create_async_arctic_rl_client,
)
from arctic_core.errors import AuthenticationError, ConfigError
from arctic_core.transports import http_api
from arctic_core.transports.http import HttpTransport
from arctic_core.transports.http_server import OwnedServer

from .http_support import http_settings, running_server

MARK = "ARCTIC_TEST_MARK"
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "FIRST_PAUSE_S", 0.02)


@pytest.fixture
def owned(tiny_model: str) -> Callable[..., ArcticRLClientConfig]:
    """Configurations of a client with a server of its own."""

    def make(**http: Any) -> ArcticRLClientConfig:
        return ArcticRLClientConfig(
            model_name=tiny_model,
            comm_protocol="http",
            sampling_gpus=1,
            device="cpu",
            max_seq_len=512,
            deadlines={"start": 120, "request": 60, "stop": 10},
            http={"engines": "local", **http},
        )

    return make


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[OwnedServer]:
    with running_server(tiny_model) as server:
        yield server


@pytest.fixture
def joined(owned: Callable[..., ArcticRLClientConfig], server: OwnedServer) -> Callable[..., ArcticRLClientConfig]:
    """Configurations of a client of a server that runs."""
    return lambda **http: owned().model_copy(update={"http": HttpConfig(**http_settings(server) | http)})


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[psutil.Process]]]:
    """Marks every process started in the test; yields a function that lists those alive, and fails if any outlives it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)

    def alive() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    yield alive
    left = until_gone(alive, seconds=20)
    names = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    assert not names, f"left running: {names}"


def until_gone(alive: Callable[[], list[psutil.Process]], *, seconds: float) -> list[psutil.Process]:
    end = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def run_client(program: str, config: ArcticRLClientConfig) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), config.model_dump_json()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


START = """
    import os, sys, time
    from arctic_core import ArcticRLClientConfig, SamplingParams, create_arctic_rl_client
    config = ArcticRLClientConfig.model_validate_json(sys.argv[1])
    print("starting", flush=True)
    """
READY = """
    client = create_arctic_rl_client(config)
    print(os.path.dirname(client.reconnect_config().http.token_file), flush=True)
    """


# --- a server of one's own ------------------------------------------------------------------------------------------------


def test_it_starts_works_and_leaves_nothing(
    owned: Callable[..., ArcticRLClientConfig], marked: Callable[[], list[psutil.Process]]
) -> None:
    with create_arctic_rl_client(owned()) as client:
        (process,) = marked()
        assert len(client.generate([[1, 2]], SHORT)) == 1
        config = client.reconnect_config()
        folder = Path(str(config.http.token_file)).parent
        assert (folder.stat().st_mode & 0o777, Path(str(config.http.token_file)).stat().st_mode & 0o777) == (0o700, 0o600)
        token = Path(str(config.http.token_file)).read_text()
        assert token not in " ".join(process.cmdline()) + str(process.environ()) + config.model_dump_json()
    assert not marked()
    assert not folder.exists()


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("sys.stdin.read()", id="idle"),
        pytest.param("client.generate([[1]] * 64, SamplingParams(max_tokens=500, ignore_eos=True))", id="at-work"),
        # A child made by fork keeps the server's standard input open.
        pytest.param("os.fork() or (time.sleep(6), os._exit(0)); sys.stdin.read()", id="with-a-forked-child"),
    ],
)
def test_it_dies_with_its_client(
    owned: Callable[..., ArcticRLClientConfig], marked: Callable[[], list[psutil.Process]], then: str
) -> None:
    client = run_client(START + READY + "\n    " + then, owned())
    assert line_of(client) == "starting"
    folder = Path(line_of(client))
    assert (folder / "token").exists()
    time.sleep(0.5)
    client.kill()
    client.wait(10)
    assert not until_gone(marked, seconds=20)
    assert not folder.exists()


@pytest.mark.parametrize("after_s", [0.3, 1.5, 3.0])
def test_ctrl_c_while_it_starts_leaves_nothing(
    owned: Callable[..., ArcticRLClientConfig], marked: Callable[[], list[psutil.Process]], after_s: float
) -> None:
    program = """
    try:
        create_arctic_rl_client(config)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """
    client = run_client(START + program, owned())
    assert line_of(client) == "starting"
    time.sleep(after_s)
    client.send_signal(signal.SIGINT)
    out, _ = client.communicate(timeout=60)
    assert (client.returncode, out) == (0, "interrupted\n")
    assert not until_gone(marked, seconds=5)


def test_a_job_that_cannot_start_leaves_no_server(
    owned: Callable[..., ArcticRLClientConfig], marked: Callable[[], list[psutil.Process]]
) -> None:
    with pytest.raises(ModelNotFoundError):
        create_arctic_rl_client(owned().model_copy(update={"model_name": "/no/such/model"}))
    assert not marked()


def test_its_death_is_a_typed_error(
    owned: Callable[..., ArcticRLClientConfig], marked: Callable[[], list[psutil.Process]]
) -> None:
    with create_arctic_rl_client(owned(retries=2)) as client:
        stream = iter(client.generate_stream([[1]] * 4, SamplingParams(max_tokens=500, ignore_eos=True)))
        (process,) = marked()
        os.kill(process.pid, signal.SIGKILL)
        assert not until_gone(marked, seconds=10)
        for call in (client.info, client.reset_prefix_cache, lambda: list(stream)):
            started = time.monotonic()
            with pytest.raises(EngineDiedError, match="ended by signal 9") as caught:
                call()
            assert time.monotonic() - started < 10
            assert "load its latest checkpoint" in caught.value.remedy
    assert not marked()


# --- somebody else's ------------------------------------------------------------------------------------------------------


JOIN = """
    client = create_arctic_rl_client(config)
    rows = client.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
    print(client.info().job, rows[0][0].token_ids.tolist())
    getattr(client, sys.stdin.readline().strip())()
    """


def test_another_process_joins_leaves_and_shuts_down(
    owned: Callable[..., ArcticRLClientConfig], marked: Callable[[], list[psutil.Process]]
) -> None:
    with create_arctic_rl_client(owned()) as client:
        config = client.reconnect_config()
        expected = f"{config.connect_to} {client.generate([[1, 2]], SHORT)[0][0].token_ids.tolist()}"
        for ending in ("close", "shutdown"):
            other = run_client(START + JOIN, config)
            out, _ = other.communicate(f"{ending}\n", timeout=60)
            assert (other.returncode, out.splitlines()) == (0, ["starting", expected])
            if ending == "close":
                assert client.info().job == config.connect_to
        with pytest.raises((JobNotFoundError, TransportError)):
            create_arctic_rl_client(config.model_copy(update={"connect_to": "nobody"}))
        with pytest.raises(Exception, match=r"stopped|no job") as caught:
            client.info()
        assert type(caught.value).__module__ == "arctic_core.errors"
    assert not marked()


def test_a_server_that_is_restarted_does_not_know_the_job(tiny_model: str, tmp_path: Path) -> None:
    token = "a-token-of-enough-letters"
    (tmp_path / "token").write_text(f"{token}\n")
    first = serve(tmp_path, port=0)
    config = ArcticRLClientConfig(
        model_name=tiny_model,
        comm_protocol="http",
        sampling_gpus=1,
        device="cpu",
        http={"url": first[1], "token_file": str(tmp_path / "token"), "retries": 2},
    )
    with create_arctic_rl_client(config) as client:
        first[0].kill()
        first[0].wait(10)
        with pytest.raises(TransportError, match="did not answer") as caught:
            client.generate([[1]], SHORT)
        assert first[1] in caught.value.where
        second = serve(tmp_path, port=int(first[1].rpartition(":")[2]))
        with pytest.raises(JobNotFoundError):
            client.generate([[1]], SHORT)
    second[0].send_signal(signal.SIGTERM)
    assert second[0].wait(20) == 0


def serve(folder: Path, *, port: int) -> tuple[subprocess.Popen[bytes], str]:
    program = f"""
    from pathlib import Path
    from arctic_core.config.server import ServerConfig
    from arctic_core.server.run import serve
    tokens = [{{"name": "me", "role": "job", "file": {str(folder / "token")!r}}}]
    config = ServerConfig(port={port}, engines="local", tokens=tokens, unrestricted_paths=True)
    serve(config, port_file=Path({str(folder)!r}, "port"))
    """
    (folder / "port").unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    end = time.monotonic() + 60
    while not (folder / "port").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    return process, f"http://127.0.0.1:{int((folder / 'port').read_text())}"


def test_a_start_that_fails_on_a_server_leaves_no_job(joined: Callable[..., ArcticRLClientConfig], server: OwnedServer) -> None:
    with pytest.raises(ModelNotFoundError):
        create_arctic_rl_client(joined().model_copy(update={"model_name": "/no/such/model"}))

    async def main() -> None:
        slow = asyncio.create_task(create_async_arctic_rl_client(joined()))
        await asyncio.sleep(0.2)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    asyncio.run(main())
    assert working_jobs(server) == []


def working_jobs(server: OwnedServer) -> list[str]:
    async def main() -> list[str]:
        api = http_api.HttpApi(HttpConfig(), server.url, server.token_file.read_text())
        answer = await api.exchange("GET", "/jobs")
        await api.close()
        return [job["name"] for job in json.loads(bytes(answer.body)) if job["state"] not in ("failed", "stopped")]

    return asyncio.run(main())


def test_the_lease_is_kept_while_the_loop_is_blocked(joined: Callable[..., ArcticRLClientConfig]) -> None:
    async def main() -> None:
        async with await create_async_arctic_rl_client(joined(lease_s=1.0)) as client:
            time.sleep(3.0)
            assert (await client.info()).job

    asyncio.run(main())


def test_a_job_whose_client_died_is_stopped(joined: Callable[..., ArcticRLClientConfig], server: OwnedServer) -> None:
    client = run_client(START + READY + "\n    sys.stdin.read()", joined(lease_s=1.0))
    assert line_of(client) == "starting"
    assert line_of(client)
    assert len(working_jobs(server)) == 1
    client.kill()
    client.wait(10)
    end = time.monotonic() + 15
    while working_jobs(server) and time.monotonic() < end:
        time.sleep(0.1)
    assert working_jobs(server) == []


# --- tokens ---------------------------------------------------------------------------------------------------------------


def test_the_token_comes_from_a_file_or_the_environment_and_is_never_shown(
    joined: Callable[..., ArcticRLClientConfig],
    server: OwnedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    token = server.token_file.read_text()
    monkeypatch.setenv("MY_TOKEN", f" {token}\n")
    config = joined(token_file=None, token_env="MY_TOKEN")

    async def main() -> None:
        transport = HttpTransport(config)
        await transport.open()
        assert token not in repr(vars(transport)) + repr(transport.reconnect_config())
        await transport.close(shutdown=False)

    asyncio.run(main())
    with create_arctic_rl_client(config) as client:
        assert client.reconnect_config().http == config.http
    wrong = "not-the-token-of-this-server"
    monkeypatch.setenv("MY_TOKEN", wrong)
    (tmp_path / "wrong").write_text(wrong)
    for refused in (config, joined(token_file=str(tmp_path / "wrong")), joined(token_file=None, token_env="UNSET")):
        with pytest.raises(AuthenticationError) as caught:
            create_arctic_rl_client(refused)
        assert caught.value.remedy
        assert wrong not in str(caught.value)
    assert token not in caplog.text
    assert wrong not in caplog.text
    assert working_jobs(server) == []


def test_a_token_that_cannot_be_read_is_refused_before_anything_is_sent(
    joined: Callable[..., ArcticRLClientConfig], tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "two").write_text("one token\nand another")
    for name, reason in (("none", "cannot be read"), ("empty", "is empty"), ("two", "one line")):
        with pytest.raises(ConfigError, match=reason) as caught:
            create_arctic_rl_client(joined(token_file=str(tmp_path / name)))
        assert caught.value.where == "http.token_file"
