"""The reward shown in examples/quickstart does what its page says."""

import importlib.util
from pathlib import Path

import pytest

from arctic_core.rl.tasks import TaskItem

SOURCE = Path(__file__).parents[4] / "examples" / "quickstart" / "terse.py"


def test_the_right_number_alone_is_worth_one():
    spec = importlib.util.spec_from_file_location("terse", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    item = TaskItem((), "12")
    assert module.right_and_short("12", item) == 1.0
    assert module.right_and_short("It is 12.", item) == pytest.approx(1.0 - 0.02 * 7)
    assert module.right_and_short("12 or 13", item) == 0.0
    assert module.right_and_short("x" * 100 + "12", item) == 0.1
