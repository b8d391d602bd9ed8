"""Fixtures of the end-to-end tests: real Ray, DeepSpeed and vLLM on a tiny model."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from arctic_core import ArcticRLClientConfig

MARK = "ARCTIC_TEST_MARK"


@pytest.fixture
def ray_config(tiny_model: str) -> Callable[..., ArcticRLClientConfig]:
    """A factory of configurations for a tiny job over Ray on CPU, in float32."""

    def make(**changes) -> ArcticRLClientConfig:
        values: dict[str, Any] = {
            "model_name": tiny_model,
            "comm_protocol": "ray",
            "training_gpus": 1,
            "sampling_gpus": 1,
            "device": "cpu",
            "dtype": "float32",
            "deadlines": {"start": 240, "request": 60, "stop": 15},
        }
        if changes.get("training_gpus", 1):
            values["training"] = {"optimizer": {"lr": 1e-2}}
        if changes.get("sampling_gpus", 1):
            values["max_seq_len"] = 128
            values["sampling"] = {"kv_cache_gib": 0.25, "max_num_seqs": 32}
            values["deadlines"]["drain"] = 20
        return ArcticRLClientConfig.parse({**values, **changes})

    return make


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[psutil.Process]]]:
    """Marks every process started in the test; yields a function that lists those alive, and fails if any outlives it.

    The mark travels in the environment, so a process cannot shake it off by leaving its parent.
    """
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
    left = wait_until_gone(alive, seconds=30)
    names = [process.name() for process in left]
    for process in left:
        process.kill()
    assert not names, f"left running: {names}"


def wait_until_gone(alive: Callable[[], list[psutil.Process]], *, seconds: float) -> list[psutil.Process]:
    """What is still alive after at most that long."""
    end = time.monotonic() + seconds
    while (left := alive()) and time.monotonic() < end:
        time.sleep(0.2)
    return left
