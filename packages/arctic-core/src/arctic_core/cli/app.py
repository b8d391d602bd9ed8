"""The ``arctic`` program: its commands, those of plugins, and one way of showing errors."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from rich.text import Text
from typer.core import TyperGroup

from arctic_core.cli import configs, console, doctor, plugins, serve, train
from arctic_core.errors import ArcticError
from arctic_core.plugins.manager import get_registry

INTERRUPTED = 130


class Terminated(KeyboardInterrupt):
    """SIGTERM, ended as cleanly as Ctrl-C."""


class ArcticGroup(TyperGroup):
    """Shows an :class:`ArcticError` as message, place and remedy; ``--debug`` (anywhere on the line) adds the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take ``--debug`` before or after the subcommand's name."""
        if "--debug" in args:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors and interrupts become exit codes."""
        try:
            return super().invoke(ctx)
        except ArcticError as error:
            if ctx.params.get("debug"):
                console.err.print_exception(suppress=[typer])
            show_error(error)
            raise typer.Exit(1) from None
        except KeyboardInterrupt as stop:
            terminated = isinstance(stop, Terminated)
            console.err.print("Terminated." if terminated else "Interrupted.", style="yellow")
            raise typer.Exit(143 if terminated else INTERRUPTED) from None


def show_error(error: ArcticError) -> None:
    """Print an error for a person."""
    line = Text.assemble((type(error).__name__, "bold red"), (f" in {error.where}" if error.where else "", "red"), ": ")
    console.err.print(line.append(error.message), soft_wrap=True)
    if error.remedy:
        console.err.print(Text.assemble(("  → ", "bold green"), error.remedy), soft_wrap=True)


def build_app() -> typer.Typer:
    """The program with the commands of all plugins."""
    app = typer.Typer(
        cls=ArcticGroup,
        name="arctic",
        help="One compute backend for LLM post-training.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    app.command("train")(train.train)
    app.command("serve")(serve.serve)
    app.command("doctor")(doctor.doctor)
    app.command("plugins")(plugins.plugins)
    app.add_typer(configs.app, name="config", help="Explain every configuration key, or show a job as it would run.")
    for command in get_registry().commands():
        app.add_typer(command.load(), name=command.name, help=command.help or None)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console.out.print(f"arctic-core {version('arctic-core')}", highlight=False)
        raise typer.Exit


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show log messages of level INFO.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    level = logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING
    handler = RichHandler(console=console.err, show_path=debug, rich_tracebacks=debug)
    handler.setLevel(level)
    logger = logging.getLogger("arctic_core")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
