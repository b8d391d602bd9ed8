"""Any dataset of `reasoning-gym <https://github.com/open-thought/reasoning-gym>`_ as a task.

The dataset makes the questions and judges the answers; this module draws items by ``(seed, step)`` and picks the answer
out of a completion.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from arctic_core.config import ConfigModel
from arctic_core.errors import ConfigError, MissingExtraError
from arctic_core.rl.tasks import TaskItem, chat, derive_seed, last_number

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymOptions(ConfigModel):
    """Options of the ``reasoning_gym`` task."""

    dataset: str
    """Name of the dataset, e.g. ``basic_arithmetic``."""
    config: dict[str, Any] = Field({})
    """The dataset's own options; ``seed`` and ``size`` are set here below."""
    size: int = Field(100_000, ge=1)
    """Questions in the dataset; a run goes through them in order and starts over at the end."""
    system_prompt: str | None = None
    """System message; null sends none."""
    answer: Literal["text", "last_number", "tag"] = "text"
    """What of a completion is the answer: all of it, its last number, or what stands in the last ``<answer>`` tag."""
    partial_credit: bool = True
    """Keep the dataset's scores between 0 and 1; false counts them as 0."""
    bare_bonus: float = Field(0.0, ge=0)
    """Extra reward for a completion that holds the extracted answer and nothing else."""


class ReasoningGymTask:
    """Procedural, verifiable questions."""

    def __init__(self, options: ReasoningGymOptions) -> None:
        self.options = options
        self._datasets: dict[int, Any] = {}
        self._dataset(0)  # wrong options fail now, not at the first step

    def prompts(self, seed: int, step: int, count: int) -> list[TaskItem]:
        """Items ``step * count`` and on of the dataset that ``seed`` makes."""
        dataset = self._dataset(seed)
        entries = [dataset[(step * count + i) % self.options.size] for i in range(count)]
        return [
            TaskItem(chat(entry["question"], self.options.system_prompt), entry["answer"], {"entry": entry, "seed": seed})
            for entry in entries
        ]

    def reward(self, completion: str, item: TaskItem) -> float:
        """The dataset's score of the extracted answer, 0 to 1, and the bonus for a bare answer."""
        answer = self._extract(completion)
        if answer is None:
            return 0.0
        value = float(self._dataset(item.metadata["seed"]).score_answer(answer, item.metadata["entry"]))
        if value < 1.0 and not self.options.partial_credit:
            value = 0.0
        return value + (self.options.bare_bonus if completion.strip() == answer else 0.0)

    def _extract(self, completion: str) -> str | None:
        if self.options.answer == "last_number":
            return last_number(completion)
        if self.options.answer == "tag":
            found = _TAGGED.findall(completion)
            return found[-1].strip() if found else None
        return completion.strip()

    def _dataset(self, seed: int) -> Any:
        if seed not in self._datasets:
            gym = _reasoning_gym()
            # The library seeds item i with seed + i: a spread seed keeps the questions of seeds 0 and 1 apart.
            derived = {"seed": derive_seed("reasoning_gym", seed), "size": self.options.size}
            try:
                self._datasets[seed] = gym.create_dataset(self.options.dataset, **self.options.config, **derived)
            except (ValueError, TypeError, AssertionError) as error:
                raise ConfigError(
                    f"reasoning-gym refuses the dataset {self.options.dataset!r}: {error}",
                    where="task.options",
                    remedy="see the dataset's config class in reasoning_gym for its options",
                ) from error
        return self._datasets[seed]


def create_reasoning_gym(options: Mapping[str, Any]) -> ReasoningGymTask:
    """The ``reasoning_gym`` task from plain options."""
    return ReasoningGymTask(ReasoningGymOptions.parse(dict(options), where="task.options"))


def _reasoning_gym() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a package it imports, compiled for the first time
            import reasoning_gym
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the reasoning_gym task needs the package {error.name!r}", remedy='pip install "arctic-core[cpu]"'
        ) from error
    return reasoning_gym
