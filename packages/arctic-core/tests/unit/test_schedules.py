"""Learning-rate schedules."""

import math

import pytest

from arctic_core.config.client import ConstantSchedule, CosineSchedule, LinearSchedule
from arctic_core.optim import learning_rate


def rates(schedule: ConstantSchedule | LinearSchedule | CosineSchedule, steps: int) -> list[float]:
    return [learning_rate(schedule, 2.0, k) for k in range(steps)]


def test_constant() -> None:
    assert rates(ConstantSchedule(), 3) == [2.0, 2.0, 2.0]
    assert rates(ConstantSchedule(warmup_steps=4), 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_to_its_floor_and_stays() -> None:
    schedule = LinearSchedule(type="linear", total_steps=6, warmup_steps=2, min_ratio=0.5)
    assert rates(schedule, 9) == pytest.approx([1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0])


def test_cosine() -> None:
    schedule = CosineSchedule(type="cosine", total_steps=10, warmup_steps=2, min_ratio=0.1)
    actual = rates(schedule, 12)
    assert actual[:3] == [1.0, 2.0, 2.0]
    assert actual[6] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert actual[4] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))))
    assert actual[10] == pytest.approx(0.2)
    assert actual[11] == pytest.approx(0.2)


def test_a_schedule_that_is_all_warm_up() -> None:
    schedule = LinearSchedule(type="linear", total_steps=2, warmup_steps=2)
    assert rates(schedule, 3) == [1.0, 2.0, 0.0]
