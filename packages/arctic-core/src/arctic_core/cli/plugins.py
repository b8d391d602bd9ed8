"""``arctic plugins``: what is loaded, from where, and what failed."""

from __future__ import annotations

from typing import Annotated

import typer

from arctic_core.cli import console
from arctic_core.plugins.manager import get_registry


def plugins(
    strict: Annotated[bool, typer.Option("--strict", help="Exit with an error when a plugin failed to load.")] = False,
) -> None:
    """List plugins, what they provide, and why any of them failed to load."""
    registry = get_registry()
    made = console.table("plugin", "distribution", "kind", "provides")
    for plugin in registry.plugins:
        if plugin.error:
            made.add_row(plugin.name, plugin.distribution, "[red]failed[/]", f"[red]{plugin.error}[/]")
        for i, (hook, names) in enumerate(plugin.provides.items()):
            first = (plugin.name, plugin.distribution) if i == 0 else ("", "")
            made.add_row(*first, hook.removeprefix("arctic_").replace("_", " "), ", ".join(names))
    console.out.print(made)
    if strict:
        registry.require_healthy()
