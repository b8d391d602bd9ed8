"""The hooks a plugin may implement. Built-in parts use the same ones (:mod:`arctic_core.plugins.builtin`).

A plugin is a module (or object) named by an entry point of the group ``arctic.plugins``:

    [project.entry-points."arctic.plugins"]
    my_plugin = "my_package.arctic_plugin"

It marks functions with :data:`hookimpl`. Every hook returns a sequence of definitions of the hook's own type; names must be
unique over all plugins. Unknown hooks, wrong arguments, a hook that lacks the mark and anything else returned fail at
load, with the plugin's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from arctic_core.backends.base import EngineDefinition
    from arctic_core.losses.base import LossDefinition
    from arctic_core.rl.tasks import TaskDefinition
    from arctic_core.sync.carriers import CarrierDefinition

PROJECT = "arctic"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

#: Hook → ``module:class`` of the definitions it returns; resolved only when a plugin returns one.
DEFINITIONS = {
    "arctic_trainers": "arctic_core.backends.base:EngineDefinition",
    "arctic_logprobs": "arctic_core.backends.base:EngineDefinition",
    "arctic_samplers": "arctic_core.backends.base:EngineDefinition",
    "arctic_losses": "arctic_core.losses.base:LossDefinition",
    "arctic_weight_carriers": "arctic_core.sync.carriers:CarrierDefinition",
    "arctic_frameworks": "arctic_core.plugins.hookspecs:FrameworkDefinition",
    "arctic_model_patches": "arctic_core.plugins.hookspecs:ModelPatch",
    "arctic_tasks": "arctic_core.rl.tasks:TaskDefinition",
    "arctic_cli": "arctic_core.plugins.hookspecs:CommandDefinition",
}


@dataclass(frozen=True)
class ModelPatch:
    """A change to a freshly loaded model. Patches run in order of ``(priority, name)`` and must be idempotent."""

    name: str
    applies: Callable[[Any], bool]
    """``applies(model)``: whether this ``transformers`` model is concerned."""
    apply: Callable[[Any], None]
    """``apply(model)`` changes it in place."""
    priority: int = 100


@dataclass(frozen=True)
class FrameworkDefinition:
    """An RL framework adapter describing itself."""

    name: str
    host_distribution: str
    """Distribution of the framework, e.g. ``"trl"``."""
    host_range: str
    """Supported versions as a PEP 440 specifier."""
    launch: str
    """The command a user types."""
    self_check: Callable[[], str | None]
    """Returns what is wrong, or ``None``."""


@dataclass(frozen=True)
class CommandDefinition:
    """A subcommand of the ``arctic`` program."""

    name: str
    load: Callable[[], Any]
    """Returns a ``typer.Typer`` application."""
    help: str = ""


@hookspec
def arctic_trainers() -> Sequence[EngineDefinition]:  # type: ignore[empty-body]
    """Training engines."""


@hookspec
def arctic_logprobs() -> Sequence[EngineDefinition]:  # type: ignore[empty-body]
    """Log-prob engines."""


@hookspec
def arctic_samplers() -> Sequence[EngineDefinition]:  # type: ignore[empty-body]
    """Sampling engines."""


@hookspec
def arctic_losses() -> Sequence[LossDefinition]:  # type: ignore[empty-body]
    """Named losses."""


@hookspec
def arctic_weight_carriers() -> Sequence[CarrierDefinition]:  # type: ignore[empty-body]
    """Ways for weights to reach a sampler."""


@hookspec
def arctic_frameworks() -> Sequence[FrameworkDefinition]:  # type: ignore[empty-body]
    """RL framework adapters."""


@hookspec
def arctic_model_patches() -> Sequence[ModelPatch]:  # type: ignore[empty-body]
    """Changes to freshly loaded models."""


@hookspec
def arctic_tasks() -> Sequence[TaskDefinition]:  # type: ignore[empty-body]
    """Tasks (prompts with verifiable answers) of ``arctic train``."""


@hookspec
def arctic_cli() -> Sequence[CommandDefinition]:  # type: ignore[empty-body]
    """Subcommands of ``arctic``."""
