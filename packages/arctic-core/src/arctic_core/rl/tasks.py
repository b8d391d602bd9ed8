"""Tasks: where prompts come from and what an answer is worth. Needs the standard library only.

A task is a pure function of ``(seed, step)``: the same seed and step give the same prompts on any machine, so that a
resumed run goes on as if it had never stopped. A plugin brings its own through the ``arctic_tasks`` hook.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from pydantic import Field

from arctic_core.config import ConfigModel
from arctic_core.errors import ConfigError, RewardError

ChatMessage = dict[str, str]
"""``{"role": ..., "content": ...}``."""


@dataclass(frozen=True)
class TaskItem:
    """One prompt with what is needed to judge its answers."""

    messages: tuple[ChatMessage, ...]
    """The conversation up to the assistant's turn."""
    answer: Any
    """The right answer, in whatever form the reward understands."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything else the reward wants to know."""


RewardFunction = Callable[[str, TaskItem], float | None]
"""``reward(completion_text, item)``; special tokens are not part of the text. ``None`` says that the sample failed, for which a
job must be prepared (``algorithm.drop_failed_samples``)."""


class Task(Protocol):
    """A source of prompts with a verifiable reward."""

    def prompts(self, seed: int, step: int, count: int) -> Sequence[TaskItem]:
        """``count`` items, a pure function of the arguments."""
        ...

    def reward(self, completion: str, item: TaskItem) -> float:
        """What the completion is worth: a finite number."""
        ...


@dataclass(frozen=True)
class TaskDefinition:
    """A task as registered through the ``arctic_tasks`` hook."""

    name: str
    create: Callable[[Mapping[str, Any]], Task]
    """Builds the task from its options; raises :class:`ConfigError` for unknown or wrong ones."""
    description: str = ""
    """One line for ``arctic plugins``."""
    options_model: type[ConfigModel] | None = None
    """Describes the options for ``arctic config explain --task NAME``."""


def derive_seed(*parts: int | str, bits: int = 31) -> int:
    """A seed that depends on all parts, well spread and equal on every machine and Python version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits)


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(text: str) -> str | None:
    """The last number written in a text (``"3 + 4 = 7."`` gives ``"7"``), or ``None``; thousands separators are dropped."""
    found = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    return found[-1] if found else None


class AdditionOptions(ConfigModel):
    """Options of the ``addition`` task."""

    max_operand: int = Field(9, ge=1)
    """Operands are drawn from 0 to this."""
    system_prompt: str | None = "Reply with the number only."
    """System message; null sends none."""
    bare_bonus: float = Field(0.2, ge=0)
    """Extra reward for a completion that is a number and nothing else."""


class AdditionTask:
    """``What is a + b?``: 1 for the right last number, and a bonus for nothing but a number. Needs no package."""

    def __init__(self, options: AdditionOptions) -> None:
        self.options = options

    def prompts(self, seed: int, step: int, count: int) -> list[TaskItem]:
        """Sums of two operands drawn uniformly."""
        rng = random.Random(derive_seed("addition", seed, step))
        items = []
        for _ in range(count):
            a, b = rng.randint(0, self.options.max_operand), rng.randint(0, self.options.max_operand)
            items.append(TaskItem(chat(f"What is {a} + {b}?", self.options.system_prompt), str(a + b)))
        return items

    def reward(self, completion: str, item: TaskItem) -> float:
        """See the class."""
        right = 1.0 if last_number(completion) == item.answer else 0.0
        bare = self.options.bare_bonus if _NUMBER.fullmatch(completion.strip()) else 0.0
        return right + bare


def create_addition(options: Mapping[str, Any]) -> AdditionTask:
    """The ``addition`` task from plain options."""
    return AdditionTask(AdditionOptions.parse(dict(options), where="task.options"))


def chat(question: str, system_prompt: str | None) -> tuple[ChatMessage, ...]:
    """A one-turn conversation."""
    system = ({"role": "system", "content": system_prompt},) if system_prompt else ()
    return (*system, {"role": "user", "content": question})


def load_reward(dotted: str) -> RewardFunction:
    """The function named ``pkg.module:function``, looked up with the current folder on the path.

    Only for names from the user's own job file: importing runs the module's code.

    Raises:
        ConfigError: The name is malformed, or names no function.
    """
    module_name, separator, attribute = dotted.partition(":")
    if not (separator and module_name and attribute):
        raise ConfigError(f"{dotted!r} is not of the form pkg.module:function", where="reward")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"cannot import {module_name!r}: {error}", where="reward", remedy="install it, or start in the folder that holds it"
        ) from error
    finally:
        sys.path.remove(here)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"module {module_name!r} has no function {attribute!r}", where="reward")
    return cast("RewardFunction", found)


def score(reward: RewardFunction, completion: str, item: TaskItem, index: int, *, may_fail: bool = False) -> float | None:
    """One reward, checked; ``None`` where the function says so and ``may_fail`` allows it.

    Raises:
        RewardError: The function raised, or did not return a finite number; names the sample's index in the step's batch.
    """
    try:
        value = reward(completion, item)
    except Exception as error:  # a stranger's function may raise anything
        raise RewardError(f"the reward function raised {type(error).__name__}: {error}", where=f"sample {index}") from error
    if value is None and may_fail:
        return None
    try:
        number = math.nan if value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"the reward is {value!r}, not a finite number", where=f"sample {index}", remedy=f"completion: {completion[:200]!r}"
        )
    return number
