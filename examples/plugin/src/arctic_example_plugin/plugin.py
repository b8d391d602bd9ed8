"""What the plugin offers. Arctic imports this module at start, so it must stay light: no torch at import time."""

from __future__ import annotations

from arctic_core.losses.base import LossDefinition
from arctic_core.plugins.hookspecs import hookimpl
from arctic_core.rl.tasks import TaskDefinition
from arctic_example_plugin.positive_only import PositiveOnlyConfig, positive_only
from arctic_example_plugin.reversal import create_reversal


@hookimpl
def arctic_losses() -> list[LossDefinition]:
    return [LossDefinition("positive_only", PositiveOnlyConfig, positive_only, requires=("advantages",))]


@hookimpl
def arctic_tasks() -> list[TaskDefinition]:
    return [TaskDefinition("reversal", create_reversal, "write a string of letters backwards")]
