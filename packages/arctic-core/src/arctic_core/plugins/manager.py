"""Loads plugins, validates them, and answers lookups by name."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from arctic_core.errors import ArcticError, ConfigError, PluginError
from arctic_core.plugins import hookspecs

if TYPE_CHECKING:
    from arctic_core.backends.base import EngineDefinition
    from arctic_core.losses.base import LossDefinition
    from arctic_core.plugins.hookspecs import CommandDefinition, FrameworkDefinition, ModelPatch
    from arctic_core.rl.tasks import TaskDefinition
    from arctic_core.sync.carriers import CarrierDefinition

GROUP = "arctic.plugins"
HOOKS = tuple(sorted(hookspecs.DEFINITIONS))


@dataclass(frozen=True)
class LoadedPlugin:
    """One entry point and what became of it."""

    name: str
    distribution: str
    """``name version`` of the distribution that ships it."""
    provides: dict[str, tuple[str, ...]]
    """Hook → names of the definitions it returned."""
    error: str | None = None
    """Why it failed to load; a failed plugin provides nothing."""


class PluginRegistry:
    """All definitions of all plugins.

    Args:
        points: Entry points to load, by default those installed.

    A plugin that fails is recorded, not raised: :meth:`require_healthy` raises, and looking up a name that nobody provides
    mentions the failures.
    """

    def __init__(self, points: Sequence[EntryPoint] | None = None) -> None:
        self.plugins: list[LoadedPlugin] = []
        self._definitions: dict[str, dict[str, tuple[Any, str]]] = {hook: {} for hook in HOOKS}
        for point in sorted(
            entry_points(group=GROUP) if points is None else points, key=lambda p: (p.name != "builtin", p.name)
        ):
            self._load(point)

    def _load(self, point: EntryPoint) -> None:
        dist = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        try:
            provided = self._collect(point.name, point.load())
        except (Exception, SystemExit) as error:  # a stranger's module may raise anything at import
            reason = error.message if isinstance(error, ArcticError) else f"{type(error).__name__}: {error}"
            self.plugins.append(LoadedPlugin(point.name, dist, {}, reason))
            return
        for hook, items in provided.items():
            for item in items:
                self._definitions[hook][item.name] = (item, point.name)
        names = {hook: tuple(item.name for item in items) for hook, items in provided.items() if items}
        self.plugins.append(LoadedPlugin(point.name, dist, names))

    def _collect(self, name: str, plugin: object) -> dict[str, list[Any]]:
        """All definitions of one plugin, validated; nothing is kept unless everything is right."""
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(plugin, name=name)
        manager.check_pending()
        for hook in HOOKS:
            if callable(getattr(plugin, hook, None)) and not getattr(manager.hook, hook).get_hookimpls():
                raise PluginError(f"{hook} is not marked with @hookimpl and would be ignored", where=name)
        # Called one by one, not through pluggy, which drops a hook's None without a word.
        return {
            hook: [
                item for impl in getattr(manager.hook, hook).get_hookimpls() for item in self._call(name, hook, impl.function)
            ]
            for hook in HOOKS
        }

    def _call(self, name: str, hook: str, function: Callable[[], object]) -> list[Any]:
        items = function()
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise PluginError(f"{hook} returned {items!r}, not a sequence of definitions", where=name)
        expected = pkgutil.resolve_name(hookspecs.DEFINITIONS[hook]) if items else object
        seen: set[str] = set()
        for item in items:
            if not isinstance(item, expected):
                raise PluginError(f"{hook} returned {item!r}, which is not a {expected.__name__}", where=name)
            if item.name in seen:
                raise PluginError(f"{hook} returned the name {item.name!r} twice", where=name)
            if item.name in self._definitions[hook]:
                other = self._definitions[hook][item.name][1]
                raise PluginError(f"{hook}: the name {item.name!r} is taken by plugin {other!r}", where=name)
            seen.add(item.name)
        return list(items)

    def require_healthy(self) -> None:
        """Raise :class:`PluginError` naming every plugin that failed to load, if any did."""
        failed = [f"{p.name} ({p.distribution}): {p.error}" for p in self.plugins if p.error]
        if failed:
            raise PluginError("; ".join(failed), remedy="fix or uninstall the plugin, or turn plugins_strict off")

    def names(self, hook: str) -> tuple[str, ...]:
        """Sorted names provided for a hook."""
        return tuple(sorted(self._definitions[hook]))

    def all(self, hook: str) -> list[Any]:
        """All definitions provided for a hook."""
        return [item for item, _ in self._definitions[hook].values()]

    def trainer(self, name: str) -> EngineDefinition:
        """Training engine by name; raises :class:`ConfigError` listing the known ones."""
        return self._find("arctic_trainers", "training engine", name)

    def log_prob(self, name: str) -> EngineDefinition:
        """Log-prob engine by name."""
        return self._find("arctic_logprobs", "log-prob engine", name)

    def sampler(self, name: str) -> EngineDefinition:
        """Sampling engine by name."""
        return self._find("arctic_samplers", "sampling engine", name)

    def loss(self, name: str) -> LossDefinition:
        """Loss by name."""
        return self._find("arctic_losses", "loss", name)

    def carrier(self, name: str) -> CarrierDefinition:
        """Weight carrier by name."""
        return self._find("arctic_weight_carriers", "weight carrier", name)

    def task(self, name: str) -> TaskDefinition:
        """Task by name."""
        return self._find("arctic_tasks", "task", name)

    def model_patches(self) -> list[ModelPatch]:
        """Model patches in the order they are applied."""
        return sorted(self.all("arctic_model_patches"), key=lambda patch: (patch.priority, patch.name))

    def frameworks(self) -> list[FrameworkDefinition]:
        """Framework adapters."""
        return self.all("arctic_frameworks")

    def commands(self) -> list[CommandDefinition]:
        """Extra subcommands."""
        return self.all("arctic_cli")

    def _find(self, hook: str, what: str, name: str) -> Any:
        if name in self._definitions[hook]:
            return self._definitions[hook][name][0]
        failed = [f"{p.name}: {p.error}" for p in self.plugins if p.error]
        remedy = f"known: {', '.join(self.names(hook)) or 'none'}"
        if failed:
            remedy += f"; plugins that failed to load: {'; '.join(failed)}"
        raise ConfigError(f"there is no {what} named {name!r}", remedy=remedy)


@functools.cache
def get_registry() -> PluginRegistry:
    """The registry of installed plugins, loaded once per process."""
    return PluginRegistry()
