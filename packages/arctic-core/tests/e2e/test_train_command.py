"""``arctic train`` over Ray with DeepSpeed and vLLM: it runs, resumes, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PROGRAM = "from arctic_core.cli.entry import main; main()"
VOLATILE = ("seconds/", "tokens/per_second", "memory/")


@pytest.fixture
def job_file(tiny_model: str, tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {tiny_model}\ntask: {{name: addition}}\nsteps: 2\n"
        "rollouts: {prompts_per_step: 2, n: 2, max_tokens: 6}\ncheckpoint: {every: 1}\n"
        "algorithm: {report_reference_kl: true}\n"
        "client:\n  comm_protocol: ray\n  device: cpu\n  max_seq_len: 128\n  training: {optimizer: {lr: 1e-3}}\n"
        "  sampling: {kv_cache_gib: 0.25, max_num_seqs: 16}\n  deadlines: {start: 240, request: 60, drain: 20, stop: 15}\n"
    )
    return str(path)


def start(*arguments: str) -> subprocess.Popen[str]:
    """The program as a terminal starts it: in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0, timeout: float = 300) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_it_runs_and_a_resumed_run_equals_it(job_file: str, tmp_path: Path, marked) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    output = finish(start(job_file, "-o", str(whole)))
    assert "deepspeed" in output
    assert "vllm" in output
    finish(start(job_file, "-o", str(parts), "steps=1"))
    finish(start(job_file, "-o", str(parts), "--resume"))
    stable = [
        [{key: value for key, value in line.items() if not key.startswith(VOLATILE)} for line in lines_of(run)]
        for run in (whole, parts)
    ]
    assert stable[0] == stable[1]
    assert (whole / "samples.jsonl").read_text() == (parts / "samples.jsonl").read_text()
    for line in stable[0]:
        assert line["mismatch/max_abs_diff"] <= 1e-4


@pytest.mark.parametrize(
    ("moment", "signum", "code"),
    [("starting", signal.SIGINT, 130), ("training", signal.SIGINT, 130), ("training", signal.SIGTERM, 143)],
)
def test_a_signal_ends_it_cleanly(job_file: str, tmp_path: Path, marked, moment: str, signum: int, code: int) -> None:
    run = tmp_path / "run"
    process = start(job_file, "-o", str(run), "steps=100000", "checkpoint.every=0")
    deadline = time.monotonic() + 240
    ready = (run / "metrics.jsonl").exists if moment == "training" else lambda: len(psutil.Process(process.pid).children()) > 0
    while not ready():
        assert time.monotonic() < deadline, "nothing happened"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)  # a terminal signals the whole group
    else:
        process.send_signal(signum)
    output = finish(process, code=code, timeout=90)
    assert "Traceback" not in output
    assert "received at time" not in output, "Ray's own handler printed a C++ stack"
    assert ("Interrupted" if signum == signal.SIGINT else "Terminated") in output
    if moment == "training":
        assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    # `marked` checks that no process outlives the test
