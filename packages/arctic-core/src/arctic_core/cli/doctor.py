"""``arctic doctor``: is this machine ready, and what to fix where it is not."""

from __future__ import annotations

from typing import Annotated

import typer

from arctic_core.cli import checks, console
from arctic_core.cli.train import BackendOption

_STYLES = {"ok": "[green]ok[/]", "note": "[dim]note[/]", "warning": "[yellow]warning[/]", "failure": "[bold red]failure[/]"}


def doctor(
    backend: BackendOption = None,
    model: Annotated[
        str | None, typer.Option(help="Also load this model's tokenizer (hub id, folder, GGUF file, package:NAME/FILE).")
    ] = None,
    imports: Annotated[bool, typer.Option(help="Import the heavy packages, in a process of their own.")] = True,
) -> None:
    """Check versions, devices, memory, disk and plugins, and say what to fix. Exits with 1 on a failure.

    With --backend, whatever that backend needs and is missing counts as a failure.
    """
    console.quiet_libraries()
    with console.err.status("Looking around"):
        found = list(checks.all_checks(backend.value if backend else None, model, imports))
    made = console.table("", "what", "found")
    for check in found:
        made.add_row(_STYLES[check.status], check.name, check.detail + (f"\n[green]→[/] {check.fix}" if check.fix else ""))
    console.out.print(made)
    failures = sum(check.status == "failure" for check in found)
    if failures:
        console.out.print(f"\n[bold red]{failures} to fix.[/]")
        raise typer.Exit(1)
    console.out.print("\n[green]Ready.[/]")
