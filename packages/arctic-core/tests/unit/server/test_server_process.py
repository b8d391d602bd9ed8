"""`arctic serve` as a process: its port, its signals, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from typer.testing import CliRunner

from arctic_core import protocol as p
from arctic_core import wire
from arctic_core.cli.app import build_app

from .support import FRAME, TRAINING, batch, generate, request

MAIN = "from arctic_core.cli.entry import main; main()"
GRPO = p.NamedLoss(name="grpo")


@contextlib.contextmanager
def arctic_serve(tmp_path, *arguments, **options):
    """The process, and a client of it."""
    port_file = tmp_path / "port"
    command = [sys.executable, "-c", MAIN, "serve", "engines=local", "port=0", f"data_root={tmp_path}"]
    process = subprocess.Popen(
        [*command, "--port-file", str(port_file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    try:
        end = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        with httpx.Client(base_url=f"http://127.0.0.1:{int(port_file.read_text())}", timeout=60, trust_env=False) as http:
            yield process, http
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def start(http, model):
    response = http.post("/arctic/v1/jobs", json={"name": "a", "config": {"model_name": model, **TRAINING}})
    assert response.status_code == 202, response.text
    assert http.get("/arctic/v1/jobs/a?wait=30").json()["state"] == "ready"


def post(http, operation, sequence, wait=25):
    frame = wire.encode(request(operation, sequence))
    return http.post("/arctic/v1/jobs/a/call", content=frame, headers={**FRAME, "Arctic-Wait": str(wait)})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_on_a_signal(tmp_path, number):
    with arctic_serve(tmp_path) as (process, http):
        assert http.get("/healthz").json() == {"status": "ok"}
        assert http.get("/readyz").status_code == 200
        process.send_signal(number)
        assert process.wait(10) == 0
        output = process.stdout.read()
        assert f"http://127.0.0.1:{http.base_url.port}" in output
        assert "Traceback" not in output


def test_a_running_call_ends_and_new_work_is_refused_while_it_drains(tiny_model, tmp_path):
    with arctic_serve(tmp_path, f"model_roots=[{tiny_model}]") as (process, http):
        start(http, tiny_model)
        answers = []
        operation = p.ForwardBackward(batch=batch(96, 120), loss=GRPO)
        calling = threading.Thread(target=lambda: answers.append(post(http, operation, 1)))
        calling.start()
        while http.get("/arctic/v1/jobs/a").json()["operations_in_flight"] == 0:
            assert calling.is_alive()
        process.terminate()
        with contextlib.suppress(httpx.HTTPError):  # it may be over already
            while (ready := http.get("/readyz")).status_code == 200:
                pass
            assert ready.status_code == 503
            assert post(http, p.Step(), 2).status_code == 503
            assert http.get("/healthz").status_code == 200
        calling.join(30)
        assert answers[0].status_code == 200
        assert "loss" in wire.decode(answers[0].content, p.Reply).unwrap().metrics
        assert process.wait(30) == 0


def test_a_call_that_outlasts_the_draining_is_ended_with_a_reason(tiny_model, tmp_path):
    with arctic_serve(tmp_path, f"model_roots=[{tiny_model}]", "drain_s=0.3") as (process, http):
        start(http, tiny_model)
        answers = []
        calling = threading.Thread(target=lambda: answers.append(post(http, generate(500, n=200), 1)))
        calling.start()
        while http.get("/arctic/v1/jobs/a").json()["operations_in_flight"] == 0:
            assert calling.is_alive()
        begin = time.monotonic()
        process.terminate()
        calling.join(30)
        assert process.wait(30) == 0
        assert time.monotonic() - begin < 15
        body = wire.decode(answers[0].content, p.Reply).body
        assert (body.kind, body.message) == ("InvalidStateError", "the server is shutting down")


def test_a_second_signal_does_not_wait_for_calls(tiny_model, tmp_path):
    with arctic_serve(tmp_path, f"model_roots=[{tiny_model}]", "drain_s=300") as (process, http):
        start(http, tiny_model)
        assert post(http, generate(500, n=200), 1, wait=0).status_code == 202
        process.terminate()
        time.sleep(0.5)
        assert process.poll() is None  # it drains
        process.terminate()
        assert process.wait(20) == 0


def test_it_ends_with_its_standard_input(tmp_path):
    with arctic_serve(tmp_path, "--watch-stdin", stdin=subprocess.PIPE) as (process, http):
        assert http.get("/healthz").status_code == 200
        process.stdin.close()
        assert process.wait(10) == 0


def arctic(*args, code=1):
    result = CliRunner().invoke(build_app(), ["serve", *args], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_what_cannot_be_served_is_said_in_a_sentence(tmp_path):
    assert "tokens are mandatory" in arctic("host=0.0.0.0")
    assert "unknown key" in arctic("prot=1")
    assert "no file" in arctic("--config", str(tmp_path / "none.yaml"))
    assert "certificate" in arctic("engines=local", "tls_cert=none.pem", "tls_key=none.pem", "port=0")
    with contextlib.closing(httpx.Client()):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as taken:
            assert "cannot listen" in arctic("engines=local", f"port={taken.getsockname()[1]}")


def test_a_file_gives_the_settings_and_the_line_overrides_them(tmp_path):
    (tmp_path / "server.yaml").write_text("host: 0.0.0.0\nengines: local\nport: 70000\n")
    output = arctic("--config", str(tmp_path / "server.yaml"), "port=1")
    assert "tokens are mandatory" in output
    assert "port" not in output.split("tokens")[0]
    assert os.path.exists(tmp_path / "server.yaml")
