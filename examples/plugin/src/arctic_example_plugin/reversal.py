"""A task: write a string of letters backwards. The reward is the part of the letters in their right place."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from arctic_core.config import ConfigModel
from arctic_core.rl.tasks import TaskItem, chat, derive_seed


class ReversalOptions(ConfigModel):
    """Options of the task; an unknown one is an error."""

    length: int = Field(4, ge=1, le=64)
    """Letters in the string."""


# --8<-- [start:task]
class ReversalTask:
    """Implements :class:`arctic_core.rl.tasks.Task`."""

    def __init__(self, options: ReversalOptions) -> None:
        self.options = options

    def prompts(self, seed: int, step: int, count: int) -> list[TaskItem]:
        """The same strings for the same ``(seed, step)``, on any machine: a resumed run goes on where it was."""
        rng = random.Random(derive_seed("reversal", seed, step))
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=self.options.length)) for _ in range(count)]
        return [TaskItem(chat(f"Write {word} backwards.", "Reply with the letters only."), word[::-1]) for word in words]

    def reward(self, completion: str, item: TaskItem) -> float:
        """Between 0 and 1. Characters too many count against it."""
        given = completion.strip()
        right = sum(a == b for a, b in zip(given, item.answer, strict=False))
        return right / max(len(given), len(item.answer))


# --8<-- [end:task]


def create_reversal(options: Mapping[str, Any]) -> ReversalTask:
    """The task from the plain options of a job file."""
    return ReversalTask(ReversalOptions.parse(dict(options), where="task.options"))
