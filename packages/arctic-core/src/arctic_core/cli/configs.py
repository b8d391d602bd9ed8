"""``arctic config``: every key explained, and jobs shown as they would run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from arctic_core.cli import console
from arctic_core.cli.explain import explain_model
from arctic_core.cli.train import BackendOption, JobFile, Overrides
from arctic_core.config import ConfigModel
from arctic_core.errors import ConfigError
from arctic_core.plugins.manager import get_registry
from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.config_file import dump_yaml, job_values, load_job

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.command()
def explain(
    key: Annotated[str | None, typer.Argument(help="Only this key and those below it, e.g. client.training.")] = None,
    loss: Annotated[str | None, typer.Option(help="Options of this loss (algorithm.loss.options).")] = None,
    task: Annotated[str | None, typer.Option(help="Options of this task (task.options).")] = None,
) -> None:
    """List configuration keys with type, default and meaning."""
    model, prefix = _chosen_model(loss, task)
    hidden = f"{prefix}.name" if loss is not None else ""  # the loss is named one level up
    keys = [info for info in explain_model(model, prefix) if info.path != hidden and (key is None or _below(info.path, key))]
    if not keys:
        raise ConfigError(f"there is no key {key!r}", remedy="`arctic config explain` lists all of them")
    for info in keys:
        default = ("required", "yellow") if info.required else (f"= {info.default}", "cyan")
        console.out.print(Text.assemble((info.path, "bold"), "  ", (info.type, "dim"), "  ", default), soft_wrap=True)
        if info.doc:
            console.out.print(Padding(Text(info.doc), (0, 0, 0, 4)))


@app.command()
def show(config: JobFile, overrides: Overrides = None, backend: BackendOption = None) -> None:
    """Print a job with all defaults filled in, as YAML."""
    text = dump_yaml(job_values(load_job(config, overrides or (), backend.value if backend else None)))
    if console.out.is_terminal:
        console.out.print(Syntax(text, "yaml", background_color="default"))
    else:
        console.out.file.write(text)


def _chosen_model(loss: str | None, task: str | None) -> tuple[type[ConfigModel], str]:
    if loss is not None and task is not None:
        raise ConfigError("give --loss or --task, not both")
    if loss is not None:
        return get_registry().loss(loss).config_model, "algorithm.loss.options"
    if task is not None:
        model = get_registry().task(task).options_model
        if model is None:
            raise ConfigError(f"the task {task!r} does not describe its options")
        return model, "task.options"
    return TrainJobConfig, ""


def _below(path: str, key: str) -> bool:
    """Whether ``path`` is ``key`` or one of its parts; alternatives ``schedule(cosine)`` belong to ``schedule``."""
    return path == key or path.startswith((f"{key.rstrip('.')}.", f"{key}("))
