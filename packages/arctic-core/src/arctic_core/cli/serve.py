"""``arctic serve``: the HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from arctic_core.cli import console
from arctic_core.config.server import ServerConfig
from arctic_core.errors import MissingExtraError
from arctic_core.rl.config_file import apply_override, read_values


def serve(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set over the file, e.g. port=0.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Server file (YAML or TOML).")] = None,
    port_file: Annotated[Path | None, typer.Option(help="File that gets the port once the server answers.")] = None,
    watch_stdin: Annotated[
        bool, typer.Option("--watch-stdin", help="End at once when standard input ends, as it does with the parent.")
    ] = False,
) -> None:
    """Serve jobs over HTTP until SIGTERM or Ctrl-C; running calls then get drain_s seconds to end in."""
    values: dict[str, Any] = {}
    if config is not None:
        values, _ = read_values(str(config))
    for override in overrides or ():
        apply_override(values, override)
    parsed = ServerConfig.parse(values, where=str(config) if config else "arctic serve")
    try:
        from arctic_core.server.run import serve as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("arctic_core"):
            raise
        raise MissingExtraError(
            f"arctic serve needs the package {error.name!r}", remedy='pip install "arctic-core[server]"'
        ) from error
    console.quiet_libraries()
    run(
        parsed,
        port_file=port_file,
        announce=lambda url: console.out.print(f"Arctic listens on {url}", highlight=False, soft_wrap=True),
        watch_stdin=watch_stdin,
    )
