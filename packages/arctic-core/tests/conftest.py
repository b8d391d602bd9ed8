"""Fixtures shared by all tests of arctic-core."""

from __future__ import annotations

import os
import signal

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell lets its background jobs ignore Ctrl-C, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random two-layer Qwen3 with untied embeddings."""
    from arctic_core.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with tied embeddings."""
    from arctic_core.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny-tied"), seed=1, tie_embeddings=True)
