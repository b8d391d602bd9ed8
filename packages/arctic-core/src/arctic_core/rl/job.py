"""One training job from its configuration to its files: check, start engines, train, report, stop.

Everything that can be wrong without an engine (task, reward, loss options, tokenizer, output folder) is checked before
one is started. However the job ends, the client is closed and the summary says how.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arctic_core.client import ArcticRLClient, create_arctic_rl_client
from arctic_core.config import ArcticRLClientConfig
from arctic_core.config.advantages import ReinforcePPAdvantageConfig
from arctic_core.errors import ConfigError
from arctic_core.losses.base import LossDefinition, PreparedLoss, prepare_loss
from arctic_core.losses.named import find_loss
from arctic_core.models.resolve import resolve_model
from arctic_core.plugins.manager import PluginRegistry, get_registry
from arctic_core.protocol import NamedLoss
from arctic_core.rl.config import TrainJobConfig
from arctic_core.rl.loop import Recipe, TrainLoop, find_resume_point
from arctic_core.rl.observe import Observer, Silent
from arctic_core.rl.plot import plot_run
from arctic_core.rl.prompts import ChatTokenizer, locate_model
from arctic_core.rl.report import RunFolder, Status, Summary, open_run, summarize
from arctic_core.rl.tasks import load_reward

logger = logging.getLogger(__name__)

DEFAULT_TEACHER_TOPK = 16

Connect = Callable[[ArcticRLClientConfig], ArcticRLClient]


def train(
    config: TrainJobConfig,
    output: str | Path,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    connect: Connect = create_arctic_rl_client,
) -> Summary:
    """Run a job to its end in the folder ``output``.

    Args:
        config: The job.
        output: Folder of the run; see :mod:`arctic_core.rl.report` for its files.
        resume: Go on from the folder's latest checkpoint (from the start where none was due yet).
        observer: Told of progress.
        connect: Makes the client; any that speaks the protocol will do.

    Raises:
        ConfigError: The job contradicts itself, or the folder's run.
        InvalidStateError: All steps of the run to resume are done; its files are as they were.
        KeyboardInterrupt: The run was interrupted; summary written and client closed by then.
    """
    watcher = observer or Silent()
    began = time.perf_counter()
    watcher.preparing("model")
    model = resolve_model(locate_model(config.model))
    recipe = make_recipe(config, model)
    folder = open_run(output, config, resume=resume)
    point = find_resume_point(folder, config) if resume else None
    watcher.preparing("engines")
    client = connect(_client_config(recipe, model))
    try:
        loop = TrainLoop(recipe, client, folder, watcher)
        if point is not None:
            watcher.preparing("checkpoint")
            loop.resume_from(point)
        info = client.info()
        watcher.started(info, folder, loop.completed, config.steps)
        return _drive(loop, client, _Ending(config, folder, watcher, began, loop, info.packages))
    finally:
        client.close()


def make_recipe(config: TrainJobConfig, model: str, registry: PluginRegistry | None = None) -> Recipe:
    """Look up task, reward and loss, and load the tokenizer of the model folder ``model``.

    Raises:
        ConfigError: A name is unknown, an option is, or the loss has no use for what is set.
    """
    plugins = registry or get_registry()
    allow_import = config.client.training.allow_loss_import
    definition = find_loss(config.algorithm.loss.name, registry=plugins, allow_import=allow_import)
    loss = _named_loss(config, definition)
    prepared = prepare_loss(definition, loss)
    for doubt in _doubts(config, prepared):
        logger.warning(doubt)
    task = plugins.task(config.task.name).create(config.task.options)
    recipe = Recipe(
        config=config,
        task=task,
        reward=load_reward(config.reward) if config.reward else task.reward,
        tokenizer=ChatTokenizer(model, config.client.max_seq_len - config.rollouts.max_tokens),
        loss=loss,
        fields=frozenset((*prepared.required, *config.algorithm.advantage.required_fields())),
        teacher_topk=_teacher_topk(config, prepared),
    )
    _check_reference(recipe)
    return recipe


def _doubts(config: TrainJobConfig, prepared: PreparedLoss) -> list[str]:
    """What is allowed, and most likely not meant."""
    found = []
    advantage, rollouts = config.algorithm.advantage, config.rollouts
    absolute = isinstance(advantage, ReinforcePPAdvantageConfig) and not advantage.baseline
    if rollouts.n == 1 and "advantages" in prepared.required and not absolute:
        found.append(f"rollouts.n is 1, and the advantage {advantage.name!r} of a group of one is 0: nothing will be learnt")
    if rollouts.top_p < 1 or rollouts.top_k > 0:
        found.append(
            "rollouts.top_p or top_k cuts the distribution that is sampled: the trainer cannot reproduce its log-probs, "
            "and mismatch/* will show the gap"
        )
    return found


def _named_loss(config: TrainJobConfig, definition: LossDefinition) -> NamedLoss:
    """The job's loss; one normalised by a constant gets the job's."""
    loss = config.algorithm.loss
    normalization = loss.normalization or ("constant" if loss.constant is not None else definition.normalization)
    constant = config.loss_constant if normalization == "constant" else None
    return NamedLoss(name=loss.name, options=loss.options, normalization=normalization, constant=constant)


def _teacher_topk(config: TrainJobConfig, prepared: PreparedLoss) -> int:
    wanted = config.algorithm.teacher_topk
    if "teacher_topk_logprobs" in prepared.required:
        return DEFAULT_TEACHER_TOPK if wanted is None else wanted
    if wanted is not None:
        raise ConfigError(
            f"the loss {config.algorithm.loss.name!r} with these options reads no top-k distribution of a teacher",
            where="algorithm.teacher_topk",
            remedy="remove it, or use it with the loss distill and its option source: topk",
        )
    return 0


def _check_reference(recipe: Recipe) -> None:
    client = recipe.config.client
    if not recipe.wants_reference and (client.reference or client.log_prob_gpus):
        raise ConfigError(
            "no effect, because nothing in this job asks the reference model: neither its loss nor its advantages, and "
            "algorithm.report_reference_kl is false",
            where="client.log_prob_gpus" if client.log_prob_gpus else "client.reference",
            remedy="leave it out, or set algorithm.report_reference_kl or a kl_coef",
        )


def _client_config(recipe: Recipe, model: str) -> ArcticRLClientConfig:
    reference = recipe.config.client.reference or recipe.wants_reference
    return recipe.config.client.model_copy(update={"model_name": model, "reference": reference})


def _drive(loop: TrainLoop, client: ArcticRLClient, ending: _Ending) -> Summary:
    """Run the loop and write how it ended, whichever way that is."""
    try:
        loop.run()
        if ending.config.export:
            ending.observer.preparing("export")
            ending.observer.saved(Path(client.export_hf(str(ending.folder.model)).path))
    except KeyboardInterrupt:
        ending.write("interrupted")
        raise
    except Exception as error:
        ending.write("failed", f"{type(error).__name__}: {error}")
        raise
    return ending.write("finished")


@dataclass(frozen=True)
class _Ending:
    """Writes summary and plot."""

    config: TrainJobConfig
    folder: RunFolder
    observer: Observer
    began: float
    loop: TrainLoop
    packages: dict[str, str]

    def write(self, status: Status, error: str | None = None) -> Summary:
        records = self.folder.read_steps()
        first = self.loop.first_step_at
        summary = summarize(
            records,
            self.config,
            status=status,
            seconds=time.perf_counter() - self.began,
            seconds_to_first_step=first - self.began if first else None,
            packages=self.packages,
            error=error,
        )
        self.folder.write_summary(summary)
        if records:
            plot_run(records, self.folder.plot, f"{self.config.task.name} · {Path(self.config.model).stem} · {status}")
        self.observer.ended(summary, self.folder)
        return summary
