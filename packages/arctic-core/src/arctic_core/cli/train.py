"""``arctic train``: the main job."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from arctic_core.cli import console
from arctic_core.cli.progress import TrainView
from arctic_core.config import ArcticRLClientConfig
from arctic_core.errors import ConfigError
from arctic_core.rl.config_file import load_job


class Backend(StrEnum):
    """Where the engines run."""

    local = "local"
    ray = "ray"


JobFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="Job file (YAML or TOML), or the name of a shipped one: quickstart.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set over the file, e.g. rollouts.n=16.")
]
BackendOption = Annotated[
    Backend | None,
    typer.Option(help="local: in this process, needs no Ray, vLLM or DeepSpeed. ray: DeepSpeed and vLLM. Default: the file's."),
]


def train(
    config: JobFile,
    overrides: Overrides = None,
    backend: BackendOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run; by default runs/NAME-TIME.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint in --output.")] = False,
) -> None:
    """Train a model with reinforcement learning as a job file says."""
    job = load_job(config, overrides or (), backend.value if backend else None)
    if resume and output is None:
        raise ConfigError("--resume needs the run's folder", remedy="add --output FOLDER")
    if output is None:
        output = Path("runs") / f"{Path(config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    console.quiet_libraries()
    with _clean_termination() as catch_again, TrainView(job) as view:
        from arctic_core.client import ArcticRLClient, create_arctic_rl_client
        from arctic_core.rl.job import train as run

        def connect(client_config: ArcticRLClientConfig) -> ArcticRLClient:
            client = create_arctic_rl_client(client_config)
            catch_again()
            return client

        run(job, output, resume=resume, observer=view, connect=connect)


@contextlib.contextmanager
def _clean_termination() -> Iterator[Callable[[], None]]:
    """End on SIGTERM as on Ctrl-C: the client is closed, the files are complete.

    Yields a function that takes the signal back from Ray, which puts a handler of its own in place when it starts: one that
    prints the C++ stack.
    """
    from arctic_core.cli.app import Terminated

    def stop(signum: int, frame: Any) -> None:
        raise Terminated

    def catch() -> None:
        signal.signal(signal.SIGTERM, stop)

    previous = signal.getsignal(signal.SIGTERM)
    catch()
    try:
        yield catch
    finally:
        signal.signal(signal.SIGTERM, previous)
