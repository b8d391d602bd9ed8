"""The two consoles of the program: results go to standard output, everything else to standard error."""

from __future__ import annotations

import logging
import os

from rich.console import Console
from rich.table import Table

out = Console()
err = Console(stderr=True)


def table(*columns: str, title: str | None = None) -> Table:
    """A table in the program's style."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds for people: ``8.2 s``, ``3 min 05 s``, ``2 h 04 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def quiet_libraries() -> None:
    """Keep other libraries' progress bars and start-up notes out of ours; a user's own settings stay."""
    for name, value in {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("ray._private", "DeepSpeed"):  # Ray sets the level of "ray" itself when it is imported
        logging.getLogger(name).setLevel(logging.ERROR)
