"""The ``arctic`` program's entry point, which also works (and says what to install) without the ``cli`` extra."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        from arctic_core.cli.app import build_app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich", "click", "yaml"):
            raise
        sys.stderr.write(f'arctic: the command line needs the package {error.name!r}\n  → pip install "arctic-core[cli]"\n')
        raise SystemExit(1) from None
    build_app()()
