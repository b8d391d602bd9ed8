"""What names a loss, the loss it names, and what a batch adds to its divisor. Needs no engine."""

from __future__ import annotations

import pkgutil
from typing import Any

import numpy as np

from arctic_core.config.base import ConfigModel
from arctic_core.data import Batch
from arctic_core.errors import ConfigError, DataError
from arctic_core.losses.base import LossDefinition, PreparedLoss
from arctic_core.plugins.manager import PluginRegistry, get_registry
from arctic_core.protocol import NamedLoss

LossLike = NamedLoss | str | ConfigModel
"""A loss as a caller gives it: whole, by name with its defaults, or as its options (a model of
:data:`arctic_core.config.losses.AnyLossConfig`, or of a plugin that tells its losses apart by ``name``)."""


class NoOptions(ConfigModel):
    """The options of a loss that has none."""


def named_loss(loss: LossLike, where: str = "loss") -> NamedLoss:
    """The message that asks an engine for a loss.

    Raises:
        DataError: It is nothing that names a loss, or its options hold more than plain values.
    """
    if isinstance(loss, NamedLoss):
        return loss
    if isinstance(loss, str):
        return NamedLoss(name=loss)
    name = getattr(loss, "name", None)
    if not isinstance(loss, ConfigModel) or not isinstance(name, str):
        got = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
        raise DataError(
            f"expected a NamedLoss, a name or the options of a loss, got {got}",
            where=where,
            remedy='e.g. "grpo" or GRPOLossConfig(clip_high=0.28)',
        )
    options = loss.model_dump(exclude={"name"})
    for key, value in options.items():
        if not isinstance(value, bool | int | float | str | None):
            raise DataError(f"option {key!r} is a {type(value).__name__}, not a plain value", where=where)
    return NamedLoss(name=name, options=options)


def find_loss(name: str, *, registry: PluginRegistry | None = None, allow_import: bool = False) -> LossDefinition:
    """A loss by name: a built-in one, a plugin's, or ``package.module:attribute``.

    The attribute is a :class:`~arctic_core.losses.base.LossDefinition`, or a function ``(LossInputs, config) -> LossOutput``
    without options that reads the policy's log-probs and whatever fields the batch has, normalised by ``token``.

    Args:
        name: What a caller asked for.
        registry: Plugins; the installed ones by default.
        allow_import: Whether a name may make this process import a module (``training.allow_loss_import``). Nothing is
            imported otherwise.

    Raises:
        ConfigError: Nobody provides the loss, it may not be imported, or what is imported is no loss.
    """
    registry = get_registry() if registry is None else registry
    if ":" not in name or name in registry.names("arctic_losses"):
        return registry.loss(name)
    if not allow_import:
        raise ConfigError(
            "this job does not import losses by dotted name",
            where=f"loss {name!r}",
            remedy="set training.allow_loss_import where the job is configured, or register the loss as a plugin",
        )
    found = _import(name)
    if isinstance(found, LossDefinition):
        return found
    if not callable(found) or isinstance(found, type):
        raise ConfigError(
            f"is a {type(found).__name__}, neither a LossDefinition nor a function (LossInputs, config) -> LossOutput",
            where=f"loss {name!r}",
        )
    compute: Any = found
    return LossDefinition(name, NoOptions, compute)


def count_divisor(batch: Batch, prepared: PreparedLoss) -> float:
    """What a batch's summed loss is divided by on its own: its trained tokens, its sequences with one, or the constant."""
    if prepared.normalization == "constant":
        assert prepared.constant is not None
        return prepared.constant
    trained = [int(np.count_nonzero(mask)) for mask in batch.split(batch.mask)]
    return float(sum(trained) if prepared.normalization == "token" else sum(n > 0 for n in trained))


def _import(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # a stranger's module may raise anything at import
        raise ConfigError(
            f"cannot be imported: {type(error).__name__}: {error}",
            where=f"loss {name!r}",
            remedy="name it package.module:attribute, of a module that is installed where the trainer runs",
        ) from error
